"""rank_tables/: the three tables, the checker, make and merge, the network walk, and the check of cards.

The real programs are run as subprocesses; only the fuzz tests import the checker, for volume. npu-smi and hccn_tool
exist on Ascend servers only, so small fakes on PATH stand in for them.
"""

import copy
import ipaddress
import itertools
import json
import os
import re
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import jobs
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

sys.path.insert(0, str(jobs.REPO / "rank_tables"))
import cards
import rules

FOLDER = jobs.REPO / "rank_tables"
TABLES = {size: FOLDER / f"rank_table_{size}pcs.json" for size in (2, 8, 16)}
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


def program(name, *arguments, **options):
    """Run one of the programs; whatever happens, it must not show a traceback."""
    done = subprocess.run([sys.executable, "-B", FOLDER / name, *map(str, arguments)], capture_output=True, text=True,
                          timeout=60, check=False, **options)
    assert "Traceback" not in done.stderr, done.stderr
    return done


def run(*arguments, **options):
    return program("rank_table.py", *arguments, **options)


def failed(done, *words, code=1):
    """Assert that a program printed these words on stderr, nothing else, and ended with a code; return stderr."""
    assert (done.returncode, done.stdout) == (code, ""), done.stderr
    assert all(word in done.stderr for word in words), done.stderr
    return done.stderr


def findings(stderr, level):
    """[(where, what)] of the findings of a level; each must come with a mend."""
    lines = [line for line in stderr.splitlines() if line.startswith(f"{level}: ")]
    found = [re.fullmatch(rf"{level}: (\S.*?): (.+); mend: (.+)", line) for line in lines]
    assert all(found), lines
    return [(match.group(1), match.group(2)) for match in found]


def load(size):
    return json.loads(TABLES[size].read_text())


def write(path, content):
    """Write a file from bytes, text, or a table; returns its path."""
    path.write_bytes(content if isinstance(content, bytes) else
                     (content if isinstance(content, str) else json.dumps(content)).encode())
    return path


@pytest.fixture
def fake(tmp_path):
    """An environment whose PATH begins with the fake hccn_tool; its state lies in env["FAKE"]."""
    folder, state = tmp_path / "bin with space", tmp_path / "state"
    folder.mkdir()
    state.mkdir()
    write(folder / "hccn_tool", FAKE_HCCN_TOOL).chmod(0o755)
    return {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}", "FAKE": str(state), "NET_HEALTH_SECONDS": "3"}


@pytest.fixture
def bare(tmp_path):
    """An environment without hccn_tool and npu-smi."""
    if os.path.exists(cards.HCCN_TOOL_HOME):
        pytest.skip(f"this machine has the real {cards.HCCN_TOOL_HOME}")
    (tmp_path / "bare").mkdir()
    return {"PATH": str(tmp_path / "bare")}


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


def test_ranks_prints_one_line_a_rank_whatever_the_order_in_the_file(tmp_path):
    table = load(16)
    table["server_list"].reverse()
    for server in table["server_list"]:
        server["device"].reverse()
    for path in (TABLES[16], write(tmp_path / "a table.json", table)):
        done = run("ranks", path, "--size", 16)
        assert done.returncode == 0
        assert done.stdout.splitlines() == [f"{rank} {rank % 8} 10.155.111.14{rank // 8}" for rank in range(16)]
    table["server_list"][0]["device"][0]["rank_id"] = "0"
    stderr = failed(run("ranks", write(tmp_path / "a table.json", table)))
    assert findings(stderr, "fault")[0][0] == "server_list[1].device[7].rank_id"


def test_a_reader_that_stops_early_gets_no_traceback():
    command = ["bash", "-c", 'python -B rank_table.py ranks "$1" | true', "_", TABLES[16]]
    assert jobs.run(*command, cwd=FOLDER).output == ""


# ---------------------------------------------------------------------- broken tables

DROP = object()  # instead of a value: remove the key


def change(table, path, value):
    """table.<path> = value, where path is written as in the checker's findings."""
    *way, last = [int(part) if part.isdigit() else part for part in re.findall(r"\w+", path)]
    for step in way:
        table = table[step]
    if value is DROP:
        del table[last]
    else:
        table[last] = value


def keep_devices(*ids):
    """A change: only these cards of each server, ranks numbered through."""
    def keep(table):
        rank = itertools.count()
        for server in table["server_list"]:
            server["device"] = [{**entry, "rank_id": str(next(rank))} for entry in server["device"]
                                if int(entry["device_id"]) in ids]
    return keep


def unequal_servers(table):
    """Eight cards on the first server, one on the second."""
    del table["server_list"][1]["device"][1:]


