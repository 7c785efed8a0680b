"""Aimed runs: one short program on real nodes in virtual time, alone, with the one fault at the one
moment that its promise is about.

    python -m tests.aimed NAME SEED
"""

from __future__ import annotations

import contextlib
import dataclasses
from random import Random
from typing import TYPE_CHECKING

from tests.aimed import (
    actors,
    bounded,
    copies,
    ends,
    learning,
    losses,
    managers,
    members,
    objects,
    peers,
    plans,
    reductions,
    tasks,
)
from tests.aimed.aim import Aim
from tests.support.bounded_threads import simulated_threads

if TYPE_CHECKING:
    from collections.abc import Callable

    from hoplite_mp._simulation.runs import RunOutcome
    from hoplite_mp._simulation.workloads.workload import Workload

__all__ = ["ALL", "run_aimed"]

ALL: dict[str, Callable[[Aim], None]] = {
    name: getattr(module, name)
    for module in (
        objects,
        copies,
        tasks,
        peers,
        reductions,
        members,
        managers,
        actors,
        ends,
        losses,
        bounded,
        plans,
        learning,
    )
    for name in module.__all__
}
NODES = 6
NODES_OF = {"tree": 12, "moved_twice": 10, "no_room": 4, "back": 3, "bound": 3}
ROOMY = dict.fromkeys(
    ("relieved", "relieved_of_results", "one_late", "packed", "replanned"), 192 << 20
)
STORE_OF = {**dict.fromkeys(("in_chunks", "no_room", "refused", "repeated_full"), 6 << 20), **ROOMY}
WITH_STANDBY = {"back", "bound"}
WITH_THREADS = {"bounded", "bounded_deaths"}


def run_aimed(name: str, seed: int) -> RunOutcome:
    """Plays one of them. The seed draws the network, the hosts, and what the program leaves
    open."""
    from hoplite_mp._simulation.runs import run_seed

    aims: list[Aim] = []
    threads = name in WITH_THREADS

    def begin(work: Workload) -> None:
        aims.append(Aim(work, Random(f"aimed {seed}")))
        ALL[name](aims[0])

    try:
        with simulated_threads() if threads else contextlib.nullcontext():
            outcome = run_seed(
                seed,
                nodes=NODES_OF.get(name, NODES),
                faults=False,
                begin=begin,
                store=STORE_OF.get(name),
                standby=name in WITH_STANDBY,
                collectors=threads,
            )
    finally:
        aims[0].changes.close()
    if not outcome.failure and aims[0].missed:
        return dataclasses.replace(outcome, failure=f"missed: {', '.join(aims[0].missed)}")
    return outcome
