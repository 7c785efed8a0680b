"""A simulated process's line to the node of its host.

Client code sends requests to its node over a `Channel` (_client/channel.py). Here the timeline
carries the packets. Each message is encoded and decoded, as if it went through a socket.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from hoplite_mp import errors
from hoplite_mp._protocol.local import GroupWritten, Reply, Request
from hoplite_mp._simulation.virtual.locks import VirtualLock

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from hoplite_mp._protocol.local import Ask
    from hoplite_mp._simulation.virtual.processes import VirtualProcesses

__all__ = ["VirtualChannel"]

ROUND_S = 0.0005
_encode = msgspec.msgpack.Encoder().encode
_request = msgspec.msgpack.Decoder(Request).decode
_reply = msgspec.msgpack.Decoder(Reply).decode


class NodeOfHost(Protocol):
    """The host's node."""

    def ask(self, slot: int, request: Request) -> None:
        """Receives a request of a process."""


class _There:
    """Stands in for `Watched`, because no code closes the descriptor of a simulated line."""

    def there(self) -> bool:
        return True


class VirtualChannel:
    """Has the interface of _client/channel.py."""

    def __init__(
        self, node: NodeOfHost, slot: int, processes: VirtualProcesses, first: int = 0
    ) -> None:
        self.node = node
        self.slot = slot
        self.processes = processes
        self.line = _There()
        self.taken_away: Callable[[], None] = lambda: None
        self.is_closed = False
        self._number = first
        self._seen = [first]
        self._replies: list[Reply] = []
        self._lock = VirtualLock(processes, False)  # one call at a time

    def tell(self, ask: Ask, sent: list[int] | None = None) -> None:
        self._send(Request(0, 0, ask))
        if sent is not None:
            sent.append(1)
        # Producing the next piece of a large value takes that long.
        if isinstance(ask, GroupWritten):
            running = self.processes.running
            assert running is not None
            running.wait(None, ROUND_S)

    def call(
        self,
        ask: Ask,
        take: Callable[..., Any] | None = None,
        descriptors: Sequence[int] = (),
        sent: list[int] | None = None,
    ) -> Any:
        with self._lock:
            self._number += 1
            number = self._number
            self._send(Request(number, self._seen[0], ask))
            if sent is not None:
                sent.append(1)
            while True:
                while not self._replies:
                    self._check()
                    running = self.processes.running
                    assert running is not None
                    running.wait(self, None)
                reply = self._replies.pop(0)
                if take is not None and reply.number == number and not reply.error:
                    return take(reply.value, number, self._seen)
                self._seen[0] = reply.number
                if reply.number == number:
                    break
        if reply.error and not reply.full:
            raise (errors.NodeLostError if reply.gone else ValueError)(reply.error)
        return reply

    def _send(self, request: Request) -> None:
        self._check()
        self.node.ask(self.slot, _request(_encode(request)))

    def _check(self) -> None:
        if self.is_closed:
            raise errors.NodeLostError("the node of this host has ended")

    def deliver(self, reply: Reply) -> None:
        """Receives a reply of the node."""
        self._replies.append(_reply(_encode(reply)))
        self.processes.wake_all(self)

    def close(self) -> None:
        self.is_closed = True
        self.processes.wake_all(self)

    def fileno(self) -> int:
        return -1
