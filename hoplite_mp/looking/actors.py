"""The actors of a cluster as rows, of what each node says of its own and of calls that wait there.

Why it exists: `status` and `top` draw the same rows. Calls from other hosts wait on those as well
as on the actor's, so a row adds up what all nodes have said.
It must never know: how nodes are asked, how a table is drawn.
"""

from __future__ import annotations

from typing import Any

from hoplite_mp.nodes import node_id

__all__ = ["COLUMNS", "rows"]

COLUMNS = ("actor", "class", "node", "state", "waiting", "running", "done", "restarts")


def rows(found: dict[str, Any]) -> list[tuple[str, ...]]:
    """One for each actor, named ones first, in the order of COLUMNS; `found`: as dump collects."""
    elsewhere: dict[str, int] = {}
    for node in found["nodes"]:
        for calls in node.get("actor calls", {"first": ()})["first"]:
            elsewhere[calls["identity"]] = elsewhere.get(calls["identity"], 0) + calls["waiting"]
    shown = []
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
    return sorted(shown, key=lambda row: (row[0] == "-", *row[:3]))
