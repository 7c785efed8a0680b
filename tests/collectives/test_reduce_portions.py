"""Reductions over more than fits into memory: the bits of one pass over all sources."""

from __future__ import annotations

import contextlib
import re
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
import pytest

import hoplite_mp
from hoplite_mp import ObjectLostError, StoreFullError
from hoplite_mp._common.reduction import reduce_arrays, result_dtype
from hoplite_mp._serialize import dtype_name, named_dtype
from tests.support.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hoplite_mp import Cluster

SOURCES, SOURCE_BYTES = 12, 2 << 20


@pytest.fixture(scope="module")
def small() -> Iterator[Cluster]:
    config = hoplite_mp.Config(populate_ahead_bytes=0, put_wait_s=60)
    with hoplite_mp.Cluster(workers=0, memory="16MiB", config=config) as cluster:
        yield cluster


def sources(dtype: Any, seed: int = 0) -> list[Any]:
    kind = np.dtype(dtype)
    random = np.random.default_rng(seed)
    count = SOURCE_BYTES // kind.itemsize
    made = []
    for _ in range(SOURCES):
        if kind.kind in "iub":
            array = random.integers(0, 2 if kind.kind == "b" else 100, count).astype(kind)
        elif kind.kind == "c":
            array = random.normal(size=2 * count).astype(f"f{kind.itemsize // 2}").view(kind)
        else:
            array = random.normal(1, 0.3, count).astype(kind)
        made.append(array)
    return made


def at_once(op: str, arrays: list[Any]) -> Any:
    name = dtype_name(arrays[0].dtype)
    assert name is not None
    out = np.empty(arrays[0].shape, named_dtype(result_dtype(op, name)))
    reduce_arrays(op, arrays, out, 1)
    return out


@pytest.mark.parametrize(
    ("op", "dtype"),
    [
        ("sum", np.float32), ("mean", np.float32), ("max", np.float64), ("prod", np.complex64),
        ("mean", np.complex64), ("mean", np.int32), ("sum", np.int32),
        ("xor", np.uint8), ("sum", np.float16), ("mean", np.float16), ("min", np.float16),
        ("sum", ml_dtypes.bfloat16), ("mean", ml_dtypes.bfloat16), ("hypot", np.float32),
    ],
)  # fmt: skip
def test_the_same_bits(small: Cluster, op: str, dtype: Any) -> None:
    arrays = sources(dtype)
    refs = [small.put(array) for array in arrays]
    assert small.stats()["bytes_spilled"] > 0
    given: Any = np.hypot if op == "hypot" else op
    result = small.reduce(refs, given, reproducible=True)
    value = small.get(result, timeout=20)
    wanted = at_once(op, arrays)
    assert value.dtype == wanted.dtype
    assert value.tobytes() == wanted.tobytes()
    assert result.contributors == tuple(range(SOURCES))


def test_sources_in_both_memory_orders(small: Cluster) -> None:
    arrays = [
        array.reshape((512, -1), order="CF"[k % 2])  # type: ignore[call-overload]
        for k, array in enumerate(sources(np.float32))
    ]
    refs = [small.put(array) for array in arrays]
    value = small.get(small.reduce(refs, reproducible=True), timeout=20)
    assert (value == at_once("sum", [np.ascontiguousarray(array) for array in arrays])).all()


@pytest.mark.parametrize("dtype", [np.float64, np.float16])
def test_slices(small: Cluster, dtype: Any) -> None:
    arrays = sources(dtype)
    parts = small.reduce_scatter([small.put(array) for array in arrays], "mean")
    assert len(parts) == SOURCES
    found = np.concatenate([small.get(part, timeout=20) for part in parts])
    assert found.shape == arrays[0].shape
    assert np.allclose(found.astype("f8"), at_once("mean", arrays).astype("f8"), rtol=0.01)


def test_mistakes_are_found_in_later_portions_too(small: Cluster) -> None:
    refs = [small.put(array) for array in sources(np.float32)]
    odd = small.put(np.zeros(SOURCE_BYTES // 8, np.float64))
    with pytest.raises(ValueError, match=re.escape(f"sources differ: 0 ({refs[0]})")):
        small.get(small.reduce([*refs, odd], reproducible=True), timeout=20)
    small.delete(refs[9])
    with pytest.raises((ObjectLostError, hoplite_mp.ReduceError)):
        small.get(small.reduce(refs, reproducible=True), timeout=20)
    assert small.get(small.reduce(refs[:9]), timeout=20).size


def test_what_cannot_be_folded_in_portions_says_so() -> None:
    config = hoplite_mp.Config(populate_ahead_bytes=0, put_wait_s=0.2)
    with hoplite_mp.Cluster(workers=0, memory="16MiB", config=config) as cluster:

        def put(array: Any) -> Any:
            with contextlib.suppress(StoreFullError):  # what is to be spilled may take longer
                return cluster.put(array)
            return None

        refs = [eventually(lambda a=array: put(a.astype(">f4"))) for array in sources(np.float32)]
        with pytest.raises(StoreFullError, match=r"'mean' of >f4 cannot be folded in portions"):
            cluster.get(cluster.reduce(refs, "mean"), timeout=60)


def test_nothing_of_it_stays(small: Cluster) -> None:
    before = small.stats()["bytes_used"]
    refs = [small.put(array) for array in sources(np.float16)]
    result = small.reduce(refs, "mean")
    small.get(result, timeout=20)
    del refs, result
    eventually(lambda: small.stats()["bytes_used"] <= before, "that it is given back")


def test_nothing_stays_of_one_whose_first_portion_has_a_mistake(small: Cluster) -> None:
    before = small.stats()["bytes_used"]
    refs = [small.put(array) for array in sources(np.float16)]
    refs.insert(1, small.put(np.zeros(SOURCE_BYTES // 8, np.float64)))
    for _ in range(4):
        with pytest.raises(ValueError, match="sources differ"):
            small.get(small.reduce(refs, "mean", reproducible=True), timeout=20)
    del refs
    eventually(lambda: small.stats()["bytes_used"] <= before, "that it is given back")
