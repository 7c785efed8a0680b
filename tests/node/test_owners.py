"""Objects whose owner dies while others hold them: who has a copy counts from then on."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from hoplite_mp._protocol.messages import OwnersReassigned
from tests.support.node_hosts import BIG, assert_nothing_kept, remote_hold

if TYPE_CHECKING:
    from tests.support.node_hosts import Network


def test_replica_is_readable_after_its_owner_dies_until_the_last_ref(
    network: Network,
) -> None:
    owner, keeper, reader, other = network.living
    object_id, mine = owner.put(BIG)
    keeper.keep(object_id, owner)
    network.pump()
    (hold,) = remote_hold(network, reader, object_id)
    (further,) = remote_hold(network, other, object_id)
    network.lose(owner)
    network.settle()
    assert network.planner.owners.named[object_id] == keeper.number
    assert (reader.read(hold) == BIG).all()
    del hold
    network.settle()
    assert (other.read(further) == BIG).all()
    assert len(keeper.store.leases) == 1
    del further, mine
    assert_nothing_kept(network)
    assert not network.planner.owners.named


def test_replica_without_refs_is_freed_when_its_owner_dies(network: Network) -> None:
    owner, keeper, second, _ = network.living
    object_id, mine = owner.put(BIG)
    keeper.keep(object_id, owner)
    second.keep(object_id, owner)
    network.pump()
    network.lose(owner)
    del mine
    assert_nothing_kept(network)
    assert not network.planner.owners.named


def test_host_with_a_fetched_copy_becomes_the_owner(network: Network) -> None:
    """The lowest one that has it whole counts, and its own process's hold counts, too."""
    owner, first, second, third = network.living
    object_id, mine = owner.put(BIG)
    holds = [remote_hold(network, side, object_id)[0] for side in (first, second, third)]
    assert (second.read(holds[1]) == BIG).all()
    assert (third.read(holds[2]) == BIG).all()
    network.lose(owner)
    network.settle()
    assert network.planner.owners.named[object_id] == second.number
    holds[1] = None  # the new owner's own process lets go: the others still count
    network.settle()
    assert (first.read(holds[0]) == BIG).all()
    network.lose(second)  # and its owner dies in its turn
    network.settle()
    assert network.planner.owners.named[object_id] in (first.number, third.number)
    assert (third.read(holds[2]) == BIG).all()
    holds.clear()
    del mine
    assert_nothing_kept(network)


def test_object_without_copies_is_lost_with_its_owner(network: Network) -> None:
    owner, first, second, _ = network.living
    object_id, mine = owner.put(BIG)
    pending, running = owner.pending()
    holds = [remote_hold(network, side, object_id)[0] for side in (first, second)]
    (waits,) = remote_hold(network, first, pending)
    network.lose(owner)
    network.settle()
    for side, hold in zip((first, second), holds, strict=True):
        assert "node h0 had it" in side.read(hold)
    assert "node h0 had it" in str(first.value(waits))
    holds.clear()
    del hold, waits, mine, running
    assert_nothing_kept(network)


def test_fetch_in_progress_continues_from_a_replica(network: Network) -> None:
    """It is being fetched from the owner; a copy elsewhere is what it gets in the end."""
    owner, keeper, reader, _ = network.living
    object_id, mine = owner.put(BIG)
    (hold,) = remote_hold(network, reader, object_id)  # before there was a copy
    keeper.keep(object_id, owner)
    network.pump()
    heard: list[int] = []
    oid = reader.imports.by_object[object_id].oid
    assert reader.remote_objects.want(oid, lambda: heard.append(1))
    network.lose(owner, report=False)
    network.settle()
    assert heard == []  # nobody knows yet
    for side in network.living:
        side.recovery.report(owner.number)
    network.settle()
    assert heard == [1]
    assert (reader.value(hold) == BIG).all()
    del hold, mine
    assert_nothing_kept(network)


