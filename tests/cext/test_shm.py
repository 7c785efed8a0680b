"""Blocks, spans, views, ids: what the state machine and the kills do not look at."""

from __future__ import annotations

import os
import random
import threading
import warnings
from typing import Any

import pytest

from hoplite_mp import _shm
from tests.support.shm_host import STATE, ShmHost, put_bytes

HEAD = _shm.BLOCK_HEAD_BYTES


def test_nothing_else_is_in_the_gaps_of_a_payload(host: ShmHost) -> None:
    """Buffers stand at multiples of 64; what lies before them was another object's, or the stack's,
    and would be read by other processes and sent to other hosts."""
    client = host.with_span(spans=8)
    at = client.allocate(300)
    client.write(at, b"\xff" * 300, [], [])
    head, parts, places = b"head", [memoryview(b"one"), memoryview(b"two")], [64, 192]
    wanted = bytearray(195)
    wanted[:4], wanted[64:67], wanted[192:] = b"head", b"one", b"two"
    for write in (client.write, client.write_cold):
        client.write(at, b"\xff" * 300, [], [])
        write(at, head, parts, places)
        oid = client.publish(at, 195, False)
        assert bytes(client.view(oid)) == wanted
        client.release(oid)
        at = client.allocate(300)
    client.write(at, b"\xff" * 300, [], [])
    client.write(at, head.ljust(64, b"\0"), [], [])
    client.write(at, b"", parts, places)  # the head is there already
    assert bytes(client.view(client.publish(at, 195, False))) == wanted
    for _ in range(10):
        oid = client.publish_inline(head, parts[:1], places[:1], 67, False)
        assert bytes(client.view(oid)) == wanted[:67]
        client.release(oid)


# -- small blocks -----------------------------------------------------------------------------


def test_blocks_are_aligned_and_apart(host: ShmHost) -> None:
    client = host.with_span(spans=8)
    taken: list[tuple[int, int]] = []
    for size in (1, 64, 65, 128, 129, 300, 1000, 2000, 4095, 4096) * 4:
        at = client.allocate(size)
        assert at % 64 == 0
        assert all(at >= end or at + size <= start for start, end in taken)
        taken.append((at - HEAD, at + size))


def test_a_freed_block_is_the_next_of_its_class(host: ShmHost) -> None:
    client = host.with_span(spans=2)
    first, _ = client.allocate(200), client.allocate(200)
    client.give_back(first)
    assert client.allocate(250) == first, "256 bytes with the head: the same class"
    other = client.allocate(60)
    assert other & -(1 << 16) != first & -(1 << 16), "another class lies in another span"


def test_an_object_gone_gives_its_block_back(host: ShmHost) -> None:
    client = host.with_span()
    oid = put_bytes(client, b"x" * 500)
    at = client.inspect(oid)["block"]
    client.release(oid)
    assert client.news()
    assert client.collect() == []
    assert client.allocate(500) == at


def test_without_room_the_answer_is_zero(host: ShmHost) -> None:
    client = host.client()
    assert client.allocate(100) == 0
    host.give_span(client)
    got = [client.allocate(4096) for _ in range(20)]
    blocks = (1 << 16) // (4096 + HEAD)
    assert all(got[:blocks])
    assert not any(got[blocks:])
    assert client.allocate(4097) == 0, "larger ones are the node's"


