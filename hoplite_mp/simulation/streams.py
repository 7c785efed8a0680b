"""The cells of one node: pulls, serves and folds, by the one rule of `rule.py`.

Why it exists: the compiled engine without bytes. Where blocks end, and when one may move, is said
by `rule.serve_goal` and `rule.fold_goal`, which hypothesis compares with the engine; what is added
here is when things happen: requests take their time, blocks wait for their links, links end. As in
the engine, a request for a key that nobody has waits, and a closed cell refuses its readers.
It must never know: plans, what a key means, why a link ends.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from hoplite_mp.rule import block_bytes_for, fold_goal, serve_goal
from hoplite_mp.simulation.network import WINDOW_BLOCKS

if TYPE_CHECKING:
    from hoplite_mp.simulation.contents import Content, Contents
    from hoplite_mp.simulation.memory import Memory
    from hoplite_mp.simulation.network import Network

__all__ = ["Cell", "Engine", "Key", "Wanting", "WrongBytes"]

Key = tuple[int, int, int, int]

# A call takes so many ways: TCP's, TLS's and the handshake's.
CONNECT_WAYS = 6
# Who calls a process that is gone gives up after so long (node/membership/peers.py).
CONNECT_FAIL_S = 4.0


class WrongBytes(AssertionError):
    """Something is where it must not be."""


class Wanting(Protocol):
    """Who waits for cells."""

    def filled(self, cell: Cell) -> None:
        """All of it is there."""

    def failed(self, cell: Cell, reason: str) -> None:
        """It will not come as things stand."""


class Cell:
    """Bytes [0, watermark) are there and final; they lie in `memory` from `begin` on."""

    __slots__ = (
        "begin", "block", "closed", "feeds", "filled_by", "fold", "key", "memory", "nbytes",
        "pull", "serves", "told", "watermark",
    )  # fmt: skip

    def __init__(
        self, key: Key | None, memory: Memory | None, begin: int, nbytes: int, watermark: int
    ) -> None:
        self.key = key
        self.memory = memory
        self.begin = begin
        self.nbytes = nbytes
        self.watermark = watermark
        self.block = 0
        self.filled_by: Wanting | None = None
        self.pull: Stream | None = None
        self.fold: Fold | None = None
        self.serves: dict[Stream, None] = {}
        self.feeds: list[Fold] = []
        self.closed = self.told = False


class Fold:
    """`behind` of the sources have not come as far as the next step needs."""

    __slots__ = ("behind", "cell", "goal", "sources")

    def __init__(self, cell: Cell, sources: list[Cell]) -> None:
        self.cell = cell
        self.sources = sources
        self.aim()

    def aim(self) -> None:
        """At the next step."""
        cell = self.cell
        self.goal = end = fold_goal(cell.nbytes, cell.watermark, cell.block)
        self.behind = sum(source.watermark < end for source in self.sources)


class Stream:
    """One pull, seen from both sides."""

    __slots__ = ("cell", "end", "flying", "key", "next", "over", "puller", "queued", "server",
                 "source", "to")  # fmt: skip

    def __init__(self, cell: Cell, puller: Engine, server: Engine, key: Key) -> None:
        self.cell = cell
        self.puller = puller
        self.server = server
        self.to = puller.host
        self.key = key
        self.next = cell.watermark
        self.end = cell.nbytes
        self.source: Cell | None = None  # of the server
        self.flying = 0
        self.queued = self.over = False

    def look(self) -> None:
        """If the next block is there, the stream takes its turn."""
        source = self.source
        if self.queued or self.over or source is None or self.next >= self.end:
            return
        if self.flying < WINDOW_BLOCKS and source.watermark >= serve_goal(
            source.nbytes, self.next, source.block, self.end
        ):
            self.queued = True
            self.server.network.offer(self.server.host, self)

    def take(self) -> tuple[int, int] | None:
        self.queued = False
        source = self.source
        if self.over or source is None:
            return None
        begin = self.next
        self.next = end = serve_goal(source.nbytes, begin, source.block, self.end)
        self.flying += 1
        self.look()
        return begin, end

    def arrive(self, begin: int, end: int) -> None:
        network = self.puller.network
        here, there = self.server.host, self.to
        if network.stopped or network.cut:
            network.pass_on(here, there, self._arrived, begin, end)
        else:
            self._arrived(begin, end)

    def _arrived(self, begin: int, end: int) -> None:
        self.flying -= 1
        cell, source = self.cell, self.source
        if self.over or source is None:
            return
        if cell.memory is not None:
            assert source.memory is not None
            shift = source.begin - cell.begin
            for row in source.memory.read(source.begin + begin, source.begin + end):
                cell.memory.write(
                    row.begin - shift, row.end - shift, row.content, row.shift + shift
                )
        if end == self.end:
            self._finish(source)
        else:
            self.look()
        self.puller.raise_to(cell, end)

    def _finish(self, source: Cell) -> None:
        self.over = True
        self.cell.pull = None
        self.puller.pulls.pop(self, None)
        del source.serves[self]


class Engine:
    """All cells of one life of a node."""

    def __init__(
        self, network: Network, host: int, contents: Contents, block_bytes: int, least: int = 0
    ) -> None:
        """least: no block is shorter (a coarser picture, in less time)."""
        self.network = network
        self.host = host
        self.contents = contents
        self.block_bytes = block_bytes
        self.least = least
        self.dead = False
        self.keys: dict[Key, Cell] = {}
        self.waiting: dict[Key, list[Stream]] = {}
        self.pulls: dict[Stream, None] = {}
        self.links: set[Engine] = set()
        self.open_cells = 0

    # ---- cells

    def cell(
        self, key: Key | None, memory: Memory | None, begin: int, nbytes: int, watermark: int
    ) -> Cell:
        """A new one; who has waited for the key is served."""
        cell = Cell(key, memory, begin, nbytes, watermark)
        cell.block = max(self.least, block_bytes_for(nbytes, self.block_bytes))
        self.open_cells += 1
        if key is not None:
            if key in self.keys:
                raise WrongBytes(f"a second cell for the key {key}")
            self.keys[key] = cell
            for stream in self.waiting.pop(key, ()):
                if not stream.over:
                    self._attach(stream, cell)
        return cell

    def raise_to(self, cell: Cell, watermark: int) -> None:
        """More of it is there."""
        before = cell.watermark
        cell.watermark = watermark
        for stream in cell.serves:
            stream.look()
        for fold in cell.feeds:
            if before < fold.goal <= watermark:
                fold.behind -= 1
                if not fold.behind:
                    self.network.timeline.after(0.0, self._step, fold)
        if watermark == cell.nbytes:
            self._tell(cell)

    def _tell(self, cell: Cell) -> None:
        if not cell.told and not cell.closed and cell.filled_by is not None:
            cell.told = True
            cell.filled_by.filled(cell)

    def close(self, cell: Cell) -> None:
        """Nobody fills it or reads it any more."""
        if cell.closed:
            return
        cell.closed = True
        self.open_cells -= 1
        if cell.pull is not None:
            self._cancel(cell.pull)
        if cell.fold is not None:
            self._end(cell.fold)
        for fold in list(dict.fromkeys(cell.feeds)):
            self._end(fold)
            self._fail(fold.cell, "a source was closed")
        if cell.key is not None:
            del self.keys[cell.key]
        for stream in list(cell.serves):
            self._refuse(stream, "the cell was closed")

    # ---- pulls

    def pull(self, cell: Cell, server: Engine, key: Key) -> None:
        """Fill it from another node."""
        if cell.watermark == cell.nbytes:
            self.network.timeline.after(0.0, self._tell, cell)
            return
        if cell.pull is not None:
            self._cancel(cell.pull)
        cell.pull = stream = Stream(cell, self, server, key)
        self.pulls[stream] = None
        ways = 1
        if server not in self.links:
            if server.dead:
                self.network.timeline.after(CONNECT_FAIL_S, self._pull_failed, stream, "no way")
                return
            ways = CONNECT_WAYS
            self.links.add(server)
            server.links.add(self)
        delay = ways * self.network.delay(self.host, server.host)
        self.network.timeline.after(delay, self._asked, stream)

    def _asked(self, stream: Stream) -> None:
        self.network.pass_on(self.host, stream.server.host, stream.server.requested, stream)

    def requested(self, stream: Stream) -> None:
        """Somebody asks for a cell of ours."""
        if stream.over or self.dead or stream.puller.dead:
            return
        cell = self.keys.get(stream.key)
        if cell is not None:
            self._attach(stream, cell)
        else:
            self.waiting.setdefault(stream.key, []).append(stream)

    def _attach(self, stream: Stream, cell: Cell) -> None:
        if stream.end > cell.nbytes:
            raise WrongBytes(f"{stream.key} has {cell.nbytes} bytes, and {stream.end} were wanted")
        stream.source = cell
        cell.serves[stream] = None
        stream.look()

    def _cancel(self, stream: Stream) -> None:
        stream.over = True
        stream.cell.pull = None
        self.pulls.pop(stream, None)
        if stream.source is not None:
            del stream.source.serves[stream]
        else:
            waiting = stream.server.waiting.get(stream.key)
            if waiting is not None and stream in waiting:
                waiting.remove(stream)
                if not waiting:
                    del stream.server.waiting[stream.key]

    def _refuse(self, stream: Stream, reason: str) -> None:
        """Says to the puller that there is no more."""
        assert stream.source is not None
        del stream.source.serves[stream]
        stream.source = None
        puller = stream.puller
        delay = self.network.delay(self.host, puller.host)
        self.network.timeline.after(delay, self._refused, stream, reason)

    def _refused(self, stream: Stream, reason: str) -> None:
        puller = stream.puller
        self.network.pass_on(self.host, puller.host, puller._pull_failed, stream, reason)

    def _pull_failed(self, stream: Stream, reason: str) -> None:
        if not stream.over:
            self._cancel(stream)
            self._fail(stream.cell, reason)

    def _fail(self, cell: Cell, reason: str) -> None:
        if not cell.closed and not self.dead and cell.filled_by is not None:
            cell.filled_by.failed(cell, reason)

    def lose(self, other: Engine, reason: str) -> None:
        """The link has ended, for this side; the other one sees it a moment later."""
        if other in self.links and not other.dead:
            delay = self.network.delay(self.host, other.host)
            self.network.timeline.after(delay, self._ended, other, reason)
        self._lose(other, reason)

    def _ended(self, other: Engine, reason: str) -> None:
        self.network.pass_on(self.host, other.host, other._lose, self, reason)

    def _lose(self, other: Engine, reason: str) -> None:
        self.links.discard(other)
        for cell in list(self.keys.values()):
            for stream in [one for one in cell.serves if one.puller is other]:
                del cell.serves[stream]
                stream.source = None
        for key, waiting in list(self.waiting.items()):
            waiting[:] = [stream for stream in waiting if stream.puller is not other]
            if not waiting:
                del self.waiting[key]
        for stream in [one for one in self.pulls if one.server is other]:
            self._pull_failed(stream, reason)

    # ---- folds

    def fold(self, cell: Cell, sources: list[Cell]) -> None:
        """Fill it from cells of this node, from left to right."""
        if any(source.nbytes != cell.nbytes for source in sources):
            raise WrongBytes("sources of different lengths")
        cell.fold = fold = Fold(cell, sources)
        for source in sources:
            source.feeds.append(fold)
        if not fold.behind:
            self.network.timeline.after(0.0, self._step, fold)

    def _end(self, fold: Fold) -> None:
        fold.cell.fold = None
        for source in fold.sources:
            source.feeds = [one for one in source.feeds if one is not fold]

    def _step(self, fold: Fold) -> None:
        cell = fold.cell
        if cell.fold is not fold or fold.behind:
            return
        begin, end = cell.watermark, fold.goal
        if cell.memory is not None:
            self._add_up(fold, begin, end)
        if end == cell.nbytes:
            self._end(fold)
            self.raise_to(cell, end)
            return
        self.raise_to(cell, end)
        fold.aim()
        if not fold.behind and cell.fold is fold:
            self.network.timeline.after(0.0, self._step, fold)

    def _add_up(self, fold: Fold, begin: int, end: int) -> None:
        """The contents of all sources, wherever one of them changes."""
        cell = fold.cell
        assert cell.memory is not None
        while begin < end:
            upto, shift = end, None
            parts: list[Content] = []
            for source in fold.sources:
                assert source.memory is not None
                row = next(source.memory.read(source.begin + begin, source.begin + end), None)
                if row is None or row.begin != source.begin + begin:
                    raise WrongBytes(f"a fold reads byte {begin}, which nobody has written")
                mine = row.shift + source.begin - cell.begin
                if shift is None:
                    shift = mine
                if shift != mine:
                    raise WrongBytes(f"a fold adds bytes of different places, {shift} and {mine}")
                parts.append(row.content)
                upto = min(upto, row.end - source.begin)
            assert shift is not None
            content = self.contents.fold(parts)
            cell.memory.write(cell.begin + begin, cell.begin + upto, content, shift)
            begin = upto
