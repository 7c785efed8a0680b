"""Spilled objects that several processes read, with room for one of them at a time."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from hoplite_mp._common import ids
from hoplite_mp._common.object_states import KIND_OPERATION, NODE_SLOT, STATE
from hoplite_mp._node.store.budget import HANDED_S
from hoplite_mp._protocol.messages import FetchRequested
from tests.support.node_harness import member
from tests.support.shm_host import ShmHost

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.support.node_harness import NodeHarness

MIB = 1 << 20


@pytest.fixture
def host() -> Iterator[ShmHost]:
    host = ShmHost()
    host.store.limit = MIB + MIB // 2
    yield host
    host.close()


def put(host: ShmHost) -> tuple[int, Any]:
    """An object of 1 MiB, and a hold on it."""
    block = host.store.lease(MIB, NODE_SLOT)
    assert block is not None
    oid = host.node.new(KIND_OPERATION, STATE["CLAIMED"], NODE_SLOT, 0)
    hold = host.node.hold(oid, False)
    host.results.store_block(oid, block, MIB)
    return oid, hold


def test_restored_object_stays_until_its_reader_has_seen_it(host: ShmHost) -> None:
    """Else two readers take the room from each other for ever."""
    (one, _first), (other, _second) = put(host), put(host)
    assert host.node.state(one) == STATE["SPILLED"]
    reader, late = host.client().slot, host.client().slot
    assert host.store.restore(one, reader)
    assert host.node.state(other) == STATE["SPILLED"]
    assert host.store.restore(other, late) is None
    assert host.node.state(one) == STATE["SEALED"]
    host.loop.time += HANDED_S  # its reader has died
    assert host.store.restore(other, late)
    assert host.node.state(one) == STATE["SPILLED"]


def test_object_restored_for_the_node_may_be_spilled_again(host: ShmHost) -> None:
    (one, _first), (other, _second) = put(host), put(host)
    assert host.store.restore(one)
    assert host.store.restore(other)
    assert host.node.state(one) == STATE["SPILLED"]


def test_reader_gets_the_reason_of_a_full_remote_store(
    make_node: Callable[..., NodeHarness],
) -> None:
    """That host has the object on its disk and no room to read it: the fetch goes on, and whoever
    asks meanwhile is answered in the words of that host, for a while."""
    host = make_node([member(3)])
    remote_objects = host.parts.remote_objects
    oid = host.node.new(KIND_OPERATION, STATE["CLAIMED"], NODE_SLOT, 0)
    hold = host.node.hold(oid, False)
    assert remote_objects.complete(oid, ids.pack_id(host.host_id, oid), MIB, (3,))
    assert remote_objects.want(oid, lambda: None)
    assert [type(one) for one in host.reports] == [FetchRequested]
    assert remote_objects.refusal(oid) == ""
    remote_objects.refuse(oid, "store of h3 is full")
    assert remote_objects.refusal(oid) == "store of h3 is full"
    assert oid in remote_objects
    host.loop.time += 2 * host.config.put_wait_s + 1
    assert remote_objects.refusal(oid) == ""
    remote_objects.arrived(oid)
    assert host.node.state(oid) == STATE["SEALED"]
    assert remote_objects.refusal(oid) == ""
    del hold
