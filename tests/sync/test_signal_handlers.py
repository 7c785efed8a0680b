"""A call whose signal handler raises an exception withdraws: nothing is left of it in the table."""

from __future__ import annotations

import queue
import signal
from typing import TYPE_CHECKING, Any

import pytest

import hoplite_mp
from tests.support.interruptions import no_collection
from tests.support.waiting import PATIENCE_S, eventually

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType

    from hoplite_mp import Cluster

ALARM_S = 0.1


class AlarmError(Exception):
    """Raised by the signal handler."""


def raises_by_a_handler(call: Callable[[], Any]) -> None:
    """Makes the call, which waits until the handler raises."""

    def handle(number: int, frame: FrameType | None) -> None:
        raise AlarmError

    before = signal.signal(signal.SIGALRM, handle)
    try:
        with no_collection(), pytest.raises(AlarmError):
            _ = signal.setitimer(signal.ITIMER_REAL, ALARM_S), call()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def test_interrupted_barrier_wait_leaves_the_round(c: Cluster) -> None:
    barrier = hoplite_mp.Barrier(2)
    raises_by_a_handler(lambda: barrier.wait(PATIENCE_S))
    eventually(lambda: barrier.n_waiting == 0)
    assert not barrier.broken


def test_interrupted_acquire_gets_no_permit_later(c: Cluster) -> None:
    lock = hoplite_mp.Lock()
    assert lock.acquire()
    raises_by_a_handler(lock.acquire)
    lock.release()
    assert lock.acquire(timeout=PATIENCE_S)
    lock.release()


def test_interrupted_put_puts_nothing_later(c: Cluster) -> None:
    full: hoplite_mp.Queue[int] = hoplite_mp.Queue(1)
    full.put(1)
    raises_by_a_handler(lambda: full.put(2))
    assert full.get() == 1
    with pytest.raises(queue.Empty):
        full.get(timeout=ALARM_S)


def test_interrupted_get_takes_nothing_later(c: Cluster) -> None:
    empty: hoplite_mp.Queue[int] = hoplite_mp.Queue()
    raises_by_a_handler(empty.get)
    empty.put(1)
    assert empty.get(timeout=PATIENCE_S) == 1
