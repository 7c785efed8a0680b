"""What reduce takes: every shape and memory order, numbers; and what it refuses, by name."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import hoplite_mp
from tests.support.values import bits

if TYPE_CHECKING:
    from hoplite_mp import Cluster


def _parts(count: int = 3) -> list[Any]:
    random = np.random.default_rng(3)
    return [random.normal(size=(5, 7, 3)).astype(np.float32) for _ in range(count)]


@pytest.mark.parametrize("orders", ["CCC", "FFF", "CFC", "FCC", "FFC"])
def test_memory_orders_may_be_mixed(cluster: Cluster, orders: str) -> None:
    arrays = [np.asarray(a, order=o) for a, o in zip(_parts(), orders, strict=True)]
    got = cluster.get(cluster.reduce([cluster.put(a) for a in arrays], reproducible=True))
    assert bits(got) == bits(arrays[0] + arrays[1] + arrays[2])


@pytest.mark.parametrize(
    "cut",
    [
        lambda a: a[::2],
        lambda a: a[:, ::-1],
        lambda a: a.transpose(1, 0, 2),
        lambda a: a[..., 1],
        lambda a: np.broadcast_to(a[:1], a.shape),
    ],
    ids=["strided", "backwards", "transposed", "column", "broadcast"],
)
def test_arrays_need_not_be_contiguous(cluster: Cluster, cut: Any) -> None:
    arrays = [cut(a) for a in _parts()]
    got = cluster.get(cluster.reduce([cluster.put(a) for a in arrays], reproducible=True))
    assert bits(got) == bits(arrays[0] + arrays[1] + arrays[2])


@pytest.mark.parametrize(
    ("values", "dtype"),
    [
        ([1, 2, 4], "i8"), ([0.5, 0.25, 2.0], "f8"), ([True, False, False], "?"),
        ([1 + 2j, 3j, 1.5 + 0j], "c16"),
        ([np.float32(1.5), np.float32(2.5), np.float32(3)], "f4"),
        ([np.int8(100), np.int8(100), np.int8(1)], "i1"),
        ([np.array(1.5), np.array(2.5), np.array(0.25)], "f8"),
        ([1, np.int64(2), np.array(3)], "i8"),
    ],
    ids=str,
)  # fmt: skip
def test_numbers_are_arrays_without_dimensions(cluster: Cluster, values: Any, dtype: str) -> None:
    got = cluster.get(cluster.reduce([cluster.put(v) for v in values]))
    a, b, c = (np.asarray(v, dtype) for v in values)
    assert bits(got) == bits(np.add(np.add(a, b), c))


@pytest.mark.parametrize("shape", [(0,), (3, 0, 2), (0, 0)])
def test_arrays_may_be_empty(cluster: Cluster, shape: tuple[int, ...]) -> None:
    for op in ("sum", "min", "mean", np.fmax):
        refs = [cluster.put(np.empty(shape, np.float32)) for _ in range(2)]
        result = cluster.reduce(refs, op)
        assert bits(cluster.get(result)) == bits(np.empty(shape, np.float32))
        assert result.contributors == (0, 1)


@pytest.mark.parametrize(
    "value",
    [
        np.zeros(3, [("a", "f4"), ("b", "i4")]), np.array([1, "a", None], object), "text", b"bytes",
        None, [1.0, 2.0], {"a": 1}, np.array(["a", "b"]), np.array(["2020-01-01"], "M8[D]"),
    ],
    ids=repr,
)  # fmt: skip
@pytest.mark.parametrize("count", [1, 2])
def test_what_cannot_be_added_is_a_value_error_from_get(
    cluster: Cluster, value: Any, count: int
) -> None:
    result = cluster.reduce([cluster.put(value) for _ in range(count)])
    with pytest.raises(ValueError, match=r"source|op"):
        cluster.get(result)
    assert result.contributors is None


def test_an_operator_that_the_dtype_does_not_have(cluster: Cluster) -> None:
    for count in (1, 2):
        refs = [cluster.put(np.ones(3)) for _ in range(count)]
        with pytest.raises(ValueError, match="xor"):
            cluster.get(cluster.reduce(refs, "xor"))


@pytest.mark.parametrize(
    ("a", "b"),
    [
        (np.zeros(3), np.zeros(4)), (np.zeros((2, 3)), np.zeros((3, 2))), (np.zeros(1), 0.0),
        (np.zeros(3, "f4"), np.zeros(3, "f8")), (1, 1.0), (np.zeros(2, "i4"), np.zeros(2, "u4")),
    ],
    ids=["length", "axes", "dimensions", "float", "number", "sign"],
)  # fmt: skip
def test_sources_that_differ_are_named(cluster: Cluster, a: Any, b: Any) -> None:
    refs = [cluster.put(a), cluster.put(a), cluster.put(b)]
    with pytest.raises(ValueError, match="shape") as caught:
        cluster.get(cluster.reduce(refs))
    text = str(caught.value)
    assert refs[2].id in text
    assert any(ref.id in text for ref in refs[:2])
    for value in (a, b):
        assert str(np.shape(value)) in text


def test_sources_that_differ_do_not_matter_when_they_do_not_go_in(cluster: Cluster) -> None:
    """Only who contributes is compared."""
    refs = [cluster.put(np.ones(3)), cluster.put(np.ones(3))]
    gone = cluster.put(np.ones(4))
    cluster.delete(gone)
    assert cluster.get(cluster.reduce([*refs, gone], num=2)).tolist() == [2.0, 2.0, 2.0]


@pytest.mark.parametrize(
    "arguments",
    [
        {"num": 0}, {"num": -1}, {"num": 3}, {"num": 1.5}, {"num": True}, {"op": "plus"},
        {"deadline": -1}, {"deadline": float("nan")}, {"to": "nowhere"}, {"to": ["h0", "h9"]},
    ],
    ids=str,
)  # fmt: skip
def test_mistakes_are_reported_at_the_call(cluster: Cluster, arguments: Any) -> None:
    refs = [cluster.put(1.0), cluster.put(2.0)]
    for call in (cluster.reduce, cluster.allreduce):
        with pytest.raises(ValueError, match=next(iter(arguments)).replace("to", "node")):
            call(refs, **arguments)


def test_nothing_to_reduce(cluster: Cluster) -> None:
    with pytest.raises(ValueError, match="no refs"):
        cluster.reduce([])
    with pytest.raises(ValueError, match="no refs"):
        cluster.reduce_scatter([])
    for wrong in (7, [cluster.put(1), 7], [[cluster.put(1)]]):
        with pytest.raises(TypeError, match="ref"):
            cluster.reduce(wrong)


def test_results_are_read_only_and_copies_are_not(cluster: Cluster) -> None:
    result = cluster.reduce([cluster.put(np.ones(1000)) for _ in range(2)])
    got = cluster.get(result)
    assert not got.flags.writeable
    copy = cluster.get(result, copy=True)
    copy += 1
    assert (got == 2).all()
    assert (copy == 3).all()


def test_one_ref_alone_and_any_iterable(cluster: Cluster) -> None:
    ref = cluster.put(np.arange(3))
    assert cluster.get(cluster.reduce(ref)).tolist() == [0, 1, 2]
    assert cluster.get(cluster.reduce(r for r in (ref, ref))).tolist() == [0, 2, 4]
    future = cluster.submit(np.arange, 3)
    assert cluster.get(cluster.reduce(future)).tolist() == [0, 1, 2]
    assert cluster.get(cluster.reduce((future, ref), to="h0")).tolist() == [0, 2, 4]
    assert cluster.get(cluster.reduce((future, ref), to=cluster.nodes)).tolist() == [0, 2, 4]


def test_more_refs_than_one_collective_takes() -> None:
    config = hoplite_mp.Config(collective_refs_max=8)
    with hoplite_mp.Cluster(workers=0, config=config) as cluster:
        refs = [cluster.put(1)] * 9
        assert cluster.get(cluster.reduce(refs[:8])) == 8
        for call in (cluster.reduce, cluster.gather, cluster.allreduce):
            with pytest.raises(ValueError, match=r"of 9 refs: .* at most 8"):
                call(refs)
