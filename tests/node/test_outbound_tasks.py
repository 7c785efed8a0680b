"""Tasks of one host on the workers of another: results, failures, cancels, recalls, deaths."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from hoplite_mp import _serialize
from hoplite_mp._common import ids
from hoplite_mp._common.ref import ObjectRef
from hoplite_mp._protocol.peers import TaskEnded
from hoplite_mp.errors import NodeLostError, StoreFullError, WorkerLostError
from tests.support.node_hosts import BIG, COMMON, Network, Side, assert_nothing_kept, remote_hold

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def network() -> Iterator[Network]:
    """Host 0 sends; hosts 1 and 2 have two workers each."""
    made = Network(3)
    for side in made.nodes[1:]:
        made.nodes[0].outbound_tasks.set_runner(side.host_id, side.number, 2)
    yield made
    made.close()


def value(side: Side, oid: int) -> Any:
    return side.value(side.submitted[oid][0])


def runner_of(network: Network, oid: int) -> Side:
    return network.by_host_id[network.nodes[0].outbound_tasks.where[oid].host_id]


def done(network: Network) -> None:
    network.nodes[0].submitted.clear()
    assert_nothing_kept(network)
    for side in network.nodes:
        if side.host_id in network.dead:
            continue
        assert not side.inbound_tasks.by_task
        assert not side.outbound_tasks.where
        assert not any(runner.running for runner in side.outbound_tasks.runners.values())


def test_remote_task_returns_its_result(network: Network) -> None:
    sender = network.nodes[0]
    oid = sender.submit((1, 2))
    network.pump()
    runner = runner_of(network, oid)
    task = runner.take_task()
    function, _, args, *_ = runner.tasks.task(task)
    assert runner.value(runner.party.hold(function)) == "the function"
    positional, _ = _serialize.decode_call(memoryview(args), lambda i: ObjectRef(i), lambda r: r)
    assert positional == (1, 2)
    runner.complete(task, "three")
    network.pump()
    assert value(sender, oid) == "three"
    assert sender.tasks.done(oid)
    done(network)


def test_least_recently_used_of_equal_hosts_runs_the_task(network: Network) -> None:
    """The result of the last task is perhaps on its way from the other one."""
    sender = network.nodes[0]
    runners = []
    for _ in range(4):
        oid = sender.submit(())
        network.pump()
        runner = runner_of(network, oid)
        runner.complete(runner.take_task(), "done")
        network.pump()
        assert sender.tasks.done(oid)
        runners.append(runner.number)
    assert runners[:2] == runners[2:]
    assert len(set(runners)) == 2
    done(network)


def test_output_of_a_nested_task_goes_to_the_original_driver(network: Network) -> None:
    """The output owner travels along, is 0 on its own host, and lines go before the task's end."""
    first, second, third = network.nodes
    second.outbound_tasks.set_runner(third.host_id, third.number, 2)
    second.outbound_tasks.set_runner(first.host_id, first.number, 2)
    events: list[Any] = []
    third.node_events.task_ends = lambda slot: events.append(
        (
            slot,
            [
                line
                for line, waiting in network.lines.items()
                if line[0] == third.host_id and waiting
            ],
        )
    )
    second.node_events.sends_on = lambda output_owner, host_id: events.append(
        (output_owner, host_id)
    )
    outer = first.submit()
    network.pump()
    runner = runner_of(network, outer)
    assert runner is second
    task = runner.take_task()
    assert runner.tasks.output_owner(task) == first.host_id
    inner = [second.submit(output_owner=first.host_id) for _ in range(2)]
    network.pump()
    assert sorted(events) == sorted((first.host_id, side.host_id) for side in (first, third))
    events.clear()
    assert first.tasks.output_owner(first.take_task()) == 0
    task_of_third = third.take_task()
    assert third.tasks.output_owner(task_of_third) == first.host_id
    third.complete(task_of_third, "ended")
    third.poll()
    assert events == [(third.party.slot, [])]
    network.pump()
    assert "ended" in [value(second, oid) for oid in inner if second.tasks.done(oid)]


def test_remote_task_returns_its_error(network: Network) -> None:
    sender = network.nodes[0]
    oid = sender.submit()
    network.pump()
    runner = runner_of(network, oid)
    runner.complete(runner.take_task(), KeyError("k"))
    network.pump()
    assert isinstance(value(sender, oid), KeyError)
    done(network)


@pytest.mark.parametrize("chars", [50_000, 300_000])
def test_remote_error_of_any_size_keeps_its_type(network: Network, chars: int) -> None:
    sender = network.nodes[0]
    oid = sender.submit()
    network.pump()
    runner = runner_of(network, oid)
    runner.complete(runner.take_task(), KeyError("begins" + "k" * chars + "ends", 3))
    network.pump()
    found = value(sender, oid)
    assert isinstance(found, KeyError)
    text, number = found.args
    assert (text[:6], text[-4:], number) == ("begins", "ends", 3)
    done(network)