S, S0, D = "server_list[0]", "server_list[0].device[0]", "server_list[1].device[3]"
A, B = ("--chip", "910A"), ("--chip", "910B")
# (size of the table, path, (value, words of the reason and options) ...): the fault is at that path.
AT_THE_PLACE = [
    (2, "server_count", (1, "1 is not a string"), ("2", "server_list has 1"), ("two", "plain decimal number")),
    (8, "status", ("initializing", "30 minutes"), ("Completed", 'is "Completed", not "completed"'),
     (["completed"], "is a list, not a string"), (DROP, "is missing")),
    (8, "version", ("1.1", 'is "1.1"'), (DROP, "is missing"), ("1.2", "A3 super-pods, not for 910B", *B)),
    (8, "server_list", (DROP, "is missing"), ({}, "is an object, not a list"), (None, "is null, not a list"),
     ([], "is empty")),
    (8, S, ("10.155.111.140", "not an object")),
    (8, f"{S}.host_nic_ip", (True, "true is not a string")),
    (8, f"{S}.server_id", (DROP, "is missing"), ("", "is empty"), ("n" * 65, "longer than 64"),
     ("10.0.0.1 ", "white space"), ("\ud800", "unprintable")),
    (16, "server_list[1].server_id",
     ("10.155.111.140", '"10.155.111.140" stands already at server_list[0].server_id')),
    (8, f"{S}.device", (DROP, "is missing"), ([], "is empty")),
    (16, D, (["3"], "is a list, not an object")),
    (16, f"{D}.device_id", (DROP, "is missing"), ("16", "no server has a device above 15"),
     ("8", "devices 0 to 7", *A), ("03", "plain decimal number"), ("-1", "plain decimal number"),
     ("٣", "plain decimal number"), ("2", "stands already at server_list[1].device[2].device_id")),
    (16, f"{D}.device_ip", (DROP, "is missing"), ("", "is missing", *B), (None, "null is not a string"),
     ("192.4.27.256", "not an IPv4 or IPv6"), ("192.4.27.08", "not an IPv4 or IPv6"),
     ("192.4.27.8/24", "not an IPv4 or IPv6"), ("fd00::1", "is IPv6, but"),
     ("127.0.0.1", "not an address that a card can have"), ("0.0.0.0", "not an address that a card can have"),
     ("192.1.27.6", '"192.1.27.6" stands already at server_list[0].device[0].device_ip')),
    (8, f"{S0}.device_ip", ("\ud800\0", "not an IPv4 or IPv6"), (DROP, "910A asks for it", *A)),
    (16, f"{D}.rank_id", (DROP, "is missing"), (11, "11 is not a string"), ("1.0", "plain decimal number"),
     ("10", '"10" stands already at server_list[1].device[2].rank_id'), ("16", "is 16, but 16 ranks end at 15")),
]
# (content of the file, or a change of its text, where, words of the reason).
BY_TEXT = [
    (b"", "file", "is empty"),
    (b" \n", "file", "is empty"),
    (b"\0" * 999, "file", "holds NUL bytes only, as after a power loss"),
    (('"status"', ', "status"'), "line 1 column", "is not JSON"),
    (('"completed"}', '"completed"'), "line 1 column", "is not JSON"),
    (("{", "{ // ours\n"), "line 1 column 3", "is not JSON"),
    (b'{"status": "\xff\xfe"}', "byte 12", "is not utf-8 text"),
    (b"\xef\xbb\xbf" + TABLES[2].read_bytes(), "file", "byte order mark"),
    (TABLES[2].read_text().encode("utf-16"), "file", "is utf-16 text"),
    (('"server_count": "1"', '"server_count": NaN'), "file", "NaN is not a JSON value"),
    (b"[" * 100_000, "file", "nested too deeply"),
    (('"reserve"', "[" * 200 + '"x"' + "]" * 200), f"{S}.host_nic_ip" + "[0]" * 11, "nested too deeply"),
    (b" " * (17 << 20), "file", "is larger than 16 MiB"),
    (b"[{}]", "file", "holds a list"),
    (b"null", "file", "holds null"),
    (b"-1e9", "file", "holds -1e9"),
    (('"version"', '"version": "1.0", "version"'), "version", "more than once"),
    (('"rank_id": "0"', '"rank_id": "0", "rank_id": "0"'), f"{S0}.rank_id", "more than once"),
    (('"reserve"', '{"a": "", "a": ""}'), f"{S}.host_nic_ip.a", "more than once"),
    (('"reserve"', '[{"a": 0.5}]'), f"{S}.host_nic_ip[0].a", "0.5 is not a string"),
    (('"rank_id": "0"', '"rank_id": ' + "9" * 5000), f"{S0}.rank_id", "999... is not a string"),
]
# (size, {path: value} or a change, where, words of the reason, options).
ELSEWHERE = [
    (2, {f"{S0}.device_ip": "fd00::1", f"{S}.device[1].device_ip": "FD00:0::1"}, f"{S}.device[1].device_ip",
     "stands already"),
    (2, {f"{S0}.rank_id": "1", f"{S}.device[1].rank_id": "2"}, f"{S}.device[1].rank_id", "is 2, but 2 ranks end at 1"),
    (16, {f"{S}.device[7].rank_id": "8", "server_list[1].device[0].rank_id": "7"}, "server_list[1].device",
     "ranks 7 to 15 interleave with ranks 0 to 8 of server_list[0]"),
    (8, {}, "server_list", "8 ranks, but the job has 2", "--size", "2"),
    (8, keep_devices(0, 1, 2), f"{S}.device", "has 3 devices", *A),
    (8, keep_devices(3, 4), f"{S}.device", "cards 3, 4 are not all in", *A),
    (8, keep_devices(2, 3, 4, 5), f"{S}.device", "cards 2, 3, 4, 5 are not all in", *A),
    (16, unequal_servers, "server_list", "unequal numbers of devices", *A),
]
BROKEN = [(size, {path: value}, path, *rest) for size, path, *cases in AT_THE_PLACE for value, *rest in cases]
BROKEN += [(2, *case) for case in BY_TEXT] + ELSEWHERE


def changed(size, how):
    """The content of a file: bytes, or the table of this size after a change of its values or its text."""
    table = load(size)
    if callable(how):
        how(table)
    elif isinstance(how, dict):
        for path, value in how.items():
            change(table, path, value)
    elif isinstance(how, tuple):
        assert how[0] in json.dumps(table)
        return json.dumps(table).replace(*how, 1)
    return how if isinstance(how, bytes) else table


@pytest.mark.parametrize("case", BROKEN, ids=lambda case: f"{case[2]}: {case[3]}")
def test_a_broken_table_is_refused_with_place_and_reason(case, tmp_path):
    size, how, where, words, *options = case
    path = write(tmp_path / "table.json", changed(size, how))
    stderr = failed(run("check", path, *options))
    (found, what), = findings(stderr, "fault")
    assert found.startswith(where) if "column" in where else found == where
    assert words in what
    assert stderr.splitlines()[-1].startswith(f"{path}: 1 fault")


