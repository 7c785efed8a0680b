"""The reduction kernels against NumPy's left fold: every op and dtype, to the bit.

The reference is written with NumPy alone. Where the kernels deliberately differ from NumPy's own
fold (half precision, mean of integers, product of complex numbers), the reference spells out the
definition of cext/reduce_kernels.h.
"""

import functools
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hoplite_mp import _reduce, _tasks
from tests.support.reductions import (
    DTYPES,
    HALVES,
    OPS_OF,
    UFUNCS,
    Array,
    assert_same_fold,
    every_pair,
    numpy_dtype,
    random_values,
    reference_fold,
)

LINE_BYTES = 64
CANARY = 0xA5


@functools.cache
def same_values(dtype_name: str, nbytes: int) -> list[Array]:
    """Three arrays that every test of a dtype shares, and none changes."""
    rng = np.random.default_rng(7)
    count = nbytes // numpy_dtype(dtype_name).itemsize
    return [random_values(dtype_name, count, rng) for _ in range(3)]


class Place:
    """Memory for some bytes at a chosen distance from a line, with canaries on both sides."""

    def __init__(self, nbytes: int, offset: int, content: Array | None = None) -> None:
        self.room = np.full(nbytes + 3 * LINE_BYTES, CANARY, np.uint8)
        self.start = LINE_BYTES + (offset - self.room.ctypes.data) % LINE_BYTES
        self.bytes = self.room[self.start : self.start + nbytes]
        self.address = self.room.ctypes.data + self.start
        if content is not None:
            self.bytes[:] = np.frombuffer(content.tobytes(), np.uint8)

    def read(self, dtype: np.dtype[Any]) -> Array:
        return np.frombuffer(self.bytes.tobytes(), dtype)

    def assert_surroundings_untouched(self) -> None:
        assert np.all(self.room[: self.start] == CANARY)
        assert np.all(self.room[self.start + self.bytes.size :] == CANARY)


def check(
    op: str,
    dtype: str,
    arrays: list[Array],
    offsets: list[int],
    threads: int = 1,
    in_place: int | None = None,
) -> None:
    """Reduce copies of `arrays` that lie at `offsets` (the last is the destination's)."""
    count = arrays[0].size
    places = [Place(a.nbytes, offset, a) for a, offset in zip(arrays, offsets, strict=False)]
    expected = reference_fold(op, dtype, arrays)
    if in_place is None or expected.itemsize != arrays[0].itemsize:
        in_place = None
        destination = Place(expected.nbytes, offsets[-1])
    else:
        destination = places[in_place]
    sources = [place.address for place in places]
    _reduce.reduce_addresses(op, dtype, sources, destination.address, count, threads)
    assert_same_fold(op, destination.read(expected.dtype), expected)
    destination.assert_surroundings_untouched()
    for i, (place, array) in enumerate(zip(places, arrays, strict=True)):
        assert i == in_place or place.bytes.tobytes() == array.tobytes()


@every_pair
@settings(max_examples=8, deadline=None)
@given(
    count=st.one_of(st.integers(0, 70), st.sampled_from([2047, 4096, 8193, 20_001])),
    inputs=st.integers(1, 9),
    offsets=st.lists(st.integers(0, LINE_BYTES - 1), min_size=10, max_size=10),
    threads=st.integers(1, 3),
    where=st.one_of(st.none(), st.integers(0, 8)),
    seed=st.integers(0, 2**32 - 1),
)
def test_as_numpy(
    op: str,
    dtype: str,
    count: int,
    inputs: int,
    offsets: list[int],
    threads: int,
    where: int | None,
    seed: int,
) -> None:
    rng = np.random.default_rng(seed)
    arrays = [random_values(dtype, count, rng) for _ in range(inputs)]
    in_place = None if where is None else where % inputs
    check(op, dtype, arrays, offsets, threads, in_place)


@every_pair
@pytest.mark.parametrize("in_place", [None, 1])
def test_several_threads_over_several_chunks(op: str, dtype: str, in_place: int | None) -> None:
    # Two threads' worth of bytes is read, and three chunks at least.
    arrays = same_values(dtype, 1_600_003)
    check(op, dtype, arrays, [1, 16, 7, 3], threads=3, in_place=in_place)


@every_pair
def test_the_destination_may_be_any_of_the_sources(op: str, dtype: str) -> None:
    arrays = same_values(dtype, 40_000)
    for in_place in range(3):
        check(op, dtype, arrays, [0, 5, 32, 0], in_place=in_place)


@pytest.mark.parametrize("dtype", HALVES)
def test_every_half_survives_widening_and_rounding(dtype: str) -> None:
    halves = np.arange(1 << 16, dtype=np.uint16).view(numpy_dtype(dtype))
    for op in ("mean", "sum"):
        check(op, dtype, [halves], [2, 2])
    zeros = np.full_like(halves, -0.0)
    check("sum", dtype, [zeros, halves], [0, 0, 0])


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("op", ["sum", "prod", "mean"])
def test_every_half_with_any_other_is_rounded_to_nearest_even(op: str, dtype: str) -> None:
    halves = np.arange(1 << 16, dtype=np.uint16)
    others = np.random.default_rng(9).permutation(halves)
    check(op, dtype, [h.view(numpy_dtype(dtype)) for h in (halves, others)], [0, 0, 0])


