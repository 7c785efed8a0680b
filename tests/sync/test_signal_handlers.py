"""A call whose signal handler raises an exception withdraws: nothing is left of it in the table."""

from __future__ import annotations

import queue
import signal
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest

import hoplite_mp
from tests.support.waiting import PATIENCE_S, eventually

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType

    from hoplite_mp import Cluster

ALARM_S = 0.2


class AlarmError(Exception):
    """Raised by the signal handler."""


@contextmanager
def raised_by_a_handler() -> Iterator[None]:
    def handle(number: int, frame: FrameType | None) -> None:
        raise AlarmError

    before = signal.signal(signal.SIGALRM, handle)
    try:
        signal.setitimer(signal.ITIMER_REAL, ALARM_S)
        with pytest.raises(AlarmError):
            yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def test_interrupted_barrier_wait_leaves_the_round(c: Cluster) -> None:
    barrier = hoplite_mp.Barrier(2)
    with raised_by_a_handler():
        barrier.wait(PATIENCE_S)
    eventually(lambda: barrier.n_waiting == 0)
    assert not barrier.broken


def test_interrupted_acquire_gets_no_permit_later(c: Cluster) -> None:
    lock = hoplite_mp.Lock()
    assert lock.acquire()
    with raised_by_a_handler():
        lock.acquire()
    lock.release()
    assert lock.acquire(timeout=PATIENCE_S / 10)
    lock.release()


def test_interrupted_put_puts_nothing_later(c: Cluster) -> None:
    full: hoplite_mp.Queue[int] = hoplite_mp.Queue(1)
    full.put(1)
    with raised_by_a_handler():
        full.put(2)
    assert full.get() == 1
    with pytest.raises(queue.Empty):
        full.get(timeout=ALARM_S)


def test_interrupted_get_takes_nothing_later(c: Cluster) -> None:
    empty: hoplite_mp.Queue[int] = hoplite_mp.Queue()
    with raised_by_a_handler():
        empty.get()
    empty.put(1)
    assert empty.get(timeout=PATIENCE_S / 10) == 1
