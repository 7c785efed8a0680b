"""Payloads: every kind of value goes in and comes out the same, read-only or the reader's own."""

from __future__ import annotations

import copy
import dataclasses
import gc
import pickle
import struct
import threading
import warnings
from collections import OrderedDict, namedtuple
from typing import Any

import hypothesis.extra.numpy as hnp
import ml_dtypes
import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hoplite_mp import serial
from hoplite_mp.ref import ByRef, ObjectRef, by_ref, runtime_hooks
from hoplite_mp.serial import ARRAY, BYTES, NUMBER, PICKLE


def a_ref(n: int = 1) -> ObjectRef[Any]:
    return ObjectRef(n.to_bytes(16, "little"))


def round_trip(value: Any, **options: Any) -> Any:
    return load(serial.encode(value), **options)


def load(encoded: serial.Encoded, **options: Any) -> Any:
    payload = encoded.tobytes()
    check_layout(encoded, payload)
    return serial.decode(memoryview(payload), make_ref=ObjectRef, **options)


def check_layout(encoded: serial.Encoded, payload: bytes) -> None:
    assert len(payload) == encoded.nbytes
    kind, _, _, n_refs, n_buffers, meta_len = struct.unpack_from("<BBHIII", payload)
    assert kind == encoded.kind == serial.payload_kind(memoryview(payload))
    assert serial.read_refs(memoryview(payload)) == [ref._id for ref in encoded.refs]
    table = 16 + 16 * n_refs
    assert table + 16 * n_buffers + meta_len == len(encoded.head)
    listed = list(struct.iter_unpack("<QQ", payload[table : table + 16 * n_buffers]))
    assert listed == [
        (offset, buffer.nbytes)
        for offset, buffer in zip(encoded.offsets, encoded.buffers, strict=True)
    ]
    assert all(offset % 64 == 0 and offset >= len(encoded.head) for offset, _ in listed)
    assert all(b.ndim == 1 and b.itemsize == 1 and b.c_contiguous for b in encoded.buffers)


def assert_same(ours: Any, theirs: Any) -> None:
    assert type(ours) is type(theirs)
    assert ours.dtype == theirs.dtype
    assert ours.shape == theirs.shape
    assert ours.tobytes() == theirs.tobytes()


ML_DTYPES = [np.dtype(getattr(ml_dtypes, name)) for name in ("bfloat16", "float8_e4m3fn", "int4")]
DTYPES = st.one_of(
    hnp.boolean_dtypes(),
    hnp.integer_dtypes(endianness="?"),
    hnp.unsigned_integer_dtypes(endianness="?"),
    hnp.floating_dtypes(endianness="?"),
    hnp.complex_number_dtypes(endianness="?"),
    hnp.datetime64_dtypes(),
    hnp.timedelta64_dtypes(),
    hnp.byte_string_dtypes(min_len=1),
    hnp.unicode_string_dtypes(min_len=1),
    st.sampled_from([np.dtype(np.longdouble), np.dtype(np.clongdouble), *ML_DTYPES]),
)
SHAPES = hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=5)


