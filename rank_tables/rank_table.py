#!/usr/bin/env python3
"""Check, make and merge HCCL rank tables. Standard library only: copy this one file to any server.

A rank table tells HCCL which device (NPU card) of which server is which rank of a distributed job.

    python rank_table.py check rank_table_8pcs.json --size 8 --chip 910A
    python rank_table.py make --devices 0-7 --server-ip 10.155.111.140 -o server0.json
    python rank_table.py merge server0.json server1.json -o rank_table_16pcs.json
    python rank_table.py ranks FILE             one line a rank: RANK_ID DEVICE_ID SERVER_ID
    python rank_table.py peers FILE SERVER_ID   one line a device: its partner on the next server

`check` reports every fault of a table in one run, a line each, on stderr, and warnings apart:

    fault: server_list[1].device[3].device_ip: WHAT IS WRONG; mend: WHAT TO DO

Exit codes: 0 the table is good; 1 it has faults or cannot be read (make, merge: no good table can be
written); 2 wrong usage. Faults are what HCCL refuses or hangs on. The rules are those of CANN's HCCL user
guide, chapter on the rank table, and of HCCL's own parser (topoinfo_ranktableConcise.cc, config.cc).

Without --chip the rules common to both chips are faults and those of 910A alone are warnings, because the
table itself does not name the chip; a device_id above 7 shows that it cannot be a 910A. 910B stands for all
Atlas A2 servers.
"""
from __future__ import annotations

import argparse
import ipaddress
import json
import os
import re
import shutil
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Hashable, Iterable
from typing import Any, NamedTuple

Address = "ipaddress.IPv4Address | ipaddress.IPv6Address"  # a string: Python 3.9 has no | between types

MAX_FILE_BYTES = 16 * 1024 * 1024  # ten thousand devices make about 1 MiB
MAX_DEPTH = 10                     # a table is five levels deep
MAX_SERVER_ID_BYTES = 64
MAX_DEVICE_ID = {"910A": 7, "910B": 15}
DEVICES_A_SERVER_910A = (1, 2, 4, 8)
HCCN_TOOL_HOME = "/usr/local/Ascend/driver/tools/hccn_tool"  # where the driver puts it; often not on PATH
HCCN_TOOL_SECONDS = 30
DEVICE_IP_MEND = "write the address that `hccn_tool -i DEVICE_ID -ip -g` shows on that server"

# What HCCL reads, and what else is met in good tables. Any other key is most likely a spelling mistake.
TABLE_KEYS = ("status", "version", "server_count", "server_list")
SERVER_KEYS = ("server_id", "device")
DEVICE_KEYS = ("device_id", "device_ip", "rank_id")
OTHER_KNOWN_KEYS = {"super_pod_list", "host_nic_ip", "host_ip", "container_ip", "super_device_id",
                    "device_port", "backup_device_ip", "backup_device_port", "host_port"}


# ---------------------------------------------------------------------- findings

class Finding(NamedTuple):
    """One line of a report. `where` is a path in the table such as `server_list[1].device[3].device_ip`."""
    level: str
    where: str
    what: str
    mend: str

    def __str__(self) -> str:
        return f"{self.level}: {self.where}: {self.what}; mend: {self.mend}"


class Report:
    """All findings on one table, in the order in which they were made."""

    def __init__(self) -> None:
        self.findings: list[Finding] = []
        self.suits_910a = True

    def fault(self, where: str, what: str, mend: str) -> None:
        self.findings.append(Finding("fault", where, what, mend))

    def warn(self, where: str, what: str, mend: str) -> None:
        self.findings.append(Finding("warning", where, what, mend))

    @property
    def faults(self) -> list[Finding]:
        return [finding for finding in self.findings if finding.level == "fault"]

    @property
    def warnings(self) -> list[Finding]:
        return [finding for finding in self.findings if finding.level == "warning"]


class Refusal(Exception):
    """A command cannot do its work; the message is the sentence for the user (exit code 1)."""


# ---------------------------------------------------------------------- reading

class Number(NamedTuple):
    """A JSON number as it is written: a fault wherever it stands, and maybe too long for int()."""
    text: str


class Object(dict):
    """A JSON object that remembers which of its keys were given more than once (the last value wins)."""

    def __init__(self, pairs: Iterable[tuple[str, Any]] = ()) -> None:
        pairs = list(pairs)
        super().__init__(pairs)
        self.repeated = [key for key, times in Counter(key for key, _ in pairs).items() if times > 1]


def refuse_constant(name: str) -> None:
    """NaN and Infinity: Python's json would accept them, HCCL's parser does not."""
    raise ValueError(f"{name} is not a JSON value")