def test_there_are_enough_distinct_broken_tables():
    assert len({(size, where, words, *options) for size, _, where, words, *options in BROKEN}) >= 70


def test_all_faults_are_reported_in_one_run(tmp_path):
    changes = {"status": "initializing", "version": "3.0", "server_count": "3", f"{S}.server_id": "",
               f"{S}.device[2].device_id": "1", f"{S}.device[4].device_ip": "not.an.ip", f"{D}.rank_id": "99",
               "server_list[1].device[5].device_ip": "192.1.27.8"}
    stderr = failed(run("check", write(tmp_path / "table.json", changed(16, changes)), "--size", 8))
    assert sorted(where for where, _ in findings(stderr, "fault")) == sorted([*changes, "server_list"])


def test_where_there_is_no_server_none_is_counted(tmp_path):
    stderr = failed(run("check", write(tmp_path / "table.json", {})))
    assert "mend: write the number of servers in server_list" in stderr


def test_a_table_of_a5_is_named_and_not_checked(tmp_path):
    table = write(tmp_path / "table.json", {"version": "2.0", "status": "completed", "rank_count": 2, "rank_list": []})
    done = run("check", table, "--size", 2)
    assert done.returncode == 0, done.stderr
    assert findings(done.stderr, "fault") == []
    assert [where for where, words in findings(done.stderr, "warning") if "Atlas 350 cards (A5" in words] == ["version"]
    for command in (("ranks", table), ("merge", table, table)):
        assert "mpirun or msrun, which need no table" in failed(run(*command))


@pytest.mark.parametrize("path", [".", "no such file", "", "\udcff"])
def test_what_cannot_be_read_is_a_fault(path):
    assert "cannot be read" in findings(failed(run("check", path)), "fault")[0][1]


@pytest.mark.parametrize(("command", "words"), [
    ("", "required: COMMAND"), ("check", "required: FILE"), ("check a b", "unrecognized arguments: b"),
    ("inspect a", "invalid choice: 'inspect'"), ("check a --size 0", "'0' is not a number of ranks"),
    ("check a --size x", "'x' is not a number of ranks"), ("check a --chip 910C", "invalid choice: '910C'"),
    ("make --devices 4-", "'4-' is not a list of devices"), ("make --devices 7-4", "runs backwards; write 4-7"),
    ("make --devices 0,0", "names a device twice"), ("make --devices 0-16", "goes beyond device 15"),
    ("make --devices=", "'' is not a list of devices"), ("make --server-ip 127.0.1.1", "is no address by which"),
    ("make --server-ip nodeA", "is no address by which"), ("make -o .", ". exists; say --force"),
    ("make -o . --force", ". is a folder"), ("merge", "required: FILE"),
])
def test_wrong_usage_is_exit_2(command, words):
    assert words in failed(run(*command.split()), code=2).splitlines()[-1]


# ---------------------------------------------------------------------- warnings

@pytest.mark.parametrize(("size", "how", "options", "where", "words", "rules_of"), [
    (8, keep_devices(0, 1, 2), (), f"{S}.device", "has 3 devices, but a 910A", "910B, not 910A"),
    (8, keep_devices(0, 1, 2), B, None, "", "910B"),
    (8, keep_devices(3, 4), (), f"{S}.device", "cards 3, 4 are not all in", "910B, not 910A"),
    (8, {f"{S}.device[7].device_id": "15"}, (), None, "", "910B, not 910A"),
    (8, {f"{S0}.device_ip": DROP}, (), f"{S0}.device_ip", "910A asks", "910B, not 910A"),
    (8, {f"{S0}.device_ip": DROP}, B, None, "", "910B"),
    (16, unequal_servers, (), "server_list", "unequal", "910B, not 910A"),
    (16, keep_devices(4, 5, 6, 7), (), "server_list", "MindSpore's guide asks for 8", "910A and 910B"),
    (16, keep_devices(4, 5, 6, 7), A, "server_list", "MindSpore's guide asks for 8", "910A"),
    (16, {f"{S}.server_id": "10.155.111.9"}, (), "server_list", "dictionary order", "910A and 910B"),
    (8, {"version": "1.2"}, (), "version", "A3 super-pods only", "910A and 910B"),
    (8, {"server_count": DROP}, (), "server_count", "HCCL then counts", "910A and 910B"),
    (8, {f"{S}.server_id": "127.0.1.1"}, (), f"{S}.server_id", "no address by which other", "910A and 910B"),
    (8, {f"{S}.server_id": "node_0"}, (), None, "", "910A and 910B"),
    (8, {f"{S0}.device_lp": "x"}, (), f"{S0}.device_lp", "read by nobody", "910A and 910B"),
    (8, {f"{S}.host_ip": "10.0.0.1"}, (), None, "", "910A and 910B"),
])
def test_what_hccl_accepts_passes_with_its_warnings(size, how, options, where, words, rules_of, tmp_path):
    done = run("check", write(tmp_path / "table.json", changed(size, how)), *options)
    assert done.returncode == 0, done.stderr
    found = findings(done.stderr, "warning")
    assert [place for place, _ in found] == ([where] if where else [])
    assert all(words in what for _, what in found)
    assert f"(rules of {rules_of})" in done.stdout


# ---------------------------------------------------------------------- fuzz

def checker_faults(data, chip=None):
    """The faults that check would print, without starting a process."""
    report = rules.Report()
    rules.check_bytes(data, report, chip=chip)
    assert all(str(finding).isascii() and "\n" not in str(finding) for finding in report.findings)
    return report.faults


