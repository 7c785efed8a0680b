"""init and shutdown: a Ray driver starts the cluster beside Ray's, or joins it.

All drivers of a Ray cluster share one cluster of this library, which runs as long as Ray's: a
detached Ray actor with a fixed name maintains it (`_actors.Leader`).
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


# Maximum number of concurrent calls to the leader: drivers that wait for hosts, and processes that
# request the cluster's place, must not wait for one another. Each call takes a thread of the
# leader's process.
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
    """Starts a hoplite_mp node beside each node of the Ray cluster, or finds the nodes that
    another driver has started. Returns the Cluster, in which this process takes part.

    The nodes have no workers, because tasks run in Ray's workers. In Ray tasks and actors,
    `hoplite_mp.current()` is the same cluster, through the node of their host, so they read arrays
    without a copy. Refs may be arguments and results of Ray tasks, in any nesting: when Ray
    pickles a ref, the node holds the ref's object for `ref_hold_s`.

    Within seconds after a Ray node is added, a hoplite_mp node joins beside it; both stop
    together. The cluster runs until `shutdown()` is called, or until Ray's cluster shuts down.

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
        All other limits, for all hosts. Only the first driver's arguments have an effect.
    ref_hold_s : float, optional
        Seconds for which a node holds an object after a process has pickled a ref to it for Ray,
        which may load the pickle late, several times or never. A process that loads the ref holds
        the object itself. A load after this time raises ObjectLostError, unless the object has
        another holder. Default: 600.
    node_idle_s : float, optional
        Seconds for which the node of a host stays after the last process that used the node has
        exited. Then the node is drained and leaves. Default: 15.
    timeout : float, optional
        Seconds to wait until the nodes beside all living Ray nodes have joined; None: no limit.

    Raises
    ------
    RuntimeError
        Ray is not initialized here, or this is a Ray Client (`ray://`), whose process is not on a
        host of the cluster.
    HopliteTimeoutError
        Some nodes have not joined in time. Nodes that have joined keep running, and `init()` may be
        called again.
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
        # The manager had died, and the leader had not detected this yet. By now the leader may
        # have started another cluster.
        other = _place(settings, timeout)
        if other.name == place.name:
            raise
    return sidecar.take_part(other).cluster


def _place(settings: Settings, timeout: float | None) -> sidecar.Place:
    """Waits until all nodes have joined, and returns the Place of the cluster. Raises the errors
    that `init` documents."""
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
            f"after {timeout} s there is no node beside Ray on {', '.join(missing)}; see the log "
            "of the actor there (ray logs actor) for the reason; init() may be called again"
        )
    return place


def _leader(settings: Settings) -> Any:
    """The handle of the leader, which the first driver creates."""
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
    """The timeout for a reply that the other side sends after `timeout` at the latest."""
    return None if timeout is None else timeout + ANSWER_S


ANSWER_S = 10.0


def shutdown(timeout: float | None = 60.0) -> None:
    """Shuts down the cluster beside Ray's, including its objects, for all drivers. Ray's cluster
    continues.

    timeout: seconds to wait for the shutdown. No effect if there is no such cluster.
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
        _log.warning("the cluster beside Ray's did not shut down in order: %s", error)
    ray.kill(leader)


def enter() -> bool:
    """Joins the cluster beside Ray's. Returns False if this process is not a Ray worker, or no
    driver has called `init()`. Raises an error if it cannot join. This function is called only when
    a process first needs the cluster, because most Ray workers never need it. In processes that Ray
    starts, `current()`, and refs among a task's arguments, must work without preparation."""
    # Ray has no public function for the kind of a process; its own collectives also use this field.
    if ray._private.worker.global_worker.mode != ray.WORKER_MODE:
        return False
    try:
        leader = ray.get_actor(LEADER, namespace=NAMESPACE)
    except ValueError:
        return False
    sidecar.take_part(ray.get(leader.place.remote()))
    return True
