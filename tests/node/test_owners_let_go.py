"""What a host has let go of between its report to a manager and the word of the new owner."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from hoplite_mp._protocol.messages import NodeLost
from tests.support.node_hosts import BIG, assert_nothing_kept, remote_hold

if TYPE_CHECKING:
    from tests.support.node_hosts import Network


@pytest.mark.parametrize("again", [False, True])
def test_ref_released_after_its_managers_death_is_not_counted(
    network: Network, again: bool
) -> None:
    """Seed 2015581: the first manager had told the new owner whom to count, and died before it told
    the others who that owner is. One of these, which had met the object after the first owner's
    death, released it, told nobody, and reported no import to the next manager, so the new owner
    held the object for ever. again: it has met the object again meanwhile."""
    owner, keeper, late, _ = network.living
    object_id, mine = owner.put(BIG)
    known, further = owner.put(BIG)
    keeper.keep(object_id, owner)
    keeper.keep(known, owner)
    network.pump()
    (hold,) = remote_hold(network, late, known)
    network.notice(owner)
    network.held_back = []
    network.to_manager(NodeLost(owner.number, 0))
    found = late.hold(object_id)  # before it reports, so it will be counted
    network.report(owner)
    held, network.held_back = network.held_back, None
    network.no_manager = True
    network.say([one for one in held if one[0] == keeper.number])
    network.settle()  # the new owner describes the object to those that it counts
    assert len(keeper.exports.exports[keeper.imports.own(object_id)].importers) == 1
    assert found
    found.clear()
    network.settle()
    if again:
        found = late.hold(object_id)
    network.restart_manager()
    network.settle()
    export = keeper.exports.exports.get(keeper.imports.own(object_id))
    if again:
        assert (late.read(found[0]) == BIG).all()
        assert export is not None
        assert len(export.importers) == 1
        found.clear()
    network.settle()
    del export, further, mine, hold
    assert_nothing_kept(network)
    assert not network.planner.owners.named


def test_replica_reported_after_a_release_is_counted(network: Network) -> None:
    """The owner forgets a host's replica with a release, so it has to hear of the replica after
    that; or else it never tells the host to let go of it."""
    owner, keeper, late, _ = network.living
    object_id, mine = owner.put(BIG)
    known, further = owner.put(BIG)
    keeper.keep(object_id, owner)
    keeper.keep(known, owner)
    network.pump()
    (hold,) = remote_hold(network, late, known)
    network.notice(owner)
    network.held_back = []
    network.to_manager(NodeLost(owner.number, 0))
    found = late.hold(object_id)  # met after the death, so nothing keeps its header
    network.report(owner)
    held, network.held_back = network.held_back, None
    network.say([one for one in held if one[0] == keeper.number])
    network.pump()
    found.clear()
    network.settle()
    late.keep(object_id, keeper)  # by a collective
    network.pump()
    network.say([one for one in held if one[0] != keeper.number])
    network.pump()
    del hold, further, mine
    assert_nothing_kept(network)
