"""A ref or a Future is not the value that it stands for: what NumPy and pandas do with one."""

from __future__ import annotations

import operator
import pickle
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import hoplite_mp

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from hoplite_mp import Cluster

ONES = np.ones(3)
USES: dict[str, Callable[[Any], Any]] = {
    "sum": np.sum,
    "mean": np.mean,
    "max": np.max,
    "dot": lambda x: np.dot(ONES, x),
    "asarray": np.asarray,
    "array": np.array,
    "list": lambda x: np.array([x, x]),
    "float array": lambda x: np.asarray(x, dtype=float),
    "stack": lambda x: np.stack([x, x]),
    "ufunc": lambda x: np.add(ONES, x),
    "unary ufunc": np.sqrt,
    "reduce": np.add.reduce,
    "out": lambda x: np.add(1, 1, out=x),
    "left": lambda x: x + ONES,
    "right": lambda x: ONES - x,
    "in place": lambda x: operator.imul(ONES.copy(), x),
    "matmul": lambda x: ONES @ x,
    "scalar": lambda x: np.float64(2) * x,
    "int": lambda x: x + 1,
    "right int": lambda x: 2**x,
    "builtin sum": lambda x: sum([x, x]),
    "negative": lambda x: -x,
    "abs": abs,
    "divmod": lambda x: divmod(7, x),
    "array compares": lambda x: x < ONES,
}


@pytest.fixture(scope="module")
def c() -> Iterator[Cluster]:
    with hoplite_mp.Cluster(workers=1, memory="64MiB") as made:
        yield made


@pytest.mark.parametrize("use", USES)
def test_a_ref_used_as_its_value_is_a_type_error_that_names_get(c: Cluster, use: str) -> None:
    ref, future = c.put(np.arange(3)), c.submit(np.arange, 3)
    with pytest.raises(TypeError, match=r"ObjectRef is not the value itself: use c\.get\(ref\)"):
        USES[use](ref)
    with pytest.raises(TypeError, match=r"Future is not the value itself: use c\.get\(future\)"):
        USES[use](future)


def test_a_future_of_a_group_used_as_its_value_is_a_type_error(c: Cluster) -> None:
    with c.group("not an array", 1) as g:
        future = g.allreduce_async(ONES)
        with pytest.raises(TypeError, match=r"use future\.result\(\)"):
            np.sum(future)
        assert future.result(20).tolist() == [1.0] * 3
        with pytest.raises(TypeError, match=r"not hoplite_mp\.ObjectRef: use c\.get\(ref\)"):
            g.allreduce(c.put(1))


def test_refs_are_held_by_arrays_of_dtype_object(c: Cluster) -> None:
    for a, b in ((c.put(1), c.put(2)), (c.submit(abs, 1), c.submit(abs, 2))):
        array = np.array([a, b], dtype=object)
        assert array.shape == (2,)
        assert array[0] is a
        assert (array == a).tolist() == [True, False]
        assert (b != array).tolist() == [True, False]
        assert np.asarray(a, dtype=object)[()] is a
        assert repr(a) in repr(array)
        filled = np.empty(2, object)
        filled[:] = a
        filled[1] = b
        assert filled.tolist() == [a, b]
        assert c.get(list(array)) == [1, 2]
    again = pickle.loads(pickle.dumps(np.array([c.put(1)], dtype=object)))
    assert type(again[0]) is hoplite_mp.ObjectRef


def test_refs_are_held_by_pandas(c: Cluster) -> None:
    pd = pytest.importorskip("pandas")
    for a, b in ((c.put(1), c.put(2)), (c.submit(abs, 1), c.submit(abs, 2))):
        series = pd.Series([a, b])
        assert (series == a).tolist() == [True, False]
        assert series.isna().tolist() == [False, False]
        assert series.map(c.get).tolist() == [1, 2]
        frame = pd.DataFrame({"ref": [a, b], "x": [1, 2]})
        assert type(a).__name__ in repr(frame)
        frame.loc[0, "ref"] = b
        assert frame.assign(other=a).ref.tolist() == [b, b]
        assert pd.concat([series, series]).tolist() == [a, b, a, b]


@pytest.mark.parametrize("kind", ["ref", "future"])
def test_error_of_a_function_that_names_no_dtype_says_how_to_fill_an_array(
    c: Cluster, kind: str
) -> None:
    ref = c.put(1) if kind == "ref" else c.submit(int)
    objects = np.empty(2, object)
    uses: list[Callable[[], Any]] = [
        lambda: np.full(2, ref, dtype=object),
        lambda: np.append(objects, ref),
        lambda: np.where([True, False], objects, ref),
    ]
    for use in uses:
        with pytest.raises(TypeError, match=r"a = np\.empty\(n, object\); a\[:\] = ref"):
            use()
    objects[:] = ref
    assert objects[0] is ref
    assert objects[1] is ref
