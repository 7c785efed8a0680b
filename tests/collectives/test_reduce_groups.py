"""Reductions of the first ref of each group (`one_of`) on one host."""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hoplite_mp import ReduceError, ml
from tests.support.functions import after, failing_after, raise_key_error
from tests.support.values import bits
from tests.support.waiting import Gate

if TYPE_CHECKING:
    from pathlib import Path

    from hoplite_mp import Cluster

PAIRS = [[0, 1], [2, 3]]
# Ways to reduce: by the planner, and in a task.
WAYS: dict[str, dict[str, Any]] = {
    "name": {"op": "sum"},
    "reproducible": {"op": "sum", "reproducible": True},
    "function": {"op": operator.add, "copies": True},
    "finite": {"op": "sum", "finite": True},
}


def reduce_by(cluster: Cluster, way: str, call: str = "reduce") -> Any:
    arguments = dict(WAYS[way])
    if arguments.pop("copies", False):
        arguments["op"] = lambda a, b: a + b
    return lambda refs, **more: getattr(cluster, call)(refs, **arguments, **more)


@pytest.mark.parametrize("call", ["reduce", "allreduce"])
@pytest.mark.parametrize("way", WAYS)
def test_first_ready_ref_of_each_group_is_reduced(
    cluster: Cluster, tmp_path: Path, way: str, call: str
) -> None:
    gates = [Gate(tmp_path, str(k)) for k in range(4)]
    with cluster.executor(4) as pool:
        tasks = [pool.submit(after, gate, np.full(3, 2.0**k)) for k, gate in enumerate(gates)]
        result = reduce_by(cluster, way, call)(tasks, one_of=PAIRS)
        gates[3].open()
        tasks[3].result(20)
        assert result.contributors is None, "the other group has no ready ref"
        gates[0].open()
        assert cluster.get(result, timeout=20).tolist() == [9.0] * 3
        gates[1].open()
        gates[2].open()
        assert [task.result(20)[0] for task in tasks] == [1.0, 2.0, 4.0, 8.0]
        assert result.contributors == (0, 3)


@pytest.mark.parametrize("way", WAYS)
def test_failed_refs_are_replaced_by_others_of_their_group(
    cluster: Cluster, tmp_path: Path, way: str
) -> None:
    gate = Gate(tmp_path)
    bad = cluster.submit(raise_key_error, "first")
    refs = [bad, cluster.submit(after, gate, np.ones(2)), cluster.put(np.full(2, 4.0)), bad]
    result = reduce_by(cluster, way)(refs, one_of=PAIRS)
    assert isinstance(bad.exception(20), KeyError)
    gate.open()
    assert cluster.get(result, timeout=20).tolist() == [5.0, 5.0]
    assert result.contributors == (1, 2)


@pytest.mark.parametrize("way", WAYS)
def test_group_that_fails_entirely_is_a_failed_source(
    cluster: Cluster, tmp_path: Path, way: str
) -> None:
    gate = Gate(tmp_path)
    bad = [cluster.submit(raise_key_error, "early"), cluster.submit(failing_after, gate, "late")]
    refs = [*bad, cluster.put(np.ones(2)), cluster.put(np.zeros(2))]
    whole = reduce_by(cluster, way)(refs, one_of=PAIRS)
    one = reduce_by(cluster, way)(refs, one_of=PAIRS, num=1)
    gate.open()
    with pytest.raises(ReduceError, match=r"1 of 2 groups of sources"):
        cluster.get(whole, timeout=20)
    assert cluster.get(one, timeout=20).tolist() in ([1.0, 1.0], [0.0, 0.0])
    assert one.contributors in ((2,), (3,))


def test_cause_is_the_failure_that_ended_the_group(cluster: Cluster, tmp_path: Path) -> None:
    gate = Gate(tmp_path)
    early, last = cluster.submit(raise_key_error, "early"), cluster.submit(failing_after, gate, "l")
    result = cluster.reduce([early, last, cluster.put(1), early], one_of=PAIRS)
    assert isinstance(early.exception(20), KeyError)
    gate.open()
    with pytest.raises(ReduceError, match="the first failure was source 1") as caught:
        cluster.get(result, timeout=20)
    assert "l" in str(caught.value.__cause__)


