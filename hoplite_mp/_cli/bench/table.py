"""Rows of measured numbers, how they are measured, and how they are shown.

All rows are measured in the same way, in turns, and "ratio" has one meaning for all of them: how
many times as fast this library is as the reference.
"""

from __future__ import annotations

import dataclasses
import json
import math
import platform
import statistics
import time
from typing import TYPE_CHECKING, Any

import numpy as np

from hoplite_mp._common.machine_limits import cpu_count
from hoplite_mp._version import __version__

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

__all__ = ["BenchRow", "Effort", "in_turns", "median", "percentile", "show", "write"]

median = statistics.median

UNITS = {"s", "1/s", "B/s"}
SMALLER_IS_FASTER = {"s"}


@dataclasses.dataclass(frozen=True, slots=True)
class BenchRow:
    """One line. unit: "s", "1/s" or "B/s"; reference: the name of what the other value measures."""

    title: str
    value: float
    unit: str
    reference: str = ""
    reference_value: float | None = None

    def __post_init__(self) -> None:
        assert self.unit in UNITS

    @property
    def ratio(self) -> float | None:
        """How many times as fast as the reference; None if there is none."""
        if self.reference_value is None:
            return None
        if self.unit in SMALLER_IS_FASTER:
            return self.reference_value / self.value
        return self.value / self.reference_value

    def as_dict(self) -> dict[str, Any]:
        """For the JSON file."""
        return {**dataclasses.asdict(self), "ratio": self.ratio}


@dataclasses.dataclass(frozen=True, slots=True)
class Effort:
    """How long something is measured: for `seconds`, but at least `rounds_min` rounds."""

    seconds: float
    rounds_min: int

    def part(self, share: float) -> Effort:
        """The effort for one benchmark, which has that share of the time."""
        return dataclasses.replace(self, seconds=self.seconds * share)


def in_turns(effort: Effort, *contestants: Callable[[], float]) -> list[list[float]]:
    """The seconds that each contestant reports, round by round. They take turns, so that whatever
    else happens on the host affects them alike. The first round warms up and is discarded."""
    for contestant in contestants:
        contestant()
    times: list[list[float]] = [[] for _ in contestants]
    end = time.monotonic() + effort.seconds
    while len(times[0]) < effort.rounds_min or time.monotonic() < end:
        for contestant, into in zip(contestants, times, strict=True):
            into.append(contestant())
    return times


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value such that at least that share of all values is not above it."""
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


def show(rows: Sequence[BenchRow]) -> str:
    """The table."""
    head = ("", "hoplite_mp", "", "beside it", "times as fast")
    cells: list[tuple[str, ...]] = [head]
    for row in rows:
        ratio = "" if row.ratio is None else f"{row.ratio:.2f}"
        other = "" if row.reference_value is None else _shown(row.reference_value, row.unit)
        cells.append((row.title, _shown(row.value, row.unit), other, row.reference, ratio))
    if all(row.reference_value is None for row in rows):
        cells = [line[:2] for line in cells]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    left = (True, False, False, True, False)[: len(widths)]
    lines = []
    for line in cells:
        columns = zip(line, widths, left, strict=True)
        lines.append("  ".join(c.ljust(w) if side else c.rjust(w) for c, w, side in columns))
    return "\n".join(line.rstrip() for line in lines)


def _shown(value: float, unit: str) -> str:
    """With a unit, and three significant digits."""
    if unit == "1/s":
        return f"{value:,.0f} /s".replace(",", " ")
    if unit == "B/s":
        return f"{_digits(value / 1e6)} MB/s"
    for name, factor in (("s", 1.0), ("ms", 1e3), ("µs", 1e6)):
        if value * factor >= 1 or name == "µs":
            return f"{_digits(value * factor)} {name}"
    raise AssertionError


def _digits(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def write(path: Path, rows: Sequence[BenchRow], conditions: Mapping[str, Any]) -> None:
    """Writes a JSON file with the rows, the conditions, and the machine and software that were
    measured. OSError."""
    content = {
        "hoplite_mp": __version__,
        "python": platform.python_version(),
        "numpy": np.__version__,
        "machine": platform.machine(),
        "kernel": platform.release(),
        "cpus": cpu_count(),
        **conditions,
        "rows": [row.as_dict() for row in rows],
    }
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
