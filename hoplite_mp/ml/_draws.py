"""Random choices that are the same on every host, whatever its version of numpy.

They are hashes of a seed and a counter (splitmix64; Steele, Lea and Flood, OOPSLA 2014).
"""

from __future__ import annotations

from typing import Any

import numpy as np

__all__ = ["draw_blocks", "draw_floats", "elements_of"]

Array = np.ndarray[Any, np.dtype[Any]]
MASK = (1 << 64) - 1
GOLDEN = 0x9E3779B97F4A7C15


def _mixed(seed: int, *more: int) -> int:
    """Hashes several numbers to one 64-bit number."""
    found = seed & MASK
    for one in more:
        found = int(_hashes((found ^ (one * GOLDEN)) & MASK, 1)[0])
    return found


def _hashes(seed: int, count: int) -> Array:
    """`count` pseudorandom 64-bit numbers."""
    with np.errstate(over="ignore"):
        z = np.uint64(seed & MASK) + np.arange(1, count + 1, dtype=np.uint64) * np.uint64(GOLDEN)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        found: Array = z ^ (z >> np.uint64(31))
    return found


def draw_blocks(seed: int, step: int, stripe: int, blocks: int, ratio: float) -> Array:
    """The sorted numbers of the blocks drawn in this step: one of every `ratio` blocks, and at
    least one block."""
    if not blocks:
        return np.empty(0, np.int64)
    count = max(1, round(blocks / ratio))
    order = np.argsort(_hashes(_mixed(seed, step, stripe), blocks), kind="stable")
    return np.sort(order[:count])


def draw_floats(seed: int, count: int) -> Array:
    """`count` float32 numbers from -1 to 1."""
    unit = (_hashes(_mixed(seed, 1), count) >> np.uint64(11)).astype(np.float64) / (1 << 53)
    return (2 * unit - 1).astype(np.float32)


def elements_of(seed: int, size: int, count: int) -> Array:
    """`count` positions below `size`, which may repeat."""
    return (_hashes(_mixed(seed, 2), count) % np.uint64(size)).astype(np.int64)
