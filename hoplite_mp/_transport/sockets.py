"""Creates listening and connecting sockets, without blocking.

The options for all connections between hosts are set here. Every failure to listen raises a
ConfigError with a clear message.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
from typing import TYPE_CHECKING

from hoplite_mp._transport.addresses import Address, Endpoint, own_addresses
from hoplite_mp.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["OUT_OF", "begin_connect", "connect_error", "listen", "prepare"]

# Errors caused by missing descriptors or memory on this side, not by the other side.
OUT_OF = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
BACKLOG = 256  # maximum number of connections that wait to be accepted
# The kernel ends a connection after this time without acknowledgements, because the peer's host is
# gone or unreachable. The cluster's heartbeats detect this sooner, so the limit is for connections
# without heartbeats. A lower value would also end connections to peers that merely do not read for
# this time. One iteration of a peer's loop may take 30 s (_node/manager_link/connection.py).
UNACKNOWLEDGED_MS_MAX = 40_000
KEEPALIVE = (
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 5),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 7),
    (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, UNACKNOWLEDGED_MS_MAX),
)


def prepare(sock: socket.socket) -> socket.socket:
    """Sets the options for every TCP connection: non-blocking, TCP_NODELAY, keepalive."""
    sock.setblocking(False)
    if sock.family in (socket.AF_INET, socket.AF_INET6):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for level, name, value in KEEPALIVE:
            sock.setsockopt(level, name, value)
    return sock


def listen(host: str, ports: Iterable[int]) -> socket.socket:
    """Listens at `host` on the first free port in `ports`. Port 0 stands for any free port.

    "::" also serves IPv4. Raises ConfigError if `host` is not an address of this host, or if no
    port is free.
    """
    tried = list(ports)
    for family, where in _local(host):
        for port in tried:
            sock = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
            try:
                # A later process must not have to wait for this one's connections in TIME_WAIT.
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                if family == socket.AF_INET6:
                    sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, int(where[0] != "::"))
                sock.bind((where[0], port, *where[2:]))
                sock.listen(BACKLOG)
                sock.setblocking(False)
            except OSError as error:
                sock.close()
                if error.errno in (errno.EADDRINUSE, errno.EACCES):
                    continue
                raise ConfigError(_words(host, error)) from error
            return sock
    raise ConfigError(
        f"{_port_words(tried)} at {host}: in use, or a port that needs privileges; pass another, "
        "or 0 for any"
    )


def _port_words(ports: list[int]) -> str:
    if len(ports) == 1:
        return f"port {ports[0]} is not free"
    if ports and ports == list(range(ports[0], ports[-1] + 1)):
        return f"none of the ports {ports[0]}-{ports[-1]} is free"
    return f"none of the ports {', '.join(map(str, ports))} is free"


def _local(host: str) -> list[Endpoint]:
    """The first address for listening to which `host` resolves, in a list."""
    try:
        found = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"cannot listen at {host}: {error}") from error
    return [Endpoint(family, where) for family, _, _, _, where in found[:1]]  # type: ignore[arg-type]


def _words(host: str, error: OSError) -> str:
    words = f"cannot listen at {host}: {error.strerror}"
    if error.errno == errno.EADDRNOTAVAIL:
        words += f"; this host's addresses are {', '.join(own_addresses()) or '127.0.0.1'}"
    return words


def begin_connect(endpoint: Endpoint) -> socket.socket:
    """Returns a socket that is connecting. Call `connect_error` as soon as it is writable.

    Raises OSError if the attempt fails immediately.
    """
    sock = socket.socket(endpoint.family, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        prepare(sock)
        code = sock.connect_ex(endpoint.sockaddr)
        if code not in (0, errno.EINPROGRESS):
            raise OSError(code, os.strerror(code))
    except BaseException:
        sock.close()
        raise
    return sock


def connect_error(sock: socket.socket) -> str | None:
    """The reason why a socket has failed to connect. None if it is connected."""
    code = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
    if code:
        return os.strerror(code)
    with contextlib.suppress(OSError):
        here, there = sock.getsockname(), sock.getpeername()
        # If no process listens at the target port on this host, the kernel may choose this port as
        # the socket's own port, and connect the socket to itself.
        return "no process listens there" if here == there else None
    return "the connection has ended"


def bound_address(sock: socket.socket) -> Address:
    """The address at which a socket listens."""
    name = sock.getsockname()
    return Address(name[0], name[1])
