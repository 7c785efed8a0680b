"""Deaths of owners that hosts, processes and the manager learn of in different order."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from hoplite_mp._common import ids
from hoplite_mp._node.objects import ownership_transfer
from hoplite_mp._planner import owners
from hoplite_mp._protocol.membership import ReportComplete
from hoplite_mp._protocol.messages import NodeLost
from hoplite_mp._protocol.peers import Acquire, Release
from tests.support.node_hosts import BIG, assert_nothing_kept, remote_hold

if TYPE_CHECKING:
    from tests.support.node_hosts import Network


# -- a process asks for what is kept here ----------------------------------------------------------


def test_local_replica_is_read_while_its_owner_cannot_answer(network: Network) -> None:
    """Its own node becomes the owner and is the one that waits for an answer."""
    owner, keeper, *_ = network.living
    object_id, mine = owner.put(BIG)
    keeper.keep(object_id, owner)
    network.pump()
    found = keeper.hold(object_id)
    assert not found
    network.lose(owner)
    network.settle()
    assert (keeper.read(found[0]) == BIG).all()
    found.clear()
    del mine
    assert_nothing_kept(network)
    assert not network.planner.owners.named


def test_local_replica_is_read_without_a_manager(network: Network) -> None:
    owner, keeper, second, _ = network.living
    object_id, mine = owner.put(BIG)
    keeper.keep(object_id, owner)
    second.keep(object_id, owner)
    network.pump()
    network.notice(owner)
    network.no_manager = True
    found = keeper.hold(object_id)
    others = second.hold(object_id)
    network.pump()
    network.restart_manager()
    network.report(owner)
    network.settle()
    assert (keeper.read(found[0]) == BIG).all()
    assert (second.read(others[0]) == BIG).all()
    found.clear()
    others.clear()
    del mine
    assert_nothing_kept(network)
    assert not network.planner.owners.named


# -- the manager knows less, or more ---------------------------------------------------------------


def test_request_before_the_manager_detects_the_death_is_answered(network: Network) -> None:
    owner, keeper, late, other = network.living
    object_id, mine = owner.put(BIG)
    keeper.keep(object_id, owner)
    network.pump()
    (hold,) = remote_hold(network, other, object_id)
    network.notice(owner)
    found = late.hold(object_id)
    network.pump()
    assert not found
    network.to_manager(NodeLost(owner.number, 0))
    network.report(owner)
    network.settle()
    assert (late.read(found[0]) == BIG).all()
    assert (other.read(hold) == BIG).all()
    found.clear()
    del hold, mine
    assert_nothing_kept(network)


def test_ref_of_an_unknown_host_is_resolved_when_the_host_is_known(network: Network) -> None:
    """The manager's word of it is on the way."""
    owner, _, late, _ = network.living
    object_id, mine = owner.put(BIG)
    network.held_back = []
    send, late.imports.send = late.imports.send, lambda to, message: False
    found = late.hold(object_id)
    late.imports.send = send
    held, network.held_back = network.held_back, None
    network.say(held)
    network.settle()
    assert (late.read(found[0]) == BIG).all()
    found.clear()
    del mine
    assert_nothing_kept(network)


def test_ref_received_after_all_reports_is_resolved(network: Network) -> None:
    """The manager has spoken already, and will not have named it here."""
    owner, keeper, late, _ = network.living
    object_id, mine = owner.put(BIG)
    known, further = owner.put(BIG)
    keeper.keep(object_id, owner)
    (hold,) = remote_hold(network, late, known)
    network.held_back = []
    network.lose(owner)
    found = late.hold(object_id)
    held, network.held_back = network.held_back, None
    network.say(held)
    network.settle()
    assert (late.read(found[0]) == BIG).all()
    found.clear()
    del hold, further, mine
    assert_nothing_kept(network)


# -- two headers of one object ---------------------------------------------------------------------


