"""The arrays, timing and checks of the benchmarks inside engines.

The engine's own collectives and those of this library get the same values, are timed by the same
code, and are checked element by element, outside the timed part."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["Array", "made", "mark", "timed", "total"]

Array = np.ndarray[Any, np.dtype[np.float32]]
# Before and after each call: until the engine has done with what made the arrays, and what
# a round has left is gone. All hosts share this machine's cores.
REST_S = 0.4


def made(rank: int, turn: int, nbytes: int) -> Array:
    """Random whole numbers that every process can make again: any order of adding is exact."""
    dice = np.random.default_rng(1000 * rank + turn)
    return dice.integers(-99, 99, nbytes // 4).astype(np.float32)


def total(size: int, turn: int, nbytes: int) -> Array:
    """The sum of all ranks' arrays."""
    found = made(0, turn, nbytes)
    for rank in range(1, size):
        found += made(rank, turn, nbytes)
    return found


def mark(array: Array) -> int:
    """Of all elements; cheap beside moving them."""
    return int(array.view(np.uint32).sum(dtype=np.uint64))


def timed(calls: Mapping[str, Any], rounds: int) -> dict[str, list[float]]:
    """Seconds of each round but the first. The calls take turns, so that what else the machine does
    meets all of them."""
    found: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(rounds + 1):
        for name, prepare in calls.items():
            call = prepare(turn)
            time.sleep(REST_S)
            begun = time.perf_counter()
            check = call()
            seconds = time.perf_counter() - begun
            check()
            del call, check
            print(f"{name}: {seconds:.3f} s", file=sys.stderr, flush=True)
            if turn:
                found[name].append(seconds)
            time.sleep(REST_S)
    return found