@pytest.mark.parametrize("way", ["name", "function"])
def test_deadline_takes_the_groups_that_are_ready(
    cluster: Cluster, tmp_path: Path, way: str
) -> None:
    gate = Gate(tmp_path)
    late = cluster.submit(after, gate, np.ones(2))
    refs = [late, late, cluster.put(np.full(2, 3.0)), late]
    result = reduce_by(cluster, way)(refs, one_of=PAIRS, deadline=0)
    assert cluster.get(result, timeout=20).tolist() == [3.0, 3.0]
    assert result.contributors == (2,)
    gate.open()


def test_function_folds_in_the_order_of_the_groups(cluster: Cluster) -> None:
    refs = [cluster.put(letter) for letter in "abcd"]
    result = cluster.reduce(refs, op=lambda a, b: f"({a}{b})", one_of=[[3], [1, 2], [0]])
    assert cluster.get(result, timeout=20) in ("((db)a)", "((dc)a)")
    assert result.contributors in ((0, 1, 3), (0, 2, 3))


def test_mean_divides_by_the_number_of_groups(cluster: Cluster) -> None:
    refs = [cluster.put(np.full(2, x)) for x in (4.0, 4.0, 8.0, 8.0)]
    assert cluster.get(cluster.reduce(refs, op="mean", one_of=PAIRS)).tolist() == [6.0, 6.0]
    median = cluster.reduce(refs, op=ml.Median(), one_of=PAIRS)
    assert cluster.get(median, timeout=20).tolist() == [6.0, 6.0]
    assert len(median.contributors or ()) == 2


@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_reproducible_sum_has_the_same_bits_whichever_refs_are_first(
    cluster: Cluster, data: st.DataObject
) -> None:
    labels = data.draw(st.lists(st.integers(0, 3), min_size=2, max_size=8))
    names = data.draw(st.permutations(sorted({*labels})))
    groups = [[at for at, label in enumerate(labels) if label == name] for name in names]
    absent = {data.draw(st.sampled_from(group)) for group in groups if len(group) > 1}
    rng = np.random.default_rng(0)
    parts = {name: rng.standard_normal(50).astype(np.float32) * 10.0**name for name in range(4)}
    refs = [cluster.put(parts[label]) for label in labels]
    cluster.delete([refs[at] for at in absent])
    result = cluster.reduce(refs, one_of=groups, reproducible=True)
    total = parts[names[0]]
    for name in names[1:]:
        total = total + parts[name]
    assert bits(cluster.get(result, timeout=20)) == bits(total)
    found = result.contributors or ()
    assert sorted(labels[at] for at in found) == sorted(names)
    assert not absent & {*found}
    assert list(found) == sorted(found)


WRONG: list[tuple[Any, str]] = [
    ([], "ref 0 is in no group"),
    ([[]], "group 0 is empty"),
    ([[0, 1, 2, 3], []], "group 1 is empty"),
    ([[0, 1], [1, 2, 3]], "ref 1 is in group 0 and in group 1"),
    ([[0, 0], [1, 2, 3]], "ref 0 is in group 0 and in group 0"),
    ([[0, 1], [2, 3, 4]], "group 1 has 4, which is not an index into 4 refs"),
    ([[0, 1], [2, -1]], "group 1 has -1"),
    ([[0, 1], [2, 3.5]], "group 1 has 3.5"),
    ([[0, 1], [2]], "ref 3 is in no group"),
    ([0, 1], "groups of indices"),
    (3, "groups of indices"),
]


@pytest.mark.parametrize(("one_of", "text"), WRONG, ids=str)
@pytest.mark.parametrize("call", ["reduce", "allreduce"])
def test_wrong_groups_are_an_error_of_the_call(
    cluster: Cluster, call: str, one_of: Any, text: str
) -> None:
    refs = [cluster.put(k) for k in range(4)]
    for more in ({}, {"op": lambda a, b: a + b}):
        with pytest.raises(ValueError, match=text):
            getattr(cluster, call)(refs, one_of=one_of, **more)


def test_num_above_the_number_of_groups_is_an_error_of_the_call(cluster: Cluster) -> None:
    refs = [cluster.put(k) for k in range(4)]
    for more in ({}, {"op": max}):
        with pytest.raises(ValueError, match="num=3: it must be from 1 to the number of groups, 2"):
            cluster.reduce(refs, one_of=PAIRS, num=3, **more)


def test_groups_may_be_any_iterables(cluster: Cluster) -> None:
    refs = [cluster.put(k) for k in range(4)]
    for one_of in (iter([(0, 1), {2, 3}]), np.array([[0, 1], [2, 3]]), [range(2), (3, 2)]):
        assert cluster.get(cluster.reduce(refs, one_of=one_of)).item() == 2
