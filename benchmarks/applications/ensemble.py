"""Serving an ensemble of eight models: each batch is sent to all models, one request at a time.

This module lists the cases of examples/applications/ensemble/."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING, Any

from benchmarks.applications.cases import Application, Case, Comparison
from benchmarks.common import MIB

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["APPLICATION", "FOLDER", "PROGRAMS"]

PROGRAMS = {"ours": "ours", "ray+ours": "ray_with_ours", "ray": "ray_alone", "dask": "dask_alone"}
FOLDER = "examples.applications.ensemble"
MB, MODELS, SECONDS, QUICK_S = 50, 8, 60, 20
# Hosts, the driver's among them -> what is to be reached: ours and Ray with ours beside Ray, ours
# beside Dask.
TARGETS = {9: (2.5, 2.0, 2.5), 4: (1.6, 1.6, 1.6)}
PAIRS = (("ours", "ray"), ("ray+ours", "ray"), ("ours", "dask"))
KILLED_AFTER_S = 10


def rate(result: dict[str, Any]) -> float:
    """Requests per second."""
    return len(result["steps"]) / (result["steps"][-1] - result["begun"][0])


def latencies(result: dict[str, Any]) -> list[float]:
    """Of all requests, in order."""
    return [end - begin for begin, end in zip(result["begun"], result["steps"], strict=True)]


def p50(result: dict[str, Any]) -> float:
    """The median latency."""
    return statistics.median(latencies(result))


def p99(result: dict[str, Any]) -> float:
    """What one request of a hundred exceeds; of fewer the slowest one."""
    ordered = sorted(latencies(result))
    return ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))]


def most(result: dict[str, Any]) -> float:
    """The slowest request."""
    return max(latencies(result))


def _name(system: str, hosts: int, more: str = "") -> str:
    return f"ensemble-{hosts}x{MB}{more}-{system}"


def _cases() -> Iterator[Case]:
    for hosts in TARGETS:
        for system, program in PROGRAMS.items():
            yield Case(
                _name(system, hosts),
                system,
                hosts,
                f"{FOLDER}.{program}",
                {"megabytes": MB, "models": MODELS, "seconds": SECONDS},
                {"seconds": QUICK_S},
                memory=1024 * MIB,
                patience_s=400.0,
                size=MB,
            )
    for system in ("ours", "ray+ours", "ray"):
        yield Case(
            _name(system, 9, "-killed"),
            system,
            9,
            f"{FOLDER}.{PROGRAMS[system]}",
            {"megabytes": MB, "models": MODELS, "seconds": SECONDS, "kill_s": KILLED_AFTER_S},
            {"seconds": QUICK_S, "kill_s": QUICK_S / 3},
            patience_s=400.0,
            size=MB,
        )


def _comparisons() -> Iterator[Comparison]:
    for hosts, wanted in TARGETS.items():
        for (mine, other), target in zip(PAIRS, wanted, strict=True):
            title = f"{MODELS} models, {hosts} hosts, {MB} MB: {mine}, requests"
            names = _name(mine, hosts), _name(other, hosts)
            # One copy for each host that has models goes out of the driver's, or one in all.
            yield Comparison(title, *names, rate, "1/s", target, links=float(hosts - 1))
        for number, word in ((p50, "p50"), (p99, "p99")):
            title = f"{MODELS} models, {hosts} hosts, {MB} MB: {word}"
            yield Comparison(title, _name("ours", hosts), _name("ray", hosts), number, "s")
    title = "a replica is killed, the slowest request"
    yield Comparison(title, _name("ours", 9, "-killed"), _name("ray", 9, "-killed"), most, "s")
    title += ", Ray with ours"
    names = _name("ray+ours", 9, "-killed"), _name("ray", 9, "-killed")
    yield Comparison(title, *names, most, "s")


APPLICATION = Application("Serving an ensemble", tuple(_cases()), tuple(_comparisons()))
