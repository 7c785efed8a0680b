"""A model of the compiled engine without bytes: the cells of one node, pulls, serves and folds.

`serve_goal` and `fold_goal` of `transfer_model.py` determine the ends of blocks and when a block
may be sent; tests compare them with the engine. This module adds the times of requests and of
blocks. Nothing fails. As in the engine, a request for a key without a cell waits for the cell.

Instead of bytes, a cell has an offset in a whole object, and a content, which describes the origin
of its bytes. Pulls and folds propagate both, so a cell that is filled from a wrong cell is
detected.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from hoplite_mp._common.transfer_model import block_bytes_for, fold_goal, serve_goal
from hoplite_mp._simulation.network import WINDOW_BLOCKS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from hoplite_mp._protocol.messages import Commit, ExecuteReduce
    from hoplite_mp._simulation.network import VirtualNetwork

__all__ = [
    "Content",
    "Key",
    "ScaleCell",
    "ScaleEngine",
    "ScaleOracle",
    "ScaleStream",
    "WrongCompletion",
    "WrongPlace",
]

# Invariants of all data that plans deliver.
#
# A copy contains its object completely. A result contains each contributor of its commit exactly
# once in every byte, and is computed by the same additions on every host, so it has the same bits.


class WrongCompletion(AssertionError):
    """An operation ended incorrectly, or did not end."""


class ScaleOracle:
    """The invariants of one run."""

    def __init__(self) -> None:
        self.sizes: dict[bytes, int] = {}  # bytes of all objects and results
        self._sums: dict[tuple[int, int], Content] = {}  # by operation and first byte
        self._commits: dict[int, Commit] = {}

    def check_copy(self, object_id: bytes, cells: Iterable[ScaleCell]) -> None:
        """Checks that these cells are a copy of the object."""
        for cell in _in_order(cells, 0, self.sizes[object_id]):
            if cell.content != object_id:
                raise WrongPlace(f"a copy of {object_id.hex()} has {cell}")

    def check_commit(self, commit: Commit) -> None:
        """Checks that all commits of an operation are equal."""
        known = self._commits.setdefault(commit.operation, commit)
        if commit != known:
            raise WrongCompletion(f"{commit} and {known}")

    def check_result(
        self, plan: ExecuteReduce, commit: Commit, cells: Iterable[ScaleCell], begin: int, end: int
    ) -> None:
        """Checks the cells that a destination seals as bytes [begin, end) of the result."""
        if commit.contributors != plan.members:
            raise WrongPlace(f"{commit} has other members than {plan.members}")
        for cell in _in_order(cells, begin, end):
            place = plan.operation, cell.begin
            if place not in self._sums:
                self._sums[place] = cell.content
                _check_sum(plan, cell.content)
            elif self._sums[place] != cell.content:
                raise WrongPlace(f"{cell} has different bits on different hosts")


def _in_order(cells: Iterable[ScaleCell], begin: int, end: int) -> list[ScaleCell]:
    """Returns the nonempty cells in order. They must be full and cover [begin, end)."""
    found = sorted((cell for cell in cells if cell.nbytes), key=lambda cell: cell.begin)
    at = begin
    for cell in found:
        if cell.begin != at or cell.watermark != cell.nbytes:
            raise WrongPlace(f"expected bytes from {at} on, found {cell}")
        at += cell.nbytes
    if at != end:
        raise WrongPlace(f"bytes {at} to {end} are missing")
    return found


def _check_sum(plan: ExecuteReduce, content: Content) -> None:
    leaves = []
    left = [content]
    while left:  # not recursive, because a chain of a thousand nodes nests a thousand folds
        one = left.pop()
        if isinstance(one, tuple):
            left.extend(reversed(one))
        else:
            leaves.append(one)
    if sorted(leaves) != list(plan.members):
        raise WrongPlace(f"contributors {leaves}, not {plan.members}")
    if plan.rule == "fold" and leaves != list(plan.order):
        raise WrongPlace(f"contributors are folded as {leaves}, not as {plan.order}")


Key = tuple[int, int, int, int]
# The id of an object, the index of a member, or a tuple of contents that were added in this order
# (a floating-point sum in another order may have different bits).
Content = Any

# Number of one-way delays until the first request between two hosts arrives, after TCP, TLS and the
# handshake.
CONNECT_WAYS = 6


class WrongPlace(AssertionError):
    """Bytes are in the wrong place."""


@dataclass(slots=True, eq=False)
class ScaleCell:
    """Bytes [0, watermark) are valid and final. The first is byte `begin` of the whole object."""

    key: Key | None
    begin: int
    nbytes: int
    watermark: int
    content: Content  # None: empty
    block: int
    filled: Callable[[], None] | None = None  # called when all bytes are present
    serves: dict[ScaleStream, None] = field(default_factory=dict)
    feeds: list[ScaleFold] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class ScaleFold:
    """A fold whose next step ends at byte `goal`; `behind` sources have not reached it."""

    cell: ScaleCell
    sources: Sequence[ScaleCell]
    goal: int = 0
    behind: int = 0

    def set_goal(self) -> bool:
        """Computes the next step's goal. Returns whether that step is possible."""
        cell = self.cell
        self.goal = end = fold_goal(cell.nbytes, cell.watermark, cell.block)
        self.behind = sum(source.watermark < end for source in self.sources)
        return not self.behind


