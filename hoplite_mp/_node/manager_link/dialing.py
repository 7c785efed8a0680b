"""Connections to a manager on another host: to the first one, and to its successors.

A node calls the addresses of its cluster's manager until one answers. Once a standby leads, its
addresses take their place.
"""

from __future__ import annotations

import functools
import logging
from typing import TYPE_CHECKING

from hoplite_mp._node.peers.peers import PeerDialing
from hoplite_mp._transport.addresses import endpoint_at

if TYPE_CHECKING:
    from collections.abc import Callable

    from hoplite_mp._node.manager_link.connection import ManagerConnection
    from hoplite_mp._node.manager_link.failover import Failover
    from hoplite_mp._node.manager_link.membership import NodeMembership
    from hoplite_mp._node.peers.peers import Peers
    from hoplite_mp._node.peers.suspects import Suspects
    from hoplite_mp._node.ports import Connections, LoopPort, OutgoingConnection, ProcessesPort
    from hoplite_mp._node.roster import Life
    from hoplite_mp._protocol.terms import StandbyNamed
    from hoplite_mp._transport.conversation import Admission

__all__ = ["ManagerDialing"]

# Rounds over the addresses of a lost manager. They suffice because its supervisor keeps the socket
# listening while it restarts the manager.
MANAGER_ROUNDS_MAX = 3


class ManagerDialing:
    """The implementation of `ManagerNetwork` in _node/manager_link/connection.py."""

    def __init__(
        self,
        loop: LoopPort,
        life: Life,
        connections: Connections,
        management: ManagerConnection,
        membership: NodeMembership,
        missing: Suspects,
        peers: Peers,
        processes: ProcessesPort,
        let_in: Callable[[], None],
    ) -> None:
        """let_in: starts to accept other nodes; called once the cluster's id is known, unless TLS
        needs the cluster's certificate first."""
        self.loop = loop
        self.life = life
        self.connections = connections
        self.management = management
        self.membership = membership
        self.missing = missing
        self.peers = peers
        self.processes = processes
        self.let_in = let_in
        start = membership.start
        self.connect_timeout_s = start.connect_timeout_s
        self.heartbeat_interval_s = start.heartbeat_interval_s
        self.heartbeat_timeout_s = start.heartbeat_timeout_s

    def connect(self) -> Admission:
        """The first connection. It blocks, and raises what `OutgoingConnection.wait` raises."""
        admission = self._calling(self.connect_timeout_s).wait()
        self.membership.cluster = self.peers.cluster = admission.cluster
        if not self.membership.start.tls:
            self.let_in()
        return admission

    def call(self, done: Callable[[Admission | None], None], timeout_s: float) -> None:
        """`done` gets a connection to the manager that leads now, or None if none is found."""
        level = logging.WARNING if self.management.failover is None else logging.INFO
        make = functools.partial(
            self._calling, timeout_s, MANAGER_ROUNDS_MAX, self.membership.cluster
        )
        PeerDialing(self.loop, make, "the manager", done, level).begin()

    def _calling(
        self, timeout_s: float, rounds_max: int = 0, cluster: bytes = b""
    ) -> OutgoingConnection:
        return self.connections.call(
            [endpoint_at(*where) for where in self.membership.start.manager],
            role="node",
            mine=self.peers.mine,
            timeout_s=timeout_s,
            cluster=cluster,
            rounds_max=rounds_max,
        )

    def failover(self, named: StandbyNamed) -> Failover:
        """Makes the failover, after the manager has named a standby."""
        from hoplite_mp._node.manager_link.failover import Failover

        to = self.management, self, self.membership, self.missing, self.peers
        return Failover(self.loop, self.life, self.connections, *to, self.processes, named)
