"""The compiled engine of a simulated host, which the timeline steps and the virtual network
connects.

It implements EnginePort (_node/ports.py) with the shipped engine. Only its thread and its sockets
are replaced.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from hoplite_mp import _engine

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from hoplite_mp._node.ports import Key
    from hoplite_mp._simulation.network import VirtualNetwork
    from hoplite_mp._simulation.virtual.connections import VirtualStream
    from hoplite_mp._simulation.virtual.loop import Descriptors, VirtualLoop

__all__ = ["CellMemory", "VirtualEngine"]

# The memory in use by a simulated engine, to detect blocks that are freed too early.
#
# The engine reads and writes memory that its node owns. A block that is freed too early may be
# reused at any time, which rarely corrupts bytes in production. Here each freed block is compared
# with all cells.
#
#   open:    until FILLED, the engine writes the cell, or may write it at the next pull
#            while the cell has a key, other hosts may read it
#            while a fold is filled from the cell, the engine reads it
#   closed:  the same until CLOSED was read, except that reads of a full cell by other hosts do not
#            count: their plan has ended, so they discard the bytes


@dataclass(slots=True)
class _Cell:
    """The addresses of one cell, and the remaining uses by the engine."""

    begin: int
    end: int
    served: bool  # other hosts may read it
    whole: bool  # it is full: nothing more is written into it
    folds: set[int] = field(default_factory=set)  # cells that are being filled from it
    freed: bool = False

    @property
    def is_used(self) -> bool:
        return not self.whole or self.served or bool(self.folds)


class CellMemory:
    """The memory of all cells of one engine."""

    def __init__(self) -> None:
        self._cells: dict[int, _Cell] = {}
        self._sources: dict[int, Sequence[int]] = {}  # cell -> cells from which a fold fills it

    def make(self, cell: int, begin: int, end: int, *, served: bool, whole: bool) -> None:
        """Adds a cell over these addresses. served: whether it has a key. whole: whether all bytes
        are present."""
        folds = {filled for filled, sources in self._sources.items() if cell in sources}
        self._cells[cell] = _Cell(begin, end, served, whole, folds)

    def fold(self, cell: int, sources: Sequence[int]) -> None:
        """Adds a fold of these cells. Raises AssertionError if the memory of one of them is
        freed."""
        self._sources[cell] = sources
        for source in sources:
            memory = self._cells.get(source)
            if memory is not None:
                if memory.freed:
                    raise AssertionError(f"cell {source} is folded, but its memory is freed")
                memory.folds.add(cell)

    def fold_ended(self, cell: int) -> None:
        """Called when the fold that fills the cell, if any, has ended."""
        for source in self._sources.pop(cell, ()):
            memory = self._cells.get(source)
            if memory is not None:
                memory.folds.discard(cell)

    def filled(self, cell: int) -> None:
        """Called when the engine has reported the cell as FILLED."""
        self.fold_ended(cell)
        if cell in self._cells:
            self._cells[cell].whole = True

    def close(self, cell: int, watermark: int) -> None:
        """Called when the node has closed the cell, at this watermark."""
        memory = self._cells.get(cell)
        if memory is not None and watermark == memory.end - memory.begin:
            memory.whole, memory.served = True, False

    def closed(self, cell: int) -> None:
        """Called when the engine has reported the cell as CLOSED."""
        self.fold_ended(cell)
        self._cells.pop(cell, None)

    def free(self, begin: int, end: int) -> None:
        """Called when the addresses are freed. Raises AssertionError if the engine still uses one
        of them."""
        for cell, memory in self._cells.items():
            if begin < memory.end and memory.begin < end:
                if memory.is_used:
                    raise AssertionError(f"memory of cell {cell} is freed")
                memory.freed = True


# Frames of one link that may be in flight; see _simulation/network.py.
WINDOW_FRAMES = 2
# The longest time for which the engine delays quiet events (events that wake the node only later):
# QUIET_NS in cext/engine_state.h, plus a millisecond.
QUIET_S_MAX = 5e-3


class VirtualLink:
    """One end of a connection between two engines."""

    def __init__(
        self, engine: VirtualEngine, stream: VirtualStream, driver: _engine.Driver
    ) -> None:
        self.engine = engine
        self.stream = stream
        self.driver = driver
        self.to = stream.peer.host
        self.has_ended = False
        self._next: bytes | None = None  # the frame that is queued at the network
        self._backlogged_since: float | None = None
        self.backlogged_s = 0.0
        self._in_flight: deque[bytes] = deque()

    @property
    def is_busy(self) -> bool:
        """Whether frames are in flight."""
        return bool(self._in_flight)

    # -- sending ---------------------------------------------------------------------------------

    def offer(self) -> None:
        """Queues the engine's next frame, if any, at the network."""
        if self.has_ended or self._next is not None or len(self._in_flight) >= WINDOW_FRAMES:
            return
        try:
            frame = self.driver.next_frame(0.0)
        except ConnectionError:
            return
        self.count_backlog(frame is not None)
        if frame is not None:
            self._next = b"".join(frame)
            self.engine.network.offer(self.stream.host, self)

    def count_backlog(self, continues: bool) -> None:
        """Adds up the time during which the engine had a frame to send; see engine_sockets.c."""
        now = self.engine.loop.now()
        if self._backlogged_since is not None:
            self.backlogged_s += now - self._backlogged_since
        self._backlogged_since = now if continues else None

    def take(self) -> tuple[int, int] | None:
        """Called when the network sends the frame."""
        data = self._next
        if data is None or self.has_ended or self.engine.loop.ended:
            return None
        self._next = None
        self.driver.sent()
        self._in_flight.append(data)
        self.engine.poll_soon()
        return 0, len(data)

    def arrive(self, begin: int, end: int) -> None:
        """Called when the frame has arrived at the other host."""
        if not self._in_flight:
            return  # the connection was reset in the meantime
        data, stream = self._in_flight.popleft(), self.stream
        if not stream.failure:
            peer = stream.peer
            self.engine.network.deliver(stream.host, peer.host, peer.receive_bulk, data)
        self.engine.poll_soon()

    # -- receiving -------------------------------------------------------------------------------

    def receive(self, data: bytes) -> None:
        """Copies received bytes to the addresses that the engine provides."""
        left = memoryview(data)
        while left and not self.has_ended:
            self.engine.step()
            try:
                place = self.driver.receive_into(0.0)
            except ConnectionError:
                return
            assert place is not None, "the engine provides no address for a live link"
            count = min(len(place), len(left))
            place[:count] = left[:count]
            self.driver.received(count)
            left = left[count:]
        self.engine.poll()

    def end(self) -> None:
        """Called when the connection has ended."""
        if self.has_ended:
            return
        self.engine.step()
        try:
            if self.driver.receive_into(0.0) is not None:
                self.driver.received(0)
        except ConnectionError:
            pass
        self.engine.poll()

    # Called by the stream.

    def ended(self) -> None:
        self.engine.loop.run_soon(self.end)

    def close(self) -> None:
        """Drops all frames of a lost link, and returns the unsent one to the engine."""
        self.has_ended = True
        if self._next is not None:
            self._next = None
            self.driver.sent()
        self._in_flight.clear()
        self.stream.close()


