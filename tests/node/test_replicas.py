"""Copies that a node keeps for others, and that nobody will ever tell it to let go of."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from hoplite_mp._common.object_states import STATE
from hoplite_mp._protocol.messages import NodeLost
from hoplite_mp.errors import ObjectLostError
from tests.support.node_hosts import BIG, assert_nothing_kept, remote_hold

if TYPE_CHECKING:
    from tests.support.node_hosts import Network


def test_replica_placed_on_the_new_owner_is_not_counted_twice(network: Network) -> None:
    """A collective ends on a host after it has noticed the death, and before it is named: what it
    has kept for the old owner is not kept any more when it counts itself."""
    owner, keeper, reader, _ = network.living
    object_id, mine = owner.put(BIG)
    keeper.keep(object_id, owner)
    network.pump()
    (hold,) = remote_hold(network, reader, object_id)
    network.notice(owner)
    keeper.keep(object_id, owner)
    network.to_manager(NodeLost(owner.number, 0))
    network.report(owner)
    network.settle()
    assert network.planner.owners.named[object_id] == keeper.number
    assert not keeper.replicas.holds
    assert (reader.read(hold) == BIG).all()
    del hold, mine
    assert_nothing_kept(network)
    assert not network.planner.owners.named


@pytest.mark.parametrize("end", ["nothing comes", "an error", "its task is cancelled"])
def test_expected_copy_that_does_not_arrive_is_dropped(network: Network, end: str) -> None:
    """A collective has expected it here and is over: nobody else wants it, and its owner does not
    know that it was expected."""
    owner, other, *_ = network.living
    object_id, mine = owner.put(BIG)
    if end == "its task is cancelled":  # it ran here, and has been withdrawn
        inbound_task = other.imports.keep(object_id)
        other.results.tasks.cancel(inbound_task.oid, True)
        other.results.tasks.settle(inbound_task.oid)
        assert other.results.client.state(inbound_task.oid) == STATE["CANCELLED"]
        other.replicas.keep(object_id, BIG.nbytes)
        del inbound_task
    else:
        oid = other.replicas.expect(object_id, BIG.nbytes, (owner.number,))
        if end == "an error":
            other.remote_objects.fail(oid, ObjectLostError("it does not come"))
    assert other.replicas.holds
    network.settle()
    assert not other.replicas.holds
    assert not other.imports.by_object
    del mine
    assert_nothing_kept(network)
