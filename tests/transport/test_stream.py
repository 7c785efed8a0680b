"""What every kind of stream does the same: memory, TCP and TLS."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hoplite_mp._transport.memory import pair
from hoplite_mp._transport.stream import READ_BYTES, TcpStream
from tests.support.transport import KINDS, AnyStream, pump, streams, tcp_pair, until


@pytest.fixture(params=KINDS)
def ends(request: pytest.FixtureRequest) -> object:
    made = streams(request.param)
    yield made
    for end in made:
        end.close()


def both_ways(a: AnyStream, b: AnyStream, up: bytes, down: bytes) -> None:
    """Everything written at once, then read and flushed in turn on both sides."""
    got = {a: bytearray(), b: bytearray()}
    a.write(up)
    b.write(down)

    def turn() -> None:
        for end in (a, b):
            assert end.flush()
            pump(a, b)
            data = end.read()
            assert data is not None
            got[end] += data

    until(lambda: len(got[b]) == len(up) and len(got[a]) == len(down), turn)
    assert got == {a: down, b: up}
    assert (a.bytes_sent, a.bytes_received) == (len(up), len(down))
    assert (b.bytes_sent, b.bytes_received) == (len(down), len(up))
    assert not a.wants_write
    assert a.wants_read
    assert not a.buffered


def test_ten_megabytes_both_ways_at_once(ends: tuple[AnyStream, AnyStream]) -> None:
    chance = random.Random(1)
    both_ways(*ends, chance.randbytes(10 << 20), chance.randbytes(10 << 20))


def test_an_orderly_end_comes_after_all_bytes(ends: tuple[AnyStream, AnyStream]) -> None:
    a, b = ends
    both_ways(a, b, b"1", b"2")
    a.write(b"last")
    assert a.flush()
    a.close()
    a.close()
    pump(b)
    got = []
    until(lambda: got[-1:] == [None], lambda: got.append(b.read()))
    assert b"".join(filter(None, got)) == b"last"
    assert b.failure is None
    assert b.read() is None
    assert not b.wants_read


@pytest.mark.parametrize("kind", ["tcp", "tls"])
def test_a_broken_connection_has_a_reason(kind: str) -> None:
    a, b = streams(kind)
    both_ways(a, b, b"1", b"2")
    a.write(b"unread")
    until(lambda: not a.wants_write, a.flush)
    # Closed with bytes unread, and without a farewell of TLS, as by a process that was killed.
    b.detach().close()
    got = []
    until(lambda: got[-1:] == [None], lambda: got.append(a.read()))
    assert a.failure is not None
    a.write(b"more")
    until(lambda: not a.flush(), lambda: None)
    assert not a.wants_write
    a.close()
    b.close()


def test_a_peer_that_does_not_read_is_an_error_of_write() -> None:
    for a, b in (pair(queue_bytes_max=100), streams("tcp", queue_bytes_max=100)):
        a.write(bytes(60))
        with pytest.raises(ConnectionAbortedError, match="60 bytes are queued, and with 50 more"):
            a.write(bytes(50))
        a.write(bytes(40))
        a.close()
        b.close()


def test_a_full_connection_waits_and_goes_on() -> None:
    a, b = streams("tcp")
    a.write(bytes(32 << 20))
    assert a.flush()
    assert a.wants_write  # no kernel takes that much
    got = 0

    def turn() -> None:
        nonlocal got
        got += len(b.read() or b"")
        assert a.flush()

    until(lambda: got == 32 << 20, turn)
    a.close()
    b.close()


def test_a_read_takes_no_more_than_asked(ends: tuple[AnyStream, AnyStream]) -> None:
    a, b = ends
    both_ways(a, b, b"1", b"2")
    a.write(b"abcdefgh")
    got = bytearray()

    def turn() -> None:
        a.flush()
        pump(b)
        data = b.read(3)
        assert data is not None
        assert len(data) <= 3
        got.extend(data)

    until(lambda: len(got) >= 6, turn)
    assert b.read() == b"gh"
    assert not b.buffered


def test_detach_gives_the_socket_and_loses_nothing() -> None:
    a, b = (TcpStream(end) for end in tcp_pair())
    a.write(b"x")
    with pytest.raises(ValueError, match="1 bytes are still to be sent"):
        a.detach()
    a.flush()
    sock = a.detach()
    a.close()
    sock.sendall(b"y")
    got = bytearray()
    until(lambda: got == b"xy", lambda: got.extend(b.read() or b""))
    sock.close()
    b.close()


# ---- the memory twin's own means


@given(st.binary(max_size=50), st.integers(0, 60), st.lists(st.integers(0, 10), max_size=10))
@settings(deadline=None)
def test_a_cut_wire_passes_exactly_the_bytes_before_the_cut(
    data: bytes, cut: int, steps: list[int]
) -> None:
    a, b = pair()
    a.outgoing.cut_after(cut)
    a.write(data)
    a.flush()
    got = b""
    for step in [*steps, READ_BYTES]:
        b.incoming.pump(step)
        got += b.read() or b""
    assert got == data[:cut]
    if cut <= len(data):
        assert b.read() is None
        assert b.failure == "the connection was cut"
        assert not a.flush()
    else:
        assert b.read() == b""


def test_nothing_moves_unless_pumped() -> None:
    a, b = pair()
    a.write(b"ab")
    assert b.read() == b""
    a.flush()
    assert b.read() == b""
    assert b.incoming.pump(1) == 1
    assert b.read() == b"a"
    a.close()
    assert b.read() == b""
    b.incoming.pump()
    assert b.read() == b"b"
    assert b.read() is None
    with pytest.raises(ValueError, match="no descriptor"):
        a.fileno()
