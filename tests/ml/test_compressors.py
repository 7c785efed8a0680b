"""Codes of each compressor stand for what numpy says, and have the sizes that are documented."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from hoplite_mp import ml
from hoplite_mp.ml._draws import draw_blocks, elements_of

Array = np.ndarray[Any, np.dtype[Any]]
FLOATS = arrays.arrays(np.float32, st.integers(0, 400), elements=st.floats(-1024, 1024, width=32))
COMPRESSORS = [
    ml.TopK(0.1),
    ml.Threshold(0.1),
    ml.RandomBlocks(4, seed=3, block=7),
    ml.Quantise(8, block=16),
    ml.Quantise(4, block=16),
    ml.Quantise(2, block=5),
    ml.Float16(),
]
every_compressor = pytest.mark.parametrize("compressor", COMPRESSORS, ids=repr)


@every_compressor
@settings(max_examples=25)
@given(values=FLOATS, step=st.integers(0, 5), factor=st.sampled_from([1.0, -1.0, 2.0]))
def test_add_of_a_code_is_factor_times_decode(
    compressor: Any, values: Array, step: int, factor: float
) -> None:
    code = compressor.encode(values, step, stripe=2)
    assert code.dtype == np.uint8
    decoded = compressor.decode(code, values.size, step, stripe=2)
    into = np.ones_like(values)
    compressor.add(code, into, step, 2, factor)
    np.testing.assert_array_equal(into, 1 + np.float32(factor) * decoded)


@settings(max_examples=50)
@given(values=FLOATS, fraction=st.floats(0.01, 1))
def test_topk_of_any_values_keeps_the_largest_exactly(values: Array, fraction: float) -> None:
    top = ml.TopK(fraction)
    code = top.encode(values)
    kept = math.ceil(fraction * values.size)
    assert code.nbytes == 8 * kept
    decoded = top.decode(code, values.size)
    sent = decoded != 0
    np.testing.assert_array_equal(decoded[sent], values[sent])
    largest = np.sort(np.abs(values))[::-1][:kept]
    np.testing.assert_array_equal(np.sort(np.abs(decoded))[::-1][:kept], largest)


@settings(max_examples=50)
@given(values=FLOATS)
def test_threshold_of_a_whole_sample_sends_what_reaches_it_and_no_zeros(values: Array) -> None:
    code = ml.Threshold(0.1, sample=1).encode(values)
    decoded = ml.Threshold(0.1).decode(code, values.size)
    sizes = np.abs(values)
    kept = math.ceil(0.1 * values.size)
    if not values.any():
        assert not code.nbytes
        return
    threshold = np.sort(sizes)[-kept]
    expected = np.where((sizes >= threshold) & (sizes > 0), values, 0)
    np.testing.assert_array_equal(decoded, expected)


def test_threshold_is_kept_between_its_refreshes() -> None:
    threshold, memory = ml.Threshold(0.01, refresh=10), dict[str, Any]()
    rng = np.random.default_rng(0)
    drawn = []
    for step in range(31):
        values = rng.normal(size=5000).astype(np.float32)
        threshold.prepare(values, step, memory)
        threshold.encode(values, step, 0, memory)
        drawn.append(memory["threshold"])
    changes = [at for at in range(1, 31) if drawn[at] != drawn[at - 1]]
    assert changes == [10, 20, 30]


def test_threshold_far_too_low_is_drawn_again() -> None:
    values = np.random.default_rng(0).normal(size=5000).astype(np.float32)
    code = ml.Threshold(0.01).encode(values, 3, 0, {"threshold": 1e-3})
    assert 8 * 20 <= code.nbytes <= 8 * 100


@settings(max_examples=50)
@given(
    size=st.integers(0, 500),
    ratio=st.floats(1, 50),
    block=st.integers(1, 60),
    step=st.integers(0, 1000),
)
def test_random_blocks_send_whole_blocks_exactly(
    size: int, ratio: float, block: int, step: int
) -> None:
    values = np.arange(1, size + 1, dtype=np.float32)
    compressor = ml.RandomBlocks(ratio, seed=5, block=block)
    decoded = compressor.decode(compressor.encode(values, step, 1), size, step, 1)
    blocks = -(-size // block)
    padded = np.zeros(blocks * block, bool)
    padded[:size] = decoded == values
    full = padded[: size // block * block].reshape(-1, block)
    assert (full.all(axis=1) | ~full.any(axis=1)).all()
    assert not decoded[decoded != values].any()
    count = max(1, round(blocks / ratio)) if blocks else 0
    assert sum(padded[at * block : (at + 1) * block].any() for at in range(blocks)) == count


def test_draws_are_those_of_other_versions() -> None:
    assert draw_blocks(7, 3, 1, 100, 20).tolist() == [16, 35, 37, 65, 93]
    assert elements_of(9, 1000, 4).tolist() == [342, 228, 773, 315]


def test_draw_blocks_over_many_steps_takes_each_block_equally_often() -> None:
    counts = np.zeros(64)
    for step in range(4000):
        counts[draw_blocks(1, step, 0, 64, 8)] += 1
    assert abs(counts / 4000 - 1 / 8).max() < 0.025  # five standard deviations


@settings(max_examples=50)
@given(values=FLOATS, bits=st.sampled_from([8, 4, 2]), block=st.integers(1, 70))
def test_quantise_is_within_half_a_level(values: Array, bits: int, block: int) -> None:
    compressor = ml.Quantise(bits, block)
    code = compressor.encode(values)
    blocks = -(-values.size // block)
    assert code.nbytes == 4 * blocks + -(-values.size * bits // 8)
    decoded = compressor.decode(code, values.size)
    for at in range(0, values.size, block):
        part = values[at : at + block]
        level = np.abs(part).max() / (2 ** (bits - 1) - 1)
        assert np.abs(decoded[at : at + block] - part).max() <= level * 0.50001 + 1e-37


@settings(max_examples=50)
@given(values=FLOATS)
def test_float16_is_numpys(values: Array) -> None:
    values = values * np.float32(100)
    clipped = np.clip(values, -65504, 65504).astype(np.float16)
    half = ml.Float16()
    np.testing.assert_array_equal(half.decode(half.encode(values), values.size), clipped)


@settings(max_examples=30)
@given(
    rows=st.integers(1, 30), columns=st.integers(1, 30), rank=st.integers(1, 4),
    seed=st.integers(0, 100),
)  # fmt: skip
def test_power_sgd_of_a_matrix_of_its_rank_is_exact(
    rows: int, columns: int, rank: int, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    factors = rng.normal(size=(rows, rank)), rng.normal(size=(rank, columns))
    matrix = (factors[0] @ factors[1]).astype(np.float32)
    low = ml.PowerSGD(rank)
    p = low.left(matrix, low.start(matrix.shape, seed))
    kept = np.abs(p).any(axis=0)
    np.testing.assert_allclose(p.T @ p, np.diag(kept.astype(float)), atol=1e-4)
    found = p @ low.right(matrix, p).T
    np.testing.assert_allclose(found, matrix, atol=2e-3 * max(1, np.abs(matrix).max()))


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: ml.TopK(0), "fraction=0: it must be a number from 1e-06 to 1"),
        (lambda: ml.Threshold(0.1, refresh=0), "refresh=0: it must be an integer"),
        (lambda: ml.Threshold(2), "fraction=2"),
        (lambda: ml.RandomBlocks(0.5), "ratio=0.5"),
        (lambda: ml.RandomBlocks(2, block=1.5), "block=1.5"),  # type: ignore[arg-type]
        (lambda: ml.Quantise(3), "bits=3: it must be 8, 4 or 2"),
        (lambda: ml.PowerSGD(0), "rank=0"),
        (lambda: ml.TopK(0.1).encode(np.ones((2, 2))), "one-dimensional"),
        (lambda: ml.Float16().decode(np.zeros(3, np.uint8), 1), "3 bytes"),
        (lambda: ml.Quantise().decode(np.zeros(3, np.uint8), 1), "3 elements"),
        (lambda: ml.RandomBlocks(1).decode(np.zeros(8, np.uint8), 1), "2 elements"),
        (lambda: ml.TopK(0.1).decode(np.full(8, 1, np.uint8), 1), "not below 1"),
    ],
)
def test_arguments_out_of_range_are_a_value_error(make: Any, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        make()
