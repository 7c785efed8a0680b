"""Copies between engines: every size, forwarding, resuming, taking turns, many of everything."""

from __future__ import annotations

import random
import socket
import threading
import time

import numpy as np
import pytest

from hoplite_mp import _engine
from tests.support.engine_hosts import DATA, REQUEST, EngineHost, Frame, Peer, join, random_bytes

SMALL = [0, 1, 3, 63, 64, 65, 16383, 16384, 16385]
LARGE = [262143, 262144, 262145, 2**21 + 1, 5_000_001]


def copy(server: EngineHost, client: EngineHost, link: int, data: bytes, key: int = 0) -> None:
    """One cell over the link, compared, and closed on both sides."""
    source = server.engine.cell((1, 2, 3, key), data, filled=True)
    into = bytearray(len(data))
    cell = client.engine.cell((1, 2, 3, key), into)
    client.engine.pull(cell, link)
    client.filled(cell)
    assert client.engine.watermark(cell) == len(data)
    assert into == data
    client.close(cell)
    server.close(source)


@pytest.mark.parametrize("nbytes", SMALL + LARGE)
@pytest.mark.parametrize("checksum", [True, False])
def test_copy(pair: tuple[EngineHost, EngineHost], nbytes: int, checksum: bool) -> None:
    server, client = pair
    _, link = join(server, client, checksum)
    copy(server, client, link, random_bytes(nbytes))


@pytest.mark.parametrize("tcp", [True, False])
def test_copy_40_megabytes(pair: tuple[EngineHost, EngineHost], tcp: bool) -> None:
    server, client = pair
    there, here = join(server, client, tcp=tcp)
    copy(server, client, here, random_bytes(40_000_000))
    sent, received, backlogged_bytes, backlogged_ns = server.engine.counters(there)
    assert client.engine.counters(here)[:2] == (received, sent)
    assert sent > 40_000_000
    assert 0 < backlogged_bytes <= sent
    assert backlogged_ns > 0


@pytest.mark.parametrize("block_bytes_max", [16384, 1 << 20])
def test_the_longest_block_may_differ(block_bytes_max: int) -> None:
    server, client = EngineHost(1, block_bytes_max=block_bytes_max), EngineHost(2)
    _, link = join(server, client)
    copy(server, client, link, random_bytes(20_000_000))
    server.engine.stop()
    client.engine.stop()


def test_parts_of_buffers(pair: tuple[EngineHost, EngineHost]) -> None:
    server, client = pair
    _, link = join(server, client)
    data = np.arange(1000, dtype=np.int32)
    server.engine.cell((1, 0, 0, 0), data, offset=400, nbytes=2000, filled=True)
    into = np.full(1000, -1, np.int32)
    cell = client.engine.cell(None, into, offset=4, nbytes=2000)
    client.engine.pull(cell, link, (1, 0, 0, 0))
    client.filled(cell)
    assert list(into[:502]) == [-1, *range(100, 600), -1]


@pytest.mark.parametrize("begin", [0, 1, 70_000])
@pytest.mark.parametrize("end", [70_001, 300_000, 999_999])
def test_a_gap_in_the_middle(pair: tuple[EngineHost, EngineHost], begin: int, end: int) -> None:
    """A part of the peer's cell, of which some bytes come only after they were asked for."""
    server, client = pair
    _, link = join(server, client)
    data = random_bytes(1_000_000)
    source = server.engine.cell((1, 0, 0, 0), bytearray(data), filled=min(begin + 10, end))
    into = bytearray(1_000_000)
    cell = client.engine.cell(None, into, nbytes=end, filled=begin)
    client.engine.pull(cell, link, (1, 0, 0, 0))
    server.engine.advance(source, end)
    client.filled(cell)
    assert into == bytes(begin) + data[begin:end] + bytes(1_000_000 - end)


