"""One control connection in the node's loop: decodes incoming messages, and sends outgoing frames.

The manager and all peers use the same frames over a non-blocking stream. A channel reports its end
exactly once, whichever side detects the end first.
"""

from __future__ import annotations

import contextlib
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hoplite_mp._common import locks
from hoplite_mp.errors import ProtocolError

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    from hoplite_mp._node.ports import LoopPort
    from hoplite_mp._protocol.codec import Decoder
    from hoplite_mp._transport.stream import ByteStream

__all__ = ["ControlChannel", "Traffic"]

_log = logging.getLogger("hoplite_mp")


@dataclass(slots=True)
class Traffic:
    """The number of bytes in all messages so far."""

    sent: int = 0
    received: int = 0


class ControlChannel:
    """A stream in the loop. `ended` is called once, with the reason."""

    def __init__(
        self,
        loop: LoopPort,
        stream: ByteStream,
        decoder: Decoder[Any],
        take: Callable[[Any], None],
        ended: Callable[[str], None],
        *,
        shared: bool = False,
        traffic: Traffic | None = None,
    ) -> None:
        """shared: whether another thread also writes to the stream (`beat`). traffic: counts the
        channel's bytes."""
        self._traffic = Traffic() if traffic is None else traffic
        self._loop = loop
        self._decoder = decoder
        self._take = take
        self._ended = ended
        self.stream = stream
        self.open = True
        # called when any bytes arrive, even those of a heartbeat
        self.received: Callable[[], None] | None = None
        self._lock: AbstractContextManager[object] = (
            locks.lock("node.control_channel") if shared else contextlib.nullcontext()
        )
        self._writes = False  # whether the loop also watches the stream for writing
        loop.watch(stream.fileno(), self.ready)

    def hand_over(self, take: Callable[[Any], None], ended: Callable[[str], None]) -> None:
        """Passes all further messages, and the end of the channel, to a new receiver."""
        self._take, self._ended = take, ended

    def send(self, frame: bytes) -> bool:
        """Queues the frame, and sends as much as the connection accepts. Returns False if the
        connection has ended. A channel whose queue is full is closed immediately. If the connection
        breaks during the call, the loop reports that later, after the other side's last
        messages."""
        if not self.open:
            return False
        try:
            with self._lock:
                self.stream.write(frame)
        except ConnectionError as error:
            self.close(str(error))
            return False
        self._traffic.sent += len(frame)
        self._flush()
        return True

    def beat(self, frame: bytes) -> None:
        """Like `send`, but may be called in another thread. If the connection breaks during the
        call, the loop detects that when it next uses the connection."""
        with self._lock:
            if self.open:
                # If other bytes are queued, they serve as the heartbeat.
                if not self.stream.wants_write:
                    self.stream.write(frame)
                self.stream.flush()

    @property
    def sending(self) -> bool:
        """Whether data is still queued."""
        return self.stream.wants_write

    def ready(self) -> None:
        """Called by the loop when the stream is readable or writable."""
        flushed = self._flush()
        with self._lock:
            data = self.stream.read()
        if data is None or not (flushed or data):
            self.close(self.stream.failure or "the other side closed the connection")
            return
        if data:
            self._traffic.received += len(data)
            if self.received is not None:
                self.received()
        try:
            for message in self._decoder.feed(data) if data else ():
                if not self.open:
                    return
                self._take(message)
        except ProtocolError as error:
            _log.error("closing a connection: %s", error)
            self.close(str(error))

    def drain(self) -> None:
        """Handles the remaining messages from the other side, whose process has died."""
        while self.open:
            self.ready()

    def _flush(self) -> bool:
        with self._lock:
            flushed = self.stream.flush()
        # Watching a broken stream for writing wakes the loop, which then closes the stream.
        wakes = self.stream.wants_write or not flushed
        if wakes != self._writes:
            self._writes = wakes
            self._loop.watch(self.stream.fileno(), self.ready, write=wakes)
        return flushed

    def close(self, reason: str) -> None:
        """Ends the channel, and reports that to its owner."""
        if not self.open:
            return
        with self._lock:
            self.open = False
            self._loop.unwatch(self.stream.fileno())
            self.stream.close()
        self._ended(reason)
