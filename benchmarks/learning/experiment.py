"""The types of experiments and of their results.

Each other module of this folder that has a constant EXPERIMENT is an experiment. The programs that
run on the emulated hosts are in `programs/`.
"""

from __future__ import annotations

import dataclasses
import importlib
import pkgutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["Experiment", "Line", "Measure", "Outcome", "experiments"]


@dataclasses.dataclass(frozen=True)
class Measure:
    """A measured value. `kind`: "ratio of times", "ratio of rates", "accuracy", "bytes", ..."""

    what: str
    value: float
    kind: str
    target: float | None = None
    at_least: bool = True  # the target is a lower bound

    @property
    def reached(self) -> bool | None:
        if self.target is None:
            return None
        return self.value >= self.target if self.at_least else self.value <= self.target


@dataclasses.dataclass(frozen=True)
class Line:
    """A curve of the experiment's figure: (x, y) points."""

    label: str
    points: Sequence[tuple[float, float]]


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The result of one run of an experiment.

    measures: the figures of the table. lines, x, y: the curves of the figure, the unit
    of x, and what y is. setup: hosts, bandwidth, batch size, CPU of a host, compute seconds, seeds.
    limits: where the effect does not hold, one sentence each."""

    measures: Sequence[Measure]
    setup: dict[str, Any]
    limits: Sequence[str]
    lines: Sequence[Line] = ()
    x: str = "s"
    y: str = ""


@dataclasses.dataclass(frozen=True)
class Experiment:
    """A named experiment. `run(quick)` measures; quick: a few seconds, for tests of the program."""

    name: str
    title: str
    source: str  # the paper, and its headline figure
    run: Callable[[bool], Outcome]


def experiments() -> dict[str, Experiment]:
    """All experiments by name, in the order of their names."""
    folder = Path(__file__).parent
    found: dict[str, Experiment] = {}
    for info in pkgutil.iter_modules([str(folder)]):
        if info.name.startswith("_") or info.ispkg:
            continue
        module = importlib.import_module(f"benchmarks.learning.{info.name}")
        experiment = getattr(module, "EXPERIMENT", None)
        if experiment is not None:
            found[experiment.name] = experiment
    return found
