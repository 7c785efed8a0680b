"""Common parts of the benchmarks: result rows, measurements in turns, and the workers' tasks.

This library and the reference are measured in turns. "ratio" is this library's speed divided by the
reference's speed. All workers, also the workers of the standard library's pools, import the tasks
from this module, so it imports few other modules.
"""

from __future__ import annotations

import dataclasses
import math
import os
import time
from typing import TYPE_CHECKING, Any

import numpy as np

from hoplite_mp._api.cluster import current

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    Floats = NDArray[np.float32]

UNITS = {"s", "1/s", "B/s"}
SMALLER_IS_FASTER = {"s"}
STRIDE = 4099  # every STRIDE-th element is checked, at almost no cost


@dataclasses.dataclass(frozen=True, slots=True)
class BenchRow:
    """One row of the results. `unit`: one of UNITS. `reference`: the name of the reference."""

    title: str
    value: float
    unit: str
    reference: str = ""
    reference_value: float | None = None

    def __post_init__(self) -> None:
        assert self.unit in UNITS

    @property
    def ratio(self) -> float | None:
        """This library's speed divided by the reference's speed; None without a reference."""
        if self.reference_value is None:
            return None
        if self.unit in SMALLER_IS_FASTER:
            return self.reference_value / self.value
        return self.value / self.reference_value

    def as_dict(self) -> dict[str, Any]:
        """The row for the JSON file."""
        return {**dataclasses.asdict(self), "ratio": self.ratio}


@dataclasses.dataclass(frozen=True, slots=True)
class Effort:
    """The duration of a measurement: `seconds`, or longer if `rounds_min` rounds take longer."""

    seconds: float
    rounds_min: int

    def part(self, share: float) -> Effort:
        """The effort for a benchmark that gets this share of the time."""
        return dataclasses.replace(self, seconds=self.seconds * share)


def in_turns(effort: Effort, *contestants: Callable[[], float]) -> list[list[float]]:
    """The seconds that each contestant returns in each round. The contestants take turns, so that
    other activity on the host affects all of them alike. The first round is a warm-up, and its
    times are discarded."""
    for contestant in contestants:
        contestant()
    times: list[list[float]] = [[] for _ in contestants]
    end = time.monotonic() + effort.seconds
    while len(times[0]) < effort.rounds_min or time.monotonic() < end:
        for contestant, into in zip(contestants, times, strict=True):
            into.append(contestant())
    return times


def percentile(values: Sequence[float], share: float) -> float:
    """The percentile of the values: the smallest value such that at least this share of all values
    is not above it."""
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


def echo(value: Any) -> Any:
    """The no-op. Its result proves that it has run."""
    return value


def pid_after(pause: float) -> int:
    """The worker's pid, after a pause in which the other workers take their tasks."""
    time.sleep(pause)
    return os.getpid()


def probe(array: Floats) -> Floats:
    """Some of the elements."""
    return array[::STRIDE].copy()


def get_and_probe(ref: Any) -> tuple[float, Floats]:
    """Gets the array in this process. Returns the duration of `get` in seconds, and some elements
    of the array."""
    began = time.perf_counter()
    array = current().get(ref)
    return time.perf_counter() - began, probe(array)


def make(size: int, number: int) -> Floats:
    """An array of small whole numbers in this host's store; sums of such arrays are exact."""
    array = current().empty(size, np.float32)
    array[:] = np.arange(size, dtype=np.int64) % 1009 + number
    return array
