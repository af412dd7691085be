#!/usr/bin/env python3
"""Can the cards of this server reach those of the next server of a rank table?

    python check_network.py RANK_TABLE_FILE SERVER_ID
    python check_network.py rank_table_16pcs.json 10.155.111.140

Run it as root on the server SERVER_ID, then likewise on every other server of the table. The servers form a
ring in rank order: each card is given the address of the card with the same device_id on the next server
(hccn_tool -netdetect; the driver keeps that address), then its link is read (hccn_tool -net_health).

Prints one line a card. Exit code: 0 every card says Success, 1 any other answer, 2 bad input.
NET_HEALTH_SECONDS (default 10): how long to wait for cards that have not finished detecting.
"""
from __future__ import annotations

import os
import re
import sys
import time

from cards import find_hccn_tool, run_tool
from rank_table import print_findings
from rules import Device, by_server, read_table


class BadInput(Exception):
    """The message is the sentence for the user (exit code 2)."""


def find_peers(table: str, server_id: str) -> list[tuple[Device, Device]]:
    """Each card of a server with its partner on the next one; a walk on each server tries every card both ways."""
    devices, report = read_table(table)
    if report.faults:
        print_findings(report, table)
        raise SystemExit(2)
    servers = list(by_server(sorted(devices, key=lambda device: device.rank_id)).values())
    names = [group[0].server_id for group in servers]
    if not names:
        raise BadInput(f"of {table} nothing can be read here: it is of version 2.0, the layout of Atlas 350 cards")
    if server_id not in names:
        raise BadInput(f"{table} has no server {server_id}; its servers are {', '.join(names)}")
    if len(servers) == 1:
        raise BadInput(f"{table} has one server, whose cards talk inside it; a network to check takes two")
    mine = names.index(server_id)
    theirs = servers[(mine + 1) % len(servers)]
    by_id = {device.device_id: device for device in theirs}
    pairs = [(device, by_id.get(device.device_id, theirs[position % len(theirs)]))
             for position, device in enumerate(servers[mine])]
    for _, peer in pairs:
        if peer.device_ip.version != 4:
            raise BadInput(f"{peer.where}.device_ip is IPv6, and hccn_tool -netdetect takes IPv4 only")
    return pairs


def read_health(tool: str, card: int, deadline: float) -> str:
    """What a card says of its link; waits until the deadline while it is still detecting."""
    while True:
        said = " ".join(run_tool(tool, "-i", str(card), "-net_health", "-g")[1].split())
        said = said.rpartition("net health status: ")[2]
        if said not in ("Init", "Detect ip set") or time.monotonic() >= deadline:
            return said or "no answer"
        time.sleep(1)


def main() -> int:
    seconds = os.getenv("NET_HEALTH_SECONDS", "10")
    try:
        if len(sys.argv) != 3:
            raise BadInput("usage: python check_network.py RANK_TABLE_FILE SERVER_ID")
        if not re.fullmatch("[0-9]{1,4}", seconds):
            raise BadInput(f"NET_HEALTH_SECONDS is '{seconds}'; give whole seconds")
        tool = find_hccn_tool()
        if tool is None:
            raise BadInput("hccn_tool is not on PATH nor in /usr/local/Ascend/driver/tools; run this on an Ascend "
                           "server with its driver installed")
        pairs = find_peers(*sys.argv[1:])
    except BadInput as error:
        print(f"check_network.py: {error}", file=sys.stderr)
        return 2

    refused = {}  # what a card said that would not take the address
    for card, peer in pairs:
        code, said = run_tool(tool, "-i", str(card.device_id), "-netdetect", "-s", "address", str(peer.device_ip))
        if code != 0:
            refused[card] = f"cannot set the address to detect: {' '.join(said.split()) or f'exit code {code}'}"
    deadline, bad = time.monotonic() + int(seconds), 0  # for all cards together
    for card, peer in pairs:
        said = refused.get(card) or read_health(tool, card.device_id, deadline)
        print(f"device {card.device_id} -> {peer.device_ip} (device {peer.device_id} of {peer.server_id}): {said}",
              flush=True)
        bad += said != "Success"
    if bad:
        print(f"check_network.py: {bad} of this server's cards did not reach their partner; check cables, switch, and "
              "netmask and gateway (hccn_tool -i DEVICE_ID -ip -g, -gateway -g)", file=sys.stderr)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
