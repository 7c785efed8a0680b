"""A cluster beside another engine (Dask, Ray): one node on each host, shared by its processes.

    place = sidecar.begin()            # once, in a process that runs as long as the cluster
    place = sidecar.begin_kept()       # or in a process that may be killed and restarted
    member = sidecar.take_part(place)  # in each process of the engine: then `current()` works
    member.leave()                     # or the process exits

An engine starts, restarts and kills its processes on a host as it likes, and the objects on that
host must outlive these processes. Therefore the node is not a child of any of them. The first
process that needs the node starts a *sidecar* (`integrations/_sidecar/sidecar_main.py`), and all
processes attach to the sidecar's node. The node exits with the cluster, or some time after the last
of these processes has exited. It has no workers, because tasks run in the engine's workers. A
process whose node was killed takes part again through the next node. A sidecar can also run the
manager; then the cluster outlives the process that started it.

When code outside this library pickles an ObjectRef in a participating process, the process's node
holds the object for `Place.ref_hold_s` (`_client/foreign_refs.py`), because the engine carries the
pickled bytes.

A Place is a secret, because it contains the token. It can be pickled and sent over the engine's own
connections. It is never passed as a command-line argument, and its repr omits the token.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import secrets
import select
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

from hoplite_mp import errors
from hoplite_mp._api.cluster import Cluster
from hoplite_mp._client.launch import interpreter
from hoplite_mp._client.open_cluster import NoNodeHere
from hoplite_mp._common import clock, locks
from hoplite_mp._common.ref import ObjectRef, named
from hoplite_mp._transport.addresses import Address, parse_address
from hoplite_mp._transport.rendezvous import Sole
from hoplite_mp.config import Config, check_seconds
from hoplite_mp.errors import AuthError, ConfigError, HopliteError, ProtocolError

__all__ = [
    "CarriedRef",
    "Place",
    "SidecarCluster",
    "SidecarMember",
    "begin",
    "begin_kept",
    "end_kept",
    "is_kept",
    "lock_name",
    "member_of",
    "take_part",
]


TOKEN_BYTES = 32
# Interval of checks for a node that is starting or leaving. Lower: more connections to the
# manager. Higher: the process waits longer.
POLL_S = 0.1
# How long a process whose node has exited looks for another node. Higher: the process survives
# longer outages of its node. Lower: its thread stops futile attempts earlier.
REJOIN_S = 60.0
# How long a sidecar may take to exit after SIGTERM before it is killed. Also how long
# `SidecarMember.end` waits for its thread, which may be connecting. Higher: an orderly exit is
# possible on a loaded machine. Lower: a shutdown takes less time.
END_S = 15.0
# The sidecar reads the place from its standard input, because other users could read its command
# line. The started process forks the sidecar and exits immediately, so that the sidecar is not a
# child of this process.
BOOT = (
    "import json, os, sys; given = json.loads(sys.stdin.buffer.readline()); "
    "os.fork() and os._exit(0); sys.path[:] = given['path']; "
    "from hoplite_mp.integrations._sidecar.sidecar_main import main; main(given)"
)
_FINAL = (AuthError, ConfigError, ProtocolError)  # a retry does not help
_log = logging.getLogger("hoplite_mp")


# Default of `Place.ref_hold_s`. Higher: tasks may wait longer in the engine's queues. Lower: the
# memory of objects whose refs are dropped or never loaded is freed sooner.
REF_HOLD_S = 600.0
# Default of `Place.node_idle_s`. Higher: a restarted worker finds its objects still on its host.
# Lower: a host that the engine no longer uses frees its memory sooner.
NODE_IDLE_S = 15.0


@dataclasses.dataclass(frozen=True)
class Place:
    """The address of a cluster, and the data that a process needs to take part in it."""

    name: str  # 32 random hexadecimal digits, new for each cluster
    address: str  # "host:port" of its manager
    token: str = dataclasses.field(repr=False)
    tls: bool = True
    memory: int | str | None = None  # limit of each node's store
    ports: str | None = None  # the ports on which nodes listen
    config: Config = dataclasses.field(default_factory=Config)
    # How long a node holds an object after a process has pickled a ref to the object for the
    # engine.
    ref_hold_s: float = REF_HOLD_S
    node_idle_s: float = NODE_IDLE_S  # how long an unused node keeps running

    def at(self, host: str) -> Place:
        """The same place, with the name or address by which this process reaches the manager's
        host."""
        return dataclasses.replace(
            self, address=str(Address(host, parse_address(self.address).port))
        )

    @property
    def options(self) -> dict[str, Any]:
        """The arguments of `Cluster`, apart from addresses."""
        return {
            "workers": 0,
            "ports": self.ports,
            "token": self.token,
            "tls": self.tls,
            "memory": self.memory,
            "config": self.config,
        }


class SidecarCluster(Cluster):
    """A Cluster with its own node, to which other processes on this host may attach."""

    _attaches = False
    _stays = True


class _Attached(Cluster):
    """A Cluster through this host's existing node. Raises NoNodeHere if there is none."""

    _joins = False


