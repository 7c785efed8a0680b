"""The loss of another host: the components of a node that receive it, in their order.

Each component has one method for it, `peer_lost(member)`. The order matters where one component
needs what a later one drops; `ORDERS` states each such pair with its reason.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from hoplite_mp._node.runtime.cluster_node import ClusterNode
    from hoplite_mp._protocol.messages import Member

__all__ = ["ORDERS", "phases"]

# (earlier component, later one) -> why.
ORDERS = {
    ("backups", "recovery"): "the inventory contains the identities that this node can restart",
    (
        "recovery",
        "outbound_tasks",
    ): "lost results are held before the tasks that need them run again",
    ("recovery", "inbound_tasks"): "what its tasks had here is held before they are forgotten",
    ("recovery", "replicas"): "the holds of new owners are taken before those of the old one go",
    ("recovery", "exports"): "objects that the lost host owned are held before they are forgotten",
    ("recovery", "remote_objects"): "remaining copies are reported before holders are dropped",
}


def phases(node: ClusterNode) -> list[tuple[str, Callable[[Member], None]]]:
    """(name, what to call) in the order in which a loss is passed on."""
    local = node.local
    return [
        ("peers", node.peers.peer_lost),
        ("backups", node.backups.peer_lost),
        ("recovery", node.recovery.peer_lost),
        ("resources", local.resources.peer_lost),
        ("outbound_tasks", local.outbound_tasks.peer_lost),
        ("inbound_tasks", local.inbound_tasks.peer_lost),
        ("links", node.links.peer_lost),
        ("paths", node.plan_executor.cells.pairs.peer_lost),
        ("replicas", node.replicas.peer_lost),
        ("messages", local.messages.peer_lost),
        ("group_calls", node.group_calls.peer_lost),
        ("draining", node.draining.peer_lost),
        ("workers", local.workers.peer_lost),
        ("remote_actors", node.remote_actors.peer_lost),
        ("backups elsewhere", node.backups.backup_peer_lost),
        ("remote_output", node.remote_output.peer_lost),
        ("former_drivers", node.former_drivers.peer_lost),
        ("tracing", local.tracing.peer_lost),
        ("questions", local.questions.peer_lost),
        ("exports", local.exports.peer_lost),
        ("remote_objects", local.remote_objects.peer_lost),
    ]