def array_of(dtype: np.dtype[Any], shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
    """Bytes that differ from place to place; no value of its own matters here."""
    count = int(np.prod(shape, dtype=int))
    if dtype.kind in "OT":
        return np.array([str(i) for i in range(count)], dtype).reshape(shape)
    return (np.arange(count) % 7).astype(np.uint8).astype(dtype).reshape(shape)


def rearranged(array: np.ndarray[Any, Any], how: str) -> np.ndarray[Any, Any]:
    if how == "F":
        return np.asfortranarray(array) if array.ndim else array
    if how == "strided":
        return array[(..., *(slice(None, None, 2) for _ in array.shape))]
    if how == "reversed":
        return array[(..., *(slice(None, None, -1) for _ in array.shape))]
    if how == "axes":
        return np.swapaxes(array, 0, -1) if array.ndim > 2 else array
    return array


class Tagged(np.ndarray):
    """A subclass that numpy pickles as an array, and whose attribute finalize sets."""

    def __array_finalize__(self, obj: Any) -> None:
        self.tag = getattr(obj, "tag", "none")


class Keeper(np.ndarray):
    """A subclass that pickles its attribute as well."""

    unit = ""

    def __reduce__(self) -> Any:
        function, args, state = super().__reduce__()
        return function, args, (state, self.unit)

    def __setstate__(self, state: Any) -> None:
        super().__setstate__(state[0])
        self.unit = state[1]


@dataclasses.dataclass
class Boxed:
    array: Any
    more: Any = None


class FakeFuture:
    def __init__(self, ref: ObjectRef[Any]) -> None:
        self.ref = ref
        self.lock = threading.Lock()


serial.register_future_type(FakeFuture)


class TestArrays:
    @given(DTYPES, SHAPES, st.sampled_from(["C", "F", "strided", "reversed", "axes"]))
    def test_every_dtype_shape_and_memory_order(self, dtype, shape, how):
        array = rearranged(array_of(dtype, shape), how)
        encoded = serial.encode(array)
        assert encoded.kind == ARRAY
        out = load(encoded)
        assert_same(out, array)
        assert not out.flags.writeable
        if array.flags.c_contiguous or array.flags.f_contiguous:
            assert out.flags.c_contiguous == array.flags.c_contiguous
            assert out.flags.f_contiguous == array.flags.f_contiguous
        own = load(encoded, writable=True)
        assert_same(own, array)
        assert own.flags.writeable
        assert own.flags.f_contiguous == out.flags.f_contiguous

    @given(DTYPES, SHAPES, st.sampled_from(["C", "F", "strided", "axes"]))
    def test_inside_a_container_too(self, dtype, shape, how):
        array = rearranged(array_of(dtype, shape), how)
        assert_same(round_trip([array, 1])[0], array)
        assert not round_trip((array,))[0].flags.writeable
        assert round_trip({"a": array}, writable=True)["a"].flags.writeable

    @given(hnp.array_dtypes(), st.integers(0, 300))
    def test_structured(self, dtype, size):
        array = np.zeros(size, dtype)
        encoded = serial.encode(array)
        assert encoded.kind == PICKLE
        assert_same(load(encoded), array)
        assert not load(encoded).flags.writeable
        assert load(encoded, writable=True).flags.writeable

    @pytest.mark.parametrize("shape", [(), (0,), (3,), (200, 2)])
    @pytest.mark.parametrize("dtype", [np.dtype(object), np.dtypes.StringDType()])
    def test_dtypes_that_refer_to_objects(self, dtype, shape):
        array = array_of(dtype, shape)
        out = round_trip(array)
        assert out.dtype == array.dtype
        assert out.tolist() == array.tolist()
        assert not out.flags.writeable
        assert round_trip(array, writable=True).flags.writeable

    def test_object_array_that_contains_itself(self):
        array = np.empty(2, object)
        array[0] = array
        assert (out := round_trip(array))[0] is out

    @pytest.mark.parametrize("size", [2, 5000])
    def test_subclasses(self, size):
        data = np.arange(size, dtype=float)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", PendingDeprecationWarning)
            matrix = np.matrix(data)
        tagged = data.view(Tagged)
        keeper = data.view(Keeper)
        keeper.unit = "m"
        record = np.rec.fromarrays([data, data.astype("U8")], names="x,label")
        for value in (matrix, tagged, keeper, record):
            out = round_trip(value)
            assert_same(out, value)
            assert not out.flags.writeable
            assert round_trip(value, writable=True).flags.writeable
        assert round_trip(tagged).tag == "none"
        assert round_trip(keeper).unit == "m"
        assert round_trip(record).label[1] == "1.0"

    def test_large_subclass_arrays_are_not_copied_into_the_stream(self):
        encoded = serial.encode(np.zeros(100_000).view(Tagged))
        assert len(encoded.head) < 1000
        assert [b.nbytes for b in encoded.buffers] == [800_000]

    def test_masked_array_with_its_mask(self):
        value = np.ma.array([1.0, 2.0, 3.0], mask=[0, 1, 0], fill_value=-1)
        out = round_trip(value)
        assert isinstance(out, np.ma.MaskedArray)
        assert out.tolist() == [1.0, None, 3.0]
        assert out.fill_value == -1
        with pytest.raises(ValueError, match="read-only"):
            out[0] = 5
        with pytest.raises(ValueError, match="read-only"):
            out[0] = np.ma.masked
        own = round_trip(value, writable=True)
        own[0] = np.ma.masked
        assert own.tolist() == [None, None, 3.0]
        assert round_trip([np.ma.masked])[0] is np.ma.masked

    def test_metadata_of_a_dtype_is_kept(self):
        array = np.zeros(300, np.dtype("f8", metadata={"unit": "m"}))
        assert round_trip(array).dtype.metadata == {"unit": "m"}

    def test_zero_width_strings_of_a_record(self):
        array = np.zeros(3, [("empty", "S0"), ("x", "i4")])["empty"]
        assert round_trip(array).shape == (3,)
        assert not round_trip(array).flags.writeable

    def test_read_only_stays_so(self):
        for out in (round_trip(np.zeros(1000)), round_trip([np.zeros(1000)])[0]):
            with pytest.raises(ValueError, match="WRITEABLE"):
                out.flags.writeable = True

    def test_no_copy_out_and_the_exporter_is_pinned(self):
        for value, pick in (
            (np.arange(1000), lambda out: out),
            ([np.arange(1000)], lambda out: out[0]),
            (Boxed(np.arange(1000)), lambda out: out.array),
            (np.arange(1000).view(Tagged), lambda out: out),
            (memoryview(bytes(5000)), lambda out: out),
        ):
            store = bytearray(serial.encode(value).tobytes())
            mem = memoryview(store).toreadonly()
            out = pick(serial.decode(mem, make_ref=ObjectRef))
            mem.release()
            with pytest.raises(BufferError):
                store.append(0)
            if isinstance(out, np.ndarray):
                assert np.shares_memory(out, np.frombuffer(store, np.uint8))
                assert out[7] == 7
            del out
            gc.collect()
            store.append(0)

    def test_a_writable_memory_is_read_only_all_the_same(self):
        for value in (np.zeros(500), [np.zeros(500)], Boxed(np.zeros(500))):
            store = bytearray(serial.encode(value).tobytes())
            out = serial.decode(memoryview(store), make_ref=ObjectRef)
            out = out.array if isinstance(out, Boxed) else out[0] if isinstance(out, list) else out
            assert not out.flags.writeable

    def test_buffers_are_the_arrays_own_memory(self):
        array = np.zeros(100_000)
        for value in (array, array.reshape(100, -1).T, (array,), Boxed(array)):
            (buffer,) = serial.encode(value).buffers
            assert np.shares_memory(array, np.frombuffer(buffer, np.uint8))


class TestHeads:
    def test_a_head_for_bytes_filled_in_later(self):
        head, offset, nbytes = serial.encode_array_head("f4", (2, 3), "F", (0, 2, 5))
        payload = bytearray(nbytes)
        payload[: len(head)] = head
        payload[offset:] = np.arange(6, dtype="f4").tobytes()
        mem = memoryview(payload)
        out = serial.decode(mem, make_ref=ObjectRef)
        assert out.tolist() == [[0, 2, 4], [1, 3, 5]]
        assert serial.read_contributors(mem) == (0, 2, 5)
        assert serial.describe_array(mem) == ("<f4", (2, 3), "F", offset, 24)

    def test_it_is_the_head_that_encode_makes(self):
        for array in (np.zeros((3, 4)), np.zeros((3, 4), order="F"), np.array(5, "i2")):
            encoded = serial.encode(array)
            order = "C" if array.flags.c_contiguous else "F"
            head, offset, nbytes = serial.encode_array_head(array.dtype, array.shape, order)
            assert (head, [offset], nbytes) == (encoded.head, encoded.offsets, encoded.nbytes)

    def test_the_place_of_the_buffer_is_honoured_or_refused(self):
        assert serial.encode_array_head(float, (5,), buffer_offset=4096)[1:] == (4096, 4136)
        with pytest.raises(ValueError, match="head takes"):
            serial.encode_array_head(float, (5,), "C", range(1100), buffer_offset=4096)
        with pytest.raises(ValueError, match="aligned to 64"):
            serial.encode_array_head(float, (5,), buffer_offset=4100)

    def test_contributors_may_be_none_or_nobody(self):
        for who in (None, ()):
            head, _, _ = serial.encode_array_head(float, (5,), contributors=who)
            assert serial.read_contributors(memoryview(head)) == who
        assert serial.read_contributors(memoryview(serial.encode("text").tobytes())) is None

    def test_what_has_no_description_is_refused(self):
        with pytest.raises(TypeError, match="without pickle"):
            serial.encode_array_head(object, (5,))
        with pytest.raises(ValueError, match="order is"):
            serial.encode_array_head(float, (5,), "K")

    @pytest.mark.parametrize("dtype", [np.dtype("f8"), np.dtype(">i2"), *ML_DTYPES])
    def test_describe_without_unpickling(self, dtype):
        array = array_of(dtype, (3, 5))
        encoded = serial.encode(array)
        info = serial.describe_array(memoryview(encoded.tobytes()))
        assert info is not None
        assert info == (info.dtype_name, (3, 5), "C", encoded.offsets[0], array.nbytes)

    @pytest.mark.parametrize("value", [3, 2.5, 1j, True, np.float32(1.5), np.int8(-1)])
    def test_numbers_are_described_as_arrays_without_dimensions(self, value):
        payload = serial.encode(value).tobytes()
        info = serial.describe_array(memoryview(payload))
        assert info is not None
        assert info.shape == ()
        assert info.offset % 16 == 0
        assert np.frombuffer(payload, info.dtype_name, 1, info.offset)[0] == value

    @pytest.mark.parametrize("value", [None, "text", b"bytes", [np.zeros(3)], 2**80])
    def test_others_are_not_described(self, value):
        assert serial.describe_array(memoryview(serial.encode(value).tobytes())) is None


Point = namedtuple("Point", "x y")
PLAIN_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
    | st.binary() | st.complex_numbers(allow_nan=False),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner) | st.tuples(inner, inner),
    max_leaves=20,
)  # fmt: skip


