"""The rules of a rank table: reads one and finds every fault that it has. Used by rank_table.py.

They are those of CANN's HCCL user guide, chapter on the rank table, and of HCCL's own parser
(topoinfo_ranktableConcise.cc, config.cc). A fault is what HCCL refuses or hangs on.
"""
from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Hashable, Iterable
from typing import Any, NamedTuple

from cards import Address, is_host_address, parse_address

MAX_FILE_BYTES = 16 * 1024 * 1024  # ten thousand devices make about 1 MiB
MAX_DEPTH = 10                     # a table is five levels deep
MAX_SERVER_ID_BYTES = 64
MAX_DEVICE_ID = {"910A": 7, "910B": 15}
DEVICES_A_SERVER_910A = (1, 2, 4, 8)
DEVICE_ID_MEND = "write the card's number as npu-smi shows it"
DEVICE_IP_MEND = "write the address that `hccn_tool -i DEVICE_ID -ip -g` shows on that server"
EXAMPLE = "see rank_table_8pcs.json"

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

    def of_level(self, level: str) -> list[Finding]:
        return [finding for finding in self.findings if finding.level == level]

    @property
    def faults(self) -> list[Finding]:
        return self.of_level("fault")


class Device(NamedTuple):
    """One entry of a server's device list; None for what is missing or broken."""
    where: str
    server_index: int
    server_id: str | None = None
    device_id: int | None = None
    device_ip: Address | None = None
    rank_id: int | None = None
    has_ip: bool = False


def by_server(devices: Iterable[Device]) -> dict[int, list[Device]]:
    """The devices of each server_list entry, in file order."""
    servers: dict[int, list[Device]] = {}
    for device in devices:
        servers.setdefault(device.server_index, []).append(device)
    return servers


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