def obeys_every_rule(table, chip):
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
        assert isinstance(servers, list)
        assert table.get("server_count", str(len(servers))) == str(len(servers)) != "0"
        names = [server["server_id"] for server in servers]
        assert len(set(names)) == len(names)
        assert all(isinstance(name, str) and re.fullmatch(r"[!-~]{1,64}", name) for name in names)
        rank_owner, addresses = {}, []
        for name, server in zip(names, servers):
            entries = server["device"]
            assert isinstance(entries, list)
            ids = [int(entry["device_id"]) for entry in entries]
            assert [str(number) for number in ids] == [entry["device_id"] for entry in entries] != []
            assert set(ids) <= set(range(8 if chip == "910A" else 16))
            assert len(set(ids)) == len(ids)
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
def tables(draw):
    """A good table of one to three servers, then up to three changes anywhere in it."""
    servers, rank = [], itertools.count()
    for index in range(draw(st.integers(1, 3))):
        ids = draw(st.sampled_from([[0], [0, 1], [4, 5, 6, 7], list(range(8)), [3, 4], [0, 2, 5], [14, 15]]))
        servers.append({"server_id": f"10.0.0.{index}", "host_nic_ip": "reserve", "device": [
            {"device_id": str(card), "device_ip": f"192.168.{index}.{card + 1}", "rank_id": str(next(rank))}
            for card in ids]})
    table = {"version": "1.0", "status": "completed", "server_count": str(len(servers)), "server_list": servers}
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


KEYS = st.sampled_from([*rules.TABLE_KEYS, *rules.SERVER_KEYS, *rules.DEVICE_KEYS]) | st.text(max_size=4)
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
    seen = set()

    @settings(FUZZ, max_examples=40)
    @given(tables())
    def through_the_program(table):
        done = run("check", write(tmp_path / "table.json", table))
        assert done.returncode == (0 if obeys_every_rule(table, None) else 1)
        seen.add(done.returncode)

    through_the_program()
    assert seen == {0, 1}


@pytest.mark.parametrize("closed", [">&-", "2>&-"])
def test_a_closed_output_changes_no_verdict(closed, tmp_path):
    for table, code in ((TABLES[2], 0), (tmp_path / "none", 1)):
        command = [sys.executable, FOLDER / "rank_table.py", "check", table]
        done = subprocess.run(["bash", "-c", f'"$@" {closed}', "bash", *command], check=False, capture_output=True)
        assert done.returncode == code, done.stderr


# ---------------------------------------------------------------------- make

def give(env, card_values, what="ip"):
    """Set the state of the fake hccn_tool: a card's "ip", "ip6" or "health"."""
    for card, value in card_values.items():
        write(Path(env["FAKE"], f"{what}_{card}"), value)


def make(env, conf, devices, *options):
    """Run make as server 10.0.0.1, with what hccn.conf says, or without one (None)."""
    path = Path(env.get("FAKE", env["PATH"]), "hccn.conf")
    path.unlink(missing_ok=True)
    if conf is not None:
        write(path, conf)
    return run("make", *(["--devices", devices] if devices else []), "--server-ip", "10.0.0.1", "--hccn-conf", path,
               *options, env=env)


def made(done):
    """[(device_id, device_ip)] of a one-server table on stdout, whose ranks are counted through."""
    assert done.returncode == 0, done.stderr
    server, = json.loads(done.stdout)["server_list"]
    assert [entry["rank_id"] for entry in server["device"]] == [str(rank) for rank in range(len(server["device"]))]
    return [(entry["device_id"], entry.get("device_ip")) for entry in server["device"]]


@pytest.mark.parametrize(("devices", "ids"), [
    ("4,5,6,7", [4, 5, 6, 7]), ("0-15", list(range(16))), ("0-3,8, 10", [0, 1, 2, 3, 8, 10]), ("12", [12]),
    ("7,4-5", [4, 5, 7]), (None, list(range(8)))])
def test_make_asks_hccn_tool_for_each_card(devices, ids, fake, tmp_path):
    give(fake, {card: f"192.168.{card}.2" for card in range(16)})
    done = make(fake, None, devices)
    assert made(done) == [(str(card), f"192.168.{card}.2") for card in ids]
    assert run("check", write(tmp_path / "table.json", done.stdout), "--size", len(ids)).returncode == 0
    assert json.loads(done.stdout)["server_list"][0]["server_id"] == "10.0.0.1"


def test_make_reads_hccn_conf_without_hccn_tool(bare):
    conf = ("# address_1=1.1.1.1\naddress_1=192.168.1.1\r\nnetmask_1=255.255.255.0\nnetdetect_1=192.168.9.9\n"
            " address_10 = 192.168.1.10\naddress_11=\nIPv6address_1=fd00::1\n")
    assert made(make(bare, conf, "1,10")) == [("1", "192.168.1.1"), ("10", "192.168.1.10")]
    failed(make(bare, conf, "10,11"), "device 11 has no address: hccn_tool is not installed")


@pytest.mark.parametrize(("addresses", "what", "conf", "expected"), [
    ({0: "192.168.0.2"}, "ip", "address_0=192.168.9.0\naddress_1=192.168.9.1\n", ["192.168.0.2", "192.168.9.1"]),
    ({0: "fd00::1", 1: "fd00::2"}, "ip6", None, ["fd00::1", "fd00::2"]),
    ({}, "ip", "IPv6address_0=121::101\nIPv6netmask_0=112\nIPv6address_1=121::102\n", ["121::101", "121::102"]),
])
def test_make_prefers_hccn_tool_and_fills_up_from_hccn_conf(addresses, what, conf, expected, fake):
    give(fake, addresses, what)
    assert made(make(fake, conf, "0,1", "--server-ip", "2001:db8::5")) == list(zip("01", expected))


@pytest.mark.parametrize(("conf", "missing", "state"), [
    ("", 4, "is empty"), ("address_4=192.168.0.4\n", 5, "has no good address line for it"),
    (None, 4, "cannot be read")])