class TestPlainValues:
    @given(PLAIN_VALUES)
    def test_come_back_the_same(self, value):
        out = round_trip(value)
        assert out == value
        assert type(out) is type(value)
        assert round_trip(value, writable=True) == value

    @pytest.mark.parametrize("value", [0, -(2**63), 2**63 - 1, 1.5, -0.0, 2j, True, False, None])
    def test_numbers_need_no_pickle(self, value):
        encoded = serial.encode(value)
        assert encoded.kind == NUMBER
        assert repr(load(encoded)) == repr(value)

    @pytest.mark.parametrize("value", [2**63, -(2**63) - 1])
    def test_larger_ints_do(self, value):
        assert serial.encode(value).kind == PICKLE
        assert round_trip(value) == value

    @given(
        st.one_of(hnp.integer_dtypes(), hnp.floating_dtypes(), hnp.datetime64_dtypes()).flatmap(
            lambda dtype: hnp.arrays(dtype, 1)
        )
    )
    def test_numpy_scalars(self, array):
        out = round_trip(array[0])
        assert type(out) is type(array[0])
        assert out.dtype == array[0].dtype
        assert out.tobytes() == array[0].tobytes()

    def test_other_scalars(self):
        for value in (np.bool_(True), ml_dtypes.bfloat16(1.5), np.longdouble(2), np.str_("ab")):
            out = round_trip(value)
            assert type(out) is type(value)
            assert out == value
        record = np.zeros(1, [("x", "i4")])[0]
        assert round_trip(record) == record

    def test_subclasses_of_builtins_keep_their_type(self):
        value = OrderedDict(a=Point(1, 2))
        assert round_trip(value) == value
        assert type(round_trip(value)) is OrderedDict
        assert type(round_trip(Point(1, 2))) is Point

    def test_bytes_are_their_own_buffer(self):
        data = bytes(100_000)
        encoded = serial.encode(data)
        assert encoded.kind == BYTES
        assert encoded.buffers[0].obj is data
        assert type(load(encoded)) is bytes
        assert load(encoded, writable=True) == data

    def test_bytearray_comes_out_fresh(self):
        for value in (bytearray(b"abc"), bytearray()):
            out = round_trip(value)
            assert type(out) is bytearray
            assert out == value
            out.append(1)
        assert round_trip([bytearray(b"abc")]) == [bytearray(b"abc")]

    @pytest.mark.parametrize(
        "view",
        [
            memoryview(b"abcd"),
            memoryview(bytearray(5000)),
            memoryview(np.arange(12.0).reshape(3, 4)),
            memoryview(np.arange(12.0).reshape(3, 4).T),
            memoryview(np.arange(12)[::3]),
            memoryview(np.zeros(3, [("x", "i4"), ("y", "f8")])),
            memoryview(b""),
            memoryview(np.zeros((2, 0))),
            memoryview(np.array(3.0)),
        ],
    )
    def test_memoryview(self, view):
        out = round_trip(view)
        assert isinstance(out, memoryview)
        assert out.readonly
        assert (out.format, out.shape, out.tobytes()) == (view.format, view.shape, view.tobytes())
        assert not round_trip(view, writable=True).readonly

    def test_pickle_buffers_stay_beside_the_stream(self):
        data = bytearray(5000)
        encoded = serial.encode([pickle.PickleBuffer(data)])
        assert [b.nbytes for b in encoded.buffers] == [5000]
        (out,) = load(encoded)
        assert memoryview(out).readonly

    def test_shared_and_cyclic_containers(self):
        inner = [np.zeros(500)]
        value: list[Any] = [inner, inner]
        value.append(value)
        out = round_trip(value)
        assert out[0] is out[1]
        assert out[2] is out

    def test_payload_may_be_followed_by_anything(self):
        for value in (1, "text", b"bytes", np.arange(3), [np.arange(300)]):
            payload = serial.encode(value).tobytes() + b"x" * 100
            out = serial.decode(memoryview(payload), make_ref=ObjectRef)
            assert np.array_equal(out, value)

    def test_not_a_payload(self):
        with pytest.raises(ValueError, match="first byte is 99"):
            serial.decode(memoryview(b"\x63" + bytes(63)), make_ref=ObjectRef)


