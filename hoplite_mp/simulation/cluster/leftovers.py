"""What may be left when all programs of a run have ended: nothing that any of them has used.

Why it exists: a leak, a host that does not leave, or a list of members that is out of date disturbs
no program for long, so only the end of a run shows it.
It must never know: what programs did, which faults came.
"""

from __future__ import annotations

from operator import attrgetter
from typing import TYPE_CHECKING, Any

from hoplite_mp.headers import KIND_PUT

if TYPE_CHECKING:
    from hoplite_mp.simulation.cluster.host import Host
    from hoplite_mp.simulation.cluster.world import World

__all__ = ["left_over"]

FUNCTION_BYTES_MAX = 1024
# What nodes know about objects, tasks, operations and Groups, which have all ended.
OF_ROOMS = (
    "guests.by_task", "imports.by_oid", "operations.operations", "questions.open",
    "operations.plan_executor.executions", "remote_objects.by_oid", "results.untaken",
    "remote_objects.maker.runs", "exports.exports", "exports.again", "groups.joining",
    "groups.awaited",
)  # fmt: skip
OF_LAN = (
    "transfers.fetching", "transfers.by_epoch", "transfers.expected", "transfers.roomless",
    "transfers.unserved",
    "links.pulling", "links.wanting", "replicas.holds", "recovering.owners.lost",
    "recovering.lineage.entries", "recovering.lineage.held", "missing.members",
    "draining.leaving",
)  # fmt: skip
OF_MANAGER = "reductions.operations", "groups.groups", "homes._rounds", "copies._directory.entries"


def left_over(world: World) -> str:
    """When nobody uses anything any more: what is left over, or ""."""
    managers = [one for one in (world.manager, world.standby) if one is not None and one.decides]
    living = {one.number for one in world.hosts if one.alive and one.number >= 0}
    for host in world.hosts:
        if host.alive:
            found = _of_memory(host) or _of_rooms(host)
            if not found and managers and host.number >= 0:
                found = _of_members(world, host, living)
            if found:
                return f"host {host.place} {found}"
    for manager in managers:
        planner: Any = manager.planner
        for name in OF_MANAGER:
            if table := attrgetter(name)(planner):
                return f"the manager still has {name} {str(table)[:200]}"
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


def _of_rooms(host: Host) -> str:
    for names, of in ((OF_ROOMS, host.node.rooms), (OF_LAN, host.node.lan)):
        for name in names if of is not None else ():
            if table := attrgetter(name)(of):
                return f"still has {name} {str(table)[:200]}"
    return ""


def _of_members(world: World, host: Host, living: set[int]) -> str:
    assert host.node.lan is not None
    if host in world.left:
        return "has not left"
    known = set(host.node.lan.membership.members)
    if known != living:
        return f"knows the members {sorted(known)}, and there are {sorted(living)}"
    return ""


def _is_a_function(host: Host, header: dict[str, Any]) -> bool:
    """Is this a function that a living worker keeps because it may send tasks with it again?"""
    owner = header["owner"]
    lives = owner in host.node.rooms.workers.all and header["refs"] == [owner]
    return lives and header["kind"] == KIND_PUT and header["size"] <= FUNCTION_BYTES_MAX
