"""Call buffers: memory in the store in which the members of a Group on one host give large parts.

Members write to call buffers and read from them without the node. The node frees the buffers of a
Group when the Group has ended and every member that has asked for buffers has left or died, because
such a member may still write. A member that only reads looks at the masks of the board afterwards,
and those are cleared before the buffers are freed.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from hoplite_mp._common.object_states import NODE_SLOT

if TYPE_CHECKING:
    from hoplite_mp._node.store.budget import Store

__all__ = ["CallBuffers"]

# The buffers of all Groups take at most 1/8 of the store. A lower number: more or larger calls need
# no objects, but large objects find less room.
BUFFERS_SHARE = 8


@dataclass(slots=True)
class Buffers:
    """Those of one Group."""

    # Bytes of one buffer -> payload offset of the block that has those of all ranks.
    blocks: dict[int, int] = field(default_factory=dict)
    users: set[tuple[int, int]] = field(default_factory=set)  # (client slot, rank)
    ended: bool = False  # the Group


class CallBuffers:
    """The buffers of all Groups on this host."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._of: dict[int, Buffers] = {}  # generation of a Group -> its buffers

    def ask(self, generation: int, size: int, slot: int, rank: int, nbytes: int) -> int | None:
        """The offset in the store of the first of `2 * size` buffers of that size; None: the store
        has no room. The member in that slot uses them from now on."""
        buffers = self._of.setdefault(generation, Buffers())
        if nbytes not in buffers.blocks:
            total = 2 * size * nbytes
            if total + self._store.call_buffer_bytes > self._store.limit // BUFFERS_SHARE:
                return None
            if not self._store.has_spare(total):
                return None
            payload = self._store.lease(total, NODE_SLOT, preallocated=True)
            if payload is None:
                return None
            buffers.blocks[nbytes] = payload
            self._store.call_buffer_bytes += self._store.size_of(payload)
        buffers.users.add((slot, rank))
        return buffers.blocks[nbytes]

    def left(self, generation: int, slot: int, rank: int) -> None:
        """That member has left its Group."""
        buffers = self._of.get(generation)
        if buffers is not None:
            buffers.users.discard((slot, rank))
            self._free_unused(generation, buffers)

    def forget_client(self, slot: int) -> None:
        """That process has ended."""
        for generation, buffers in list(self._of.items()):
            buffers.users = {one for one in buffers.users if one[0] != slot}
            self._free_unused(generation, buffers)

    def ended(self, generation: int) -> None:
        """That Group has ended."""
        buffers = self._of.get(generation)
        if buffers is not None:
            buffers.ended = True
            self._free_unused(generation, buffers)

    def _free_unused(self, generation: int, buffers: Buffers) -> None:
        if buffers.ended and not buffers.users:
            for payload in buffers.blocks.values():
                self._store.call_buffer_bytes -= self._store.size_of(payload)
                self._store.free(payload)
            del self._of[generation]