class TestOtherLibraries:
    def frame(self) -> pd.DataFrame:
        return pd.DataFrame(
            {
                "i": np.arange(1000),
                "f": np.arange(1000.0),
                "g": np.arange(1000.0),
                "s": [f"row {i}" for i in range(1000)],
                "o": pd.Series([(i,) for i in range(1000)], dtype=object),
                "t": pd.date_range("2020", periods=1000),
                "c": pd.Categorical(["a", "b"] * 500),
                "n": pd.array([None, 1] * 500, dtype="Int64"),
            }
        )

    def test_frames(self):
        frame = self.frame()
        out = round_trip(frame)
        pd.testing.assert_frame_equal(out, frame)
        assert out.groupby("c", observed=True).f.sum().tolist() == [249500.0, 250000.0]
        for column in ("i", "f", "o"):
            with pytest.raises(ValueError, match="read-only"):
                out[column].array._ndarray[0] = 0
        own = round_trip(frame, writable=True)
        own.loc[0, "i"] = 7
        assert own.i[0] == 7

    def test_large_blocks_are_not_copied_into_the_stream(self):
        frame = pd.DataFrame(np.zeros((1000, 10)))
        encoded = serial.encode(frame)
        assert len(encoded.head) < 5000
        assert any(np.shares_memory(np.frombuffer(b, "u1"), frame.values) for b in encoded.buffers)

    def test_series(self):
        for column in self.frame().items():
            pd.testing.assert_series_equal(round_trip(column[1]), column[1])

    def test_arrow(self):
        table = pa.table({"x": np.arange(5000), "s": [str(i) for i in range(5000)]})
        encoded = serial.encode(table)
        assert sum(b.nbytes for b in encoded.buffers) > 40_000
        assert load(encoded).equals(table)
        assert round_trip([table], writable=True)[0].equals(table)


