"""What a node tells a manager that was started again: imitates node/core/management.py and its
rooms.

Why it exists: the planner that begins anew has nothing but these words. Ends that this node was
told, and failures that the one before may not have read, are among them; of copies and plans it
says what it holds and does now.
It must never know: what the planner makes of it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hoplite_mp.protocol.messages import (
    Commit,
    ExecutionFailed,
    FetchFailed,
    FetchRequested,
    Forget,
    HostMeasured,
    LinkMeasured,
    Member,
    NodeLeaving,
    OperationDropped,
    OperationFailed,
)
from hoplite_mp.protocol.reports import (
    CopyHeld,
    DistributeHeld,
    NodeReturned,
    OperationEnded,
    ReduceHeld,
    Reported,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hoplite_mp.simulation.host import Node

__all__ = ["Memo", "report"]

ONCE = (FetchFailed, ExecutionFailed, NodeLeaving, OperationDropped)
ENDS = (Commit, OperationFailed, Forget)


class Memo:
    """What one node remembers of its words with the manager."""

    def __init__(self) -> None:
        self.once: list[Any] = []  # that nothing else would say again
        self.ends: list[Commit | OperationFailed | Forget] = []
        self.measured: dict[int, Any] = {}

    def said(self, message: Any) -> None:
        """To the manager."""
        if isinstance(message, ONCE):
            self.once.append(message)
        elif isinstance(message, HostMeasured):
            self.measured[-1] = message
        elif isinstance(message, LinkMeasured):
            self.measured[message.peer] = message

    def heard(self, message: Any) -> None:
        """From it."""
        if isinstance(message, ENDS):
            self.ends.append(message)


def report(node: Node) -> Iterator[Any]:
    """All of it, in the order of the real one."""
    number = node.number
    yield NodeReturned(number, node.incarnation, node.numbers_seen, _members(node))
    for ask in node.asks.asks.values():
        yield from node.asks.request(ask)
    for part in node.parts.parts.values():
        yield ReduceHeld(number, part.plan, part.reported)
    yield from _copies(node)
    for end in node.memo.ends:
        yield OperationEnded(number, end)
    yield from node.memo.measured.values()
    yield from node.memo.once
    yield Reported(number)


def _members(node: Node) -> tuple[Member, ...]:
    known = {**node.members, **node.missed}
    found = {number: (peer.incarnation, peer.home) for number, peer in known.items()}
    found[node.number] = node.incarnation, node.home
    return tuple(Member(number, *found[number], 2) for number in sorted(found))


def _copies(node: Node) -> Iterator[Any]:
    number, copies = node.number, node.copies
    moving = set()
    for transfer in copies.by_epoch.values():
        yield DistributeHeld(number, transfer.plan, transfer.receives)
        if transfer.receives:
            moving.add(transfer.plan.object)
    for object_id in copies.known:
        yield CopyHeld(number, object_id, node.world.truth.sizes[object_id])
    for object_id, place in copies.fetching.items():
        if object_id not in moving:
            others = tuple(holder for holder in place.holders if holder != number)
            yield FetchRequested(number, object_id, place.nbytes, others)
