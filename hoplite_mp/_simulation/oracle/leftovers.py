"""Checks that nothing is left of the programs of a run when all of them have ended.

A leak, a host that does not leave, or a list of members that is out of date disturbs no program for
long, so only the end of a run shows it.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

from hoplite_mp._common.object_states import KIND_PUT

if TYPE_CHECKING:
    from hoplite_mp._simulation.virtual.host import VirtualHost
    from hoplite_mp._simulation.virtual.world import World

__all__ = ["left_over"]

FUNCTION_BYTES_MAX = 1024
# Tables of nodes and managers that outlast all programs: what is known of the host, its processes,
# the other hosts and their links, handlers, logs of limited length. Any other table must be empty.
LASTING = {
    "ClusterMembership._ended", "ClusterMembership._gone", "ClusterMembership._living",
    "ClusterMembership._numbers", "ClusterNode._takers", "Counters._more", "Failover._endpoints",
    "GroupRegistry.ends", "HostGroups.bare_ends", "HostGroups.clean_ends", "HostGroups.ends",
    "LinkEstimator._samples", "LinkEstimator.full", "LinkEstimator.known", "LinkEstimator.peaks",
    "Links.counted", "Links.ends", "Links.links", "ManagerConnection._ends",
    "ManagerConnection._measured", "ManagerConnection._sent", "MultiHostCalls.pending_messages",
    "NodeMembership.gone", "NodeMembership.left", "NodeMembership.members",
    "OutboundTasks._offered", "OutboundTasks.runners", "Output.drivers", "Output.pipes",
    "OwnershipTransfer.numbers", "PathEstimator._received", "PathEstimator._said",
    "PathEstimator._samples", "PathEstimator._when_slow", "PathEstimator.held",
    "PathEstimator.known", "PathEstimator.peaks", "Peers.by_host_id", "Peers.by_number",
    "Peers.own", "PlanCache._known", "PointToPoint.pending_messages", "ProgramCache._known",
    "RemoteOutput.others", "Requests._forget", "Requests._handlers", "Requests._latest",
    "Requests._unread", "ResourceLedger._sums", "ResourceLedger._used", "ResourceLedger.totals",
    "Resources.others", "Roster.by_host_id", "Roster.by_number", "Runners._all",
    "Runners._counted", "Runners._free", "Runners._roomy", "Store._handed", "Store.clients",
    "Store.leases", "Store.spans", "Topology._latency", "Topology._narrow", "Topology._pairs",
    "TraceEvents._inbound_now", "TreeCache._latest", "TreeCache._packed", "WaitReports._more",
    "WorkerRecycling._gone", "WorkerRecycling._hosts", "Workers.all", "Workers.bags",
    "Workers.pipes", "Workers.pools", "Workers.queues", "_Rates._sorted", "_Rates.by_node",
}  # fmt: skip
PARTS = "hoplite_mp._node", "hoplite_mp._planner"
TABLES = dict, set, list, deque


def left_over(world: World) -> str:
    """What is left over although all programs have ended, or ""."""
    managers = [one for one in (world.manager, world.standby) if one is not None and one.decides]
    living = {one.number for one in world.hosts if one.alive and one.number >= 0}
    for host in world.hosts:
        if host.alive:
            found = _of_memory(host) or _of_tables(host.node, set())
            if not found and managers and host.number >= 0:
                found = _of_members(world, host, living)
            if found:
                return f"host {host.place} {found}"
    for manager in managers:
        found = _of_tables(manager.planner, set())
        if found:
            return f"the manager {found}"
    return ""


def _of_memory(host: VirtualHost) -> str:
    store = host.node.components.store
    store.purge_spilled()
    left = [one for one in host.client.scan() if not _is_a_function(host, one)]
    if left:
        return f"still has {left[:3]}"
    if host.disk.used:
        return f"still has {host.disk.used} bytes on disk"
    blocks = [payload for payload in store.leases if host.client.block_owner(payload)]
    return f"still has blocks {blocks[:3]}" if blocks else ""


def _of_tables(room: Any, seen: set[int]) -> str:
    """Looks at all tables of a component, and of the components that it refers to."""
    for name, value in getattr(room, "__dict__", {}).items():
        if id(value) in seen:
            continue
        seen.add(id(value))
        table = f"{type(room).__name__}.{name}"
        if isinstance(value, TABLES):
            if not _is_empty(value) and table not in LASTING:
                return f"still has {table} {str(value)[:200]}"
        elif type(value).__module__.startswith(PARTS):
            found = _of_tables(value, seen)
            if found:
                return found
    return ""


def _is_empty(table: Any) -> bool:
    """Is the table empty, or does it contain only empty tables?"""
    if isinstance(table, dict):
        return all(isinstance(one, TABLES) and not one for one in table.values())
    return not table


def _of_members(world: World, host: VirtualHost, living: set[int]) -> str:
    assert host.lan is not None
    if host in world.left:
        return "has not left"
    known = set(host.lan.membership.members)
    if known != living:
        return f"knows the members {sorted(known)}, and there are {sorted(living)}"
    return ""


def _is_a_function(host: VirtualHost, header: dict[str, Any]) -> bool:
    """Is this a function that a living worker keeps because it may send tasks with it again?"""
    owner = header["owner"]
    lives = owner in host.node.components.workers.all and header["refs"] == [owner]
    return lives and header["kind"] == KIND_PUT and header["size"] <= FUNCTION_BYTES_MAX
