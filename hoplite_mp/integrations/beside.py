"""A cluster beside another engine (Dask, Ray): a node for each host, shared by its processes.

    place = beside.begin()            # once, in a process that lives as long as the cluster shall
    place = beside.begin_kept()       # or in one that may be killed and come again
    member = beside.take_part(place)  # in each process of the engine: then `current()` works
    member.leave()                    # or the end of the process

Why it exists: an engine starts, restarts and kills the processes of a host as it likes, and the
objects of that host are to outlive them. So the node is the child of none of them: the first one
that needs it starts a *keeper* (`integrations/keeper.py`), all attach to its node, and it ends some
time after the last of them, or with the cluster. A node has no workers: tasks are the engine's. A
process whose node was killed is let in again through the next one. The manager, too, may be a
keeper's: then nothing ends with the process that has begun the cluster.

In a process that takes part, pickling an ObjectRef by anything but this library makes its node hold
the object for Config.foreign_hold_s (`client/foreign.py`), because the engine carries the bytes.

A Place is a secret: it has the token in it. It pickles, so that it can travel inside the engine's
own connections; it never stands in arguments of processes, and its repr does not show the token.
It must never know: which engine that is.
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
import time
from pathlib import Path
from typing import Any

from hoplite_mp import errors
from hoplite_mp.client.entering import NoNodeHere
from hoplite_mp.cluster import Cluster
from hoplite_mp.config import Config
from hoplite_mp.errors import AuthError, ConfigError, HopliteError, ProtocolError
from hoplite_mp.transport.addresses import Address, parse_address
from hoplite_mp.transport.rendezvous import Sole

__all__ = [
    "KeptCluster",
    "Member",
    "Place",
    "begin",
    "begin_kept",
    "end_kept",
    "is_kept",
    "lock_name",
    "member_of",
    "take_part",
]

TOKEN_BYTES = 32
# Between two looks for a node that is just being started, or is just leaving. Lower costs a
# connection to the manager each time; higher is waited for.
LOOK_S = 0.1
# How long a process whose node has ended looks for another one. Higher: longer troubles of a host
# are bridged. Lower: threads do not try for long what cannot succeed.
REJOIN_S = 60.0
# How long a keeper that was told to end may take for it; then it is killed. Higher: a loaded
# machine passes. Lower: a shutdown does not take longer.
END_S = 15.0
# In the standard input of the keeper, not among its arguments: others could read those.
# The process that was started ends at once, so that the keeper is nobody's child.
BOOT = (
    "import json, os, sys; told = json.loads(sys.stdin.buffer.readline()); "
    "os.fork() and os._exit(0); sys.path[:] = told['path']; "
    "from hoplite_mp.integrations.keeper import main; main(told)"
)
_FINAL = (AuthError, ConfigError, ProtocolError)  # trying again does not help
_log = logging.getLogger("hoplite_mp")


@dataclasses.dataclass(frozen=True)
class Place:
    """Where a cluster is, and what a process needs to take part in it."""

    name: str  # of this life of the cluster: 32 hexadecimal digits
    address: str  # "host:port" of its manager
    token: str = dataclasses.field(repr=False)
    tls: bool = True
    memory: int | str | None = None  # limit of each node's store
    ports: str | None = None  # where nodes listen
    config: Config = dataclasses.field(default_factory=Config)

    def at(self, host: str) -> Place:
        """The same cluster, by the name or number under which this process reaches its host."""
        return dataclasses.replace(
            self, address=str(Address(host, parse_address(self.address).port))
        )

    @property
    def options(self) -> dict[str, Any]:
        """Arguments of `Cluster`."""
        return {
            "workers": 0,
            "ports": self.ports,
            "token": self.token,
            "tls": self.tls,
            "memory": self.memory,
            "config": self.config,
        }


class KeptCluster(Cluster):
    """With a node of its own on which the other processes of this host may rely."""

    _attaches = False
    _stays = True


class _Attached(Cluster):
    """Through the node of this host, or not at all."""

    _joins = False


class Member:
    """The part that this process takes in one cluster, whoever in it wanted that."""

    def __init__(self, place: Place, cluster: Cluster, passes_on: bool) -> None:
        self.place = place
        self.cluster = cluster  # the present one: after the loss of a node it is another
        self.lost: HopliteError | None = None  # why there is no way back into the cluster
        self._users = 1
        self._passes_on = passes_on
        self._changed = threading.Condition()  # cluster, or lost
        self._follows = threading.Thread(target=self._follow, name="hoplite_mp beside", daemon=True)

    def leave(self) -> None:
        """One of those who wanted it does no more; the last one ends it. Does not wait for others:
        what this process has put stays as long as somebody holds it."""
        with _lock:
            self._users -= 1
            if self._users:
                return
        self.end()

    def end(self) -> None:
        """This process takes no part any more, whoever in it wanted that. In the process that has
        begun the cluster it is the end of that."""
        with _lock:
            if _members.get(self.place.name) is not self:
                return
            del _members[self.place.name]
            cluster = self.cluster
        cluster.shutdown(wait=True, cancel_futures=True)

    def await_return(self, wait_s: float) -> None:
        """Returns when this process takes part, also if its node has just ended and another one
        has to be found. Raises why it cannot; after wait_s what calls raise says it."""
        with self._changed:
            self._changed.wait_for(lambda: self.lost is not None or self._takes_part, wait_s)
            if self.lost is not None:
                raise type(self.lost)(*self.lost.args)

    @property
    def _takes_part(self) -> bool:
        runtime = self.cluster._runtime
        return runtime.memory.lost is None or not runtime.client.usable

    def _follow(self) -> None:
        """Lets this process in again when its node has ended and nobody here wanted that."""
        while True:
            host = self.cluster._host
            if host is not None:
                host.ended.wait()
            if _members.get(self.place.name) is not self or not host or not host.lost:
                return
            begun_here = isinstance(self.cluster, KeptCluster) and not host.attached
            try:
                if begun_here:
                    raise errors.ManagerLostError("its node was on this host, with the manager")
                found = _enter(self.place, REJOIN_S, self._passes_on)
            # Anything: the system may refuse a process or a descriptor. Who asks next tries anew.
            except Exception as error:
                with self._changed, _lock:
                    self.lost = error if isinstance(error, HopliteError) else _no_node(error)
                    if _members.get(self.place.name) is self:
                        del _members[self.place.name]
                    self._changed.notify_all()
                _log.warning("this process takes no part in the cluster any more: %s", error)
                return
            with self._changed, _lock:
                left = _members.get(self.place.name) is not self
                if not left:
                    self.cluster = found
                self._changed.notify_all()
            if left:
                found.shutdown()
                return
            _log.warning("the node of this host has ended; this process takes part through another")


_members: dict[str, Member] = {}
_lock = threading.Lock()
_entering = threading.Lock()  # one thread at a time: two would begin two nodes


def begin(
    listen: str = "0.0.0.0:0",
    *,
    memory: int | str | None = None,
    ports: str | None = None,
    tls: bool | None = None,
    config: Config | None = None,
    passes_on: bool = False,
) -> Place:
    """Starts a cluster whose manager, and first node, end with this process. Arguments as of
    `Cluster`; memory, ports and config also of the nodes that join. passes_on: as of `take_part`.
    This process takes part."""
    place = _place(memory, ports, tls, config)
    cluster = KeptCluster(listen=listen, **place.options)
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
) -> Place:
    """As `begin`, but manager and first node are a keeper's on this host, so this process may end
    and another one go on with it. The cluster ends by `end_kept`, with that keeper, or when nobody
    has used it on any host for Config.beside_idle_s. This process does not take part yet."""
    place = _place(memory, ports, tls, config)
    said = _start_keeper(place, place.config.start_timeout_s, listen)
    error = _error_in(said)
    if error is not None:
        raise error
    return dataclasses.replace(place, address=str(said["address"]))


def is_kept(place: Place) -> bool:
    """On the host on which `begin_kept` was called: is the keeper with the manager there?"""
    return Sole.holder(lock_name(place)) is not None


def end_kept(place: Place) -> None:
    """On the host on which `begin_kept` was called: the end of the cluster, in order if that is
    possible within END_S; returns when its keeper is gone. No effect if it is already."""
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
            if Sole.holder(lock_name(place)) != pid:  # that number may be another process's by now
                return
            signal.pidfd_send_signal(process, number)
            if poll.poll(END_S * 1e3):
                return
    except ProcessLookupError:
        return
    finally:
        os.close(process)


def _place(
    memory: int | str | None, ports: str | None, tls: bool | None, config: Config | None
) -> Place:
    """Of a cluster that is about to begin, but for its address."""
    return Place(
        secrets.token_hex(16),
        "",
        secrets.token_urlsafe(TOKEN_BYTES),
        tls is not False,
        memory,
        ports,
        Config.from_environment() if config is None else config,
    )


def take_part(place: Place, wait_s: float | None = None, *, passes_on: bool = False) -> Member:
    """This process takes part in that cluster, through the node of its host, which is started if
    there is none; several calls in one process are one membership, which `leave` ends as often.

    wait_s: how long to try (Config.start_timeout_s). passes_on: refs that this process loads are
    for others, who shall learn it if one is gone. AuthError, ManagerLostError, ProtocolError: it
    cannot.
    """
    wait = place.config.start_timeout_s if wait_s is None else wait_s
    with _entering:
        member = member_of(place)
        if member is None:
            return _begin_member(place, _enter(place, wait, passes_on), passes_on)
        with _lock:
            member._users += 1
    member.await_return(wait)
    return member


def member_of(place: Place) -> Member | None:
    """What this process has of that cluster, if it takes part and has not lost it."""
    with _lock:
        member = _members.get(place.name)
        if member is not None and not member.cluster._runtime.client.usable:
            del _members[place.name]  # its Cluster has been shut down
            return None
        return member


def _begin_member(place: Place, cluster: Cluster, passes_on: bool) -> Member:
    _adapt(cluster, passes_on)
    member = Member(place, cluster, passes_on)
    with _lock:
        _members[place.name] = member
    member._follows.start()
    return member


def _adapt(cluster: Cluster, passes_on: bool) -> None:
    """This process does its work for an engine, and no node has workers of its own."""
    cluster._runtime.work_for_an_engine(passes_on)
    cluster._runtime.pool_sizes.setdefault(0, 0)  # so `submit` raises, and does not wait for ever


def _enter(place: Place, wait_s: float, passes_on: bool) -> Cluster:
    deadline = time.monotonic() + wait_s
    while True:
        try:
            cluster: Cluster = _Attached(address=place.address, **place.options)
            break
        except NoNodeHere:
            pass
        left = deadline - time.monotonic()
        error = _find_keeper(place, max(left, LOOK_S)) if left > 0 else None
        if isinstance(error, _FINAL):
            raise error
        if time.monotonic() >= deadline:
            if error is not None:
                raise error
            # There is no directory for names, say: a node of this process alone.
            _log.warning("no node of this host lets this process in: it brings one of its own")
            cluster = KeptCluster(address=place.address, **place.options)
            break
        time.sleep(LOOK_S)
    _adapt(cluster, passes_on)
    return cluster


def _find_keeper(place: Place, wait_s: float) -> HopliteError | None:
    """Has a process started that keeps a node of this host going, unless there is one; returns when
    it is there, or why it is not. The process is nobody's child."""
    try:
        sole = Sole.take(lock_name(place))
    except OSError as error:
        return errors.NodeLostError(f"no directory for names is fit: {error}")
    if sole is None:
        return None  # it is on its way, or leaves just now
    sole.close()
    return _error_in(_start_keeper(place, wait_s))


