"""put here, get there: values of every kind come out equal, of the same type, and read-only."""

from __future__ import annotations

import dataclasses
import datetime
import decimal
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

import hoplite_mp
from hoplite_mp import Config, _shm
from tests.support.functions import checksum, echo
from tests.support.values import address, mib

if TYPE_CHECKING:
    from hoplite_mp import Cluster

SMALL = Config().small_object_bytes_max
SPAN = Config().span_bytes
DTYPES = [
    *"?bhilqBHILQefdgFDG",
    ">i4", "<f8", ">c16", "S7", "U5", "V6", "M8[ns]", "M8[D]", "m8[us]", "M8",
    ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn,
    np.dtype([("a", "<i2"), ("b", "f8", (2, 3)), ("c", "U3")]),
    np.dtype([("a", "i1"), ("b", "f8")], align=True),
    np.dtype({"names": ["x", "y"], "formats": ["i4", "u1"], "offsets": [8, 2], "itemsize": 24}),
]  # fmt: skip


class Tagged(np.ndarray):  # type: ignore[type-arg]
    """A subclass with an attribute that travels by pickle."""

    def __reduce__(self) -> Any:
        name, args, state = super().__reduce__()  # type: ignore[misc]
        return name, args, (state, self.tag)

    def __setstate__(self, state: Any) -> None:
        super().__setstate__(state[0])
        self.tag = state[1]


@dataclasses.dataclass
class Point:
    x: int
    inside: Any


def describe(value: Any) -> tuple[Any, ...]:
    """What a worker sees of an array; computed there."""
    flags = value.flags
    writes = "no"
    try:
        value[...] = value
        writes = "yes"
    except ValueError:
        pass
    return (
        type(value), value.shape, value.dtype, flags.c_contiguous, flags.f_contiguous, writes,
        np.ascontiguousarray(value).tobytes(),
    )  # fmt: skip


def expected(value: Any) -> tuple[Any, ...]:
    """A strided array arrives contiguous, in C order; bytes and all else are the same."""
    c, f = value.flags.c_contiguous, value.flags.f_contiguous
    if not (c or f):
        c = True
    return (
        type(value),
        value.shape,
        value.dtype,
        c,
        f,
        "no",
        np.ascontiguousarray(value).tobytes(),
    )


def round_trips(cluster: Cluster, value: Any) -> None:
    ref = cluster.put(value)
    wanted = expected(value)
    assert cluster.submit(describe, ref).result() == wanted
    assert describe(cluster.get(ref)) == wanted
    there = cluster.submit(echo, ref)  # there and back
    assert describe(there.result()) == wanted
    copy = cluster.get(ref, copy=True)
    assert copy.flags.writeable
    assert copy.tobytes() == value.tobytes()
    if copy.size:
        copy[...] = np.zeros(1, copy.dtype)[0]
        assert describe(cluster.get(ref)) == wanted


def filled(dtype: Any, shape: Any) -> np.ndarray[Any, Any]:
    kind = np.dtype(dtype)
    count = int(np.prod(shape, dtype=np.int64))
    if kind.kind == "U" or (kind.names and "c" in kind.names):
        return np.resize(np.array(["ß", "a\U0001f40d", ""], "U5"), count).astype(
            "U5"
        ).reshape(shape) if kind.kind == "U" else np.zeros(shape, kind)  # fmt: skip
    data = np.random.default_rng(0).integers(0, 2, count * kind.itemsize, np.uint8).tobytes()
    return np.frombuffer(data, kind, count).reshape(shape).copy()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_small_and_large(cluster: Cluster, dtype: Any) -> None:
    round_trips(cluster, filled(dtype, (3, 4)))
    round_trips(cluster, filled(dtype, (70_001,)))


@pytest.mark.parametrize("shape", [(), (0,), (0, 5), (5, 0, 2), (1,), (1, 1, 1), (2, 1, 3, 1, 2)])
@pytest.mark.parametrize("dtype", ["f8", "U5"])
def test_every_shape(cluster: Cluster, shape: Any, dtype: str) -> None:
    round_trips(cluster, filled(dtype, shape))


@pytest.mark.parametrize("side", [4, 200])
def test_every_memory_order(cluster: Cluster, side: int) -> None:
    base = np.arange(side * side * 3, dtype=np.float64).reshape(side, side, 3)
    for array in (
        base, np.asfortranarray(base), base.transpose(1, 0, 2), base[::2], base[:, ::-1],
        base[..., 1], base.T, np.broadcast_to(np.arange(3.0), (side, 3)), base[1:-1],
    ):  # fmt: skip
        round_trips(cluster, array)


