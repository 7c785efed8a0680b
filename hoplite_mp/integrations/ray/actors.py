"""The actors of Ray's that keep the cluster beside it: one leads, one stands on each host.

Why it exists: Ray starts actors again when they die, places them on hosts, and finds them by name;
so what keeps the nodes going is detached actors. The leading one is on Ray's head, whose end is
Ray's own, and follows the hosts that come and go; where its cluster is stands among the internal
values of Ray's head, for the actor that Ray starts in its place. The token travels there, and in
arguments and results of actors, which are Ray's own channels.
It must never know: what drivers and tasks do with the cluster.
"""

from __future__ import annotations

import logging
import os
import pickle
import threading
import time
from typing import TYPE_CHECKING, Any, NamedTuple

import ray
from ray.exceptions import RayError
from ray.experimental import internal_kv
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from hoplite_mp.errors import HopliteError
from hoplite_mp.integrations import beside
from hoplite_mp.transport.addresses import Address

if TYPE_CHECKING:
    from hoplite_mp.config import Config

__all__ = ["LEADER", "NAMESPACE", "Leader", "OnHost", "Settings", "head_of", "pinned"]

NAMESPACE = "hoplite_mp"
LEADER = "leader"
KEY = "place"  # in that namespace of Ray's internal values
HEAD = "node:__internal_head__"  # the resource by which Ray marks its head
# How often the leading actor looks which nodes Ray has. Higher: fewer questions to Ray's head.
# Lower: a new host gets its node sooner.
FOLLOW_S = 1.0
_log = logging.getLogger("hoplite_mp")


class Settings(NamedTuple):
    """What the first driver wants of the cluster."""

    memory: int | str | None
    ports: str | None
    tls: bool | None
    config: Config | None


def head_of(nodes: list[dict[str, Any]]) -> str:
    """Ray's id of its head."""
    living = [node for node in nodes if node["Alive"]]
    marked = [node for node in living if HEAD in node["Resources"]]
    return str((marked or living)[0]["NodeID"])


def pinned(node_id: str) -> NodeAffinitySchedulingStrategy:
    """There, or nowhere."""
    return NodeAffinitySchedulingStrategy(node_id, soft=False)


class OnHost:
    """Beside one node of Ray. It has the node of this library there started, and by taking part
    keeps it from leaving."""

    def __init__(self, place: beside.Place) -> None:
        self._member = beside.take_part(place)

    def number(self) -> int:
        """Of the node, as in `Cluster.nodes`. Raises why there is none."""
        if self._member.lost is not None:
            raise self._member.lost
        return int(self._member.cluster._runtime.tasks.node_number)