def _start_keeper(place: Place, wait_s: float, listen: str | None = None) -> dict[str, Any]:
    """What the keeper says when it is there, or cannot be. listen: it has the manager, there."""
    told = {
        "listen": listen,
        "path": [path or os.getcwd() for path in [*sys.path, _root()]],
        "place": dataclasses.asdict(place),
    }
    try:
        process = subprocess.Popen(
            [sys.executable, "-c", BOOT],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # signals of a terminal are for the engine
        )
    except OSError as error:  # no memory, or no descriptor, just now
        return {"error": "NodeLostError", "text": str(_no_node(error))}
    with process:
        try:
            patience = wait_s + place.config.start_timeout_s
            answer, _ = process.communicate(json.dumps(told).encode() + b"\n", patience)
            said: dict[str, Any] = json.loads(answer)
        except (subprocess.TimeoutExpired, ValueError):
            text = (
                "a node beside this process could not be started: the process that was to keep it "
                "has ended or does not answer"
            )
            return {"error": "NodeLostError", "text": text}
    return said


def _error_in(said: dict[str, Any]) -> HopliteError | None:
    if "error" not in said:
        return None
    kind: type[HopliteError] = getattr(errors, said["error"], HopliteError)
    return kind(said["text"])


def _no_node(error: Exception) -> HopliteError:
    return errors.NodeLostError(f"a node beside this process could not be started: {error}")


def lock_name(place: Place) -> str:
    """What the keeper of a host is the sole one of."""
    return f"keeper-{place.name}"


def _root() -> str:
    """Where the package lies."""
    return str(Path(__file__).resolve().parents[2])


def _forked() -> None:
    """A child has nothing of its parent's."""
    global _lock, _entering
    _members.clear()
    _lock, _entering = threading.Lock(), threading.Lock()


os.register_at_fork(after_in_child=_forked)
