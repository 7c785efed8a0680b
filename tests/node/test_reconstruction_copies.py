"""Lost results of which another host has a copy, or wants one: nothing is run that need not be."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hoplite_mp._common import ids
from hoplite_mp._node.lineage.reconstruction import ASK_S, ASKS_MAX, COPIES_TRIED_MAX
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


def test_runner_that_reads_its_result_keeps_a_copy(network: Network, sender: Side) -> None:
    """A process there has held it since before the task came, under a header of its own: the
    Release of the task's header is not the end of that copy, and a value that others have read must
    not be made a second time."""
    oid = sender.submit()
    object_id = ids.pack_id(sender.host_id, oid)
    holds = {side: side.hold(object_id) for side in network.living[1:]}
    runner = run_one(network, BIG)
    assert runner is not None
    network.settle()
    mine = holds.pop(runner)
    assert (runner.read(mine[0]) == BIG).all()
    holds.clear()
    sender.remote_objects.want(oid, lambda: None)
    network.settle()
    assert (sender.read(sender.submitted[oid][0]) == BIG).all()
    assert not runner.inbound_tasks.by_task
    assert sender.exports.copies_of(oid) == (runner.number,)
    mine.clear()
    network.settle()
    assert sender.exports.copies_of(oid) == ()
    assert_nothing_kept(network)


def test_late_report_of_a_copy_does_not_add_a_second_value(network: Network, sender: Side) -> None:
    """The task has been run again meanwhile, and gave another value: there is one all the same."""
    oid, runner = submit_and_run(network, BIG)
    reader = next(side for side in network.living[1:] if side is not runner)
    (hold,) = remote_hold(network, reader, ids.pack_id(sender.host_id, oid))
    there = reader.imports.by_object[ids.pack_id(sender.host_id, oid)].oid
    assert reader.remote_objects.want(there, lambda: None)
    reader.bring()
    network.lose(runner)
    sender.remote_objects.want(oid, lambda: None)
    network.pass_time()  # it is run again
    network.pump()  # the reader says that it has it
    assert run_one(network, BIG + 1) is not None
    network.settle()
    assert (reader.read(hold) == BIG).all()
    assert (sender.read(sender.submitted[oid][0]) == BIG).all()


def test_remote_request_recomputes_a_lost_result_once(network: Network, sender: Side) -> None:
    """It knows the result by a ref; its owner has it made again, once for all."""
    oid, runner = submit_and_run(network, BIG)
    readers = [side for side in network.living[1:] if side is not runner]
    object_id = ids.pack_id(sender.host_id, oid)
    holds = {side.number: remote_hold(network, side, object_id)[0] for side in readers}
    network.lose(runner)
    for side in readers:
        there = side.imports.by_object[object_id].oid
        assert is_absent(side, there)
        assert side.remote_objects.want(there, lambda: None)
    network.settle()
    assert run_one(network, BIG * 5) is not None
    network.settle()
    assert run_one(network, BIG * 6) is None
    for side in readers:
        assert (side.read(holds[side.number]) == BIG * 5).all()
    holds.clear()
    assert_nothing_kept(network)


def test_remote_copy_is_found_before_a_recomputation(network: Network, sender: Side) -> None:
    oid, runner = submit_and_run(network, BIG)
    object_id = ids.pack_id(sender.host_id, oid)
    other = next(side for side in network.living[1:] if side is not runner)
    (hold,) = remote_hold(network, other, object_id)
    assert (other.read(hold) == BIG).all()
    network.lose(runner)
    assert (sender.read(sender.submitted[oid][0]) == BIG).all()
    assert run_one(network, BIG) is None
    del hold
    assert_nothing_kept(network)


def test_owner_is_queried_again_after_a_membership_change(network: Network, sender: Side) -> None:
    """It may not have heard yet that the node which it names has died."""
    reconstruction, loop = sender.recovery.reconstruction, sender.loop
    object_id, mine = network.nodes[1].put(BIG)
    (hold,) = remote_hold(network, sender, object_id)
    oid, one = hold.oid, sender.imports.by_oid[hold.oid]
    asked: list[float] = []
    failed: list[int] = []
    reconstruction._ask = lambda oid, one: asked.append(loop.time)  # type: ignore[method-assign]
    reconstruction._fail = lambda oid, why: failed.append(oid)  # type: ignore[method-assign]
    for times in range(ASKS_MAX):
        now = loop.time
        reconstruction._ask_owner(oid, one)
        loop.pass_time(2 * ASK_S)
        assert asked[times:] == [now if times == 0 else now + ASK_S]
    assert len(asked) == ASKS_MAX
    assert not failed
    reconstruction._ask_owner(oid, one)
    assert failed == [oid]
    del mine


def test_remote_copy_is_found_after_other_copies_were_dropped(
    network: Network, sender: Side
) -> None:
    """The task may give another value, which those who had read the first one must never see."""
    oid, runner = submit_and_run(network, BIG)
    object_id = ids.pack_id(sender.host_id, oid)
    first, second = [side for side in network.living[1:] if side is not runner][:2]
    (hold,) = remote_hold(network, first, object_id)
    assert (first.read(hold) == BIG).all()
    network.lose(runner)
    for turn in range(3 * COPIES_TRIED_MAX):
        reader = (second, first)[turn % 2]
        (later,) = remote_hold(network, reader, object_id)
        assert (reader.read(later) == BIG).all()
        hold, later = later, None  # the other one lets go
        network.settle()
        assert run_one(network, BIG * 7) is None, f"it was run again in turn {turn}"
    assert (sender.read(sender.submitted[oid][0]) == BIG).all()
    del hold
    assert_nothing_kept(network)
