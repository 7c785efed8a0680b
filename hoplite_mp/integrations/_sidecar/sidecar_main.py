"""The sidecar: a process that runs a node on this host for the processes of another engine.

The node must outlive each of those processes, so it is not a child of any of them. When no process
has used the node for `Place.node_idle_s`, the node leaves the cluster. Before it leaves, other
nodes fetch the objects that only this node holds. If several sidecars start at the same time on a
host, only one stays. One sidecar of the cluster may run the manager. That sidecar stays while there
is a node on another host, and shuts the cluster down when it leaves. On SIGTERM, every sidecar
leaves immediately.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
from typing import TYPE_CHECKING, Any

from hoplite_mp._common import clock
from hoplite_mp._common.signals import StopRequest
from hoplite_mp._protocol.local import CountDrivers, DrainNode
from hoplite_mp._transport.rendezvous import Sole
from hoplite_mp.config import Config
from hoplite_mp.errors import HopliteError
from hoplite_mp.integrations._sidecar.sidecar import Place, SidecarCluster, lock_name

if TYPE_CHECKING:
    from hoplite_mp._api.cluster import Cluster

__all__ = ["main"]

POLL_S = 0.2  # interval of checks for users of the node; each costs a round trip to the node
# How long other nodes may take to fetch objects that only this node holds. Higher: large objects
# are saved over slow links. Lower: the memory of an unused host is freed sooner.
DRAIN_S = 60.0
_log = logging.getLogger("hoplite_mp")


def main(arguments: dict[str, Any]) -> None:
    """Runs the sidecar until its node stops. arguments: see `sidecar._start_sidecar`."""
    # The process that started the sidecar reads its message until the pipe is closed, so child
    # processes must not inherit the pipe.
    answer = os.dup(1)
    silence = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1):
        os.dup2(silence, fd)
    os.close(silence)
    place = Place(**{**arguments["place"], "config": Config(**arguments["place"]["config"])})
    try:
        sole = Sole.take(lock_name(place))
    except OSError as error:
        _send_message(
            answer,
            {"error": "NodeLostError", "text": f"no directory for names is suitable: {error}"},
        )
        return
    if sole is None:
        _send_message(answer, {"taken": True})
        return
    ending = StopRequest()
    signal.signal(signal.SIGTERM, ending.signalled)
    listen = arguments["listen"]
    where = {"address": place.address} if listen is None else {"listen": listen}
    try:
        try:
            cluster = SidecarCluster(**where, **place.options)
        except HopliteError as error:
            _send_message(answer, {"error": type(error).__name__, "text": str(error)})
            return
        with cluster:
            _send_message(answer, {"ready": True, "address": cluster.address})
            _keep(cluster, place.node_idle_s, listen is not None, ending)
    finally:
        sole.close()


def _send_message(fd: int, message: dict[str, Any]) -> None:
    """Sends the sidecar's only message. The process that started the sidecar may have exited."""
    with contextlib.suppress(OSError):
        os.write(fd, json.dumps(message).encode() + b"\n")
    os.close(fd)


def _keep(cluster: Cluster, idle_s: float, leads: bool, ending: StopRequest) -> None:
    """Returns when the cluster has shut down, when no process uses the node any more, or on
    SIGTERM."""
    host, channel = cluster._host, cluster._runtime.channel
    assert host is not None
    used_at = clock.monotonic()
    draining: float | None = None
    with contextlib.suppress(HopliteError):  # the node has exited
        while not host.ended.wait(POLL_S) and not ending.is_set():
            now = clock.monotonic()
            if draining is not None:
                if now > draining + DRAIN_S:
                    return
            elif channel.call(CountDrivers()).value or (leads and len(cluster.nodes) > 1):
                used_at = now
            elif leads and now - used_at > idle_s:
                _log.info("this cluster is unused and shuts down")
                return
            elif now - used_at > idle_s:
                _log.info("this node is unused and leaves the cluster")
                channel.call(DrainNode(cluster._runtime.tasks.node_number))
                draining = now
