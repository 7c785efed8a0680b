"""Shared objects for Dask tasks, from a node of this library on each host with Dask workers.

    from distributed import Client
    from hoplite_mp.integrations import dask as hoplite_dask

    client = Client("tcp://scheduler:8786")
    c = hoplite_dask.init(client)
    params = hoplite_dask.broadcast(client, np.ones(1_000_000))    # a Dask Future
    parts = [client.submit(grad, params, i) for i in range(8)]     # grad is given the array
    total = hoplite_dask.reduce(client, parts, "sum", num=5)       # a Dask Future, too
    print(total.result(), total.contributors)

Dask moves the data of tasks between workers as pickles, and keeps one copy in each worker process.
With this module each host has one copy of a large array, which all workers on the host read in
place, and arrays are reduced on their way through the network.

Inside tasks, `hoplite_mp.current()` returns the cluster, with `put`, `get`, `reduce` and Groups.
The cluster's nodes have no workers, because tasks run in Dask's workers. A ref among a task's
arguments stays a ref. While Dask carries a ref, the node of the process that pickled it holds the
object for `ref_hold_s`. A ref that has arrived in a task, or in a client that has called `init`,
holds the object itself.
"""

from __future__ import annotations

import asyncio
import operator
import uuid
import weakref
from typing import TYPE_CHECKING, Any

from distributed import Future

from hoplite_mp._api.cluster import Cluster, current
from hoplite_mp.errors import ObjectLostError
from hoplite_mp.integrations._sidecar import sidecar
from hoplite_mp.integrations._sidecar.reducing import check_reduction
from hoplite_mp.integrations._sidecar.sidecar import CarriedRef
from hoplite_mp.integrations.dask._plugins import SchedulerSide, WorkerSide, host_of, place_of
from hoplite_mp.integrations.dask._reducing import Sources, reduce_sources

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from distributed import Client

    from hoplite_mp.config import Config
    from hoplite_mp.integrations._sidecar.sidecar import SidecarMember

__all__ = ["Reduction", "broadcast", "init", "reduce"]

_members: weakref.WeakKeyDictionary[Client, SidecarMember] = weakref.WeakKeyDictionary()


def init(
    client: Client,
    *,
    listen: str | None = None,
    ports: str | None = None,
    memory: int | str | None = None,
    tls: bool | None = None,
    config: Config | None = None,
    ref_hold_s: float | None = None,
    node_idle_s: float | None = None,
) -> Cluster:
    """Starts a node beside each current and later worker of the client's Dask cluster. Returns the
    Cluster, which the calling process also joins.

    One node serves all workers of one user on a host. The node keeps running when workers are
    restarted, and stops `node_idle_s` after the last worker has exited. The manager and its node
    run in the scheduler's process, and exit with it. A second call to `init` changes nothing,
    unless the manager's host or node has been lost: then it starts a new cluster. With an
    asynchronous client, `await` the call.

    This library must be installed where the scheduler and the workers run.

    Parameters
    ----------
    listen
        "host:port" at which the manager listens on the scheduler's host. Default: any free port,
        at the scheduler's addresses.
    ports, memory, config
        For each node, as for `Cluster`. Only the arguments of the first call have an effect.
    ref_hold_s
        Seconds for which a node holds an object after a process has pickled a ref to it for Dask,
        which may load the pickle late, several times or never. A process that loads the ref holds
        the object itself. A load after this time raises ObjectLostError, unless the object has
        another holder. Default: 600.
    node_idle_s
        Seconds for which the node of a host stays after the last process that used the node has
        exited. Then the node is drained and leaves. Default: 15.
    tls
        False: all traffic is unencrypted.

    Raises
    ------
    ManagerLostError, AuthError
        A worker, or this process, could not take part in the cluster.
    """
    options = {
        "listen": listen,
        "ports": ports,
        "memory": memory,
        "tls": tls,
        "config": config,
        "ref_hold_s": ref_hold_s,
        "node_idle_s": node_idle_s,
    }
    return client.sync(_init, client, options)  # type: ignore[no-any-return]


