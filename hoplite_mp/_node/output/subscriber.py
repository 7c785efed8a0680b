"""A driver as a subscriber of lines: how many bytes are on their way, and whether it takes any.

A driver that reads slowly must lose nothing, but one that does not read at all must not block
workers that also serve others. So lines wait as long as the driver takes some, however few; after
`patience_s` without progress they are dropped and counted until it reads again, and then it is told
how many it has missed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hoplite_mp._protocol.output import bytes_of

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Subscriber"]


class Subscriber:
    """A driver, here or elsewhere. Times are seconds of one clock."""

    def __init__(
        self,
        deliver: Callable[[int, int, list[bytes]], None],
        bytes_max: int,
        patience_s: float | None,
    ) -> None:
        """deliver: sends (slot, stream, lines) now. patience_s: None means no limit."""
        self.deliver = deliver
        self.bytes_max = bytes_max
        self.patience_s = patience_s
        self.waiting = 0  # bytes delivered and not yet taken
        self.stalled_at: float | None = None  # since when lines have waited without progress
        self.deaf = False  # it has taken nothing for too long: its lines are dropped
        self.dropped: dict[tuple[int, int], int] = {}  # (slot, stream) -> number of lines

    def offer(self, slot: int, stream: int, lines: list[bytes], now: float) -> bool:
        """Sends the lines to the driver if there is room. False: they must wait. True: they are on
        their way, or dropped because the driver is `deaf`."""
        if self.deaf:
            key = slot, stream
            self.dropped[key] = self.dropped.get(key, 0) + len(lines)
            return True
        if self.waiting >= self.bytes_max:
            if self.stalled_at is None:
                self.stalled_at = now
            return False
        self._deliver(slot, stream, lines)
        return True

    def _deliver(self, slot: int, stream: int, lines: list[bytes]) -> None:
        self.waiting += bytes_of(lines)
        self.deliver(slot, stream, lines)

    def taken(self, nbytes: int, now: float) -> bool:
        """The driver has taken this many bytes. Returns whether lines that had to wait may be
        offered again."""
        self.waiting -= nbytes
        if self.waiting > self.bytes_max // 2:
            if self.stalled_at is not None:
                self.stalled_at = now
            return False
        stalled = self.stalled_at is not None or self.deaf
        self.stalled_at, self.deaf = None, False
        self.confess()
        return stalled

    def confess(self) -> None:
        """Tells the driver how many lines it has missed."""
        dropped, self.dropped = self.dropped, {}
        for (slot, stream), count in dropped.items():
            lines = "1 line was" if count == 1 else f"{count} lines were"
            text = f"{lines} dropped here: nobody read for {self.patience_s:g} s (output_wait_s)"
            self._deliver(slot, stream, [text.encode()])

    def due(self) -> float | None:
        """When the driver counts as not reading; None if no lines wait for it."""
        if self.stalled_at is None or self.patience_s is None or self.deaf:
            return None
        return self.stalled_at + self.patience_s

    def give_up(self, now: float) -> bool:
        """Returns whether the time that `due` returns has come. From then on the driver's lines are
        dropped."""
        due = self.due()
        if due is None or now < due:
            return False
        self.deaf = True
        return True
