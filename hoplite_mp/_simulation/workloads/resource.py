"""Tasks that need a resource of which only some hosts have any, while hosts come and go.

A task that waits for a resource begins when that is free on some host, and fails when no host has
it any more. What `wait` reports as ready is ready, whatever hosts have died since.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from hoplite_mp._simulation.oracle.oracle import WrongEnd
from hoplite_mp._simulation.oracle.values import Leaf, delayed, make_once_more
from hoplite_mp._simulation.workloads.programs import HANGS_S

if TYPE_CHECKING:
    from hoplite_mp._api.cluster import Cluster
    from hoplite_mp._simulation.workloads.programs import Programs

__all__ = ["RESOURCE", "begin_scarce"]

RESOURCE = "gpu"
TASKS_MAX = 6
NOBODY_HAS_IT = "no node of this cluster"


def begin_scarce(work: Programs) -> None:
    """Begins a program that submits some such tasks at once, waits for all, and reads results."""
    hosts, chance = work.hosts(), work.chance
    if not hosts:
        return
    salt, count = work.salt(), chance.randint(1, TASKS_MAX)
    items = work.items(2 * count)
    leaves = [Leaf(salt, index, items) for index in range(count)]
    seconds = [chance.choice([0.0, 0.01, 0.2]) * chance.random() for _ in leaves]
    retries = chance.choice([0, 3, 3])
    body = partial(_submit, work, leaves, seconds, retries)
    work.program(chance.choice(hosts), f"scarce {salt}", body)


def _submit(
    work: Programs, leaves: list[Leaf], seconds: list[float], retries: int, c: Cluster
) -> None:
    view = delayed(c, leaves[0].salt).options(resources={RESOURCE: 1}, retries=retries)
    futures: list[Any] = []
    for pair in zip(leaves, seconds, strict=True):
        try:
            futures.append(view.submit(make_once_more, *pair))
        except ValueError as error:
            if NOBODY_HAS_IT not in str(error):
                raise
            return  # the hosts that have it are gone, or have not joined yet
    ready, pending = c.wait(futures, timeout=HANGS_S)
    if pending:
        raise WrongEnd(f"{len(pending)} of {len(futures)} tasks that need {RESOURCE} hang")
    for leaf, future in zip(leaves, ready, strict=True):
        if not future.done():
            raise WrongEnd(f"{leaf} was ready for wait(), and is not")
        work.oracle.check_leaf(leaf, work.value(c, future, f"scarce {leaf.salt}"))
