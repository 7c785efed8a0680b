"""The standby's process: a manager that waits until it may decide.

Nodes that have lost their manager connect to the standby's listener. The standby collects their
votes and, once it has won, is an ordinary manager. The former manager may still be running but cut
off from the network. As soon as it is reachable, the standby informs it that its term has ended.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import select
import signal
import socket
import threading
from typing import TYPE_CHECKING

from hoplite_mp._common import clock
from hoplite_mp._manager.heartbeats import Heartbeats
from hoplite_mp._manager.leadership import Leadership, lease_clock
from hoplite_mp._manager.loop import Link, ManagerLoop
from hoplite_mp._manager.main import listener_of
from hoplite_mp._planner.planner_core import Planner
from hoplite_mp._planner.terms import Candidate, lease_s
from hoplite_mp._protocol.codec import encode
from hoplite_mp._protocol.greetings import Introduction, software_versions
from hoplite_mp._protocol.terms import Superseded
from hoplite_mp._transport.addresses import Endpoint
from hoplite_mp._transport.caller import Dialer
from hoplite_mp.errors import HopliteError

if TYPE_CHECKING:
    from hoplite_mp._protocol.local import LanStart
    from hoplite_mp._transport.stream import ByteStream

__all__ = ["main"]

IDENTITY_BYTES = 7
# Pause between two attempts to connect to the former manager. With a lower value, a manager that
# was cut off steps down sooner, but there are more useless attempts if its host is dead.
NOTIFY_PAUSE_S = 2.0
# Timeout for an attempt to connect, and for the former manager to close the connection afterwards.
NOTIFY_TIMEOUT_S = 2.0
_log = logging.getLogger("hoplite_mp")


def main(lan: LanStart, own: int) -> int:
    """Waits for votes, and becomes the manager if it wins. own: the number of this host's node.
    lan: this node's start parameters, with the standby's listening socket and the cluster's id and
    certificate."""
    candidate = Candidate(own, int.from_bytes(secrets.token_bytes(IDENTITY_BYTES)) + 1)
    leadership: Leadership[Link] = Leadership(
        tuple(lan.standby),
        own=own,
        lease_s=lease_s(lan.heartbeat_timeout_s),
        write=lambda link, message: link.write(encode(message)),
        candidate=candidate,
    )
    leadership.on_won = lambda term: _notify_former_manager(lan, term)
    loop = ManagerLoop(Planner(again=True, own=own), lease_clock)
    loop.open(
        listener_of(lan),
        lan.certificate,
        Heartbeats(lan.heartbeat_interval_s, lan.heartbeat_timeout_s),
    )
    loop.set_leadership(leadership)
    loop.end_on_signal(signal.SIGTERM)
    return loop.run()


def _notify_former_manager(lan: LanStart, term: int) -> None:
    """Informs the former manager of the new term, in a daemon thread."""
    thread = threading.Thread(
        target=_notify, args=(lan, term), name="hoplite_mp superseding", daemon=True
    )
    thread.start()


def _notify(lan: LanStart, term: int) -> None:
    endpoints = [Endpoint(socket.AddressFamily(f), tuple(where)) for f, where in lan.manager]
    mine = Introduction(lan.host_id, software_versions())
    while True:
        caller = Dialer(
            endpoints,
            key=lan.key,
            role="voter",
            mine=mine,
            tls=lan.tls,
            now=clock.monotonic(),
            timeout_s=NOTIFY_TIMEOUT_S,
            handshake_timeout_s=NOTIFY_TIMEOUT_S,
            cluster=lan.cluster,
        )
        with contextlib.suppress(HopliteError, OSError):  # the former manager cannot be reached
            stream = caller.wait().stream
            stream.write(encode(Superseded(term)))
            _await_close(stream)
            stream.close()
        clock.sleep(NOTIFY_PAUSE_S)


def _await_close(stream: ByteStream) -> None:
    """Waits until the other side has read the message and closed the connection, for at most
    NOTIFY_TIMEOUT_S."""
    poll, deadline = select.poll(), clock.monotonic() + NOTIFY_TIMEOUT_S
    poll.register(stream.fileno(), select.POLLIN)
    while stream.flush() and stream.read() is not None:
        left_s = deadline - clock.monotonic()
        if left_s <= 0:
            return
        poll.poll(left_s * 1000)
