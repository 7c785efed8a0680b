"""Whoever is listed for an object is told, at whatever moment of the telling he came."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from hoplite_mp import Actor, Cluster
from hoplite_mp._client.collector import _Call, watch, withdraw
from tests.support.functions import after
from tests.support.waiting import Gate

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.waiting import Run


class Meddling:
    """A lock; before it is taken for the nth time somebody else is listed."""

    def __init__(self, lock: Any, at: int, meddle: Any) -> None:
        self.lock = lock
        self.left = at
        self.meddle = meddle

    def __enter__(self) -> None:
        self.left -= 1
        if not self.left:
            self.meddle()
        self.lock.acquire()

    def __exit__(self, *_: object) -> None:
        self.lock.release()


@pytest.mark.parametrize("at", range(1, 6))
def test_one_who_comes_while_others_are_told(cluster: Cluster, tmp_path: Path, at: int) -> None:
    submitter = cluster._runtime.submitter
    lock = submitter.waits_lock
    gate = Gate(tmp_path)
    future = cluster.submit(after, gate, 1)
    told: list[int] = []
    listed = []
    for number in (1, 2):
        watch(submitter, future._oid, lambda number=number: told.append(number))

    def meddle() -> None:
        if future._oid in submitter.waits:
            listed.append(3)
            submitter.begin_wait(future._oid, _Call(future._oid, lambda: told.append(3)))

    submitter.waits_lock = Meddling(lock, at, meddle)  # type: ignore[assignment]
    gate.open()
    try:
        assert future.result() == 1
        while not future.done() or submitter.waits:
            submitter.look_at_all()
    finally:
        submitter.waits_lock = lock
    assert told[:2] == [1, 2]
    assert set(told) == {1, 2, *listed}


def test_who_has_withdrawn_is_not_told(cluster: Cluster, tmp_path: Path) -> None:
    submitter = cluster._runtime.submitter
    gate = Gate(tmp_path)
    future = cluster.submit(after, gate, 1)
    told: list[str] = []
    first = watch(submitter, future._oid, lambda: told.append("first"))
    watch(submitter, future._oid, lambda: told.append("second"))
    withdraw(submitter, first)
    withdraw(submitter, first)
    gate.open()
    assert future.result() == 1
    while submitter.waits:
        submitter.drain()
    assert told == ["second"]
    gate = Gate(tmp_path, "other")
    other = cluster.submit(after, gate, 2)
    alone = watch(submitter, other._oid, lambda: told.append("alone"))
    withdraw(submitter, alone)
    assert not submitter.waits
    gate.open()
    assert other.result() == 2


class Counter:
    def __init__(self) -> None:
        self.count = 0

    def add(self, n: int) -> int:
        self.count += n
        return self.count


def test_calls_of_actors(cluster: Cluster, run: Run) -> None:
    async def main() -> None:
        counter = cluster.actor(Counter)
        calls = [counter.add(1) for _ in range(20)]
        assert [await call for call in calls] == list(range(1, 21))
        assert await counter.add(cluster.put(5)).ref == 25
        Actor.close(counter)

    run(main())