@pytest.mark.parametrize("edge", [_shm.INLINE_BYTES_MAX, SMALL, SPAN])
def test_sizes_around_every_boundary(cluster: Cluster, edge: int) -> None:
    """The head of a payload is below 192 bytes, so every place of the edge within it is met."""
    step = 1 if edge < 1000 else 61
    low = max(0, edge - 200)
    refs = [cluster.put(np.full(n, n % 251, np.uint8)) for n in range(low, edge + 3, step)]
    refs += [
        cluster.put(np.full(n, n % 251, np.uint8).tobytes()) for n in range(edge - 70, edge + 2)
    ]
    sizes = [*range(low, edge + 3, step), *range(edge - 70, edge + 2)]

    def looks(values: list[Any]) -> list[tuple[int, set[int]]]:
        return [(len(value), set(bytes(value))) for value in values]

    wanted = [(n, {n % 251} if n else set()) for n in sizes]
    assert cluster.submit(looks, refs).result() == wanted
    assert looks(cluster.get(refs)) == wanted


def test_object_dtype_and_what_lies_in_it(cluster: Cluster) -> None:
    array = np.array([{"a": 1}, None, "ü", [1, 2], np.arange(3)], object)
    for got in (cluster.get(cluster.put(array)), cluster.submit(echo, array).result()):
        assert got.dtype == object
        assert got[:4].tolist() == array[:4].tolist()
        assert got[4].tolist() == [0, 1, 2]
        assert not got.flags.writeable
    assert cluster.get(cluster.put(array), copy=True).flags.writeable


@pytest.mark.parametrize("size", [3, 50_000])
def test_subclasses(cluster: Cluster, size: int) -> None:
    tagged = np.arange(size).view(Tagged)
    tagged.tag = "mine"
    masked = np.ma.masked_array(np.arange(float(size)), mask=np.arange(size) % 2)
    record = np.rec.fromarrays([np.arange(size), np.ones(size)], names="a,b")
    for array in (tagged, masked, record):
        got = cluster.submit(echo, cluster.put(array)).result()
        assert type(got) is type(array)
        assert np.asarray(got).tobytes() == np.asarray(array).tobytes()
        assert not got.flags.writeable
    assert cluster.get(cluster.put(tagged)).tag == "mine"
    assert cluster.get(cluster.put(masked)).mask.tolist() == masked.mask.tolist()