@pytest.mark.parametrize("early", [True, False])
def test_ref_released_between_report_and_reply_is_not_counted(
    network: Network, early: bool
) -> None:
    """What was counted has gone; the word of it comes before the manager's, or after."""
    owner, keeper, reader, *_ = network.living
    object_id, mine = owner.put(BIG)
    keeper.keep(object_id, owner)
    network.pump()
    (hold,) = remote_hold(network, reader, object_id)
    network.held_back = []
    network.lose(owner)
    del hold
    network.pump()
    held = sorted(network.held_back, key=lambda one: (one[0] == keeper.number) == early)
    network.held_back = None
    for number, answer in held:
        assert isinstance(answer, OwnersReassigned)
        network.nodes[number].from_manager(answer)
        network.pump()
    del mine
    assert_nothing_kept(network)


def test_ref_received_after_its_owners_death_is_resolved(network: Network) -> None:
    owner, keeper, late, other = network.living
    object_id, mine = owner.put(BIG)
    unknown, gone = owner.put(BIG)
    (hold,) = remote_hold(network, keeper, object_id)
    assert (keeper.read(hold) == BIG).all()
    network.lose(owner, report=False)
    found = late.hold(object_id)  # while it is being found out
    network.pump()
    for side in network.living:
        side.recovery.report(owner.number)
    network.settle()
    assert (late.read(found[0]) == BIG).all()
    further = other.hold(object_id)  # when that is known
    lost = other.hold(unknown)
    network.settle()
    del hold
    network.settle()
    assert (other.read(further[0]) == BIG).all()
    assert "is lost" in other.read(lost[0])
    found.clear()
    further.clear()
    lost.clear()
    del mine, gone
    assert_nothing_kept(network)


def test_host_that_dies_before_all_reports_is_not_made_owner(network: Network) -> None:
    owner, first, second, reader = network.living
    object_id, mine = owner.put(BIG)
    (hold,) = remote_hold(network, reader, object_id)
    first.keep(object_id, owner)
    second.keep(object_id, owner)
    network.pump()
    network.lose(owner, report=False)
    first.recovery.report(owner.number)
    network.lose(first)
    for side in network.living:
        side.recovery.report(owner.number)
    network.settle()
    assert (reader.read(hold) == BIG).all()
    assert network.planner.owners.named[object_id] == second.number
    del hold, mine
    assert_nothing_kept(network)


@pytest.mark.parametrize("told", [0, 1, 2])
def test_new_owner_is_named_after_the_managers_death(network: Network, told: int) -> None:
    """Before it has named an owner, or when it has told some of those who must know."""
    owner, keeper, reader, other = network.living
    object_id, mine = owner.put(BIG)
    keeper.keep(object_id, owner)
    network.pump()
    (hold,) = remote_hold(network, reader, object_id)
    (further,) = remote_hold(network, other, object_id)
    network.held_back = []
    network.lose(owner)
    said, network.held_back = network.held_back[3 - told :], None
    for number, answer in said:
        network.nodes[number].from_manager(answer)
    network.restart_manager()
    network.settle()
    assert network.planner.owners.named[object_id] == keeper.number
    assert (reader.read(hold) == BIG).all()
    del hold
    network.settle()
    assert (other.read(further) == BIG).all()
    assert len(keeper.store.leases) == 1
    del further, mine
    assert_nothing_kept(network)
    assert not network.planner.owners.named


def test_next_manager_knows_the_named_owners(network: Network) -> None:
    owner, keeper, reader, late = network.living
    object_id, mine = owner.put(BIG)
    keeper.keep(object_id, owner)
    network.pump()
    (hold,) = remote_hold(network, reader, object_id)
    network.lose(owner)
    network.settle()
    network.restart_manager()
    assert network.planner.owners.named[object_id] == keeper.number
    found = late.hold(object_id)
    network.settle()
    assert (late.read(found[0]) == BIG).all()
    found.clear()
    del hold, mine
    assert_nothing_kept(network)
    assert not network.planner.owners.named