def test_make_needs_an_address_unless_on_one_910b_server(conf, missing, state, fake):
    for options in ((), A):
        stderr = failed(make(fake, conf, "4,5", *options), f"hccn.conf {state}",
                        f"device {missing} has no address: hccn_tool says: Get ipconf failed")
        assert len(stderr.splitlines()) == 1
    assert made(make(fake, conf, "4,5", *B)) == [("4", "192.168.0.4" if conf else None), ("5", None)]


def test_make_takes_addresses_where_there_are_no_cards(bare):
    done = make(bare, None, "7,4-5", "--addresses", "192.1.27.7, 192.2.27.7,fd00::1", *B)
    assert done.returncode == 1, "IPv4 and IPv6 are not mixed"
    addresses = ["192.1.27.7", "192.2.27.7", "192.4.27.7"]
    assert made(make(bare, None, "7,4-5", "--addresses", ",".join(addresses))) == [
        ("4", addresses[1]), ("5", addresses[2]), ("7", addresses[0])], "in the order of --devices"
    failed(make(bare, None, "4,5", "--addresses", "192.1.27.7"), "names 2 cards and --addresses 1")
    failed(make(bare, None, "4", "--addresses", "192.1.27.07"), "'192.1.27.07' is no address of a card", code=2)


@pytest.mark.parametrize("tool", ["#!/no/such/interpreter\n", "#!/bin/bash\nprintf 'ipaddr:\\xff\\n'\n"])
def test_make_survives_a_broken_hccn_tool(tool, fake):
    write(Path(fake["PATH"].split(":")[0], "hccn_tool"), tool)
    failed(make(fake, None, "0"), "device 0 has no address: hccn_tool ")


def test_make_refuses_what_the_chip_forbids(fake):
    give(fake, {card: f"192.168.{card}.2" for card in range(16)})
    (where, _), = findings(failed(make(fake, None, "3,4", *A)), "fault")
    assert where == f"{S}.device"
    give(fake, {4: "192.168.3.2"})
    failed(make(fake, None, "3,4"), "stands already")


def test_make_finds_the_outward_address(fake):
    done = run("make", "--devices", "0", *B, env=fake)
    if done.returncode == 0:
        address = json.loads(done.stdout)["server_list"][0]["server_id"]
        assert not ipaddress.ip_address(address).is_loopback
        assert f"server_id {address} is the address that leads outward" in done.stderr
    else:
        failed(done, "no address that leads outward")


def test_make_without_a_network_asks_for_server_ip(fake):
    alone = ["unshare", "--user", "--map-root-user", "--net"]
    if not shutil.which("unshare") or subprocess.run([*alone, "true"], check=False).returncode:
        pytest.skip("unshare cannot make a network namespace here")
    command = [*alone, sys.executable, "-B", FOLDER / "rank_table.py", "make", "--devices", "0", *B]
    done = subprocess.run(command, env=fake, capture_output=True, text=True, timeout=60, check=False)
    failed(done, "no address that leads outward", "--server-ip")


def test_output_is_whole_or_not_at_all(fake, tmp_path):
    give(fake, {0: "192.168.0.2", 1: "192.168.1.2"})
    target = tmp_path / "out dir" / "table.json"
    failed(make(fake, None, "0-1", "-o", target), "cannot write", code=2)
    target.parent.mkdir()
    assert make(fake, None, "0-1", "-o", target).stdout == ""
    assert run("check", target, "--size", 2).returncode == 0
    assert stat.S_IMODE(target.stat().st_mode) & stat.S_IRUSR
    before = target.read_bytes()
    failed(make(fake, None, "0-1", "-o", target, *B), "say --force to replace it", code=2)
    give(fake, {1: "192.168.0.2"})
    failed(make(fake, None, "0-1", "-o", target, "--force"))  # two cards, one address: the old file stays
    assert target.read_bytes() == before
    give(fake, {1: "192.168.5.2"})
    assert make(fake, None, "0-1", "-o", target, "--force").returncode == 0
    assert json.loads(target.read_text())["server_list"][0]["device"][1]["device_ip"] == "192.168.5.2"
    assert [path.name for path in target.parent.iterdir()] == ["table.json"]


def test_output_to_what_is_no_file_leaves_it_what_it_is(fake, tmp_path):
    give(fake, {0: "192.168.0.2"})
    target, link, pipe = (tmp_path / name for name in ("table.json", "link", "pipe"))
    link.symlink_to(target)
    assert make(fake, None, "0", "-o", link, "--force").returncode == 0
    assert link.is_symlink() and json.loads(target.read_text())["status"] == "completed"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    assert make(fake, None, "0", "-o", pipe, "--force").returncode == 0  # as root, /dev/null would have been replaced
    assert pipe.is_fifo() and os.read(reader, 9999) == target.read_bytes()
    os.close(reader)


# ---------------------------------------------------------------------- merge

def server_table(path, server_id, first=0, number=2, **changes):
    entries = [{"device_id": str(card), "device_ip": f"192.168.{first}.{card + 1}", "rank_id": str(card)}
               for card in range(number)]
    return write(path, {"version": "1.0", "server_count": "1", "status": "completed", "server_list": [
        {"server_id": server_id, "device": entries}], **changes})


def test_merging_the_two_servers_gives_the_16_card_table(tmp_path):
    table = load(16)
    parts = []
    for index, server in enumerate(table["server_list"]):
        for rank, entry in enumerate(server["device"]):
            entry["rank_id"] = str(rank)
        parts.append(write(tmp_path / f"part {index}.json", {**table, "server_count": "1", "server_list": [server]}))
    for files, whole in ((parts, 16), (parts[::-1], 16), ([TABLES[8]], 8), ([TABLES[2]], 2)):
        assert run("merge", *files).stdout == TABLES[whole].read_text()


