"""How a command that only looks takes part in a cluster.

Why it exists: if this host has a node of the cluster, the command attaches to it. Otherwise the
command has to start a node of its own, which the user does not want to see in its output.
It must never know: what the command shows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hoplite_mp._api.cluster import Cluster

if TYPE_CHECKING:
    import argparse

__all__ = ["brought_along", "visit"]


def visit(arguments: argparse.Namespace) -> Cluster:
    """Takes part in the cluster at `address`. HopliteError, ValueError: the reason why it cannot be
    reached."""
    return Cluster(
        workers=0,
        address=arguments.address,
        token=arguments.token_file,
        tls=False if arguments.no_tls else None,
    )


def brought_along(cluster: Cluster) -> int | None:
    """The number of the node that this process has started only to look; None if it uses the node
    that this host has."""
    host = cluster._host
    if host is None or host.attached:
        return None
    return cluster._runtime.tasks.node_number
