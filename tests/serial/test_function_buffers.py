"""Functions that carry buffers of every kind, in every place where a function can carry something.

A buffer is large enough to be written as it is, without a copy into the stream; those are the ones
that a pickler hands over as objects.
"""

from __future__ import annotations

import array
import functools
import operator
import types
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from hoplite_mp import _serialize
from hoplite_mp._serialize.captured_globals import fingerprint
from tests.support.payloads import Tagged, function_trip

if TYPE_CHECKING:
    from collections.abc import Callable

ROWS, COLUMNS = 96, 128  # 96 KiB of float64: above what picklers copy into the stream
GRID = np.arange(ROWS * COLUMNS, dtype=float).reshape(ROWS, COLUMNS)


def read_only(value: Any) -> Any:
    value.flags.writeable = False
    return value


def record() -> Any:
    made = np.zeros((ROWS, COLUMNS), [("a", "i4"), ("b", "f8")], order="F")
    made["b"] = GRID
    return made


BUFFERS: dict[str, Callable[[], Any]] = {
    "C": GRID.copy,
    "Fortran": lambda: np.asfortranarray(GRID),
    "Fortran, three axes": lambda: np.asfortranarray(GRID.reshape(4, -1, 8)),
    "transposed": lambda: GRID.T,
    "strided": lambda: np.repeat(GRID, 2, axis=1)[:, ::2],
    "reversed": lambda: GRID[::-1],
    "broadcast": lambda: np.broadcast_to(GRID[0], (ROWS, COLUMNS)),
    "read-only": lambda: read_only(np.asfortranarray(GRID)),
    "zero-size": lambda: np.empty((0, 100_000), order="F"),
    "no axes": lambda: np.array(3.5),
    "dates": lambda: np.asfortranarray(GRID.astype("M8[s]")),
    "records": record,
    "bfloat16": lambda: np.asfortranarray(GRID.repeat(2, 0).astype(ml_dtypes.bfloat16)),
    "texts": lambda: np.asfortranarray(GRID.astype("U8")),
    "subclass": lambda: np.asfortranarray(GRID).view(Tagged),
    "masked": lambda: np.ma.masked_greater(np.asfortranarray(GRID), 5000.0),
    "matrix": lambda: np.asfortranarray(GRID).view(np.matrix),
    "objects": lambda: np.array([np.asfortranarray(GRID), None], object),
    "bytes": lambda: GRID.tobytes(),
    "bytearray": lambda: bytearray(GRID.tobytes()),
    "memoryview": lambda: memoryview(GRID),
    "Fortran view": lambda: memoryview(np.asfortranarray(GRID)),
    "strided view": lambda: memoryview(GRID)[::2],
    "array.array": lambda: array.array("d", GRID.ravel()),
    "frame": lambda: pd.DataFrame(GRID),
    "frame of Fortran": lambda: pd.DataFrame(np.asfortranarray(GRID)),
    "mixed frame": lambda: pd.DataFrame({"a": GRID.ravel(), "b": np.arange(GRID.size)}),
    "series": lambda: pd.Series(GRID.ravel()[::2]),
    "categories": lambda: pd.Series(["x", "y"] * 40_000).astype("category"),
    "arrow": lambda: pa.array(GRID.ravel()),
    "arrow table": lambda: pa.table({"a": GRID.ravel(), "b": ["text"] * GRID.size}),
    "several": lambda: [np.asfortranarray(GRID), GRID, {"k": np.asfortranarray(GRID + 1)}],
}


class Holder:
    def __init__(self, value: Any) -> None:
        self.value = value

    def method(self) -> Any:
        return self.value

    def __call__(self) -> Any:
        return self.value


def by_partial(value: Any) -> Callable[[], Any]:
    return functools.partial(identity, value)


def by_keyword(value: Any) -> Callable[[], Any]:
    return functools.partial(identity, value=value)


def by_closure(value: Any) -> Callable[[], Any]:
    return lambda: value


def by_default(value: Any) -> Callable[[], Any]:
    return lambda given=value: given


def by_keyword_default(value: Any) -> Callable[[], Any]:
    return lambda *, given=value: given


def by_bound_method(value: Any) -> Callable[[], Any]:
    return Holder(value).method


def by_callable(value: Any) -> Callable[[], Any]:
    return Holder(value)