def test_merge_orders_servers_as_a_dictionary_does(tmp_path):
    paths = [server_table(tmp_path / f"{last}.json", f"10.0.0.{last}", last) for last in (9, 10, 100)]
    target = tmp_path / "merged.json"
    assert run("merge", *paths, "-o", target).returncode == 0
    assert run("ranks", target).stdout.splitlines() == [
        "0 0 10.0.0.10", "1 1 10.0.0.10", "2 0 10.0.0.100", "3 1 10.0.0.100", "4 0 10.0.0.9", "5 1 10.0.0.9"]
    done = run("check", target, "--size", 6)
    assert done.returncode == 0
    assert "dictionary order" not in done.stderr
    assert run("merge", target, server_table(tmp_path / "7.json", "10.0.0.7", 7)).returncode == 0


@pytest.mark.parametrize(("second", "words"), [
    ({"server_id": "10.0.0.1", "first": 2}, "server 10.0.0.1 is in"),
    ({"server_id": "10.0.0.2", "first": 1}, '"192.168.1.1" stands already at'),
    ({"server_id": "10.0.0.2", "first": 2, "status": "initializing"}, "fault: status: "),
    ({"server_id": "10.0.0.2", "first": 2, "version": "1.2"}, "A3 super-pods"),
])
def test_merge_refuses_and_writes_nothing(second, words, tmp_path):
    parts = (server_table(tmp_path / "1.json", "10.0.0.1", 1), server_table(tmp_path / "2.json", **second))
    failed(run("merge", *parts, "-o", tmp_path / "merged.json"), words)
    assert not (tmp_path / "merged.json").exists()


def test_merge_needs_the_addresses_that_one_server_did_without(fake, tmp_path):
    parts = [tmp_path / "1.json", tmp_path / "2.json"]
    for number, part in enumerate(parts):
        done = make(fake, None, "0", *B, "--server-ip", f"10.0.0.{number}", "-o", part)
        assert done.returncode == 0
    assert [where for where, _ in findings(failed(run("merge", *parts)), "fault")] == [
        f"server_list[{index}].device[0].device_ip" for index in (0, 1)]


# ---------------------------------------------------------------------- check_network.py

def walk(env, *arguments):
    """Run the walk; returns (the run, [(card, address, its number, its server, what the card says)])."""
    done = program("check_network.py", *arguments, env=env)
    lines = re.findall(r"^device (\d+) -> (\S+) \(device (\d+) of (\S+)\): (.*)$", done.stdout, re.MULTILINE)
    assert len(lines) == len(done.stdout.splitlines())
    return done, lines


def test_the_walk_tries_each_card_against_its_partner(fake):
    done, lines = walk(fake, TABLES[16], "10.155.111.140")
    assert (done.returncode, done.stderr) == (0, "")
    peers = [f"192.{card % 4 + 1}.27.{8 + card // 4}" for card in range(8)]
    assert lines == [(str(card), peers[card], str(card), "10.155.111.141", "Success") for card in range(8)]
    calls = Path(fake["FAKE"], "calls").read_text().splitlines()
    assert calls == [f"-i {card} -netdetect -s address {peers[card]}" for card in range(8)] + [
        f"-i {card} -net_health -g" for card in range(8)]


def test_the_partner_has_the_same_device_id_whatever_its_place(fake, tmp_path):
    table = changed(16, {"server_list[1].device[0].device_id": "1", "server_list[1].device[1].device_id": "0"})
    _, lines = walk(fake, write(tmp_path / "table.json", table), "10.155.111.140")
    assert [line[:3] for line in lines[:3]] == [
        ("0", "192.2.27.8", "0"), ("1", "192.1.27.8", "1"), ("2", "192.3.27.8", "2")]


@pytest.mark.parametrize(("health", "said"), [
    ({3: "Fault\n", 5: "Init\nDetect ip set\nSuccess\n"}, {3: "Fault"}),
    ({0: "Receive timeout\n"}, {0: "Receive timeout"}), ({0: "Init\n"}, {0: "Init"}),
    ({"root": ""}, dict.fromkeys(range(8), "cannot set the address to detect: permission denied")),
])
def test_whatever_is_not_success_is_exit_1(health, said, fake):
    give(fake, health, "not" if "root" in health else "health")
    done, lines = walk({**fake, "NET_HEALTH_SECONDS": "3" if 5 in health else "1"}, TABLES[16], "10.155.111.141")
    assert done.returncode == 1
    assert lines == [(str(card), f"192.{card % 4 + 1}.27.{6 + card // 4}", str(card), "10.155.111.140",
                      said.get(card, "Success")) for card in range(8)]
    assert f"check_network.py: {len(said)} of this server's cards" in done.stderr


def test_three_servers_form_a_ring(fake, tmp_path):
    paths = [server_table(tmp_path / f"{number}.json", f"node_{number}", number, count)
             for number, count in ((1, 2), (2, 4), (3, 2))]
    table, peers = tmp_path / "a table.json", {}
    assert run("merge", *paths, "-o", table).returncode == 0
    for number in (1, 2, 3):
        done, lines = walk(fake, table, f"node_{number}")
        assert done.returncode == 0
        peers[number] = [line[1:4] for line in lines]
    assert peers[1] == [("192.168.2.1", "0", "node_2"), ("192.168.2.2", "1", "node_2")]
    assert [peer[1:] for peer in peers[2]] == [("0", "node_3"), ("1", "node_3")] * 2
    assert {peer[2] for peer in peers[3]} == {"node_1"}


@pytest.mark.parametrize(("arguments", "words"), [
    ([], "usage: python check_network.py RANK_TABLE_FILE SERVER_ID"),
    ([TABLES[16]], "usage"),
    ([TABLES[16], "10.0.0.1"], "has no server 10.0.0.1; its servers are 10.155.111.140, 10.155.111.141"),
    ([TABLES[8], "10.155.111.140"], "has one server"),
    (["no such table", "10.155.111.140"], "cannot be read"),
    (["ipv6.json", "10.155.111.140"], "takes IPv4 only"),
])
def test_the_walk_refuses_bad_input(arguments, words, fake, tmp_path, monkeypatch):
    addresses = {f"server_list[{rank // 8}].device[{rank % 8}].device_ip": f"fd00::{rank + 1}" for rank in range(16)}
    write(tmp_path / "ipv6.json", changed(16, addresses))
    monkeypatch.chdir(tmp_path)
    failed(walk(fake, *arguments)[0], words, code=2)
    assert not Path(fake["FAKE"], "calls").exists()
    assert "give whole seconds" in walk({**fake, "NET_HEALTH_SECONDS": "x"}, TABLES[16], "10.155.111.140")[0].stderr


