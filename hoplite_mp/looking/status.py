"""`hoplite-mp status`: the state of a running cluster, once, as a table.

Why it exists: a user who starts a cluster over several hosts wants to see that they have joined and
work.
It must never know: anything that is not asked through a `Cluster`.
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
    """Prints the state of the cluster. Returns the exit code."""
    try:
        with visit(arguments) as cluster:
            print("\n".join([table(cluster), *gone(cluster), *standby(cluster)]))
            found = actors.rows(collect(cluster))
            if found:
                print("", *_columns([actors.COLUMNS, *found]), sep="\n")
    except (HopliteError, ValueError) as error:  # also if the cluster ends meanwhile
        print(f"hoplite-mp: {error}", file=sys.stderr)
        return 1
    return 0


def gone(cluster: Cluster) -> list[str]:
    """A line for each host that has left or was lost, as far as this host's node has seen it; a
    node that was started only for this command has seen nothing."""
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
    """A line about the standby: on which host it is, whether it leads, or whether there is no
    manager at all. Nothing in a cluster without a standby."""
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
    """A row for each node: workers, memory, tasks, objects, bytes sent and received. Leaves out the
    node that this process has brought along only to look."""
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