def test_halves_are_rounded_once_not_at_every_step() -> None:
    # One step is half a unit of the last place of 2048: rounded each time, none would count.
    arrays = [np.array([x], np.float16) for x in (2048.0, 1.0, 1.0)]
    found = np.empty(1, np.float16)
    _reduce.reduce_buffers("sum", "float16", arrays, found)
    assert found[0] == 2050.0
    assert functools.reduce(np.add, arrays)[0] == 2048.0


def test_any_byte_but_zero_is_true() -> None:
    a, b, found = bytes([0, 0, 1, 2, 2]), bytes([0, 4, 2, 1, 2]), bytearray(5)
    expected = {
        "or": [0, 1, 1, 1, 1],
        "and": [0, 0, 1, 1, 1],
        "xor": [0, 1, 0, 0, 0],
        "sum": [0, 1, 1, 1, 1],
    }
    for op, truth in expected.items():
        _reduce.reduce_buffers(op, "bool", [a, b], found)
        assert list(found) == truth, op


def test_what_is_supported_is_what_is_documented() -> None:
    for dtype in DTYPES:
        assert [op for op in UFUNCS if _reduce.supported(op, dtype)] == OPS_OF[dtype]
    for op, dtype in [("sum", "float128"), ("sum", "object"), ("median", "int8"), ("", "")]:
        assert not _reduce.supported(op, dtype)


@every_pair
def test_result_dtype(op: str, dtype: str) -> None:
    probe = np.ones(1, numpy_dtype(dtype))
    expected = reference_fold(op, dtype, [probe, probe]).dtype
    assert numpy_dtype(_reduce.result_dtype(op, dtype)) == expected


def test_buffers() -> None:
    a, b = np.arange(6, dtype=np.int32).reshape(2, 3), np.full((2, 3), 10, np.int32)
    total, mean = np.empty((2, 3), np.int32), np.empty((2, 3), np.float64)
    _reduce.reduce_buffers("sum", "int32", [a, b], total)
    np.testing.assert_array_equal(total, a + b)
    _reduce.reduce_buffers("mean", "int32", (a, b.data), mean, threads=2)
    np.testing.assert_array_equal(mean, (a + b) / 2)
    _reduce.reduce_buffers("sum", "int32", [b""], bytearray())


def test_buffers_are_released_after_success_and_failure() -> None:
    source, destination = bytearray(8), bytearray(8)
    _reduce.reduce_buffers("sum", "int32", [source], destination)
    with pytest.raises(ValueError, match="destination has 8 bytes, the result has 16"):
        _reduce.reduce_buffers("mean", "int32", [source], destination)
    source.clear()  # BufferError while somebody holds a view
    destination.clear()


def test_buffers_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="source 1 has 4 bytes, source 0 has 8"):
        _reduce.reduce_buffers("sum", "int8", [bytes(8), bytes(4)], bytearray(8))
    with pytest.raises(ValueError, match="7 bytes are not a whole number of int16"):
        _reduce.reduce_buffers("sum", "int16", [bytes(7)], bytearray(7))
    with pytest.raises((BufferError, ValueError)):
        _reduce.reduce_buffers("sum", "int8", [bytes(4)], bytes(4))
    frozen = np.zeros(4, np.int8)
    frozen.flags.writeable = False
    with pytest.raises((BufferError, ValueError)):
        _reduce.reduce_buffers("sum", "int8", [bytes(4)], frozen)
    with pytest.raises((BufferError, ValueError)):
        _reduce.reduce_buffers("sum", "int8", [np.zeros(8, np.int8)[::2]], bytearray(4))
    with pytest.raises(TypeError):
        _reduce.reduce_buffers("sum", "int8", [object()], bytearray(4))  # type: ignore[list-item]


def test_arguments_that_make_no_sense_are_refused() -> None:
    room = bytearray(64)
    for op, dtype in [("median", "int8"), ("sum", "float128"), ("min", "complex64")]:
        with pytest.raises(ValueError, match="no reduction kernel"):
            _reduce.reduce_buffers(op, dtype, [room], room)
        with pytest.raises(ValueError, match="no reduction kernel"):
            _reduce.result_dtype(op, dtype)
    with pytest.raises(ValueError, match="at least one source"):
        _reduce.reduce_buffers("sum", "int8", [], room)
    with pytest.raises(ValueError, match="at least one source"):
        _reduce.reduce_addresses("sum", "int8", [], 1, 1)
    with pytest.raises(ValueError, match="threads must be at least 1, not 0"):
        _reduce.reduce_buffers("sum", "int8", [room], room, threads=0)
    with pytest.raises(ValueError, match="threads must be at least 1"):
        _reduce.copy_address(1, 1, 1, threads=-1)
    with pytest.raises(ValueError, match="count"):
        _reduce.reduce_addresses("sum", "int8", [1], 1, -1)
    with pytest.raises(ValueError, match="count"):
        _reduce.reduce_addresses("sum", "int8", [1], 1, 1 << 62)
    with pytest.raises(ValueError, match="nbytes"):
        _reduce.copy_address(1, 1, -1)
    with pytest.raises(ValueError, match="address 0"):
        _reduce.reduce_addresses("sum", "int8", [0], 0, 1)
    with pytest.raises(ValueError, match="address 0"):
        _reduce.copy_address(0, 0, 1)
    _reduce.reduce_addresses("sum", "int8", [0], 0, 0)
    _reduce.copy_address(0, 0, 0)


