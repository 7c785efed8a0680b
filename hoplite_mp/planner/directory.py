"""Who holds which object, as far as a transfer needs to know.

An entry exists while a plan runs that moves the object, or while a node outside its home has
reported a copy, because that node will also report the end of its copy; then the entry is dropped,
and an object that is asked for again is a new one (so a lost object that was put again is no
duplicate of its former self). A holder that only a request has named does not keep the entry:
that node does not know that it is listed here, so it would never report the end.

Who holds an object is what its home said at a request, what receivers reported, and nothing that
anybody assumed: a parent that fails one receiver is not struck out for the others (it may be that
receiver's link), only a node's own word or its death takes it from the list.

This module must never know how parents are chosen.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from hoplite_mp.ids import unpack_id
from hoplite_mp.protocol.operations import COPY_OPERATION

if TYPE_CHECKING:
    from collections.abc import Iterable

    from hoplite_mp.planner.membership import Membership
    from hoplite_mp.protocol.messages import Distribute


@dataclass(slots=True)
class Transfer:
    """A plan that runs: nobody has withdrawn it. `waiting` is not empty."""

    plan: Distribute
    waiting: dict[int, None]  # receivers that have not reported, in the plan's order
    rates: dict[int, float]  # bytes a second that each sender is counted for
    ends_at: float  # when the model expects the end


@dataclass(slots=True)
class Entry:
    """One object. A node is in `whole`, or receives (`receiving`), or neither; never both."""

    object: bytes
    operation: int
    nbytes: int
    # The nodes that hold it, the latest last. True: the node has reported that itself.
    whole: dict[int, bool] = field(default_factory=dict)
    receiving: dict[int, int] = field(default_factory=dict)  # node -> epoch of its latest plan
    transfers: dict[int, Transfer] = field(default_factory=dict)  # by epoch
    served: dict[int, int] = field(default_factory=dict)  # node -> plans in which it has sent
    # (receiver, parent): the receiver could not get its bytes there.
    failed: set[tuple[int, int]] = field(default_factory=set)
    full: str = ""  # why the last node that held it cannot read it from its disk


class Directory:
    """All entries."""

    def __init__(self, membership: Membership) -> None:
        self._membership = membership
        self._entries_ever = 0
        self.entries: dict[bytes, Entry] = {}

    def entry(self, object_id: bytes, nbytes: int, holders: Iterable[int]) -> Entry:
        """The object's entry, made if need be; living `holders` are noted."""
        entry = self.entries.get(object_id)
        if entry is not None and entry.nbytes != nbytes and not entry.transfers:
            entry = None  # it was lost and made again, and is another value now
        if entry is None:
            operation = COPY_OPERATION | self._entries_ever
            self._entries_ever += 1
            self.entries[object_id] = entry = Entry(object_id, operation, nbytes)
        for holder in holders:
            if self._membership.is_living(holder) and holder not in entry.receiving:
                entry.whole.setdefault(holder, False)
        return entry

    def go_on(self, entries_ever: int) -> None:
        """So many there were before this directory was made."""
        self._entries_ever = max(self._entries_ever, entries_ever)

    def restore(self, plan: Distribute) -> Entry:
        """The entry of a plan that ran before this directory was made."""
        self._entries_ever = max(self._entries_ever, (plan.operation ^ COPY_OPERATION) + 1)
        entry = self.entries.get(plan.object)
        if entry is None:
            entry = Entry(plan.object, plan.operation, plan.nbytes)
            self.entries[plan.object] = entry
        return entry

    def forget_if_over(self, entry: Entry) -> None:
        """Nothing runs, and no other node than the home has reported a copy: the entry goes."""
        if entry.transfers:
            return
        home = self._membership.node_of(unpack_id(entry.object)[0])
        if not any(reported and node != home for node, reported in entry.whole.items()):
            self.entries.pop(entry.object, None)
        elif not entry.receiving:
            entry.failed.clear()