def read_table(path: str, size: int | None = None, chip: str | None = None) -> tuple[list[Device], Report]:
    """Reads and checks a file; the devices are whole where the report has no faults."""
    report = Report()
    try:
        with open(path, "rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        report.fault("file", f"cannot be read: {reason}", "give the path of a rank table that you may read")
        return [], report
    if len(data) > MAX_FILE_BYTES:
        report.fault("file", f"is larger than {MAX_FILE_BYTES // 1024 // 1024} MiB",
                     "give a rank table, not another kind of file")
        return [], report
    return check_bytes(data, report, size, chip), report


def check_bytes(data: bytes, report: Report, size: int | None = None, chip: str | None = None) -> list[Device]:
    """Checks the content of a file and returns all devices in file order.

    size: number of ranks the table must be for, or None. chip: "910A", "910B" or None for unknown.
    """
    table = parse_json(data, report)
    if table is None and report.faults:
        return []
    if not isinstance(table, Object):
        report.fault("file", f"holds {show(table)}, not a JSON object", EXAMPLE)
        return []
    return check_table(table, report, size, chip)


def parse_json(data: bytes, report: Report) -> Any:
    """The JSON value in data, numbers as Number, objects as Object; None, with a fault, if it is not JSON."""
    def refuse_constant(name: str) -> None:  # NaN and Infinity, which Python would accept and HCCL does not
        raise ValueError(f"{name} is not a JSON value")

    if data and not data.strip(b"\0"):
        report.fault("file", "holds NUL bytes only, as after a power loss", "write it anew with: rank_table.py make")
        return None
    encoding = json.detect_encoding(data)
    if encoding != "utf-8":
        what = "starts with a byte order mark" if encoding == "utf-8-sig" else f"is {encoding} text"
        report.fault("file", what, "save it as UTF-8 without a byte order mark")
    try:
        text = data.decode(encoding)
        if text.strip():
            return json.loads(text, object_pairs_hook=Object, parse_int=Number, parse_float=Number,
                              parse_constant=refuse_constant)
        report.fault("file", "is empty", "write one with: rank_table.py make")
    except UnicodeDecodeError as error:
        report.fault(f"byte {error.start}", f"is not {encoding} text: {error.reason}", "save it as UTF-8")
    except json.JSONDecodeError as error:
        report.fault(f"line {error.lineno} column {error.colno}", f"is not JSON: {error.msg}",
                     "correct the spelling there, or just before it")
    except ValueError as error:
        report.fault("file", f"is not JSON: {error}", "write every value as a string in double quotes")
    except RecursionError:
        report.fault("file", "is nested too deeply", EXAMPLE)
    return None


def show(value: Any) -> str:
    """A value for a message: ASCII, one line, shortened."""
    if isinstance(value, (Object, list)):
        return "an object" if isinstance(value, Object) else "a list"
    text = value.text if isinstance(value, Number) else json.dumps(value)
    return text if len(text) <= 80 else text[:77] + "..."


def quoting(value: Any, otherwise: str) -> str:
    """The mend for a scalar that is not a string: quotes around a number, else the mend of the place."""
    return f'write it in double quotes: "{show(value)}"' if isinstance(value, Number) else otherwise


def join(where: str, key: str) -> str:
    """The path of owner[key], where `where` is the owner's path ("" for the table itself)."""
    name = key if re.fullmatch(r"[A-Za-z0-9_]{1,40}", key) else f"[{show(key)}]"
    return f"{where}.{name}" if where else name


def read_string(owner: Object, key: str, where: str, mend: str, report: Report) -> str | None:
    """owner[key] when it is a string; else None with a fault."""
    place, value = join(where, key), owner.get(key)
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
    place, items = join(where, key), owner.get(key)
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


# ---------------------------------------------------------------------- the rules, place by place

def check_table(table: Object, report: Report, size: int | None, chip: str | None) -> list[Device]:
    """Applies every rule; returns all devices in file order."""
    if table.get("version") == "2.0":  # another layout, with numbers, and a topology file beside it
        report.warn("version", '"2.0" is the layout of Atlas 350 cards (A5; CANN 9.0); nothing of it is checked here',
                    "start the ranks with mpirun or msrun, which need no table")
        return []
    check_keys(table, "", TABLE_KEYS, report)
    check_status_and_version(table, chip, report)
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
    check_devices(devices, report)
    check_ranks(devices, report)
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
        report.fault(where[:120], "is nested too deeply", EXAMPLE)
    elif isinstance(value, Object):
        for key in value.repeated:
            report.fault(join(where, key), "is given more than once", "keep the right one")
        for key, item in value.items():
            check_strings(item, join(where, key), report, depth + 1)
    elif isinstance(value, list):
        for index, item in enumerate(value):
            check_strings(item, f"{where}[{index}]", report, depth + 1)
    elif not isinstance(value, str):
        report.fault(where, f"{show(value)} is not a string", quoting(value, "write a string, or remove the key"))


def check_status_and_version(table: Object, chip: str | None, report: Report) -> None:
    mend = 'write "completed" once the table is whole'
    status = read_string(table, "status", "", mend, report)
    if status == "initializing":
        report.fault("status", 'is "initializing", so HCCL would wait 30 minutes for it to change', mend)
    elif status not in (None, "completed"):
        report.fault("status", f'is {show(status)}, not "completed"', mend)
    mend = 'write "1.0"'
    version = read_string(table, "version", "", mend, report)
    if version == "1.2" and chip is None:
        report.warn("version", '"1.2" is for A3 super-pods only, and super_pod_list is not checked here',
                    'none on A3; write "1.0" on 910A and 910B')
    elif version == "1.2":
        report.fault("version", f'"1.2" is for A3 super-pods, not for {chip}', mend)
    elif version not in (None, "1.0"):
        report.fault("version", f"is {show(version)}, which HCCL does not know", mend)


def check_server_count(table: Object, servers: int, report: Report) -> None:
    mend = f'write "{servers}"' if servers else "write the number of servers in server_list"
    if "server_count" not in table:
        report.warn("server_count", "is missing; HCCL then counts server_list itself", mend)
        return
    count = read_number(table, "server_count", "", mend, report)
    if count is not None and servers and count != servers:
        report.fault("server_count", f'is "{count}", but server_list has {servers}', mend)


def read_server_id(server: Object, where: str, report: Report) -> str | None:
    """The server_id when it can tell servers apart; else None with a fault."""
    place, mend = join(where, "server_id"), "write the server's own IP address"
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
        if parse_address(server_id) and not is_host_address(parse_address(server_id)):
            report.warn(place, f"{show(server_id)} is no address by which other servers know this one", mend)
        return server_id
    return None


def read_device(device: Any, where: str, server_index: int, server_id: str | None, several_servers: bool,
                report: Report) -> Device:
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
                     DEVICE_ID_MEND)
        device_id = None
    has_ip = device.get("device_ip", "") != ""
    device_ip = read_device_ip(device, where, report) if has_ip else None
    if several_servers and not has_ip:
        report.fault(join(where, "device_ip"), "is missing, and the cards of several servers talk by it",
                     DEVICE_IP_MEND)
    rank_id = read_number(device, "rank_id", where, 'number the ranks "0", "1", ...', report)
    return Device(where, server_index, server_id, device_id, device_ip, rank_id, has_ip)


def read_device_ip(device: Object, where: str, report: Report) -> Address | None:
    """The card's own network address; else None with a fault."""
    text = read_string(device, "device_ip", where, DEVICE_IP_MEND, report)
    address = None if text is None else parse_address(text)
    if text is None or is_host_address(address):
        return address
    what = "an IPv4 or IPv6 address" if address is None else "an address that a card can have"
    report.fault(join(where, "device_ip"), f"{show(text)} is not {what}", DEVICE_IP_MEND)
    return None


# ---------------------------------------------------------------------- the rules, between places

