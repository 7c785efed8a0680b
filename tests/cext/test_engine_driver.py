"""Links whose bytes Python threads move: the same streams, memory that stays while it is used."""

from __future__ import annotations

import socket
import threading
import time
from typing import TYPE_CHECKING

import numpy as np
import pytest

from hoplite_mp import _engine
from tests.support.engine_hosts import WAIT_S, EngineHost

if TYPE_CHECKING:
    from collections.abc import Iterator


class Driven:
    """A driver with its two threads, over a plain socket where TLS would be."""

    def __init__(self, host: EngineHost, end: socket.socket, peer: int = 0) -> None:
        self.host, self.end = host, end
        self.driver = host.engine.drive(peer)
        self.link = self.driver.link
        self.threads = [threading.Thread(target=run) for run in (self.send, self.receive)]
        for thread in self.threads:
            thread.start()

    def send(self) -> None:
        try:
            while True:
                frame = self.driver.next_frame(WAIT_S)
                if frame is None:
                    continue
                try:
                    for part in frame:
                        self.end.sendall(part)
                except OSError:
                    self.host.engine.disconnect(self.link)
                self.driver.sent()
        except (ConnectionError, RuntimeError, KeyError):
            pass

    def receive(self) -> None:
        try:
            while True:
                place = self.driver.receive_into(WAIT_S)
                if place is None:
                    continue
                try:
                    got = self.end.recv_into(place[:16384])  # a record of TLS has no more
                except OSError:
                    got = 0
                self.driver.received(got)
        except (ConnectionError, RuntimeError):
            pass

    def join(self) -> None:
        self.end.shutdown(socket.SHUT_RDWR)
        for thread in self.threads:
            thread.join()
        self.end.close()


@pytest.fixture
def pair() -> Iterator[tuple[EngineHost, EngineHost]]:
    hosts = EngineHost(1), EngineHost(2, block_bytes_max=1 << 20)
    yield hosts
    for host in hosts:
        host.engine.stop()


def test_copies_both_ways(pair: tuple[EngineHost, EngineHost]) -> None:
    ends = socket.socketpair()
    links = [Driven(host, end) for host, end in zip(pair, ends, strict=True)]
    for nbytes in (0, 1, 65536, 5_000_001):
        data = [np.random.default_rng(i).bytes(nbytes) for i in range(2)]
        into = [bytearray(nbytes), bytearray(nbytes)]
        cells = []
        for i, host in enumerate(pair):
            host.engine.cell((i, nbytes, 0, 0), data[i], filled=True)
            cells.append(host.engine.cell((1 - i, nbytes, 0, 0), into[i]))
            host.engine.pull(cells[i], links[i].link)
        for i, host in enumerate(pair):
            host.filled(cells[i])
        assert into == data[::-1]
    sent, received = pair[0].engine.counters(links[0].link)[:2]
    assert min(sent, received) > 5_000_001
    for link in links:
        link.join()
    for host, link in zip(pair, links, strict=True):
        host.wait_for(_engine.LINK_LOST, link.link)


def test_a_driven_link_and_a_socket_agree(pair: tuple[EngineHost, EngineHost]) -> None:
    """What the threads move is what a plain link without checksums of blocks understands."""
    ends = socket.socketpair()
    driven = Driven(pair[0], ends[0])
    link = pair[1].connect(ends[1], checksum=False)
    data = bytes(range(256)) * 10_000
    pair[0].engine.cell((1, 0, 0, 0), data, filled=True)
    into = bytearray(len(data))
    cell = pair[1].engine.cell((1, 0, 0, 0), into)
    pair[1].engine.pull(cell, link)
    pair[1].filled(cell)
    assert into == data
    driven.join()


def test_closed_waits_for_the_frame_that_is_sent(pair: tuple[EngineHost, EngineHost]) -> None:
    host = pair[0]
    one, other = host.engine.drive(0), pair[1].engine.drive(0)
    source = host.engine.cell((1, 0, 0, 0), bytes(1000), filled=True)
    pair[1].engine.pull(pair[1].engine.cell((1, 0, 0, 0), bytearray(1000)), other.link)
    request = other.next_frame(WAIT_S)
    assert request
    place = one.receive_into(WAIT_S)
    assert place is not None
    place[:] = request[0]
    one.received(len(place))
    frame = one.next_frame(WAIT_S)
    assert frame
    with pytest.raises(RuntimeError, match="sent"):
        one.next_frame(0)
    host.engine.close(source)
    time.sleep(0.05)
    assert host.engine.events() == []
    assert bytes(frame[1]) == bytes(1000)
    one.sent()
    host.wait_for(_engine.CLOSED, source)


