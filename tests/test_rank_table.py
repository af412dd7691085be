"""rank_tables/: the three tables, the checker, the generator, merge, and the network walk.

The real programs are run as subprocesses; only the fuzz tests import the checker, for volume. hccn_tool
exists on Ascend servers only, so a small fake on PATH stands in for it.
"""
import copy
import importlib.util
import ipaddress
import itertools
import json
import os
import re
import shutil
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

FOLDER = Path(__file__).resolve().parent.parent / "rank_tables"
TOOL = FOLDER / "rank_table.py"
TABLES = {size: FOLDER / f"rank_table_{size}pcs.json" for size in (2, 8, 16)}
REAL_HCCN_TOOL = Path("/usr/local/Ascend/driver/tools/hccn_tool")

FAKE_HCCN_TOOL = r"""#!/bin/bash
# $FAKE/ip_N, ip6_N: card N's addresses. $FAKE/health_N: its answers, one a call, the last one again and
# again; without that file a card is healthy once it has an address to detect. $FAKE/calls: what was asked.
echo "$*" >>"$FAKE/calls"
card=$2
case "${*:3}" in
    "-ip -g")
        [[ -f $FAKE/ip_$card ]] || { echo "Get ipconf failed, because no ip was preset there!"; exit 1; }
        printf 'ipaddr:%s\nnetmask:255.255.255.0\n' "$(<"$FAKE/ip_$card")" ;;
    "-ip -inet6 -g") [[ -f $FAKE/ip6_$card ]] || exit 1
        printf 'ipv6_address:%s\nprefix_length:64\n' "$(<"$FAKE/ip6_$card")" ;;
    "-netdetect -s address "*) [[ ! -f $FAKE/not_root ]] || { echo "permission denied"; exit 1; }
        echo "${*: -1}" >"$FAKE/detect_$card" ;;
    "-net_health -g")
        if [[ -f $FAKE/health_$card ]]; then
            status=$(head -n 1 "$FAKE/health_$card")
            [[ $(wc -l <"$FAKE/health_$card") -eq 1 ]] || sed -i 1d "$FAKE/health_$card"
        else
            status=Init; [[ ! -f $FAKE/detect_$card ]] || status=Success
        fi
        echo "net health status: $status" ;;
    *) echo "unknown command $*"; exit 2 ;;
esac
"""


def run(*arguments: Any, **options: Any) -> subprocess.CompletedProcess:
    """Runs rank_table.py; whatever happens, it must not show a traceback."""
    done = subprocess.run([sys.executable, "-B", TOOL, *map(str, arguments)], capture_output=True, text=True,
                          timeout=60, check=False, **options)
    assert "Traceback" not in done.stderr, done.stderr
    return done


def findings(stderr: str, level: str) -> "list[tuple[str, str]]":
    """(where, what) of each finding of a level; each must come with a mend."""
    lines = [line for line in stderr.splitlines() if line.startswith(f"{level}: ")]
    found = [re.fullmatch(rf"{level}: (\S.*?): (.+); mend: (.+)", line) for line in lines]
    assert all(found), lines
    return [(match.group(1), match.group(2)) for match in found]


def load(size: int) -> "dict[str, Any]":
    return json.loads(TABLES[size].read_text())


def device(table: "dict[str, Any]", server: int, index: int) -> "dict[str, Any]":
    return table["server_list"][server]["device"][index]


@pytest.fixture
def fake(tmp_path: Path) -> "dict[str, str]":
    """An environment whose PATH begins with the fake hccn_tool; its state lies in env["FAKE"]."""
    folder, state = tmp_path / "bin with space", tmp_path / "state"
    folder.mkdir()
    state.mkdir()
    (folder / "hccn_tool").write_text(FAKE_HCCN_TOOL)
    (folder / "hccn_tool").chmod(0o755)
    return {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}", "FAKE": str(state),
            "PYTHON": sys.executable, "NET_HEALTH_SECONDS": "3"}


def without_hccn_tool(tmp_path: Path) -> "dict[str, str]":
    """An environment with bash, python and little else."""
    if REAL_HCCN_TOOL.exists():
        pytest.skip(f"this machine has the real {REAL_HCCN_TOOL}")
    folder = tmp_path / "bare"
    folder.mkdir()
    for name in ("bash", "dirname"):
        (folder / name).symlink_to(shutil.which(name))
    return {"PATH": str(folder), "PYTHON": sys.executable}


# ---------------------------------------------------------------------- good tables

@pytest.mark.parametrize("size", TABLES)
@pytest.mark.parametrize("chip", [None, "910A", "910B"])
def test_the_three_tables_pass_without_a_warning(size, chip):
    done = run("check", TABLES[size], "--size", size, *(["--chip", chip] if chip else []))
    assert (done.returncode, done.stderr) == (0, "")
    assert f": ok, {size} ranks on {size // 16 + 1} server" in done.stdout
    assert f"(rules of {chip or '910A and 910B'})" in done.stdout


