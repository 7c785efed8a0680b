"""The nodes of a cluster as a user sees them: who is there, and what each counts.

Why it exists: the cluster's face asks its node; what comes back is numbers, and becomes words here.
It must never know: how nodes learn of each other.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from hoplite_mp.protocol.local import Members, Stats

if TYPE_CHECKING:
    from hoplite_mp.client.runtime import Runtime

__all__ = ["Node", "counters", "list_nodes", "node_id", "node_numbers"]


@dataclasses.dataclass(frozen=True, slots=True)
class Node:
    """A living host; memory in bytes."""

    id: str
    address: str
    host: str
    workers: int
    memory_used: int
    memory_total: int


def node_id(number: int) -> str:
    """3 -> "h3"."""
    return f"h{number}"


def list_nodes(runtime: Runtime, memory: bool = False) -> list[Node]:
    """Living nodes in order of joining. `memory`: with what others use of theirs, which costs a
    round trip to all of them; else that is 0."""
    runtime.memory.check()
    found = [
        Node(node_id(number), *rest) for number, *rest in runtime.channel.call(Members()).value
    ]
    if not memory or len(found) == 1:
        return found
    used = {node_id(number): counts["bytes_used"] for number, counts in counters(runtime).items()}
    return [dataclasses.replace(n, memory_used=used.get(n.id, n.memory_used)) for n in found]


def counters(runtime: Runtime) -> dict[int, dict[str, int]]:
    """Those of every node that answers, by number, since its start."""
    runtime.memory.check()
    runtime.submitter.drain()
    runtime.memory.collect()
    return {number: dict(found) for number, found in runtime.channel.call(Stats()).value}


def node_numbers(
    runtime: Runtime, nodes: Any, one: str | None = None, workers: bool = False
) -> list[int]:
    """A Node, a node id, or a list of them, as numbers; ValueError for one that is not there.

    `one`: the call that takes at most one node. `workers`: they must have some.
    """
    if nodes is None:
        return []
    wanted = list(nodes) if isinstance(nodes, (list, tuple)) else [nodes]
    if one is not None and len(wanted) != 1:
        raise ValueError(f"{one} names {len(wanted)} nodes: it must be one")
    if not wanted:
        raise ValueError("to= names no node")
    living = {node.id: node for node in list_nodes(runtime)}
    found = []
    for node in wanted:
        name = node.id if isinstance(node, Node) else node
        if name not in living:
            raise ValueError(f"there is no node {name!r}: this cluster has {', '.join(living)}")
        if workers and not living[name].workers:
            raise ValueError(f"node {name!r} has no workers: no task can run there")
        found.append(int(name.removeprefix("h")))
    return found
