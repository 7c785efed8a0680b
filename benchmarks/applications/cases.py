"""The cases that are measured, and the comparisons between them.

Each application is a module of this package that lists its cases and comparisons. A case is one
program on one system. Its result is saved in a separate file, so an interrupted run can be
continued."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from benchmarks.common import MIB

if TYPE_CHECKING:
    from collections.abc import Callable

    from benchmarks.applications.beds import Bed

__all__ = ["NAMES", "Application", "Case", "Comparison", "Picture"]

NAMES = {
    "ours": "ours",
    "ray+ours": "Ray with ours",
    "ray": "Ray",
    "dask": "Dask",
    "none": "Gloo",
}


@dataclasses.dataclass(frozen=True)
class Case:
    """One program on one system, with everything that it needs."""

    name: str
    """Of its file; also what `-k` looks at."""
    system: str
    hosts: int
    module: str
    arguments: dict[str, Any]
    quick: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Instead of some of the arguments, for `--quick`."""
    memory: int = 1024 * MIB
    """Of each host's store."""
    patience_s: float = 240.0
    """From the program's start to its result."""
    tls: bool = False
    incidents: Callable[[Bed, float], dict[str, float]] | None = None
    """What happens to hosts meanwhile."""
    env: dict[str, str] = dataclasses.field(default_factory=dict)
    everywhere: bool = False
    """The program is started on each host, and told its `rank` there."""
    label: str = ""
    """In pictures and tables, where it is not the system's own name."""
    size: float = 0.0
    """MB of the array that is moved; what `--size` looks at."""


@dataclasses.dataclass(frozen=True)
class Comparison:
    """A line of the report: a number of one case beside the same of another."""

    title: str
    ours: str
    """The name of a case."""
    other: str | None
    """Beside it; None: the number alone."""
    number: Callable[[dict[str, Any]], float]
    """From a case's result."""
    unit: str
    wanted: float | None = None
    direction: str = ">="
    links: float | None = None
    """What the links allow at best: bytes over the busiest link that the other's way needs, divided
    by those that ours needs."""


@dataclasses.dataclass(frozen=True)
class Picture:
    """Lines over seconds since the beginning, one for each case that is there."""

    name: str
    """Of its file."""
    title: str
    y: str
    """What goes upwards."""
    cases: tuple[str, ...]
    points: Callable[[dict[str, Any]], list[tuple[float, float]]]
    marks: Callable[[dict[str, Any]], dict[str, float]] = lambda _: {}
    """What happened, and when; of the first case."""


@dataclasses.dataclass(frozen=True)
class Application:
    """All of one."""

    name: str
    cases: tuple[Case, ...]
    comparisons: tuple[Comparison, ...]
    pictures: tuple[Picture, ...] = ()
