"""Who goes into a reduction: the first to be ready, never a failed one, each once."""

from __future__ import annotations

from concurrent.futures import CancelledError
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from hoplite_mp import HopliteTimeoutError, ObjectLostError, ReduceError
from tests.support.functions import after, failing_after, raise_key_error
from tests.support.values import bits
from tests.support.waiting import Gate, eventually

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from hoplite_mp import Cluster


class Line:
    """Tasks that end when they are told to: number k gives 2 ** k in an array."""

    def __init__(self, cluster: Cluster, folder: Path, count: int) -> None:
        self.cluster = cluster
        self.gates = [Gate(folder, str(k)) for k in range(count)]
        self.pool = cluster.executor(count)
        self.tasks = [
            self.pool.submit(after, gate, np.full(5, 2**k, np.int64))
            for k, gate in enumerate(self.gates)
        ]

    def finish(self, k: int) -> None:
        self.gates[k].open()
        self.tasks[k].result(timeout=20)

    def close(self) -> None:
        for gate in self.gates:
            gate.open()
        self.pool.shutdown()


@pytest.fixture
def line(cluster: Cluster, tmp_path: Path) -> Iterator[Line]:
    made = Line(cluster, tmp_path, 4)
    yield made
    made.close()


def test_all_are_waited_for_and_contributors_are_none_until_then(
    cluster: Cluster, line: Line
) -> None:
    result = cluster.reduce(line.tasks)
    for k in (2, 0, 3):
        line.finish(k)
        assert result.contributors is None
        assert cluster.wait(result, timeout=0) == ([], [result])
        with pytest.raises(HopliteTimeoutError):
            cluster.get(result, timeout=0)
    line.finish(1)
    assert cluster.get(result, timeout=20).tolist() == [15] * 5
    assert result.contributors == (0, 1, 2, 3)


@pytest.mark.parametrize(
    ("order", "num"),
    [((3, 1, 0, 2), 1), ((3, 1, 0, 2), 2), ((3, 1, 0, 2), 3), ((0, 1, 2, 3), 2), ((2, 3, 1, 0), 3)],
    ids=str,
)
@pytest.mark.parametrize("reproducible", [False, True])
def test_the_first_num_to_be_ready(
    cluster: Cluster, line: Line, order: Any, num: int, reproducible: bool
) -> None:
    result = cluster.reduce(line.tasks, num=num, reproducible=reproducible)
    for k in order[:num]:
        assert result.contributors is None
        line.finish(k)
    assert cluster.get(result, timeout=20).tolist() == [sum(2**k for k in order[:num])] * 5
    assert result.contributors == tuple(sorted(order[:num]))
    for k in order[num:]:
        line.finish(k)
    assert result.contributors == tuple(sorted(order[:num]))


def test_what_is_ready_at_the_call_counts_before_what_comes(cluster: Cluster, line: Line) -> None:
    refs = [line.tasks[0], cluster.put(np.full(5, 100)), line.tasks[1], cluster.put(np.full(5, 7))]
    result = cluster.reduce(refs, num=2)
    assert cluster.get(result, timeout=20).tolist() == [107] * 5
    assert result.contributors == (1, 3)


def test_failed_sources_are_skipped_while_num_can_be_met(cluster: Cluster, tmp_path: Path) -> None:
    gate, last = Gate(tmp_path), Gate(tmp_path, "last")
    good = cluster.submit(after, last, np.ones(3))
    bad = cluster.submit(failing_after, gate, "boom")
    gone = cluster.put(np.ones(3))
    cluster.delete(gone)
    result = cluster.reduce([bad, gone, good, cluster.put(np.ones(3))], num=2)
    gate.open()
    assert isinstance(bad.exception(timeout=20), KeyError)
    assert result.contributors is None
    last.open()
    assert cluster.get(result, timeout=20).tolist() == [2.0] * 3
    assert result.contributors == (2, 3)


def test_too_many_failed_is_a_reduce_error_with_the_tasks_own_exception(
    cluster: Cluster, tmp_path: Path
) -> None:
    gate = Gate(tmp_path)
    bad = cluster.submit(failing_after, gate, "boom")
    result = cluster.reduce([cluster.put(1), bad, cluster.put(2)])
    gate.open()
    for _ in range(2):
        with pytest.raises(ReduceError, match="1 of 3 sources failed") as caught:
            cluster.get(result, timeout=20)
        cause = caught.value.__cause__
        assert type(cause) is KeyError
        assert cause.args == ("boom",)
        assert "failing_after" in str(cause.__cause__)
    assert result.contributors is None
    dependent = cluster.submit(np.negative, result)
    with pytest.raises(ReduceError) as caught:
        dependent.result(timeout=20)
    assert type(caught.value.__cause__) is KeyError
    assert type(dependent.exception().__cause__) is KeyError


def test_the_cause_is_found_in_workers_and_through_reductions_of_reductions(
    cluster: Cluster,
) -> None:
    inner = cluster.reduce([cluster.put(1), cluster.submit(raise_key_error, "deep")])
    outer = cluster.reduce([inner, cluster.put(1)])

    def look(refs: Any) -> tuple[str, ...]:
        import hoplite_mp

        try:
            hoplite_mp.current().get(refs.value[0])
        except ReduceError as error:
            cause = error.__cause__
            return type(cause).__name__, type(cause.__cause__).__name__
        return ()

    class Box:
        def __init__(self, value: Any) -> None:
            self.value = value

    with pytest.raises(ReduceError) as caught:
        cluster.get(outer, timeout=20)
    assert type(caught.value.__cause__) is ReduceError
    assert type(caught.value.__cause__.__cause__) is KeyError
    found = cluster.submit(look, Box([outer])).result(timeout=20)
    assert found == ("ReduceError", "KeyError")


