"""Connected streams of every kind, listeners and callers, and a way to let them run to an end."""

from __future__ import annotations

import functools
import select
import socket
import time
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest

from hoplite_mp._common import ids
from hoplite_mp._protocol.greetings import Introduction, software_versions
from hoplite_mp._protocol.secret import Secret
from hoplite_mp._transport.addresses import Endpoint
from hoplite_mp._transport.caller import Dialer
from hoplite_mp._transport.certificates import Certificate, make_certificate
from hoplite_mp._transport.listener import Listener
from hoplite_mp._transport.memory import MemoryStream, pair
from hoplite_mp._transport.sockets import listen
from hoplite_mp._transport.stream import TcpStream
from hoplite_mp._transport.tls import TlsStream, client_context, server_context

if TYPE_CHECKING:
    from collections.abc import Callable

    from hoplite_mp._transport.conversation import Admission

PATIENCE_S = 20.0
KEY, CLUSTER = Secret(b"k" * 32), b"c" * 16
VERSIONS = {"python": "3.11.7"}
CLIENT, SERVER = Introduction(11, VERSIONS), Introduction(22, VERSIONS, 0)
KINDS = ("memory", "tcp", "tls")

AnyStream = MemoryStream | TcpStream


class InterfaceAddress(NamedTuple):
    """A row of `psutil.net_if_addrs`."""

    family: int
    address: str
    netmask: str | None = None


class InterfaceState(NamedTuple):
    """A row of `psutil.net_if_stats`."""

    isup: bool


@functools.cache
def certificate() -> Certificate:
    return make_certificate()


@functools.cache
def other_certificate() -> Certificate:
    return make_certificate()


def tcp_pair() -> tuple[socket.socket, socket.socket]:
    """The two ends of a connection over loopback."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        client = socket.create_connection(server.getsockname())
        accepted, _ = server.accept()
    return client, accepted


def tls_pair(ends: tuple[socket.socket, socket.socket]) -> tuple[TlsStream, TlsStream]:
    shown = certificate()
    return (
        TlsStream(ends[0], client_context()),
        TlsStream(ends[1], server_context(shown), server_sha256=shown.sha256),
    )


def streams(kind: str, **options: Any) -> tuple[AnyStream, AnyStream]:
    if kind == "memory":
        return pair(**options)
    ends = tcp_pair()
    return tls_pair(ends) if kind == "tls" else (TcpStream(ends[0], **options), TcpStream(ends[1]))


def pump(*ends: AnyStream) -> None:
    for end in ends:
        if isinstance(end, MemoryStream):
            end.incoming.pump()


def until(done: Callable[[], object], turn: Callable[[], object]) -> None:
    """Turn until it is done; a loop that never gets there is a failure that says so."""
    end = time.monotonic() + PATIENCE_S
    while not done():
        turn()
        assert time.monotonic() < end, "it goes on for ever"


def endpoint(where: tuple[Any, ...]) -> Endpoint:
    return Endpoint(socket.AF_INET, (where[0], where[1]))


def make_listener(tls: bool, **options: Any) -> Listener:
    options = {
        "key": KEY,
        "service": "manager",
        "cluster": CLUSTER,
        "mine": SERVER,
        "certificate": certificate() if tls else None,
        "handshake_timeout_s": 5.0,
        "pending_handshakes_max": 8,
    } | options
    return Listener(listen("127.0.0.1", [0]), **options)


def make_caller(where: tuple[Any, ...], tls: bool, **options: Any) -> Dialer:
    options = {
        "key": KEY,
        "role": "node",
        "mine": CLIENT,
        "tls": tls,
        "now": time.monotonic(),
        "timeout_s": 10.0,
        "handshake_timeout_s": 5.0,
        "chance": lambda: 0.5,  # the pause between two rounds is its mean, 0.2 s
    } | options
    if "endpoints" not in options:
        options["endpoints"] = [endpoint(where)]
    return Dialer(options.pop("endpoints"), **options)


def meet(listener: Listener, caller: Dialer) -> tuple[Admission, Admission]:
    """The connection as the caller and the listener got it; the caller's error is raised."""
    got: list[Admission] = []
    let_in: list[Admission] = []

    def turn() -> None:
        _readable, _, _ = select.select([listener, *([] if got else [caller])], [], [], 0.05)
        now = time.monotonic()
        let_in.extend(listener.turn(now))
        if not got and (admission := caller.turn(now)) is not None:
            got.append(admission)

    until(lambda: got and let_in, turn)
    return got[0], let_in[0]


TLS = pytest.mark.parametrize("tls", [True, False], ids=["tls", "plain"])


def knock(listener: Listener, data: bytes = b"") -> socket.socket:
    sock = socket.create_connection(listener.address)
    sock.sendall(data)
    return sock


def answer(
    listener: Listener, sock: socket.socket, now: Callable[[], float] = time.monotonic
) -> bytes:
    """Everything that the listener says until it closes the connection."""
    sock.setblocking(False)
    said = bytearray()
    ended = False

    def turn() -> None:
        nonlocal ended
        assert listener.turn(now()) == []
        try:
            data = sock.recv(1 << 16)
        except BlockingIOError:
            return
        except ConnectionResetError:
            data = b""
        said.extend(data)
        ended = not data

    until(lambda: ended, turn)
    sock.close()
    until(lambda: listener.strangers == 0, lambda: listener.turn(now()))
    return bytes(said)


def own_introduction() -> Introduction:
    return Introduction(ids.random_host_id(), software_versions())