class SidecarMember:
    """The membership of this process in one cluster, shared by all callers of `take_part`."""

    def __init__(self, place: Place, cluster: Cluster, passes_on: bool) -> None:
        self.place = place
        self.cluster = cluster  # replaced after the loss of a node
        self.lost: HopliteError | None = None  # the reason why this process cannot take part again
        self._users = 1
        self._passes_on = passes_on
        # Notified when `cluster` or `lost` changes.
        self._changed = locks.condition("engine.changed")
        # Set when the membership ends; stops the search for another node.
        self._ended = threading.Event()
        self._follows = threading.Thread(target=self._follow, name="hoplite_mp beside", daemon=True)

    def leave(self) -> None:
        """Undoes one `take_part`; the last `leave` ends the membership. Does not wait for other
        processes: objects that this process has put stay while any process holds them."""
        with _lock:
            self._users -= 1
            if self._users:
                return
        self.end()

    def end(self) -> None:
        """Ends the membership, even if some callers have not left. In the process that called
        `begin`, this shuts the cluster down."""
        with _lock:
            if _members.get(self.place.name) is not self:
                return
            del _members[self.place.name]
            cluster = self.cluster
        self._ended.set()
        cluster.shutdown(wait=True, cancel_futures=True)
        # Otherwise this thread could start an unused sidecar after this method has returned.
        self._follows.join(END_S)

    def await_return(self, wait_s: float) -> None:
        """Returns when this process takes part. If its node has just exited, waits for another node
        for up to wait_s. If there is no other node, raises the error that has ended the search. If
        the search is still running after wait_s, returns, and the next call to the library raises
        an error."""
        with self._changed:
            self._changed.wait_for(lambda: self.lost is not None or self._takes_part, wait_s)
            if self.lost is not None:
                raise type(self.lost)(*self.lost.args)

    @property
    def _takes_part(self) -> bool:
        runtime = self.cluster._runtime
        return runtime.memory.lost is None or not runtime.client.usable

    def _follow(self) -> None:
        """Takes part again through another node whenever the node has exited and this process has
        not left the cluster."""
        while True:
            host = self.cluster._host
            if host is not None:
                host.ended.wait()
            if _members.get(self.place.name) is not self or not host or not host.lost:
                return
            begun_here = isinstance(self.cluster, SidecarCluster) and not host.attached
            try:
                if begun_here:
                    raise errors.ManagerLostError("its node was on this host, with the manager")
                found = _enter(self.place, REJOIN_S, self._passes_on, self._ended)
            # Any exception is possible here; for example, the system may refuse to start a process
            # or to open a file. The next call to `take_part` tries again.
            except Exception as error:
                if self._ended.is_set():
                    return
                with self._changed, _lock:
                    self.lost = error if isinstance(error, HopliteError) else _no_node(error)
                    if _members.get(self.place.name) is self:
                        del _members[self.place.name]
                    self._changed.notify_all()
                _log.warning("this process no longer takes part in the cluster: %s", error)
                return
            with self._changed, _lock:
                left = _members.get(self.place.name) is not self
                if not left:
                    found._runtime.replace(self.cluster._runtime)
                    self.cluster = found
                self._changed.notify_all()
            if left:
                found.shutdown()
                return
            _log.warning("the node on this host has exited; this process now uses another one")


_members: dict[str, SidecarMember] = {}
_lock = locks.lock("engine.members")
# Only one thread at a time enters a cluster, because two threads would enter it twice.
_entering = locks.lock("engine.entering")


def begin(
    listen: str = "0.0.0.0:0",
    *,
    memory: int | str | None = None,
    ports: str | None = None,
    tls: bool | None = None,
    config: Config | None = None,
    ref_hold_s: float | None = None,
    node_idle_s: float | None = None,
    passes_on: bool = False,
) -> Place:
    """Starts a cluster whose manager and first node exit with this process, which takes part in
    the cluster. Arguments as for `Cluster`; memory, ports and config also apply to the nodes that
    join. ref_hold_s, node_idle_s: see `Place`. passes_on: as for `take_part`."""
    place = _place(memory, ports, tls, config, ref_hold_s, node_idle_s)
    cluster = SidecarCluster(listen=listen, **place.options)
    place = dataclasses.replace(place, address=str(cluster.address))
    _begin_member(place, cluster, passes_on)
    return place