class TestRefs:
    def test_stay_refs_in_a_value(self):
        value = {"a": [a_ref(1), (a_ref(2), a_ref(1))], "b": Boxed(a_ref(3))}
        encoded = serial.encode(value)
        assert encoded.refs == [a_ref(1), a_ref(2), a_ref(3)]
        made: list[bytes] = []

        def make_ref(id: bytes) -> ObjectRef[Any]:
            made.append(id)
            return ObjectRef(id)

        out = serial.decode(memoryview(encoded.tobytes()), make_ref=make_ref)
        assert out == value
        assert sorted(made) == sorted(ref._id for ref in encoded.refs)
        assert out["a"][0] is out["a"][1][1]

    def test_a_future_stands_for_its_ref(self):
        assert round_trip([FakeFuture(a_ref())]) == [a_ref()]
        assert round_trip(FakeFuture(a_ref())) == a_ref()

    def test_by_ref_in_a_value_is_its_content(self):
        assert round_trip(by_ref([a_ref()])) == [a_ref()]

    def test_readings_nest(self):
        outer = serial.encode(Nested(serial.encode([a_ref(9)]).tobytes(), a_ref(1)))
        out = load(outer)
        assert out.inner == [a_ref(9)]
        assert out.after == a_ref(1)

    def test_immutable_hashable_and_equal_by_id(self):
        ref = ObjectRef(bytes(range(16)))
        assert ref == ObjectRef(bytes(range(16)), object())
        assert ref != a_ref()
        assert ref != ref.id
        assert len({ref, ObjectRef(bytes(range(16)))}) == 1
        assert ref.id == bytes(range(16)).hex()
        assert repr(ref) == f"ObjectRef({ref.id})"
        assert copy.deepcopy([ref])[0] is copy.copy(ref) is ref
        for name in ("_id", "other"):
            with pytest.raises(AttributeError, match="immutable"):
                setattr(ref, name, b"")
        with pytest.raises(AttributeError, match="immutable"):
            del ref._id
        with pytest.raises(ValueError, match="16 bytes"):
            ObjectRef(b"short")
        assert ObjectRef[int](bytes(16)) == ObjectRef(bytes(16))
        assert repr(by_ref(1)) == "by_ref(1)"

    def test_foreign_pickles_attach_anew(self, monkeypatch):
        ref = a_ref()
        out = pickle.loads(pickle.dumps(ref))
        assert out == ref
        assert out._hold is None
        monkeypatch.setattr(runtime_hooks, "attach", lambda id: ("held", id))
        assert pickle.loads(pickle.dumps(ref))._hold == ("held", ref._id)

    def test_contributors_ask_the_runtime(self, monkeypatch):
        assert a_ref().contributors is None
        monkeypatch.setattr(runtime_hooks, "contributors", lambda ref: (0, int(ref.id[:2], 16)))
        assert a_ref(3).contributors == (0, 3)


