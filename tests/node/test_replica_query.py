"""Before a second run's value is told to anybody, all hosts say what they have of the first."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hoplite_mp._common import ids
from tests.support.node_hosts import (
    BIG,
    assert_nothing_kept,
    is_absent,
    network,
    remote_hold,
    run_one,
    sender,
    submit_and_run,
)

if TYPE_CHECKING:
    from tests.support.node_hosts import Network, Side

__all__ = ["network", "sender"]  # fixtures


def run_again(
    network: Network,
    sender: Side,
    oid: int,
    runner: Side,
    silent: Side,
    other: Side,
) -> None:
    """The runner dies, and another host has another value; one of them says nothing meanwhile."""
    network.stopped.add((silent.host_id, sender.host_id))
    sender.outbound_tasks.lose_runner(silent.host_id)
    network.lose(runner)
    sender.remote_objects.want(oid, lambda: None)
    network.settle(2)
    assert run_one(network, BIG + 1) is other
    network.settle()
    assert is_absent(sender, oid)


def test_copy_reported_after_the_second_run_is_used(network: Network, sender: Side) -> None:
    """What that run gave is told to nobody before all hosts have said what they have."""
    oid, runner = submit_and_run(network, BIG)
    object_id = ids.pack_id(sender.host_id, oid)
    reader, other = (side for side in network.living[1:] if side is not runner)
    (hold,) = remote_hold(network, reader, object_id)
    assert reader.remote_objects.want(reader.imports.by_object[object_id].oid, lambda: None)
    reader.bring()
    run_again(network, sender, oid, runner, reader, other)
    network.stopped.clear()
    network.settle()
    assert (reader.read(hold) == BIG).all()
    assert (sender.read(sender.submitted[oid][0]) == BIG).all()
    del hold
    assert_nothing_kept(network)


def test_host_that_dies_before_its_report_is_not_awaited(network: Network, sender: Side) -> None:
    oid, runner = submit_and_run(network, BIG)
    silent, other = (side for side in network.living[1:] if side is not runner)
    run_again(network, sender, oid, runner, silent, other)
    network.lose(silent)
    network.settle()
    assert (sender.read(sender.submitted[oid][0]) == BIG + 1).all()


def test_partial_copies_of_a_recomputed_object_are_dropped(network: Network, sender: Side) -> None:
    """They would go on with the bytes of the second value."""
    oid, runner = submit_and_run(network, BIG)
    object_id = ids.pack_id(sender.host_id, oid)
    reader = next(side for side in network.living[1:] if side is not runner)
    (hold,) = remote_hold(network, reader, object_id)
    there = reader.imports.by_object[object_id].oid
    assert reader.remote_objects.want(there, lambda: None)
    remote = reader.remote_objects.by_oid[there]
    network.lose(runner)
    assert remote.payload  # who plans the fetch has said nothing yet
    sender.remote_objects.want(oid, lambda: None)
    network.pump()
    network.pass_time()
    network.pump()
    assert not remote.payload
    assert run_one(network, BIG + 1) is not None
    network.settle()
    assert (reader.read(hold) == BIG + 1).all()
    del hold
    assert_nothing_kept(network)


def test_copy_on_a_host_lost_only_to_the_owner_is_used(network: Network, sender: Side) -> None:
    """It lives perhaps, and others may read from it: the manager decides before there is another
    value."""
    oid, runner = submit_and_run(network, BIG)
    object_id = ids.pack_id(sender.host_id, oid)
    reader, other = (side for side in network.living[1:] if side is not runner)
    (hold,) = remote_hold(network, reader, object_id)
    network.stopped |= {(runner.host_id, sender.host_id), (sender.host_id, runner.host_id)}
    sender.cluster.lost(network.members[runner.number])
    sender.outbound_tasks.lose_runner(reader.host_id)
    sender.remote_objects.want(oid, lambda: None)
    network.settle(2)
    assert run_one(network, BIG + 1) is other
    network.settle()
    assert is_absent(sender, oid)
    assert is_absent(reader, reader.imports.by_object[object_id].oid)
    network.lose(runner)
    network.settle()
    assert (sender.read(sender.submitted[oid][0]) == BIG + 1).all()
    assert (reader.read(hold) == BIG + 1).all()
