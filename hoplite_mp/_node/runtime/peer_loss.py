"""The loss of another host: the components of a node that receive it, in their order.

Each component has one method for it, `peer_lost(member)`. The order matters where one component
needs what a later one drops; `ORDERS` states each such pair with its reason.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from hoplite_mp._protocol.messages import Member

__all__ = ["ORDERS", "PHASES", "pass_on"]

PHASES = (
    "peers",
    "backups",
    "recovery",
    "resources",
    "outbound_tasks",
    "inbound_tasks",
    "links",
    "paths",
    "replicas",
    "messages",
    "group_calls",
    "draining",
    "workers",
    "remote_actors",
    "backups elsewhere",
    "remote_output",
    "former_drivers",
    "tracing",
    "questions",
    "exports",
    "remote_objects",
)
# (earlier component, later one) -> why.
ORDERS = {
    ("backups", "recovery"): "the inventory contains the identities that this node can restart",
    ("recovery", "outbound_tasks"): "lost results are held before tasks that need them run again",
    ("recovery", "inbound_tasks"): "what its tasks had here is held before they are forgotten",
    ("recovery", "replicas"): "the holds of new owners are taken before those of the old one go",
    ("recovery", "exports"): "objects that the lost host owned are held before they are forgotten",
    ("recovery", "remote_objects"): "remaining copies are reported before holders are dropped",
}


def pass_on(member: Member, receivers: Mapping[str, Callable[[Member], None]]) -> None:
    """Passes the loss of that host on to all components, given by their names in PHASES."""
    for name in PHASES:
        receivers[name](member)
