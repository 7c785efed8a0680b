"""What this library is inside of Dask's own processes: a plugin of the scheduler, one of workers.

Why it exists: Dask starts, restarts and retires its workers; it sets its plugins up in each of
them, also in those that come later, so they are where nodes are found, started and left. The
scheduler's process begins the cluster, because what ends with it, the Dask cluster, ends too. The
cluster's secret travels as the state of plugins, inside Dask's own connections.
It must never know: what users put, broadcast or reduce.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from dask.tokenize import normalize_token
from distributed.comm.addressing import get_address_host
from distributed.diagnostics.plugin import SchedulerPlugin, WorkerPlugin

from hoplite_mp.integrations import beside
from hoplite_mp.ref import ObjectRef
from hoplite_mp.transport.addresses import Address

if TYPE_CHECKING:
    from hoplite_mp.integrations.beside import Member, Place

__all__ = ["NAME", "SchedulerSide", "WorkerSide", "host_of", "place_of"]

NAME = "hoplite_mp"


class SchedulerSide(SchedulerPlugin):
    """In the scheduler's process: the cluster's manager, and the node of that host."""

    name = NAME
    idempotent = True

    def __init__(self, options: dict[str, Any]) -> None:
        self._options = options  # of beside.begin
        self._member: Member | None = None
        self._beginning: asyncio.Lock | None = None

    async def start(self, scheduler: Any) -> None:
        """Called by Dask when it is registered."""
        self._beginning = asyncio.Lock()
        await self.place(scheduler)

    async def place(self, scheduler: Any) -> Place:
        """Where the cluster is; it begins again if its node, and so its manager, was killed."""
        assert self._beginning is not None
        async with self._beginning:
            before = self._member
            if before is not None and beside.member_of(before.place) is before:
                return before.place
            if before is not None:
                old = worker_plugin_name(before.place)
                if old in scheduler.worker_plugins:
                    await scheduler.unregister_worker_plugin(None, name=old)
            listen = self._options.get("listen") or _listen_beside(scheduler)
            options = {**self._options, "listen": listen}
            place = await asyncio.to_thread(beside.begin, **options, passes_on=True)
            self._member = beside.member_of(place)
            return place

    async def close(self) -> None:
        """Called by Dask when the scheduler ends."""
        member, self._member = self._member, None
        if member is not None:
            await asyncio.to_thread(member.end)


class WorkerSide(WorkerPlugin):
    """In each worker's process: attached to the node of its host."""

    idempotent = True

    def __init__(self, place: Place) -> None:
        self._place = place
        self.name = worker_plugin_name(place)
        self._member: Member | None = None

    async def setup(self, worker: Any) -> None:
        """Called by Dask in each worker, also in one that is restarted or comes later."""
        host = host_of(worker.scheduler.address)
        place = self._place if host is None else self._place.at(host)
        self._member = await asyncio.to_thread(beside.take_part, place)

    async def teardown(self, worker: Any) -> None:
        """Called by Dask when the worker retires."""
        member, self._member = self._member, None
        if member is not None:
            await asyncio.to_thread(member.leave)


def worker_plugin_name(place: Place) -> str:
    """One for each life of the cluster: registering it again for the same one does nothing."""
    return f"{NAME}-{place.name}"


async def place_of(dask_scheduler: Any) -> Place:
    """Runs in the scheduler."""
    plugin = dask_scheduler.plugins[NAME]
    return await plugin.place(dask_scheduler)  # type: ignore[no-any-return]


def host_of(address: str) -> str | None:
    """The host in an address of Dask's; None: it names none ("inproc://...")."""
    if address.startswith("inproc://"):
        return None
    return str(get_address_host(address))


def _listen_beside(scheduler: Any) -> str:
    """Where to listen so that all who reach the scheduler reach the manager, too, and nobody else:
    at the same addresses."""
    host = host_of(scheduler.listen_address) or "127.0.0.1"
    return str(Address(host, 0))


@normalize_token.register(ObjectRef)
def _token_of(ref: ObjectRef[Any]) -> tuple[str, str]:
    """Dask names tasks after their arguments: a ref is what it refers to."""
    return "hoplite_mp.ObjectRef", ref.id
