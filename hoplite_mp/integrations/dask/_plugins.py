"""Plugins that run this library in Dask's processes: one for the scheduler, one for workers.

Dask starts, restarts and retires its workers, and sets up its plugins in each worker, including
workers that start later. So plugins start or find the nodes, and leave them. The scheduler's
process starts the cluster, because the Dask cluster also shuts down with that process. The
cluster's secret is part of the plugins' state, and is sent over Dask's own connections.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from dask.tokenize import normalize_token
from distributed.comm.addressing import get_address_host
from distributed.diagnostics.plugin import SchedulerPlugin, WorkerPlugin

from hoplite_mp._common.ref import ObjectRef
from hoplite_mp._transport.addresses import Address
from hoplite_mp.integrations._sidecar import sidecar

if TYPE_CHECKING:
    from hoplite_mp.integrations._sidecar.sidecar import Place, SidecarMember

__all__ = ["NAME", "SchedulerSide", "WorkerSide", "host_of", "place_of"]

NAME = "hoplite_mp"


class SchedulerSide(SchedulerPlugin):
    """The plugin in the scheduler's process, which runs the cluster's manager and the node of that
    host."""

    name = NAME
    idempotent = True

    def __init__(self, options: dict[str, Any]) -> None:
        self._options = options  # arguments of `sidecar.begin`
        self._member: SidecarMember | None = None
        self._beginning: asyncio.Lock | None = None

    async def start(self, scheduler: Any) -> None:
        """Called by Dask when the plugin is registered."""
        self._beginning = asyncio.Lock()
        await self.place(scheduler)

    async def place(self, scheduler: Any) -> Place:
        """The Place of the cluster. Starts a new cluster if the manager's node was killed."""
        assert self._beginning is not None
        async with self._beginning:
            before = self._member
            if before is not None and sidecar.member_of(before.place) is before:
                return before.place
            if before is not None:
                old = worker_plugin_name(before.place)
                if old in scheduler.worker_plugins:
                    await scheduler.unregister_worker_plugin(None, name=old)
            listen = self._options.get("listen") or _listen_beside(scheduler)
            options = {**self._options, "listen": listen}
            place = await asyncio.to_thread(sidecar.begin, **options, passes_on=True)
            self._member = sidecar.member_of(place)
            return place

    async def close(self) -> None:
        """Called by Dask when the scheduler stops."""
        member, self._member = self._member, None
        if member is not None:
            await asyncio.to_thread(member.end)


class WorkerSide(WorkerPlugin):
    """The plugin in each worker's process, which attaches to the node of its host."""

    idempotent = True

    def __init__(self, place: Place) -> None:
        self._place = place
        self.name = worker_plugin_name(place)
        self._member: SidecarMember | None = None

    async def setup(self, worker: Any) -> None:
        """Called by Dask in each worker, even after a restart and in workers that start later."""
        host = host_of(worker.scheduler.address)
        place = self._place if host is None else self._place.at(host)
        self._member = await asyncio.to_thread(sidecar.take_part, place)

    async def teardown(self, worker: Any) -> None:
        """Called by Dask when the worker retires."""
        member, self._member = self._member, None
        if member is not None:
            await asyncio.to_thread(member.leave)


def worker_plugin_name(place: Place) -> str:
    """The plugin's name, which is different for each cluster. Registering the plugin again for the
    same cluster has no effect."""
    return f"{NAME}-{place.name}"


async def place_of(dask_scheduler: Any) -> Place:
    """Returns the Place of the cluster. Runs in the scheduler."""
    plugin = dask_scheduler.plugins[NAME]
    return await plugin.place(dask_scheduler)  # type: ignore[no-any-return]


def host_of(address: str) -> str | None:
    """The host in a Dask address; None if the address has no host ("inproc://...")."""
    if address.startswith("inproc://"):
        return None
    return str(get_address_host(address))


def _listen_beside(scheduler: Any) -> str:
    """The address at which the manager listens: the scheduler's host, so that both are reachable
    from the same hosts."""
    host = host_of(scheduler.listen_address) or "127.0.0.1"
    return str(Address(host, 0))


@normalize_token.register(ObjectRef)
def _token_of(ref: ObjectRef[Any]) -> tuple[str, str]:
    """The token for a ref when Dask computes a task's name from its arguments: the object's id."""
    return "hoplite_mp.ObjectRef", ref.id