@pytest.mark.parametrize("done", [False, True])
def test_waiter_from_before_the_task_arrived_gets_its_result(network: Network, done: bool) -> None:
    """A process waits with a header of its own; the task then runs under another one."""
    owner, runner, other, _ = network.living
    task = ids.pack_id(owner.host_id, owner.submit())
    (waits,) = remote_hold(network, runner, task)
    (far,) = remote_hold(network, other, task)
    owner.outbound_tasks.set_runner(runner.host_id, runner.number, 1)
    network.pump()
    oid = runner.take_task()
    assert oid
    assert oid != waits.oid
    if done:
        runner.complete(oid, BIG)
        runner.poll()  # the word of it does not reach anybody
    network.lose(owner)
    network.settle()
    if not done:
        runner.complete(oid, BIG)
        network.settle()
    for side, hold in ((runner, waits), (other, far)):
        got = side.read(hold)
        assert (got == BIG).all() if done else "node h0 had it" in got
    del waits
    network.settle()
    late = runner.hold(task)
    network.settle()
    assert isinstance(runner.read(late[0]), np.ndarray) == done
    late.clear()
    assert isinstance(other.read(far), np.ndarray) == done
    del far, hold, got
    assert_nothing_kept(network)
    assert not network.planner.owners.named


def test_waiter_gets_a_result_held_by_another_host(network: Network) -> None:
    """Both headers follow: the one that is waited with, and that of the task's result."""
    owner, reader, runner, _ = network.living
    task = ids.pack_id(owner.host_id, owner.submit())
    (waits,) = remote_hold(network, runner, task)
    (far,) = remote_hold(network, reader, task)
    owner.outbound_tasks.set_runner(runner.host_id, runner.number, 1)
    network.pump()
    runner.complete(runner.take_task(), BIG)
    network.pump()
    assert (reader.read(far) == BIG).all()
    network.lose(owner)
    network.settle()
    assert network.planner.owners.named[task] == reader.number
    assert (runner.read(waits) == BIG).all()
    del waits
    network.settle()
    assert (reader.read(far) == BIG).all()
    del far
    assert_nothing_kept(network)
    assert not network.planner.owners.named


def test_owner_counts_both_headers_of_a_returned_task(network: Network) -> None:
    """The task goes back, and somebody asks before its header here has gone."""
    owner, runner, reader, _ = network.living
    task = ids.pack_id(owner.host_id, owner.submit())
    (waits,) = remote_hold(network, runner, task)
    (far,) = remote_hold(network, reader, task)
    owner.outbound_tasks.set_runner(runner.host_id, runner.number, 1)
    network.pump()
    runner.inbound_tasks.recall(owner.host_id, [task])
    found = runner.hold(task)
    owner.outbound_tasks.lose_runner(runner.host_id)
    owner.outbound_tasks.set_runner(reader.host_id, reader.number, 1)
    network.pump()
    assert found[0].oid != waits.oid
    assert len([one for one in runner.imports.all_of(task) if one.number]) == 2
    reader.complete(reader.take_task(), BIG)
    reader.poll()
    network.lose(owner)
    network.settle()
    for side, hold in ((runner, waits), (runner, found[0]), (reader, far)):
        assert (side.read(hold) == BIG).all()
    found.clear()
    del hold, far
    network.settle()
    late = reader.hold(task)
    network.settle()
    assert (reader.read(late[0]) == BIG).all()
    late.clear()
    del waits
    assert_nothing_kept(network)
    assert not network.planner.owners.named


# -- imports of an open round ----------------------------------------------------------------------


@pytest.mark.parametrize("copy", [False, True])
def test_ref_received_without_a_manager_is_resolved_by_the_next(
    network: Network, copy: bool
) -> None:
    owner, keeper, late, other = network.living
    object_id, mine = owner.put(BIG)
    if copy:
        keeper.keep(object_id, owner)
    network.pump()
    (hold,) = remote_hold(network, other, object_id)
    network.notice(owner)
    network.no_manager = True
    found = late.hold(object_id)
    network.pump()
    network.held_back = []
    network.restart_manager()
    held, network.held_back = network.held_back, None
    network.report(owner)  # it has let the nodes in again
    network.say(held)
    network.settle()
    for side, one in ((late, found[0]), (other, hold)):
        got = side.read(one)
        assert (got == BIG).all() if copy else "is lost" in got
    found.clear()
    del hold, mine, one, got
    assert_nothing_kept(network)
    assert not network.planner.owners.named


