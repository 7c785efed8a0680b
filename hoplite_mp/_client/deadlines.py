"""Timeouts as users give them, and the deadlines that waits are made with.

All waits take a time of the monotonic clock, so that a wait in several steps does not begin anew
with each; and an error about it has to name the timeout that was asked for.
"""

from __future__ import annotations

import numbers
from typing import Any

from hoplite_mp._common import clock

__all__ = ["FOREVER_NS", "Deadline", "check_timeout", "deadline_ns"]

FOREVER_NS = 1 << 62


class Deadline(int):
    """A time of the monotonic clock in nanoseconds that knows the timeout it was made from."""

    within_s: float  # for the text of an error: what is left of it when a wait begins is less


def deadline_ns(timeout: float | None) -> int:
    """A timeout in seconds as a time of the monotonic clock; None: never; <= 0: a poll."""
    check_timeout(timeout)
    if timeout is None:
        return FOREVER_NS
    if timeout <= 0:
        return 0
    deadline = Deadline(clock.monotonic_ns() + int(min(timeout, 1e9) * 1e9))
    deadline.within_s = float(timeout)
    return deadline


def check_timeout(timeout: Any) -> None:
    """TypeError if it is not a number of seconds, ValueError for NaN."""
    if timeout is None:
        return
    if isinstance(timeout, bool) or not isinstance(timeout, numbers.Real):
        raise TypeError(f"timeout={timeout!r}: it must be seconds as a number, or None")
    if timeout != timeout:
        raise ValueError("timeout=nan: it must be seconds, or None")
