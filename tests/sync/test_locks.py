"""Locks, semaphores and events on one host."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

import hoplite_mp
from hoplite_mp import ActorLostError
from hoplite_mp._api.actor import Actor
from tests.support.waiting import PATIENCE_S, waiters_are

if TYPE_CHECKING:
    from pathlib import Path

    from hoplite_mp import Cluster, Event, Lock, Semaphore


def _raise_number(lock: Lock, path: Path, times: int) -> None:
    for _ in range(times):
        with lock:
            number = int(path.read_text())
            path.write_text(str(number + 1))


def test_one_at_a_time(c: Cluster, tmp_path: Path) -> None:
    path = tmp_path / "number"
    path.write_text("0")
    lock = hoplite_mp.Lock()
    for future in [c.submit(_raise_number, lock, path, 10) for _ in range(3)]:
        future.result(PATIENCE_S)
    assert path.read_text() == "30"


def test_lock(c: Cluster) -> None:
    lock = hoplite_mp.Lock()
    assert not lock.locked()
    with lock as got:
        assert got is True
        assert lock.locked()
        assert not lock.acquire(block=False)
        assert not lock.acquire(timeout=0.01)
        assert not c.submit(lock.acquire, timeout=0.01).result(PATIENCE_S)
    assert not lock.locked()
    with pytest.raises(ValueError, match="too many times"):
        lock.release()
    assert lock.acquire()
    c.submit(lock.release).result(PATIENCE_S)  # any process may
    assert lock.acquire(False)
    lock.release()


def test_who_has_waited_longest_gets_it(c: Cluster) -> None:
    lock = hoplite_mp.Lock()
    order: hoplite_mp.Queue[int] = hoplite_mp.Queue()
    lock.acquire()
    futures = []
    for number in range(3):
        futures.append(c.submit(_take_turn, lock, order, number))
        waiters_are(lock, number + 1)
    lock.release()
    c.wait(futures)
    assert [order.get(timeout=PATIENCE_S) for _ in range(3)] == [0, 1, 2]


def _take_turn(lock: Lock, order: hoplite_mp.Queue[int], number: int) -> None:
    with lock:
        order.put(number)


def test_semaphore(c: Cluster) -> None:
    semaphore = hoplite_mp.Semaphore(2)
    assert semaphore.get_value() == 2
    with semaphore, semaphore:
        assert semaphore.get_value() == 0
        assert semaphore.locked()
        assert not semaphore.acquire(timeout=0.01)
    semaphore.release()  # beyond what it was made with
    assert semaphore.get_value() == 3


def test_a_semaphore_as_a_signal(c: Cluster) -> None:
    """One releases what others acquire: what was acquired does not come back."""
    signal = hoplite_mp.Semaphore(0)
    for _ in range(3):
        waiting = c.submit(signal.acquire)
        waiters_are(signal, 1)
        signal.release()
        assert waiting.result(PATIENCE_S)
        assert signal.get_value() == 0


@pytest.mark.parametrize("value", [-1, "1", 1.5, True])
def test_wrong_values(c: Cluster, value: int) -> None:
    with pytest.raises((TypeError, ValueError), match="value="):
        hoplite_mp.Semaphore(value)


def test_event(c: Cluster) -> None:
    event = hoplite_mp.Event()
    assert not event.is_set()
    assert not event.wait(0)
    assert not event.wait(0.01)
    waiting = [c.submit(event.wait) for _ in range(3)]
    waiters_are(event, 1)
    event.set()
    assert all(f.result(PATIENCE_S) for f in waiting)
    assert event.is_set()
    assert event.wait()
    event.clear()
    assert not event.wait(0)


@pytest.mark.parametrize("how", [Actor.close, Actor.kill])
@pytest.mark.parametrize(
    "kind", [hoplite_mp.Lock, hoplite_mp.Semaphore, hoplite_mp.Event, hoplite_mp.Queue]
)
def test_who_waits_learns_of_the_end(c: Cluster, kind: type, how: object) -> None:
    used = kind(0) if kind is hoplite_mp.Semaphore else kind()
    call = {hoplite_mp.Event: "wait", hoplite_mp.Queue: "get"}.get(kind, "acquire")
    if kind is hoplite_mp.Lock:
        used.acquire()
    waiting = c.submit(getattr(used, call))
    waiters_are(used, 1)
    how(used.actor)  # type: ignore[operator]
    with pytest.raises(ActorLostError):
        waiting.result(PATIENCE_S)


def test_handles_keep_it(c: Cluster) -> None:
    """Its actor ends with the last one, wherever that is."""
    event = hoplite_mp.Event()
    task = c.submit(event.wait)
    waiters_are(event, 1)
    other: Event = c.submit(_same, event).result(PATIENCE_S)
    del event
    other.set()
    assert task.result(PATIENCE_S)


def _same(used: Event) -> Event:
    return used


def test_inside_of_other_objects(c: Cluster) -> None:
    held: dict[str, Semaphore] = {"a": hoplite_mp.Semaphore(1)}
    ref = c.put(held)
    assert c.submit(_acquire_in, ref).result(PATIENCE_S)
    assert c.get(ref)["a"] == held["a"]


def _acquire_in(held: dict[str, Semaphore]) -> bool:
    return held["a"].acquire(False)
