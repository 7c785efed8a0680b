"""The actors of a cluster as rows, from each node's report of its actors and of waiting calls.

Why it exists: `status` and `top` draw the same rows. An actor's calls may wait on its own host and
on the hosts that make them, so a row adds up the reports of all nodes.
It must never know: how nodes are asked, how a table is drawn.
"""

from __future__ import annotations

from typing import Any

from hoplite_mp._api.nodes import node_id

__all__ = ["COLUMNS", "rows"]

COLUMNS = ("actor", "class", "node", "state", "waiting", "running", "done", "restarts")


def rows(found: dict[str, Any]) -> list[tuple[str, ...]]:
    """A row for each actor, named ones first, with the fields in COLUMNS. `found`: the result of
    `dump.collect`."""
    elsewhere: dict[str, int] = {}
    for node in found["nodes"]:
        for calls in node.get("actor calls", {"first": ()})["first"]:
            elsewhere[calls["identity"]] = elsewhere.get(calls["identity"], 0) + calls["waiting"]
    shown: list[tuple[str, ...]] = []
    for node in found["nodes"]:
        for actor in node.get("actors", {"first": ()})["first"]:
            waiting = actor["waiting"] + elsewhere.get(actor["identity"], 0)
            shown.append(
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
    shown.sort(key=lambda row: (row[0] == "-", *row[:3]))
    for node in found["nodes"]:
        actors = node.get("actors", {"first": (), "count": 0})
        more = actors["count"] - len(actors["first"])
        if more:  # a node names only some
            shown.append(("...", f"{more} more", node_id(node["node"]), *[""] * 5))
    return shown
