"""Folds of cells against NumPy's left fold, to the bit: whole, in parts, and over several hosts.

The reference and the values are those of test_reduce.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hoplite_mp import _engine
from tests.support.engine_hosts import EngineHost, join
from tests.support.reductions import (
    Array,
    assert_same_fold,
    every_pair,
    numpy_dtype,
    random_values,
    reference_fold,
)

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(scope="module")
def host() -> Iterator[EngineHost]:
    made = EngineHost(1)
    yield made
    made.engine.stop()


@pytest.fixture
def two() -> Iterator[tuple[EngineHost, EngineHost]]:
    made = EngineHost(1), EngineHost(2)
    yield made
    for one in made:
        one.engine.stop()


def some(dtype: str, count: int, inputs: int, seed: int = 0) -> list[Array]:
    rng = np.random.default_rng(seed)
    return [random_values(dtype, count, rng) for _ in range(inputs)]


class Program:
    """Cells of one host over arrays, closed at the end."""

    def __init__(self, host: EngineHost) -> None:
        self.host = host
        self.arrays: dict[int, Array] = {}

    def cell(self, array: Array, filled: bool | int = False, key: Any = None) -> int:
        cell = self.host.engine.cell(key, array.view(np.uint8), filled=filled)
        self.arrays[cell] = array
        return cell

    def sources(self, arrays: list[Array]) -> list[int]:
        return [self.cell(array, filled=True) for array in arrays]

    def room(self, count: int, dtype: str, key: Any = None) -> int:
        return self.cell(np.zeros(count, numpy_dtype(dtype)), key=key)

    def close(self) -> None:
        for cell in self.arrays:
            self.host.close(cell)
        self.host.told.clear()


@every_pair
@settings(max_examples=3, deadline=None)
@given(
    count=st.one_of(st.integers(0, 70), st.sampled_from([2047, 8193, 40_001])),
    inputs=st.integers(1, 7),
    seed=st.integers(0, 2**32 - 1),
)
def test_as_numpy(
    host: EngineHost, op: str, dtype: str, count: int, inputs: int, seed: int
) -> None:
    arrays = some(dtype, count, inputs, seed)
    expected = reference_fold(op, dtype, arrays)
    program = Program(host)
    total = program.room(count, expected.dtype.name)
    host.engine.fold(total, program.sources(arrays), op, dtype, inputs)
    host.filled(total)
    assert_same_fold(op, program.arrays[total], expected)
    program.close()


@every_pair
@settings(max_examples=3, deadline=None)
@given(
    count=st.sampled_from([1, 77, 4097, 30_001]),
    groups=st.lists(st.integers(1, 3), min_size=2, max_size=4),
    seed=st.integers(0, 2**32 - 1),
)
def test_partial_results(
    host: EngineHost, op: str, dtype: str, count: int, groups: list[int], seed: int
) -> None:
    """A chain of partial folds gives the bits of the one fold over all."""
    arrays = some(dtype, count, sum(groups), seed)
    expected = reference_fold(op, dtype, arrays)
    program = Program(host)
    sources = program.sources(arrays)
    partial: list[int] = []
    for i, group in enumerate(groups):
        mine, sources = partial + sources[:group], sources[group:]
        last = i == len(groups) - 1
        name = expected.dtype.name if last else _engine.accumulator_dtype(op, dtype)
        total = program.room(count, name)
        host.engine.fold(total, mine, op, dtype, len(arrays), accumulated=partial, final=last)
        partial = [total]
    host.filled(total)
    assert_same_fold(op, program.arrays[total], expected)
    program.close()


@pytest.mark.parametrize(
    ("op", "dtype"),
    [("sum", "float32"), ("mean", "float16"), ("mean", "int16"), ("prod", "complex64")],
)
@pytest.mark.parametrize("seed", range(5))
def test_as_far_as_all_have_come(host: EngineHost, op: str, dtype: str, seed: int) -> None:
    """Watermarks that stop anywhere, in the middle of an element too."""
    count, inputs = 60_000, 3
    arrays = some(dtype, count, inputs, seed)
    rng = np.random.default_rng(seed)
    expected = reference_fold(op, dtype, arrays)
    program = Program(host)
    sources = [program.cell(array) for array in arrays]
    total = program.room(count, expected.dtype.name)
    host.engine.fold(total, sources, op, dtype, inputs)
    nbytes = arrays[0].nbytes
    come = [0] * inputs
    block = max(_engine.BLOCK_BYTES_LEAST, expected.nbytes // 8 + 64)
    while min(come) < nbytes:
        i = int(rng.integers(inputs))
        come[i] = min(nbytes, come[i] + int(rng.integers(1, nbytes // 4)))
        host.engine.advance(sources[i], come[i])
        # Less than a block of output waits for more to come.
        least = min(come) // arrays[0].itemsize * expected.itemsize
        wanted = expected.nbytes if min(come) == nbytes else least - block
        host.wait(lambda wanted=wanted: host.engine.watermark(total) >= wanted)
        done = host.engine.watermark(total)
        assert done <= least
        found = program.arrays[total][: done // expected.itemsize]
        assert_same_fold(op, found, expected[: found.size])
    host.filled(total)
    program.close()


@pytest.mark.parametrize(("op", "dtype"), [("sum", "float32"), ("mean", "bfloat16")])
def test_a_reduction_between_two_hosts(
    two: tuple[EngineHost, EngineHost], op: str, dtype: str
) -> None:
    """One adds its own and the other's partial result while that is still computed."""
    count = 300_001
    links = join(*two)
    arrays = some(dtype, count, 4)
    expected = reference_fold(op, dtype, arrays)
    far, near = Program(two[0]), Program(two[1])
    name = _engine.accumulator_dtype(op, dtype)
    partial = far.room(count, name, key=(1, 0, 0, 0))
    pulled = near.room(count, name, key=(1, 0, 0, 0))
    near.host.engine.pull(pulled, links[1])
    total = near.room(count, dtype, key=(1, 0, 0, 1))
    mine = near.sources(arrays[2:])
    near.host.engine.fold(total, [pulled, *mine], op, dtype, 4, accumulated=[pulled])
    back = far.room(count, dtype, key=(1, 0, 0, 1))
    far.host.engine.pull(back, links[0])
    far.host.engine.fold(partial, far.sources(arrays[:2]), op, dtype, final=False)
    far.host.filled(back)
    near.host.filled(total)
    assert_same_fold(op, near.arrays[total], expected)
    assert_same_fold(op, far.arrays[back], expected)


