"""Checks that nothing is left of the programs of a run when all of them have ended.

Why it exists: a leak, a host that does not leave, or a list of members that is out of date disturbs
no program for long, so only the end of a run shows it.
It must never know: what programs did, which faults came.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

from hoplite_mp._common.object_states import KIND_PUT

if TYPE_CHECKING:
    from hoplite_mp._simulation.virtual.host import Host
    from hoplite_mp._simulation.virtual.world import World

__all__ = ["left_over"]

FUNCTION_BYTES_MAX = 1024
# Tables of nodes and managers that outlast all programs: what is known of the host, its processes,
# the other hosts and their links, handlers, logs of limited length. Any other table must be empty.
LASTING = {
    "Counters._more", "Delegation._offered", "Delegation.runners", "Failover._endpoints",
    "FarOutput.others", "Forests._known", "FormerDrivers._gone", "FormerDrivers._hosts",
    "GroupCalls.pending_messages", "Groups.bare_ends", "Groups.clean_ends", "Groups.ends",
    "HandOut.bags", "Lan._takers", "Ledger._sums", "Ledger._used", "Ledger.totals",
    "Links.counted", "Links.ends", "Links.links", "Management._ends",
    "Management._measured", "Management._sent", "Membership._ended", "Membership._gone",
    "Membership._living", "Membership._numbers", "Membership.gone",
    "Membership.left", "Membership.members",
    "Meter._samples", "Meter.full", "Meter.known", "Meter.peaks", "Notes._guests_now",
    "Output.drivers", "Output.pipes", "Owners.numbers", "PairMeter._received",
    "PairMeter._said", "PairMeter._samples", "PairMeter._when_slow", "PairMeter.held",
    "PairMeter.known", "PairMeter.peaks", "Peers.by_host_id", "Peers.by_number", "Peers.own",
    "PointToPoint.pending_messages", "Programs._known", "Requests._forget",
    "Requests._handlers", "Requests._latest", "Requests._unread", "Resources.others",
    "Roster.by_host_id", "Roster.by_number", "Store._handed", "Store.clients", "Store.leases",
    "Runners._all", "Runners._counted", "Runners._free", "Runners._roomy",
    "Store.spans", "Topology._latency", "Topology._narrow", "Topology._pairs", "Trees._latest",
    "Trees._packed", "Waits._more", "Workers.all", "Workers.bags", "Workers.pipes",
    "Workers.pools", "Workers.queues", "_Rates._sorted", "_Rates.by_node",
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


def _of_memory(host: Host) -> str:
    store = host.node.rooms.store
    store.purge_spilled()
    left = [one for one in host.client.scan() if not _is_a_function(host, one)]
    if left:
        return f"still has {left[:3]}"
    if host.disk.used:
        return f"still has {host.disk.used} bytes on disk"
    blocks = [payload for payload in store.leases if host.client.block_owner(payload)]
    return f"still has blocks {blocks[:3]}" if blocks else ""


def _of_tables(room: Any, seen: set[int]) -> str:
    """Looks at all tables of a room, and of the rooms that it refers to."""
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


def _of_members(world: World, host: Host, living: set[int]) -> str:
    assert host.lan is not None
    if host in world.left:
        return "has not left"
    known = set(host.lan.membership.members)
    if known != living:
        return f"knows the members {sorted(known)}, and there are {sorted(living)}"
    return ""


def _is_a_function(host: Host, header: dict[str, Any]) -> bool:
    """Is this a function that a living worker keeps because it may send tasks with it again?"""
    owner = header["owner"]
    lives = owner in host.node.rooms.workers.all and header["refs"] == [owner]
    return lives and header["kind"] == KIND_PUT and header["size"] <= FUNCTION_BYTES_MAX