class Incoming:
    """Receives a stream's bytes for an engine."""

    def __init__(self, link: VirtualLink) -> None:
        self.link = link

    def take(self, data: bytes) -> None:
        if not self.link.engine.loop.ended:
            self.link.receive(data)

    def ended(self) -> None:
        self.link.ended()


class VirtualEngine:
    """The engine of one host; see hoplite_mp/_engine.pyi."""

    def __init__(
        self,
        network: VirtualNetwork,
        loop: VirtualLoop,
        descriptors: Descriptors,
        host_id: int,
        block: int,
    ) -> None:
        self.network = network
        self.loop = loop
        self.links: dict[int, VirtualLink] = {}
        self._descriptors = descriptors
        self._engine = _engine.Engine(host_id, block, threaded=False)
        self._fd = descriptors.add(self)
        self._poll_scheduled = False  # whether a poll is scheduled
        self._quiet_scheduled = False  # whether the delivery of quiet events is scheduled
        self._quiet_ready = False  # whether they may be read
        self._has_ended = False
        self._memory = CellMemory()

    @property
    def is_ready(self) -> bool:
        return not self._has_ended and (self.step() or self._quiet_ready)

    @property
    def is_busy(self) -> bool:
        """Whether any of its frames are in flight."""
        return any(link.is_busy for link in self.links.values())

    # -- steps -----------------------------------------------------------------------------------

    def step(self) -> bool:
        """Steps as far as possible. Returns whether there are events."""
        return self._engine.step()

    def poll_soon(self) -> None:
        """Schedules a poll. In production, the engine's thread is woken at these points."""
        if not self._poll_scheduled and not self.loop.ended:
            self._poll_scheduled = True
            self.network.timeline.after(0.0, self._poll_now)

    def _poll_now(self) -> None:
        self._poll_scheduled = False
        host = self.loop.host
        if self.loop.ended:
            return
        if host in self.network.stopped:
            self.network.deliver(host, host, self.poll_soon)
        else:
            self.poll()

    def poll(self) -> None:
        """Steps, and passes frames to the network and events to the node."""
        has_events = self.step()
        for link in list(self.links.values()):
            link.offer()
        if has_events:
            self.loop.notify(self._fd)
        elif self._engine.is_quiet() and not self._quiet_scheduled:
            self._quiet_scheduled = True
            timeline = self.network.timeline
            timeline.after(QUIET_S_MAX * timeline.rng.random(), self._deliver_quiet)

    def _deliver_quiet(self) -> None:
        self._quiet_scheduled = False
        if not self._has_ended and self._engine.is_quiet():
            self._quiet_ready = True
            self.loop.notify(self._fd)

    def end(self) -> None:
        """Stops the engine after the run."""
        for link in self.links.values():
            link.has_ended = True
        self.links.clear()
        self._has_ended = True
        self._engine.stop()

    # -- the port ------------------------------------------------------------------------------

    def fileno(self) -> int:
        return self._fd

    def connect(self, fd: int, peer: int) -> int:
        stream: Any = self._descriptors.all[fd]
        driver = self._engine.drive(peer)
        link = self.links[driver.link] = VirtualLink(self, stream, driver)
        self.poll_soon()
        stream.attach(Incoming(link))
        return driver.link

    def drive(self, peer: int) -> Any:
        raise NotImplementedError("TLS is not simulated")

    def disconnect(self, link: int) -> None:
        self._engine.disconnect(link)
        self.poll_soon()

    def counters(self, link: int) -> tuple[int, int, int, int]:
        sent, received, *_ = self._engine.counters(link)
        at = self.links[link]
        return sent, received, 0, int(at.backlogged_s * 1e9)

    def cell(
        self,
        key: Key | None,
        buffer: Any,
        offset: int = 0,
        nbytes: int | None = None,
        filled: bool | int = False,
    ) -> int:
        self.poll_soon()
        cell = self._engine.cell(key, buffer, offset, nbytes, filled)
        with memoryview(buffer) as view:
            size = (view.nbytes - offset) if nbytes is None else nbytes
            begin = np.asarray(view).ctypes.data + offset if view.nbytes else 0
        if size:
            whole = filled is True or (filled is not False and filled == size)
            self._memory.make(cell, begin, begin + size, served=key is not None, whole=whole)
        return cell

    def check_free(self, begin: int, end: int) -> None:
        """Raises AssertionError if the engine still uses this memory, which is about to be
        freed."""
        self._memory.free(begin, end)

    def watermark(self, cell: int) -> int:
        return self._engine.watermark(cell)

    def advance(self, cell: int, watermark: int) -> None:
        self._engine.advance(cell, watermark)
        self.poll_soon()

    def pull(self, cell: int, link: int, key: Key | None = None) -> None:
        self._engine.pull(cell, link, key)
        self.poll_soon()

    def fold(
        self,
        cell: int,
        sources: Sequence[int],
        op: str,
        dtype: str,
        divisor: int = 0,
        accumulated: Collection[int] = (),
        final: bool = True,
    ) -> None:
        self._engine.fold(cell, sources, op, dtype, divisor, accumulated, final)
        self._memory.fold(cell, sources)
        self.poll_soon()

    def close(self, cell: int) -> None:
        self._memory.close(cell, self._engine.watermark(cell))
        self._engine.close(cell)
        self.poll_soon()

    def hold(self) -> None:
        """Does nothing: without a thread, nothing is requested before the next step."""

    def release(self) -> None:
        """See `hold`."""

    def together(self, cells: Collection[int], vote: tuple[int, int, int] | None = None) -> None:
        self._engine.together(cells, vote)
        self.poll_soon()

    def events(self) -> list[tuple[Any, ...]]:
        self.step()
        events, self._quiet_ready = self._engine.events(), False
        for event in events:
            if event[0] == _engine.LINK_LOST:
                self.links.pop(event[1]).close()
            elif event[0] == _engine.CLOSED:
                self._memory.closed(event[1])
            elif event[0] == _engine.FILLED:
                self._memory.filled(event[1])
            elif event[0] == _engine.FOLD_FAILED:
                self._memory.fold_ended(event[1])
        if events:
            self.poll_soon()
        return events

    # -- small calls of Groups -------------------------------------------------------------------

    def coll_add(self, generation: int, size: int, node: int, client: Any, board: int) -> None:
        self._engine.coll_add(generation, size, node, client, board)

    def coll_open(
        self, generation: int, version: int, call: int, nodes: Sequence[int | None]
    ) -> None:
        self._engine.coll_open(generation, version, call, nodes)
        self.poll_soon()

    def coll_close(self, generation: int) -> None:
        self._engine.coll_close(generation)
        self.poll_soon()

    def coll_yield(self, generation: int, call: int) -> None:
        self._engine.coll_yield(generation, call)
        self.poll_soon()

    def coll_forget(self, generation: int) -> None:
        self._engine.coll_forget(generation)

    def coll_begin(self, generation: int, call: int, plan: int) -> None:
        self._engine.coll_begin(generation, call, plan)
        self.poll_soon()

    def coll_vote(self, generation: int, call: int, plan: int) -> None:
        self._engine.coll_vote(generation, call, plan)
        self.poll_soon()

    def coll_result(self, generation: int, call: int, result: int, awaited: bool = False) -> None:
        self._engine.coll_result(generation, call, result, awaited)
        self.poll_soon()

    def coll_frame(
        self,
        generation: int,
        node: int,
        version: int,
        call: int,
        phase: int,
        plan: int,
        parts: bytes,
    ) -> None:
        self._engine.coll_frame(generation, node, version, call, phase, plan, parts)
        self.poll_soon()

    def coll_doorbell(self, generation: int, rank: int, fd: int) -> None:
        self._engine.coll_doorbell(generation, rank, fd)
        self.poll_soon()

    def process_turned(self) -> None:
        """Called after a process of this host has run, which may have contributed to a small
        call."""
        if not self.loop.ended:
            self._engine.coll_look()
            self.poll_soon()

    def stop(self) -> None:
        """Does nothing: `end` stops the engine after the run."""
