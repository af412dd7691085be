"""Do the ranks' plans meet? All collectives of all ranks are walked through before any of them runs."""
from __future__ import annotations

from typing import NamedTuple

from graph_ir import COLLECTIVES

POINT_TO_POINT = ("Send", "Receive")


class Call(NamedTuple):
    """One collective of one rank's plan."""

    op: str
    group: tuple        # the ranks that take part
    detail: str         # what all of them must agree about: the reduction, the root, type and shape
    peer: int           # Send and Receive: the other rank, else -1
    tag: int            # Send and Receive
    source: str         # the user's line, or ""
    name: str           # the operator's scope


def is_collective(op):
    """Whether an operator needs other ranks."""
    return op in COLLECTIVES or op == "NeighborExchangeV2Grad"


def spell(ranks):
    """(0, 1) -> "0, 1"."""
    return ", ".join(map(str, ranks))


def place(call):
    """The user's line, as far as it is known."""
    return f"at {call.source} ".replace("at near", "near") if call.source else ""


def tell(rank, call):
    """Where a rank is, for people."""
    whom = {"Send": "sends to", "Receive": "waits to receive from"}.get(call.op)
    what = f"{whom} rank {call.peer} (tag {call.tag})" if whom else f"waits at {call.op} of ranks {spell(call.group)}"
    return f"rank {rank} {what}, {call.detail}, {place(call)}({call.name})"


class Walk:
    """A walk through the collectives of all ranks: calls[rank] is the list of its Calls, at[rank] where it is."""

    def __init__(self, calls):
        self.calls, self.at, self.sent = calls, [0] * len(calls), {}

    def now(self, rank):
        """The Call at which a rank is, or None at its end."""
        return self.calls[rank][self.at[rank]] if self.at[rank] < len(self.calls[rank]) else None

    def step(self, rank):
        """Move a rank, and all that it meets, one Call on; returns whether it moved, or a report of what differs."""
        call = self.now(rank)
        if call.op == "Send":
            self.sent.setdefault((call.group, call.tag, rank, call.peer), []).append(call)
        elif call.op == "Receive":
            waiting = self.sent.get((call.group, call.tag, call.peer, rank))
            if not waiting:
                return False
            other = waiting.pop(0)
            if other.detail != call.detail:
                return f"a Send and its Receive differ\n  {tell(call.peer, other)}\n  {tell(rank, call)}"
        elif rank not in call.group:
            return f"a rank calls a collective of a group that it is not in\n  {tell(rank, call)}"
        else:
            others = {other: self.now(other) for other in call.group}
            if not all(other and other.op not in POINT_TO_POINT and other.group == call.group
                       for other in others.values()):
                return False
            if len({(other.op, other.detail) for other in others.values()}) > 1:
                return "ranks meet at unlike collectives\n  " + "\n  ".join(
                    tell(other, theirs) for other, theirs in others.items())
            for other in call.group:
                self.at[other] += other != rank
        self.at[rank] += 1
        return True


def stuck(calls):
    """Walk through the collectives of all ranks.

    Args:
        calls: of each rank the list of its Calls, in the order in which it runs them.

    Returns:
        None when all ranks come to their end, else the report, a line a rank. A Send does not wait, but somebody
        must receive it.
    """
    walk, moved = Walk(calls), True
    while moved:
        moved = False
        for rank in range(len(calls)):
            while walk.now(rank):
                done = walk.step(rank)
                if isinstance(done, str):
                    return done
                if not done:
                    break
                moved = True
    if any(walk.now(rank) for rank in range(len(calls))):
        return "the ranks wait for each other\n  " + "\n  ".join(
            tell(rank, walk.now(rank)) if walk.now(rank) else f"rank {rank} is at its end"
            for rank in range(len(calls)))
    lost = [f"{tell(key[2], call)}, and nobody receives it" for key, waiting in walk.sent.items() for call in waiting]
    return "a Send is not received\n  " + "\n  ".join(lost) if lost else None
