"""The tasks of the benchmarks, for our workers and for those of the standard library.

Spawned workers import it by name, so it is a module of its own that imports little.
"""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Any

import numpy as np

from hoplite_mp._api.cluster import current

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Floats = NDArray[np.float32]

STRIDE = 4099  # one of so many elements is checked, which costs next to nothing


def echo(value: Any) -> Any:
    """The no-op. Its result shows that the call was made."""
    return value


def pid_after(pause: float) -> int:
    """The worker's pid, after a pause in which the other workers take their tasks."""
    time.sleep(pause)
    return os.getpid()


def probe(array: Floats) -> Floats:
    """Some of the elements."""
    return array[::STRIDE].copy()


def get_and_probe(ref: Any) -> tuple[float, Floats]:
    """(seconds of a get in this process, some elements of the array)."""
    began = time.perf_counter()
    array = current().get(ref)
    return time.perf_counter() - began, probe(array)


def make(size: int, number: int) -> Floats:
    """An array in this host's store, with small whole numbers, whose sums are exact."""
    array = current().empty(size, np.float32)
    array[:] = np.arange(size, dtype=np.int64) % 1009 + number
    return array