def test_the_walk_without_hccn_tool_says_so(bare):
    stderr = failed(walk(bare, TABLES[16], "10.155.111.140")[0], "hccn_tool is not on PATH", code=2)
    assert len(stderr.splitlines()) == 1


# ---------------------------------------------------------------------- cards.py

NPU_SMI = """\
| npu-smi 24.1.rc2                 Version: 24.1.rc2                                             |
| NPU   Name                | Health        | Power(W)    Temp(C)           Hugepages-Usage(page)|
| Chip  {phy_id}            | Bus-Id        | AICore(%)   Memory-Usage(MB)  HBM-Usage(MB)        |
| 4     910B3               | OK            | 92.4        37                0    / 0             |
| 0     {first}             | 0000:C1:00.0  | 0           0    / 0          3370 / 65536         |
{second_chip}\
| 5     910B3               | Alarm         | 93.0        38                0    / 0             |
| 0     {last}              | 0000:02:00.0  | 0           0    / 0          31370/ 65536         |
| NPU     Chip              | Process id    | Process name             | Process memory(MB)      |
| No running processes found in NPU 4                                                            |
| 5       0                 | 4711          | python3                  | 28050                   |
| 5       0                 | 4712          | python3                  | 28050                   |
"""
ONE_CHIP = NPU_SMI.format(phy_id="", first="", second_chip="", last="")
TWO_CHIPS = NPU_SMI.format(phy_id="Phy-ID", first="8", last="10", second_chip=(
    "| 1     9                   | 0000:C3:00.0  | 0           0    / 0          3370 / 65536         |\n"))


def test_the_cards_in_a_listing():
    users = (("4711", "python3"), ("4712", "python3"))
    assert cards.list_cards(ONE_CHIP) == [(4, 4, "910B3", "OK", ()), (5, 5, "910B3", "Alarm", users)]
    assert cards.list_cards(TWO_CHIPS) == [
        (8, 4, "910B3", "OK", ()), (9, 4, "910B3", "OK", ()), (10, 5, "910B3", "Alarm", users)]
    odd = ONE_CHIP.replace("Chip ", "Phy-ID ").replace("| 5 ", "| ² ")
    assert cards.list_cards(odd) == []
    assert cards.list_cards("") == cards.list_cards("driver/library version mismatch\n") == []


SERVER_0 = ("--table", TABLES[16], "--server", "10.155.111.140")


@pytest.mark.parametrize(("listing", "options", "sentence"), [
    (ONE_CHIP, ("--devices", 4), None),
    (TWO_CHIPS, ("--devices", 8, 9), None),
    (ONE_CHIP, ("--devices", 4, 2, "--first-rank", 8), "rank 9 needs card 2, which npu-smi does not list; "
     "it lists: 4 5"),
    (ONE_CHIP, ("--devices", 4, 5), "card 5, of rank 1, is in use by process 4711 (python3); end it or choose other "
     "cards"),
    (TWO_CHIPS, ("--devices", 10), "card 10, of rank 0, is in use by process 4711 (python3)"),
    ("initialized failed. ret is -8020", ("--devices", 4), "npu-smi says that a card is in use by another container "
     "(-8020): give each container cards of its own, stop the other one, or start both with --privileged"),
    (ONE_CHIP, ("--devices", 4, *SERVER_0[:3], "10.0.0.9"), f"{TABLES[16]} has no server 10.0.0.9; its servers are "
     "10.155.111.140 10.155.111.141"),
    (ONE_CHIP, ("--devices", 4, "--table", "nowhere", "--server", "10.0.0.9"), "nowhere is no good rank table (["),
    (ONE_CHIP, ("--devices", 4, "--table", "null", "--server", "10.0.0.9"), "null is no good rank table ('NoneType'"),
    (ONE_CHIP, ("--devices", 4, "--table", TABLES[16], "--server", "10.155.111.141"),
     "the rank table gives card 3 the device_ip 192.4.27.8, but hccn_tool says 192.4.27.6; write that into "
     f"{TABLES[16]}"),
    (None, ("--devices", 4), "there is neither npu-smi nor a /dev/davinci*: this machine has no Ascend card; "
     "DEVICE_TARGET=CPU rehearses"),
])
def test_cards_are_there_free_and_as_the_table_has_them(listing, options, sentence, fake, tmp_path):
    give(fake, {3: "192.4.27.6"})
    write(tmp_path / "null", "null")
    if listing:
        tool = write(Path(fake["PATH"].split(":")[0], "npu-smi"), f"#!/bin/sh\ncat <<'END'\n{listing}\nEND\n")
        tool.chmod(0o755)
    elif shutil.which("npu-smi") or list(Path("/dev").glob("davinci[0-9]*")):
        pytest.skip("this machine has cards")
    done = program("cards.py", *options, env=fake, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2 if sentence else 0, "")
    assert done.stderr.startswith(sentence) if sentence else done.stderr == ""
    assert len(done.stderr.splitlines()) == bool(sentence)


def test_an_unhealthy_card_is_told(fake):
    free = ONE_CHIP.partition("| NPU     Chip")[0]
    write(Path(fake["PATH"].split(":")[0], "npu-smi"), f"#!/bin/sh\ncat <<'END'\n{free}END\n").chmod(0o755)
    done = program("cards.py", "--devices", 4, 5, env=fake)
    assert (done.returncode, done.stdout, done.stderr) == (
        0, "", "warning: npu-smi gives card 5, of rank 1, the health 'Alarm'; where it fails, choose another one\n")


