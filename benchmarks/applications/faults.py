"""A host dies and returns during asynchronous SGD, and while an ensemble is served.

This module lists the cases of the figure on faults in Hoplite (SIGCOMM 2021, section 6.4). A host
is killed with all its processes and its link, so no connection is closed. Later an empty host
starts at the same address. Ray runs with its default health checks, and once with frequent ones."""

from __future__ import annotations

import itertools
import time
from typing import TYPE_CHECKING, Any

from benchmarks.applications import ensemble, sgd
from benchmarks.applications.cases import Application, Case, Comparison, Picture

if TYPE_CHECKING:
    from collections.abc import Iterator

    from benchmarks.applications.beds import Bed

__all__ = ["APPLICATION", "KILLED_S", "REVIVED_S", "pause"]

VICTIM = 4  # the number of a host
KILLED_S, REVIVED_S, SECONDS = 15.0, 50.0, 100.0
PAUSE_WANTED_S = 2.5
WINDOW_S = 4.0  # of the curves
MB = {"sgd": 20, "ensemble": 20}
HOSTS = {"sgd": 8, "ensemble": 9}
MODULES = {"sgd": (sgd.FOLDER, sgd.PROGRAMS), "ensemble": (ensemble.FOLDER, ensemble.PROGRAMS)}
# As soon as a busy machine allows: one second between two checks, five that fail.
WATCHFUL = {
    "RAY_health_check_initial_delay_ms": "2000",
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "1000",
    "RAY_health_check_failure_threshold": "5",
}
SYSTEMS = {"ours": {}, "ray+ours": {}, "ray": {}, "ray-watchful": WATCHFUL}


def die_and_return(bed: Bed, begun: float) -> dict[str, float]:
    """What happens, and when it did."""
    time.sleep(max(0.0, begun + KILLED_S - time.monotonic()))
    killed = bed.kill(VICTIM)
    time.sleep(max(0.0, begun + REVIVED_S - time.monotonic()))
    return {"killed": killed, "revived": bed.revive(VICTIM)}


def pause(result: dict[str, Any]) -> float:
    """The longest time without progress between the death and the new host."""
    return _longest(result, result["incidents"]["killed"], result["incidents"]["revived"])


def pause_before(result: dict[str, Any]) -> float:
    """The same while nothing happens."""
    return _longest(result, 0.0, result["incidents"]["killed"])


def _longest(result: dict[str, Any], begin: float, end: float) -> float:
    steps = result["steps"]
    times = [one for one in steps if begin < one]
    times = [one for one in times if one < end] + [one for one in times if one >= end][:1]
    before = [one for one in steps if one <= begin][-1:]
    if not times:
        return end - begin
    times = before + times
    return max(b - a for a, b in itertools.pairwise(times))


def _name(application: str, system: str) -> str:
    return f"faults-{application}-{system}"


def _cases() -> Iterator[Case]:
    for application, (folder, programs) in MODULES.items():
        for name, env in SYSTEMS.items():
            system = "ray" if env else name
            yield Case(
                _name(application, name),
                system,
                HOSTS[application],
                f"{folder}.{programs[system]}",
                {"megabytes": MB[application], "seconds": SECONDS},
                patience_s=600.0,
                incidents=die_and_return,
                env=env,
                label="Ray, watchful" if env else "",
                size=MB[application],
            )


def _comparisons() -> Iterator[Comparison]:
    for application, words in (("sgd", "asynchronous SGD"), ("ensemble", "serving")):
        title = f"{words}, a host dies: time without progress"
        yield Comparison(title, _name(application, "ours"), None, pause, "s", PAUSE_WANTED_S, "<=")
        for other in ("ray", "ray-watchful"):
            names = _name(application, "ours"), _name(application, other)
            more = ", Ray's checks each second" if other != "ray" else ""
            yield Comparison(f"{title}{more}", *names, pause, "s")
        title = f"{words}, a host dies: time without progress, Ray with ours"
        yield Comparison(
            title, _name(application, "ray+ours"), _name(application, "ray"), pause, "s"
        )
        title = f"{words}, the longest step before that"
        yield Comparison(
            title, _name(application, "ours"), _name(application, "ray"), pause_before, "s"
        )


def throughput(result: dict[str, Any]) -> list[tuple[float, float]]:
    """Steps per second around each half second since the beginning: the mean of WINDOW_S."""
    times = [at - result["steps"][0] for at in result["steps"]]
    found, middle = [], WINDOW_S / 2
    while middle + WINDOW_S / 2 <= times[-1]:
        count = sum(abs(at - middle) <= WINDOW_S / 2 for at in times)
        found.append((middle, count / WINDOW_S))
        middle += 0.5
    return found


def marks(result: dict[str, Any]) -> dict[str, float]:
    """What was done to the host."""
    words = {"killed": "a host dies", "revived": "a new one starts"}
    return {words[what]: at - result["steps"][0] for what, at in result["incidents"].items()}


def _pictures() -> Iterator[Picture]:
    for application, y in (("sgd", "steps in a second"), ("ensemble", "requests in a second")):
        words = {"sgd": "Asynchronous SGD", "ensemble": "Serving an ensemble"}[application]
        yield Picture(
            f"faults_{application}",
            f"{words}, {MB[application]} MB, {HOSTS[application]} hosts: one dies and comes back",
            y,
            tuple(_name(application, system) for system in SYSTEMS),
            throughput,
            marks,
        )


APPLICATION = Application(
    "A host dies and comes back", tuple(_cases()), tuple(_comparisons()), tuple(_pictures())
)