def check_repeats(entries: Iterable[tuple[str, Hashable]], mend: str, report: Report) -> None:
    """entries: (where, value) pairs; every value but None may stand only once."""
    first: dict[Hashable, str] = {}
    for where, value in entries:
        if value in first:
            report.fault(where, f'"{value}" stands already at {first[value]}', mend)
        elif value is not None:
            first[value] = where


def check_devices(devices: list[Device], report: Report) -> None:
    """A card stands once on its server, an address once in the whole table; one address family (CheckRankIpFamily)."""
    for group in by_server(devices).values():
        check_repeats([(join(device.where, "device_id"), device.device_id) for device in group],
                      "list each card of a server once", report)
    addressed = [(join(device.where, "device_ip"), device.device_ip) for device in devices if device.device_ip]
    check_repeats(addressed, DEVICE_IP_MEND, report)
    for where, address in addressed:
        first_where, first = addressed[0]
        if address.version != first.version:
            report.fault(where, f"is IPv{address.version}, but {first_where} is IPv{first.version}",
                         "use addresses of one family in the whole table")


def check_ranks(devices: list[Device], report: Report) -> None:
    """rank_id is 0..N-1, each once, and those of one server are not mixed with those of another.

    MindSpore asks that ranks follow the dictionary order of server_id ("10.0.0.10" before "10.0.0.9").
    """
    mend = f'number the {len(devices)} devices "0" to "{len(devices) - 1}", one server after the other'
    ranked = [device for device in devices if device.rank_id is not None]
    for device in ranked:
        if device.rank_id >= len(devices):
            report.fault(join(device.where, "rank_id"),
                         f"is {device.rank_id}, but {len(devices)} ranks end at {len(devices) - 1}", mend)
    good = [device for device in ranked if device.rank_id < len(devices)]
    check_repeats([(join(device.where, "rank_id"), device.rank_id) for device in good], mend, report)
    spans = rank_spans(good)
    for (low, high, index), (next_low, next_high, next_index) in zip(spans, spans[1:]):
        if next_low < high:
            report.fault(f"server_list[{next_index}].device",
                         f"its ranks {next_low} to {next_high} interleave with ranks {low} to {high} "
                         f"of server_list[{index}]", mend)
    names = {device.server_index: device.server_id for device in devices}
    in_rank_order = [names[index] for _, _, index in rank_spans(ranked) if names[index] is not None]
    if in_rank_order != sorted(in_rank_order):
        report.warn("server_list", "the order of ranks is not the dictionary order of server_id: "
                    + ", ".join(show(name) for name in sorted(in_rank_order)[:4]) + " ...",
                    "renumber the ranks in that order; rank_table.py merge does it")


def rank_spans(ranked: list[Device]) -> list[tuple[int, int, int]]:
    """(lowest rank, highest rank, server_list index) of each server, by lowest rank."""
    return sorted((min(device.rank_id for device in group), max(device.rank_id for device in group), index)
                  for index, group in by_server(ranked).items())


def check_910a(devices: list[Device], chip: str | None, report: Report) -> None:
    """What 910A servers ask beyond 910B: faults for --chip 910A, warnings while the chip is unknown."""
    high_ids = [device for device in devices if (device.device_id or 0) > MAX_DEVICE_ID["910A"]]
    if chip == "910B" or (chip is None and high_ids):
        report.suits_910a = False
        return
    complain = report.fault if chip == "910A" else report.warn
    before, servers = len(report.findings), by_server(devices)
    for device in high_ids:
        complain(join(device.where, "device_id"),
                 f"is {device.device_id}, but a 910A server has devices 0 to 7", DEVICE_ID_MEND)
    for device in devices:
        if not device.has_ip and len(servers) == 1:
            complain(join(device.where, "device_ip"), "is missing, and 910A asks for it on one server too",
                     f"{DEVICE_IP_MEND} (910B needs none here)")
    for index, group in servers.items():
        where = f"server_list[{index}].device"
        ids = sorted({device.device_id for device in group if device.device_id is not None})
        if len(group) not in DEVICES_A_SERVER_910A:
            complain(where, f"has {len(group)} devices, but a 910A server takes part with 1, 2, 4 or 8",
                     "use 1, 2, 4 or 8 cards a server")
        elif len(group) in (2, 4) and not (set(ids) <= {0, 1, 2, 3} or set(ids) <= {4, 5, 6, 7}):
            complain(where, f"cards {', '.join(map(str, ids))} are not all in 0-3 or all in 4-7, the "
                     "two groups that are linked on a 910A server", "take the cards from one group")
    counts = {len(group) for group in servers.values()}
    if len(counts) > 1:
        complain("server_list", "its servers have unequal numbers of devices, which 910A refuses",
                 "use as many cards on each server")
    report.suits_910a = len(report.findings) == before
    if len(servers) > 1 and len(counts) == 1 and counts <= {1, 2, 4}:
        report.warn("server_list", f"has {min(counts)} devices on each of several servers; CANN allows it, "
                    "MindSpore's guide asks for 8 on 910A", "use 8 cards a server if the job does not start")