class Nested:
    """Reads another payload while it is being read."""

    def __init__(self, payload: bytes, after: Any) -> None:
        self.payload = payload
        self.after = after

    def __reduce__(self) -> Any:
        return _read_nested, (self.payload,), {"after": self.after}


def _read_nested(payload: bytes) -> Nested:
    nested = Nested(payload, None)
    nested.inner = serial.decode(memoryview(payload), make_ref=ObjectRef)
    return nested


class TestCalls:
    def call(self, *args: Any, **kwargs: Any) -> tuple[Any, Any, list[ObjectRef[Any]]]:
        encoded = serial.encode_call(args, kwargs)
        payload = encoded.tobytes()
        check_layout(encoded, payload)
        assert set(encoded.dependencies) <= set(encoded.refs)
        got = serial.decode_call(memoryview(payload), ObjectRef, self.resolve)
        return (*got, encoded.dependencies)

    def resolve(self, ref: ObjectRef[Any]) -> Any:
        return f"value {int.from_bytes(ref._id, 'little')}"

    @pytest.mark.parametrize(
        ("args", "kwargs"),
        [((), {}), ((1, "a", None), {}), (([1], {2: 3}), {}), ((1,), {"k": [2]}), ((), {"k": 1})],
    )
    def test_plain_arguments(self, args, kwargs):
        assert self.call(*args, **kwargs) == (args, kwargs, [])

    def test_refs_are_replaced_by_values(self):
        one, two, three = a_ref(1), a_ref(2), FakeFuture(a_ref(3))
        args, kwargs, needs = self.call(one, 5, three, one)
        assert (args, kwargs) == (("value 1", 5, "value 3", "value 1"), {})
        assert needs == [a_ref(1), a_ref(3)]
        args, kwargs, needs = self.call([one, (two, {"k": {three}})], key={one: 1})
        assert args == (["value 1", ("value 2", {"k": {"value 3"}})],)
        assert kwargs == {"key": {"value 1": 1}}
        assert set(needs) == {a_ref(1), a_ref(2), a_ref(3)}

    def test_elsewhere_refs_stay_refs(self):
        boxed, point, frozen = Boxed(a_ref(1)), Point(a_ref(1), 2), frozenset({a_ref(1)})
        args, _, needs = self.call(boxed, point, frozen, OrderedDict(a=a_ref(1)))
        assert args == (boxed, point, frozen, {"a": a_ref(1)})
        assert needs == []
        assert serial.encode_call((boxed,), {}).refs == [a_ref(1)]

    def test_by_ref_hands_refs_over(self):
        shared = [a_ref(1)]
        args, _, needs = self.call(by_ref(shared), shared, by_ref(a_ref(2)), a_ref(2))
        assert args == ([a_ref(1)], ["value 1"], a_ref(2), "value 2")
        assert needs == [a_ref(1), a_ref(2)]
        args, _, needs = self.call(by_ref(5), [ByRef(FakeFuture(a_ref(4)))])
        assert args == (5, [a_ref(4)])
        assert needs == []

    def test_the_same_ref_is_resolved_once(self):
        seen: list[Any] = []
        for args in ((a_ref(1), a_ref(1)), ([a_ref(1)], {"k": a_ref(1)})):
            payload = serial.encode_call(args, {}).tobytes()
            serial.decode_call(memoryview(payload), ObjectRef, seen.append)
        assert seen == [a_ref(1)] * 2

    def test_arrays_by_value_are_the_tasks_own(self):
        small, large, view = np.zeros(3), np.zeros(5000), np.zeros((3, 4))[:, ::2]
        args, _, _ = self.call(small, [large], Boxed(view), np.array([None]), memoryview(b"abc"))
        assert args[0].flags.writeable
        assert args[1][0].flags.writeable
        assert args[2].array.flags.writeable
        assert args[3].flags.writeable
        assert not args[4].readonly

    def test_resolved_values_are_left_as_they_are(self):
        array = np.zeros(3)
        array.flags.writeable = False
        for args in ((a_ref(),), ([a_ref()], np.zeros(1000))):
            payload = serial.encode_call(args, {}).tobytes()
            out, _ = serial.decode_call(memoryview(payload), ObjectRef, lambda ref: array)
            assert (out[0] if out[0] is array else out[0][0]) is array

    def test_cycles_and_sharing_survive_the_walk(self):
        shared = [1]
        cycle: list[Any] = [a_ref(1), shared, shared]
        cycle.append((cycle,))
        (out,), _, _ = self.call(cycle)
        assert out[0] == "value 1"
        assert out[1] is out[2]
        assert out[3][0] is out
        assert cycle[0] == a_ref(1)

    def test_a_failing_resolve_is_the_readers_to_handle(self):
        payload = serial.encode_call(([a_ref()],), {}).tobytes()

        def resolve(ref: ObjectRef[Any]) -> Any:
            raise KeyError(ref.id)

        with pytest.raises(KeyError):
            serial.decode_call(memoryview(payload), ObjectRef, resolve)


class TestUnpicklable:
    def test_a_value(self):
        with pytest.raises(TypeError, match=r"cannot pickle value of type 'Boxed'.*lock") as caught:
            serial.encode(Boxed(threading.Lock()))
        assert isinstance(caught.value.__cause__, TypeError)

    def test_an_argument_is_named(self):
        with pytest.raises(TypeError, match=r"argument 1 of type 'Boxed'.*lock"):
            serial.encode_call((1, Boxed(threading.Lock())), {})
        with pytest.raises(TypeError, match=r"argument key= of type 'list'.*lock"):
            serial.encode_call((1,), {"key": [a_ref(), threading.Lock()]})

    def test_nesting_without_end(self):
        deep: list[Any] = []
        for _ in range(100_000):
            deep = [deep]
        with pytest.raises(TypeError, match="recursion"):
            serial.encode(deep)
        with pytest.raises(TypeError, match="recursion"):
            serial.encode_call((a_ref(), deep), {})
