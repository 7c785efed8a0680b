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


class Ends:
    """Two engines with a link each, and the sockets between them."""

    def __init__(self) -> None:
        self.engines = [_engine.Engine(1 + i) for i in range(2)]
        self.links = [TlsLink(engine, 9 - i) for i, engine in enumerate(self.engines)]
        for i in range(2):
            way_out, way_in = socket.socketpair()
            self.links[i].send_over(way_out)
            self.links[1 - i].receive_over(way_in)

    def events(self, of: int, kind: int) -> list[tuple[int, ...]]:
        """All events until the first of that kind."""
        found: list[tuple[int, ...]] = []

        def has_come() -> bool:
            found.extend(self.engines[of].events())
            return any(event[0] == kind for event in found)

        eventually(has_come)
        return found

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


def test_bytes_come(ends: Ends) -> None:
    source, target = bytearray(b"1234567" * 100_000), bytearray(700_000)
    key = (1, 2, 3, 4)
    ends.engines[0].cell(key, source, filled=True)
    cell = ends.engines[1].cell(None, target)
    ends.engines[1].pull(cell, ends.links[1].link, key)
    ends.events(1, _engine.FILLED)
    assert target == source


def test_there_is_one_stream_in(ends: Ends) -> None:
    """Bytes of another connection would be taken for the next ones of the first."""
    for sock in socket.socketpair():
        with sock, pytest.raises(AssertionError):
            ends.links[0].receive_over(sock)


def test_an_idle_end_is_noticed(
    monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """The peer has closed what this side sends over, and nothing is sent: a pull that waits for
    an answer fails all the same."""
    monkeypatch.setattr(tls_links, "POLL_S", 0.05)
    ends = request.getfixturevalue("ends")  # its threads read that constant
    cell = ends.engines[1].cell(None, bytearray(1000))
    ends.engines[1].pull(cell, ends.links[1].link, (1, 1, 1, 1))
    eventually(lambda: ends.engines[0].counters(ends.links[0].link)[1], "the pull")
    way_in = ends.links[0]._sockets[1]
    way_in.shutdown(socket.SHUT_RDWR)
    assert (_engine.PULL_FAILED, cell) in [
        event[:2] for event in ends.events(1, _engine.PULL_FAILED)
    ]