@pytest.mark.parametrize("failed", [False, True])
def test_remote_result_without_space_is_an_error(network: Network, failed: bool) -> None:
    """Whoever waits for it learns so, instead of the value or of the error."""
    sender = network.nodes[0]
    oid = sender.submit()
    network.pump()
    runner = runner_of(network, oid)
    runner.complete(runner.take_task(), KeyError("k" * 3000) if failed else "v" * 3000)
    sender.results.lease = lambda nbytes, failed=False: None  # type: ignore[method-assign]
    network.pump()
    found = value(sender, oid)
    assert isinstance(found, StoreFullError)
    assert "no space for the result of a task" in str(found)
    done(network)


def test_large_remote_result_is_fetched_on_demand(network: Network) -> None:
    sender = network.nodes[0]
    oid = sender.submit()
    network.pump()
    runner = runner_of(network, oid)
    runner.complete(runner.take_task(), BIG)
    network.pump()
    assert value(sender, oid) == "SPILLED"
    assert sender.remote_objects.by_oid[oid].holders == (runner.number,)
    assert len(runner.inbound_tasks.by_task) == 1
    assert sender.remote_objects.want(oid, lambda: None)
    remote = sender.fetching.pop(oid)
    there = runner.imports.by_object[remote.object].oid
    sender.node.memory(remote.payload, remote.nbytes)[:] = memoryview(runner.node.view(there))  # type: ignore[arg-type]
    sender.remote_objects.arrived(oid)
    assert (value(sender, oid) == BIG).all()
    network.pump()
    assert not runner.inbound_tasks.by_task
    done(network)


def test_large_remote_result_without_refs_is_freed(network: Network) -> None:
    sender = network.nodes[0]
    oid = sender.submit()
    network.pump()
    runner = runner_of(network, oid)
    runner.complete(runner.take_task(), BIG)
    network.pump()
    done(network)


def test_refs_inside_a_remote_result_stay_valid(network: Network) -> None:
    sender = network.nodes[0]
    oid = sender.submit()
    network.pump()
    runner = runner_of(network, oid)
    task = runner.take_task()
    inner, hold = runner.put("inner")
    runner.complete(task, [ObjectRef(inner, hold)])
    network.pump()
    runner.party.collect()
    del hold  # its worker lets go; from here on the hosts hold it
    network.pump()
    runner.party.collect()
    assert sender.party.flags(oid) == (True, False)
    (mine,) = sender.hold(inner)
    assert sender.value(mine) == "inner"
    sender.tasks.set_taken(oid)
    del mine
    done(network)


def test_refs_among_the_arguments_of_a_remote_task_are_valid(network: Network) -> None:
    sender = network.nodes[0]
    argument, hold = sender.put({"x": 1})
    oid = sender.submit((ObjectRef(argument, hold),), holds=hold)
    del hold
    network.pump()
    runner = runner_of(network, oid)
    task = runner.take_task()
    (theirs,) = runner.hold(argument)
    assert runner.value(theirs) == {"x": 1}
    runner.complete(task, None)
    del theirs
    network.pump()
    done(network)


def test_runner_with_the_arguments_is_preferred(network: Network) -> None:
    sender, _, second = network.nodes
    argument, theirs = second.put(BIG)
    (mine,) = remote_hold(network, sender, argument)
    for _ in range(3):
        oid = sender.submit((ObjectRef(argument, mine),), holds=mine)
        network.pump()
        assert runner_of(network, oid) is second
        second.complete(second.take_task(), None)
        network.pump()
    del theirs, mine
    done(network)


def test_tasks_are_sent_only_to_free_workers(network: Network) -> None:
    sender = network.nodes[0]
    oids = [sender.submit() for _ in range(20)]
    network.pump()
    assert len(sender.outbound_tasks.where) == 2 * (2 + 2)
    assert {value(sender, oid) for oid in oids} == {"CLAIMED", "QUEUED"}
    while sender.outbound_tasks.where:
        for runner in network.nodes[1:]:
            if task := runner.take_task():
                runner.complete(task, runner.number)
        network.pump()
    assert {value(sender, oid) for oid in oids} == {1, 2}
    done(network)


def test_local_workers_run_tasks_too(network: Network) -> None:
    sender = network.nodes[0]
    oids = [sender.submit() for _ in range(12)]
    network.pump()
    while task := sender.take_task():
        sender.complete(task, "here")
    values = [value(sender, oid) for oid in oids]
    assert values.count("here") == 4
    assert values.count("CLAIMED") == 8
    for runner in network.nodes[1:]:
        while task := runner.take_task():
            runner.complete(task, "there")
    network.pump()
    done(network)