@pytest.mark.parametrize("asked", ["before", "meanwhile"])
def test_ref_received_after_the_ownership_transfer_is_resolved(
    network: Network, asked: str
) -> None:
    """Seed 1003697: the manager's word of the new owner reached that host alone, then the manager
    died. Another host met the object afterwards, and told only the next manager, which had nothing
    to tell the new owner. asked: whether that host met it before it reported to the next manager,
    or between that and its admission."""
    owner, keeper, late, _ = network.living
    object_id, mine = owner.put(BIG)
    known, further = owner.put(BIG)
    keeper.keep(object_id, owner)
    keeper.keep(known, owner)
    (hold,) = remote_hold(network, late, known)
    network.held_back = []
    network.lose(owner)
    held, network.held_back = network.held_back, []
    network.no_manager = True
    network.say([one for one in held if one[0] == keeper.number])
    network.pump()
    met: list[list[Any]] = []

    def meet() -> None:
        met.append(late.hold(object_id))

    if asked == "before":
        meet()
        network.restart_manager()
    else:
        network.restart_manager(meet)
    (found,) = met
    held, network.held_back = network.held_back, None
    network.say(held)
    network.settle()
    assert found, "nobody has answered"
    counted = keeper.exports.exports[keeper.imports.own(object_id)].importers
    assert len([one for one in counted if one[0] == late.host_id]) == 1
    assert (late.read(found[0]) == BIG).all()
    found.clear()
    assert (late.read(hold) == BIG).all()
    del hold, further, mine
    assert_nothing_kept(network)
    assert not network.planner.owners.named


def test_ref_released_before_its_new_owner_is_informed_is_not_counted(network: Network) -> None:
    """The new owner has been asked, has answered and has been told that it is over, when it hears
    from the manager whom it has to count."""
    owner, keeper, late, _ = network.living
    object_id, mine = owner.put(BIG)
    known, further = owner.put(BIG)
    keeper.keep(object_id, owner)
    keeper.keep(known, owner)
    (hold,) = remote_hold(network, late, known)
    network.notice(owner)
    network.held_back = []
    network.to_manager(NodeLost(owner.number, 0))
    found = late.hold(object_id)  # before it reports, so it will be counted
    network.report(owner)
    held, network.held_back = network.held_back, None
    network.say([one for one in held if one[0] == late.number])
    network.settle()
    assert (late.read(found[0]) == BIG).all()
    found.clear()
    late.replicas.let_go(object_id)
    network.settle()
    assert not late.imports.all_of(object_id)
    network.say([one for one in held if one[0] != late.number])
    network.settle()
    assert (late.read(hold) == BIG).all()
    del hold, further, mine
    assert_nothing_kept(network)
    assert not network.planner.owners.named


@pytest.mark.parametrize("heard", ["new owner", "reader"])
def test_next_manager_completes_the_naming_of_owners(
    network: Network, monkeypatch: pytest.MonkeyPatch, heard: str
) -> None:
    """A host has heard of the new owner of one object out of two, and is told of both by the next
    manager. heard: which host."""
    monkeypatch.setattr(owners, "NUMBERS_MAX", 1)
    owner, keeper, late, _ = network.living
    some = [owner.put(BIG + at) for at in range(2)]
    for object_id, _ in some:
        keeper.keep(object_id, owner)
    holds = [remote_hold(network, late, one)[0] for one, _ in some]
    network.held_back = []
    network.lose(owner)
    held, network.held_back = network.held_back, None
    hears = keeper if heard == "new owner" else late
    network.say([one for one in held if one[0] == hears.number][:1])
    network.pump()
    network.restart_manager()
    network.settle()
    counted = {one.object: one.importers for one in keeper.exports.exports.values()}
    assert all(len(counted[object_id]) == 1 for object_id, _ in some)
    for at, hold in enumerate(holds):
        assert (late.read(hold) == BIG + at).all()
    del hold
    holds.clear()
    some.clear()
    assert_nothing_kept(network)
    assert not network.planner.owners.named


