"""Where other nodes come in: the listening socket of this node, and handshakes over it.

Why it exists: a stranger is let in when it has proved that it has the token; what it comes for, its
role, decides which room takes the connection.
It must never know: what is said over a connection.
"""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING

from hoplite_mp.transport.door import Door

if TYPE_CHECKING:
    from collections.abc import Callable

    from hoplite_mp.node.ports import Loop
    from hoplite_mp.protocol.greetings import Introduction
    from hoplite_mp.protocol.local import LanStart
    from hoplite_mp.transport.conversation import Admission

__all__ = ["PeerDoor"]


class PeerDoor:
    """Of one node. It listens from its making on."""

    def __init__(
        self,
        loop: Loop,
        start: LanStart,
        cluster: bytes,
        certificate: bytes,
        mine: Introduction,
        roles: dict[str, Callable[[Admission], None]],
    ) -> None:
        """certificate: empty without TLS. roles: what takes a connection that comes for that."""
        from hoplite_mp.transport.certificates import Certificate

        self._loop = loop
        self._roles = roles
        self._door = Door(
            socket.socket(fileno=start.peer_fd),
            key=start.key,
            service="node",
            cluster=cluster,
            mine=mine,
            certificate=Certificate(certificate) if certificate else None,
            handshake_timeout_s=start.handshake_timeout_s,
            unauthenticated_max=start.unauthenticated_max,
        )
        self.address = self._door.address.host  # without a port
        loop.watch(self._door.fileno(), self._admit)

    def _admit(self) -> None:
        for admission in self._door.turn(self._loop.now()):
            take = self._roles.get(admission.role)
            if take is None:
                admission.stream.close()
            else:
                take(admission)
        if self._door.deadline is not None:
            self._loop.call_later(
                max(0.0, self._door.deadline - self._loop.now()), self._admit_again
            )

    def _admit_again(self) -> None:
        deadline = self._door.deadline
        if deadline is not None and deadline <= self._loop.now():
            self._admit()
