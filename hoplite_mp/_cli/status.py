"""`hoplite-mp status`: the state of a running cluster, as a table or JSON."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

from hoplite_mp._api.nodes import amount_words, gone_nodes, node_id, standby_of
from hoplite_mp._cli.dump import collect, connect, own_node
from hoplite_mp._cli.table import table
from hoplite_mp._common.machine_limits import format_bytes
from hoplite_mp.errors import HopliteError

if TYPE_CHECKING:
    import argparse

    from hoplite_mp._api.cluster import Cluster

__all__ = [
    "ACTOR_COLUMNS",
    "actor_rows",
    "gone",
    "gone_line",
    "node_table",
    "status",
    "task_counts",
]


ACTOR_COLUMNS = ("actor", "class", "node", "state", "waiting", "running", "done", "restarts")


def actor_rows(reports: dict[str, Any]) -> list[tuple[str, ...]]:
    """A row for each actor, named actors first, with the fields in ACTOR_COLUMNS. `reports`: the
    result of `dump.collect`."""
    remote: dict[str, int] = {}  # actor's identity -> number of calls that wait on other nodes
    for node in reports["nodes"]:
        for calls in node.get("actor calls", {"first": ()})["first"]:
            remote[calls["identity"]] = remote.get(calls["identity"], 0) + calls["waiting"]
    rows: list[tuple[str, ...]] = []
    for node in reports["nodes"]:
        for actor in node.get("actors", {"first": ()})["first"]:
            waiting = actor["waiting"] + remote.get(actor["identity"], 0)
            rows.append(
                (
                    actor["name"] or "-",
                    actor["class"],
                    node_id(node["node"]),
                    actor["state"],
                    str(waiting),
                    str(actor["running"]),
                    str(actor["done"]),
                    f"{actor['restarts']} of {actor['restarts'] + actor['restarts_left']}",
                )
            )
    rows.sort(key=lambda row: (row[0] == "-", *row[:3]))
    for node in reports["nodes"]:
        actors = node.get("actors", {"first": (), "count": 0})
        more = actors["count"] - len(actors["first"])
        if more:  # a node lists only some of its actors
            rows.append(("...", f"{more} more", node_id(node["node"]), *[""] * 5))
    return rows


HEAD = (
    "node", "address", "host", "workers", "memory", "queued", "running", "done", "failed",
    "retried", "objects", "sent", "received", "resources free",
)  # fmt: skip
COUNTS = (
    "queued", "running", "tasks_done", "tasks_failed", "tasks_retried", "workers_lost", "objects",
    "bytes_used", "bytes_spilled", "bytes_sent", "bytes_received",
)  # fmt: skip


def status(arguments: argparse.Namespace) -> int:
    """Prints the state of the cluster. Returns the exit code."""
    try:
        with connect(arguments) as cluster:
            reports = collect(cluster)
            nodes, lost = node_states(cluster, reports), gone(cluster)
            rows = actor_rows(reports)
            if arguments.json:
                actors = [dict(zip(ACTOR_COLUMNS, row, strict=True)) for row in rows]
                print(json.dumps({"nodes": nodes, "gone": lost, "actors": actors}, indent=1))
                return 0
            print("\n".join([*node_table(nodes), *map(gone_line, lost), *standby(cluster)]))
            if rows:
                print("", *table([ACTOR_COLUMNS, *rows]), sep="\n")
    except (HopliteError, ValueError) as error:  # even if the cluster shuts down meanwhile
        print(f"hoplite-mp: {error}", file=sys.stderr)
        return 1
    return 0


def gone(cluster: Cluster) -> list[dict[str, Any]]:
    """A dict with "id", "host", "seconds" and "how" for each host that has left or was lost, as
    recorded by this host's node. A node that was started for this command has no records."""
    here = {node.id for node in cluster.nodes}
    return [
        {"id": name, "host": host, "seconds": seconds, "how": "left" if left else "lost"}
        for name, host, seconds, left in gone_nodes(cluster._runtime)
        if name not in here
    ]


def gone_line(one: dict[str, Any]) -> str:
    """A line about a host from `gone`."""
    how = "left" if one["how"] == "left" else "was lost"
    return f"{one['id']} ({one['host']}) {how} {ago(one['seconds'])} ago"


def ago(seconds: float) -> str:
    """12.3 -> "12 s"; 7000 -> "117 min"."""
    return f"{seconds:.0f} s" if seconds < 600 else f"{seconds / 60:.0f} min"


def standby(cluster: Cluster) -> list[str]:
    """A list with one line about the standby: its host, whether it is the manager, and whether any
    manager is running. Empty in a cluster without a standby."""
    addresses, node, leads, managed = standby_of(cluster._runtime)
    if not addresses:
        return []
    where = f"standby at {' or '.join(addresses)}"
    if not managed:
        return [
            f"{where}: no manager is running; operations that need one are blocked. If its host is "
            f"gone, `hoplite-mp promote {addresses[0]}` makes the standby the manager"
        ]
    if node < 0:
        return [f"{where}: no host with that address has joined, so there is no standby"]
    return [f"{where}, on {node_id(node)}{', which is the manager' if leads else ''}"]


def node_states(cluster: Cluster, reports: dict[str, Any]) -> list[dict[str, Any]]:
    """The state of each node, excluding a node that this process has started for the command.
    `reports`: the result of `dump.collect`. Some or all of COUNTS are missing for a node that has
    not answered."""
    own = own_node(cluster)
    counted = cluster.stats()["nodes"]
    tasks = task_counts(reports)
    return [
        {
            "id": node.id,
            "address": node.address,
            "host": node.host,
            "workers": node.workers,
            "bytes_limit": node.memory_total,
            "resources": dict(node.resources),
            "resources_free": dict(node.resources_free),
            **tasks.get(node.id, {}),
            **{name: counted[node.id][name] for name in COUNTS[2:] if node.id in counted},
        }
        for node in cluster.nodes
        if own is None or node.id != node_id(own)
    ]


def task_counts(reports: dict[str, Any]) -> dict[str, dict[str, int]]:
    """The numbers of queued and running tasks on each node that has answered, by node id."""
    return {
        node_id(report["node"]): {name: report[name]["count"] for name in COUNTS[:2]}
        for report in reports["nodes"]
    }


def node_table(nodes: list[dict[str, Any]]) -> list[str]:
    """The table of `node_states`."""
    rows: list[tuple[str, ...]] = [HEAD]
    for node in nodes:
        row = [node["id"], node["address"], node["host"], str(node["workers"])]
        if "objects" not in node:
            rows.append(tuple([*row, "no answer", *[""] * (len(HEAD) - len(row) - 1)]))
            continue
        memory = f"{format_bytes(node['bytes_used'])} of {format_bytes(node['bytes_limit'])}"
        counts = [str(node.get(name, "")) for name in COUNTS[:5]]
        moved = [format_bytes(node[f"bytes_{what}"]) for what in ("sent", "received")]
        free = ", ".join(amount_words(node["resources"], node["resources_free"]))
        rows.append(tuple([*row, memory, *counts, str(node["objects"]), *moved, free]))
    if not any(row[-1] for row in rows[1:]):
        rows = [row[:-1] for row in rows]
    return table(rows)
