"""Reinforcement learning: IMPALA and A3C, each with the first half of the samplers in a step.

This module lists the cases of examples/applications/impala/ and examples/applications/a3c/.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from benchmarks.applications.cases import Application, Case, Comparison, Picture
from benchmarks.common import MIB

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["ALGORITHMS", "APPLICATION", "PROGRAMS", "links", "rate", "reached"]

PROGRAMS = {"ours": "ours", "ray+ours": "ray_with_ours", "ray": "ray_alone", "dask": "dask_alone"}
ALGORITHMS = {"impala": "IMPALA", "a3c": "A3C"}
PAIRS = (("ours", "ray"), ("ray+ours", "ray"), ("ours", "dask"))
# By number of hosts, for each of the pairs.
TARGETS = {8: (2.5, 2.0, 2.5), 4: (1.6, 1.6, 1.6)}
CARTPOLE, ACROBOT = "CartPole-v1", "Acrobot-v1"
MEGABYTES = 50
SECONDS, QUICK_S = 60.0, 20.0


def rate(result: dict[str, Any]) -> float:
    """Samples per second that the learner has learned from."""
    steps = result["steps"]
    return float(sum(result["samples"][1:]) / (steps[-1] - steps[0]))


def reached(result: dict[str, Any]) -> float:
    """The mean return at the end."""
    return float(result["returns"][-1])


def links(hosts: int) -> float:
    """What the links allow. Half of the samplers, k of n - 1, are taken in a step. A learner that
    talks to each of them moves k policies over its link, and of A3C as many gradients the other
    way. Here it moves one. The samplers then move at most 2 k - 1 in each step together, which is
    not more than one for each of them."""
    return hosts // 2


def _name(algorithm: str, environment: str, hosts: int, system: str) -> str:
    acrobot = "-acrobot" if environment == ACROBOT else ""
    return f"{algorithm}{acrobot}-{hosts}x{MEGABYTES}-{system}"


def _case(algorithm: str, environment: str, hosts: int, system: str) -> Case:
    return Case(
        _name(algorithm, environment, hosts, system),
        system,
        hosts,
        f"examples.applications.{algorithm}.{PROGRAMS[system]}",
        {"environment": environment, "megabytes": MEGABYTES, "seconds": SECONDS},
        {"seconds": QUICK_S},
        memory=1024 * MIB,
        patience_s=300.0 + 2 * SECONDS,
        size=MEGABYTES,
    )


def _cases() -> Iterator[Case]:
    for algorithm in ALGORITHMS:
        for hosts in TARGETS:
            for system in PROGRAMS:
                yield _case(algorithm, CARTPOLE, hosts, system)
        for system in ("ours", "ray"):
            yield _case(algorithm, ACROBOT, 8, system)


def _comparisons() -> Iterator[Comparison]:
    for algorithm, called in ALGORITHMS.items():
        for hosts, targets in TARGETS.items():
            for (mine, other), target in zip(PAIRS, targets, strict=True):
                names = [_name(algorithm, CARTPOLE, hosts, one) for one in (mine, other)]
                title = f"{called}, CartPole, {hosts} hosts, samples: {mine}"
                yield Comparison(title, *names, rate, "1/s", target, links=links(hosts))
        names = [_name(algorithm, ACROBOT, 8, one) for one in ("ours", "ray")]
        yield Comparison(
            f"{called}, Acrobot, 8 hosts, samples: ours", *names, rate, "1/s", links=links(8)
        )
        for environment, wanted in ((CARTPOLE, 100.0), (ACROBOT, -150.0)):
            title = f"{called}, {environment}, 8 hosts, mean return at the end: ours"
            name = _name(algorithm, environment, 8, "ours")
            yield Comparison(title, name, None, reached, "", wanted)


def _curve(sign: int) -> Callable[[dict[str, Any]], list[tuple[float, float]]]:
    """The mean return after each step, over the seconds since the first one."""

    def points(result: dict[str, Any]) -> list[tuple[float, float]]:
        pairs = zip(result["steps"], result["returns"], strict=True)
        return [(at - result["steps"][0], sign * value) for at, value in pairs if value is not None]

    return points


def _pictures() -> Iterator[Picture]:
    for algorithm, called in ALGORITHMS.items():
        yield Picture(
            f"{algorithm}-cartpole",
            f"{called}, CartPole, a policy of {MEGABYTES} MB, 8 hosts",
            "mean return of the last 100 episodes",
            tuple(_name(algorithm, CARTPOLE, 8, system) for system in PROGRAMS),
            _curve(1),
        )
        yield Picture(
            f"{algorithm}-acrobot",
            f"{called}, Acrobot, a policy of {MEGABYTES} MB, 8 hosts",
            "steps to the goal, mean of the last 100 episodes: the fewer the better",
            tuple(_name(algorithm, ACROBOT, 8, system) for system in ("ours", "ray")),
            _curve(-1),
        )


APPLICATION = Application(
    "Reinforcement learning", tuple(_cases()), tuple(_comparisons()), tuple(_pictures())
)
