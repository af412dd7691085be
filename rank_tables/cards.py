#!/usr/bin/env python3
"""What npu-smi and hccn_tool say about the cards of this server. Standard library only.

    python cards.py --devices 0 1 4 5                     are these cards there, and free?
    python cards.py --devices 0 1 --first-rank 8 --table rank_table_16pcs.json --server 10.155.111.141

Of the ranks from --first-rank (0) on, each gets a card of --devices. With a rank table, the addresses that it gives
to the cards of that server must be those that hccn_tool gives. Exit code: 0, or 2 and one sentence on stderr; lines
before it that begin with "warning: " say what could not be checked.
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
from pathlib import Path
from typing import NamedTuple

Address = "ipaddress.IPv4Address | ipaddress.IPv6Address"  # a string: Python 3.9 has no | between types
HCCN_TOOL_HOME = "/usr/local/Ascend/driver/tools/hccn_tool"  # where the driver puts it; often not on PATH
TOOL_SECONDS = 30


# ---------------------------------------------------------------------- addresses

def parse_address(text: str) -> Address | None:
    """An IPv4 or IPv6 address by inet_pton's strict rules (no leading zeros, no zone, no prefix), or None."""
    for family in (socket.AF_INET, socket.AF_INET6):
        try:
            return ipaddress.ip_address(socket.inet_pton(family, text))
        except (OSError, ValueError):
            pass
    return None


def is_host_address(address: Address | None) -> bool:
    """Whether it is one by which another machine could reach a card or a server."""
    return address is not None and not (address.is_unspecified or address.is_loopback or address.is_multicast
                                        or str(address) == "255.255.255.255")


# ---------------------------------------------------------------------- npu-smi

class Card(NamedTuple):
    """A card as npu-smi lists it; users are (process id, name) of the processes that use it."""
    number: int
    npu: int
    name: str
    health: str
    users: tuple[tuple[str, str], ...] = ()


def list_cards(listing: str) -> list[Card]:
    """The cards in what `npu-smi info` prints.

    A card has two rows, '| NPU Name | Health |' and '| Chip [Phy-ID] | Bus-Id |'; its number is the Phy-ID where there
    is one, else that of the NPU. After them come the processes, '| NPU Chip | process id | name |'.
    """
    found: dict[tuple[str, str], Card] = {}  # by (NPU, chip)
    npu = name = health = ""
    has_phy_id = "Phy-ID" in listing
    top, _, processes = listing.partition("Process id")
    for line in top.splitlines():
        columns = [column.split() for column in line.split("|")[1:3]]
        if len(columns) < 2 or not columns[0] or not columns[0][0].isdecimal():
            continue
        if ":" in "".join(columns[1]):  # the Bus-Id
            chip = columns[0][0]
            number = "".join(columns[0][1:2]) if has_phy_id else npu
            if npu and number.isdecimal():
                found[npu, chip] = Card(int(number), int(npu), name, health)
        else:
            npu, name, health = columns[0][0], " ".join(columns[0][1:]), " ".join(columns[1])
    for npu, chip, pid, user in re.findall(r"^\| *(\d+) +(\d+) *\| *(\d+) *\| *(\S*)", processes, re.MULTILINE):
        if (npu, chip) in found:
            card = found[npu, chip]
            found[npu, chip] = card._replace(users=(*card.users, (pid, user)))
    return list(found.values())


# ---------------------------------------------------------------------- hccn_tool

def find_hccn_tool() -> str | None:
    """The path of hccn_tool, on PATH or where the driver puts it; None if it is not installed."""
    return shutil.which("hccn_tool") or (HCCN_TOOL_HOME if os.access(HCCN_TOOL_HOME, os.X_OK) else None)


def run_tool(*command: str) -> tuple[int, str]:
    """(exit code, what it printed) of a tool; exit code -1, and why, if it cannot be run or does not answer."""
    try:
        done = subprocess.run(command, check=False, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                              stderr=subprocess.STDOUT, timeout=TOOL_SECONDS)
    except subprocess.TimeoutExpired:
        return -1, f"gave no answer in {TOOL_SECONDS} s"
    except OSError as error:
        return -1, f"cannot be run ({error.strerror})"
    return done.returncode, done.stdout.decode("utf-8", "replace") or "was killed" * (done.returncode < 0)


