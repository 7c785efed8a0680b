"""What tests of listeners share: strangers who knock, and what they are told."""

from __future__ import annotations

import socket
import time
from typing import TYPE_CHECKING

import pytest

from tests.transport.helpers import (
    until,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from hoplite_mp._transport.listener import Listener

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