def test_remote_task_is_cancelled_before_and_while_it_runs(network: Network) -> None:
    sender = network.nodes[0]
    waits, runs = sender.submit(), sender.submit()
    network.pump()
    runner = runner_of(network, runs)
    task = next(iter(runner.inbound_tasks.by_oid))
    assert runner.tasks.claim(task)
    mine = ids.unpack_id(runner.inbound_tasks.by_oid[task].task)[1]
    other = waits if mine == runs else runs
    for oid in (mine, other):
        assert sender.tasks.cancel(oid, True) == 2
        assert sender.outbound_tasks.cancel(oid)
    network.pump()
    assert runner.processes.interrupted == [runner.pid]
    assert value(sender, other) == "CANCELLED"
    runner.complete(task, "too late")
    network.pump()
    assert value(sender, mine) == "CANCELLED"
    done(network)


def test_recalled_tasks_run_on_the_sending_host(network: Network) -> None:
    sender = network.nodes[0]
    oids = [sender.submit() for _ in range(8)]
    network.pump()
    running = {runner.number: runner.take_task() for runner in network.nodes[1:]}
    for runner in network.nodes[1:]:
        known = sender.outbound_tasks.runners[runner.host_id]
        known.workers = 0  # so that it is not sent again
        known.changed()
        sender.outbound_tasks.recall(known, 1 << 10)
    network.pump()
    while task := sender.take_task():
        sender.complete(task, "home")
    assert [value(sender, oid) for oid in oids].count("home") == 6
    for runner in network.nodes[1:]:
        runner.complete(running[runner.number], "away")
    network.pump()
    assert {value(sender, oid) for oid in oids} == {"home", "away"}
    done(network)


@pytest.mark.parametrize("dropped", [False, True])
def test_recalled_task_keeps_the_hold_of_its_former_runner(network: Network, dropped: bool) -> None:
    """A process of that host has got the ref before: the task is not cancelled for it, and its hold
    keeps the result, though its sender's process drops the ref (`dropped`)."""
    sender, runner = network.nodes[:2]
    unused = sender.outbound_tasks.runners[network.nodes[2].host_id]
    unused.workers = 0
    unused.changed()
    oids = [sender.submit() for _ in range(4)]
    network.pump()
    first = runner.take_task()
    assert sorted(map(sender.outbound_tasks.where.get, oids), key=str).count(None) == 0
    holds = {oid: remote_hold(network, runner, ids.pack_id(sender.host_id, oid))[0] for oid in oids}
    known = sender.outbound_tasks.runners[runner.host_id]
    known.workers = 0
    known.changed()
    sender.outbound_tasks.recall(known, 1 << 10)
    network.pump()
    back = [oid for oid in oids if oid not in sender.outbound_tasks.where]
    assert len(back) == 3
    if dropped:
        for oid in back:
            sender.submitted[oid] = []
        network.pump()
    while task := sender.take_task():
        sender.complete(task, "home")
    network.pump()
    assert [runner.value(holds[oid]) for oid in back] == ["home"] * 3  # type: ignore[arg-type]
    runner.complete(first, "away")
    network.pump()
    (away,) = set(oids) - set(back)
    assert runner.value(holds[away]) == "away"  # type: ignore[arg-type]
    holds.clear()
    done(network)


@pytest.mark.parametrize("retries", [0, 1])
def test_task_of_a_dead_runner_is_retried_or_fails(network: Network, retries: int) -> None:
    sender = network.nodes[0]
    oid = sender.submit(retries=retries)
    network.pump()
    dead = runner_of(network, oid)
    dead.take_task()
    network.lose(dead)
    network.pump()
    if retries:
        again = runner_of(network, oid)
        assert again is not dead
        again.complete(again.take_task(), "again")
        network.pump()
        assert value(sender, oid) == "again"
    else:
        error = value(sender, oid)
        assert isinstance(error, NodeLostError)
        assert f"h{dead.number}" in str(error)
    done(network)


def test_large_result_is_lost_with_its_runner(network: Network) -> None:
    sender = network.nodes[0]
    oid = sender.submit(retries=0)
    network.pump()
    runner = runner_of(network, oid)
    runner.complete(runner.take_task(), BIG)
    network.pump()
    network.lose(runner)
    network.settle()
    assert "is lost" in str(value(sender, oid))
    done(network)


