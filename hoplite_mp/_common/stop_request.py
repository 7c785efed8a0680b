"""Lets a signal ask this process to end.

The process is to end properly, after what it is doing now, and the wait for the signal must not be
able to hang.
"""

from __future__ import annotations

import contextlib
import os
import select
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["StopRequest"]


class StopRequest:
    """A signal's request that this process end. It raises no exception, except inside `breaks`,
    where code may be given up half way.

    It is not a threading.Event, because a signal's handler must not set one: the handler runs in
    the thread that waits, which may hold the event's lock at that moment, and would wait for
    itself."""

    def __init__(self) -> None:
        self._asked = False
        self._breaks = False
        self._wake = os.eventfd(0)  # readable for ever once the end was requested

    def __del__(self) -> None:
        os.close(self._wake)

    def is_set(self) -> bool:
        return self._asked

    def set(self) -> None:
        self._asked = True
        os.eventfd_write(self._wake, 1)

    def wait(self, timeout: float) -> bool:
        """Waits until the end is requested, or for `timeout` seconds. Returns whether it is
        requested."""
        select.select([self._wake], [], [], timeout)
        return self._asked

    def signalled(self, *_: object) -> None:
        """The handler of the signals."""
        self.set()
        if self._breaks:
            self._breaks = False
            raise KeyboardInterrupt

    @contextlib.contextmanager
    def breaks(self) -> Iterator[None]:
        """A signal interrupts this block with KeyboardInterrupt, instead of waiting for its end."""
        self._breaks = not self.is_set()
        try:
            yield
        finally:
            self._breaks = False