def read_file(path: str, report: Report) -> bytes | None:
    """The bytes of the file, or None with a fault."""
    try:
        with open(path, "rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        report.fault("file", f"cannot be read: {reason}", "give the path of a rank table that you may read")
        return None
    if len(data) > MAX_FILE_BYTES:
        report.fault("file", f"is larger than {MAX_FILE_BYTES // 1024 // 1024} MiB",
                     "give a rank table, not another kind of file")
        return None
    return data


def parse_json(data: bytes, report: Report) -> Any:
    """The JSON value in data, numbers as Number, objects as Object; None, with a fault, if it is not JSON."""
    encoding = json.detect_encoding(data)
    if encoding != "utf-8":
        what = "starts with a byte order mark" if encoding == "utf-8-sig" else f"is {encoding} text"
        report.fault("file", what, "save it as UTF-8 without a byte order mark")
    try:
        text = data.decode(encoding)
    except UnicodeDecodeError as error:
        report.fault(f"byte {error.start}", f"is not {encoding} text: {error.reason}", "save it as UTF-8")
        return None
    if not text.strip():
        report.fault("file", "is empty", "write one with: rank_table.py make")
        return None
    try:
        return json.loads(text, object_pairs_hook=Object, parse_int=Number, parse_float=Number,
                          parse_constant=refuse_constant)
    except json.JSONDecodeError as error:
        report.fault(f"line {error.lineno} column {error.colno}", f"is not JSON: {error.msg}",
                     "correct the spelling there, or just before it")
    except ValueError as error:
        report.fault("file", f"is not JSON: {error}", "write every value as a string in double quotes")
    except RecursionError:
        report.fault("file", "is nested too deeply", "see rank_table_8pcs.json")
    return None


def show(value: Any) -> str:
    """A value for a message: ASCII, one line, shortened."""
    if isinstance(value, Object):
        return "an object"
    if isinstance(value, list):
        return "a list"
    text = value.text if isinstance(value, Number) else json.dumps(value)
    return text if len(text) <= 80 else text[:77] + "..."


def quoting(value: Any, otherwise: str) -> str:
    """The mend for a scalar that is not a string: quotes around a number, else the mend of the place."""
    return f'write it in double quotes: "{show(value)}"' if isinstance(value, Number) else otherwise


def join(where: str, key: str) -> str:
    """The path of owner[key], where `where` is the owner's path ("" for the table itself)."""
    name = key if re.fullmatch(r"[A-Za-z0-9_]{1,40}", key) else f"[{show(key)}]"
    return f"{where}.{name}" if where else name


def parse_address(text: str) -> Address | None:
    """An IPv4 or IPv6 address by inet_pton's strict rules (no leading zeros, no zone, no prefix), or None."""
    for family in (socket.AF_INET, socket.AF_INET6):
        try:
            return ipaddress.ip_address(socket.inet_pton(family, text))
        except (OSError, ValueError):
            pass
    return None


def is_host_address(address: Address) -> bool:
    """Whether another machine could reach a card or a server by this address."""
    return not (address.is_unspecified or address.is_loopback or address.is_multicast
                or address == ipaddress.IPv4Address("255.255.255.255"))


# ---------------------------------------------------------------------- the rules

class Device(NamedTuple):
    """One entry of a server's device list; None for what is missing or broken."""
    where: str
    server_index: int
    server_id: str | None = None
    device_id: int | None = None
    device_ip: Address | None = None
    rank_id: int | None = None
    has_ip: bool = False


def check_table(table: Any, report: Report, size: int | None = None,
                chip: str | None = None) -> list[Device]:
    """Applies every rule to a value from parse_json and returns all devices in file order.

    size: number of ranks the table must be for, or None. chip: "910A", "910B" or None for unknown.
    """
    if not isinstance(table, Object):
        report.fault("file", f"holds {show(table)}, not a JSON object", "see rank_table_8pcs.json")
        return []
    check_keys(table, "", TABLE_KEYS, report)
    check_status(table, report)
    check_version(table, chip, report)
    servers = read_list(table, "server_list", "", report)
    check_server_count(table, len(servers), report)

    devices: list[Device] = []
    server_ids: list[tuple[str, str]] = []
    for index, (where, server) in enumerate(servers):
        if not isinstance(server, Object):
            report.fault(where, f"is {show(server)}, not an object",
                         'write {"server_id": ..., "device": [...]}')
            continue
        check_keys(server, where, SERVER_KEYS, report)
        server_id = read_server_id(server, where, report)
        if server_id is not None:
            server_ids.append((join(where, "server_id"), server_id))
        for place, device in read_list(server, "device", where, report):
            devices.append(read_device(device, place, index, server_id, len(servers) > 1, report))

    check_repeats(server_ids, "give each server its own entry and its own server_id", report)
    check_device_ids(devices, report)
    check_device_ips(devices, report)
    check_ranks(devices, report)
    check_server_order(devices, report)
    check_910a(devices, chip, report)
    if size is not None and devices and len(devices) != size:
        report.fault("server_list", f"describes {len(devices)} ranks, but the job has {size}",
                     f"use a table for {size} ranks, or start {len(devices)} ranks")
    return devices


def check_keys(owner: Object, where: str, read_keys: Iterable[str], report: Report) -> None:
    """No key twice; a key that HCCL does not read holds strings and is a known one."""
    for key in owner.repeated:
        report.fault(join(where, key), "is given more than once", "keep the right one")
    for key, value in owner.items():
        if key in read_keys:
            continue
        if key not in OTHER_KNOWN_KEYS:
            report.warn(join(where, key), "is no key of a rank table and is read by nobody",
                        "check its spelling, or remove it")
        check_strings(value, join(where, key), report)


def check_strings(value: Any, where: str, report: Report, depth: int = 0) -> None:
    """Every scalar is a string, also where HCCL does not look."""
    if depth > MAX_DEPTH:
        report.fault(where[:120], "is nested too deeply", "see rank_table_8pcs.json")
    elif isinstance(value, Object):
        for key in value.repeated:
            report.fault(join(where, key), "is given more than once", "keep the right one")
        for key, item in value.items():
            check_strings(item, join(where, key), report, depth + 1)
    elif isinstance(value, list):
        for index, item in enumerate(value):
            check_strings(item, f"{where}[{index}]", report, depth + 1)
    elif not isinstance(value, str):
        report.fault(where, f"{show(value)} is not a string",
                     quoting(value, "write a string, or remove the key"))


def read_string(owner: Object, key: str, where: str, mend: str, report: Report) -> str | None:
    """owner[key] when it is a string; else None with a fault."""
    place = join(where, key)
    value = owner.get(key)
    if key not in owner:
        report.fault(place, "is missing", mend)
    elif isinstance(value, (Object, list)):
        report.fault(place, f"is {show(value)}, not a string", mend)
    elif not isinstance(value, str):
        report.fault(place, f"{show(value)} is not a string", quoting(value, mend))
    else:
        return value
    return None


def read_number(owner: Object, key: str, where: str, mend: str, report: Report) -> int | None:
    """owner[key] when it is a string of plain decimal digits; else None with a fault."""
    text = read_string(owner, key, where, mend, report)
    if text is None:
        return None
    if not re.fullmatch(r"0|[1-9][0-9]{0,8}", text):
        report.fault(join(where, key), f"{show(text)} is not a plain decimal number", mend)
        return None
    return int(text)


def read_list(owner: Object, key: str, where: str, report: Report) -> list[tuple[str, Any]]:
    """The items of the list owner[key] with their paths; an empty list, with a fault, when there are none."""
    place = join(where, key)
    items = owner.get(key)
    mend = f"list at least one {key.replace('_list', '')} there"
    if key not in owner:
        report.fault(place, "is missing", mend)
    elif not isinstance(items, list):
        report.fault(place, f"is {show(items)}, not a list", mend)
    elif not items:
        report.fault(place, "is empty", mend)
    else:
        return [(f"{place}[{index}]", item) for index, item in enumerate(items)]
    return []


def check_status(table: Object, report: Report) -> None:
    mend = "write \"completed\" once the table is whole"
    status = read_string(table, "status", "", mend, report)
    if status == "initializing":
        report.fault("status", "is \"initializing\", so HCCL would wait 30 minutes for it to change", mend)
    elif status is not None and status != "completed":
        report.fault("status", f"is {show(status)}, not \"completed\"", mend)


def check_version(table: Object, chip: str | None, report: Report) -> None:
    mend = "write \"1.0\""
    version = read_string(table, "version", "", mend, report)
    if version == "1.2" and chip is None:
        report.warn("version", "\"1.2\" is for A3 super-pods only, and super_pod_list is not checked here",
                    "write \"1.0\" on 910A and 910B")
    elif version == "1.2":
        report.fault("version", f"\"1.2\" is for A3 super-pods, not for {chip}", mend)
    elif version is not None and version != "1.0":
        report.fault("version", f"is {show(version)}, which HCCL does not know", mend)


def check_server_count(table: Object, servers: int, report: Report) -> None:
    mend = f"write \"{servers}\""
    if "server_count" not in table:
        report.warn("server_count", "is missing; HCCL then counts server_list itself", mend)
        return
    count = read_number(table, "server_count", "", mend, report)
    if count is not None and servers and count != servers:
        report.fault("server_count", f"is \"{count}\", but server_list has {servers}", mend)


def read_server_id(server: Object, where: str, report: Report) -> str | None:
    """The server_id when it can tell servers apart; else None with a fault."""
    place = join(where, "server_id")
    mend = "write the server's own IP address"
    server_id = read_string(server, "server_id", where, mend, report)
    if server_id is None:
        return None
    if not server_id:
        report.fault(place, "is empty", mend)
    elif not server_id.isprintable() or " " in server_id:
        report.fault(place, f"{show(server_id)} has white space or an unprintable character", mend)
    elif len(server_id.encode()) > MAX_SERVER_ID_BYTES:
        report.fault(place, f"{show(server_id)} is longer than {MAX_SERVER_ID_BYTES} bytes", mend)
    else:
        address = parse_address(server_id)
        if address is not None and not is_host_address(address):
            report.warn(place, f"{show(server_id)} is no address by which other servers know this one", mend)
        return server_id
    return None


def read_device(device: Any, where: str, server_index: int, server_id: str | None,
                several_servers: bool, report: Report) -> Device:
    """One entry of a device list, each of its values checked by itself."""
    if not isinstance(device, Object):
        report.fault(where, f"is {show(device)}, not an object",
                     'write {"device_id": ..., "device_ip": ..., "rank_id": ...}')
        return Device(where, server_index, server_id)
    check_keys(device, where, DEVICE_KEYS, report)
    highest = MAX_DEVICE_ID["910B"]
    device_id = read_number(device, "device_id", where, f'number the cards "0" to "{highest}"', report)
    if device_id is not None and device_id > highest:
        report.fault(join(where, "device_id"), f"is {device_id}, but no server has a device above {highest}",
                     "write the card's number as npu-smi shows it")
        device_id = None
    has_ip = device.get("device_ip", "") != ""
    device_ip = read_device_ip(device, where, several_servers, report) if has_ip or several_servers else None
    rank_id = read_number(device, "rank_id", where, 'number the ranks "0", "1", ...', report)
    return Device(where, server_index, server_id, device_id, device_ip, rank_id, has_ip)


def read_device_ip(device: Object, where: str, several_servers: bool, report: Report) -> Address | None:
    """The card's own network address; else None with a fault."""
    place = join(where, "device_ip")
    if several_servers and device.get("device_ip", "") == "":
        report.fault(place, "is missing, and the cards of several servers talk by it", DEVICE_IP_MEND)
        return None
    text = read_string(device, "device_ip", where, DEVICE_IP_MEND, report)
    if text is None:
        return None
    address = parse_address(text)
    if address is None:
        report.fault(place, f"{show(text)} is not an IPv4 or IPv6 address", DEVICE_IP_MEND)
    elif not is_host_address(address):
        report.fault(place, f"{show(text)} is not an address that a card can have", DEVICE_IP_MEND)
    else:
        return address
    return None


def check_repeats(entries: Iterable[tuple[str, Hashable]], mend: str, report: Report) -> None:
    """entries: (where, value) pairs; every value may stand only once."""
    first: dict[Hashable, str] = {}
    for where, value in entries:
        if value in first:
            report.fault(where, f"\"{value}\" stands already at {first[value]}", mend)
        else:
            first[value] = where


def by_server(devices: Iterable[Device]) -> dict[int, list[Device]]:
    """The devices of each server_list entry, in file order."""
    servers: dict[int, list[Device]] = {}
    for device in devices:
        servers.setdefault(device.server_index, []).append(device)
    return servers


def check_device_ids(devices: list[Device], report: Report) -> None:
    for server_devices in by_server(devices).values():
        check_repeats([(join(device.where, "device_id"), device.device_id) for device in server_devices
                       if device.device_id is not None], "list each card of a server once", report)


def check_device_ips(devices: list[Device], report: Report) -> None:
    """No address twice in the whole table, and one address family (HCCL: CheckRankIpFamily)."""
    addressed = [(join(device.where, "device_ip"), device.device_ip) for device in devices
                 if device.device_ip is not None]
    check_repeats(addressed, DEVICE_IP_MEND, report)
    for where, address in addressed:
        if address.version != addressed[0][1].version:
            first_where, first = addressed[0]
            report.fault(where, f"is IPv{address.version}, but {first_where} is IPv{first.version}",
                         "use addresses of one family in the whole table")


def check_ranks(devices: list[Device], report: Report) -> None:
    """rank_id is 0..N-1, each once, and those of one server are not mixed with those of another."""
    mend = f"number the {len(devices)} devices \"0\" to \"{len(devices) - 1}\", one server after the other"
    for device in devices:
        if device.rank_id is not None and device.rank_id >= len(devices):
            report.fault(join(device.where, "rank_id"),
                         f"is {device.rank_id}, but {len(devices)} ranks end at {len(devices) - 1}", mend)
    ranked = [device for device in devices if device.rank_id is not None and device.rank_id < len(devices)]
    check_repeats([(join(device.where, "rank_id"), device.rank_id) for device in ranked], mend, report)
    spans = rank_spans(ranked)
    for (low, high, index), (next_low, next_high, next_index) in zip(spans, spans[1:]):
        if next_low < high:
            report.fault(f"server_list[{next_index}].device",
                         f"its ranks {next_low} to {next_high} interleave with ranks {low} to {high} "
                         f"of server_list[{index}]", mend)


def rank_spans(devices: list[Device]) -> list[tuple[int, int, int]]:
    """(lowest rank, highest rank, server_list index) of each server, by lowest rank."""
    return sorted((min(ranks), max(ranks), index) for index, ranks in (
        (index, [device.rank_id for device in group if device.rank_id is not None])
        for index, group in by_server(devices).items()) if ranks)


def check_server_order(devices: list[Device], report: Report) -> None:
    """MindSpore asks that ranks follow the dictionary order of server_id ("10.0.0.10" before "10.0.0.9")."""
    names = {device.server_index: device.server_id for device in devices}
    in_rank_order = [names[index] for _, _, index in rank_spans(devices) if names[index] is not None]
    if in_rank_order != sorted(in_rank_order):
        report.warn("server_list", "the order of ranks is not the dictionary order of server_id: "
                    + ", ".join(show(name) for name in sorted(in_rank_order)[:4]) + " ...",
                    "renumber the ranks in that order; rank_table.py merge does it")


def check_910a(devices: list[Device], chip: str | None, report: Report) -> None:
    """What 910A servers ask beyond 910B: faults for --chip 910A, warnings while the chip is unknown."""
    high_ids = [device for device in devices if (device.device_id or 0) > MAX_DEVICE_ID["910A"]]
    if chip == "910B" or (chip is None and high_ids):
        report.suits_910a = False
        return
    complain: Callable[[str, str, str], None] = report.fault if chip == "910A" else report.warn
    before = len(report.findings)
    servers = by_server(devices)
    for device in high_ids:
        complain(join(device.where, "device_id"),
                 f"is {device.device_id}, but a 910A server has devices 0 to 7",
                 "write the card's number as npu-smi shows it")
    for device in devices:
        if not device.has_ip and len(servers) == 1:
            complain(join(device.where, "device_ip"), "is missing, and 910A asks for it on one server too",
                     f"{DEVICE_IP_MEND} (910B needs none here)")
    for index, group in servers.items():
        where = f"server_list[{index}].device"
        ids = {device.device_id for device in group if device.device_id is not None}
        if len(group) not in DEVICES_A_SERVER_910A:
            complain(where, f"has {len(group)} devices, but a 910A server takes part with 1, 2, 4 or 8",
                     "use 1, 2, 4 or 8 cards a server")
        elif len(group) in (2, 4) and not (ids <= {0, 1, 2, 3} or ids <= {4, 5, 6, 7}):
            complain(where, f"cards {', '.join(map(str, sorted(ids)))} are not all in 0-3 or all in 4-7, the "
                     "two groups that are linked on a 910A server", "take the cards from one group")
    counts = {len(group) for group in servers.values()}
    if len(counts) > 1:
        complain("server_list", "its servers have unequal numbers of devices, which 910A refuses",
                 "use as many cards on each server")
    report.suits_910a = len(report.findings) == before
    if len(servers) > 1 and len(counts) == 1 and counts <= {1, 2, 4}:
        report.warn("server_list", f"has {min(counts)} devices on each of several servers; CANN allows it, "
                    "MindSpore's guide asks for 8 on 910A", "use 8 cards a server if the job does not start")


# ---------------------------------------------------------------------- make, merge

class Server(NamedTuple):
    """What a table is built from. cards: (device_id, device_ip or None) in the order of their ranks."""
    server_id: str
    cards: list[tuple[int, Address | None]]


def build_table(servers: list[Server]) -> dict[str, Any]:
    """A table of the servers in dictionary order of server_id, ranks numbered through."""
    rank = 0
    server_list = []
    for server_id, cards in sorted(servers, key=lambda server: server.server_id):
        entries = []
        for device_id, device_ip in cards:
            entry = {"device_id": str(device_id)}
            if device_ip is not None:
                entry["device_ip"] = str(device_ip)
            entry["rank_id"] = str(rank)
            entries.append(entry)
            rank += 1
        server_list.append({"server_id": server_id, "device": entries, "host_nic_ip": "reserve"})
    return {"version": "1.0", "server_count": str(len(server_list)), "server_list": server_list,
            "status": "completed"}


def format_table(table: dict[str, Any]) -> str:
    """JSON text with one line a device."""
    text = json.dumps(table, indent=4)
    return re.sub(r"\{\s*(\"device_id\"[^{}]*?)\s*\}",
                  lambda entry: "{" + re.sub(r"\s*\n\s*", " ", entry.group(1)) + "}", text) + "\n"


def write_table(table: dict[str, Any], label: str, chip: str | None, path: str | None) -> int:
    """Checks a built table and writes it whole or not at all. Returns the exit code."""
    text = format_table(table)
    report = Report()
    check_table(parse_json(text.encode(), report), report, chip=chip)
    print_findings(report, label)
    if report.faults:
        return 1
    if path is None:
        sys.stdout.write(text)
        return 0
    temporary = f"{path}.{os.getpid()}.tmp"
    try:
        with open(temporary, "x", encoding="utf-8") as file:
            file.write(text)
        os.replace(temporary, path)
    except OSError as error:
        if os.path.exists(temporary):
            os.unlink(temporary)
        raise Refusal(f"cannot write {path}: {error.strerror}; "
                      "give a path in a folder that you may write") from error
    return 0


def find_hccn_tool() -> str | None:
    return shutil.which("hccn_tool") or (HCCN_TOOL_HOME if os.access(HCCN_TOOL_HOME, os.X_OK) else None)


def ask_hccn_tool(tool: str, device_id: int) -> tuple[Address | None, str]:
    """The address that hccn_tool gives for a card (IPv4, else IPv6), and what it said when there is none."""
    said = ""
    for family in ([], ["-inet6"]):
        try:
            answer = subprocess.run([tool, "-i", str(device_id), "-ip", *family, "-g"], check=False,
                                    stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                                    stderr=subprocess.STDOUT, timeout=HCCN_TOOL_SECONDS)
        except subprocess.TimeoutExpired:
            return None, f"hccn_tool gave no answer in {HCCN_TOOL_SECONDS} s"
        except OSError as error:
            return None, f"hccn_tool cannot be run ({error.strerror})"
        text = answer.stdout.decode("utf-8", "replace")
        for value in re.findall(r"^[\w ]*addr\w*\s*:\s*([^\s/]+)", text, re.MULTILINE | re.IGNORECASE):
            address = parse_address(value)
            if address is not None and is_host_address(address):
                return address, ""
        said = said or " ".join(text.split()) or f"exit code {answer.returncode}, no output"
    return None, f"hccn_tool says: {said}"


def read_hccn_conf(path: str) -> tuple[dict[int, Address], str]:
    """The addresses in hccn.conf (`address_N=IP`, `IPv6address_N=IP`); what to say where a card has none."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            text = file.read()
    except OSError as error:
        return {}, f"cannot be read ({error.strerror})"
    addresses: dict[int, Address] = {}
    for key in ("IPv6address", "address"):  # where a card has both, the IPv4 address stands, as in hccn_tool
        for device_id, value in re.findall(rf"^\s*{key}_([0-9]+)\s*=\s*(\S+)", text, re.MULTILINE):
            address = parse_address(value)
            if address is not None and is_host_address(address):
                addresses[int(device_id)] = address
    return addresses, "has no good address line for it" if text.strip() else "is empty"


def find_device_ips(device_ids: list[int], conf: str, needed: bool) -> dict[int, Address]:
    """The address of each card: hccn_tool first, then hccn.conf. Refusal when one is needed and not found."""
    tool = find_hccn_tool()
    from_conf, conf_state = read_hccn_conf(conf)
    found: dict[int, Address] = {}
    for device_id in device_ids:
        address, said = ask_hccn_tool(tool, device_id) if tool else (None, "hccn_tool is not installed")
        address = address or from_conf.get(device_id)
        if address is not None:
            found[device_id] = address
        elif needed:
            raise Refusal(
                f"device {device_id} has no address: {said}; {conf} {conf_state}. Set one with "
                f"`hccn_tool -i {device_id} -ip -s address IP netmask MASK`, or say --chip 910B if this is "
                "the job's only server")
    return found


def find_server_ip() -> Address:
    """The address of the interface that leads outward. A datagram socket is connected, nothing is sent.

    Not the host name's address: /etc/hosts often maps that to 127.0.1.1.
    """
    for family, far_away in ((socket.AF_INET, "192.0.2.1"), (socket.AF_INET6, "2001:db8::1")):
        try:
            with socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.connect((far_away, 9))
                address = parse_address(probe.getsockname()[0])
        except OSError:
            continue
        if address is not None and is_host_address(address):
            return address
    raise Refusal("this server has no address that leads outward; "
                  "give the one by which the other servers know it: --server-ip IP")


# ---------------------------------------------------------------------- commands

def counted(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def print_findings(report: Report, label: str) -> None:
    """Faults, then warnings, then their number, on stderr."""
    for finding in report.faults + report.warnings:
        print(finding, file=sys.stderr)
    if report.findings:
        print(f"{label}: {counted(len(report.faults), 'fault')}, {counted(len(report.warnings), 'warning')}",
              file=sys.stderr)


def load(path: str, size: int | None, chip: str | None) -> tuple[list[Device], Report]:
    """Reads and checks a file; the devices are whole where the report has no faults."""
    report = Report()
    data = read_file(path, report)
    table = parse_json(data, report) if data is not None else None
    if table is None and report.faults:
        return [], report
    return check_table(table, report, size, chip), report


def load_good(path: str, size: int | None = None, chip: str | None = None) -> list[Device]:
    """The devices of a good table by rank. Prints the faults of another one and leaves with exit code 1."""
    devices, report = load(path, size, chip)
    if report.faults:
        print_findings(report, path)
        raise SystemExit(1)
    return sorted(devices, key=lambda device: device.rank_id)


def command_check(arguments: argparse.Namespace) -> int:
    devices, report = load(arguments.file, arguments.size, arguments.chip)
    print_findings(report, arguments.file)
    if report.faults:
        return 1
    chips = arguments.chip or ("910A and 910B" if report.suits_910a else "910B, not 910A")
    servers = counted(len(by_server(devices)), "server")
    print(f"{arguments.file}: ok, {counted(len(devices), 'rank')} on {servers} (rules of {chips})")
    return 0


def command_ranks(arguments: argparse.Namespace) -> int:
    for device in load_good(arguments.file, arguments.size, arguments.chip):
        print(device.rank_id, device.device_id, device.server_id)
    return 0


def command_peers(arguments: argparse.Namespace) -> int:
    """The servers form a ring in rank order, so a walk on each of them tries every card both ways."""
    servers = list(by_server(load_good(arguments.file)).values())
    names = [group[0].server_id for group in servers]
    if arguments.server_id not in names:
        raise Refusal(f"{arguments.file} has no server {arguments.server_id}; "
                      f"its servers are {', '.join(names)}")
    if len(servers) == 1:
        raise Refusal(f"{arguments.file} has one server, whose cards talk inside it; "
                      "a network to check takes two")
    mine = names.index(arguments.server_id)
    theirs = servers[(mine + 1) % len(servers)]
    by_id = {device.device_id: device for device in theirs}
    for position, device in enumerate(servers[mine]):
        peer = by_id.get(device.device_id, theirs[position % len(theirs)])
        if peer.device_ip.version != 4:
            raise Refusal(f"{peer.where}.device_ip is IPv6, and hccn_tool -netdetect takes IPv4 only")
        print(device.device_id, peer.device_ip, peer.device_id, peer.server_id)
    return 0


def command_make(arguments: argparse.Namespace) -> int:
    server_ip = arguments.server_ip
    if server_ip is None:
        server_ip = find_server_ip()
        print(f"server_id {server_ip} is the address that leads outward; --server-ip sets another",
              file=sys.stderr)
    found = find_device_ips(arguments.devices, arguments.hccn_conf, needed=arguments.chip != "910B")
    cards = [(device_id, found.get(device_id)) for device_id in arguments.devices]
    table = build_table([Server(str(server_ip), cards)])
    return write_table(table, "table", arguments.chip, arguments.output)


def command_merge(arguments: argparse.Namespace) -> int:
    servers: list[Server] = []
    source: dict[str, str] = {}
    for path in arguments.files:
        # 910B's rules are the looser ones; an A3 table (version 1.2) holds more than merge could keep
        for group in by_server(load_good(path, chip=arguments.chip or "910B")).values():
            server_id = group[0].server_id
            if server_id in source:
                raise Refusal(f"server {server_id} is in {source[server_id]} and again in {path}; "
                              "merge one table of each server")
            source[server_id] = path
            servers.append(Server(server_id, [(device.device_id, device.device_ip) for device in group]))
    return write_table(build_table(servers), "merged table", arguments.chip, arguments.output)


# ---------------------------------------------------------------------- command line

def devices_argument(text: str) -> list[int]:
    """"4,5,6,7" or "0-15" or "0-3,8" to a sorted list of device ids."""
    device_ids: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*([0-9]{1,3})\s*(?:-\s*([0-9]{1,3})\s*)?", part)
        if not match:
            raise argparse.ArgumentTypeError(f"{text!r} is not a list of devices such as 4,5,6,7 or 0-15")
        first, last = int(match.group(1)), int(match.group(2) or match.group(1))
        if first > last:
            raise argparse.ArgumentTypeError(f"the range {part.strip()} runs backwards; write {last}-{first}")
        device_ids += range(first, last + 1)
    if len(set(device_ids)) < len(device_ids):
        raise argparse.ArgumentTypeError(f"{text!r} names a device twice")
    if max(device_ids) > MAX_DEVICE_ID["910B"]:
        raise argparse.ArgumentTypeError(f"{text!r} goes beyond device {MAX_DEVICE_ID['910B']}")
    return sorted(device_ids)


def server_ip_argument(text: str) -> Address:
    address = parse_address(text)
    if address is None or not is_host_address(address):
        raise argparse.ArgumentTypeError(f"{text!r} is no address by which other servers could know this one")
    return address


def size_argument(text: str) -> int:
    if not re.fullmatch(r"[1-9][0-9]{0,8}", text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of ranks")
    return int(text)


def output_argument(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
    """Refuses an occupied output path before any work is done."""
    if arguments.output is not None and os.path.lexists(arguments.output) and not arguments.force:
        parser.error(f"{arguments.output} exists; say --force to replace it")
    if arguments.output is not None and os.path.isdir(arguments.output):
        parser.error(f"{arguments.output} is a folder; give the path of a file")


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Check, make and merge HCCL rank tables.")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    commands.required = True

    chip = argparse.ArgumentParser(add_help=False)
    chip.add_argument("--chip", choices=sorted(MAX_DEVICE_ID),
                      help="which servers the table is for; without it 910A's own rules only warn")
    size = argparse.ArgumentParser(add_help=False)
    size.add_argument("--size", type=size_argument, metavar="N", help="the table must describe N ranks")
    output = argparse.ArgumentParser(add_help=False)
    output.add_argument("-o", "--output", metavar="FILE", help="write there instead of to stdout")
    output.add_argument("--force", action="store_true", help="replace FILE if it exists")

    check = commands.add_parser("check", parents=[size, chip], help="report all faults of a table")
    check.add_argument("file", metavar="FILE")
    check.set_defaults(run=command_check)

    ranks = commands.add_parser("ranks", parents=[size, chip],
                                help="print RANK_ID DEVICE_ID SERVER_ID of each rank of a good table")
    ranks.add_argument("file", metavar="FILE")
    ranks.set_defaults(run=command_ranks)

    peers = commands.add_parser("peers", help="print DEVICE_ID PEER_IP PEER_DEVICE_ID PEER_SERVER_ID of each "
                                "device of a server, the peer being on the next server")
    peers.add_argument("file", metavar="FILE")
    peers.add_argument("server_id", metavar="SERVER_ID")
    peers.set_defaults(run=command_peers)

    make = commands.add_parser("make", parents=[chip, output], help="write the table of this server")
    make.add_argument("--devices", type=devices_argument, default="0-7", metavar="LIST",
                      help="cards of this server, such as 4,5,6,7 or 0-15 (default 0-7)")
    make.add_argument("--server-ip", type=server_ip_argument, metavar="IP",
                      help="server_id (default: the address that leads outward)")
    make.add_argument("--hccn-conf", default="/etc/hccn.conf", metavar="PATH",
                      help="read for cards whose address hccn_tool does not give (default /etc/hccn.conf)")
    make.set_defaults(run=command_make)

    merge = commands.add_parser("merge", parents=[chip, output],
                                help="write one table from those of several servers")
    merge.add_argument("files", nargs="+", metavar="FILE")
    merge.set_defaults(run=command_merge)
    return parser


def main() -> int:
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="backslashreplace")  # a file name may not fit the terminal's encoding
    parser = build_parser()
    arguments = parser.parse_args()
    if hasattr(arguments, "output"):
        output_argument(parser, arguments)
    try:
        code = arguments.run(arguments)
        sys.stdout.flush()
        return code
    except Refusal as error:
        print(f"rank_table.py: error: {error}", file=sys.stderr)
        return 1
    except BrokenPipeError:  # the reader, such as `head`, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


if __name__ == "__main__":
    sys.exit(main())
