"""The functions that workers run. Spawned workers and loky import this module by name."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Any

import numpy as np

import hoplite_mp

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    Floats = NDArray[np.float32]


def echo(value: Any) -> Any:
    """The no-op; it returns its argument so that every call can be checked."""
    return value


def report_pid(pause: float) -> int:
    """Who runs this, after a pause in which the other workers take their tasks."""
    time.sleep(pause)
    return os.getpid()


def probe(array: Floats, stride: int) -> Floats:
    """Some elements of an array: reads next to nothing, and shows whether the bytes are right."""
    return array[::stride].copy()


def make(size: int, value: float) -> Floats:
    """An array whose first two elements hold the seconds that it took to make."""
    began = time.perf_counter()
    array = np.empty(size, np.float32)
    return _fill(array, value, began)


def make_in_store(size: int, value: float) -> Floats:
    """The same in the cluster's store."""
    began = time.perf_counter()
    array = hoplite_mp.current().empty(size, np.float32)
    return _fill(array, value, began)


def _fill(array: Floats, value: float, began: float) -> Floats:
    array.fill(value)
    array[:2].view(np.float64)[0] = time.perf_counter() - began
    return array


def own_seconds(array: Floats) -> float:
    """What `make` and `make_in_store` wrote down."""
    return float(array[:2].view(np.float64)[0])


def get_and_read(ref: Any) -> tuple[float, float, float, int]:
    """Seconds of a get, of the first full read, of a second one, and the xor of all words."""
    cluster = hoplite_mp.current()
    t0 = time.perf_counter()
    array = cluster.get(ref)
    t1 = time.perf_counter()
    words = array.view(np.uint64)
    first = np.bitwise_xor.reduce(words)
    t2 = time.perf_counter()
    second = np.bitwise_xor.reduce(words)
    t3 = time.perf_counter()
    assert first == second
    return t1 - t0, t2 - t1, t3 - t2, int(first)


def get_each(refs: list[Any]) -> tuple[list[float], list[float]]:
    """Seconds of the get of each ref, and the first element of each value."""
    cluster = hoplite_mp.current()
    seconds, values = [], []
    for ref in refs:
        began = time.perf_counter()
        array = cluster.get(ref)
        seconds.append(time.perf_counter() - began)
        values.append(float(array[0]))
    return seconds, values


def stream_of(size: int, count: int) -> Iterator[Floats]:
    """One array over and over, told apart by its first element: each item is copied once."""
    array = np.ones(size, np.float32)
    for number in range(count):
        array[0] = number
        yield array


def stream_in_store(size: int, count: int) -> Iterator[Floats]:
    """Arrays of the cluster's store, of which next to nothing is written."""
    for number in range(count):
        array = hoplite_mp.current().empty(size, np.float32)
        array[0] = number
        yield array
