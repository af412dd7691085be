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


def tell(rank, call):
    """Where a rank is, for people."""
    whom = {"Send": "sends to", "Receive": "waits to receive from"}.get(call.op)
    what = f"{whom} rank {call.peer} (tag {call.tag})" if whom else f"waits at {call.op} of ranks {spell(call.group)}"
    return f"rank {rank} {what}, {call.detail}, at {call.source or 'a line the compiler made'} ({call.name})"


def stuck(calls):
    """Walk through the collectives of all ranks.

    Args:
        calls: of each rank the list of its Calls, in the order in which it runs them.

    Returns:
        None when all ranks come to their end, else the report, a line a rank. A Send does not wait, but somebody
        must receive it.
    """
    at = [0] * len(calls)
    sent = {}
    moved = True
    while moved:
        moved = False
        for rank, mine in enumerate(calls):
            while at[rank] < len(mine):
                call = mine[at[rank]]
                if call.op == "Send":
                    sent.setdefault((call.group, call.tag, rank, call.peer), []).append(call)
                elif call.op == "Receive":
                    waiting = sent.get((call.group, call.tag, call.peer, rank))
                    if not waiting:
                        break
                    other = waiting.pop(0)
                    if other.detail != call.detail:
                        return ("a Send and its Receive differ\n  " + tell(call.peer, other) + "\n  "
                                + tell(rank, call))
                else:
                    if rank not in call.group:
                        return f"a rank calls a collective of a group that it is not in\n  {tell(rank, call)}"
                    others = {other: calls[other][at[other]] if at[other] < len(calls[other]) else None
                              for other in call.group}
                    if not all(other and other.op not in POINT_TO_POINT and other.group == call.group
                               for other in others.values()):
                        break
                    if len({(other.op, other.detail) for other in others.values()}) > 1:
                        return "ranks meet at unlike collectives\n  " + "\n  ".join(
                            tell(other, theirs) for other, theirs in others.items())
                    for other in call.group:
                        at[other] += other != rank
                at[rank] += 1
                moved = True
    lines = [tell(rank, mine[at[rank]]) if at[rank] < len(mine) else f"rank {rank} is at its end"
             for rank, mine in enumerate(calls)]
    if any(at[rank] < len(mine) for rank, mine in enumerate(calls)):
        return "the ranks wait for each other\n  " + "\n  ".join(lines)
    lost = [f"{tell(key[2], call)}, and nobody receives it" for key, waiting in sent.items() for call in waiting]
    return "a Send is not received\n  " + "\n  ".join(lost) if lost else None