def by_attribute(value: Any) -> Callable[[], Any]:
    def function() -> Any:
        return function.kept  # type: ignore[attr-defined]

    function.kept = value  # type: ignore[attr-defined]
    return function


def by_global(value: Any) -> Callable[[], Any]:
    scope = types.ModuleType("made_here").__dict__
    scope["kept"] = value
    exec("def function(): return kept", scope)
    made: Callable[[], Any] = scope["function"]
    return made


def by_class(value: Any) -> Callable[[], Any]:
    class Local:
        kept = value

        def __call__(self) -> Any:
            return self.kept

    return Local()


def by_function_inside(value: Any) -> Callable[[], Any]:
    def inner() -> Any:
        return value

    return lambda: inner()


def identity(value: Any) -> Any:
    return value


PLACES = [
    by_partial,
    by_keyword,
    by_closure,
    by_default,
    by_keyword_default,
    by_bound_method,
    by_callable,
    by_attribute,
    by_global,
    by_class,
    by_function_inside,
]


def same(one: Any, other: Any) -> bool:
    if isinstance(one, np.ndarray):
        if one.dtype.hasobject:
            return all(map(same, one, other))
        orders = (one.flags.f_contiguous, other.flags.f_contiguous)
        fits = type(one) is type(other) and one.dtype == other.dtype and one.shape == other.shape
        kept = orders[0] == orders[1] or not (one.flags.c_contiguous or one.flags.f_contiguous)
        return fits and kept and np.asarray(one).tobytes() == np.asarray(other).tobytes()
    if isinstance(one, memoryview):
        return one.tolist() == other.tolist()
    if isinstance(one, (pd.DataFrame, pd.Series, pa.Array, pa.Table)):
        return bool(one.equals(other))
    if isinstance(one, (list, dict)):
        keys = range(len(one)) if isinstance(one, list) else one
        return all(same(one[key], other[key]) for key in keys)
    return type(one) is type(other) and bool(one == other)


@pytest.mark.parametrize("place", PLACES, ids=operator.attrgetter("__name__"))
@pytest.mark.parametrize("kind", BUFFERS)
def test_arrives_as_it_was(place: Callable[[Any], Any], kind: str) -> None:
    value = BUFFERS[kind]()
    assert same(value, function_trip(place(value))())


@pytest.mark.parametrize("place", PLACES, ids=operator.attrgetter("__name__"))
def test_functions_that_differ_in_the_order_differ(place: Callable[[Any], Any]) -> None:
    square = GRID[:ROWS, :ROWS]
    one = place(np.ascontiguousarray(square))
    other = place(np.ascontiguousarray(square.T).T)
    assert _serialize.digest(_serialize.encode_function(one)) != _serialize.digest(
        _serialize.encode_function(other)
    )


def test_fingerprints_tell_orders_and_shapes_apart() -> None:
    data = GRID.ravel()
    kinds = [
        data,
        data.reshape(ROWS, COLUMNS),
        data.reshape(COLUMNS, ROWS),
        data.reshape(ROWS, COLUMNS, order="F"),
        data.reshape(COLUMNS, ROWS, order="F"),
        data.view("i8"),
        bytes(data),
        bytearray(data),
    ]
    marks = [fingerprint(kind)[0] for kind in kinds]
    assert len(set(marks)) == len(kinds)
    assert marks == [fingerprint(kind)[0] for kind in kinds]


@st.composite
def arrays(draw: Any) -> Any:
    shape = draw(hnp.array_shapes(max_dims=4, max_side=6))
    large = draw(st.booleans())
    made = np.arange(np.prod(shape), dtype=draw(st.sampled_from(["u1", "f4", "f8", "c16"])))
    made = np.tile(
        made.reshape(shape), (1 + 70_000 // made.nbytes if large else 1,) + (1,) * len(shape)
    )
    made = made.transpose(draw(st.permutations(range(made.ndim))))
    steps = draw(st.lists(st.sampled_from([1, 1, 2, -1]), min_size=made.ndim, max_size=made.ndim))
    made = made[tuple(slice(None, None, step) for step in steps)]
    if draw(st.booleans()):
        made = np.asfortranarray(made)
    made.flags.writeable = draw(st.booleans())
    return made


@given(arrays(), st.sampled_from(PLACES))
def test_arrays_of_any_layout(value: Any, place: Callable[[Any], Any]) -> None:
    assert same(value, function_trip(place(value))())