def test_closed_waits_for_the_place_that_is_written(pair: tuple[EngineHost, EngineHost]) -> None:
    host = pair[0]
    one, other = host.engine.drive(0), pair[1].engine.drive(0)
    into = bytearray(1000)
    cell = host.engine.cell((1, 0, 0, 0), into)
    pair[1].engine.cell((1, 0, 0, 0), b"x" * 1000, filled=True)
    host.engine.pull(cell, one.link)

    def carry(giver: _engine.Driver, taker: _engine.Driver) -> bytes | memoryview | None:
        frame = giver.next_frame(WAIT_S)
        place = taker.receive_into(WAIT_S)
        assert frame
        assert place is not None
        place[:] = frame[0]
        taker.received(len(place))
        return frame[1] if len(frame) > 1 else None

    assert carry(one, other) is None
    one.sent()
    block = carry(other, one)
    assert block is not None
    place = one.receive_into(WAIT_S)
    assert place is not None
    place[:500] = block[:500]
    one.received(500)
    host.engine.close(cell)
    time.sleep(0.05)
    assert host.engine.events() == []
    rest = one.receive_into(0)
    assert rest is not None
    rest[:] = block[500:]
    one.received(500)
    host.wait_for(_engine.CLOSED, cell)
    assert into == b"x" * 1000


def test_what_nobody_took_keeps_no_cell(pair: tuple[EngineHost, EngineHost]) -> None:
    """A frame and a place lie ready when the link ends; both cells can be closed."""
    host = pair[0]
    one, other = host.engine.drive(0), pair[1].engine.drive(0)
    source = host.engine.cell((1, 0, 0, 0), bytes(1000), filled=True)
    cell = pair[1].engine.cell((1, 0, 0, 0), bytearray(1000))
    pair[1].engine.pull(cell, other.link)
    for giver, taker in ((other, one), (one, other)):
        frame, place = giver.next_frame(WAIT_S), taker.receive_into(WAIT_S)
        assert frame
        assert place is not None
        place[:] = frame[0]
        if giver is other:
            giver.sent()
        taker.received(len(place))
    host.engine.disconnect(one.link)
    pair[1].engine.disconnect(other.link)
    pair[1].close(cell)
    one.sent()
    host.close(source)


def test_the_end_reaches_who_waits(pair: tuple[EngineHost, EngineHost]) -> None:
    host = pair[0]
    driver = host.engine.drive(3)
    assert driver.next_frame(0.01) is None
    found: list[BaseException] = []

    def wait() -> None:
        try:
            driver.next_frame(60.0)
        except ConnectionError as error:
            found.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    host.engine.disconnect(driver.link)
    thread.join()
    assert str(found[0]) == "disconnected"
    host.wait_for(_engine.LINK_LOST, driver.link, 3)
    with pytest.raises(ConnectionError):
        driver.receive_into(0)


def test_stop_reaches_who_waits() -> None:
    host = EngineHost(1)
    driver = host.engine.drive(0)
    found: list[BaseException] = []

    def wait() -> None:
        try:
            driver.receive_into(60.0)  # a header's place
            driver.next_frame(60.0)
        except (ConnectionError, RuntimeError) as error:
            found.append(error)

    threads = [threading.Thread(target=wait) for _ in range(1)]
    for thread in threads:
        thread.start()
    time.sleep(0.05)
    host.engine.stop()
    for thread in threads:
        thread.join()
    assert len(found) == 1
    with pytest.raises(RuntimeError, match="stopped"):
        driver.received(0)


def test_a_driver_that_is_dropped_ends_its_link(pair: tuple[EngineHost, EngineHost]) -> None:
    host = pair[0]
    driver = host.engine.drive(9)
    place = driver.receive_into(WAIT_S)
    assert place is not None
    link = driver.link
    del driver
    assert host.wait_for(_engine.LINK_LOST, link)[3] == "disconnected"
    place[:] = bytes(len(place))  # still somebody's memory


def test_mistakes(pair: tuple[EngineHost, EngineHost]) -> None:
    driver = pair[0].engine.drive(0)
    with pytest.raises(TypeError, match="drive"):
        _engine.Driver().sent()
    with pytest.raises(ValueError, match="timeout"):
        driver.next_frame(-1)
    with pytest.raises(RuntimeError):
        driver.sent()
    with pytest.raises(RuntimeError):
        driver.received(0)
    place = driver.receive_into(WAIT_S)
    assert place is not None
    with pytest.raises(ValueError, match="64"):
        driver.received(65)
