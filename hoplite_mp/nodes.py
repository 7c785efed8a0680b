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

__all__ = ["Node", "check_nodes", "counters", "list_nodes", "node_id"]


@dataclasses.dataclass(frozen=True, slots=True)
class Node:
    """A living host: memory in bytes; `memory_used` is known of this host only, else 0."""

    id: str
    address: str
    host: str
    workers: int
    memory_used: int
    memory_total: int


def node_id(number: int) -> str:
    """3 -> "h3"."""
    return f"h{number}"


def list_nodes(runtime: Runtime) -> list[Node]:
    """Living nodes in order of joining."""
    runtime.memory.check()
    found = runtime.channel.call(Members()).value
    return [Node(node_id(number), *rest) for number, *rest in found]


def counters(runtime: Runtime) -> dict[str, Any]:
    """This host's, since its start."""
    runtime.memory.check()
    runtime.submitter.drain()
    runtime.memory.collect()
    return dict(runtime.channel.call(Stats()).value)


def check_nodes(runtime: Runtime, nodes: Any) -> None:
    """ValueError for one that is not there."""
    if nodes is None:
        return
    wanted = nodes if isinstance(nodes, (list, tuple)) else [nodes]
    names = {node.id if isinstance(node, Node) else node for node in wanted} - {None}
    if not names:
        return
    living = {node.id for node in list_nodes(runtime)}
    for name in names:
        if name not in living:
            there = ", ".join(sorted(living))
            raise ValueError(f"there is no node {name!r}: this cluster has {there}")