def begin_kept(
    listen: str = "0.0.0.0:0",
    *,
    memory: int | str | None = None,
    ports: str | None = None,
    tls: bool | None = None,
    config: Config | None = None,
    ref_hold_s: float | None = None,
    node_idle_s: float | None = None,
) -> Place:
    """Like `begin`, but a sidecar on this host runs the manager and the first node, so the cluster
    outlives this process. The cluster shuts down when `end_kept` is called, when that sidecar
    exits, or when no process on any host has used it for `node_idle_s`. This process does not take
    part yet."""
    place = _place(memory, ports, tls, config, ref_hold_s, node_idle_s)
    message = _start_sidecar(place, place.config.start_timeout_s, listen)
    error = _error_in(message)
    if error is not None:
        raise error
    return dataclasses.replace(place, address=str(message["address"]))


def is_kept(place: Place) -> bool:
    """Whether the sidecar with the manager is running. Call this only on the host of
    `begin_kept`."""
    return Sole.holder(lock_name(place)) is not None


def end_kept(place: Place) -> None:
    """Shuts the cluster down: sends SIGTERM to its sidecar, and kills the sidecar if it is still
    running after END_S. Returns when the sidecar has exited. No effect if it has already exited.
    Call this only on the host of `begin_kept`."""
    pid = Sole.holder(lock_name(place))
    if not pid:
        return
    try:
        process = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        poll = select.poll()
        poll.register(process, select.POLLIN)
        for number in (signal.SIGTERM, signal.SIGKILL):
            if Sole.holder(lock_name(place)) != pid:  # the pid may have been reused
                return
            signal.pidfd_send_signal(process, number)
            if poll.poll(END_S * 1e3):
                return
    except ProcessLookupError:
        return
    finally:
        os.close(process)


def _place(
    memory: int | str | None,
    ports: str | None,
    tls: bool | None,
    config: Config | None,
    ref_hold_s: float | None,
    node_idle_s: float | None,
) -> Place:
    """The Place of a new cluster, without its address, which is not known yet."""
    config = Config.from_environment() if config is None else config
    return Place(
        secrets.token_hex(16),
        "",
        secrets.token_urlsafe(TOKEN_BYTES),
        tls is not False,
        memory,
        ports,
        config,
        _seconds("ref_hold_s", ref_hold_s, config, REF_HOLD_S),
        _seconds("node_idle_s", node_idle_s, config, NODE_IDLE_S),
    )


def _seconds(name: str, given: float | None, config: Config, default: float) -> float:
    """The argument if it is given; otherwise the deprecated Config field that preceded the
    argument, or the default."""
    return check_seconds(name, getattr(config, f"_{name}", default) if given is None else given)


def take_part(
    place: Place, wait_s: float | None = None, *, passes_on: bool = False
) -> SidecarMember:
    """Lets this process take part in the cluster, through the node on its host, which is started if
    needed. Several calls in one process share one membership, which ends after an equal number of
    calls to `leave`.

    wait_s: how long to try (default: Config.start_timeout_s). passes_on: this process loads refs
    only to pass them on (see `_client/foreign_refs.py`). Raises AuthError, ManagerLostError or
    ProtocolError if this process cannot take part.
    """
    wait = place.config.start_timeout_s if wait_s is None else wait_s
    with _entering:
        member = member_of(place)
        if member is None:
            cluster = _enter(place, wait, passes_on, threading.Event())
            return _begin_member(place, cluster, passes_on)
        with _lock:
            member._users += 1
    member.await_return(wait)
    return member


def member_of(place: Place) -> SidecarMember | None:
    """The membership of this process in the cluster; None if it does not take part, or has lost the
    cluster."""
    with _lock:
        member = _members.get(place.name)
        if member is not None and not member.cluster._runtime.client.usable:
            del _members[place.name]  # the membership's Cluster has been shut down
            member._ended.set()
            return None
        return member


def _begin_member(place: Place, cluster: Cluster, passes_on: bool) -> SidecarMember:
    _adapt(cluster, place.ref_hold_s, passes_on)
    member = SidecarMember(place, cluster, passes_on)
    with _lock:
        member._follows.start()  # raises if the system refuses a thread
        _members[place.name] = member
    return member


def _adapt(cluster: Cluster, ref_hold_s: float, passes_on: bool) -> None:
    """Prepares this process to work for an engine, in a cluster whose nodes have no workers."""
    cluster._runtime.work_for_an_engine(ref_hold_s, passes_on)
    cluster._runtime.pool_sizes.setdefault(0, 0)  # so `submit` raises instead of waiting forever


