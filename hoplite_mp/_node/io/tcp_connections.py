"""TCP connections to other hosts, with a handshake that proves the token, and TLS if it is on.

Other components do not deal with the token, TLS or listening sockets.
"""

from __future__ import annotations

import contextlib
import socket
from typing import TYPE_CHECKING

from hoplite_mp._node.io.forward import Forward, reach
from hoplite_mp._transport.addresses import own_addresses
from hoplite_mp._transport.caller import Dialer
from hoplite_mp._transport.listener import Listener
from hoplite_mp._transport.sockets import listen

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from hoplite_mp._node.ports import LoopPort
    from hoplite_mp._protocol.greetings import Introduction
    from hoplite_mp._protocol.local import LanStart
    from hoplite_mp._transport.addresses import Endpoint
    from hoplite_mp._transport.certificates import Certificate
    from hoplite_mp._transport.conversation import Admission

__all__ = ["TcpConnections", "open_listener"]


class TcpConnections:
    """The connections of one node (see Connections in _node/ports.py)."""

    def __init__(self, loop: LoopPort, start: LanStart) -> None:
        self._loop = loop
        self._start = start
        self._address = ""  # the address at which other hosts connect to this host

    def call(
        self,
        endpoints: Sequence[Endpoint],
        *,
        role: str,
        mine: Introduction,
        timeout_s: float,
        cluster: bytes = b"",
        host_id: int | None = None,
        rounds_max: int = 0,
    ) -> Dialer:
        start = self._start
        return Dialer(
            endpoints,
            key=start.key,
            role=role,
            mine=mine,
            tls=start.tls,
            now=self._loop.now(),
            timeout_s=timeout_s,
            handshake_timeout_s=start.handshake_timeout_s,
            cluster=cluster,
            host_id=host_id,
            rounds_max=rounds_max,
        )

    def listen(
        self,
        cluster: bytes,
        certificate: bytes,
        mine: Introduction,
        roles: Mapping[str, Callable[[Admission], None]],
    ) -> str:
        from hoplite_mp._transport.certificates import Certificate

        listening_socket = socket.socket(fileno=self._start.peer_fd)
        proof = Certificate(certificate) if certificate else None
        listener = open_listener(
            self._loop, self._start, listening_socket, cluster, proof, mine, roles
        )
        self._address = listener.address.host
        return self._address

    def is_reached(self, endpoints: Sequence[Endpoint]) -> bool:
        sock = reach(endpoints)
        if sock is not None:
            sock.close()
        return sock is not None

    def lend(self, endpoints: Sequence[Endpoint], may: Callable[[str], bool]) -> Forward:
        listening_socket = listen(self._address, range(*self._start.ports))
        with contextlib.ExitStack() as stack:
            stack.callback(listening_socket.close)
            forward = Forward(listening_socket, endpoints, may)
            stack.pop_all()
        return forward

    def own_addresses(self) -> Collection[str]:
        return own_addresses()


# Listening sockets in the node's loop. Each admitted connection is passed to the handler of its
# role.
#
# Other nodes connect over TCP, and drivers on this host over a UNIX socket. No peer is trusted
# before the handshake has proved its token. A timer disconnects peers whose handshake takes too
# long.


def open_listener(
    loop: LoopPort,
    start: LanStart,
    listening_socket: socket.socket,
    cluster: bytes,
    certificate: Certificate | None,
    mine: Introduction,
    roles: Mapping[str, Callable[[Admission], None]],
) -> Listener:
    """Starts to admit connections. certificate: None without TLS. roles: maps each role to the
    function that receives the connection. Connections with any other role are closed."""
    listener = Listener(
        listening_socket,
        key=start.key,
        service="node",
        cluster=cluster,
        mine=mine,
        certificate=certificate,
        handshake_timeout_s=start.handshake_timeout_s,
        pending_handshakes_max=start.pending_handshakes_max,
    )

    def admit() -> None:
        for admission in listener.turn(loop.now()):
            take = roles.get(admission.role)
            if take is None:
                admission.stream.close()
            else:
                take(admission)
        if listener.deadline is not None:
            loop.call_later(max(0.0, listener.deadline - loop.now()), admit_again)

    def admit_again() -> None:
        if listener.deadline is not None and listener.deadline <= loop.now():
            admit()

    loop.watch(listener.fileno(), admit)
    return listener
