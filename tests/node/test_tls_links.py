"""Driven links: over plain sockets here, as the threads cannot tell the difference."""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING

import pytest

from hoplite_mp import _engine
from hoplite_mp._node.io import tls_links
from hoplite_mp._node.io.tls_links import TlsLink
from tests.support.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import Iterator


def comes(engine: _engine.Engine, kind: int, cell: int) -> None:
    """Waits for that event."""
    eventually(lambda: (kind, cell) in [event[:2] for event in engine.events()], f"event {kind}")


class Ends:
    """Two engines with a link each, and the sockets between them."""

    def __init__(self) -> None:
        self.engines = [_engine.Engine(1 + i) for i in range(2)]
        self.links = [TlsLink(engine, 9 - i) for i, engine in enumerate(self.engines)]
        for i in range(2):
            way_out, way_in = socket.socketpair()
            self.links[i].send_over(way_out)
            self.links[1 - i].receive_over(way_in)

    def close(self) -> None:
        for link in self.links:
            link.close()
        for engine in self.engines:
            engine.stop()


@pytest.fixture
def ends() -> Iterator[Ends]:
    made = Ends()
    yield made
    made.close()


def test_tls_link_delivers_bytes(ends: Ends) -> None:
    source, target = bytearray(b"1234567" * 100_000), bytearray(700_000)
    key = (1, 2, 3, 4)
    ends.engines[0].cell(key, source, filled=True)
    cell = ends.engines[1].cell(None, target)
    ends.engines[1].pull(cell, ends.links[1].link, key)
    comes(ends.engines[1], _engine.FILLED, cell)
    assert target == source


def test_tls_link_accepts_one_incoming_stream(ends: Ends) -> None:
    """Bytes of another connection would be taken for the next ones of the first."""
    for sock in socket.socketpair():
        with sock, pytest.raises(AssertionError):
            ends.links[0].receive_over(sock)


def test_tls_link_detects_a_closed_idle_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    """The peer has closed what this side sends over, and nothing is sent: a pull that waits for
    an answer fails all the same."""
    monkeypatch.setattr(tls_links, "POLL_S", 0.05)
    engine = _engine.Engine(1)
    link = TlsLink(engine, 9)
    (out, peer_in), (own_in, peer_out) = socket.socketpair(), socket.socketpair()
    link.send_over(out)
    link.receive_over(own_in)
    cell = engine.cell(None, bytearray(1000))
    engine.pull(cell, link.link, (1, 1, 1, 1))
    with peer_out:
        with peer_in:
            peer_in.recv(1 << 10)  # the pull
        comes(engine, _engine.PULL_FAILED, cell)
    link.close()
    engine.stop()
