"""Growing blocks: blocks that are sent while members of Groups are still writing them.

Copying an array into the store takes a large share of the time needed to send it, so sending begins
as soon as the first bytes are written. The member reports the bytes that it has written, and the
node advances the engine's cells over the block. A cell is a range of memory that the engine sends
to other nodes up to a watermark. The node takes over the lease when the member passes the block to
a call. The block is freed when no call needs it, no plan has cells in it, and its writer has
written everything or is dead.
"""

from __future__ import annotations

import bisect
import contextlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from hoplite_mp._common import ids
from hoplite_mp._common.object_states import NODE_SLOT

if TYPE_CHECKING:
    from collections.abc import Callable

    from hoplite_mp import _shm
    from hoplite_mp._node.ports import EnginePort
    from hoplite_mp._node.store.budget import Store

__all__ = ["BLOCK", "EngineBuffer", "GrowingBlock", "GrowingBlocks", "Ranges"]

# Sets of byte ranges: the bytes of a block that have arrived or been written.
#
# A block that a process is still writing is filled in pieces in any order, and so is a copy whose
# transfer was replanned. Bytes that have arrived are not transferred again.


# Maximum number of gaps in one stripe that are filled individually. Higher: more requests to the
# node that sends the stripe. Lower: more bytes after the last gap are sent again even though they
# have arrived.
GAPS_MAX = 8


@dataclass(slots=True)
class Ranges:
    """A set of bytes. Invariant: the ranges [begin, end) are sorted and do not touch."""

    found: list[tuple[int, int]] = field(default_factory=list)

    def add(self, begin: int, end: int) -> None:
        """Adds the bytes [begin, end)."""
        if begin >= end:
            return
        first = bisect.bisect_left(self.found, (begin, 0))
        if first and self.found[first - 1][1] >= begin:
            first -= 1
            begin = self.found[first][0]
        last = first
        while last < len(self.found) and self.found[last][0] <= end:
            end = max(end, self.found[last][1])
            last += 1
        self.found[first:last] = [(begin, end)]

    def reach(self, begin: int, end: int) -> int:
        """The number of bytes present without a gap from `begin` on, up to `end`."""
        place = bisect.bisect_right(self.found, begin, key=lambda found: found[0]) - 1
        if place < 0 or self.found[place][1] <= begin:
            return 0
        return min(self.found[place][1], end) - begin

    def gaps(self, begin: int, end: int) -> list[tuple[int, int]]:
        """The missing ranges in [begin, end), at most GAPS_MAX. The last range may include bytes
        that are present."""
        missing: list[tuple[int, int]] = []
        while begin < end:
            begin += self.reach(begin, end)
            if begin == end:
                break
            place = bisect.bisect_right(self.found, begin, key=lambda found: found[0])
            gap_end = end
            if place < len(self.found) and len(missing) + 1 < GAPS_MAX:
                gap_end = min(end, self.found[place][0])
            missing.append((begin, gap_end))
            begin = gap_end
        return missing

    def copy(self) -> Ranges:
        """An independent copy."""
        return Ranges(list(self.found))


@dataclass(slots=True, eq=False)
class EngineBuffer:
    """The memory of some engine cells. The engine's thread may write to a cell for a short time
    after the cell was closed, so a block with cells is freed through its EngineBuffer. `keep`:
    objects that must outlive these cells."""

    keep: list[Any] = field(default_factory=list)
    closing: int = 0  # number of closed cells to which the engine may still write
    then: list[Callable[[], None]] = field(default_factory=list)

    def when_free(self, action: Callable[[], None]) -> None:
        """Calls `action` when the engine no longer writes to any closed cell."""
        if self.closing:
            self.then.append(action)
        else:
            action()

    def let_go(self) -> None:
        """Called when the engine has released a closed cell."""
        self.closing -= 1
        if not self.closing:
            actions, self.then = self.then, []
            for action in actions:
                action()


BLOCK = 1 << 63  # marks a growing block in a local id; table numbers never use this bit


