"""Reductions of refs by a function, over values of any kind."""

from __future__ import annotations

import operator
import os
import signal
import time
from decimal import Decimal
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import hoplite_mp
from hoplite_mp import HopliteTimeoutError, ReduceError
from tests.support.functions import after, raise_key_error
from tests.support.waiting import Gate

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from hoplite_mp import Cluster

BIG = 1 << 70
VALUES: dict[str, tuple[list[Any], Callable[[Any, Any], Any], Any]] = {
    "ints beyond 64 bits": ([BIG, BIG + 1, 3], operator.add, 2 * BIG + 4),
    "decimals": ([Decimal("0.1")] * 3, operator.add, Decimal("0.3")),
    "sets": ([{1}, {2}, {1, 3}], operator.or_, {1, 2, 3}),
    "in place": ([[1], [2], [3]], operator.iadd, [1, 2, 3]),
    "in order": (["a", "b", "c"], lambda a, b: f"({a}{b})", "((ab)c)"),
    "large": ([bytes([n]) * 300_000 for n in range(2)], operator.add, b"\0" * 300_000
              + b"\1" * 300_000),
    "one": ([{5}], operator.or_, {5}),
}  # fmt: skip


@pytest.mark.parametrize("call", ["reduce", "allreduce"])
@pytest.mark.parametrize("what", VALUES)
def test_values_are_folded_in_the_order_of_refs(cluster: Cluster, what: str, call: str) -> None:
    values, op, total = VALUES[what]
    refs = [cluster.put(value) for value in values]
    result = getattr(cluster, call)(refs, op=op)
    assert cluster.get(result, timeout=30) == total
    assert result.contributors == tuple(range(len(values)))
    assert cluster.get(refs) == values, "the sources stay as they are"
    again = cluster.submit(lambda x: x, result)
    assert again.result(30) == total


def test_arrays_are_folded_by_a_function(cluster: Cluster) -> None:
    x = cluster.put(np.arange(3.0))
    result = cluster.reduce([x, cluster.submit(np.ones, 3), x], op=lambda a, b: a * 10 - b)
    assert cluster.get(result, timeout=30).tolist() == [-10.0, 89.0, 188.0]
    assert result.contributors == (0, 1, 2), "a ref that is given twice counts twice"


def test_the_first_to_be_ready_are_folded(cluster: Cluster, tmp_path: Path) -> None:
    gate = Gate(tmp_path)
    late = cluster.submit(after, gate, [0])
    refs = [late, cluster.put([1]), cluster.put([2])]
    two = cluster.reduce(refs, op=operator.add, num=2)
    assert cluster.get(two, timeout=30) == [1, 2]
    assert two.contributors == (1, 2)
    soon = cluster.reduce(refs, op=operator.add, deadline=0.05)
    assert cluster.get(soon, timeout=30) == [1, 2]
    first = cluster.reduce([late], op=operator.add, deadline=0)
    whole = cluster.reduce(refs, op=operator.add)
    with pytest.raises(HopliteTimeoutError):
        cluster.get(whole, timeout=0.1)
    assert whole.contributors is None
    gate.open()
    assert cluster.get([first, whole], timeout=30) == [[0], [0, 1, 2]]


def test_fold_that_begins_late_takes_the_refs_that_were_ready_at_the_call(tmp_path: Path) -> None:
    with hoplite_mp.Cluster(workers=1, memory="64MiB") as alone:
        gate = Gate(tmp_path)
        busy = alone.submit(after, gate, {1})
        refs = [busy, alone.put({7}), alone.put({8})]
        limited = alone.reduce(refs, op=operator.or_, deadline=0.05)
        first = alone.reduce(refs, op=operator.or_, num=1)
        none = alone.reduce([busy], op=operator.or_, deadline=0.05)
        time.sleep(0.1)
        gate.open()
        assert alone.get([limited, first, none], timeout=30) == [{7, 8}, {7}, {1}]
        assert limited.contributors == (1, 2)


def test_fold_without_workers_is_an_error_that_names_reduce() -> None:
    with hoplite_mp.Cluster(workers=0, memory="64MiB") as alone:
        refs = [alone.put({1}), alone.put({2})]
        for call in (alone.reduce, alone.allreduce):
            with pytest.raises(RuntimeError, match=r"a function, .* has no workers"):
                call(refs, op=operator.or_)


def test_failed_sources_are_skipped_while_enough_are_left(cluster: Cluster) -> None:
    refs = [cluster.put({0}), cluster.submit(raise_key_error, "source"), cluster.put({2})]
    result = cluster.reduce(refs, op=operator.or_, num=2)
    assert cluster.get(result, timeout=30) == {0, 2}
    assert result.contributors == (0, 2)
    with pytest.raises(ReduceError, match=r"2 of 3 sources are left.*source"):
        cluster.get(cluster.reduce(refs, op=operator.or_), timeout=30)


def test_an_exception_of_the_function_is_raised_by_get(cluster: Cluster) -> None:
    refs = [cluster.put("a"), cluster.put(1)]
    with pytest.raises(TypeError, match="concatenate"):
        cluster.get(cluster.reduce(refs, op=operator.add), timeout=30)


def test_mistakes_are_errors_of_the_call(cluster: Cluster) -> None:
    refs = [cluster.put(1), cluster.put(2)]
    for wrong, text in (({"num": 3}, "num=3"), ({"num": 0}, "num=0"), ({"deadline": -1}, "-1")):
        with pytest.raises(ValueError, match=text):
            cluster.reduce(refs, op=max, **wrong)
    with pytest.raises(ValueError, match="no refs"):
        cluster.allreduce([], op=max)
    with pytest.raises(ValueError, match="a name or a numpy ufunc"):
        cluster.reduce_scatter(refs, op=max)
    with pytest.raises(ValueError, match="associative and commutative"):
        cluster.reduce(refs, op=np.subtract)
    with pytest.raises(ValueError, match="op=callable"):
        cluster.get(cluster.reduce([cluster.put([1]), cluster.put([2])]), timeout=30)


def test_a_worker_that_dies_while_it_folds_is_replaced(cluster: Cluster, tmp_path: Path) -> None:
    died = tmp_path / "died"

    def fold(a: list[int], b: list[int]) -> list[int]:
        if not died.exists():
            died.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return a + b

    result = cluster.reduce([cluster.put([1]), cluster.put([2])], op=fold)
    assert cluster.get(result, timeout=30) == [1, 2]
    assert result.contributors == (0, 1)


def test_total_that_cannot_be_pickled_is_named_by_its_own_class(cluster: Cluster) -> None:
    total = cluster.reduce([cluster.put(n) for n in range(3)], op=lambda a, b: (i for i in ()))
    with pytest.raises(TypeError, match="the result of a reduction, a generator, does not"):
        cluster.get(total)
