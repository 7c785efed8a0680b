"""Groups in a run: members on many hosts that make calls together, and die at any time.

Why it exists: survivors continue among themselves, and must all agree on who contributed to a call
and on its result.
It must never know: which faults come.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from hoplite_mp.errors import ObjectLostError, PeerLostError
from hoplite_mp.simulation.cluster.programs import HANGS_S
from hoplite_mp.simulation.cluster.truth import WrongEnd
from hoplite_mp.simulation.cluster.values import Leaf, WrongBytes

if TYPE_CHECKING:
    from hoplite_mp.cluster import Cluster
    from hoplite_mp.simulation.cluster.programs import Programs
    from hoplite_mp.simulation.cluster.truth import Truth

__all__ = ["begin_group"]

# The error of a rank whose share of a result was lost with the host that had decided the call.
ITS_ROOT = "is gone with what was to come here"
MEMBERS_MAX = 8
CALLS_MAX = 5
# For a value that its member is still writing while its first bytes are sent (WRITE_ROUND_BYTES).
FEW, LARGE_ITEMS = 3, 400_000
KINDS = ("allreduce", "allreduce", "reduce_scatter", "broadcast", "reduce", "gather", "allgather",
         "alltoall", "scatter", "scan", "exscan", "refs", "barrier")  # fmt: skip


def begin_group(work: Programs) -> None:
    """Begins programs on some hosts that become members of one Group and make the same calls."""
    hosts, chance = work.hosts(), work.chance
    if not hosts:
        return
    work.groups += 1
    size, salt = chance.randint(1, MEMBERS_MAX), work.salt()
    calls = [chance.choice(KINDS) for _ in range(chance.randint(1, CALLS_MAX))]
    items = [work.items(2 * size) for _ in calls]
    if size <= FEW and chance.random() < 0.25:
        items[0] = LARGE_ITEMS
    roots = [chance.randrange(size) for _ in calls]
    plan = tuple(zip(calls, items, roots, strict=True))
    for rank in range(size):
        late = chance.choice([0.0, 0.0, 0.001, 0.1]) * chance.random()
        pauses = [chance.choice([0.0, 0.0, 0.0, 0.01]) * chance.random() for _ in calls]
        leaves_after = chance.choice([None] * 5 + [chance.randint(1, len(calls))])
        member = partial(_member, work.truth, salt, size, rank, plan, late, pauses, leaves_after)
        work.program(chance.choice(hosts), f"rank {rank} of group {salt}", member)


def _member(
    truth: Truth,
    salt: int,
    size: int,
    rank: int,
    plan: tuple[tuple[str, int, int], ...],
    late: float,
    pauses: list[float],
    leaves_after: int | None,
    c: Cluster,
) -> None:
    import time

    time.sleep(late)
    with c.group(f"group {salt}", size, rank) as g:
        for call, (kind, items, root) in enumerate(plan):
            if call == leaves_after:
                return
            time.sleep(pauses[call])
            truth.world.calls_begun += 1
            try:
                value = _call(c, g, kind, Leaf(salt + call, rank, items), root)
            except (PeerLostError, ObjectLostError) as error:
                truth.check_error(f"{kind} {call} of group {salt}", error)
                if isinstance(error, PeerLostError) and ITS_ROOT not in str(error):
                    truth.note_call((salt, call), ("lost",))
                continue
            _check(truth, salt, call, kind, items, root, rank, size, value, g.contributors)


def _call(c: Cluster, g: Any, kind: str, leaf: Leaf, root: int) -> Any:
    """Makes the call. Parts for other ranks are the member's value plus the receiving rank."""
    if kind == "barrier":
        return g.barrier()
    if kind == "broadcast":
        return g.broadcast(leaf.array() if leaf.index == root else None, root=root)
    if kind in ("reduce", "gather"):
        return getattr(g, kind)(leaf.array(), root=root)
    if kind in ("alltoall", "scatter"):
        parts = [leaf.array() + rank for rank in range(g.size)]
        if kind == "alltoall":
            return g.alltoall(parts)
        return g.scatter(parts if leaf.index == root else None, root=root)
    if kind == "refs":  # nobody else holds these objects, and their givers let go
        brought = g.allgather({"ref": c.put(leaf.array()), "pad": bytes(8 * leaf.items)})
        return [None if one is None else c.get(one["ref"], timeout=HANGS_S) for one in brought]
    return getattr(g, kind)(leaf.array())


def _check(
    truth: Truth,
    salt: int,
    call: int,
    kind: str,
    items: int,
    root: int,
    rank: int,
    size: int,
    value: Any,
    contributors: tuple[int, ...],
) -> None:
    """Checks that all members agree on the contributors, and that the value is made of these."""
    what = f"{kind} {call} of group {salt}"
    if rank not in contributors:
        raise WrongEnd(f"{what}: rank {rank} got a result of {contributors}")
    truth.note_call((salt, call), contributors)
    leaves = {one: Leaf(salt + call, one, items).array() for one in contributors}
    if kind in ("allreduce", "reduce", "reduce_scatter"):
        whole = sum((leaves[one] for one in contributors[1:]), start=leaves[contributors[0]])
        if kind == "reduce" and rank != root:
            expected: Any = None
        else:
            expected = np.array_split(whole, size)[rank] if kind == "reduce_scatter" else whole
    elif kind in ("scan", "exscan"):
        below = [leaves[one] for one in contributors if one < rank + (kind == "scan")]
        expected = sum(below[1:], start=below[0]) if below else None
    elif kind == "broadcast":
        expected = leaves[root]
    elif kind == "scatter":
        expected = leaves[root] + rank
    elif kind == "alltoall":
        expected = [leaves[one] + rank if one in leaves else None for one in range(size)]
    elif kind in ("allgather", "refs") or (kind == "gather" and rank == root):
        expected = [leaves.get(one) for one in range(size)]
    else:
        expected = None
    truth.reads += 1
    if not _equal(value, expected):
        raise WrongBytes(f"{what} of {contributors} is {str(value)[:200]}")


def _equal(value: Any, expected: Any) -> bool:
    if isinstance(expected, list):
        return (
            isinstance(value, list)
            and len(value) == len(expected)
            and all(map(_equal, value, expected))
        )
    if expected is None or value is None:
        return value is expected
    return np.array_equal(value, expected)