@dataclass(slots=True, eq=False)
class GrowingBlock:
    """One growing block. Ranges and offsets are in bytes from the start of its payload."""

    payload: int
    nbytes: int
    slot: int  # slot of the writing process; NODE_SLOT: that process is dead or has left
    written: Ranges = field(default_factory=Ranges)
    cells: dict[int, tuple[int, int]] = field(default_factory=dict)  # cell -> (begin, bytes)
    needed: bool = True  # a running call needs it
    users: int = 0  # number of plan executions with cells in it
    # called when the block is complete
    then: list[Callable[[], None]] = field(default_factory=list)

    @property
    def whole(self) -> bool:
        return self.written.reach(0, self.nbytes) == self.nbytes


class GrowingBlocks:
    """All growing blocks of one node."""

    def __init__(self, store: Store, client: _shm.NodeClient, engine: EnginePort) -> None:
        self.store = store
        self.client = client
        self.engine = engine
        self.blocks: dict[int, GrowingBlock] = {}  # by payload

    def name(self, payload: int) -> bytes:
        """The id of the block in plans. No object has this id."""
        return ids.pack_id(self.client.host_id, payload | BLOCK)

    def get(self, object_id: bytes) -> GrowingBlock | None:
        """The block with the given id in plans."""
        host_id, payload = ids.unpack_id(object_id)
        return self.blocks.get(payload ^ BLOCK) if host_id == self.client.host_id else None

    def take(self, slot: int, payload: int, nbytes: int, written: int) -> GrowingBlock:
        """Takes over a block that a member is still writing. written: the number of bytes already
        written, from the start. Raises ValueError if the block is not leased to the member or is
        too small."""
        if self.store.leases.get(payload) != slot:
            raise ValueError("the block is not leased to this member")
        if not 0 < written <= nbytes <= self.store.size_of(payload):
            raise ValueError(f"the block cannot hold {nbytes} bytes of which {written} are written")
        self.store.leases[payload] = NODE_SLOT
        source = self.blocks[payload] = GrowingBlock(payload, nbytes, slot)
        source.written.add(0, written)
        return source

    def write(self, slot: int, payload: int, ranges: list[tuple[int, int]]) -> None:
        """Records ranges that the member has written, and advances the cells over them."""
        source = self.blocks.get(payload)
        if source is None or source.slot != slot:
            return
        for begin, end in ranges:
            if 0 <= begin < end <= source.nbytes:
                source.written.add(begin, end)
        for cell, (begin, nbytes) in source.cells.items():
            with contextlib.suppress(KeyError):
                self.engine.advance(cell, source.written.reach(begin, begin + nbytes))
        if source.whole:
            actions, source.then = source.then, []
            for action in actions:
                action()
        self.maybe_free(source)

    def when_whole(self, source: list[GrowingBlock], action: Callable[[], None]) -> None:
        """Calls `action` when all of these blocks are complete."""
        missing = [block for block in source if not block.whole]
        if missing:
            missing[0].then.append(lambda: self.when_whole(missing, action))
        else:
            action()

    def lose(self, slot: int) -> None:
        """Abandons the blocks of a process that has exited."""
        for source in [block for block in self.blocks.values() if block.slot == slot]:
            self.abandon(source)

    def abandon(self, source: GrowingBlock) -> None:
        """Called when a block's writer has left or died, so that the rest is never written."""
        source.slot = NODE_SLOT
        self.maybe_free(source)

    def let_go(self, source: GrowingBlock) -> None:
        """Called when no call needs the block any longer."""
        source.needed = False
        source.then = []
        self.maybe_free(source)

    def leave(self, source: GrowingBlock) -> None:
        """Called when a plan execution no longer has cells in the block."""
        source.users -= 1
        self.maybe_free(source)

    def keep(self, source: GrowingBlock) -> tuple[int, int]:
        """Removes a complete block that becomes an object or is leased to a member. Returns
        (payload, number of bytes)."""
        # Unless `blocks` still contains this block, it was freed and its memory may have been
        # reused.
        if self.blocks.get(source.payload) is source:
            del self.blocks[source.payload]
        return source.payload, source.nbytes

    def maybe_free(self, source: GrowingBlock) -> None:
        """Frees the block if nothing needs it."""
        written = source.whole or source.slot == NODE_SLOT
        over = written and not source.needed and not source.users
        if over and self.blocks.get(source.payload) is source:
            del self.blocks[source.payload]
            self.client.give_back(source.payload)
