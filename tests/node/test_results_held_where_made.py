"""Results of tasks of another host, held by processes of the host on which the tasks have run.

The runner has the result's header already, so a process there could hold it without asking the
owner. But the owner has to count that host: its own processes may let go of the result, and be
given the ref back by a process of the runner.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from hoplite_mp._common import ids
from hoplite_mp._common.ref import ObjectRef
from hoplite_mp._node.objects.exports import KEPT_POLL_S
from hoplite_mp._protocol.peers import Acquire, Release
from tests.support.node_hosts import BIG, Network, Side, remote_hold, states_of
from tests.support.shm_host import STATE

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def network() -> Iterator[Network]:
    """Host 0 sends, host 1 has a worker, host 2 none."""
    made = Network(3)
    runner = made.nodes[1]
    made.nodes[0].outbound_tasks.set_runner(runner.host_id, runner.number, 1)
    yield made
    made.close()


@pytest.fixture
def sides(network: Network) -> list[Side]:
    return network.living


def forget(network: Network, side: Side, oid: int) -> None:
    """The process that has sent the task lets go of its result."""
    del side.submitted[oid]
    side.party.collect()
    network.settle()


def pass_looks(network: Network) -> None:
    """Time for what is polled."""
    for side in network.living:
        side.loop.pass_time(2 * KEPT_POLL_S)
    network.settle()


def nothing_is_left(network: Network) -> None:
    network.settle()
    pass_looks(network)
    for side in network.living:
        side.party.collect()
        network.settle()
        assert states_of(side.node) == []
        assert not side.imports.by_oid
        assert not side.exports.exports
        assert not side.inbound_tasks.by_task


@pytest.mark.parametrize("value", ["small", BIG], ids=["small", "big"])
@pytest.mark.parametrize("early", [True, False])
def test_result_held_only_on_its_runner_is_readable(
    network: Network, sides: list[Side], early: bool, value: Any
) -> None:
    """early: the process has the ref before the task has ended."""
    sender, runner, other = sides
    oid = sender.submit()
    object_id = ids.pack_id(sender.host_id, oid)
    network.pump()
    task = runner.take_task()
    holds = remote_hold(network, runner, object_id) if early else []
    runner.complete(task, value)
    network.settle()
    holds = holds or remote_hold(network, runner, object_id)
    forget(network, sender, oid)
    for side in (sender, other):
        back = remote_hold(network, side, object_id)
        assert back != [None]
        remote = back[0].oid in side.remote_objects  # type: ignore[attr-defined]
        assert not remote or side.remote_objects.want(back[0].oid, lambda: None)  # type: ignore[attr-defined]
        network.settle()
        assert np.array_equal(side.value(back[0]), value)
        back.clear()
        side.party.collect()
        network.settle()
    holds.clear()
    nothing_is_left(network)


def test_result_released_on_its_runner_is_freed(network: Network, sides: list[Side]) -> None:
    """The runner keeps a big result for the owner, and the owner keeps it for the runner."""
    sender, runner, _ = sides
    oid = sender.submit()
    network.pump()
    runner.complete(runner.take_task(), BIG)
    network.settle()
    (hold,) = remote_hold(network, runner, ids.pack_id(sender.host_id, oid))
    forget(network, sender, oid)
    assert runner.inbound_tasks.by_task
    del hold
    nothing_is_left(network)


def test_result_is_readable_by_a_second_process_after_a_release(
    network: Network, sides: list[Side]
) -> None:
    sender, runner, _ = sides
    oid = sender.submit()
    object_id = ids.pack_id(sender.host_id, oid)
    network.pump()
    runner.complete(runner.take_task(), BIG)
    network.settle()
    for _ in range(2):
        holds = remote_hold(network, runner, object_id)
        assert len(sender.exports.exports[oid].importers) == 1
        holds.clear()
        runner.party.collect()
        pass_looks(network)
        assert oid not in sender.exports.exports
    forget(network, sender, oid)
    nothing_is_left(network)


def test_later_task_uses_a_result_without_a_message(network: Network, sides: list[Side]) -> None:
    """The runner has a big result, and the owner keeps it as long as the task runs."""
    sender, runner, _ = sides
    first = sender.submit()
    network.pump()
    runner.complete(runner.take_task(), BIG)
    network.settle()
    ref: ObjectRef[Any] = ObjectRef(ids.pack_id(sender.host_id, first), sender.party.hold(first))
    sent: list[Any] = []
    send = runner.imports.send

    def note_all(host_id: int, message: Any) -> bool:
        sent.append(message)
        return send(host_id, message)

    runner.imports.send = note_all
    second = sender.submit((ref,), holds=[ref])
    network.pump()
    runner.complete(runner.take_task(), "too")
    network.settle()
    assert not [one for one in sent if isinstance(one, Acquire) and one.object == ref._id]
    del ref
    for oid in (first, second):
        forget(network, sender, oid)
    nothing_is_left(network)


def test_task_deleted_while_it_runs_leaves_nothing(network: Network, sides: list[Side]) -> None:
    """The owner says at once that the result is gone. The runner's header is its worker's until the
    worker has finished."""
    sender, runner, _ = sides
    oid = sender.submit()
    network.pump()
    task = runner.take_task()
    holds = remote_hold(network, runner, ids.pack_id(sender.host_id, oid))
    sender.party.delete(oid)
    network.pump()
    assert runner.node.state(task) == STATE["CLAIMED"]
    runner.complete(task, "late")
    network.settle()
    assert runner.value(holds[0]) == "late"
    holds.clear()
    forget(network, sender, oid)
    nothing_is_left(network)


def test_recalled_task_with_a_waiting_process_is_counted_once(
    network: Network, sides: list[Side]
) -> None:
    """The owner counts one import, and lets go of it."""
    sender, runner, _ = sides
    oids = [sender.submit() for _ in range(3)]
    network.pump()
    task = runner.take_task()
    holds = [remote_hold(network, runner, ids.pack_id(sender.host_id, oid))[0] for oid in oids]
    known = sender.outbound_tasks.runners[runner.host_id]
    known.workers = 0
    sender.outbound_tasks.recall(known, 1 << 10)
    network.pump()
    while again := sender.take_task():
        sender.complete(again, "home")
    runner.complete(task, "away")
    network.settle()
    assert sorted(map(runner.value, holds)) == ["away", "home", "home"]
    assert all(len(one.importers) == 1 for one in sender.exports.exports.values())
    released: list[Release] = []
    send = runner.imports.send

    def note(host_id: int, message: Any) -> bool:
        if isinstance(message, Release):
            released.append(message)
        return send(host_id, message)

    runner.imports.send = note
    holds.clear()
    runner.party.collect()
    network.settle()
    assert len(released) == 3
    for oid in oids:
        forget(network, sender, oid)
    nothing_is_left(network)


@pytest.mark.parametrize("heard", [True, False])
def test_deleted_task_can_be_recalled(network: Network, sides: list[Side], heard: bool) -> None:
    """Its readers end. heard: the runner knows that it is gone before the task goes back."""
    sender, runner, _ = sides
    oids = [sender.submit() for _ in range(3)]
    network.pump()
    task = runner.take_task()
    holds: list[Any] = [
        remote_hold(network, runner, ids.pack_id(sender.host_id, oid))[0] for oid in oids
    ]
    sender.party.delete(oids[2])
    if heard:
        network.pump()
    known = sender.outbound_tasks.runners[runner.host_id]
    known.workers = 0
    sender.outbound_tasks.recall(known, 1 << 10)
    network.pump()
    while again := sender.take_task():
        sender.complete(again, "home")
    runner.complete(task, "away")
    network.settle()
    assert runner.node.state(holds[2].oid) != STATE["CLAIMED"]


def test_released_replica_does_not_hide_the_result(network: Network, sides: list[Side]) -> None:
    sender, runner, _ = sides
    oid = sender.submit()
    object_id = ids.pack_id(sender.host_id, oid)
    network.pump()
    runner.complete(runner.take_task(), BIG)
    network.settle()
    runner.replicas.keep(object_id, BIG.nbytes)
    network.settle()
    runner.replicas.let_go(object_id)
    holds = remote_hold(network, runner, object_id)
    holds.clear()
    runner.party.collect()
    pass_looks(network)
    forget(network, sender, oid)
    nothing_is_left(network)