def test_memory_that_overlaps_without_being_the_same_is_refused() -> None:
    room = np.zeros(64, np.uint8)
    base = room.ctypes.data
    with pytest.raises(ValueError, match="overlaps"):
        _reduce.reduce_addresses("sum", "int8", [base], base + 1, 8)
    with pytest.raises(ValueError, match="overlaps"):
        _reduce.reduce_addresses("mean", "int32", [base], base, 4)  # elements of another size
    with pytest.raises(ValueError, match="overlaps"):
        _reduce.copy_address(base, base + 7, 8)
    _reduce.reduce_addresses("sum", "int8", [base, base], base, 8)
    _reduce.copy_address(base, base + 8, 8)


@pytest.mark.parametrize("nbytes", [1, 1000, 5_000_001, 9_000_000])
@pytest.mark.parametrize("threads", [1, 3, 1000])
def test_copy_address(nbytes: int, threads: int) -> None:
    content = np.frombuffer(np.random.default_rng(10).bytes(nbytes), np.uint8)
    source, destination = Place(nbytes, 3, content), Place(nbytes, 5)
    _reduce.copy_address(destination.address, source.address, nbytes, threads)
    assert np.array_equal(destination.bytes, content)
    destination.assert_surroundings_untouched()
    source.assert_surroundings_untouched()


def test_helper_threads_block_every_signal_and_run_beside_python() -> None:
    """Seen from outside: while a reduction runs, this thread finds its threads in /proc."""
    sources = [np.ones(4_000_000, np.float32) for _ in range(4)]
    found = np.empty_like(sources[0])
    stop = threading.Event()

    def reduce_again_and_again() -> None:
        while not stop.is_set():
            _reduce.reduce_buffers("sum", "float32", sources, found, threads=2)

    runner = threading.Thread(target=reduce_again_and_again)
    known = set(os.listdir("/proc/self/task"))  # those of libraries too
    runner.start()
    try:
        mask = mask_of_a_new_thread(known | {str(runner.native_id)})
    finally:
        stop.set()
        runner.join()
    # The kernel keeps SIGKILL and SIGSTOP, glibc two of its own (32 and 33), out of every mask.
    exempt = {9, 19, 32, 33}
    assert all(mask >> (number - 1) & 1 for number in range(1, 65) if number not in exempt)


def mask_of_a_new_thread(known: set[str]) -> int:
    end = time.monotonic() + 10
    while time.monotonic() < end:
        for tid in set(os.listdir("/proc/self/task")) - known:
            try:
                status = Path(f"/proc/self/task/{tid}/status").read_text()
            except OSError:  # it has ended
                continue
            return int(status.split("SigBlk:")[1].split()[0], 16)
    raise AssertionError("no helper thread was ever seen")


WITHOUT_ROOM_FOR_STACKS = """
import importlib.util, resource, sys
spec = importlib.util.spec_from_file_location("_reduce", sys.argv[1])
_reduce = importlib.util.module_from_spec(spec)
spec.loader.exec_module(_reduce)
sources = [bytearray(b"\\x03") * 4_000_001 for _ in range(3)]
found = bytearray(4_000_001)
mapped = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
room = mapped + (1 << 20)  # for the call itself; a stack takes 8 MiB or so
resource.setrlimit(resource.RLIMIT_AS, (room, room))
_reduce.reduce_buffers("sum", "uint8", sources, found, threads=4)
sys.exit(found.count(9) != len(found))
"""


def test_without_memory_for_threads_the_caller_does_all() -> None:
    command = [sys.executable, "-c", WITHOUT_ROOM_FOR_STACKS, _reduce.__file__]
    subprocess.run(command, check=True, timeout=60)


def test_names_have_the_numbers_that_nodes_of_other_versions_expect() -> None:
    assert " ".join(_reduce.OPS) == "sum prod min max mean and or xor"
    assert " ".join(_reduce.DTYPES) == (
        "bool int8 int16 int32 int64 uint8 uint16 uint32 uint64 float16 bfloat16 float32 float64 "
        "complex64 complex128"
    )
    assert " ".join(_tasks.CALL_KINDS) == (
        "barrier allreduce reduce reduce_scatter broadcast gather allgather split"
    )
