"""Peers that break the rules: the link ends with a reason, no byte outside a cell is written."""

from __future__ import annotations

import random
import socket
from typing import TYPE_CHECKING

import pytest

from hoplite_mp import _engine
from tests.support.engine_hosts import (
    CANCEL,
    CANCELLED,
    CLOSED,
    DATA,
    FULL,
    HEADER,
    REFUSED,
    REQUEST,
    SIZE,
    EngineHost,
    Frame,
    Peer,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

KEY = (11, 12, 13, 14)
NBYTES = 100_000
MARGIN = 4096


@pytest.fixture
def host() -> Iterator[EngineHost]:
    made = EngineHost(5)
    yield made
    made.engine.stop()


class Pulled:
    """A cell in the middle of a buffer, and the request for it as the peer has received it."""

    def __init__(self, host: EngineHost, peer: Peer) -> None:
        self.host, self.peer = host, peer
        self.buffer = bytearray(b"\xa5" * (NBYTES + 2 * MARGIN))
        self.cell = host.engine.cell(KEY, self.buffer, MARGIN, NBYTES)
        host.engine.pull(self.cell, peer.link)
        self.request = peer.receive()

    def data(self, offset: int, block: bytes) -> Frame:
        return Frame(DATA, KEY, self.request.pull, offset, NBYTES, block=block)

    def check_margins(self) -> None:
        assert self.buffer[:MARGIN] == self.buffer[-MARGIN:] == b"\xa5" * MARGIN


def lost(host: EngineHost, peer: Peer) -> str:
    """Why; and the peer sees the end."""
    reason: str = host.wait_for(_engine.LINK_LOST, peer.link)[3]
    try:
        while peer.socket.recv(65536):
            pass
    except ConnectionResetError:
        pass
    peer.close()
    return reason


def test_what_a_request_says(host: EngineHost) -> None:
    peer = Peer(host)
    request = Pulled(host, peer).request
    expected = Frame(REQUEST, KEY, request.pull, 0, NBYTES, length=0, block_crc=0, incarnation=5)
    assert request == expected
    peer.close()


def test_data_in_pieces_of_any_size(host: EngineHost) -> None:
    chance = random.Random(1)
    peer = Peer(host)
    pulled = Pulled(host, peer)
    data = chance.randbytes(NBYTES)
    stream = b""
    at = 0
    while at < NBYTES:
        length = min(chance.choice([1, 7, 1000, 30_000]), NBYTES - at)
        stream += pulled.data(at, data[at : at + length]).pack()
        at += length
    at = 0
    while at < len(stream):
        length = chance.choice([1, 63, 64, 65, 5000])
        peer.socket.sendall(stream[at : at + length])
        at += length
    host.filled(pulled.cell)
    assert pulled.buffer[MARGIN:-MARGIN] == data
    pulled.check_margins()
    peer.close()


MALFORMED = [
    (dict(magic=0x4802), "not a frame of this version"),
    (dict(type=0), "unknown type"),
    (dict(type=9), "unknown type"),
    (dict(type=REQUEST), "wrong length"),
    (dict(block=b""), "wrong length"),
    (dict(length=(1 << 20) + 1), "wrong length"),
    (dict(length=2**32 - 1), "wrong length"),
    (dict(reason=1), "reason"),
    (dict(offset=NBYTES), "beyond its cell"),
    (dict(offset=2**64 - 1), "beyond its cell"),
    (dict(length=NBYTES + 1), "beyond its cell"),
    (dict(end=NBYTES - 1), "of another cell"),
    (dict(end=2**64 - 1), "of another cell"),
    (dict(offset=1), "do not continue"),
    (dict(key=(11, 12, 13, 15)), "of another cell"),
    (dict(pull=2), "not requested"),
    (dict(pull=2**32 - 1), "not requested"),
    (dict(pull=0), "without a pull"),
    (dict(type=REFUSED, reason=9, block=b""), "reason"),
    (dict(type=REFUSED, reason=0, block=b""), "reason"),
    (dict(type=REFUSED, reason=CANCELLED, block=b"", block_crc=0), "was not sent"),
    (dict(type=REFUSED, reason=CLOSED, pull=3, block=b""), "refusal of no request"),
    (dict(type=REQUEST, block=b"", end=0), "empty request"),
]


@pytest.mark.parametrize(("change", "words"), MALFORMED)
def test_malformed_frames(host: EngineHost, change: dict[str, int], words: str) -> None:
    peer = Peer(host)
    pulled = Pulled(host, peer)
    frame = pulled.data(0, bytes(1000))
    for name, value in change.items():
        setattr(frame, name, value)
    peer.send(frame)
    reason = lost(host, peer)
    assert words in reason
    assert host.wait_for(_engine.PULL_FAILED, pulled.cell)[2] == reason
    assert host.engine.watermark(pulled.cell) == 0
    pulled.check_margins()


@pytest.mark.parametrize("byte", range(HEADER.size))
@pytest.mark.parametrize("checksum", [True, False])
def test_every_flipped_header_byte(host: EngineHost, byte: int, checksum: bool) -> None:
    peer = Peer(host, checksum)
    pulled = Pulled(host, peer)
    spoiled = bytearray(pulled.data(0, bytes(100)).pack())
    spoiled[byte] ^= 1 << byte % 8
    peer.socket.sendall(spoiled)
    assert "frame" in (reason := lost(host, peer)) or "checksum" in reason
    assert host.engine.watermark(pulled.cell) == 0


def spoiled(frame: Frame) -> bytes:
    """The frame with a bit of its block flipped."""
    found = bytearray(frame.pack())
    found[-1000] ^= 4
    return bytes(found)


def test_a_flipped_bit_of_a_block(host: EngineHost) -> None:
    """What came before it stays; the block that is spoiled does not count, and the rest can be
    pulled anew over the same link."""
    peer = Peer(host)
    pulled = Pulled(host, peer)
    peer.send(pulled.data(0, bytes(16384)))
    peer.socket.sendall(spoiled(pulled.data(16384, bytes(16384))))
    host.wait_for(_engine.PULL_FAILED, pulled.cell, "a block does not match its checksum")
    assert host.engine.watermark(pulled.cell) == 16384
    cancel = peer.receive()
    assert (cancel.type, cancel.pull) == (CANCEL, pulled.request.pull)
    host.engine.pull(pulled.cell, peer.link)
    again = peer.receive()
    assert (again.type, again.offset) == (REQUEST, 16384)
    peer.send(pulled.data(32768, b"z" * 1000))  # it crosses the CANCEL, and goes nowhere
    peer.send(Frame(REFUSED, pull=cancel.pull, reason=CANCELLED))
    rest = b"y" * (NBYTES - 16384)
    peer.send(Frame(DATA, KEY, again.pull, 16384, NBYTES, block=rest))
    host.filled(pulled.cell)
    assert pulled.buffer[MARGIN:-MARGIN] == bytes(16384) + rest
    pulled.check_margins()
    peer.close()


def test_a_flipped_bit_of_the_last_block(host: EngineHost) -> None:
    """Nothing is cancelled that is over: its number is free at once."""
    peer = Peer(host)
    pulled = Pulled(host, peer)
    peer.socket.sendall(spoiled(pulled.data(0, bytes(NBYTES))))
    host.wait_for(_engine.PULL_FAILED, pulled.cell)
    host.engine.pull(pulled.cell, peer.link)
    again = peer.receive()
    assert (again.type, again.offset) == (REQUEST, 0)
    peer.send(Frame(DATA, KEY, again.pull, 0, NBYTES, block=b"y" * NBYTES))
    host.filled(pulled.cell)
    peer.close()


@pytest.mark.parametrize("seed", range(20))
def test_garbage(host: EngineHost, seed: int) -> None:
    peer = Peer(host)
    pulled = Pulled(host, peer)
    garbage = random.Random(seed).randbytes(1000)
    peer.socket.sendall(garbage[:64] if seed % 2 else garbage)
    assert "frame" in lost(host, peer)
    pulled.check_margins()


@pytest.mark.parametrize("nbytes", [0, 1, 63, 64, 65, 500])
def test_truncated_frames(host: EngineHost, nbytes: int) -> None:
    peer = Peer(host)
    pulled = Pulled(host, peer)
    peer.socket.sendall(pulled.data(0, bytes(1000)).pack()[:nbytes])
    peer.socket.shutdown(socket.SHUT_WR)
    assert lost(host, peer) == "the peer has closed the connection"
    assert host.engine.watermark(pulled.cell) == 0


def test_the_incarnation_must_stay(host: EngineHost) -> None:
    peer = Peer(host)
    pulled = Pulled(host, peer)
    peer.send(pulled.data(0, bytes(1000)))
    later = pulled.data(1000, bytes(1000))
    later.incarnation += 1
    peer.send(later)
    assert "incarnation" in lost(host, peer)
    assert host.engine.watermark(pulled.cell) == 1000


def test_the_incarnation_may_be_known(host: EngineHost) -> None:
    ends = socket.socketpair()
    link = host.engine.connect(ends[0].fileno(), 3, True, 78)
    ends[1].sendall(Frame(CANCEL).pack())
    assert host.wait_for(_engine.LINK_LOST, link) == (
        _engine.LINK_LOST, link, 3, "a frame of another incarnation",
    )  # fmt: skip
    for end in ends:
        end.close()


def test_more_than_all_is_too_much(host: EngineHost) -> None:
    peer = Peer(host)
    pulled = Pulled(host, peer)
    peer.send(pulled.data(0, bytes(NBYTES)))
    host.filled(pulled.cell)
    peer.send(pulled.data(NBYTES - 10, bytes(10)))
    assert "not requested" in lost(host, peer)
    pulled.check_margins()


def test_data_crosses_a_cancel(host: EngineHost) -> None:
    """What was under way is swallowed, in the middle of a block too; then the number is free."""
    peer = Peer(host)
    pulled = Pulled(host, peer)
    first = pulled.data(0, b"x" * 30_000).pack()
    peer.socket.sendall(first[:10_000])
    host.wait(lambda: host.engine.counters(peer.link)[1] == 10_000)
    host.close(pulled.cell)
    kept = bytes(pulled.buffer)
    cancel = peer.receive()
    assert (cancel.type, cancel.pull, cancel.key) == (CANCEL, pulled.request.pull, KEY)
    peer.socket.sendall(first[10_000:])
    peer.send(pulled.data(30_000, b"x" * 20_000))
    peer.send(Frame(REFUSED, pull=cancel.pull, reason=CANCELLED))
    again = Pulled(host, peer)
    peer.send(again.data(0, b"y" * NBYTES))
    host.filled(again.cell)
    assert pulled.buffer == kept
    assert again.buffer[MARGIN:-MARGIN] == b"y" * NBYTES
    peer.send(pulled.data(50_000, b"x"))
    assert "not requested" in lost(host, peer)


def test_all_data_may_cross_a_cancel(host: EngineHost) -> None:
    peer = Peer(host)
    pulled = Pulled(host, peer)
    host.close(pulled.cell)
    assert peer.receive().type == CANCEL
    peer.send(pulled.data(0, b"x" * NBYTES))
    again = Pulled(host, peer)
    peer.send(again.data(0, b"y" * NBYTES))
    host.filled(again.cell)
    assert pulled.buffer == b"\xa5" * len(pulled.buffer)
    peer.close()


def test_cancelled_data_is_judged_all_the_same(host: EngineHost) -> None:
    peer = Peer(host)
    pulled = Pulled(host, peer)
    host.close(pulled.cell)
    peer.send(pulled.data(1, b"x"))
    assert "do not continue" in lost(host, peer)


# -- what a server makes of requests ---------------------------------------------------------------


def test_a_cell_that_ends_before_what_is_asked_for(host: EngineHost) -> None:
    peer = Peer(host)
    host.engine.cell(KEY, bytearray(100), filled=True)
    peer.send(Frame(REQUEST, KEY, 1, end=101))
    answer = peer.receive()
    assert (answer.type, answer.reason, answer.pull) == (REFUSED, SIZE, 1)
    peer.send(Frame(REQUEST, (9, 9, 9, 9), 1, end=101))
    host.engine.cell((9, 9, 9, 9), bytearray(100), filled=True)
    assert peer.receive().reason == SIZE
    peer.close()


def test_requests_that_wait_are_bounded() -> None:
    host = EngineHost(5, waiting_requests_max=3)
    peer, other = Peer(host), Peer(host)
    for i in range(5):
        peer.send(Frame(REQUEST, (i, 0, 0, 0), i + 1, end=10))
    assert [peer.receive().pull for _ in range(2)] == [4, 5]
    other.send(Frame(REQUEST, (1, 0, 0, 0), 1, end=10))
    peer.send(Frame(CANCEL, pull=2))
    answer = peer.receive()
    assert (answer.type, answer.reason, answer.pull) == (REFUSED, CANCELLED, 2)
    peer.send(Frame(REQUEST, (5, 0, 0, 0), 6, end=10))
    host.engine.cell((5, 0, 0, 0), b"0123456789", filled=True)
    assert peer.receive().block == b"0123456789"
    host.engine.cell((1, 0, 0, 0), b"9876543210", filled=True)
    assert other.receive().block == b"9876543210"
    peer.send(Frame(REQUEST, (7, 0, 0, 0), 6, end=10))
    peer.send(Frame(REQUEST, (8, 0, 0, 0), 7, end=10))
    assert (peer.receive().pull, FULL) == (7, FULL)
    host.engine.stop()
    peer.close()
    other.close()


def test_waiting_requests_go_with_their_link(host: EngineHost) -> None:
    peer = Peer(host)
    peer.send(Frame(REQUEST, KEY, 1, end=NBYTES))
    host.wait(lambda: host.engine.counters(peer.link)[1] == HEADER.size)
    peer.close()
    host.wait_for(_engine.LINK_LOST, peer.link)
    host.engine.cell(KEY, bytearray(NBYTES), filled=True)
    second = Peer(host)
    second.send(Frame(REQUEST, KEY, 1, 50_000, NBYTES))
    assert second.receive().offset == 50_000
    second.close()


def test_a_number_that_is_taken(host: EngineHost) -> None:
    peer = Peer(host)
    for _ in range(2):
        peer.send(Frame(REQUEST, KEY, 1, end=NBYTES))
    assert "number in use" in lost(host, peer)


def test_a_cancel_of_nothing_is_ignored(host: EngineHost) -> None:
    peer = Peer(host)
    host.engine.cell(KEY, b"x" * 10, filled=True)
    peer.send(Frame(CANCEL, pull=65535))
    peer.send(Frame(REQUEST, KEY, 1, end=10))
    assert peer.receive().block == b"x" * 10
    peer.close()


def test_disconnect(host: EngineHost) -> None:
    peer = Peer(host)
    pulled = Pulled(host, peer)
    host.engine.disconnect(peer.link)
    assert lost(host, peer) == "disconnected"
    assert host.wait_for(_engine.PULL_FAILED, pulled.cell)[2] == "disconnected"
    with pytest.raises(KeyError):
        host.engine.pull(pulled.cell, peer.link)
