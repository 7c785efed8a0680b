"""Asynchronous SGD with a parameter server, the first half of the gradients in each step.

This module lists the cases of examples/applications/asynchronous_sgd/.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from benchmarks.applications.cases import Application, Case, Comparison, Picture
from benchmarks.common import MIB

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["APPLICATION", "links", "rate"]

PROGRAMS = {"ours": "ours", "ray+ours": "ray_with_ours", "ray": "ray_alone", "dask": "dask_alone"}
FOLDER = "examples.applications.asynchronous_sgd"
SIZES = ((8, 50), (4, 50), (8, 5), (4, 5), (4, 200))
SECONDS = {5: 30, 50: 60, 200: 120}
QUICK_S = {5: 8, 50: 15, 200: 30}
# Hosts and MB -> what is to be reached: ours and Ray with ours beside Ray, ours beside Dask.
TARGETS = {(8, 50): (2.5, 2.0, 2.5)}


def rate(result: dict[str, Any]) -> float:
    """Steps per second."""
    steps = result["steps"]
    return (len(steps) - 1) / (steps[-1] - steps[0])


def links(hosts: int) -> float:
    """What the links allow. Half of n hosts are taken in a step, among them the server's own as
    often as another. A server that talks to each of the others moves that many arrays over its
    link, each way. Here it moves one, and a host that is taken, which it is in every second step,
    at most two: sums on their way, and weights."""
    return hosts / 2 * (hosts - 1) / hosts


def _name(system: str, hosts: int, size: float) -> str:
    return f"sgd-{hosts}x{size:g}-{system}"


def _cases() -> Iterator[Case]:
    for hosts, size in SIZES:
        for system in PROGRAMS:
            yield _case(_name(system, hosts, size), system, hosts, size)
    # Once with TLS, which Ray and Dask do not have by default.
    yield _case(f"{_name('ours', 8, 50)}-tls", "ours", 8, 50, {"tls": True})


def _case(
    name: str, system: str, hosts: int, size: int, more: dict[str, Any] | None = None
) -> Case:
    memory = max(1024, size * 16) * MIB
    inside = {"memory": memory} if system == "ray+ours" else {}
    return Case(
        name,
        system,
        hosts,
        f"{FOLDER}.{PROGRAMS[system]}",
        {"megabytes": size, "seconds": SECONDS[size]} | inside | (more or {}),
        {"seconds": QUICK_S[size]},
        memory=memory,
        patience_s=240.0 + 2 * SECONDS[size],
        tls=more is not None,
        size=size,
    )


def _comparisons() -> Iterator[Comparison]:
    pairs = (("ours", "ray"), ("ray+ours", "ray"), ("ours", "dask"))
    for hosts, size in SIZES:
        wanted = TARGETS.get((hosts, size), (None, None, None))
        for (mine, other), target in zip(pairs, wanted, strict=True):
            title = f"{size} MB, {hosts} hosts, steps: {mine}"
            names = _name(mine, hosts, size), _name(other, hosts, size)
            yield Comparison(title, *names, rate, "1/s", target, links=links(hosts))
    names = f"{_name('ours', 8, 50)}-tls", _name("ours", 8, 50)
    yield Comparison("50 MB, 8 hosts, steps: ours with TLS", *names, rate, "1/s")


def accuracy(result: dict[str, Any]) -> list[tuple[float, float]]:
    """Share of test images that are recognized, over seconds."""
    first = result["accuracy"][0][0]
    return [(at - first, share) for at, share in result["accuracy"]]


def _pictures() -> Iterator[Picture]:
    for hosts, size in ((8, 50), (8, 5)):
        yield Picture(
            f"accuracy_{size}",
            f"Accuracy on Fashion-MNIST, {size} MB of weights, {hosts} hosts",
            "share recognized",
            tuple(_name(system, hosts, size) for system in PROGRAMS),
            accuracy,
        )


APPLICATION = Application(
    "Asynchronous SGD", tuple(_cases()), tuple(_comparisons()), tuple(_pictures())
)