def _enter(place: Place, wait_s: float, passes_on: bool, left: threading.Event) -> Cluster:
    """Enters the cluster within wait_s, or raises the error that has prevented this. left: an event
    that is set when the cluster is no longer needed."""
    deadline = clock.monotonic() + wait_s
    while True:
        if left.is_set():
            raise errors.ManagerLostError("this process has left the cluster")
        try:
            cluster: Cluster = _Attached(address=place.address, **place.options)
            break
        except NoNodeHere:
            pass
        rest_s = deadline - clock.monotonic()
        error = None
        if rest_s > 0 and not left.is_set():
            error = _find_sidecar(place, max(rest_s, POLL_S), left)
        if isinstance(error, _FINAL):
            raise error
        if clock.monotonic() >= deadline and not left.is_set():
            if error is not None:
                raise error
            # No sidecar has failed, but this process cannot attach to a node, so it starts its own.
            _log.warning("no node on this host admits this process: starting a node for it")
            cluster = SidecarCluster(address=place.address, **place.options)
            break
        left.wait(POLL_S)
    _adapt(cluster, place.ref_hold_s, passes_on)
    return cluster


def _find_sidecar(place: Place, wait_s: float, left: threading.Event) -> HopliteError | None:
    """Starts a sidecar on this host unless there is one. Returns None when the sidecar's node has
    joined, and an error if it could not."""
    try:
        sole = Sole.take(lock_name(place))
    except OSError as error:
        return errors.NodeLostError(f"no directory for names is suitable: {error}")
    if sole is None:
        return None  # another sidecar is starting or leaving
    sole.close()
    return _error_in(_start_sidecar(place, wait_s, left=left))


def _start_sidecar(
    place: Place, wait_s: float, listen: str | None = None, left: threading.Event | None = None
) -> dict[str, Any]:
    """Starts a sidecar. Returns the message that the sidecar sends when its node has joined, or
    could not be started. listen: the address at which the sidecar's manager listens; None: the
    sidecar runs no manager. left: once it is set, the message is not awaited, and the sidecar
    exits by itself because no process uses its node."""
    arguments = {
        "listen": listen,
        "path": [path or os.getcwd() for path in [*sys.path, _root()]],
        "place": dataclasses.asdict(place),
    }
    try:
        # A file in memory, because a pipe may not accept all bytes at once.
        with os.fdopen(os.memfd_create("hoplite_mp sidecar"), "w+b") as given:
            given.write(json.dumps(arguments).encode() + b"\n")
            given.seek(0)
            process = subprocess.Popen(
                [interpreter(), "-c", BOOT],
                stdin=given,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # a terminal's signals are for the engine only
            )
    except OSError as error:  # no free memory or descriptor
        return {"error": "NodeLostError", "text": str(_no_node(error))}
    with process:
        try:
            patience_s = wait_s + place.config.start_timeout_s
            message: dict[str, Any] = json.loads(_answer(process, patience_s, left))
        except (subprocess.TimeoutExpired, ValueError):
            text = (
                "a node beside this process could not be started: the sidecar has exited "
                "or does not answer"
            )
            return {"error": "NodeLostError", "text": text}
    return message


def _answer(process: subprocess.Popen[bytes], wait_s: float, left: threading.Event | None) -> bytes:
    """Reads the output of the process until the process closes it. Raises subprocess.TimeoutExpired
    if this takes longer than wait_s, or if `left` is set before then."""
    deadline = clock.monotonic() + wait_s
    while True:
        try:
            return process.communicate(timeout=POLL_S)[0]
        except subprocess.TimeoutExpired:  # the next call returns all output, so nothing is lost
            if clock.monotonic() >= deadline or (left is not None and left.is_set()):
                raise


def _error_in(message: dict[str, Any]) -> HopliteError | None:
    if "error" not in message:
        return None
    kind: type[HopliteError] = getattr(errors, message["error"], HopliteError)
    return kind(message["text"])


def _no_node(error: Exception) -> HopliteError:
    return errors.NodeLostError(f"a node beside this process could not be started: {error}")


def lock_name(place: Place) -> str:
    """The name of the lock that allows a single sidecar on each host."""
    return f"sidecar-{place.name}"


def _root() -> str:
    """The directory that contains the package."""
    return str(Path(__file__).resolve().parents[3])


def _forked() -> None:
    """Drops the parent's memberships and locks in a forked child."""
    global _lock, _entering
    _members.clear()
    _lock, _entering = locks.lock("engine.members"), locks.lock("engine.entering")


os.register_at_fork(after_in_child=_forked)


class CarriedRef:
    """A ref that holds the object in this process; its pickled bytes hold nothing.

    Use it when this library itself sends a ref through an engine and is notified of its arrival.
    The sender holds the object until then, so no node has to hold it for `ref_hold_s`, and its
    memory is freed as soon as no process needs it."""

    __slots__ = ("ref",)

    def __init__(self, ref: ObjectRef[Any]) -> None:
        self.ref = ref

    def __reduce__(self) -> tuple[Any, ...]:
        return _load, named(self.ref)

    def __repr__(self) -> str:
        return f"CarriedRef({self.ref})"


def _load(attach: Any, arguments: tuple[Any, ...]) -> CarriedRef:
    return CarriedRef(attach(*arguments))
