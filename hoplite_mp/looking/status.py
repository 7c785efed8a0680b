"""`hoplite-mp status`: what a running cluster looks like, once, as a table.

Why it exists: who starts a cluster over several hosts wants to see that they are there and work.
It must never know: anything that `Cluster` does not tell.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from hoplite_mp.client.memory import format_bytes
from hoplite_mp.errors import HopliteError
from hoplite_mp.looking import actors
from hoplite_mp.looking.dump import collect
from hoplite_mp.looking.visit import brought_along, visit
from hoplite_mp.nodes import gone_nodes, node_id, resource_words, standby_of

if TYPE_CHECKING:
    import argparse

    from hoplite_mp.cluster import Cluster

__all__ = ["status", "table"]

HEAD = (
    "node", "address", "host", "workers", "memory", "done", "failed", "retried", "objects",
    "sent", "received", "resources free",
)  # fmt: skip


def status(arguments: argparse.Namespace) -> int:
    """What a cluster looks like now, as a table. Returns the exit code."""
    try:
        with visit(arguments) as cluster:
            print("\n".join([table(cluster), *gone(cluster), *standby(cluster)]))
            found = actors.rows(collect(cluster))
            if found:
                print("", *_columns([actors.COLUMNS, *found]), sep="\n")
    except (HopliteError, ValueError) as error:  # also of a cluster that ends meanwhile
        print(f"hoplite-mp: {error}", file=sys.stderr)
        return 1
    return 0


def gone(cluster: Cluster) -> list[str]:
    """Hosts that are no longer there, as the node that was asked has seen them go; a node that came
    along only to look has seen nothing."""
    here = {node.id for node in cluster.nodes}
    return [
        f"{name} ({host}) has been gone for {ago(seconds)} (left, or lost)"
        for name, host, seconds in gone_nodes(cluster._runtime)
        if name not in here
    ]


def ago(seconds: float) -> str:
    """12.3 -> "12 s"; 7000 -> "117 min"."""
    return f"{seconds:.0f} s" if seconds < 600 else f"{seconds / 60:.0f} min"


def standby(cluster: Cluster) -> list[str]:
    """Where the manager is, or would be, if its first host is lost, or that there is none; nothing
    without a standby."""
    addresses, node, leads, managed = standby_of(cluster._runtime)
    if not addresses:
        return []
    where = f"standby at {' or '.join(addresses)}"
    if not managed:
        return [
            f"{where}: there is no manager, and what needs one waits. If its host is gone, "
            f"`hoplite-mp promote {addresses[0]}` makes the standby lead"
        ]
    if node < 0:
        return [f"{where}: no host with that address has joined, so nobody would take over"]
    return [f"{where}, on {node_id(node)}{', which leads the cluster' if leads else ''}"]


def table(cluster: Cluster) -> str:
    """Nodes with their workers, memory, tasks, objects and bytes sent and received; without a
    node that the caller has brought along, only to look."""
    own = brought_along(cluster)
    counted = cluster.stats()["nodes"]
    rows: list[tuple[str, ...]] = [HEAD]
    for node in cluster.nodes:
        if own is not None and node.id == node_id(own):
            continue
        counts = counted.get(node.id)
        row = [node.id, node.address, node.host, str(node.workers)]
        if counts is None:
            rows.append(tuple([*row, "no answer", *[""] * 7]))
            continue
        memory = f"{format_bytes(counts['bytes_used'])} of {format_bytes(node.memory_total)}"
        tasks = [str(counts[f"tasks_{what}"]) for what in ("done", "failed", "retried")]
        moved = [format_bytes(counts[f"bytes_{what}"]) for what in ("sent", "received")]
        resources = ", ".join(resource_words(node))
        rows.append(tuple([*row, memory, *tasks, str(counts["objects"]), *moved, resources]))
    if not any(row[-1] for row in rows[1:]):
        rows = [row[:-1] for row in rows]
    return "\n".join(_columns(rows))


def _columns(rows: list[tuple[str, ...]]) -> list[str]:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
