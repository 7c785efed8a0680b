"""Copies that are on their way when the host dies that counted the holders of their object."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.support.node_hosts import BIG, assert_nothing_kept, remote_hold
from tests.support.shm_host import STATE

if TYPE_CHECKING:
    from tests.support.node_hosts import Network, Side


def expect(side: Side, object_id: bytes, *holders: Side) -> None:
    """A broadcast's plan comes: the bytes are on their way from now on."""
    nbytes = holders[0].node.inspect(holders[0].imports.own(object_id))["size"]
    oid = side.replicas.expect(object_id, nbytes, tuple(holder.number for holder in holders))
    remote = side.remote_objects.by_oid[oid]
    payload = side.store.lease(nbytes, 0)
    assert payload is not None
    remote.payload, remote.filler = payload, side
    side.fetch(oid, remote)


@pytest.mark.parametrize("asked", [False, True])
@pytest.mark.parametrize("when", ["before the report", "in the round", "later"])
def test_broadcast_continues_from_a_replica(network: Network, when: str, asked: bool) -> None:
    owner, keeper, receiver, other = network.living
    object_id, mine = owner.put(BIG)
    keeper.keep(object_id, owner)
    network.pump()
    (hold,) = remote_hold(network, other, object_id)
    expect(receiver, object_id, owner, keeper)
    there = receiver.imports.by_object[object_id].oid
    network.held_back = []
    network.lose(owner, report=False)
    found = receiver.hold(object_id) if asked else []
    if when == "before the report":
        receiver.bring()
    network.report(owner)
    if when == "in the round":
        receiver.bring()
    held, network.held_back = network.held_back, None
    network.say(held)
    network.settle()
    assert receiver.node.state(there) == STATE["SEALED"]
    at = keeper.imports.own(object_id)
    assert asked or keeper.exports.exports[at].copies == {receiver.host_id}
    if asked:
        assert (receiver.read(found[0]) == BIG).all()
        found.clear()
    del hold, mine
    assert_nothing_kept(network)
    assert not network.planner.owners.named


def test_broadcast_without_a_complete_copy_fails(network: Network) -> None:
    owner, receiver, *_ = network.living
    object_id, mine = owner.put(BIG)
    expect(receiver, object_id, owner)
    network.lose(owner)
    found = receiver.hold(object_id)
    network.settle()
    assert "is lost" in receiver.read(found[0])
    found.clear()
    del mine
    assert_nothing_kept(network)


def test_request_for_an_object_without_a_complete_copy_fails(network: Network) -> None:
    owner, receiver, *_ = network.living
    object_id, mine = owner.put(BIG)
    expect(receiver, object_id, owner)
    network.lose(owner, report=False)
    found = receiver.hold(object_id)
    network.report(owner)
    assert found
    network.settle()
    assert "is lost" in receiver.read(found[0])
    found.clear()
    del mine
    assert_nothing_kept(network)


def test_fetch_that_completes_after_the_reports_serves_others(network: Network) -> None:
    """Nobody has it whole when all report; a moment later one has, and gives it to the other."""
    owner, first, second, _ = network.living
    object_id, mine = owner.put(BIG)
    value = bytes(owner.node.view(owner.imports.own(object_id)))  # type: ignore[arg-type]
    holds = [remote_hold(network, side, object_id)[0] for side in (first, second)]
    remote_objects = []
    for side in (first, second):
        oid = side.imports.by_object[object_id].oid
        assert side.remote_objects.want(oid, lambda: None)
        remote_objects.append(side.remote_objects.by_oid[oid])
    remote_objects[1].holders = owner.number, first.number
    network.held_back = []
    network.lose(owner)
    held, network.held_back = network.held_back, None
    first.node.memory(remote_objects[0].payload, remote_objects[0].nbytes)[:] = value
    first.remote_objects.arrived(first.imports.by_object[object_id].oid)
    first.fetching.clear()
    network.say(held)
    network.settle()
    for side, hold in zip((first, second), holds, strict=True):
        assert (side.read(hold) == BIG).all()
    holds.clear()
    remote_objects.clear()
    del hold, mine
    assert_nothing_kept(network)


def test_replica_placed_after_the_owners_death_is_freed_with_the_last_ref(
    network: Network,
) -> None:
    """Its node has never spoken with the owner that the object has now."""
    owner, keeper, reader, late = network.living
    object_id, mine = owner.put(BIG)
    keeper.keep(object_id, owner)
    network.pump()
    (hold,) = remote_hold(network, reader, object_id)
    network.lose(owner)
    network.settle()
    late.keep(object_id, keeper)
    network.settle()
    assert keeper.exports.exports[keeper.imports.own(object_id)].copies == {late.host_id}
    del hold, mine
    assert_nothing_kept(network)
    assert not network.planner.owners.named


def test_replica_reported_before_the_new_owner_is_informed_is_counted(
    network: Network,
) -> None:
    """The manager's word comes to the one that keeps a copy first: it stays, and is counted."""
    owner, keeper, second, reader = network.living
    object_id, mine = owner.put(BIG)
    keeper.keep(object_id, owner)
    second.keep(object_id, owner)
    network.pump()
    (hold,) = remote_hold(network, reader, object_id)
    network.held_back = []
    network.lose(owner)
    held, network.held_back = network.held_back, None
    network.say([one for one in held if one[0] != keeper.number])
    network.pump()
    network.say([one for one in held if one[0] == keeper.number])
    network.settle()
    assert network.planner.owners.named[object_id] == keeper.number
    assert [*second.replicas.holds] == [object_id]
    assert keeper.exports.copies_of(keeper.imports.own(object_id)) == (second.number,)
    del hold, mine
    assert_nothing_kept(network)
    assert not network.planner.owners.named
