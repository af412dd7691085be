#!/usr/bin/env python3
"""Check, make and merge HCCL rank tables. Standard library only: copy this folder to any server.

A rank table tells HCCL which device (NPU card) of which server is which rank of a distributed job.

    python rank_table.py check rank_table_8pcs.json --size 8 --chip 910A
    python rank_table.py make --devices 0-7 --server-ip 10.155.111.140 -o server0.json
    python rank_table.py make --devices 0,1 --addresses 192.1.27.6,192.2.27.6 --server-ip 10.155.111.140
    python rank_table.py merge server0.json server1.json -o rank_table_16pcs.json
    python rank_table.py ranks FILE             one line a rank: RANK_ID DEVICE_ID SERVER_ID

`check` reports every fault of a table (rules.py) in one run, a line each, on stderr, and warnings apart:

    fault: server_list[1].device[3].device_ip: WHAT IS WRONG; mend: WHAT TO DO

Exit codes: 0 the table is good; 1 it has faults or cannot be read (make, merge: no good table can be
written); 2 wrong usage, or the output cannot be written.

Without --chip the rules common to both chips are faults and those of 910A alone are warnings, because the
table itself does not name the chip; a device_id above 7 shows that it cannot be a 910A. 910B stands for all
Atlas A2 servers.
"""
from __future__ import annotations

import argparse
import json
import os
import re
import socket
import sys
from typing import Any, NamedTuple

sys.path[:0] = {os.path.dirname(os.path.abspath(__file__))} - {*sys.path}  # PYTHONSAFEPATH leaves it out
from cards import Address, ask_address, find_hccn_tool, is_host_address, parse_address  # noqa: E402
from rules import MAX_DEVICE_ID, Device, Report, by_server, check_bytes, read_table  # noqa: E402


class Refusal(Exception):
    """A command cannot do its work; the message is the sentence for the user (exit code 1)."""


# ---------------------------------------------------------------------- check, ranks

