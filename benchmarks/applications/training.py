"""Synchronous training: DistributedDataParallel on this library, and torch's own on Gloo.

This module lists the cases of examples/applications/synchronous_training/.
"""

from __future__ import annotations

import itertools
import statistics
from typing import TYPE_CHECKING, Any

from benchmarks.applications.cases import Application, Case, Comparison, Picture
from benchmarks.common import MIB
from tests.lan import DEVICE

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["APPLICATION", "KILL_AT", "last_loss", "longest", "step_s"]

PROGRAMS = {"ours": "ours", "none": "gloo"}
MEGABYTES = 50
HOSTS = (8, 4)
STEPS, QUICK_STEPS = 60, 20
KILL_AT, KILLED_STEPS = 50, 120
QUICK_KILL_AT, QUICK_KILLED_STEPS = 10, 40
WARM_UP = 5
LAST = 20  # steps whose mean loss is told
ENV = {"GLOO_SOCKET_IFNAME": DEVICE}  # by itself it looks for the host's name, and finds loopback


def _took(result: dict[str, Any]) -> list[float]:
    return [later - sooner for sooner, later in itertools.pairwise(result["steps"][WARM_UP:])]


def step_s(result: dict[str, Any]) -> float:
    """The median, without the first steps."""
    return statistics.median(_took(result))


def longest(result: dict[str, Any]) -> float:
    """The longest step."""
    return max(_took(result))


def last_loss(result: dict[str, Any]) -> float:
    """The mean of rank 0 in the last steps."""
    return statistics.fmean(result["losses"][-LAST:])


def _name(hosts: int, system: str, killed: bool) -> str:
    return f"training{'-killed' if killed else ''}-{hosts}x{MEGABYTES}-{system}"


def _case(hosts: int, system: str, killed: bool | None) -> Case:
    """killed: None is the undisturbed run of as many steps."""
    steps = KILLED_STEPS if killed is not False else STEPS
    quick = QUICK_KILLED_STEPS if killed is not False else QUICK_STEPS
    arguments: dict[str, Any] = {"megabytes": MEGABYTES, "steps": steps}
    less: dict[str, Any] = {"steps": quick}
    if killed:
        arguments["kill_at"], less["kill_at"] = KILL_AT, QUICK_KILL_AT
    name = f"training-undisturbed-{hosts}x{MEGABYTES}-{system}"
    return Case(
        name if killed is None else _name(hosts, system, killed),
        system,
        hosts,
        f"examples.applications.synchronous_training.{PROGRAMS[system]}",
        arguments,
        less,
        memory=512 * MIB,
        patience_s=240.0 + 4 * steps,
        env=ENV,
        size=MEGABYTES,
        label="ours, undisturbed" if killed is None else "",
        everywhere=system == "none",
    )


def _cases() -> Iterator[Case]:
    for hosts, system in itertools.product(HOSTS, PROGRAMS):
        yield _case(hosts, system, False)
    for system in PROGRAMS:
        yield _case(4, system, True)
    yield _case(4, "ours", None)


def _comparisons() -> Iterator[Comparison]:
    for hosts in HOSTS:
        names = [_name(hosts, one, False) for one in PROGRAMS]
        title = f"{MEGABYTES} MB, {hosts} hosts, a step: ours"
        yield Comparison(title, *names, step_s, "s", 1.15, "<=", links=1.0)
    killed, undisturbed = _name(4, "ours", True), f"training-undisturbed-4x{MEGABYTES}-ours"
    yield Comparison(
        "a rank killed, 4 hosts, the longest step: ours", killed, None, longest, "s", 2.5, "<="
    )
    yield Comparison(
        "the same, loss at the end, beside the undisturbed run", killed, undisturbed, last_loss,
        "", 1.1, "<=",
    )  # fmt: skip


def _curve(result: dict[str, Any]) -> list[tuple[float, float]]:
    """Rank 0's loss, a mean of the last ten steps, over the seconds since the first step."""
    steps, losses = result["steps"], result["losses"]
    return [
        (at - steps[0], statistics.fmean(losses[max(0, number - 9) : number + 1]))
        for number, at in enumerate(steps)
    ]


def _marks(result: dict[str, Any]) -> dict[str, float]:
    """When a rank was missing first, and when it took part again."""
    found: dict[str, float] = {}
    before = result["ranks"][0]
    for at, ranks in zip(result["steps"], result["ranks"], strict=True):
        if ranks != before:
            found["a rank is killed" if ranks < before else "it is back"] = at - result["steps"][0]
        before = ranks
    return found


PICTURE = Picture(
    "training-killed",
    f"{MEGABYTES} MB of gradients, 4 hosts: a rank is killed",
    "loss",
    (
        _name(4, "ours", True),
        f"training-undisturbed-4x{MEGABYTES}-ours",
        _name(4, "none", True),
    ),
    _curve,
    _marks,
)

APPLICATION = Application(
    "Synchronous training", tuple(_cases()), tuple(_comparisons()), (PICTURE,)
)
