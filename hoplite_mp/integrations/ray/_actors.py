"""The Ray actors that maintain a cluster beside Ray: one leader, and one actor on each host.

Ray restarts actors when they die, places them on hosts, and finds them by name, so detached actors
maintain the nodes. The leader runs on Ray's head, because Ray shuts down with that host. It watches
which hosts join and leave. The leader writes the cluster's Place into the internal key-value store
of Ray's head, from which the replacement of a dead leader reads it. The token is part of the Place,
which is sent over Ray's own connections, to that store and in actors' arguments and results.
"""

from __future__ import annotations

import logging
import os
import pickle
import threading
from typing import TYPE_CHECKING, Any, NamedTuple

import ray
from ray.exceptions import RayError
from ray.experimental import internal_kv
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from hoplite_mp._common import clock, locks
from hoplite_mp._transport.addresses import Address
from hoplite_mp.errors import HopliteError
from hoplite_mp.integrations._sidecar import sidecar

if TYPE_CHECKING:
    from hoplite_mp.config import Config

__all__ = ["LEADER", "NAMESPACE", "Leader", "OnHost", "Settings", "head_of", "pinned"]

NAMESPACE = "hoplite_mp"
LEADER = "leader"
KEY = "place"  # the key of the Place, in this namespace of Ray's internal key-value store
HEAD = "node:__internal_head__"  # the resource by which Ray marks its head
# Interval between two polls of the list of Ray nodes. Higher: fewer requests to Ray's head. Lower:
# a new host gets its node sooner.
FOLLOW_S = 1.0
_log = logging.getLogger("hoplite_mp")


class Settings(NamedTuple):
    """The first driver's settings for the cluster."""

    memory: int | str | None
    ports: str | None
    tls: bool | None
    config: Config | None
    ref_hold_s: float | None
    node_idle_s: float | None


def head_of(nodes: list[dict[str, Any]]) -> str:
    """Ray's id of its head node."""
    living = [node for node in nodes if node["Alive"]]
    marked = [node for node in living if HEAD in node["Resources"]]
    return str((marked or living)[0]["NodeID"])


def pinned(node_id: str) -> NodeAffinitySchedulingStrategy:
    """A strategy that schedules an actor on the given Ray node and on no other."""
    return NodeAffinitySchedulingStrategy(node_id, soft=False)


class OnHost:
    """The actor beside one Ray node. It takes part in the cluster, which starts the hoplite_mp
    node on that host, and keeps that node from leaving."""

    def __init__(self, place: sidecar.Place) -> None:
        self._member = sidecar.take_part(place)

    def number(self) -> int:
        """The number of the node, as in `Cluster.nodes`. Raises an error if there is no node."""
        if self._member.lost is not None:
            raise self._member.lost
        return int(self._member.cluster._runtime.tasks.node_number)


