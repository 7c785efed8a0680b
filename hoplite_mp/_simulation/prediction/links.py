"""Links that connections share at random, and engines that need CPU time for each block.

`VirtualNetwork` serves its streams in turn. Workers of a parameter server that start together would
stay in step forever: all pull, then all push, and one direction of the server's link would always
be idle. TCP shares a link evenly only on average. So here the next block at either end of a link
belongs to a random stream.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from hoplite_mp._simulation.network import VirtualNetwork

if TYPE_CHECKING:
    from hoplite_mp._simulation.network import OutgoingStream, Port
    from hoplite_mp._simulation.prediction.cores import Cores
    from hoplite_mp._simulation.timeline import Timeline

__all__ = ["SharedLinks"]


@dataclass(slots=True, eq=False)
class _Block:
    """A block in flight. `whole_at`: when its last byte reaches the receiver's link."""

    stream: OutgoingStream
    begin: int
    end: int
    whole_at: float


class SharedLinks(VirtualNetwork):
    """Hosts on a switch, without faults. `sent`, `received`: bytes of blocks, by host."""

    def __init__(self, timeline: Timeline, latency_s: float, cores: Cores) -> None:
        super().__init__(timeline, latency_s, 0.0)
        self.cores = cores
        self.sent: list[int] = []
        self.received: list[int] = []
        self._up_free: list[float] = []  # when the latest block has been sent
        self._inbound: list[list[_Block]] = []  # blocks that are waiting for the receiver's link
        self._receiving: list[bool] = []

    def add(self, up: float, down: float) -> int:
        """Adds a host; returns its number."""
        self.sent.append(0)
        self.received.append(0)
        self._up_free.append(0.0)
        self._inbound.append([])
        self._receiving.append(False)
        return super().add(up, down)

    def _turn(self, port: Port) -> None:
        ready, rng = port.ready, self.timeline.rng
        port.sending = True  # set now, because the stream may offer its next block in `take`
        while ready:
            ready.rotate(-rng.randrange(len(ready)))
            stream = ready.popleft()
            block = stream.take()
            if block is not None:
                begin, end = block
                self.cores.process(port.host, end - begin, self._leave, port, stream, begin, end)
                return
        port.sending = False

    def _leave(self, port: Port, stream: OutgoingStream, begin: int, end: int) -> None:
        """Called when the engine has written a block. It writes the next one while this block is
        sent."""
        nbytes, host = end - begin, port.host
        starts = max(self.timeline.now, self._up_free[host])
        left = starts + nbytes / port.up + port.debt_s
        self._up_free[host], port.debt_s = left, 0.0
        self.blocks += 1
        self.sent[host] += nbytes
        self.timeline.at(starts, self._turn, port)
        block = _Block(stream, begin, end, left + self.latency_s)
        self.timeline.at(starts + self.latency_s, self._reach, block)

    def _reach(self, block: _Block) -> None:
        """Called when the first byte of a block has reached the receiver's link."""
        to = block.stream.to
        self._inbound[to].append(block)
        if not self._receiving[to]:
            self._receive(to)

    def _receive(self, to: int) -> None:
        waiting, now = self._inbound[to], self.timeline.now
        self._receiving[to] = bool(waiting)
        if waiting:
            streams = list(dict.fromkeys(id(block.stream) for block in waiting))
            chosen = self.timeline.rng.choice(streams)
            at = next(at for at, block in enumerate(waiting) if id(block.stream) == chosen)
            block = waiting.pop(at)  # the first block of the stream, because blocks arrive in order
            seconds = (block.end - block.begin) / self.ports[to].down
            self.timeline.at(max(now + seconds, block.whole_at), self._received, block)

    def _received(self, block: _Block) -> None:
        to, nbytes = block.stream.to, block.end - block.begin
        self.received[to] += nbytes
        self.cores.process(to, nbytes, block.stream.arrive, block.begin, block.end)
        self._receive(to)
