"""A host that was given up, and that is a member again because it has the next manager."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.support.node_hosts import BIG, assert_nothing_kept, remote_hold

if TYPE_CHECKING:
    from tests.support.node_hosts import Network, Side


def give_up(network: Network, owner: Side) -> None:
    """The manager says that this host is gone, and dies before it has named new owners."""
    network.notice(owner)
    network.no_manager = True
    network.report(owner)


@pytest.mark.parametrize("met", ["before", "after"])
def test_ref_received_while_its_owner_was_given_up_is_valid_again(
    network: Network, met: str
) -> None:
    """Seed 1200041. met: before that host was given up, which had not answered, or after it."""
    owner, reader, _, other = network.living
    object_id, mine = owner.put(BIG)
    (known,) = remote_hold(network, other, object_id)
    found = reader.hold(object_id) if met == "before" else []
    network.lines.clear()
    give_up(network, owner)
    if met == "after":
        found = reader.hold(object_id)
    network.settle()
    assert not found
    network.back(owner)
    network.settle()
    assert found, "nobody has answered"
    for side, hold in ((reader, found[0]), (other, known)):
        assert (side.read(hold) == BIG).all()
    importers = owner.exports.exports[owner.imports.own(object_id)].importers
    assert {peer for peer, _ in importers} == {reader.host_id, other.host_id}
    found.clear()
    del hold, known, mine
    assert_nothing_kept(network)


def test_value_requested_while_its_owner_was_given_up_is_resolved(network: Network) -> None:
    """The only host that had it has died, and nobody is left but its owner who can name another."""
    owner, reader, runner, _ = network.living
    oid = owner.submit()
    (hold,) = remote_hold(network, reader, owner.imports.public(oid))
    owner.outbound_tasks.set_runner(runner.host_id, runner.number, 1)
    network.pump()
    runner.complete(runner.take_task(), BIG)
    network.pump()
    network.lose(runner)
    network.settle()
    give_up(network, owner)
    heard: list[int] = []
    assert reader.remote_objects.want(hold.oid, lambda: heard.append(1))
    network.settle()
    assert not heard
    network.back(owner)
    network.settle()
    again = owner.take_task()
    assert again, "its owner has not heard that somebody waits"
    owner.complete(again, BIG)
    network.settle()
    assert heard
    assert (reader.read(hold) == BIG).all()


def test_replica_kept_while_its_owner_was_given_up_is_freed_with_the_last_ref(
    network: Network,
) -> None:
    """Its owner knows of it again, so it is let go with the last ref."""
    owner, keeper, *_ = network.living
    object_id, mine = owner.put(BIG)
    keeper.keep(object_id, owner)
    network.pump()
    give_up(network, owner)
    network.back(owner)
    network.settle()
    assert owner.exports.copies_of(owner.imports.own(object_id)) == (keeper.number,)
    del mine
    assert_nothing_kept(network)
    assert object_id not in keeper.imports.by_object