class Leader:
    """Maintains the cluster. A sidecar on Ray's head runs the manager and the node of that host,
    so a restarted leader continues with the same cluster."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._own = ray.get_runtime_context().get_node_id()
        self._on_hosts: dict[str, Any] = {}  # id of a Ray node -> the actor there
        self._requests: dict[Any, tuple[str, Any]] = {}  # Ray ref to a reply -> (node id, actor)
        self._joined: set[str] = set()  # ids of the Ray nodes beside which our nodes have joined
        self._names: dict[str, str] = {}
        self._polled = locks.condition("ray.leader")
        self._polls = 0
        self._ends = threading.Event()
        self._lead()
        threading.Thread(target=self._follow, name="hoplite_mp follow", daemon=True).start()

    def _lead(self) -> None:
        """Takes over the previous leader's cluster if the cluster's manager is running; otherwise
        starts a new cluster."""
        found = internal_kv._internal_kv_get(KEY, namespace=NAMESPACE)
        place = None if found is None else pickle.loads(found)
        if place is None or not sidecar.is_kept(place):
            settings = self._settings
            place = sidecar.begin_kept(
                str(Address(ray.util.get_node_ip_address(), 0)),
                memory=settings.memory,
                ports=settings.ports,
                tls=settings.tls,
                config=settings.config,
                ref_hold_s=settings.ref_hold_s,
                node_idle_s=settings.node_idle_s,
            )
            internal_kv._internal_kv_put(KEY, pickle.dumps(place), namespace=NAMESPACE)
            _kill_earlier(place.name)
        member = sidecar.take_part(place)
        with self._polled:
            self._place, self._member = place, member
            self._on_hosts, self._requests, self._joined = {}, {}, {self._own}
            self._polled.notify_all()

    def place(self) -> sidecar.Place:
        """The Place of the cluster. If the manager has died, waits for a new cluster."""
        patience = self._place.config.start_timeout_s
        with self._polled:
            self._polled.wait_for(lambda: self._ends.is_set() or self._is_there, patience)
            return self._place

    @property
    def _is_there(self) -> bool:
        return sidecar.is_kept(self._place) and self._member.lost is None

    def pid(self) -> int:
        """The pid of the leader's process."""
        return os.getpid()

    def await_hosts(self, timeout: float | None) -> list[str]:
        """Waits until each living Ray node has a node beside it, but at most `timeout` seconds.
        Returns the addresses of the Ray nodes without one."""
        deadline = None if timeout is None else clock.monotonic() + timeout
        with self._polled:
            enough = self._polls + 2  # the second poll from now begins after this call
            while not self._ends.is_set() and (self._polls < enough or self._missing()):
                left = None if deadline is None else deadline - clock.monotonic()
                if left is not None and left <= 0:
                    break
                self._polled.wait(left)
            return self._missing()

    def _missing(self) -> list[str]:
        return [name for node_id, name in self._names.items() if node_id not in self._joined]

    def end(self) -> sidecar.Place:
        """Shuts the cluster down; the nodes on other hosts exit with the manager."""
        with self._polled:
            self._ends.set()
            self._polled.notify_all()
        for actor in list(self._on_hosts.values()):
            ray.kill(actor)
        internal_kv._internal_kv_del(KEY, namespace=NAMESPACE)
        self._member.end()
        sidecar.end_kept(self._place)
        return self._place

    # -- following Ray ---------------------------------------------------------------------------

    def _follow(self) -> None:
        while not self._ends.is_set():
            try:
                if not self._is_there:
                    _log.warning("the manager beside Ray's head is lost: starting a new cluster")
                    self._lead()
                self._poll()
            except Exception as error:  # Ray raises many classes; the next poll may succeed
                _log.warning("following Ray's nodes failed, and will be retried: %s", error)
            self._ends.wait(FOLLOW_S)

    def _poll(self) -> None:
        living = {node["NodeID"]: node for node in ray.nodes() if node["Alive"]}
        for node_id in [node_id for node_id in self._on_hosts if node_id not in living]:
            # Ray has declared the host lost. The cluster itself detects the death of its node on
            # that host, so nothing is reported to the manager.
            ray.kill(self._on_hosts.pop(node_id))
        for node_id in living:
            if node_id != self._own and node_id not in self._on_hosts:
                self._on_hosts[node_id] = _begin_on(node_id, self._place)
        waited_for = {node_id for node_id, _ in self._requests.values()}
        for node_id, actor in self._on_hosts.items():
            if node_id not in waited_for:  # even if its node has joined, which may be lost later
                self._requests[actor.number.remote()] = node_id, actor
        joined = self._joined & living.keys()
        done: list[Any] = []
        if self._requests:
            done, _ = ray.wait(list(self._requests), num_returns=len(self._requests), timeout=0)
        for answer in done:
            node_id, actor = self._requests.pop(answer)
            try:
                ray.get(answer)
                joined.add(node_id)
            except (RayError, HopliteError) as error:
                _log.warning(
                    "no node beside Ray on %s: %s",
                    living.get(node_id, {}).get("NodeManagerAddress"),
                    error,
                )
                joined.discard(node_id)
                if self._on_hosts.get(node_id) is actor:
                    ray.kill(self._on_hosts.pop(node_id))
        with self._polled:
            self._names = {
                node_id: str(node["NodeManagerAddress"]) for node_id, node in living.items()
            }
            self._joined = joined
            self._polls += 1
            self._polled.notify_all()


def _begin_on(node_id: str, place: sidecar.Place) -> Any:
    """Starts or finds the actor beside the given Ray node."""
    made = ray.remote(OnHost).options(
        name=f"{place.name} {node_id}",
        namespace=NAMESPACE,
        lifetime="detached",
        get_if_exists=True,
        num_cpus=0,
        max_restarts=-1,
        max_task_retries=-1,
        scheduling_strategy=pinned(node_id),
    )
    return made.remote(place)


def _kill_earlier(name: str) -> None:
    """Kills the actors of earlier clusters, after a new cluster has started."""
    for one in ray.util.list_named_actors(all_namespaces=True):
        if one["namespace"] != NAMESPACE or one["name"] == LEADER or one["name"].startswith(name):
            continue
        try:
            ray.kill(ray.get_actor(one["name"], namespace=NAMESPACE))
        except ValueError:  # the actor has just exited
            continue