def test_a_fold_goes_on_where_another_has_stopped(host: EngineHost) -> None:
    program = Program(host)
    arrays = some("float32", 50_000, 2)
    lost = program.cell(arrays[1], filled=4 * 25_024)  # blocks of an eighth, in whole lines
    first = program.cell(arrays[0], filled=True)
    total = program.room(50_000, "float32")
    host.engine.fold(total, [first, lost], "sum", "float32")
    host.wait(lambda: host.engine.watermark(total) == 4 * 25_024)
    host.engine.fold(total, [first, lost], "sum", "float32")
    failed = host.wait_for(_engine.FOLD_FAILED, total)
    assert failed[2] == "something else fills the cell"
    host.told.clear()
    host.close(lost)
    del program.arrays[lost]
    assert host.wait_for(_engine.FOLD_FAILED, total)[2] == "a source was closed"
    again = program.cell(arrays[1], filled=True)
    host.engine.fold(total, [first, again], "sum", "float32")
    host.filled(total)
    assert_same_fold("sum", program.arrays[total], reference_fold("sum", "float32", arrays))
    program.close()


def test_closing_a_total_lets_its_sources_go_on(host: EngineHost) -> None:
    program = Program(host)
    source = program.cell(np.ones(1000, np.float32), filled=400)
    totals = [program.room(1000, "float32") for _ in range(3)]
    for total in totals:
        host.engine.fold(total, [source, source], "sum", "float32")
    host.close(totals[1])
    host.engine.advance(source, 4000)
    for total in (totals[0], totals[2]):
        host.filled(total)
        assert (program.arrays[total] == 2).all()
    assert not program.arrays[totals[1]].any()
    del program.arrays[totals[1]]
    program.close()


def test_many_folds_take_turns(host: EngineHost) -> None:
    """A small fold that begins behind a large one is done before it."""
    program = Program(host)
    many = program.sources([np.ones(20_000_000, np.float32)] * 4)
    few = program.sources([np.ones(100, np.float32)] * 2)
    large, small = program.room(20_000_000, "float32"), program.room(100, "float32")
    host.engine.fold(large, many, "sum", "float32")
    host.engine.fold(small, few, "sum", "float32")
    host.filled(small)
    assert host.engine.watermark(large) < 80_000_000
    host.filled(large)
    program.close()


def test_mistakes_get_one_clear_error(host: EngineHost) -> None:
    engine = host.engine
    program = Program(host)
    ten, total = program.cell(np.ones(10, np.float32), filled=True), program.room(10, "float32")
    eleven = program.cell(np.ones(11, np.float32), filled=True)
    for sources, op, dtype, words in [
        ([ten], "plus", "float32", "unknown op"),
        ([ten], "sum", "float31", "unknown dtype"),
        ([ten], "xor", "float32", "no reduction kernel"),
        ([], "sum", "float32", "at least one"),
        ([ten, eleven], "sum", "float32", "44 bytes"),
        ([ten, total], "sum", "float32", "into itself"),
        ([ten], "mean", "int32", "not 5 elements"),
        ([ten], "prod", "complex128", "not a whole number"),
    ]:
        with pytest.raises(ValueError, match=words):
            engine.fold(total, sources, op, dtype)
    with pytest.raises(ValueError, match="not a source"):
        engine.fold(total, [ten], "sum", "float32", accumulated=[eleven])
    with pytest.raises(OverflowError):
        engine.fold(total, [ten], "sum", "float32", divisor=-1)
    with pytest.raises(KeyError):
        engine.fold(total, [ten, 10**6], "sum", "float32")
    with pytest.raises(ValueError, match="no reduction kernel"):
        _engine.accumulator_dtype("min", "complex64")
    found = [_engine.accumulator_dtype("mean", name) for name in ("bool", "uint64", "float16")]
    assert found == ["float64", "float64", "float32"]
    assert _engine.accumulator_dtype("sum", "int8") == "int8"
    program.close()
