"""Views of objects, blocks that become objects, and what ids and tables may be."""

from __future__ import annotations

import gc
from typing import Any

import pytest

from hoplite_mp import _shm
from tests.support.processes import exit_code_in_child
from tests.support.shm_host import (
    LEASED,
    OFF_HEADERS,
    STATE,
    TABLE_HEADERS,
    TABLES,
    ShmHost,
    put_bytes,
)

# -- views and blocks ---------------------------------------------------------------------------


def test_a_view_pins_and_outlives_the_last_ref(host: ShmHost) -> None:
    client, reader = host.with_span(), host.client()
    oid = put_bytes(client, b"abc" * 300)
    view = reader.view(oid)
    assert isinstance(view, _shm.View)
    assert len(view) == 900
    assert view.oid == oid
    client.release(oid)
    assert client.inspect(oid)["state"] == "SEALED"
    memory = memoryview(view)
    assert memory.readonly
    del view
    assert client.inspect(oid)["pins"] == [reader.slot], "a buffer keeps its view"
    assert bytes(memory[:3]) == b"abc"
    memory.release()
    assert client.inspect(oid)["state"] == "FREED"


def test_views_are_readable_after_close(host: ShmHost) -> None:
    client = host.with_span()
    oid = put_bytes(client, b"abc" * 300)
    view = client.view(oid)
    client.close()
    assert not client.usable
    del client
    gc.collect()
    assert bytes(view) == b"abc" * 300  # type: ignore[arg-type]
    del view
    assert host.node.inspect(oid)["pins"] == [1], "after close no atomics: the sweep lets go"
    host.sweep(1)
    assert host.node.inspect(oid)["state"] == "FREE"


def test_private_pages_are_written_by_one_alone(host: ShmHost) -> None:
    """Copy on write: pages that nobody wrote to are the store's, and the object stays pinned."""
    client, reader = host.with_span(), host.client()
    oid = put_bytes(client, b"abc" * 300)
    view = reader.view(oid)
    assert isinstance(view, _shm.View)
    part = memoryview(view)[3:-3]
    one, other = view.private(part), view.private(part)
    assert one is not None
    assert other is not None
    assert len(one) == 900 - 6
    mine = memoryview(one)
    assert not mine.readonly
    assert mine[:6] == b"abcabc"
    mine[:3] = b"xyz"
    assert mine[:6] == b"xyzabc"
    assert memoryview(view)[:6] == b"abcabc"
    assert memoryview(other)[:6] == b"abcabc"
    with pytest.raises(ValueError, match="not part of this payload"):
        view.private(b"somewhere else")
    assert view.private(part[:0]) is None
    client.release(oid)
    del view, part, other, one
    assert client.inspect(oid)["pins"] == [reader.slot], "what is mapped keeps the object"
    assert mine[3:6] == b"abc"
    mine.release()
    assert client.inspect(oid)["state"] == "FREED"


def test_private_pages_outlive_the_cluster_and_are_not_made_after_it(host: ShmHost) -> None:
    client = host.with_span()
    oid = put_bytes(client, b"abc" * 300)
    view = client.view(oid)
    assert isinstance(view, _shm.View)
    private = view.private(memoryview(view))
    client.close()
    assert view.private(memoryview(view)) is None
    assert private is not None
    del view
    assert bytes(memoryview(private)) == b"abc" * 300


def test_a_forked_child_reads_and_lets_go_of_nothing(host: ShmHost) -> None:
    client = host.with_span(spans=2)
    oid = put_bytes(client, b"abc" * 300)
    kept: dict[str, Any] = {"view": client.view(oid), "hold": client.hold(oid)}
    kept["block"] = client.block(client.allocate(100), 100)

    def child() -> None:
        assert not client.usable
        assert bytes(kept["view"][:3] if isinstance(kept["view"], bytes) else kept["view"])[:3]
        assert client.collect() == []
        kept.clear()
        gc.collect()

    assert exit_code_in_child(child) == 0
    header = client.inspect(oid)
    assert (header["refs"], header["pins"]) == ([1], [1])
    assert bytes(kept["view"])[:3] == b"abc"


def test_a_block_is_freed_or_becomes_an_object(host: ShmHost) -> None:
    client = host.with_span()
    at = client.allocate(200)
    block = client.block(at, 200)
    memoryview(block)[:3] = b"xyz"
    assert (block.payload, block.published, len(block)) == (at, 0, 200)
    del block
    assert client.allocate(200) == at, "nobody's block is free again"
    block = client.block(at, 200)
    oid = client.publish(at, 200, False)
    block.become(oid)
    with pytest.raises(ValueError, match="already"):
        block.become(oid)
    assert memoryview(block).readonly
    assert client.inspect(oid)["pins"] == [client.slot]
    client.release(oid)
    assert client.state(oid) == STATE["SEALED"]
    del block
    assert client.state(oid) == STATE["FREED"]