def test_the_tables_hold_the_tutorials_values():
    ips = [f"192.{card % 4 + 1}.27.{6 + card // 4}" for card in range(16)]
    servers = ["10.155.111.140"] * 8 + ["10.155.111.141"] * 8
    for size in TABLES:
        table = load(size)
        listed = [(server["server_id"], entry["device_id"], entry["device_ip"], entry["rank_id"])
                  for server in table["server_list"] for entry in server["device"]]
        assert listed == [(servers[rank], str(rank % 8), ips[rank], str(rank)) for rank in range(size)]
        assert {server["host_nic_ip"] for server in table["server_list"]} == {"reserve"}
        assert (table["version"], table["status"]) == ("1.0", "completed")
        assert table["server_count"] == str(size // 16 + 1)


def test_ranks_prints_one_line_a_rank():
    done = run("ranks", TABLES[16], "--size", 16)
    assert done.returncode == 0
    assert done.stdout.splitlines() == [
        f"{rank} {rank % 8} 10.155.111.14{rank // 8}" for rank in range(16)]


def test_ranks_are_sorted_whatever_the_order_in_the_file(tmp_path):
    table = load(16)
    table["server_list"].reverse()
    for server in table["server_list"]:
        server["device"].reverse()
    path = tmp_path / "a table.json"
    path.write_text(json.dumps(table))
    assert run("ranks", path).stdout == run("ranks", TABLES[16]).stdout


def test_ranks_of_a_broken_table_prints_its_faults_and_no_rank(tmp_path):
    table = load(2)
    device(table, 0, 1)["rank_id"] = "0"
    path = tmp_path / "table.json"
    path.write_text(json.dumps(table))
    done = run("ranks", path)
    assert (done.returncode, done.stdout) == (1, "")
    assert findings(done.stderr, "fault")[0][0] == "server_list[0].device[1].rank_id"


def test_a_reader_that_stops_early_gets_no_traceback():
    command = ["bash", "-c", '"$1" -B "$2" ranks "$3" | true', "_", sys.executable, TOOL, TABLES[16]]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.stderr == ""


# ---------------------------------------------------------------------- broken tables

class Broken(NamedTuple):
    """A change that breaks a table, and every (where, words of the reason) that `check` must then report."""
    name: str
    size: int
    change: Callable[[Any], Any]
    faults: "list[tuple[str, str]]"
    options: "tuple[str, ...]" = ()


def put(path: str, value: Any) -> Callable[[Any], Any]:
    """A change: table.<path> = value, where path is written as in the checker's findings."""
    def change(table):
        *way, last = [int(part) if part.isdigit() else part for part in re.findall(r"\w+", path)]
        for step in way:
            table = table[step]
        table[last] = value
    return change


def drop(path: str) -> Callable[[Any], Any]:
    """A change: del table.<path>."""
    def change(table):
        *way, last = [int(part) if part.isdigit() else part for part in re.findall(r"\w+", path)]
        for step in way:
            table = table[step]
        del table[last]
    return change


def all_of(*changes: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def change(table):
        for each in changes:
            each(table)
    return change


def swap_ranks(one: "tuple[int, int]", other: "tuple[int, int]") -> Callable[[Any], Any]:
    def change(table):
        a, b = device(table, *one), device(table, *other)
        a["rank_id"], b["rank_id"] = b["rank_id"], a["rank_id"]
    return change


def keep_devices(*ids: int) -> Callable[[Any], Any]:
    """A change: only these cards of each server, ranks numbered through."""
    def change(table):
        rank = itertools.count()
        for server in table["server_list"]:
            server["device"] = [{**entry, "rank_id": str(next(rank))} for entry in server["device"]
                                if int(entry["device_id"]) in ids]
    return change


def unequal_servers(table):
    """Eight cards on the first server, one on the second."""
    del table["server_list"][1]["device"][1:]


def text(old: str, new: str) -> Callable[[Any], Any]:
    """A change of the file's text: the first `old` becomes `new`."""
    def change(table):
        source = json.dumps(table)
        assert old in source
        return source.replace(old, new, 1).encode("utf-8", "surrogatepass")
    return change


S, D = "server_list[0]", "server_list[1].device[3]"
BROKEN = [
    # the file
    Broken("empty file", 2, lambda table: b"", [("file", "is empty")]),
    Broken("blank file", 2, lambda table: b" \n", [("file", "is empty")]),
    Broken("trailing comma", 2, text('"status"', ', "status"'), [("line 1 column", "is not JSON")]),
    Broken("cut off", 2, lambda table: json.dumps(table)[:-1].encode(), [("line 1 column", "is not JSON")]),
    Broken("comment", 2, text("{", "{ // ours\n"), [("line 1 column 3", "is not JSON")]),
    Broken("not UTF-8", 2, lambda table: b'{"status": "\xff\xfe"}', [("byte 12", "is not utf-8 text")]),
    Broken("byte order mark", 2, lambda table: b"\xef\xbb\xbf" + json.dumps(table).encode(),
           [("file", "byte order mark")]),
    Broken("UTF-16", 2, lambda table: json.dumps(table).encode("utf-16"), [("file", "is utf-16 text")]),
    Broken("NaN", 2, text('"server_count": "1"', '"server_count": NaN'),
           [("file", "NaN is not a JSON value")]),
    Broken("a hundred thousand brackets", 2, lambda table: b"[" * 100_000, [("file", "nested too deeply")]),
    Broken("deep in a key nobody reads", 2, text('"reserve"', "[" * 200 + '"x"' + "]" * 200),
           [(f"{S}.host_nic_ip" + "[0]" * 11, "nested too deeply")]),
    Broken("17 MiB", 2, lambda table: b" " * (17 << 20), [("file", "is larger than 16 MiB")]),
    Broken("a list", 2, lambda table: [table], [("file", "holds a list")]),
    Broken("null", 2, lambda table: b"null", [("file", "holds null")]),
    Broken("a number", 2, lambda table: b"-1e9", [("file", "holds -1e9")]),
    # repeated keys
    Broken("key twice, at the top", 2, text('"version"', '"version": "1.0", "version"'),
           [("version", "more than once")]),
    Broken("key twice, in a device", 2, text('"rank_id": "0"', '"rank_id": "0", "rank_id": "0"'),
           [(f"{S}.device[0].rank_id", "more than once")]),
    Broken("key twice, where nobody reads", 2, text('"reserve"', '{"a": "", "a": ""}'),
           [(f"{S}.host_nic_ip.a", "more than once")]),
    # scalars that are no strings
    Broken("number for a count", 2, put("server_count", 1), [("server_count", "1 is not a string")]),
    Broken("number for a rank", 16, put(f"{D}.rank_id", 11), [(f"{D}.rank_id", "11 is not a string")]),
    Broken("number of 5,000 digits", 2, text('"rank_id": "0"', '"rank_id": ' + "9" * 5000),
           [(f"{S}.device[0].rank_id", "999... is not a string")]),
    Broken("null for an address", 16, put(f"{D}.device_ip", None),
           [(f"{D}.device_ip", "null is not a string")]),
    Broken("true where nobody reads", 8, put(f"{S}.host_nic_ip", True),
           [(f"{S}.host_nic_ip", "true is not a string")]),
    Broken("number deep where nobody reads", 8, put(f"{S}.host_nic_ip", [{"a": 0.5}]),
           [(f"{S}.host_nic_ip[0].a", "0.5 is not a string")]),
    # status, version, server_count
    Broken("initializing", 8, put("status", "initializing"), [("status", "30 minutes")]),
    Broken("other status", 8, put("status", "Completed"), [("status", 'is "Completed", not "completed"')]),
    Broken("no status", 8, drop("status"), [("status", "is missing")]),
    Broken("status is a list", 8, put("status", ["completed"]), [("status", "is a list, not a string")]),
    Broken("other version", 8, put("version", "1.1"), [("version", 'is "1.1"')]),
    Broken("no version", 8, drop("version"), [("version", "is missing")]),
    Broken("A3 version on 910B", 8, put("version", "1.2"), [("version", "A3 super-pods, not for 910B")],
           ("--chip", "910B")),
    Broken("wrong server_count", 16, put("server_count", "1"), [("server_count", "server_list has 2")]),
    Broken("server_count in words", 16, put("server_count", "two"),
           [("server_count", "plain decimal number")]),
    # servers
    Broken("no server_list", 8, drop("server_list"), [("server_list", "is missing")]),
    Broken("server_list is an object", 8, put("server_list", {}),
           [("server_list", "is an object, not a list")]),
    Broken("server_list is null", 8, put("server_list", None), [("server_list", "is null, not a list")]),
    Broken("server_list is empty", 8, put("server_list", []), [("server_list", "is empty")]),
    Broken("a server is a string", 8, put(S, "10.155.111.140"), [(S, "not an object")]),
    Broken("no server_id", 8, drop(f"{S}.server_id"), [(f"{S}.server_id", "is missing")]),
    Broken("empty server_id", 8, put(f"{S}.server_id", ""), [(f"{S}.server_id", "is empty")]),
    Broken("server_id of 65", 8, put(f"{S}.server_id", "n" * 65), [(f"{S}.server_id", "longer than 64")]),
    Broken("space in server_id", 8, put(f"{S}.server_id", "10.0.0.1 "), [(f"{S}.server_id", "white space")]),
    Broken("half a character in server_id", 8, put(f"{S}.server_id", "\ud800"),
           [(f"{S}.server_id", "unprintable")]),
    Broken("server_id repeated", 16, put("server_list[1].server_id", "10.155.111.140"),
           [("server_list[1].server_id", '"10.155.111.140" stands already at server_list[0].server_id')]),
    # devices
    Broken("no device list", 8, drop(f"{S}.device"), [(f"{S}.device", "is missing")]),
    Broken("device list is empty", 8, put(f"{S}.device", []), [(f"{S}.device", "is empty")]),
    Broken("a device is a list", 16, put(D, ["3"]), [(D, "is a list, not an object")]),
    Broken("no device_id", 16, drop(f"{D}.device_id"), [(f"{D}.device_id", "is missing")]),
    Broken("device_id 16", 16, put(f"{D}.device_id", "16"),
           [(f"{D}.device_id", "no server has a device above 15")]),
    Broken("device_id 8 on 910A", 16, put(f"{D}.device_id", "8"), [(f"{D}.device_id", "devices 0 to 7")],
           ("--chip", "910A")),
    Broken("device_id 03", 16, put(f"{D}.device_id", "03"), [(f"{D}.device_id", "plain decimal number")]),
    Broken("device_id -1", 16, put(f"{D}.device_id", "-1"), [(f"{D}.device_id", "plain decimal number")]),
    Broken("device_id in Arabic digits", 16, put(f"{D}.device_id", "٣"),
           [(f"{D}.device_id", "decimal number")]),
    Broken("device_id repeated", 16, put(f"{D}.device_id", "2"),
           [(f"{D}.device_id", "stands already at server_list[1].device[2].device_id")]),
    # addresses
    Broken("device_ip 256", 16, put(f"{D}.device_ip", "192.4.27.256"),
           [(f"{D}.device_ip", "not an IPv4 or IPv6")]),
    Broken("device_ip with a leading zero", 16, put(f"{D}.device_ip", "192.4.27.08"),
           [(f"{D}.device_ip", "not an IPv4 or IPv6")]),
    Broken("device_ip with its netmask", 16, put(f"{D}.device_ip", "192.4.27.8/24"),
           [(f"{D}.device_ip", "not an IPv4 or IPv6")]),
    Broken("device_ip is a name", 8, put(f"{S}.device[0].device_ip", "\ud800\0"),
           [(f"{S}.device[0].device_ip", "not an IPv4 or IPv6")]),
    Broken("device_ip 127.0.0.1", 16, put(f"{D}.device_ip", "127.0.0.1"),
           [(f"{D}.device_ip", "not an address that a card can have")]),
    Broken("device_ip 0.0.0.0", 16, put(f"{D}.device_ip", "0.0.0.0"),
           [(f"{D}.device_ip", "that a card can have")]),
    Broken("device_ip repeated", 16, put(f"{D}.device_ip", "192.1.27.6"),
           [(f"{D}.device_ip", '"192.1.27.6" stands already at server_list[0].device[0].device_ip')]),
    Broken("device_ip repeated in another spelling", 2, all_of(
        put(f"{S}.device[0].device_ip", "fd00::1"), put(f"{S}.device[1].device_ip", "FD00:0::1")),
           [(f"{S}.device[1].device_ip", "stands already")]),
    Broken("IPv4 and IPv6", 16, put(f"{D}.device_ip", "fd00::1"), [(f"{D}.device_ip", "is IPv6, but")]),
    Broken("no device_ip, several servers", 16, drop(f"{D}.device_ip"), [(f"{D}.device_ip", "is missing")]),
    Broken("empty device_ip, several servers, 910B", 16, put(f"{D}.device_ip", ""),
           [(f"{D}.device_ip", "is missing")], ("--chip", "910B")),
    Broken("no device_ip, one server, 910A", 8, drop(f"{S}.device[5].device_ip"),
           [(f"{S}.device[5].device_ip", "910A asks for it")], ("--chip", "910A")),
    # ranks
    Broken("no rank_id", 16, drop(f"{D}.rank_id"), [(f"{D}.rank_id", "is missing")]),
    Broken("rank_id repeated", 16, put(f"{D}.rank_id", "10"),
           [(f"{D}.rank_id", '"10" stands already at server_list[1].device[2].rank_id')]),
    Broken("rank_id too high", 16, put(f"{D}.rank_id", "16"),
           [(f"{D}.rank_id", "is 16, but 16 ranks end at 15")]),
    Broken("ranks from 1", 2, all_of(put(f"{S}.device[0].rank_id", "1"), put(f"{S}.device[1].rank_id", "2")),
           [(f"{S}.device[1].rank_id", "is 2, but 2 ranks end at 1")]),
    Broken("rank_id 1.0", 2, put(f"{S}.device[1].rank_id", "1.0"),
           [(f"{S}.device[1].rank_id", "decimal number")]),
    Broken("servers interleave", 16, swap_ranks((0, 7), (1, 0)),
           [("server_list[1].device", "ranks 7 to 15 interleave with ranks 0 to 8 of server_list[0]")]),
    # numbers of devices
    Broken("not the job's size", 8, lambda table: None, [("server_list", "8 ranks, but the job has 2")],
           ("--size", "2")),
    Broken("three cards on 910A", 8, keep_devices(0, 1, 2),
           [(f"{S}.device", "has 3 devices")], ("--chip", "910A")),
    Broken("two cards in two groups on 910A", 8, keep_devices(3, 4),
           [(f"{S}.device", "cards 3, 4 are not all in")],
           ("--chip", "910A")),
    Broken("four cards in two groups on 910A", 8, keep_devices(2, 3, 4, 5),
           [(f"{S}.device", "cards 2, 3, 4, 5 are not all in")], ("--chip", "910A")),
    Broken("unequal servers on 910A", 16, unequal_servers, [("server_list", "unequal numbers of devices")],
           ("--chip", "910A")),
]


@pytest.mark.parametrize("broken", BROKEN, ids=lambda broken: broken.name)
def test_a_broken_table_is_refused_with_place_and_reason(broken, tmp_path):
    table = load(broken.size)
    content = broken.change(table)  # None when it changed the table in place
    content = table if content is None else content
    path = tmp_path / "table.json"
    path.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
    done = run("check", path, *broken.options)
    assert (done.returncode, done.stdout) == (1, "")
    found = findings(done.stderr, "fault")
    assert len(found) == len(broken.faults), found
    for (where, what), (expected_where, words) in zip(found, broken.faults):
        assert where.startswith(expected_where) if "column" in expected_where else where == expected_where
        assert words in what
    assert done.stderr.splitlines()[-1].startswith(f"{path}: {len(found)} fault")


def test_there_are_enough_distinct_broken_tables():
    assert len({broken.name for broken in BROKEN}) == len(BROKEN)
    assert len({(broken.size, broken.options, tuple(broken.faults)) for broken in BROKEN}) >= 60


def test_all_faults_are_reported_in_one_run(tmp_path):
    changes = {"status": "initializing", "version": "2.0", "server_count": "3",
               "server_list[0].server_id": "",
               "server_list[0].device[2].device_id": "1", "server_list[0].device[4].device_ip": "not.an.ip",
               f"{D}.rank_id": "99", "server_list[1].device[5].device_ip": "192.1.27.8"}
    table = load(16)
    for path, value in changes.items():
        put(path, value)(table)
    path = tmp_path / "table.json"
    path.write_text(json.dumps(table))
    done = run("check", path, "--size", 8)
    assert done.returncode == 1
    assert sorted(where for where, _ in findings(done.stderr, "fault")) == sorted([*changes, "server_list"])


@pytest.mark.parametrize("path", [".", "no such file", "", "\udcff"])
def test_what_cannot_be_read_is_a_fault(path):
    done = run("check", path)
    assert (done.returncode, done.stdout) == (1, "")
    assert "cannot be read" in findings(done.stderr, "fault")[0][1]


@pytest.mark.parametrize(("command", "words"), [
    ("", "required: COMMAND"), ("check", "required: FILE"), ("check a b", "unrecognized arguments: b"),
    ("inspect a", "invalid choice: 'inspect'"), ("check a --size 0", "'0' is not a number of ranks"),
    ("check a --size x", "'x' is not a number of ranks"), ("check a --chip 910C", "invalid choice: '910C'"),
    ("make --devices 4-", "'4-' is not a list of devices"),
    ("make --devices 7-4", "runs backwards; write 4-7"),
    ("make --devices 0,0", "names a device twice"), ("make --devices 0-16", "goes beyond device 15"),
    ("make --devices=", "'' is not a list of devices"),
    ("make --server-ip 127.0.1.1", "is no address by which"),
    ("make --server-ip nodeA", "is no address by which"), ("make -o .", ". exists; say --force"),
    ("make -o . --force", ". is a folder"), ("merge", "required: FILE"),
])
def test_wrong_usage_is_exit_2(command, words):
    done = run(*command.split())
    assert (done.returncode, done.stdout) == (2, "")
    assert words in done.stderr.splitlines()[-1]


# ---------------------------------------------------------------------- warnings

@pytest.mark.parametrize(("size", "change", "options", "warnings", "rules"), [
    (8, keep_devices(0, 1, 2), [], [(f"{S}.device", "has 3 devices, but a 910A")], "910B, not 910A"),
    (8, keep_devices(0, 1, 2), ["--chip", "910B"], [], "910B"),
    (8, keep_devices(3, 4), [], [(f"{S}.device", "cards 3, 4 are not all in")], "910B, not 910A"),
    (8, put(f"{S}.device[7].device_id", "15"), [], [], "910B, not 910A"),
    (8, drop(f"{S}.device[0].device_ip"), [], [(f"{S}.device[0].device_ip", "910A asks")], "910B, not 910A"),
    (8, drop(f"{S}.device[0].device_ip"), ["--chip", "910B"], [], "910B"),
    (16, unequal_servers, [], [("server_list", "unequal")], "910B, not 910A"),
    (16, keep_devices(4, 5, 6, 7), [], [("server_list", "MindSpore's guide asks for 8")], "910A and 910B"),
    (16, keep_devices(4, 5, 6, 7), ["--chip", "910A"], [("server_list", "MindSpore's guide asks for 8")],
     "910A"),
    (16, put("server_list[0].server_id", "10.155.111.9"), [], [("server_list", "dictionary order")],
     "910A and 910B"),
    (8, put("version", "1.2"), [], [("version", "A3 super-pods only")], "910A and 910B"),
    (8, drop("server_count"), [], [("server_count", "HCCL then counts")], "910A and 910B"),
    (8, put(f"{S}.server_id", "127.0.1.1"), [], [(f"{S}.server_id", "no address by which other")],
     "910A and 910B"),
    (8, put(f"{S}.server_id", "node_0"), [], [], "910A and 910B"),
    (8, put(f"{S}.device[0].device_lp", "x"), [], [(f"{S}.device[0].device_lp", "read by nobody")],
     "910A and 910B"),
    (8, put(f"{S}.host_ip", "10.0.0.1"), [], [], "910A and 910B"),
])
def test_what_hccl_accepts_passes_with_its_warnings(size, change, options, warnings, rules, tmp_path):
    table = load(size)
    change(table)
    path = tmp_path / "table.json"
    path.write_text(json.dumps(table))
    done = run("check", path, *options)
    assert done.returncode == 0, done.stderr
    found = findings(done.stderr, "warning")
    assert [where for where, _ in found] == [where for where, _ in warnings]
    assert all(words in what for (_, what), (_, words) in zip(found, warnings))
    assert f"(rules of {rules})" in done.stdout


# ---------------------------------------------------------------------- fuzz

SPEC = importlib.util.spec_from_file_location("rank_table_under_test", TOOL)
CHECKER = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(CHECKER)


def checker_faults(data: bytes, chip: "str | None" = None) -> "list[Any]":
    """The faults that check would print, without starting a process."""
    report = CHECKER.Report()
    table = CHECKER.parse_json(data, report)
    if table is not None or not report.faults:
        CHECKER.check_table(table, report, chip=chip)
    assert all(str(finding).isascii() and "\n" not in str(finding) for finding in report.findings)
    return report.faults


def obeys_every_rule(table: Any, chip: "str | None") -> bool:
    """The rules once more, written apart from the checker and by other means: the judge of the fuzz tests."""
    def only_strings(value):
        if isinstance(value, dict):
            return all(map(only_strings, value.values()))
        return all(map(only_strings, value)) if isinstance(value, list) else isinstance(value, str)

    try:
        assert only_strings(table)
        assert table["status"] == "completed"
        assert table["version"] in (("1.0", "1.2") if chip is None else ("1.0",))
        servers = table["server_list"]
        assert isinstance(servers, list) and len(servers) > 0
        assert table.get("server_count", str(len(servers))) == str(len(servers))
        names = [server["server_id"] for server in servers]
        assert len(set(names)) == len(names)
        assert all(isinstance(name, str) and re.fullmatch(r"[!-~]{1,64}", name) for name in names)
        rank_owner, addresses = {}, []
        for name, server in zip(names, servers):
            entries = server["device"]
            assert isinstance(entries, list) and len(entries) > 0
            ids = [int(entry["device_id"]) for entry in entries]
            assert [str(number) for number in ids] == [entry["device_id"] for entry in entries]
            assert set(ids) <= set(range(8 if chip == "910A" else 16)) and len(set(ids)) == len(ids)
            for entry in entries:
                assert entry["rank_id"] not in rank_owner
                rank_owner[entry["rank_id"]] = name
                if entry.get("device_ip", "") != "" or len(servers) > 1 or chip == "910A":
                    addresses.append(ipaddress.ip_address(entry["device_ip"]))
            if chip == "910A":
                assert len(entries) in (1, 2, 4, 8) and len(entries) == len(servers[0]["device"])
                assert len(entries) in (1, 8) or len({number // 4 for number in ids}) == 1
        assert set(rank_owner) == {str(rank) for rank in range(len(rank_owner))}
        owners = [rank_owner[str(rank)] for rank in range(len(rank_owner))]
        assert len(list(itertools.groupby(owners))) == len(servers)
        assert len(set(addresses)) == len(addresses)
        assert len({address.version for address in addresses}) <= 1
        assert not any(address.is_loopback or address.is_unspecified for address in addresses)
    except (AssertionError, KeyError, TypeError, ValueError, AttributeError):
        return False
    return True


VALUES = st.sampled_from([
    "0", "1", "3", "7", "8", "9", "15", "16", "00", "-1", " 1", "", "completed", "initializing", "1.0", "1.2",
    "2", "10.0.0.1", "10.0.0.10", "127.0.0.1", "0.0.0.0", "192.168.0.300", "fd00::1", "::1", "a" * 64,
    "a" * 65, "a b", 0, 7, -1.5, None, True, [], {}, ["0"], {"device_id": "0"}])


@st.composite
def tables(draw) -> Any:
    """A good table of one to three servers, then up to three changes anywhere in it."""
    servers, rank = [], itertools.count()
    for index in range(draw(st.integers(1, 3))):
        ids = draw(st.sampled_from([[0], [0, 1], [4, 5, 6, 7], list(range(8)), [3, 4], [0, 2, 5], [14, 15]]))
        servers.append({"server_id": f"10.0.0.{index}", "host_nic_ip": "reserve", "device": [
            {"device_id": str(card), "device_ip": f"192.168.{index}.{card + 1}", "rank_id": str(next(rank))}
            for card in ids]})
    table = {"version": "1.0", "status": "completed", "server_count": str(len(servers)),
             "server_list": servers}
    for _ in range(draw(st.integers(0, 3))):
        places, waiting = [], [table]  # (owner, key) of every value in the table
        while waiting:
            owner = waiting.pop()
            keys = list(owner) if isinstance(owner, dict) else range(len(owner))
            places += [(owner, key) for key in keys]
            waiting += [owner[key] for key in keys if isinstance(owner[key], (dict, list))]
        owner, key = draw(st.sampled_from(places))
        kind = draw(st.sampled_from(["set", "set", "set", "drop", "swap"]))
        if kind == "set":
            owner[key] = copy.deepcopy(draw(VALUES))
        elif kind == "drop":
            del owner[key]
        elif not isinstance(owner[key], (dict, list)):
            other, _ = draw(st.sampled_from([place for place in places if place[1] == key
                                             and not isinstance(place[0][key], (dict, list))]))
            owner[key], other[key] = other[key], owner[key]
        if not table:
            break
    return table


# The same examples on every run, so that a change to the checker and nothing else can turn the suite red.
FUZZ = settings(max_examples=1500, deadline=None, suppress_health_check=list(HealthCheck), database=None,
                derandomize=True)


@FUZZ
@given(tables(), st.sampled_from([None, "910A", "910B"]))
def test_fuzz_faults_are_found_exactly_where_a_rule_is_broken(table, chip):
    faults = checker_faults(json.dumps(table).encode(), chip)
    assert (not faults) == obeys_every_rule(table, chip), faults


KEYS = st.sampled_from(["status", "version", "server_count", "server_list", "server_id", "device",
                        "device_id", "device_ip", "rank_id"]) | st.text(max_size=4)
ANY_JSON = st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers() | st.text(max_size=8) | VALUES,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(KEYS, inner, max_size=6), max_leaves=30)


@settings(FUZZ, max_examples=500)
@given(ANY_JSON)
def test_fuzz_any_json_is_refused_in_order(value):
    assert checker_faults(json.dumps(value).encode())


@settings(FUZZ, max_examples=300)
@given(st.binary(max_size=60), st.integers(0, 700), st.integers(0, 40))
def test_fuzz_damaged_bytes(damage, start, length):
    """A piece of a good table is overwritten. What still passes must be good by the judge's reading too."""
    good = TABLES[2].read_bytes()
    data = good[:start] + damage + good[start + length:]
    if not checker_faults(data):
        assert obeys_every_rule(json.loads(data), None)


def test_fuzz_through_the_program(tmp_path):
    """A few of the same by the command line: exit code 0 exactly for the tables that the judge accepts."""
    path = tmp_path / "table.json"
    seen = set()

    @settings(FUZZ, max_examples=40)
    @given(tables())
    def through_the_program(table):
        path.write_text(json.dumps(table))
        done = run("check", path)
        assert done.returncode == (0 if obeys_every_rule(table, None) else 1)
        seen.add(done.returncode)

    through_the_program()
    assert seen == {0, 1}


# ---------------------------------------------------------------------- make

def give_addresses(env: "dict[str, str]", cards: "dict[int, str]", prefix: str = "ip") -> None:
    for card, address in cards.items():
        Path(env["FAKE"], f"{prefix}_{card}").write_text(address)


def made(done: subprocess.CompletedProcess) -> "list[tuple[str, str | None, str]]":
    """(device_id, device_ip, rank_id) of a one-server table on stdout."""
    assert done.returncode == 0, done.stderr
    server, = json.loads(done.stdout)["server_list"]
    return [(entry["device_id"], entry.get("device_ip"), entry["rank_id"]) for entry in server["device"]]


@pytest.mark.parametrize(("devices", "ids"), [
    ("4,5,6,7", [4, 5, 6, 7]), ("0-15", list(range(16))), ("0-3,8, 10", [0, 1, 2, 3, 8, 10]), ("12", [12]),
    ("7,4-5", [4, 5, 7]),
    (None, list(range(8)))])
def test_make_asks_hccn_tool_for_each_card(devices, ids, fake, tmp_path):
    give_addresses(fake, {card: f"192.168.{card}.2" for card in range(16)})
    options = ["--devices", devices] if devices else []
    done = run("make", *options, "--server-ip", "10.0.0.1", "--hccn-conf", tmp_path / "none", env=fake)
    assert made(done) == [(str(card), f"192.168.{card}.2", str(rank)) for rank, card in enumerate(ids)]
    path = tmp_path / "table.json"
    path.write_text(done.stdout)
    assert run("check", path, "--size", len(ids)).returncode == 0
    assert json.loads(done.stdout)["server_list"][0]["server_id"] == "10.0.0.1"


def test_make_reads_hccn_conf_without_hccn_tool(tmp_path):
    conf = tmp_path / "hccn.conf"
    conf.write_text("# address_1=1.1.1.1\naddress_1=192.168.1.1\r\nnetmask_1=255.255.255.0\n"
                    "netdetect_1=192.168.9.9\n address_10 = 192.168.1.10\naddress_11=\n"
                    "IPv6address_1=fd00::1\n")
    env = without_hccn_tool(tmp_path)
    done = run("make", "--devices", "1,10", "--server-ip", "10.0.0.1", "--hccn-conf", conf, env=env)
    assert made(done) == [("1", "192.168.1.1", "0"), ("10", "192.168.1.10", "1")]
    done = run("make", "--devices", "10,11", "--server-ip", "10.0.0.1", "--hccn-conf", conf, env=env)
    assert (done.returncode, done.stdout) == (1, "")
    assert "device 11 has no address: hccn_tool is not installed" in done.stderr


def test_make_prefers_hccn_tool_and_fills_up_from_hccn_conf(fake, tmp_path):
    conf = tmp_path / "hccn.conf"
    conf.write_text("address_0=192.168.9.0\naddress_1=192.168.9.1\n")
    give_addresses(fake, {0: "192.168.0.2"})
    done = run("make", "--devices", "0,1", "--server-ip", "10.0.0.1", "--hccn-conf", conf, env=fake)
    assert made(done) == [("0", "192.168.0.2", "0"), ("1", "192.168.9.1", "1")]


def test_make_with_ipv6(fake, tmp_path):
    give_addresses(fake, {card: f"fd00::{card + 1}" for card in range(2)}, "ip6")
    done = run("make", "--devices", "0-1", "--server-ip", "2001:db8::5", env=fake)
    assert made(done) == [("0", "fd00::1", "0"), ("1", "fd00::2", "1")]
    conf = tmp_path / "hccn.conf"
    conf.write_text("IPv6address_3=121::101\nIPv6netmask_3=112\n")
    done = run("make", "--devices", "3", "--server-ip", "10.0.0.1", "--hccn-conf", conf, env=fake)
    assert made(done) == [("3", "121::101", "0")]


@pytest.mark.parametrize("conf", ["", "address_4=192.168.0.4\n", None])
def test_make_needs_an_address_unless_on_one_910b_server(conf, fake, tmp_path):
    path = tmp_path / "hccn.conf"
    if conf is not None:
        path.write_text(conf)
    common = ["make", "--devices", "4,5", "--server-ip", "10.0.0.1", "--hccn-conf", path]
    for options in ([], ["--chip", "910A"]):
        done = run(*common, *options, env=fake)
        assert (done.returncode, done.stdout) == (1, "")
        missing = 5 if conf else 4
        assert f"device {missing} has no address: hccn_tool says: Get ipconf failed" in done.stderr
        state = {"": "is empty", None: "cannot be read"}.get(conf, "has no good address line for it")
        assert f"{path} {state}" in done.stderr
        assert len(done.stderr.splitlines()) == 1
    done = run(*common, "--chip", "910B", env=fake)
    assert made(done) == [("4", "192.168.0.4" if conf else None, "0"), ("5", None, "1")]


def test_make_survives_a_broken_hccn_tool(fake, tmp_path):
    tool = Path(fake["PATH"].split(":")[0], "hccn_tool")
    for program in ("#!/no/such/interpreter\n", "#!/bin/bash\nprintf 'ipaddr:\\xff\\n'\n"):
        tool.write_text(program)
        done = run("make", "--devices", "0", "--server-ip", "10.0.0.1", "--hccn-conf", tmp_path / "none",
                   env=fake)
        assert (done.returncode, done.stdout) == (1, "")
        assert "device 0 has no address: hccn_tool " in done.stderr


def test_make_refuses_what_the_chip_forbids(fake):
    give_addresses(fake, {card: f"192.168.{card}.2" for card in range(16)})
    done = run("make", "--devices", "3,4", "--server-ip", "10.0.0.1", "--chip", "910A", env=fake)
    assert (done.returncode, done.stdout) == (1, "")
    assert findings(done.stderr, "fault") == [(f"{S}.device", findings(done.stderr, "fault")[0][1])]
    give_addresses(fake, {4: "192.168.3.2"})
    done = run("make", "--devices", "3,4", "--server-ip", "10.0.0.1", env=fake)
    assert done.returncode == 1 and "stands already" in done.stderr


def test_make_finds_the_outward_address(fake):
    done = run("make", "--devices", "0", "--chip", "910B", env=fake)
    if done.returncode == 0:
        address = json.loads(done.stdout)["server_list"][0]["server_id"]
        assert not ipaddress.ip_address(address).is_loopback
        assert f"server_id {address} is the address that leads outward" in done.stderr
    else:
        assert "no address that leads outward" in done.stderr


def test_make_without_a_network_asks_for_server_ip(fake):
    alone = ["unshare", "--user", "--map-root-user", "--net"]
    if not shutil.which("unshare") or subprocess.run([*alone, "true"], check=False).returncode:
        pytest.skip("unshare cannot make a network namespace here")
    command = [*alone, sys.executable, "-B", TOOL, "make", "--devices", "0", "--chip", "910B"]
    done = subprocess.run(command, env=fake, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert "no address that leads outward" in done.stderr and "--server-ip" in done.stderr


def test_output_is_whole_or_not_at_all(fake, tmp_path):
    give_addresses(fake, {0: "192.168.0.2", 1: "192.168.1.2"})
    target = tmp_path / "out dir" / "table.json"
    command = ["make", "--devices", "0-1", "--server-ip", "10.0.0.1", "-o", target]
    done = run(*command, env=fake)
    assert done.returncode == 1 and "cannot write" in done.stderr
    target.parent.mkdir()
    assert run(*command, env=fake).stdout == ""
    assert run("check", target, "--size", 2).returncode == 0
    assert stat.S_IMODE(target.stat().st_mode) & stat.S_IRUSR
    before = target.read_bytes()
    done = run(*command, "--chip", "910B", env=fake)
    assert done.returncode == 2 and "say --force to replace it" in done.stderr
    give_addresses(fake, {1: "192.168.0.2"})
    done = run(*command, "--force", env=fake)  # two cards, one address: faults, so the old file stays
    assert done.returncode == 1 and target.read_bytes() == before
    give_addresses(fake, {1: "192.168.5.2"})
    assert run(*command, "--force", env=fake).returncode == 0
    assert device(json.loads(target.read_text()), 0, 1)["device_ip"] == "192.168.5.2"
    assert [path.name for path in target.parent.iterdir()] == ["table.json"]


# ---------------------------------------------------------------------- merge

def server_table(path: Path, server_id: str, first: int = 0, cards: int = 2, **changes: Any) -> Path:
    entries = [{"device_id": str(card), "device_ip": f"192.168.{first}.{card + 1}", "rank_id": str(card)}
               for card in range(cards)]
    path.write_text(json.dumps({"version": "1.0", "server_count": "1", "status": "completed", "server_list": [
        {"server_id": server_id, "device": entries}], **changes}))
    return path


def test_merging_the_two_servers_gives_the_16_card_table(tmp_path):
    table = load(16)
    parts = []
    for index, server in enumerate(table["server_list"]):
        for rank, entry in enumerate(server["device"]):
            entry["rank_id"] = str(rank)
        parts.append(tmp_path / f"part {index}.json")
        parts[-1].write_text(json.dumps({**table, "server_count": "1", "server_list": [server]}))
    for order in (parts, parts[::-1]):
        assert run("merge", *order).stdout == TABLES[16].read_text()
    assert run("merge", TABLES[8]).stdout == TABLES[8].read_text()
    assert run("merge", TABLES[2]).stdout == TABLES[2].read_text()


def test_merge_orders_servers_as_a_dictionary_does(tmp_path):
    paths = [server_table(tmp_path / f"{last}.json", f"10.0.0.{last}", last) for last in (9, 10, 100)]
    target = tmp_path / "merged.json"
    assert run("merge", *paths, "-o", target).returncode == 0
    assert run("ranks", target).stdout.splitlines() == [
        "0 0 10.0.0.10", "1 1 10.0.0.10", "2 0 10.0.0.100", "3 1 10.0.0.100", "4 0 10.0.0.9", "5 1 10.0.0.9"]
    done = run("check", target, "--size", 6)
    assert done.returncode == 0 and "dictionary order" not in done.stderr
    assert run("merge", target, server_table(tmp_path / "7.json", "10.0.0.7", 7)).returncode == 0


@pytest.mark.parametrize(("second", "words"), [
    ({"server_id": "10.0.0.1", "first": 2}, "server 10.0.0.1 is in"),
    ({"server_id": "10.0.0.2", "first": 1}, '"192.168.1.1" stands already at'),
    ({"server_id": "10.0.0.2", "first": 2, "status": "initializing"}, "fault: status: "),
    ({"server_id": "10.0.0.2", "first": 2, "version": "1.2"}, "A3 super-pods"),
])
def test_merge_refuses_and_writes_nothing(second, words, tmp_path):
    target = tmp_path / "merged.json"
    done = run("merge", server_table(tmp_path / "1.json", "10.0.0.1", 1),
               server_table(tmp_path / "2.json", **second), "-o", target)
    assert (done.returncode, done.stdout) == (1, "")
    assert words in done.stderr and not target.exists()


def test_merge_needs_the_addresses_that_one_server_did_without(fake, tmp_path):
    parts = [tmp_path / "1.json", tmp_path / "2.json"]
    for number, part in enumerate(parts):
        assert run("make", "--devices", "0", "--chip", "910B", "--server-ip", f"10.0.0.{number}", "-o", part,
                   env=fake).returncode == 0
    done = run("merge", *parts)
    assert (done.returncode, done.stdout) == (1, "")
    assert [where for where, _ in findings(done.stderr, "fault")] == [
        f"server_list[{index}].device[0].device_ip" for index in (0, 1)]


# ---------------------------------------------------------------------- check_network.sh

def walk(env: "dict[str, str]", *arguments: Any) -> subprocess.CompletedProcess:
    return subprocess.run([shutil.which("bash"), FOLDER / "check_network.sh", *map(str, arguments)], env=env,
                          capture_output=True, text=True, timeout=60, check=False)


def test_the_walk_tries_each_card_against_its_partner(fake):
    done = walk(fake, TABLES[16], "10.155.111.140")
    assert (done.returncode, done.stderr) == (0, "")
    peers = [f"192.{card % 4 + 1}.27.{8 + card // 4}" for card in range(8)]
    assert done.stdout.splitlines() == [
        f"device {card} -> {peers[card]} (device {card} of 10.155.111.141): Success" for card in range(8)]
    calls = Path(fake["FAKE"], "calls").read_text().splitlines()
    assert calls == [f"-i {card} -netdetect -s address {peers[card]}" for card in range(8)] + [
        f"-i {card} -net_health -g" for card in range(8)]


def test_the_partner_has_the_same_device_id_whatever_its_place(tmp_path):
    table = load(16)
    for index, other in ((0, "1"), (1, "0")):
        device(table, 1, index)["device_id"] = other
    path = tmp_path / "table.json"
    path.write_text(json.dumps(table))
    assert run("peers", path, "10.155.111.140").stdout.splitlines()[:3] == [
        "0 192.2.27.8 0 10.155.111.141", "1 192.1.27.8 1 10.155.111.141", "2 192.3.27.8 2 10.155.111.141"]


def test_a_fault_on_any_card_is_exit_1(fake):
    Path(fake["FAKE"], "health_3").write_text("Fault\n")
    Path(fake["FAKE"], "health_5").write_text("Init\nDetect ip set\nSuccess\n")
    done = walk(fake, TABLES[16], "10.155.111.141")
    assert done.returncode == 1
    assert [line.rsplit(": ", 1)[1] for line in done.stdout.splitlines()] == ["Success"] * 3 + ["Fault"] + [
        "Success"] * 4
    assert "device 3 -> 192.4.27.6 (device 3 of 10.155.111.140): Fault" in done.stdout
    assert "1 of this server's cards" in done.stderr


@pytest.mark.parametrize("status", ["Receive timeout", "Init"])
def test_whatever_is_not_success_is_exit_1(status, fake):
    Path(fake["FAKE"], "health_0").write_text(f"{status}\n")
    done = walk({**fake, "NET_HEALTH_SECONDS": "1"}, TABLES[16], "10.155.111.140")
    assert done.returncode == 1 and done.stdout.splitlines()[0].endswith(f": {status}")


def test_the_walk_without_root_says_so(fake):
    Path(fake["FAKE"], "not_root").touch()
    done = walk(fake, TABLES[16], "10.155.111.140")
    assert done.returncode == 1
    assert done.stdout.count("cannot set the address to detect: permission denied") == 8


def test_three_servers_form_a_ring(fake, tmp_path):
    paths = [server_table(tmp_path / f"{number}.json", f"node_{number}", number, cards)
             for number, cards in ((1, 2), (2, 4), (3, 2))]
    table = tmp_path / "a table.json"
    assert run("merge", *paths, "-o", table).returncode == 0
    first_peers = {}
    for number in (1, 2, 3):
        done = walk(fake, table, f"node_{number}")
        assert done.returncode == 0
        first_peers[number] = re.findall(r"-> (\S+) \(device (\d) of (\S+)\)", done.stdout)
    assert first_peers[1] == [("192.168.2.1", "0", "node_2"), ("192.168.2.2", "1", "node_2")]
    assert [peer[1:] for peer in first_peers[2]] == [("0", "node_3"), ("1", "node_3")] * 2
    assert {peer[2] for peer in first_peers[3]} == {"node_1"}


@pytest.mark.parametrize(("arguments", "words"), [
    ([], "usage: bash check_network.sh RANK_TABLE_FILE SERVER_ID"),
    ([TABLES[16]], "usage"),
    ([TABLES[16], "10.0.0.1"], "has no server 10.0.0.1; its servers are 10.155.111.140, 10.155.111.141"),
    ([TABLES[8], "10.155.111.140"], "has one server"),
    (["no such table", "10.155.111.140"], "cannot be read"),
])
def test_the_walk_refuses_bad_input(arguments, words, fake):
    done = walk(fake, *arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert words in done.stderr
    assert not Path(fake["FAKE"], "calls").exists()


def test_the_walk_refuses_ipv6_which_hccn_tool_cannot_detect(fake, tmp_path):
    table = load(16)
    for index in range(16):
        device(table, index // 8, index % 8)["device_ip"] = f"fd00::{index + 1}"
    path = tmp_path / "table.json"
    path.write_text(json.dumps(table))
    done = walk(fake, path, "10.155.111.140")
    assert done.returncode == 2 and "takes IPv4 only" in done.stderr


def test_the_walk_without_hccn_tool_says_so(tmp_path):
    done = walk(without_hccn_tool(tmp_path), TABLES[16], "10.155.111.140")
    assert (done.returncode, done.stdout) == (2, "")
    assert "hccn_tool is not on PATH" in done.stderr and len(done.stderr.splitlines()) == 1


# ---------------------------------------------------------------------- README

@pytest.mark.parametrize("name", ["README.md", "README_CN.md"])
def test_readme_shows_what_the_commands_print(name, fake, tmp_path):
    """Every console block is run in order in a copy of the folder and prints what the README says."""
    folder = tmp_path / "copy"
    shutil.copytree(FOLDER, folder, ignore=shutil.ignore_patterns("__pycache__"))
    Path(fake["PATH"].split(":")[0], "python").symlink_to(sys.executable)
    give_addresses(fake, {card: f"192.{card % 4 + 1}.27.{6 + card // 4}" for card in range(8)})
    Path(fake["FAKE"], "health_7").write_text("Fault\n")
    blocks = re.findall(r"```console\n(.*?)```", (FOLDER / name).read_text(), re.DOTALL)
    steps = [step for block in blocks
             for step in re.findall(r"^\$ (.+)\n((?:(?!\$ ).*\n)*)", block, re.MULTILINE)]
    assert len(steps) >= 6
    for command, shown in steps:
        done = subprocess.run(["bash", "-c", command], cwd=folder, env=fake, stdout=subprocess.PIPE,
                              stderr=subprocess.STDOUT, text=True, timeout=60, check=False)
        assert done.stdout == shown, command