def counted(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def print_findings(report: Report, label: str) -> None:
    """Faults, then warnings, then their number, on stderr."""
    warnings = report.of_level("warning")
    for finding in report.faults + warnings:
        print(finding, file=sys.stderr)
    if report.findings:
        print(f"{label}: {counted(len(report.faults), 'fault')}, {counted(len(warnings), 'warning')}",
              file=sys.stderr)


def load_good(path: str, size: int | None = None, chip: str | None = None) -> list[Device]:
    """The devices of a good table by rank. Prints the faults of another one and leaves with exit code 1."""
    devices, report = read_table(path, size, chip)
    if report.faults:
        print_findings(report, path)
        raise SystemExit(1)
    if not devices:
        raise Refusal(f"{path}: {report.findings[0].what}; {report.findings[0].mend}")
    return sorted(devices, key=lambda device: device.rank_id)


def command_check(arguments: argparse.Namespace) -> int:
    devices, report = read_table(arguments.file, arguments.size, arguments.chip)
    print_findings(report, arguments.file)
    if report.faults:
        return 1
    if not devices:
        print(f"{arguments.file}: not checked, it is no table of version 1.0")
        return 0
    chips = arguments.chip or ("910A and 910B" if report.suits_910a else "910B, not 910A")
    servers = counted(len(by_server(devices)), "server")
    print(f"{arguments.file}: ok, {counted(len(devices), 'rank')} on {servers} (rules of {chips})")
    return 0


def command_ranks(arguments: argparse.Namespace) -> int:
    for device in load_good(arguments.file, arguments.size, arguments.chip):
        print(device.rank_id, device.device_id, device.server_id)
    return 0


# ---------------------------------------------------------------------- make, merge

class Server(NamedTuple):
    """What a table is built from. cards: (device_id, device_ip or None) in the order of their ranks."""
    server_id: str
    cards: list[tuple[int, Address | None]]


def command_make(arguments: argparse.Namespace) -> int:
    server_ip = arguments.server_ip
    if server_ip is None:
        server_ip = find_server_ip()
        print(f"server_id {server_ip} is the address that leads outward; --server-ip sets another",
              file=sys.stderr)
    if arguments.addresses is None:
        found = find_device_ips(arguments.devices, arguments.hccn_conf, needed=arguments.chip != "910B")
    elif len(arguments.addresses) != len(arguments.devices):
        raise Refusal(f"--devices names {counted(len(arguments.devices), 'card')} and --addresses "
                      f"{len(arguments.addresses)}; give one address a card, in the order of --devices")
    else:
        found = dict(zip(arguments.devices, arguments.addresses))
    cards = [(device_id, found.get(device_id)) for device_id in sorted(arguments.devices)]
    return write_table([Server(str(server_ip), cards)], "table", arguments)


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
    return write_table(servers, "merged table", arguments)


def build_table(servers: list[Server]) -> dict[str, Any]:
    """A table of the servers in dictionary order of server_id, ranks numbered through."""
    rank = 0
    server_list = []
    for server_id, cards in sorted(servers, key=lambda server: server.server_id):
        entries = []
        for device_id, device_ip in cards:
            address = {} if device_ip is None else {"device_ip": str(device_ip)}
            entries.append({"device_id": str(device_id), **address, "rank_id": str(rank)})
            rank += 1
        server_list.append({"server_id": server_id, "device": entries, "host_nic_ip": "reserve"})
    return {"version": "1.0", "server_count": str(len(server_list)), "server_list": server_list,
            "status": "completed"}


def format_table(table: dict[str, Any]) -> str:
    """JSON text with one line a device."""
    text = json.dumps(table, indent=4)
    return re.sub(r"\{\s*(\"device_id\"[^{}]*?)\s*\}",
                  lambda entry: "{" + re.sub(r"\s*\n\s*", " ", entry.group(1)) + "}", text) + "\n"


def write_table(servers: list[Server], label: str, arguments: argparse.Namespace) -> int:
    """Builds a table, checks it, and writes it whole or not at all. Returns the exit code."""
    text, path, report = format_table(build_table(servers)), arguments.output, Report()
    check_bytes(text.encode(), report, chip=arguments.chip)
    print_findings(report, label)
    if report.faults:
        return 1
    if path is None:
        sys.stdout.write(text)
        return 0
    target = os.path.realpath(path)  # of a link what it names
    temporary = f"{target}.{os.getpid()}.tmp"
    try:
        if os.path.exists(path) and not os.path.isfile(path):  # such as /dev/stdout, which must stay what it is
            with open(path, "w", encoding="utf-8") as file:
                file.write(text)
            return 0
        with open(temporary, "x", encoding="utf-8") as file:
            file.write(text)
        os.replace(temporary, target)
    except OSError as error:
        if os.path.exists(temporary):
            os.unlink(temporary)
        raise OSError(f"cannot write {path}: {error.strerror}; "
                      "give a path in a folder that you may write") from error
    return 0


# ---------------------------------------------------------------------- the addresses of this server

def find_device_ips(device_ids: list[int], conf: str, needed: bool) -> dict[int, Address]:
    """The address of each card: hccn_tool first, then hccn.conf. Refusal when one is needed and not found."""
    tool = find_hccn_tool()
    from_conf, conf_state = read_hccn_conf(conf)
    found: dict[int, Address] = {}
    for device_id in device_ids:
        address, said = ask_address(tool, device_id) if tool else (None, "hccn_tool is not installed")
        address = address or from_conf.get(device_id)
        if address is not None:
            found[device_id] = address
        elif needed:
            raise Refusal(
                f"device {device_id} has no address: {said}; {conf} {conf_state}. Set one with "
                f"`hccn_tool -i {device_id} -ip -s address IP netmask MASK`, or say --chip 910B if this is "
                "the job's only server")
    return found


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
            if is_host_address(parse_address(value)):
                addresses[int(device_id)] = parse_address(value)
    return addresses, "has no good address line for it" if text.strip() else "is empty"


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
        if is_host_address(address):
            return address
    raise Refusal("this server has no address that leads outward; "
                  "give the one by which the other servers know it: --server-ip IP")


# ---------------------------------------------------------------------- command line

def devices_argument(text: str) -> list[int]:
    """"4,5,6,7" or "0-15" or "0-3,8" to a list of device ids, in this order."""
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
    return device_ids


def server_ip_argument(text: str) -> Address:
    if not is_host_address(parse_address(text)):
        raise argparse.ArgumentTypeError(f"{text!r} is no address by which other servers could know this one")
    return parse_address(text)


def addresses_argument(text: str) -> list[Address]:
    """"192.1.27.6,192.2.27.6" to a list of addresses."""
    addresses = [parse_address(part.strip()) for part in text.split(",")]
    for part, address in zip(text.split(","), addresses):
        if not is_host_address(address):
            raise argparse.ArgumentTypeError(f"{part.strip()!r} is no address of a card; write such as "
                                             "192.1.27.6,192.2.27.6")
    return addresses


def size_argument(text: str) -> int:
    if not re.fullmatch(r"[1-9][0-9]{0,8}", text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of ranks")
    return int(text)


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Check, make and merge HCCL rank tables.")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    commands.required = True

    def add(name, run, text):
        command = commands.add_parser(name, help=text)
        command.set_defaults(run=run, output=None)
        command.add_argument("--chip", choices=sorted(MAX_DEVICE_ID),
                             help="which servers the table is for; without it 910A's own rules only warn")
        return command

    for command in (add("check", command_check, "report all faults of a table"),
                    add("ranks", command_ranks, "print RANK_ID DEVICE_ID SERVER_ID of each rank of a good table")):
        command.add_argument("--size", type=size_argument, metavar="N", help="the table must describe N ranks")
        command.add_argument("file", metavar="FILE")
    make = add("make", command_make, "write the table of this server")
    make.add_argument("--devices", type=devices_argument, default="0-7", metavar="LIST",
                      help="cards of this server, such as 4,5,6,7 or 0-15 (default 0-7)")
    make.add_argument("--server-ip", type=server_ip_argument, metavar="IP",
                      help="server_id (default: the address that leads outward)")
    make.add_argument("--addresses", type=addresses_argument, metavar="LIST",
                      help="the cards' addresses instead of asking hccn_tool, such as 192.1.27.6,192.2.27.6")
    make.add_argument("--hccn-conf", default="/etc/hccn.conf", metavar="PATH",
                      help="read for cards whose address hccn_tool does not give (default /etc/hccn.conf)")
    merge = add("merge", command_merge, "write one table from those of several servers")
    merge.add_argument("files", nargs="+", metavar="FILE")
    for command in (make, merge):
        command.add_argument("-o", "--output", metavar="FILE", help="write there instead of to stdout")
        command.add_argument("--force", action="store_true", help="replace FILE if it exists")
    return parser


def main() -> int:
    nowhere = open(os.devnull, "w")  # noqa: SIM115  # to the end: for a stream that is closed
    sys.stdout, sys.stderr = sys.stdout or nowhere, sys.stderr or nowhere
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="backslashreplace")  # a file name may not fit the terminal's encoding
    parser = build_parser()
    arguments = parser.parse_args()
    output = arguments.output
    if output is not None and os.path.lexists(output) and not arguments.force:  # before any work is done
        parser.error(f"{output} exists; say --force to replace it")
    if output is not None and os.path.isdir(output):
        parser.error(f"{output} is a folder; give the path of a file")
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
    except OSError as error:
        print(f"rank_table.py: error: {error}", file=sys.stderr)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 2


if __name__ == "__main__":
    sys.exit(main())