def test_others_return_small_blocks(host: ShmHost) -> None:
    """The owner of the table is not the lessee of the block: a task's result."""
    worker, owner = host.with_span(), host.client()
    got = []
    while at := worker.allocate(4000):
        oid = owner.new(2, STATE["CLAIMED"], worker.slot)
        worker.bind(oid, at, 4000, False)
        got.append((at, oid))
    for _, oid in got:
        owner.delete(oid)
    owner.collect()
    assert worker.allocate(4000) == 0, "CLAIMED: the worker still writes"
    for at, oid in got:
        worker.give_back(at, oid)
    again = [worker.allocate(4000) for _ in got]
    assert sorted(again) == sorted(at for at, _ in got)
    # now returned by the owner's collection, which is in another process than the lessee
    oids = []
    for at in again:
        oid = owner.new(1, STATE["CLAIMED"], owner.slot)
        owner.bind(oid, at, 4000, False)
        oids.append(oid)
    node = host.node_tasks
    for oid in oids:
        assert not node.finish(oid, False), "only the claimant finishes"
        owner.delete(oid)
    assert worker.allocate(4000) == 0


def test_the_lessee_finds_what_another_has_returned(host: ShmHost) -> None:
    lessee, other = host.with_span(), host.client()
    blocks = []
    while at := lessee.allocate(1000):
        blocks.append(at)
    for at in blocks[::3]:
        other.give_back(at)
        other.give_back(at)  # a late repeat does nothing
    again = []
    while at := lessee.allocate(1000):
        again.append(at)
    assert sorted(again) == sorted(blocks[::3])


def test_empty_spans_go_back_even_the_last_of_a_class(host: ShmHost) -> None:
    client = host.client()
    spans = {host.give_span(client) for _ in range(4)}
    blocks = []
    while at := client.allocate(3000):
        blocks.append(at)
    assert client.take_empty_spans() == []
    kept = blocks.pop()
    for at in blocks:
        client.give_back(at)
    given = client.take_empty_spans()
    assert spans - set(given) == {kept & -(1 << 16)}
    other = host.client()
    other.give_back(kept)
    assert set(client.take_empty_spans()) | set(given) == spans
    assert client.allocate(3000) == 0
    host.give_span(client)
    assert client.allocate(3000), "the place of a span that went is used again"


def test_a_span_may_change_its_class(host: ShmHost) -> None:
    client = host.client()
    for _ in range(2):
        host.give_span(client)
    rng = random.Random(3)
    for _ in range(200):
        size = rng.choice((64, 500, 4000))
        blocks = []
        while at := client.allocate(size):
            blocks.append(at)
        assert len(blocks) >= (1 << 16) // (size + HEAD) // 2
        rng.shuffle(blocks)
        for at in blocks:
            client.give_back(at)


def test_a_span_has_no_more_blocks_than_numbers() -> None:
    host = ShmHost(span_bytes=1 << 24, small_max=64)
    client = host.with_span()
    blocks = set()
    while at := client.allocate(64):
        assert at not in blocks
        blocks.add(at)
    assert len(blocks) == 65536
    host.close()


def test_the_largest_small_object_has_a_class() -> None:
    host = ShmHost(span_bytes=1 << 25, small_max=12 << 20)
    client = host.with_span()
    assert client.allocate(12 << 20)
    assert client.allocate((12 << 20) + 1) == 0
    host.close()


@pytest.mark.parametrize(("span", "small"), [(100_000, 4096), (1 << 16, 1 << 16)])
def test_spans_that_cannot_be_are_refused(span: int, small: int) -> None:
    fd = os.memfd_create("x")
    with pytest.raises(ValueError, match="spans of"):
        _shm.create(fd, fd, 1, 1 << 20, 1, 0, small, span)
    os.close(fd)


# -- big blocks and the ring of returns ---------------------------------------------------------


def big(host: ShmHost, client: _shm.Client, size: int = 10_000) -> tuple[int, int]:
    at = host.store.lease(size, client.slot)
    assert at is not None
    return at, client.publish(at, size, False)


def test_big_blocks_come_back_through_the_ring(host: ShmHost) -> None:
    client = host.client()
    for _ in range(10_000):  # two rounds of the ring, and more
        at, oid = big(host, client)
        assert host.node.block_owner(at) == oid
        client.release(oid)
        client.collect()
        assert host.node.block_owner(at) == 0
        host.store.take_returns()
        assert at not in host.store.leases