def test_cancelled_and_deleted_sources_are_failed_ones(cluster: Cluster, line: Line) -> None:
    result = cluster.reduce(line.tasks, num=2)
    strict = cluster.reduce(line.tasks)
    assert line.tasks[0].cancel(force=True)
    cluster.delete(line.tasks[1])
    with pytest.raises(ReduceError) as caught:
        cluster.get(strict, timeout=20)
    assert isinstance(caught.value.__cause__, (CancelledError, ObjectLostError))
    assert result.contributors is None
    line.finish(3)
    line.finish(2)
    assert cluster.get(result, timeout=20).tolist() == [12] * 5
    assert result.contributors == (2, 3)


@pytest.mark.parametrize("how", ["cancelled", "deleted"])
def test_the_cause_of_a_cancelled_or_deleted_source(cluster: Cluster, line: Line, how: str) -> None:
    if how == "cancelled":
        line.tasks[0].cancel(force=True)
        ref, kind = line.tasks[0].ref, CancelledError
    else:
        ref, kind = cluster.put(1), ObjectLostError
        cluster.delete(ref)
    with pytest.raises(ReduceError, match=how) as caught:
        cluster.get(cluster.reduce([ref, cluster.put(2)]), timeout=20)
    assert type(caught.value.__cause__) is kind


def test_deadline_zero_takes_what_is_ready(cluster: Cluster, line: Line) -> None:
    line.finish(1)
    line.finish(2)
    result = cluster.reduce(line.tasks, deadline=0)
    assert cluster.get(result, timeout=20).tolist() == [6] * 5
    assert result.contributors == (1, 2)


def test_a_deadline_does_not_exceed_num(cluster: Cluster, line: Line) -> None:
    for k in range(3):
        line.finish(k)
    result = cluster.reduce(line.tasks, num=2, deadline=0)
    cluster.get(result, timeout=20)
    assert len(result.contributors) == 2


@pytest.mark.parametrize("deadline", [0, 0.05])
def test_with_nothing_ready_at_the_deadline_the_first_to_come_counts(
    cluster: Cluster, line: Line, deadline: float
) -> None:
    result = cluster.reduce(line.tasks, deadline=deadline)
    with pytest.raises(HopliteTimeoutError):
        cluster.get(result, timeout=2 * deadline)
    line.finish(2)
    assert cluster.get(result, timeout=20).tolist() == [4] * 5
    assert result.contributors == (2,)


def test_a_deadline_that_comes_while_waiting(cluster: Cluster, line: Line) -> None:
    line.finish(3)
    line.finish(0)
    result = cluster.reduce(line.tasks, num=3, deadline=0.05)
    assert cluster.get(result, timeout=20).tolist() == [9] * 5
    assert result.contributors == (0, 3)


def test_enough_before_the_deadline_does_not_wait_for_it(cluster: Cluster) -> None:
    refs = [cluster.put(k) for k in range(3)]
    assert cluster.get(cluster.reduce(refs, deadline=1e6), timeout=20) == 3


def test_all_failed_by_the_deadline(cluster: Cluster) -> None:
    refs = [cluster.submit(raise_key_error, str(k)) for k in range(3)]
    cluster.wait(refs)
    with pytest.raises(ReduceError) as caught:
        cluster.get(cluster.reduce(refs, deadline=0), timeout=20)
    assert type(caught.value.__cause__) is KeyError


def test_a_ref_given_twice_counts_twice(cluster: Cluster, line: Line) -> None:
    a, b = line.tasks[0], line.tasks[1]
    result = cluster.reduce([a, b, a.ref, a])
    line.finish(0)
    assert result.contributors is None
    line.finish(1)
    assert cluster.get(result, timeout=20).tolist() == [5] * 5
    assert result.contributors == (0, 1, 2, 3)
    first = cluster.reduce([a, a, b], num=2, reproducible=True)
    assert cluster.get(first, timeout=20).tolist() == [2] * 5
    assert first.contributors == (0, 1)


@pytest.mark.parametrize("count", [1, 2, 3, 7, 8, 9, 31, 64, 500])
def test_any_number_of_sources(cluster: Cluster, count: int) -> None:
    arrays = [np.arange(100, dtype=np.float32) * k for k in range(count)]
    result = cluster.reduce([cluster.put(a) for a in arrays], reproducible=True)
    total = arrays[0]
    for array in arrays[1:]:
        total = total + array
    assert bits(cluster.get(result, timeout=20)) == bits(total)
    assert result.contributors == tuple(range(count))


def test_five_hundred_tasks(cluster: Cluster) -> None:
    tasks = [cluster.submit(np.full, 10, k) for k in range(500)]
    result = cluster.reduce(tasks, num=400)
    got = cluster.get(result, timeout=30)
    assert len(result.contributors) == 400
    assert got.tolist() == [sum(result.contributors)] * 10


def test_results_of_reductions_are_sources(cluster: Cluster, line: Line) -> None:
    low = cluster.reduce(line.tasks[:2])
    high = cluster.reduce(line.tasks[2:])
    all_of_them = cluster.reduce([low, high, low])
    assert cluster.locations(low) == []
    for k in (3, 0, 1, 2):
        line.finish(k)
    assert cluster.get(all_of_them, timeout=20).tolist() == [18] * 5
    assert all_of_them.contributors == (0, 1, 2)
    assert (low.contributors, high.contributors) == ((0, 1), (0, 1))
    eventually(lambda: cluster.locations(low) == ["h0"])