def test_tasks_of_a_dead_sender_are_stopped(network: Network) -> None:
    sender = network.nodes[0]
    oids = [sender.submit() for _ in range(6)]
    network.pump()
    tasks = [(runner, runner.take_task()) for runner in network.nodes[1:]]
    network.lose(sender)
    for runner, task in tasks:
        assert runner.processes.interrupted == [runner.pid]
        runner.complete(task, None)
    network.pump()
    assert oids
    sender.submitted.clear()
    assert_nothing_kept(network)


def test_pool_bound_to_a_host_runs_there(network: Network) -> None:
    sender, _, second = network.nodes
    pool = 5
    sender.node.open_pool(pool, 1)
    assert sender.outbound_tasks.bind(pool, second.number)
    oids = [sender.submit(pool=pool) for _ in range(3)]
    network.pump()
    assert {runner_of(network, oid) for oid in oids} == {second}
    while task := second.take_task():
        second.complete(task, np.int64(3))
    network.pump()
    assert COMMON == 0
    assert [value(sender, oid) for oid in oids] == [3, 3, 3]
    done(network)


def test_pool_bound_to_a_lost_host_is_deserted(network: Network) -> None:
    """Nobody runs its tasks any more; another host's are no matter of that."""
    sender, first, second = network.nodes
    gone: list[tuple[int, str]] = []
    sender.node_events.pool_deserted = lambda pool, why: gone.append((pool, why))
    assert sender.outbound_tasks.bind(5, first.number)
    assert sender.outbound_tasks.bind(6, second.number)
    assert [sender.outbound_tasks.bound_to(pool) for pool in (5, 6, 7)] == [
        first.host_id,
        second.host_id,
        None,
    ]
    network.lose(second)
    assert gone == [(6, "node h2, to which it is bound, is gone")]
    assert sender.outbound_tasks.bound_to(5) == first.host_id
    assert sender.outbound_tasks.bound_to(6) is None
    assert not sender.outbound_tasks.bind(6, second.number)


@pytest.mark.parametrize("result", [BIG, "small", KeyError("k")], ids=["big", "small", "error"])
def test_ref_to_a_task_is_valid_on_the_host_that_later_runs_it(
    network: Network, result: Any
) -> None:
    """A process of the runner waits for a task by its ref, before the runner gets that task."""
    sender, runner = network.nodes[0], network.nodes[1]
    for side in network.nodes[1:]:
        sender.outbound_tasks.lose_runner(side.host_id)
    oid = sender.submit()
    holds = runner.hold(ids.pack_id(sender.host_id, oid))
    network.pump()
    assert runner.value(holds[0]) == "CLAIMED"
    sender.outbound_tasks.set_runner(runner.host_id, runner.number, 2)
    network.pump()
    runner.complete(runner.take_task(), result)
    network.pump()
    if result is BIG:
        assert runner.remote_objects.want(holds[0].oid, lambda: None)
    assert str(runner.value(holds[0])) == str(result)
    holds.clear()
    done(network)


@pytest.mark.parametrize("outcome", ["ready", "returned", "cancelled"])
def test_late_reports_of_former_runners_are_ignored(network: Network, outcome: str) -> None:
    """Another one may have had it before, and be late."""
    sender, *others = network.nodes
    oids = [sender.submit() for _ in others]
    network.pump()
    assert {runner_of(network, oid) for oid in oids} == {*others}
    for oid in oids:
        runner = runner_of(network, oid)
        payload = _serialize.encode("late").tobytes() if outcome == "ready" else None
        said = TaskEnded(ids.pack_id(sender.host_id, oid), outcome, payload=payload)
        for other in others:
            if other is not runner:
                sender.outbound_tasks.ended(other.host_id, said)
        network.pump()
        assert runner_of(network, oid) is runner
        runner.complete(runner.take_task(), runner.number)
        network.pump()
        assert value(sender, oid) == runner.number
    done(network)


@pytest.mark.parametrize("owner", [0, 2, None])
def test_workers_bound_to_a_sender_run_no_other_tasks(network: Network, owner: int | None) -> None:
    """That one's, and after their end they run nobody's."""
    sender, second, _ = network.nodes
    pool, there = 7, 5
    sender.node.open_pool(pool, 1)
    second.node.open_pool(there, 1)
    if owner is not None:
        second.inbound_tasks.pools[there] = network.nodes[owner].host_id
    sender.outbound_tasks.add_remote(pool, second.host_id, there, 1, 0)
    oid = sender.submit(pool=pool)
    network.pump()
    task = second.tasks.next(there, 0)
    if owner == 0:
        second.complete(task, "ran")
        network.pump()
        assert value(sender, oid) == "ran"
    else:
        assert not task
        assert isinstance(value(sender, oid), WorkerLostError)
        assert "its pool has been closed" in str(value(sender, oid))
    done(network)