@dataclass(slots=True, eq=False)
class ScaleStream:
    """One pull."""

    cell: ScaleCell
    puller: ScaleEngine
    server: ScaleEngine
    key: Key
    to: int  # the puller's host
    next: int = 0
    source: ScaleCell | None = None  # the server's cell
    in_flight: int = 0
    queued: bool = False

    def offer_next(self) -> None:
        """Queues the stream at the network if its next block is ready."""
        source, end = self.source, self.cell.nbytes
        if self.queued or source is None or self.next >= end:
            return
        if self.in_flight < WINDOW_BLOCKS and source.watermark >= serve_goal(
            source.nbytes, self.next, source.block, end
        ):
            self.queued = True
            self.server.network.offer(self.server.host, self)

    def take(self) -> tuple[int, int]:
        """Returns the next block, which is sent now."""
        assert self.source is not None
        self.queued = False
        begin, source = self.next, self.source
        self.next = end = serve_goal(source.nbytes, begin, source.block, self.cell.nbytes)
        self.in_flight += 1
        self.offer_next()
        return begin, end

    def arrive(self, begin: int, end: int) -> None:
        """Called when the block has arrived at the puller."""
        cell, source = self.cell, self.source
        assert source is not None
        if begin != cell.watermark or cell.begin != source.begin or source.watermark < end:
            raise WrongPlace(f"byte {begin} of {source} arrives at {cell}")
        cell.content = source.content
        self.in_flight -= 1
        if end == cell.nbytes:
            del source.serves[self]
        else:
            self.offer_next()
        self.puller.raise_to(cell, end)


class ScaleEngine:
    """All cells of one node."""

    def __init__(
        self, network: VirtualNetwork, host: int, block_bytes: int, least: int = 0
    ) -> None:
        """least: minimum length of blocks (coarser, but faster to simulate)."""
        self.network = network
        self.host = host
        self.block_bytes = block_bytes
        self.least = least
        self.keys: dict[Key, ScaleCell] = {}
        self.waiting: dict[Key, list[ScaleStream]] = {}
        self.links: set[ScaleEngine] = set()
        self.cells: set[ScaleCell] = set()  # open cells

    def cell(
        self, key: Key | None, begin: int, nbytes: int, content: Content = None, watermark: int = 0
    ) -> ScaleCell:
        """Creates a cell, and starts the streams that are waiting for its key."""
        block = max(self.least, block_bytes_for(nbytes, self.block_bytes))
        cell = ScaleCell(key, begin, nbytes, watermark, content, block)
        self.cells.add(cell)
        if key is not None:
            if key in self.keys:
                raise WrongPlace(f"a second cell for the key {key}")
            self.keys[key] = cell
            for stream in self.waiting.pop(key, ()):
                self._attach(stream, cell)
        return cell

    def raise_to(self, cell: ScaleCell, watermark: int) -> None:
        """Advances a cell's watermark."""
        before = cell.watermark
        cell.watermark = watermark
        for stream in cell.serves:
            stream.offer_next()
        for fold in cell.feeds:
            if before < fold.goal <= watermark:
                fold.behind -= 1
                if not fold.behind:
                    self.network.timeline.after(0.0, self._step, fold)
        if watermark == cell.nbytes and cell.filled is not None:
            cell.filled()

    def close(self, cell: ScaleCell) -> None:
        """Closes a full cell that no stream reads."""
        if cell.watermark < cell.nbytes or cell.serves:
            raise WrongPlace(f"the cell {cell.key} is closed at byte {cell.watermark}")
        self.cells.remove(cell)
        if cell.key is not None:
            del self.keys[cell.key]

    # ---- pulls

    def pull(self, cell: ScaleCell, server: ScaleEngine, key: Key) -> None:
        """Fills the cell from another node."""
        timeline = self.network.timeline
        if not cell.nbytes:
            timeline.after(0.0, self.raise_to, cell, 0)
            return
        ways = 1
        if server not in self.links:
            ways = CONNECT_WAYS
            self.links.add(server)
            server.links.add(self)
        delay = ways * self.network.delay(self.host, server.host)
        timeline.after(delay, server.requested, ScaleStream(cell, self, server, key, self.host))

    def requested(self, stream: ScaleStream) -> None:
        """Called when another node requests a cell of this node."""
        cell = self.keys.get(stream.key)
        if cell is not None:
            self._attach(stream, cell)
        else:
            self.waiting.setdefault(stream.key, []).append(stream)

    def _attach(self, stream: ScaleStream, cell: ScaleCell) -> None:
        if stream.cell.nbytes > cell.nbytes:
            raise WrongPlace(f"{stream.cell} is pulled from {cell}, which is shorter")
        stream.source = cell
        cell.serves[stream] = None
        stream.offer_next()

    # ---- folds

    def fold(self, cell: ScaleCell, sources: Sequence[ScaleCell]) -> None:
        """Fills the cell by a left fold over cells of this node."""
        places = {(source.begin, source.nbytes) for source in (cell, *sources)}
        if len(places) > 1:
            raise WrongPlace(f"a fold adds bytes of different offsets, {places}")
        fold = ScaleFold(cell, sources)
        for source in sources:
            source.feeds.append(fold)
        if fold.set_goal():
            self.network.timeline.after(0.0, self._step, fold)

    def _step(self, fold: ScaleFold) -> None:
        cell, end = fold.cell, fold.goal
        if any(source.watermark < end for source in fold.sources):
            raise WrongPlace(f"{cell} is folded to byte {end} of {fold.sources}")
        if cell.content is None:
            cell.content = tuple(source.content for source in fold.sources)
        self.raise_to(cell, end)
        if end < cell.nbytes and fold.set_goal():
            self.network.timeline.after(0.0, self._step, fold)
