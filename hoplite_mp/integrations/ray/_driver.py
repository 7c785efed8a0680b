"""init and shutdown: a driver of Ray starts the cluster beside Ray's, or joins it.

All drivers of a Ray cluster share one cluster of this library, which lives as long as Ray's: a
detached Ray actor with a fixed name keeps it (`_actors.Leader`).
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError

from hoplite_mp import errors
from hoplite_mp.integrations._sidecar import sidecar
from hoplite_mp.integrations.ray._actors import LEADER, NAMESPACE, Leader, Settings, head_of, pinned

if TYPE_CHECKING:
    from hoplite_mp._api.cluster import Cluster
    from hoplite_mp.config import Config

__all__ = ["enter", "init", "shutdown"]


# Concurrent calls of the leader: drivers that wait for hosts, and processes that request the
# cluster's place, must not wait for one another. Each call costs a thread there.
LEADER_CALLS_MAX = 64
_log = logging.getLogger("hoplite_mp")


def init(
    *,
    memory: int | str | None = None,
    ports: str | None = None,
    tls: bool | None = None,
    config: Config | None = None,
    ref_hold_s: float | None = None,
    node_idle_s: float | None = None,
    timeout: float | None = 60.0,
) -> Cluster:
    """Starts a node of this library beside each node of the Ray cluster, or finds the nodes of
    another driver. Returns the Cluster, in which this process takes part.

    The nodes have no workers, because tasks run in Ray's. In tasks and actors of Ray
    `hoplite_mp.current()` is the same cluster, through the node of their host, so arrays are read
    there without a copy. Refs may be arguments and results of Ray's tasks, in any nesting: when Ray
    pickles a ref, the node holds its object for `ref_hold_s`.

    Within seconds after a node of Ray is added, a node of this library joins beside it; both end
    together. The cluster lives until `shutdown()`, or until Ray's ends.

    Parameters
    ----------
    memory : int or str, optional
        Limit of each host's store, in bytes or as "2GiB". Default: a third of the host's memory, in
        addition to Ray's own store (`object_store_memory`).
    ports : str, optional
        "A-B": the ports on which nodes listen for one another.
    tls : bool, optional
        False: all traffic is unencrypted, as in Ray by default.
    config : Config, optional
        All other limits, for all hosts. Only the first driver's arguments count.
    ref_hold_s : float, optional
        Seconds for which a node holds an object after one of its processes has pickled a ref to it
        for Ray, which may load the bytes late, often or never. Each load takes its own hold; a
        later load raises ObjectLostError, unless the object has another holder. Default: 600.
    node_idle_s : float, optional
        Seconds for which the node of a host stays after the last process that used it has ended.
        Then it is drained and leaves. Default: 15.
    timeout : float, optional
        Seconds to wait until the nodes beside all living nodes of Ray have joined; None: forever.

    Raises
    ------
    RuntimeError
        Ray is not initialized here, or this is a Ray Client (`ray://`), whose process is not on a
        host of the cluster.
    HopliteTimeoutError
        Not all nodes have joined in time. Nodes that have joined stay, and `init()` may be called
        again.
    """
    if not ray.is_initialized():
        raise RuntimeError("Ray is not initialized in this process: call ray.init() before init()")
    if ray.util.client.ray.is_connected():
        raise RuntimeError(
            "init() needs a driver on a host of the Ray cluster; this process is a Ray Client "
            "(ray://), which has no node beside it. Submit the driver as a job, or run it there"
        )
    settings = Settings(memory, ports, tls, config, ref_hold_s, node_idle_s)
    place = _place(settings, timeout)
    try:
        return sidecar.take_part(place).cluster
    except errors.ManagerLostError:
        # The manager had died, which the leader had not detected yet; meanwhile it may have started
        # another cluster.
        other = _place(settings, timeout)
        if other.name == place.name:
            raise
    return sidecar.take_part(other).cluster


def _place(settings: Settings, timeout: float | None) -> sidecar.Place:
    """The Place of the cluster, when all nodes have joined. Raises the errors of `init`."""
    leader = _leader(settings)
    try:
        place: sidecar.Place = ray.get(leader.place.remote(), timeout=timeout)
        missing = ray.get(leader.await_hosts.remote(timeout), timeout=_reply_timeout(timeout))
    except GetTimeoutError:
        missing = ["the host of the manager"]
    except RayActorError as error:
        raise errors.ManagerLostError(
            f"the leader actor of the cluster beside Ray's could not be started: {error}"
        ) from error
    if missing:
        raise errors.HopliteTimeoutError(
            f"after {timeout} s there is no node beside Ray on {', '.join(missing)}; the log of "
            "the actor there has the reason (ray logs actor), and init() may be called again"
        )
    return place


def _leader(settings: Settings) -> Any:
    """The handle of the leader, which the first driver makes."""
    made = ray.remote(Leader).options(
        name=LEADER,
        namespace=NAMESPACE,
        lifetime="detached",
        get_if_exists=True,
        num_cpus=0,
        max_restarts=-1,
        max_task_retries=-1,
        max_concurrency=LEADER_CALLS_MAX,
        scheduling_strategy=pinned(head_of(ray.nodes())),
    )
    return made.remote(settings)


def _reply_timeout(timeout: float | None) -> float | None:
    """A timeout for a reply that is sent at `timeout`."""
    return None if timeout is None else timeout + ANSWER_S


ANSWER_S = 10.0


def shutdown(timeout: float | None = 60.0) -> None:
    """Ends the cluster beside Ray's, for all drivers, with its objects. Ray's continues.

    timeout: seconds to wait for its end. No effect if there is no such cluster.
    """
    try:
        leader = ray.get_actor(LEADER, namespace=NAMESPACE)
    except ValueError:
        return
    try:
        place = ray.get(leader.end.remote(), timeout=timeout)
        member = sidecar.member_of(place)
        if member is not None:
            member.end()
    except (GetTimeoutError, RayActorError) as error:
        _log.warning("the cluster beside Ray's did not end in order: %s", error)
    ray.kill(leader)


# Lets a process of Ray join the cluster when it first needs it: `current()`, and refs among the
# arguments of a task, must work without preparation in processes that Ray starts.


def enter() -> bool:
    """Joins the cluster beside Ray's. False: this process is not a worker of Ray, or no driver has
    called `init()`. Called when a process first needs the cluster, because most workers of Ray
    never need it. Raises the reason if it cannot join."""
    # Ray has no public function for the kind of a process; its own collectives also use this field.
    if ray._private.worker.global_worker.mode != ray.WORKER_MODE:
        return False
    try:
        leader = ray.get_actor(LEADER, namespace=NAMESPACE)
    except ValueError:
        return False
    sidecar.take_part(ray.get(leader.place.remote()))
    return True