def test_both_sides_pull_over_one_link(pair: tuple[EngineHost, EngineHost]) -> None:
    links = join(*pair)
    data = [random_bytes(3_000_000, 0), random_bytes(3_000_000, 1)]
    into = [bytearray(3_000_000), bytearray(3_000_000)]
    for i, host in enumerate(pair):
        host.engine.cell((i, 0, 0, 0), data[i], filled=True)
    cells = [host.engine.cell((1 - i, 0, 0, 0), into[i]) for i, host in enumerate(pair)]
    for host, cell, link in zip(pair, cells, links, strict=True):
        host.engine.pull(cell, link)
    for host, cell in zip(pair, cells, strict=True):
        host.filled(cell)
    assert into == data[::-1]


def test_a_request_waits_for_its_cell(pair: tuple[EngineHost, EngineHost]) -> None:
    server, client = pair
    there, here = join(server, client)
    into = bytearray(100_000)
    cell = client.engine.cell((5, 0, 0, 0), into)
    client.engine.pull(cell, here)
    server.wait(lambda: server.engine.counters(there)[1] == _engine.HEADER_BYTES)
    data = random_bytes(100_000)
    server.engine.cell((5, 0, 0, 0), data, filled=True)
    client.filled(cell)
    assert into == data


def test_forwarding_begins_at_the_watermark(
    three: tuple[EngineHost, EngineHost, EngineHost],
) -> None:
    """C has what A has written so far, through B, before A has written the rest."""
    a, b, c = three
    _, ab = join(a, b)
    _, bc = join(b, c)
    nbytes, key = 8 * 262144, (9, 0, 0, 0)
    data = random_bytes(nbytes)
    source = a.engine.cell(key, bytearray(data))
    into = [bytearray(nbytes), bytearray(nbytes)]
    at_c = c.engine.cell(key, into[1])
    c.engine.pull(at_c, bc)
    at_b = b.engine.cell(key, into[0])
    b.engine.pull(at_b, ab)
    for come in range(262144, nbytes + 1, 262144):
        a.engine.advance(source, come)
        c.wait(lambda come=come: c.engine.watermark(at_c) == come)
        assert b.engine.watermark(at_b) == come
        assert into[1][:come] == data[:come]
    c.filled(at_c)


def test_no_dust_is_sent(pair: tuple[EngineHost, EngineHost]) -> None:
    """A frame is a whole block or the rest of the cell, however slowly the cell fills."""
    server, _ = pair
    peer = Peer(server)
    nbytes = 100_000
    source = server.engine.cell((1, 0, 0, 0), bytearray(nbytes))
    peer.send(Frame(REQUEST, (1, 0, 0, 0), end=nbytes))
    for come in range(1000, nbytes + 1, 1000):
        server.engine.advance(source, come)
    lengths = []
    while sum(lengths) < nbytes:
        frame = peer.receive()
        assert frame.type == DATA
        assert frame.offset == sum(lengths)
        lengths.append(len(frame.block))
    assert lengths == [16384] * 6 + [nbytes - 6 * 16384]
    peer.close()


def test_a_pull_goes_on_over_another_link(three: tuple[EngineHost, EngineHost, EngineHost]) -> None:
    """The first source has half of it and is cut off; the second one sends the rest alone."""
    first, second, client = three
    nbytes, key = 2_000_000, (1, 1, 1, 1)
    data = random_bytes(nbytes)
    first.engine.cell(key, bytearray(data), filled=1_000_000)
    there, spare = join(second, client)
    _, link = join(first, client)
    second.engine.cell(key, data, filled=True)
    into = bytearray(nbytes)
    cell = client.engine.cell(key, into)
    client.engine.pull(cell, link)
    client.wait(lambda: client.engine.watermark(cell) > 700_000)
    first.engine.stop()
    assert client.wait_for(_engine.LINK_LOST, link)[3] == "the peer has closed the connection"
    client.wait_for(_engine.PULL_FAILED, cell)
    client.engine.pull(cell, spare)
    client.filled(cell)
    assert into == data
    assert second.engine.counters(there)[0] < nbytes - 700_000 + 20 * _engine.HEADER_BYTES


