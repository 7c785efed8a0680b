"""The manager's process: creates the loop from the descriptors that the supervisor passes."""

from __future__ import annotations

import signal
import socket
from typing import TYPE_CHECKING

from hoplite_mp._common import clock
from hoplite_mp._manager.heartbeats import Heartbeats
from hoplite_mp._manager.loop import Link, ManagerLoop
from hoplite_mp._planner.planner_core import BOARDS_MAX, OPERATIONS_MAX, Planner
from hoplite_mp._protocol.codec import encode

if TYPE_CHECKING:
    from collections.abc import Callable

    from hoplite_mp._manager.leadership import Leadership
    from hoplite_mp._protocol.local import LanStart
    from hoplite_mp._transport.listener import Listener

__all__ = ["listener_of", "main"]


def main(
    fd: int,
    lan: LanStart | None = None,
    again: bool = False,
    *,
    boards_max: int = BOARDS_MAX,
    operations_max: int = OPERATIONS_MAX,
) -> int:
    """Runs the manager. fd: a stream socket connected to this host's node. lan: if given, the
    manager also serves nodes that join over the network. again: whether it replaces a dead manager.
    """
    planner = Planner(boards_max=boards_max, operations_max=operations_max, again=again)
    loop = ManagerLoop(
        planner, clock.monotonic if lan is None or not lan.standby else _lease_clock()
    )
    loop.add(socket.socket(fileno=fd))
    if lan is not None:
        loop.open(
            listener_of(lan),
            lan.certificate,
            Heartbeats(lan.heartbeat_interval_s, lan.heartbeat_timeout_s),
        )
        if lan.standby:
            loop.set_leadership(_leadership(lan, again))
        loop.end_on_signal(signal.SIGTERM)
    return loop.run()


def _lease_clock() -> Callable[[], float]:
    from hoplite_mp._manager.leadership import lease_clock

    return lease_clock


def _leadership(lan: LanStart, again: bool) -> Leadership[Link]:
    from hoplite_mp._manager.leadership import Leadership
    from hoplite_mp._planner.terms import lease_s

    return Leadership(
        tuple(lan.standby),
        own=0,  # this host's node joins first
        lease_s=lease_s(lan.heartbeat_timeout_s),
        write=lambda link, message: link.write(encode(message)),
        again=again,
    )


def listener_of(lan: LanStart) -> Listener:
    """The Listener for nodes on the network."""
    from hoplite_mp._protocol.greetings import Introduction, software_versions
    from hoplite_mp._transport.certificates import Certificate
    from hoplite_mp._transport.listener import Listener

    return Listener(
        socket.socket(fileno=lan.manager_fd),
        key=lan.key,
        service="manager",
        cluster=lan.cluster,
        mine=Introduction(lan.host_id, software_versions()),
        certificate=Certificate(lan.certificate) if lan.certificate else None,
        handshake_timeout_s=lan.handshake_timeout_s,
        pending_handshakes_max=lan.pending_handshakes_max,
    )
