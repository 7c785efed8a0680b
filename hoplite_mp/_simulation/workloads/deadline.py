"""Reductions with a deadline, and reads on hosts that have just joined.

A reduction with a deadline contains all ready sources. A host can be used as soon as it has been
admitted, even before the other hosts know about it.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from hoplite_mp._simulation.oracle.oracle import WrongEnd
from hoplite_mp._simulation.oracle.values import Leaf, WrongBytes, make_once_more

if TYPE_CHECKING:
    from hoplite_mp._api.cluster import Cluster
    from hoplite_mp._simulation.virtual.host import VirtualHost
    from hoplite_mp._simulation.workloads.programs import Programs

__all__ = ["begin_deadline", "begin_newcomer"]

READY_MAX = 6
NEVER_S = 20.0
DEADLINES_S = 0.05, 0.3
OBJECTS_MAX = 3
ADMISSION_POLL_S, ADMISSION_POLLS = 0.0005, 4000


# ---- reductions with a deadline


def begin_deadline(work: Programs) -> None:
    """Starts a reduction with a deadline. One source becomes ready long after the deadline, the
    others are ready at the call."""
    hosts, rng = work.hosts(), work.rng
    if not hosts:
        return
    salt, count = work.salt(), rng.randint(1, READY_MAX)
    items = max(1, work.items(2 * count))
    leaves = [Leaf(salt, index, items) for index in range(count + 1)]
    body = partial(_reduce_by_deadline, work, leaves, rng.choice(DEADLINES_S), rng.random() < 0.5)
    work.program(rng.choice(hosts), f"timely {salt}", body)


def _reduce_by_deadline(
    work: Programs, leaves: list[Leaf], deadline: float, on_all: bool, c: Cluster
) -> None:
    import time

    name, begun = f"timely {leaves[0].salt}", time.monotonic()
    late = c.submit(make_once_more, leaves[-1], NEVER_S)
    refs: list[Any] = [c.put(leaf.array()) for leaf in leaves[:-1]]
    both = [*refs, late.ref]
    collective = c.allreduce if on_all else c.reduce
    total = collective(both, num=len(both), deadline=deadline)
    value = np.asarray(work.value(c, total, name))
    found = tuple(sorted(total.contributors or ()))
    # The loss of a manager can delay the deadline until the last source is ready.
    ready = len(refs) + (len(found) == len(both) and time.monotonic() - begun > NEVER_S)
    whole = sum((leaf.array() for leaf in leaves[1:ready]), start=leaves[0].array())
    if found != tuple(range(ready)):
        raise WrongEnd(f"{name} has contributors {found}, and {len(refs)} were ready")
    if not np.array_equal(value, whole):
        raise WrongBytes(f"{name} is {value[:4]}")
    work.oracle.reads += 1
    late.cancel()


# ---- on a host that has just joined


def begin_newcomer(work: Programs) -> None:
    """Adds a host, which reads objects of other hosts as soon as it has been admitted."""
    hosts, rng = work.hosts(), work.rng
    if not hosts:
        return
    salt = work.salt()
    items = max(1, work.items(4))
    leaves = [Leaf(salt, index, items) for index in range(rng.randint(1, OBJECTS_MAX))]
    names = [f"for newcomer {salt}: {index}" for index in range(len(leaves))]
    for leaf, name in zip(leaves, names, strict=True):
        work.program(rng.choice(hosts), name, partial(_put, work, leaf, name))
    port = work.world.network.ports[0]
    late = 0.5 * rng.random() * work.span_s

    def join() -> None:
        _when_admitted(
            work, work.world.add_host(port.up, port.down), leaves, names, ADMISSION_POLLS
        )

    work.world.timeline.after(late, join)


def _put(work: Programs, leaf: Leaf, name: str, c: Cluster) -> None:
    ref = c.put(leaf.array())
    work.board.publish(name, ref._id)
    work.board.find(f"{name} is not needed")


def _when_admitted(
    work: Programs, host: VirtualHost, leaves: list[Leaf], names: list[str], polls: int
) -> None:
    if host.alive and host.number < 0 and polls:
        work.world.timeline.after(
            ADMISSION_POLL_S, _when_admitted, work, host, leaves, names, polls - 1
        )
        return
    if not host.alive or host.number < 0:
        for name in names:
            work.board.publish(f"{name} is not needed", None)
        return
    for leaf, name in zip(leaves, names, strict=True):
        work.program(host, f"reader of {name}", partial(_read, work, leaf, name))


def _read(work: Programs, leaf: Leaf, name: str, c: Cluster) -> None:
    try:
        ref = work.ref(c, name)
        if ref is not None:
            work.oracle.check_leaf(leaf, work.value(c, ref, f"reader of {name}"))
    finally:
        work.board.publish(f"{name} is not needed", None)
