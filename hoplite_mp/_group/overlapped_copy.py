"""Copies a large part of a Group's call into its block of the store while other hosts read it.

Copying an array takes a good part of the time that sending it takes, so the node and the other
hosts begin with the first bytes.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from hoplite_mp._common import clock
from hoplite_mp._protocol.local import GroupWritten

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hoplite_mp import _shm
    from hoplite_mp._client.channel import Channel

__all__ = ["WRITE_ROUND_BYTES", "OverlappedCopy"]

# Bytes of an array that are copied into the store before the first message to the node about them.
# Less: the other hosts begin earlier. Each later round is twice as large, up to the maximum,
# because copying is ahead of the network by then, and each message costs the node and its engine
# some 300 us. The maximum bounds for how long copying keeps a core from the threads that send the
# first bytes.
WRITE_ROUND_BYTES = 2 << 20
WRITE_ROUND_BYTES_MAX = 16 << 20
# Sections begin this much earlier, because nodes divide the whole payload, with its head, at whole
# elements.
SECTION_OVERLAP_BYTES = 16 << 10


class OverlappedCopy:
    """The elements of one part, from `buffer` into the block from `offset` on. Every round has a
    part of each section, and every host of the call begins to read where a section begins, so all
    hosts begin at once.

    Invariant: bytes that were reported to the node never change; where two sections overlap the
    same values are written a second time."""

    def __init__(
        self,
        client: _shm.Client,
        channel: Channel,
        payload: int,
        buffer: memoryview,
        offset: int,
        bounds: Sequence[int],
        pace: float,
        readers: int,
    ) -> None:
        """bounds: where sections begin, and the end. pace: bytes per second that each of that many
        readers takes at most; 0: not known."""
        self.nbytes = buffer.nbytes
        self._client = client
        self._channel = channel
        self._payload = payload
        self._buffer = buffer
        self._offset = offset
        self._ends = bounds[1:]
        self._at = [max(0, begin - SECTION_OVERLAP_BYTES) for begin in bounds[:-1]]
        sections = len(self._ends)
        self._step = max(1, WRITE_ROUND_BYTES // sections)
        self._step_max = max(1, WRITE_ROUND_BYTES_MAX // sections)
        # Seconds for each byte of a step.
        self._wait_s = min(sections, readers) / pace if pace else 0.0
        self._due = 0.0
        self._ranges: list[tuple[int, int]] = []  # written, but not reported to the node yet

    def run(self) -> None:
        """Writes all of it."""
        while self._ranges or any(b < e for b, e in zip(self._at, self._ends, strict=True)):
            if not self._ranges:
                if self._wait_s:
                    self._due = self._due or clock.monotonic()
                    clock.sleep(max(0.0, self._due - clock.monotonic()))
                    self._due += self._step * self._wait_s
                self._ranges, self._at = self._round()
                self._step = min(2 * self._step, self._step_max)
            self._channel.tell(GroupWritten(self._payload, self._ranges))
            self._ranges = []

    def _round(self) -> tuple[list[tuple[int, int]], list[int]]:
        """Writes the next bytes of each section; returns (their ranges, where the sections are
        now)."""
        ranges, now, offset = [], [], self._offset
        for begin, end in zip(self._at, self._ends, strict=True):
            upto = min(begin + self._step, end)
            if begin < upto:
                self._client.write(self._payload, b"", [self._buffer[begin:upto]], [offset + begin])
                ranges.append((offset + begin, offset + upto))
                os.sched_yield()  # threads that send the first bytes go first
            now.append(max(begin, upto))
        return ranges, now