def test_an_overflow_of_the_ring_loses_nothing(host: ShmHost) -> None:
    client = host.client()
    blocks = [host.store.lease(5000, client.slot) for _ in range(4200)]
    assert host.node.returns() == []
    for at in blocks:
        assert at is not None
        client.give_back(at)
    assert host.node.returns() is None, "more than the ring holds: look at all"
    for at in blocks:
        assert at is not None
        host.node.lease(at - HEAD, 8192)
        client.give_back(at)
    host.store.take_returns()
    assert not host.store.leases


def test_a_return_that_was_not_written_means_looking_at_all(host: ShmHost) -> None:
    client = host.client()
    at = host.store.lease(5000, client.slot)
    assert at is not None
    client.give_back(at)
    ring = 72 + 32 + 8 + 8 * 32
    entry = next(o for o in range(ring - 64, ring + 64, 8) if host.word(o) & ~63 == at)
    host.write_word(entry, 0)  # as if its writer had been killed before the store
    assert host.node.returns() is None
    assert host.node.returns() == []


def test_freed_bytes_can_be_reclaimed_before_their_owner_collects(host: ShmHost) -> None:
    client = host.client()
    at, oid = big(host, client)
    client.release(oid)
    assert host.node.reclaim_freed() == 1
    assert host.node.block_owner(at) == 0
    assert host.node.reclaim_freed() == 0
    client.collect()
    assert client.state(oid) == STATE["FREE"]


def test_bytes_that_went_on_to_another_object_are_not_the_old_ones(host: ShmHost) -> None:
    """A header that nobody has collected names a block which belongs to a newer object."""
    client = host.client()
    at, old = big(host, client)
    client.release(old)
    host.node.reclaim_freed()
    host.store.take_returns()
    again, new = big(host, client)
    assert again == at
    assert host.node.live_blocks() == {at: new}


# -- together -----------------------------------------------------------------------------------


def test_threads_share_a_client(host: ShmHost) -> None:
    client = host.with_span(spans=8)
    failures: list[BaseException] = []

    def work(seed: int) -> None:
        rng = random.Random(seed)
        held: list[Any] = []
        try:
            for _ in range(3000):
                if rng.random() < 0.5 or not held:
                    oid = put_bytes(client, bytes([seed]) * 300)
                    held.append((client.hold(oid, False), client.view(oid)))
                else:
                    _, view = held.pop(rng.randrange(len(held)))
                    assert bytes(view) == bytes([seed]) * 300
                if len(held) > 20:
                    held.clear()
                if client.news():
                    client.collect()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    client.collect()
    assert host.node.scan() == []


def test_a_reader_and_the_last_releaser_race(host: ShmHost) -> None:
    """Another process acquires what this one drops: it has it whole, or not at all."""
    client = host.with_span(spans=4)
    other = host.node.register(0, 2, 1)
    read, write = os.pipe()

    def child() -> None:
        mine = host.client(other)
        got = 0
        while data := os.read(read, 8):
            oid = int.from_bytes(data, "little")
            view = mine.view(oid)
            if not isinstance(view, int):
                assert bytes(view) == oid.to_bytes(8, "little") * 40
                got += 1
        assert mine.scan() is not None

    def parent() -> None:
        for _ in range(5000):
            at = client.allocate(320)
            while not at:
                client.collect()
                at = client.allocate(320)
            oid = client.publish(at, 320, False)
            host.node.memory(at, 320)[:] = oid.to_bytes(8, "little") * 40
            os.write(write, oid.to_bytes(8, "little"))
            client.release(oid)
            if client.news():
                client.collect()

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if not pid:
        code = 1
        try:
            os.close(write)
            child()
            code = 0
        finally:
            os._exit(code)
    os.close(read)
    parent()
    os.close(write)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    client.collect()
    assert [h for h in host.node.scan() if h["state"] != "FREE"] == []
