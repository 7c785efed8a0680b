"""What the workers run, ours and those of the standard library.

Why it exists: spawned workers import it by name, so it is a module of its own that imports little.
It must never know: who measures what.
"""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Any

import numpy as np

from hoplite_mp.cluster import current

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Floats = NDArray[np.float32]

STRIDE = 4099  # one element of so many shows whether the bytes are right, and costs next to nothing


def echo(value: Any) -> Any:
    """The no-op; what it returns shows that each call was made."""
    return value


def pid_after(pause: float) -> int:
    """Who runs this, after a pause in which the other workers take their tasks."""
    time.sleep(pause)
    return os.getpid()


def probe(array: Floats) -> Floats:
    """Some elements."""
    return array[::STRIDE].copy()


def get_and_probe(ref: Any) -> tuple[float, Floats]:
    """Seconds of a get in this process, and some elements of what it gave."""
    began = time.perf_counter()
    array = current().get(ref)
    return time.perf_counter() - began, probe(array)


def make(size: int, number: int) -> Floats:
    """An array in this host's store, with small whole numbers: their sums are exact."""
    array = current().empty(size, np.float32)
    array[:] = np.arange(size, dtype=np.int64) % 1009 + number
    return array