@pytest.mark.parametrize("seed", range(20))
def test_a_cut_at_any_byte(pair: tuple[EngineHost, EngineHost], seed: int) -> None:
    """A relay lets some bytes through and cuts; the pull goes on over the next relay."""
    server, client = pair
    chance = random.Random(seed)
    nbytes = chance.choice([1000, 50_000, 700_000])
    data = random_bytes(nbytes, seed)
    server.engine.cell((1, 0, 0, 0), data, filled=True)
    into = bytearray(nbytes)
    cell = client.engine.cell((1, 0, 0, 0), into)
    for _ in range(5):
        near, far = socket.socketpair(), socket.socketpair()
        server.connect(far[1])
        link = client.connect(near[0])
        client.engine.pull(cell, link)
        far[0].sendall(near[1].recv(_engine.HEADER_BYTES, socket.MSG_WAITALL))
        left = chance.randrange((nbytes - client.engine.watermark(cell)) // 2 + 1)
        while left and (got := far[0].recv(min(left, 65536))):
            near[1].sendall(got)
            left -= len(got)
        near[1].close()
        far[0].close()
        client.wait_for(_engine.LINK_LOST, link)
        come = client.engine.watermark(cell)
        assert into[:come] == data[:come]
    _, link = join(server, client)
    client.engine.pull(cell, link)
    client.filled(cell)
    assert into == data


def test_a_running_pull_moves_to_another_link(pair: tuple[EngineHost, EngineHost]) -> None:
    server, client = pair
    links = [join(server, client)[1] for _ in range(3)]
    data = random_bytes(20_000_000)
    server.engine.cell((1, 0, 0, 0), data, filled=True)
    into = bytearray(len(data))
    cell = client.engine.cell((1, 0, 0, 0), into)
    for i in range(50):
        client.engine.pull(cell, links[i % 3])
    client.filled(cell)
    assert into == data
    copy(server, client, links[0], data[:100_000], key=4)
    assert not [event for event in client.told if event[0] == _engine.LINK_LOST]


def test_a_peer_that_does_not_read_delays_only_itself(pair: tuple[EngineHost, EngineHost]) -> None:
    server, client = pair
    slow = Peer(server)
    source = server.engine.cell((1, 0, 0, 0), bytearray(50_000_000), filled=True)
    slow.send(Frame(REQUEST, (1, 0, 0, 0), end=50_000_000))
    server.wait(lambda: server.engine.counters(slow.link)[0] > 0)
    _, link = join(server, client)
    copy(server, client, link, random_bytes(10_000_000), key=1)
    # Nor does it keep the memory: the rest of the block under way is copied.
    server.close(source)
    assert slow.receive().block == bytes(262144)
    slow.close()


def test_streams_of_one_link_take_turns(pair: tuple[EngineHost, EngineHost]) -> None:
    """A small cell that is asked for behind a large one does not wait for it."""
    server, client = pair
    _, link = join(server, client)
    server.engine.cell((1, 0, 0, 0), bytearray(200_000_000), filled=True)
    server.engine.cell((1, 0, 0, 1), bytearray(1000), filled=True)
    large = client.engine.cell((1, 0, 0, 0), bytearray(200_000_000))
    small = client.engine.cell((1, 0, 0, 1), bytearray(1000))
    client.engine.pull(large, link)
    client.engine.pull(small, link)
    client.filled(small)
    assert client.engine.watermark(large) < 200_000_000
    client.filled(large)


def test_closing_a_cell_that_is_pulled(pair: tuple[EngineHost, EngineHost]) -> None:
    server, client = pair
    _, link = join(server, client)
    source = server.engine.cell((1, 0, 0, 0), bytearray(1_000_000), filled=500_000)
    cell = client.engine.cell((1, 0, 0, 0), bytearray(1_000_000))
    client.engine.pull(cell, link)
    client.wait(lambda: client.engine.watermark(cell) > 300_000)
    server.close(source)
    failed = client.wait_for(_engine.PULL_FAILED, cell)
    assert failed[2] == "the peer has closed the cell"
    # The key is free; a new cell of the same name serves the rest.
    server.engine.cell((1, 0, 0, 0), bytearray(1_000_000), filled=True)
    client.engine.pull(cell, link)
    client.filled(cell)


def test_closing_the_cell_that_pulls(pair: tuple[EngineHost, EngineHost]) -> None:
    """The memory is not written after CLOSED, and the link goes on."""
    server, client = pair
    _, link = join(server, client)
    server.engine.cell((1, 0, 0, 0), b"\xff" * 30_000_000, filled=True)
    for _ in range(20):
        into = np.zeros(30_000_000, np.uint8)
        cell = client.engine.cell((1, 0, 0, 0), into)
        client.engine.pull(cell, link)
        client.wait(lambda cell=cell: client.engine.watermark(cell) > 0)
        client.close(cell)
        into[:] = 0
    copy(server, client, link, random_bytes(1_000_000), key=1)
    assert not into.any()


def test_the_buffer_is_free_after_closed(pair: tuple[EngineHost, EngineHost]) -> None:
    host, _ = pair
    buffer = bytearray(10)
    cell = host.engine.cell(None, buffer)
    with pytest.raises(BufferError):
        buffer.append(0)
    host.close(cell)
    buffer.append(0)
    with pytest.raises(KeyError):
        host.engine.watermark(cell)
    with pytest.raises(KeyError):
        host.engine.close(cell)


def test_ten_thousand_cells(pair: tuple[EngineHost, EngineHost]) -> None:
    server, client = pair
    _, link = join(server, client)
    count, nbytes = 10_000, 40
    data = random_bytes(count * nbytes)
    into = bytearray(count * nbytes)
    cells = []
    for i in range(count):
        cell = client.engine.cell((i, i % 7, i % 11, i), into, i * nbytes, nbytes)
        client.engine.pull(cell, link)
        cells.append(cell)
    sources = [
        server.engine.cell((i, i % 7, i % 11, i), data, i * nbytes, nbytes, filled=True)
        for i in range(count)
    ]
    client.wait(lambda: len(client.told) == count)
    assert into == data
    assert {event[1] for event in client.told} == set(cells)
    for source in sources:
        server.engine.close(source)
    server.wait(lambda: len(server.told) == count)


def test_64_links(pair: tuple[EngineHost, EngineHost]) -> None:
    server, client = pair
    links = [join(server, client)[1] for _ in range(64)]
    data = random_bytes(300_000)
    server.engine.cell((1, 0, 0, 0), data, filled=True)
    into = [bytearray(len(data)) for _ in links]
    for i, link in enumerate(links):
        client.engine.pull(client.engine.cell(None, into[i]), link, (1, 0, 0, 0))
    client.wait(lambda: len(client.told) == 64)
    assert all(one == data for one in into)


def test_threads_may_call_at_any_time(pair: tuple[EngineHost, EngineHost]) -> None:
    server, client = pair
    links = [join(server, client)[1] for _ in range(4)]
    data = random_bytes(200_000)
    server.engine.cell((1, 0, 0, 0), data, filled=True)
    failures: list[BaseException] = []

    def work(seed: int) -> None:
        chance = random.Random(seed)
        try:
            for _ in range(100):
                into = bytearray(len(data))
                cell = client.engine.cell(None, into)
                for _ in range(chance.randrange(1, 4)):
                    client.engine.pull(cell, chance.choice(links), (1, 0, 0, 0))
                if chance.random() < 0.5:
                    while client.engine.watermark(cell) < len(data):
                        time.sleep(0)
                    assert into == data
                client.engine.close(cell)
        except BaseException as failure:
            failures.append(failure)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    closed = 0
    while closed < 400 and not failures:
        client.wait(lambda: bool(client.told))
        closed += sum(event[0] == _engine.CLOSED for event in client.told)
        assert not [event for event in client.told if event[0] == _engine.LINK_LOST]
        client.told.clear()
    for thread in threads:
        thread.join()
    assert not failures
