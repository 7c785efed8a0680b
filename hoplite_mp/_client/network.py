"""What a host in a LAN needs before its processes start: token, sockets, addresses, certificate.

Mistakes in an address, a port or a token are found in the user's process, where they can be raised
at once. The other processes receive descriptors and values, never names to resolve.
"""

from __future__ import annotations

import ipaddress
import logging
import secrets
import socket
from typing import TYPE_CHECKING, Any

from hoplite_mp._protocol.local import LanStart
from hoplite_mp._transport.addresses import (
    Address,
    advertised_addresses,
    own_addresses,
    parse_address,
    parse_ports,
    resolve,
    routed_address,
)
from hoplite_mp._transport.sockets import bound_address, listen
from hoplite_mp._transport.tokens import load_token
from hoplite_mp.errors import ConfigError, ManagerLostError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from hoplite_mp._transport.addresses import Endpoint
    from hoplite_mp.config import Config

__all__ = ["HostNetwork"]

CLUSTER_BYTES = 16
_log = logging.getLogger("hoplite_mp")


class HostNetwork:
    """The listening sockets and secrets of one host, until they are passed to its processes."""

    def __init__(
        self,
        config: Config,
        *,
        listen_at: str | None,
        address: str | None,
        ports: Any,
        token: str | Path | None,
        tls: bool | None,
        stays: bool = False,
        standby: Sequence[str] = (),
    ) -> None:
        """standby: with listen_at, where the standby is to be; with address, further addresses at
        which the manager may be. stays: this process runs for the sake of its node, so drivers of
        this host may attach to the node. AuthError, ConfigError: an argument is wrong."""
        if (listen_at is None) == (address is None):
            raise ConfigError("listen= starts a cluster, address= joins one: give one of them")
        self.config = config
        self.tls = tls is not False
        self.stays = stays or listen_at is not None
        self.sockets: list[socket.socket] = []
        self.manager: list[Endpoint] = []
        self._manager_socket: socket.socket | None = None
        self._wanted = _ports(ports)
        self.standby: list[Endpoint] = []
        try:
            for other in standby:
                self._add_standby(parse_address(other))
            if listen_at is not None:
                self._listen(parse_address(listen_at))
                # Last, so that no token is created if the address cannot be listened at.
                self.token = load_token(token, make=True)
            else:
                assert address is not None
                where = parse_address(address)
                # Report this host's own mistakes before contacting another host.
                self.token = load_token(token)
                self._find(where)
        except BaseException:
            self.close()
            raise
        if not self.tls:
            _log.warning(
                "tls=False: everything travels in the clear, and somebody on the path can read and "
                "change it; the token still keeps strangers out"
            )

    def _listen(self, where: Address) -> None:
        self._manager_socket = self._open(where.host, range(where.port, where.port + 1))
        peers = self._open(where.host, self._wanted)
        port = bound_address(self._manager_socket).port
        hosts = advertised_addresses(bound_address(self._manager_socket).host, None)
        self.address = str(Address(hosts[0], port))
        self.addresses = [str(Address(host, bound_address(peers).port)) for host in hosts]
        for end in self.standby:
            self._check_elsewhere(end)

    @staticmethod
    def _check_elsewhere(standby: Endpoint) -> None:
        host = ipaddress.ip_address(standby.sockaddr[0].partition("%")[0])
        if host.is_unspecified or host.is_loopback or str(host) in own_addresses():
            raise ConfigError(
                f"the standby at {host}: give an address of another host, as others reach it; this "
                "one has the manager"
            )

    def _add_standby(self, where: Address) -> None:
        try:
            self.standby += resolve(where)
        except OSError as error:
            raise ConfigError(f"the standby at {where}: {error}") from error

    def _find(self, where: Address) -> None:
        self.address = str(where)
        try:
            self.manager = [*resolve(where), *self.standby]
        except OSError as error:
            raise ManagerLostError(f"{where}: {error.strerror or error}") from error
        routed = routed_address(self.manager[0])
        if routed is None:
            raise ManagerLostError(f"no way leads from this host to {where}")
        self._routed = routed

    def open(self) -> None:
        """Called if this host joins with a node of its own: listens for the other nodes of the
        cluster. ConfigError if no port is free."""
        peers = self._open(self._routed, self._wanted)
        self.addresses = [str(Address(self._routed, bound_address(peers).port))]

    def address_for(self, host: str) -> str:
        """The address at which that host can join: this host's address on the route to it, if its
        name can be resolved here; else the first one that is advertised."""
        name = host.rpartition("@")[2]
        own = parse_address(self.address)
        try:
            routed = routed_address(resolve(Address(name, own.port))[0])
        except (OSError, ValueError):
            routed = None
        return self.address if routed is None else str(Address(routed, own.port))

    def _open(self, host: str, ports: range) -> socket.socket:
        sock = listen(host, ports)
        self.sockets.append(sock)
        return sock

    def start(self, host_id: int) -> LanStart:
        """The message that configures this host's processes."""
        certificate = b""
        if self.tls and self._manager_socket is not None:
            from hoplite_mp._transport.certificates import make_certificate

            certificate = make_certificate().pem
        return LanStart(
            key=self.token.key,
            host_id=host_id,
            host=socket.gethostname(),
            peer_fd=self.sockets[-1].fileno(),
            addresses=self.addresses,
            ports=(self._wanted.start, self._wanted.stop, self._wanted.step),
            handshake_timeout_s=self.config.handshake_timeout_s,
            pending_handshakes_max=self.config.pending_handshakes_max,
            connect_timeout_s=self.config.connect_timeout_s,
            heartbeat_interval_s=self.config.heartbeat_interval_s,
            heartbeat_timeout_s=self.config.heartbeat_timeout_s,
            tls=self.tls,
            manager_fd=-1 if self._manager_socket is None else self._manager_socket.fileno(),
            cluster=b"" if self._manager_socket is None else secrets.token_bytes(CLUSTER_BYTES),
            certificate=certificate,
            standby=[str(end) for end in self.standby] if self._manager_socket else [],
            meets_drivers=self.stays,
            manager=[(int(end.family), tuple(end.sockaddr)) for end in self.manager],
        )

    @property
    def descriptors(self) -> list[int]:
        """Descriptors of the sockets that the host's processes take over."""
        return [sock.fileno() for sock in self.sockets]

    def close(self) -> None:
        """Closes the sockets in this process, which no longer needs them."""
        for sock in self.sockets:
            sock.close()


def _ports(ports: Any) -> range:
    if ports is None:
        return range(1)  # any free one
    if isinstance(ports, range):
        return ports
    return parse_ports(str(ports))