class Leader:
    """Keeps the cluster going: the manager, with the node beside Ray's head, is a keeper's there,
    and an actor like this that Ray has started again goes on with it."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._own = ray.get_runtime_context().get_node_id()
        self._on_hosts: dict[str, Any] = {}  # Ray's id of a node -> the actor there
        self._asked: dict[Any, tuple[str, Any]] = {}  # what an actor answers -> its place above
        self._standing: set[str] = set()  # where the node of this library has joined
        self._names: dict[str, str] = {}
        self._looked = threading.Condition()
        self._looks = 0
        self._ends = threading.Event()
        self._lead()
        threading.Thread(target=self._follow, name="hoplite_mp follow", daemon=True).start()

    def _lead(self) -> None:
        """The cluster of the actor before this one, if its manager is there; else a new one."""
        found = internal_kv._internal_kv_get(KEY, namespace=NAMESPACE)
        place = None if found is None else pickle.loads(found)
        if place is None or not beside.is_kept(place):
            settings = self._settings
            place = beside.begin_kept(
                str(Address(ray.util.get_node_ip_address(), 0)),
                memory=settings.memory,
                ports=settings.ports,
                tls=settings.tls,
                config=settings.config,
            )
            internal_kv._internal_kv_put(KEY, pickle.dumps(place), namespace=NAMESPACE)
            _kill_earlier(place.name)
        member = beside.take_part(place)
        with self._looked:
            self._place, self._member = place, member
            self._on_hosts, self._asked, self._standing = {}, {}, {self._own}
            self._looked.notify_all()

    def place(self) -> beside.Place:
        """Of the cluster; a new one if its manager has ended."""
        patience = self._place.config.start_timeout_s
        with self._looked:
            self._looked.wait_for(lambda: self._ends.is_set() or self._is_there, patience)
            return self._place

    @property
    def _is_there(self) -> bool:
        return beside.is_kept(self._place) and self._member.lost is None

    def pid(self) -> int:
        """For those who look for the process."""
        return os.getpid()

    def await_hosts(self, timeout: float | None) -> list[str]:
        """Returns when each living node of Ray has one beside it, or what is missing then."""
        deadline = None if timeout is None else time.monotonic() + timeout
        with self._looked:
            enough = self._looks + 2  # a look that began after this call
            while not self._ends.is_set() and (self._looks < enough or self._missing()):
                left = None if deadline is None else deadline - time.monotonic()
                if left is not None and left <= 0:
                    break
                self._looked.wait(left)
            return self._missing()

    def _missing(self) -> list[str]:
        return [name for one, name in self._names.items() if one not in self._standing]

    def end(self) -> beside.Place:
        """The nodes beside the others go with the manager."""
        with self._looked:
            self._ends.set()
            self._looked.notify_all()
        for actor in list(self._on_hosts.values()):
            ray.kill(actor)
        internal_kv._internal_kv_del(KEY, namespace=NAMESPACE)
        self._member.end()
        beside.end_kept(self._place)
        return self._place

    # -- following Ray ---------------------------------------------------------------------------

    def _follow(self) -> None:
        while not self._ends.is_set():
            try:
                if not self._is_there:
                    _log.warning("the manager beside Ray's head has ended: a new cluster begins")
                    self._lead()
                self._look()
            except Exception as error:  # Ray's are of many classes; the next look may succeed
                _log.warning("following Ray's nodes failed, and is tried again: %s", error)
            self._ends.wait(FOLLOW_S)

    def _look(self) -> None:
        living = {node["NodeID"]: node for node in ray.nodes() if node["Alive"]}
        for one in [one for one in self._on_hosts if one not in living]:
            # Ray has given the host up. This library has seen the death of its node, or will see
            # it; nothing of it is told twice.
            ray.kill(self._on_hosts.pop(one))
        for one in living:
            if one != self._own and one not in self._on_hosts:
                self._on_hosts[one] = _begin_on(one, self._place)
        waited_for = {one for one, _ in self._asked.values()}
        for one, actor in self._on_hosts.items():
            if one not in waited_for:  # those that stand, too: a node may be lost later
                self._asked[actor.number.remote()] = one, actor
        standing = self._standing & living.keys()
        done: list[Any] = []
        if self._asked:
            done, _ = ray.wait(list(self._asked), num_returns=len(self._asked), timeout=0)
        for answer in done:
            one, actor = self._asked.pop(answer)
            try:
                ray.get(answer)
                standing.add(one)
            except (RayError, HopliteError) as error:
                _log.warning(
                    "no node beside Ray on %s: %s",
                    living.get(one, {}).get("NodeManagerAddress"),
                    error,
                )
                standing.discard(one)
                if self._on_hosts.get(one) is actor:
                    ray.kill(self._on_hosts.pop(one))
        with self._looked:
            self._names = {one: str(node["NodeManagerAddress"]) for one, node in living.items()}
            self._standing = standing
            self._looks += 1
            self._looked.notify_all()


def _begin_on(node_id: str, place: beside.Place) -> Any:
    """The actor beside that node of Ray."""
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
    """A cluster begins: the one before it has ended, and what stood in it on other hosts goes."""
    for one in ray.util.list_named_actors(all_namespaces=True):
        if one["namespace"] != NAMESPACE or one["name"] == LEADER or one["name"].startswith(name):
            continue
        try:
            ray.kill(ray.get_actor(one["name"], namespace=NAMESPACE))
        except ValueError:  # it has just ended
            continue
