"""Listening sockets in the node's loop; each admitted connection goes to the handler of its role.

Other nodes connect over TCP, drivers of this host over a UNIX socket. All of them are strangers
until the handshake has proved that they have the token, and those that take too long for it must be
disconnected by a timer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hoplite_mp._transport.listener import Listener

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Mapping

    from hoplite_mp._node.ports import LoopPort
    from hoplite_mp._protocol.greetings import Introduction
    from hoplite_mp._protocol.local import LanStart
    from hoplite_mp._transport.certificates import Certificate
    from hoplite_mp._transport.conversation import Admission

__all__ = ["open_listener"]


def open_listener(
    loop: LoopPort,
    start: LanStart,
    listening_socket: socket.socket,
    cluster: bytes,
    certificate: Certificate | None,
    mine: Introduction,
    roles: Mapping[str, Callable[[Admission], None]],
) -> Listener:
    """Starts admitting connections. certificate: None without TLS. roles: role -> function that
    takes the connection; any other role is refused."""
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