@pytest.mark.parametrize("asked", [False, True])
def test_objects_beyond_the_report_limit_are_lost(
    network: Network, monkeypatch: pytest.MonkeyPatch, asked: bool
) -> None:
    """What is not in it is lost; nobody waits for it."""
    monkeypatch.setattr(ownership_transfer, "HOLDINGS_MAX", 1)
    owner, first, *_ = network.living
    tasks = [owner.pending() for _ in range(3)]
    waits = [remote_hold(network, first, task)[0] for task, _ in tasks]
    if asked:  # nobody hears it
        network.notice(owner)
        network.no_manager = True
        tasks.append(owner.pending())
        found = first.hold(tasks[-1][0])
        network.restart_manager()
        network.report(owner)
    else:
        network.lose(owner)
    network.settle()
    if asked:
        waits.append(found.pop())
    for hold in waits:
        assert "node h0 had it" in first.read(hold)
    waits.clear()
    tasks.clear()
    del hold
    assert_nothing_kept(network)


# -- the next owner dies, too ----------------------------------------------------------------------


def test_host_that_released_its_copy_between_reports_is_not_made_owner(
    network: Network,
) -> None:
    """Seed 1402383: it had reported the copy under the first owner, the second one died meanwhile,
    and nobody told the manager that the third one had nothing to take over."""
    owner, second, third, _ = network.living
    object_id, mine = owner.put(BIG)
    second.keep(object_id, owner)
    network.pump()
    holds = [remote_hold(network, third, object_id)[0]]
    network.lose(owner)
    network.settle()
    assert network.planner.owners.named[object_id] == second.number
    assert (third.read(holds[0]) == BIG).all()
    network.settle()

    def meanwhile() -> None:
        holds.clear()
        network.pump()
        network.to_manager(ReportComplete(second.number))
        network.notice(second)

    network.restart_manager(meanwhile, own=third.number)
    network.to_manager(NodeLost(second.number, 0))
    network.report(second)
    network.settle()
    assert object_id not in network.planner.owners.named
    del mine
    assert_nothing_kept(network)


def test_named_owner_that_is_already_lost_is_replaced(network: Network) -> None:
    owner, first, second, reader = network.living
    object_id, mine = owner.put(BIG)
    first.keep(object_id, owner)
    second.keep(object_id, owner)
    network.pump()
    (hold,) = remote_hold(network, reader, object_id)
    network.held_back = []
    network.lose(owner)
    held, network.held_back = network.held_back, None
    network.say([one for one in held if one[0] != reader.number])
    network.lose(first, report=False)
    network.say([one for one in held if one[0] == reader.number])
    network.report(first)
    network.settle()
    assert network.planner.owners.named[object_id] == second.number
    assert (reader.read(hold) == BIG).all()
    del hold, mine
    assert_nothing_kept(network)
    assert not network.planner.owners.named


@pytest.mark.parametrize("met", [False, True])
def test_named_owner_found_dead_on_sending_is_replaced(network: Network, met: bool) -> None:
    """The end of its connection is noticed in the middle of the manager's words."""
    owner, first, second, reader = network.living
    some = [owner.put(BIG + at) for at in range(3)]
    for object_id, _ in some:
        first.keep(object_id, owner)
        second.keep(object_id, owner)
        reader.keep(object_id, owner)
    network.pump()
    holds = [] if met else [remote_hold(network, reader, one)[0] for one, _ in some]
    network.held_back = []
    network.lose(owner)
    held, network.held_back = network.held_back, None
    network.say([one for one in held if one[0] != reader.number])
    if met:  # since the report
        found = [reader.hold(one) for one, _ in some]
    room = reader.recovery.owners
    send = room.send

    def breaks(to: int, message: Any) -> bool:
        if (
            to == first.host_id
            and to not in network.dead
            and isinstance(message, (Acquire, Release))
        ):
            network.notice(first)
        return send(to, message)

    room.send = breaks
    network.say([one for one in held if one[0] == reader.number])
    room.send = send
    if first.host_id not in network.dead:
        network.notice(first)
    network.to_manager(NodeLost(first.number, 0))
    network.report(first)
    network.settle()
    if met:
        holds = [one[0] for one in found]
        found.clear()
    for at, hold in enumerate(holds):
        assert (reader.read(hold) == BIG + at).all()
    del hold
    holds.clear()
    some.clear()
    assert_nothing_kept(network)
    assert not network.planner.owners.named
