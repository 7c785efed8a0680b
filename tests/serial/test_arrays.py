"""Arrays: every dtype, shape and order goes in and comes out the same, read-only or one's own."""

from __future__ import annotations

import gc
import warnings
from typing import Any

import hypothesis.extra.numpy as hnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hoplite_mp import _serialize
from hoplite_mp._common.ref import ObjectRef
from hoplite_mp._serialize import ARRAY, PICKLE
from tests.support.payloads import ML_DTYPES, Boxed, Tagged, array_of, load, round_trip


def assert_same(ours: Any, theirs: Any) -> None:
    assert type(ours) is type(theirs)
    assert ours.dtype == theirs.dtype
    assert ours.shape == theirs.shape
    assert ours.tobytes() == theirs.tobytes()


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


class Keeper(np.ndarray):
    """A subclass that pickles its attribute as well."""

    unit = ""

    def __reduce__(self) -> Any:
        function, args, state = super().__reduce__()
        return function, args, (state, self.unit)

    def __setstate__(self, state: Any) -> None:
        super().__setstate__(state[0])
        self.unit = state[1]


class TestArrays:
    @given(DTYPES, SHAPES, st.sampled_from(["C", "F", "strided", "reversed", "axes"]))
    def test_every_dtype_shape_and_memory_order(self, dtype, shape, how):
        array = rearranged(array_of(dtype, shape), how)
        encoded = _serialize.encode(array)
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
        encoded = _serialize.encode(array)
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
        encoded = _serialize.encode(np.zeros(100_000).view(Tagged))
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
            store = bytearray(_serialize.encode(value).tobytes())
            mem = memoryview(store).toreadonly()
            out = pick(_serialize.decode(mem, make_ref=ObjectRef))
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
            store = bytearray(_serialize.encode(value).tobytes())
            out = _serialize.decode(memoryview(store), make_ref=ObjectRef)
            out = out.array if isinstance(out, Boxed) else out[0] if isinstance(out, list) else out
            assert not out.flags.writeable

    def test_buffers_are_the_arrays_own_memory(self):
        array = np.zeros(100_000)
        for value in (array, array.reshape(100, -1).T, (array,), Boxed(array)):
            (buffer,) = _serialize.encode(value).buffers
            assert np.shares_memory(array, np.frombuffer(buffer, np.uint8))
