"""How a command comes into a cluster at which it only looks.

Why it exists: where this host has a node of the cluster the command attaches to it; elsewhere it
has to bring one along, and that one is not what the user wants to see.
It must never know: what is looked at.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hoplite_mp.cluster import Cluster

if TYPE_CHECKING:
    import argparse

__all__ = ["brought_along", "visit"]


def visit(arguments: argparse.Namespace) -> Cluster:
    """The cluster at `address`. HopliteError, ValueError: it cannot be reached, and why."""
    return Cluster(
        workers=0,
        address=arguments.address,
        token=arguments.token_file,
        tls=False if arguments.no_tls else None,
    )


def brought_along(cluster: Cluster) -> int | None:
    """The number of the node that this process has brought along only to look; None: it has not."""
    host = cluster._host
    if host is None or host.attached:
        return None
    return cluster._runtime.tasks.node_number