def ask_address(tool: str, device_id: int) -> tuple[Address | None, str]:
    """The address that hccn_tool gives for a card (IPv4, else IPv6), and what it said when there is none."""
    said = ""
    for family in ([], ["-inet6"]):
        code, text = run_tool(tool, "-i", str(device_id), "-ip", *family, "-g")
        if code < 0:
            return None, f"hccn_tool {text}"
        for value in re.findall(r"^[\w ]*addr\w*\s*:\s*([^\s/]+)", text, re.MULTILINE | re.IGNORECASE):
            address = parse_address(value)
            if is_host_address(address) and code == 0:
                return address, ""
        failed = f" (exit code {code})" * (code > 0)
        said = said or (" ".join(text.split()) + failed if text.split() else f"exit code {code}, no output")
    return None, f"hccn_tool says: {said}"


# ---------------------------------------------------------------------- the check before a start

class Refusal(ValueError):
    """The ranks cannot start on these cards; the message is the sentence for the user."""


def warn(message: str) -> None:
    print(f"warning: {message}", file=sys.stderr)


def check_cards(devices: list[int], first_rank: int) -> None:
    """Refusal unless each card is there and free; devices[i] is the card of rank first_rank + i."""
    if not shutil.which("npu-smi"):
        if not list(Path("/dev").glob("davinci[0-9]*")):
            raise Refusal("there is neither npu-smi nor a /dev/davinci*: this machine has no Ascend card; "
                          "DEVICE_TARGET=CPU rehearses")
        warn("npu-smi is not on the PATH; whether the cards are free was not checked")
        return
    code, listing = run_tool("npu-smi", "info")
    if "-8020" in listing:
        raise Refusal("npu-smi says that a card is in use by another container (-8020): give each container cards of "
                      "its own, stop the other one, or start both with --privileged")
    cards = {card.number: card for card in list_cards(listing)}
    if code and not cards:
        failed = f" (exit code {code})" * (code > 0)
        raise Refusal(f"npu-smi{failed} {listing.strip() or 'says nothing'}; look at dmesg and the driver")
    if not cards:
        warn("npu-smi info lists no card in a layout known here; whether the cards are free was not checked; it says: "
             + (listing.strip().splitlines() or ["nothing"])[-1])
        return
    for rank, device in enumerate(devices, first_rank):
        if device not in cards:
            raise Refusal(f"rank {rank} needs card {device}, which npu-smi does not list; it lists: "
                          + " ".join(map(str, cards)))
        for pid, name in cards[device].users:
            raise Refusal(f"card {device}, of rank {rank}, is in use by process {pid} ({name}); end it or choose "
                          "other cards")
        if cards[device].health != "OK":
            warn(f"npu-smi gives card {device}, of rank {rank}, the health '{cards[device].health}'; where it fails, "
                 "choose another one")


def check_addresses(table: str, server_id: str) -> None:
    """Refusal where the rank table gives a card of the server another address than hccn_tool does."""
    tool = find_hccn_tool()
    try:
        servers = {server["server_id"]: server["device"]
                   for server in json.loads(Path(table).read_text(encoding="utf-8"))["server_list"]}
        listed = {int(device["device_id"]): device["device_ip"] for device in servers.get(server_id, ())
                  if device.get("device_ip")}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise Refusal(f"{table} is no good rank table ({error}); see rank_table.py check") from None
    if server_id not in servers:
        raise Refusal(f"{table} has no server {server_id}; its servers are {' '.join(servers)}")
    unchecked, said = dict(listed), ""
    for card, address in listed.items() if tool else ():
        actual, why = ask_address(tool, card)
        said = said or why
        if "no answer in" in why:  # the next card would take as long
            break
        if actual and actual != parse_address(address):
            raise Refusal(f"the rank table gives card {card} the device_ip {address}, but hccn_tool says {actual}; "
                          f"write that into {table}")
        if actual:
            del unchecked[card]
    if said:
        warn(f"{said}; the device_ip in the rank table were not checked of card {' '.join(map(str, unchecked))}")


def main() -> int:
    parser = argparse.ArgumentParser(description="Check that cards of this server are there, free, and as a rank "
                                     "table has them.")
    parser.add_argument("--devices", type=int, nargs="+", required=True, metavar="CARD", help="a card for each rank")
    parser.add_argument("--first-rank", type=int, default=0, metavar="RANK", help="the rank of the first of them (0)")
    parser.add_argument("--table", metavar="FILE", help="a good rank table, whose addresses are checked, too")
    parser.add_argument("--server", metavar="SERVER_ID", help="which server of the table this is")
    arguments = parser.parse_args()
    if (arguments.table is None) != (arguments.server is None):
        parser.error("--table and --server go together")
    try:
        check_cards(arguments.devices, arguments.first_rank)
        if arguments.table:
            check_addresses(arguments.table, arguments.server)
    except Refusal as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
