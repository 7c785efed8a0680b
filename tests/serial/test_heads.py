"""Heads: made before their array is, and read without unpickling."""

from __future__ import annotations

import numpy as np
import pytest

from hoplite_mp import _serialize
from hoplite_mp._common.ref import ObjectRef
from tests.support.payloads import ML_DTYPES, array_of


class TestHeads:
    def test_a_head_for_bytes_filled_in_later(self):
        head, offset, nbytes = _serialize.encode_array_head("f4", (2, 3), "F", (0, 2, 5))
        payload = bytearray(nbytes)
        payload[: len(head)] = head
        payload[offset:] = np.arange(6, dtype="f4").tobytes()
        mem = memoryview(payload)
        out = _serialize.decode(mem, make_ref=ObjectRef)
        assert out.tolist() == [[0, 2, 4], [1, 3, 5]]
        assert _serialize.read_contributors(mem) == (0, 2, 5)
        assert _serialize.describe_array(mem) == ("<f4", (2, 3), "F", offset, 24)

    def test_it_is_the_head_that_encode_makes(self):
        for array in (np.zeros((3, 4)), np.zeros((3, 4), order="F"), np.array(5, "i2")):
            encoded = _serialize.encode(array)
            order = "C" if array.flags.c_contiguous else "F"
            head, offset, nbytes = _serialize.encode_array_head(array.dtype, array.shape, order)
            padded = encoded.head.ljust(offset, b"\0")
            assert (head, [offset], nbytes) == (padded, encoded.offsets, encoded.nbytes)

    def test_the_place_of_the_buffer_is_honoured_or_refused(self):
        assert _serialize.encode_array_head(float, (5,), buffer_offset=4096)[1:] == (4096, 4136)
        with pytest.raises(ValueError, match="head takes"):
            _serialize.encode_array_head(float, (5,), "C", range(1100), buffer_offset=4096)
        with pytest.raises(ValueError, match="aligned to 64"):
            _serialize.encode_array_head(float, (5,), buffer_offset=4100)

    def test_contributors_may_be_none_or_nobody(self):
        for who in (None, ()):
            head, _, _ = _serialize.encode_array_head(float, (5,), contributors=who)
            assert _serialize.read_contributors(memoryview(head)) == who
        assert _serialize.read_contributors(memoryview(_serialize.encode("text").tobytes())) is None

    def test_contributors_longer_than_the_payload_are_refused(self):
        """Found by the fuzzer: the last 4 bytes are the number of contributors."""
        data = bytes.fromhex("00080000000000000000000000000001")
        with pytest.raises(ValueError, match="not a payload"):
            _serialize.read_contributors(memoryview(data))

    def test_what_has_no_description_is_refused(self):
        with pytest.raises(TypeError, match="without pickle"):
            _serialize.encode_array_head(object, (5,))
        with pytest.raises(ValueError, match="order is"):
            _serialize.encode_array_head(float, (5,), "K")

    @pytest.mark.parametrize("dtype", [np.dtype("f8"), np.dtype(">i2"), *ML_DTYPES])
    def test_describe_without_unpickling(self, dtype):
        array = array_of(dtype, (3, 5))
        encoded = _serialize.encode(array)
        info = _serialize.describe_array(memoryview(encoded.tobytes()))
        assert info is not None
        assert info == (info.dtype_name, (3, 5), "C", encoded.offsets[0], array.nbytes)

    @pytest.mark.parametrize("value", [3, 2.5, 1j, True, np.float32(1.5), np.int8(-1)])
    def test_numbers_are_described_as_arrays_without_dimensions(self, value):
        payload = _serialize.encode(value).tobytes()
        info = _serialize.describe_array(memoryview(payload))
        assert info is not None
        assert info.shape == ()
        assert info.offset % 16 == 0
        assert np.frombuffer(payload, info.dtype_name, 1, info.offset)[0] == value

    @pytest.mark.parametrize("value", [None, "text", b"bytes", [np.zeros(3)], 2**80])
    def test_others_are_not_described(self, value):
        assert _serialize.describe_array(memoryview(_serialize.encode(value).tobytes())) is None