@pytest.mark.parametrize(("does", "said"), [
    ("exit 3", " (exit code 3) says nothing"), ("echo no driver; exit 1", " (exit code 1) no driver"),
    ("kill -9 $$", " was killed")])
def test_an_npu_smi_that_fails_is_named(does, said, fake):
    write(Path(fake["PATH"].split(":")[0]) / "npu-smi", f"#!/bin/sh\n{does}\n").chmod(0o755)
    failed(program("cards.py", "--devices", 0, env=fake), f"npu-smi{said}; look at dmesg and the driver\n", code=2)


@pytest.mark.parametrize("says", ["", "a layout of the future: card 0"])
def test_a_listing_of_another_layout_is_no_reason_to_refuse(says, fake):
    write(Path(fake["PATH"].split(":")[0]) / "npu-smi", f"#!/bin/sh\necho '{says}'\n").chmod(0o755)
    done = program("cards.py", "--devices", 0, env=fake)
    assert (done.returncode, done.stdout, done.stderr) == (
        0, "", "warning: npu-smi info lists no card in a layout known here; whether the cards are free was not "
        f"checked; it says: {says or 'nothing'}\n")


@pytest.mark.parametrize(("does", "said"), [("exit 3", "exit code 3"), ("kill -9 $$", "was killed")])
def test_an_hccn_tool_that_fails_is_named(does, said, fake, tmp_path):
    write(Path(fake["PATH"].split(":")[0]) / "hccn_tool", f"#!/bin/sh\n{does}\n").chmod(0o755)
    done, lines = walk(fake, TABLES[16], "10.155.111.141")
    assert done.returncode == 1
    assert {line[-1] for line in lines} == {f"cannot set the address to detect: {said}"}
    assert said in failed(run("make", "-o", tmp_path / "new.json", *A, env=fake))


@pytest.mark.parametrize(("does", "said"), [
    ("echo permission denied; exit 13", "hccn_tool says: permission denied (exit code 13); the device_ip in the rank "
     "table were not checked of card 0 1 2 3 4 5 6 7"),
    ("echo ipaddr:10.0.0.9; exit 3", "hccn_tool says: ipaddr:10.0.0.9 (exit code 3); the device_ip in the rank table "
     "were not checked of card 0 1 2 3 4 5 6 7"),
    ('test $2 = 3 && echo ipaddr:192.4.27.6 || exit 1', "hccn_tool says: exit code 1, no output; the device_ip in the "
     "rank table were not checked of card 0 1 2 4 5 6 7"),
    ("echo ipaddr:192.$(($2 % 4 + 1)).27.$(($2 / 4 + 6))", ""),
    ("sleep 9", "hccn_tool gave no answer in 1 s; the device_ip in the rank table were not checked of card 0 1 2 3 4 5 "
     "6 7")])
def test_addresses_that_could_not_be_checked_are_told(does, said, fake, monkeypatch, capsys):
    write(Path(fake["PATH"].split(":")[0]) / "hccn_tool", f"#!/bin/sh\n{does}\n").chmod(0o755)
    monkeypatch.setenv("PATH", fake["PATH"])
    monkeypatch.setattr(cards, "TOOL_SECONDS", 1)
    cards.check_addresses(str(TABLES[16]), SERVER_0[3])
    assert capsys.readouterr().err == (f"warning: {said}\n" if said else "")


def test_without_npu_smi_a_warning_says_what_was_not_checked(bare, monkeypatch, capsys, tmp_path):
    monkeypatch.setenv("PATH", bare["PATH"])
    monkeypatch.setattr(cards, "Path", lambda _: tmp_path)
    (tmp_path / "davinci0").touch()
    cards.check_cards([0], 0)
    assert capsys.readouterr().err == ("warning: npu-smi is not on the PATH; whether the cards are free was not "
                                       "checked\n")
    failed(program("cards.py", "--devices", 0, "--table", TABLES[2], env=bare), "--table and --server go together",
           code=2)


# ---------------------------------------------------------------------- README

@pytest.mark.parametrize("name", ["README.md", "README_CN.md"])
def test_readme_shows_what_the_commands_print(name, fake, tmp_path):
    """Every console block is run in order in a copy of the folder and prints what the README says."""
    folder = tmp_path / "copy"
    shutil.copytree(FOLDER, folder, ignore=shutil.ignore_patterns("__pycache__"))
    Path(fake["PATH"].split(":")[0], "python").symlink_to(sys.executable)
    give(fake, {card: f"192.{card % 4 + 1}.27.{6 + card // 4}" for card in range(8)})
    give(fake, {7: "Fault\n"}, "health")
    blocks = re.findall(r"```console\n(.*?)```", (FOLDER / name).read_text(), re.DOTALL)
    steps = [step for block in blocks
             for step in re.findall(r"^\$ (.+)\n((?:(?!\$ ).*\n)*)", block, re.MULTILINE)]
    assert len(steps) >= 6
    for command, shown in steps:
        done = subprocess.run(["bash", "-c", command], cwd=folder, env=fake, stdout=subprocess.PIPE,
                              stderr=subprocess.STDOUT, text=True, timeout=60, check=False)
        assert done.stdout == shown, command


def test_a_disk_that_is_full_is_no_fault_of_the_table():
    with open("/dev/full", "w") as full:
        done = subprocess.run([sys.executable, FOLDER / "rank_table.py", "check", FOLDER / "rank_table_8pcs.json"],
                              stdout=full, stderr=subprocess.PIPE, text=True, check=False, timeout=60)
    assert (done.returncode, done.stderr) == (2, "rank_table.py: error: [Errno 28] No space left on device\n")
