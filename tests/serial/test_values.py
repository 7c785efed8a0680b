"""Every kind of value that is no array goes in and comes out the same."""

from __future__ import annotations

import pickle
import threading
from collections import OrderedDict
from typing import Any

import hypothesis.extra.numpy as hnp
import ml_dtypes
import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hoplite_mp import _serialize
from hoplite_mp._common.ref import ObjectRef
from hoplite_mp._serialize import BYTES, NUMBER, PICKLE, streams
from tests.support.payloads import Boxed, Point, a_ref, load, round_trip

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
        encoded = _serialize.encode(value)
        assert encoded.kind == NUMBER
        assert repr(load(encoded)) == repr(value)

    @pytest.mark.parametrize("value", [2**63, -(2**63) - 1])
    def test_larger_ints_do(self, value):
        assert _serialize.encode(value).kind == PICKLE
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
        encoded = _serialize.encode(data)
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
        encoded = _serialize.encode([pickle.PickleBuffer(data)])
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
            payload = _serialize.encode(value).tobytes() + b"x" * 100
            out = _serialize.decode(memoryview(payload), make_ref=ObjectRef)
            assert np.array_equal(out, value)

    def test_not_a_payload(self):
        with pytest.raises(ValueError, match="not a payload: 63"):
            _serialize.decode(memoryview(b"\x63" + bytes(63)), make_ref=ObjectRef)


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
        encoded = _serialize.encode(frame)
        assert len(encoded.head) < 5000
        assert any(np.shares_memory(np.frombuffer(b, "u1"), frame.values) for b in encoded.buffers)

    def test_series(self):
        for column in self.frame().items():
            pd.testing.assert_series_equal(round_trip(column[1]), column[1])

    def test_arrow(self):
        table = pa.table({"x": np.arange(5000), "s": [str(i) for i in range(5000)]})
        encoded = _serialize.encode(table)
        assert sum(b.nbytes for b in encoded.buffers) > 40_000
        assert load(encoded).equals(table)
        assert round_trip([table], writable=True)[0].equals(table)


class TestUnpicklable:
    def test_a_value(self):
        with pytest.raises(TypeError, match=r"cannot pickle value of type 'Boxed'.*lock") as caught:
            _serialize.encode(Boxed(threading.Lock()))
        assert isinstance(caught.value.__cause__, TypeError)

    def test_an_argument_is_named(self):
        with pytest.raises(TypeError, match=r"argument 1 of type 'Boxed'.*lock"):
            _serialize.encode_call((1, Boxed(threading.Lock())), {})
        with pytest.raises(TypeError, match=r"argument key= of type 'list'.*lock"):
            _serialize.encode_call((1,), {"key": [a_ref(), threading.Lock()]})

    def test_nesting_without_end(self):
        deep: list[Any] = []
        for _ in range(100_000):
            deep = [deep]
        with pytest.raises(TypeError, match="recursion"):
            _serialize.encode(deep)
        with pytest.raises(TypeError, match="recursion"):
            _serialize.encode_call((a_ref(), deep), {})


def test_a_plain_value_whose_length_the_head_cannot_say(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "META_BYTES_MAX", 1000)
    for value in ("x" * 2000, ["x"] * 2000, {"a": "x" * 2000}):
        with pytest.raises(_serialize.NotPicklable, match="neither arrays nor buffers"):
            _serialize.encode(value)
