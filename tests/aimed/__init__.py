"""Aimed runs: one short program on real nodes in virtual time, alone, with the one fault at the one
moment that its promise is about.

    python -m tests.aimed NAME SEED
"""

from __future__ import annotations

import dataclasses
from random import Random
from typing import TYPE_CHECKING

from tests.aimed import copies, members, objects, reductions, tasks
from tests.aimed.aim import Aim

if TYPE_CHECKING:
    from collections.abc import Callable

    from hoplite_mp.simulation.cluster.runs import Outcome
    from hoplite_mp.simulation.cluster.workload import Workload

__all__ = ["ALL", "run_aimed"]

ALL: dict[str, Callable[[Aim], None]] = {
    name: getattr(module, name)
    for module in (objects, copies, tasks, reductions, members)
    for name in module.__all__
}
NODES = 6
NODES_OF = {"tree": 12, "no_room": 4}


def run_aimed(name: str, seed: int) -> Outcome:
    """Plays one of them. The seed draws the network, the hosts, and what the program leaves
    open."""
    from hoplite_mp.simulation.cluster.runs import run_seed

    aims: list[Aim] = []

    def begin(work: Workload) -> None:
        aims.append(Aim(work, Random(f"aimed {seed}")))
        ALL[name](aims[0])

    outcome = run_seed(seed, nodes=NODES_OF.get(name, NODES), faults=False, begin=begin)
    if not outcome.failure and aims[0].unsprung:
        missed = f"no {', '.join(aims[0].unsprung)} at which a fault was to strike"
        return dataclasses.replace(outcome, failure=missed)
    return outcome
