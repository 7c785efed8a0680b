"""A control channel of the node: what the other side has said last counts, however it ends."""

from __future__ import annotations

import contextlib
import errno
import socket
import struct
from typing import TYPE_CHECKING, Any

import pytest

from hoplite_mp._node.io.control_channel import ControlChannel
from hoplite_mp._node.io.epoll_loop import EpollLoop
from hoplite_mp._protocol.codec import Decoder, encode
from hoplite_mp._protocol.peers import PeerMessage, Probe
from hoplite_mp._transport.stream import TcpStream
from tests.support.transport import tcp_pair

if TYPE_CHECKING:
    from collections.abc import Iterator

RESET = struct.pack("ii", 1, 0)  # close at once, with a reset


class End:
    """One end, and what has come there."""

    def __init__(self, sock: socket.socket) -> None:
        self.loop = EpollLoop()
        self.heard: list[object] = []
        self.ends: list[str] = []
        self.channel = ControlChannel(
            self.loop,
            TcpStream(sock),
            Decoder(PeerMessage),
            self.heard.append,
            self.ends.append,
        )

    def turn(self) -> None:
        self.loop.serve(self.loop.wait(0.2))


@pytest.fixture
def ends() -> Iterator[tuple[End, socket.socket]]:
    ours, theirs = tcp_pair()
    end = End(ours)
    yield end, theirs
    end.channel.close("the test is over")
    theirs.close()


@pytest.mark.parametrize("reset", [False, True])
def test_last_messages_are_received_after_a_failed_send(
    ends: tuple[End, socket.socket], reset: bool
) -> None:
    end, theirs = ends
    for number in range(3):
        theirs.sendall(encode(Probe(number)))  # type: ignore[arg-type]
    if reset:
        theirs.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
    theirs.close()
    for _ in range(3):  # the first one meets a reset, if there was none
        end.channel.send(encode(Probe(9)))  # type: ignore[arg-type]
    assert not end.ends
    for _ in range(10):
        end.turn()
    assert end.heard == [Probe(0), Probe(1), Probe(2)]
    assert len(end.ends) == 1
    assert not end.channel.open
    assert not end.channel.send(b"more")


def test_broken_send_direction_closes_the_channel(
    ends: tuple[End, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As TLS may: the socket itself has nothing to announce."""
    end, _ = ends

    stream: Any = end.channel.stream

    class Broken:
        """The socket, but it sends nothing."""

        def __getattr__(self, name: str, sock: socket.socket = stream._sock) -> Any:
            return getattr(sock, name)

        def send(self, data: object) -> int:
            raise OSError(errno.EIO, "broken")

    monkeypatch.setattr(stream, "_sock", Broken())
    assert end.channel.send(encode(Probe(9)))  # type: ignore[arg-type]
    end.turn()
    assert end.ends == ["Input/output error"]


def test_closed_connection_is_reported_without_messages(ends: tuple[End, socket.socket]) -> None:
    end, theirs = ends
    theirs.close()
    end.turn()
    assert end.heard == []
    assert end.ends == ["the other side closed the connection"]


def test_unsent_bytes_are_sent_as_the_peer_reads(
    ends: tuple[End, socket.socket],
) -> None:
    end, theirs = ends
    theirs.setblocking(False)
    data = encode(Probe(1)) * 500_000  # type: ignore[arg-type]
    assert end.channel.send(data)
    assert end.channel.sending
    received = 0
    for _ in range(300):
        with contextlib.suppress(BlockingIOError):
            received += len(theirs.recv(1 << 20))
        if received == len(data):
            break
        end.turn()
    assert received == len(data)
    assert not end.channel.sending
