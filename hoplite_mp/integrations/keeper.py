"""The process that keeps a node of this host going for the processes of another engine.

Why it exists: the node is to outlive each of those processes, so it is the child of none of them.
The keeper leaves in order when nobody has used its node for Config.beside_idle_s: others first
fetch what only it holds of theirs. Of several that are started at once on a host, one stays.
One of them may have the cluster's manager; it stays as long as there is a node on another host, and
ends the cluster when it leaves. SIGTERM lets any of them leave at once.
It must never know: who the processes are.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import time
from typing import TYPE_CHECKING, Any

from hoplite_mp.config import Config
from hoplite_mp.errors import HopliteError
from hoplite_mp.integrations.beside import KeptCluster, Place, lock_name
from hoplite_mp.protocol.foreign import UsersOfNode
from hoplite_mp.protocol.local import DrainNode
from hoplite_mp.stop_request import StopRequest
from hoplite_mp.transport.rendezvous import Sole

if TYPE_CHECKING:
    from hoplite_mp.cluster import Cluster

__all__ = ["main"]

LOOK_S = 0.2  # for users; each look costs a round trip to the node
# How long others may take to fetch what only this node holds. Higher: large objects are saved over
# slow links. Lower: a host that is to be empty is so sooner.
DRAIN_S = 60.0
_log = logging.getLogger("hoplite_mp")


def main(told: dict[str, Any]) -> None:
    """From its start by `beside` to the end of the node."""
    # What is started from here on must not hold the pipe open in which who waits is told.
    answer = os.dup(1)
    silence = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1):
        os.dup2(silence, fd)
    os.close(silence)
    place = Place(**{**told["place"], "config": Config(**told["place"]["config"])})
    try:
        sole = Sole.take(lock_name(place))
    except OSError as error:
        _say(answer, {"error": "NodeLostError", "text": f"no directory for names is fit: {error}"})
        return
    if sole is None:
        _say(answer, {"taken": True})
        return
    ending = StopRequest()
    signal.signal(signal.SIGTERM, ending.signalled)
    listen = told["listen"]
    where = {"address": place.address} if listen is None else {"listen": listen}
    try:
        try:
            cluster = KeptCluster(**where, **place.options)
        except HopliteError as error:
            _say(answer, {"error": type(error).__name__, "text": str(error)})
            return
        with cluster:
            _say(answer, {"ready": True, "address": cluster.address})
            _keep(cluster, place.config.beside_idle_s, listen is not None, ending)
    finally:
        sole.close()


def _say(fd: int, what: dict[str, Any]) -> None:
    """The one thing that it says; who has started it may have ended."""
    with contextlib.suppress(OSError):
        os.write(fd, json.dumps(what).encode() + b"\n")
    os.close(fd)


def _keep(cluster: Cluster, idle_s: float, leads: bool, ending: StopRequest) -> None:
    """Until the cluster has ended, or nobody uses the node, or that is asked for."""
    host, channel = cluster._host, cluster._runtime.channel
    assert host is not None
    used_at = time.monotonic()
    draining: float | None = None
    with contextlib.suppress(HopliteError):  # the node has ended, which `ended` says
        while not host.ended.wait(LOOK_S) and not ending.is_set():
            now = time.monotonic()
            if draining is not None:
                if now > draining + DRAIN_S:
                    return
            elif channel.call(UsersOfNode()).value or (leads and len(cluster.nodes) > 1):
                used_at = now
            elif leads and now - used_at > idle_s:
                _log.info("nobody uses this cluster: it ends")
                return
            elif now - used_at > idle_s:
                _log.info("nobody uses this node: it leaves")
                channel.call(DrainNode(cluster._runtime.tasks.node_number))
                draining = now