async def _init(client: Client, options: dict[str, Any]) -> Cluster:
    await client.register_plugin(SchedulerSide(options))
    place = await client.run_on_scheduler(place_of)
    await client.register_plugin(WorkerSide(place))
    host = host_of(client.scheduler.address)
    place = place if host is None else place.at(host)
    member = _members.get(client)
    if member is None or sidecar.member_of(place) is not member:
        member = _members[client] = await asyncio.to_thread(sidecar.take_part, place)
    return member.cluster


def _cluster_of(client: Client) -> Cluster:
    """The cluster that `init` returned for this client. A task has its own client, so in a task
    this is the worker's cluster."""
    member = _members.get(client)
    return current() if member is None else member.cluster


def broadcast(client: Client, value: Any) -> Future:
    """Replaces `client.scatter(value, broadcast=True)`. Returns a Dask Future of the value when
    all current workers have the value. Tasks receive the value itself.

    The value is sent once to each host, through a tree, and stored there once; arrays in it are
    read-only. A worker that starts later gets the value from another worker, through Dask, when a
    task needs it. Raises StoreFullError if the value does not fit into a store. With an
    asynchronous client, `await` the call.
    """
    return client.sync(_broadcast, client, value)


async def _broadcast(client: Client, value: Any) -> Future:
    c = _cluster_of(client)
    ref = await asyncio.to_thread(c.put, value)
    await c.broadcast(ref)
    key = f"broadcast-{uuid.uuid4().hex}"
    # `ref` holds the object until all workers have answered.
    answers = await client.run(_have, key, CarriedRef(ref), on_error="return")
    del ref
    who_has = [worker for worker, answer in answers.items() if isinstance(answer, int)]
    if not who_has:
        for answer in answers.values():
            raise answer
        raise ObjectLostError("this Dask cluster has no workers to hold the value")
    # Dask's own scatter does this when a client sends data directly to workers.
    await client.scheduler.update_data(
        who_has={key: who_has}, nbytes={key: answers[who_has[0]]}, client=client.id
    )
    future = Future(key, client)
    client.futures[key].finish(type=type(value))
    return future


async def _have(key: str, carried: CarriedRef, dask_worker: Any) -> int:
    """Adds the value to the data of the Dask worker in which this function runs. Returns the
    value's size in bytes."""
    value = await asyncio.to_thread(current().get, carried.ref)
    answer = dask_worker.update_data({key: value})
    return int(answer["nbytes"][key])


class Reduction(Future):
    """The Dask Future that `reduce` returns."""

    _which: Future

    @property
    def contributors(self) -> tuple[int, ...] | None:
        """The sorted indices of the reduced futures. None until the reduction is finished, or if
        it has failed."""
        if self.status != "finished":
            return None
        return self._which.result()  # type: ignore[no-any-return]


def reduce(
    client: Client,
    futures: Iterable[Future],
    op: str | Callable[..., Any] = "sum",
    num: int | None = None,
) -> Reduction:
    """Reduces the values of Dask Futures: arrays, numbers or refs. Replaces a tree of tasks, and
    returns a Dask Future of the result immediately.

    The first `num` to be ready are reduced (all if None); ``.contributors`` lists them. A failed
    source is skipped as long as num others can still become ready; otherwise the result is a
    ReduceError with the cause. If a value is lost with a worker's host, Dask recomputes it, and
    the new value is reduced. The task that waits for the sources occupies no thread of its worker,
    and the reduction keeps the sources until it has finished.

    Raises ValueError if there are no futures, num < 1 or > len, or op is unknown, and TypeError if
    one of the objects is not a Dask Future.
    """
    sources = list(futures)
    for one in sources:
        if not isinstance(one, Future):
            raise TypeError(f"expected Dask Futures, not {type(one).__name__}")
    wanted = check_reduction(sources, op, num, "futures")
    # The sources are not dependencies of the task, because the task must begin before they are
    # ready, and does not need all of them.
    both = client.submit(
        reduce_sources, Sources([one.key for one in sources]), op, wanted, pure=False
    )
    value = client.submit(operator.getitem, both, 0, pure=False)
    made = Reduction(value.key, client)
    made._which = client.submit(operator.getitem, both, 1, pure=False)
    made.add_done_callback(_Holding(sources))
    return made


class _Holding:
    """Holds the sources until the reduction has finished, because the caller may drop them
    earlier."""

    def __init__(self, sources: list[Future]) -> None:
        self._sources = sources

    def __call__(self, future: Future) -> None:
        self._sources = []