@pytest.mark.parametrize("size", [0, 10, 150, 5000, 300_000])
def test_bytes_and_text(cluster: Cluster, size: int) -> None:
    data = bytes(range(256)) * (size // 256 + 1)
    data = data[:size]
    text = ("a\u00e9\u4e2d\U0001f40d\ud800" * size)[:size]
    for value in (data, bytearray(data), text):
        got = cluster.submit(echo, cluster.put(value)).result()
        assert type(got) is type(value)
        assert got == value
    view = cluster.submit(bytes, cluster.put(memoryview(data))).result()
    assert view == data
    assert bytes(cluster.get(cluster.put(memoryview(data)[::2]))) == data[::2]


@pytest.mark.parametrize(
    "value",
    [
        None, True, 0, -1, 2**63, 10**400, 1.5, float("inf"), 1j, "", "ß", (), [], {}, set(),
        ..., (1, [2, {3: {4}}]), frozenset({1}), range(5), slice(1, 2), int, echo, NotImplemented,
        decimal.Decimal("1.10"), datetime.datetime(2020, 1, 1, tzinfo=datetime.UTC),
        np.float32(1.5), np.int64(-3), np.str_("x"), np.datetime64("2020-01-01"), np.bool_(True),
        Point(1, Point(2, "x")), {"a": [1, 2.5, None]},
    ],
    ids=lambda value: repr(value).partition(" at 0x")[0],
)  # fmt: skip
def test_plain_objects(cluster: Cluster, value: Any) -> None:
    for got in (
        cluster.get(cluster.put(value)),
        cluster.submit(echo, value).result(),
        cluster.submit(echo, cluster.put(value)).result(),
    ):
        assert type(got) is type(value)
        assert got == value


def test_a_class_of_this_test_travels_by_value(cluster: Cluster) -> None:
    class Local:
        def __init__(self, data: Any) -> None:
            self.data = data

        def total(self) -> int:
            return int(self.data.sum())

    made = Local(np.arange(100_000))
    assert cluster.submit(lambda x: x.total(), cluster.put(made)).result() == made.total()
    assert cluster.get(cluster.put(made)).total() == made.total()


def test_arrays_inside_objects_are_read_only_and_not_copied(cluster: Cluster) -> None:
    value = {"big": mib(1), "small": np.arange(5), "list": [mib(0.5, 1), Point(1, mib(0.2, 2))]}
    ref = cluster.put(value)
    first, second = cluster.get(ref), cluster.get(ref)
    arrays = [
        (x["big"], x["small"], x["list"][0], x["list"][1].inside) for x in (first, second, value)
    ]
    for one, two, original in zip(*arrays, strict=True):
        assert not one.flags.writeable
        assert (one == original).all()
        if one.nbytes > 1000:  # tiny ones are cheaper to copy
            assert address(one) == address(two)
            assert address(one) != address(original)
    assert all(
        array.flags.writeable
        for array in (cluster.get(ref, copy=True)["big"], cluster.get(ref, copy=True)["small"])
    )


def test_pandas(cluster: Cluster) -> None:
    frame = pd.DataFrame(
        {
            "n": np.arange(20_000),
            "x": np.linspace(0, 1, 20_000),
            "s": ["ä", "b"] * 10_000,
            "t": pd.date_range("2020", periods=20_000, freq="h", tz="UTC"),
            "c": pd.Categorical(["u", "v"] * 10_000),
        },
        index=pd.RangeIndex(5, 20_005),
    )
    ref = cluster.put(frame)
    pd.testing.assert_frame_equal(cluster.submit(echo, ref).result(), frame)
    got = cluster.get(ref)
    pd.testing.assert_frame_equal(got, frame)
    assert not got["x"].to_numpy().flags.writeable
    series = pd.Series([1, None, 3], dtype="Int64", name="q")
    pd.testing.assert_series_equal(cluster.get(cluster.put(series)), series)


def test_arrow(cluster: Cluster) -> None:
    table = pa.table({"n": np.arange(50_000), "s": ["é", None] * 25_000})
    ref = cluster.put(table)
    assert cluster.submit(echo, ref).result().equals(table)
    one, two = cluster.get(ref), cluster.get(ref)
    buffers = [t.column("n").chunk(0).buffers()[1] for t in (one, two)]
    assert buffers[0].address == buffers[1].address
    assert not buffers[0].is_mutable


def test_two_gets_share_the_same_memory(cluster: Cluster) -> None:
    ref = cluster.put(mib(2))
    one, two = cluster.get(ref), cluster.get(ref)
    assert address(one) == address(two)
    assert not one.flags.writeable
    with pytest.raises(ValueError, match=r"read-only|WRITEABLE"):
        one.flags.writeable = True
    three = cluster.get(ref, copy=True)
    assert address(three) != address(one)


def test_a_result_is_read_only_unless_asked_otherwise(cluster: Cluster) -> None:
    for size in (4, 100_000):
        array = np.arange(size)
        future = cluster.submit(echo, array)
        assert not future.result().flags.writeable
        assert not cluster.get(future).flags.writeable
        assert not cluster.get(future.ref).flags.writeable
        assert cluster.get(future, copy=True).flags.writeable
        assert cluster.options(copy=True).submit(echo, array).result().flags.writeable


def add_one_in_place(array: Any) -> int:
    array += 1
    return checksum(array)


def test_an_array_by_value_is_the_tasks_own(cluster: Cluster) -> None:
    for size in (4, 100_000):
        array = np.zeros(size, np.int64)
        assert cluster.submit(add_one_in_place, array).result() == size
        assert not array.any()
        with pytest.raises(ValueError, match="read-only"):
            cluster.submit(add_one_in_place, cluster.put(array)).result()


def test_what_cannot_be_pickled_is_refused_and_leaves_nothing(cluster: Cluster) -> None:
    before = cluster.stats()["objects"]
    with pytest.raises(TypeError):
        cluster.put([mib(1), (x for x in "generator")])
    assert cluster.stats()["objects"] <= before  # what earlier tests have left may go meanwhile


def test_a_changed_original_changes_nothing(cluster: Cluster) -> None:
    array, listed = mib(1), [1, 2]
    refs = [cluster.put(array), cluster.put(listed)]
    total = checksum(array)
    array[:] = 0
    listed.append(3)
    assert checksum(cluster.get(refs[0])) == total
    assert cluster.get(refs[1]) == [1, 2]


@pytest.mark.parametrize("copies", [2, 0, -1, 1.5, True, None])
def test_only_one_copy_can_be_asked_for_on_one_host(cluster: Cluster, copies: Any) -> None:
    with pytest.raises(ValueError, match="copies"):
        cluster.put(1, copies=copies)
    assert cluster.get(cluster.put(1, copies=np.int64(1))) == 1  # type: ignore[arg-type]


def test_a_ref_that_is_none(cluster: Cluster) -> None:
    with pytest.raises(hoplite_mp.ObjectLostError):
        cluster.get(hoplite_mp.ObjectRef(bytes(16)))