def test_a_result_that_did_not_count_leaves_the_block_to_its_writer(host: ShmHost) -> None:
    client = host.with_span()
    oid = client.new(2, STATE["CLAIMED"], client.slot)
    at = client.allocate(200)
    block = client.block(at, 200)
    client.bind(oid, at, 200, False)
    block.become(oid)
    assert client.delete(oid) == 1
    block.unbecome()
    assert not memoryview(block).readonly
    assert host.node.block_owner(at) == LEASED
    del block
    assert client.allocate(200) == at


def test_a_hold_in_a_garbage_cycle_lets_go(host: ShmHost) -> None:
    client = host.with_span()
    oid = put_bytes(client, b"x" * 300)
    cycle: dict[str, Any] = {"hold": client.hold(oid, False), "view": client.view(oid)}
    cycle["self"] = cycle
    del cycle
    gc.collect()
    assert client.private_counts(oid) == (0, 0)
    assert client.state(oid) == STATE["FREED"]


def test_what_is_not_held_cannot_be_let_go(host: ShmHost) -> None:
    client, other = host.with_span(), host.client()
    oid = put_bytes(client, b"x" * 300)
    with pytest.raises(ValueError, match="not held"):
        other.release(oid)
    with pytest.raises(ValueError, match="not pinned"):
        client.drop_pin(oid)
    client.release(oid)
    with pytest.raises(ValueError, match="not held"):
        client.release(oid)


# -- ids ----------------------------------------------------------------------------------------


def test_the_id_zero_is_nobodys(host: ShmHost) -> None:
    client = host.client()
    oids = {client.new(1, STATE["WAITING"]) for _ in range(2 * TABLE_HEADERS)}
    assert len(oids) == 2 * TABLE_HEADERS
    assert 0 not in oids
    assert {oid >> 48 for oid in oids} == {0, 1, 2}
    assert not client.acquire(0)
    assert client.view(0) == STATE["FREE"]


@pytest.mark.parametrize("oid", [TABLES << 48, TABLE_HEADERS << 32, (1 << 64) - 1])
def test_what_is_no_id_is_refused(host: ShmHost, oid: int) -> None:
    client = host.client()
    for call in (client.acquire, client.release, client.hold, client.view, client.state):
        with pytest.raises(ValueError, match="not a local id"):
            call(oid)
    for call in (host.node_tasks.done, host.node_tasks.claim, host.node_tasks.task):
        with pytest.raises(ValueError, match="not a local id"):
            call(oid)


def test_generations_wrap(host: ShmHost) -> None:
    client = host.client()
    oid = client.new(1, STATE["CLAIMED"], client.slot)
    word = OFF_HEADERS + 128 * (oid >> 32 & 0xFFFF)
    client.delete(oid)
    assert host.node.settle(oid, client.slot)
    last = 0xFFFFFFF
    # the same header in its last generation, held by nobody and FREED
    client.release(oid)
    host.write_word(word, host.word(word) & 0xFFFF0000000FFFFF & ~0xF | last << 20 | 11)
    old = oid | last
    client.collect()
    assert client.state(old) == STATE["FREE"]
    new = client.new(1, STATE["WAITING"])
    assert new == oid & ~0xFFFFFFFF, "the generation begins again at 0"
    assert not client.acquire(old)
    assert client.acquire(new)


def test_all_tables_taken_is_an_error(host: ShmHost) -> None:
    for table in range(TABLES):
        host.write_word(host.table(table), 200, 4)
    client = host.client()
    with pytest.raises(MemoryError, match="headers of this host are taken"):
        client.new(1, STATE["WAITING"])
    host.write_word(host.table(7), 0, 4)
    assert client.new(1, STATE["WAITING"]) >> 48 == 7


def test_a_table_of_the_dead_is_used_again_when_empty(host: ShmHost) -> None:
    client = host.with_span()
    oid = put_bytes(client, b"x" * 300)
    stale = put_bytes(client, b"x" * 300)
    other = host.client()
    assert other.acquire(oid)
    client.close()
    host.sweep(client.slot)
    assert host.node.tables == [oid >> 48]
    assert bytes(other.view(oid)) == b"x" * 300  # type: ignore[arg-type]
    other.release(oid)
    host.sweeper.collect()
    host.store.sweep_spans()
    assert host.node.tables == []
    assert not host.store.spans, "the span went with its last object"
    assert other.new(1, STATE["WAITING"]) >> 48 == oid >> 48
    assert not other.acquire(stale)


def test_slots_are_limited(host: ShmHost) -> None:
    slots = [host.node.register(0, 2, 1) for _ in range(255)]
    assert slots == list(range(1, 256))
    assert host.node.register(0, 2, 1) == -1
    host.node.unregister(9)
    assert host.node.register(0, 2, 1) == 9
    with pytest.raises(ValueError, match="client slot 256"):
        host.node.register(256, 2, 1)
