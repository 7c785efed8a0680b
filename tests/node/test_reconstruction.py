"""Results that a host has taken along are made again when they are asked for, and only then."""

from __future__ import annotations

import inspect
import sys
from typing import Any

import numpy as np
import pytest

from hoplite_mp import _tasks
from hoplite_mp._common import ids
from hoplite_mp._common.ref import ObjectRef
from hoplite_mp.errors import StoreFullError
from tests.support.node_hosts import (
    BIG,
    Network,
    Side,
    assert_nothing_kept,
    drop_arguments,
    is_absent,
    network,
    remote_hold,
    run_one,
    sender,
    submit_and_run,
)
from tests.support.shm_host import STATE

__all__ = ["network", "sender"]  # fixtures


LONG_CHAIN = 300  # steps


def ref(side: Side, oid: int) -> ObjectRef[Any]:
    """As a Future's `.ref`."""
    return ObjectRef(ids.pack_id(side.host_id, oid), side.party.hold(oid))


def forget(side: Side, oid: int) -> None:
    """The process drops its Future."""
    del side.submitted[oid]
    side.party.collect()


def test_lost_result_is_recomputed_on_demand(network: Network, sender: Side) -> None:
    oid, runner = submit_and_run(network, BIG)
    network.lose(runner)
    network.settle()
    assert is_absent(sender, oid)
    assert run_one(network, BIG) is None  # nobody has asked
    heard: list[int] = []
    for one in range(3):  # several who ask cause one run
        assert sender.remote_objects.want(oid, lambda one=one: heard.append(one))  # type: ignore[misc]
    network.settle()
    assert run_one(network, BIG + 1) is not None
    network.settle()
    assert sender.recovery.reconstruction.begun == 1
    assert sorted(heard) == [0, 1, 2]
    assert run_one(network, BIG) is None
    assert (sender.read(sender.submitted[oid][0]) == BIG + 1).all()
    assert_nothing_kept(network)


def test_recomputation_has_the_priority_of_its_task(
    network: Network, sender: Side, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And it is announced as every task of that pool is, by the rule that knows of priorities."""
    oid, runner = submit_and_run(network, BIG, flags=_tasks.RANKED_FLAG)
    workers = sender.parts.workers
    workers.ranked.rank(oid, 7, 3)
    post, posted = workers.post, []
    monkeypatch.setattr(
        workers, "post", lambda *run: posted.append(workers.ranked.ranks(run[0])) or post(*run)
    )
    network.lose(runner)
    sender.remote_objects.want(oid, lambda: None)
    network.settle()
    assert run_one(network, BIG) is not None
    network.settle()
    assert posted == [(7, 3)]
    assert (sender.read(sender.submitted[oid][0]) == BIG).all()
    assert_nothing_kept(network)


@pytest.mark.parametrize("frees", [True, False])
def test_recomputed_result_waits_for_space(network: Network, sender: Side, frees: bool) -> None:
    """It is brought as soon as there is; without room for put_wait_s the task has failed, as any
    other does whose result has no room."""
    oid, runner = submit_and_run(network, BIG)
    network.lose(runner)
    heard: list[int] = []
    sender.remote_objects.want(oid, lambda: heard.append(1))
    network.settle()
    _, other = sender.put(BIG)
    pinned: Any = sender.node.view(other.oid)
    room, sender.store.limit = sender.store.limit, BIG.nbytes + 8192
    assert run_one(network, BIG) is not sender
    network.settle()
    assert not heard
    if frees:
        del pinned, other
        sender.party.collect()
        sender.store.limit = room
    else:
        sender.loop.time += sender.results.config.put_wait_s
    network.settle()
    sender.store.limit = room
    assert heard
    value = sender.value(sender.submitted[oid][0])
    if frees:
        assert (value == BIG).all()
    else:
        assert isinstance(value, StoreFullError)
        assert "reconstructed" in str(value)
        del pinned, other
    assert_nothing_kept(network)


def test_recomputation_is_named_by_its_result(network: Network, sender: Side) -> None:
    """Wherever it runs: Groups must not take it for a task of which they have never heard."""
    oid, runner = submit_and_run(network, BIG)
    target = ids.pack_id(sender.host_id, oid)
    network.lose(runner)
    sender.remote_objects.want(oid, lambda: None)
    network.settle()
    (there, task), *others = [
        (side, found) for side in network.living if (found := side.take_task())
    ]
    assert not others
    assert there is not sender
    assert there.recovery.target_of(task) == target
    assert there.node_tasks.task(task)[5] == 1, "and by how often it was tried"
    (run,) = sender.recovery.reconstruction.by_run
    assert sender.recovery.target_of(run) == target
    assert oid in sender.recovery.reconstruction.runs
    there.complete(task, BIG)
    network.settle()
    assert oid not in sender.recovery.reconstruction.runs
    again, first = submit_and_run(network, BIG)
    assert first.recovery.target_of(again) == b""
    assert_nothing_kept(network)


def test_lost_result_is_recomputed_by_local_workers(network: Network, sender: Side) -> None:
    oid, _ = submit_and_run(network, BIG)
    for side in list(network.living[1:]):
        network.lose(side)
    sender.remote_objects.want(oid, lambda: None)
    network.settle()
    task = sender.take_task()
    sender.complete(task, BIG * 2)
    network.settle()
    assert (sender.read(sender.submitted[oid][0]) == BIG * 2).all()
    assert_nothing_kept(network)


def test_error_of_a_recomputation_is_the_result(network: Network, sender: Side) -> None:
    oid, runner = submit_and_run(network, BIG)
    network.lose(runner)
    sender.remote_objects.want(oid, lambda: None)
    network.settle()
    run_one(network, KeyError("this time"))
    network.settle()
    assert sender.node.state(oid) == STATE["FAILED"]
    assert isinstance(sender.value(sender.submitted[oid][0]), KeyError)
    assert_nothing_kept(network)


@pytest.mark.parametrize("count", [1, 1000])
def test_recomputation_that_returns_refs_fails(network: Network, sender: Side, count: int) -> None:
    """Who would hold what they name is not asked a second time. Small values and large ones."""
    oid, runner = submit_and_run(network, BIG)
    network.lose(runner)
    network.settle()
    sender.remote_objects.want(oid, lambda: None)
    network.settle()
    for side in network.living:
        task = side.take_task()
        if task:
            object_id, hold = side.put("inner")
            side.complete(task, [ObjectRef(object_id, hold), b"x" * count * 8])
            del hold
    network.settle()
    assert "its task was run again and returned refs" in sender.read(sender.submitted[oid][0])
    assert_nothing_kept(network)


def test_recomputed_value_may_have_another_size(network: Network, sender: Side) -> None:
    for again in ("small", np.ones(70_000)):
        oid, runner = submit_and_run(network, BIG)
        network.lose(runner)
        sender.remote_objects.want(oid, lambda: None)
        network.settle()
        run_one(network, again)
        network.settle()
        got = sender.read(sender.submitted[oid][0])
        assert np.array_equal(got, again)
    assert_nothing_kept(network)


@pytest.mark.parametrize(("retries", "why"), [(0, "retries=0"), (1, "retries of f")])
def test_retries_limit_recomputations(
    network: Network, sender: Side, retries: int, why: str
) -> None:
    oid, runner = submit_and_run(network, BIG, retries=retries)
    network.lose(runner)
    for _ in range(retries):
        sender.remote_objects.want(oid, lambda: None)
        network.settle(2)
        again = next(side for side in network.living if side.take_task())
        network.lose(again)  # while it runs
        network.settle(2)
        network.pump()
    if retries:
        # The run's own retries are used up: it fails with the loss of the node that ran it.
        network.settle()
        assert "was lost while it ran f()" in str(sender.value(sender.submitted[oid][0]))
    else:
        error = str(sender.value(sender.submitted[oid][0]))
        assert why in error
        assert f"node h{runner.number} had it" in error
    assert_nothing_kept(network)


def test_result_lost_twice_is_recomputed_twice(network: Network, sender: Side) -> None:
    """The second time before its bytes were here: each run counts."""
    oid, runner = submit_and_run(network, BIG, retries=2)
    network.lose(runner)
    sender.remote_objects.want(oid, lambda: None)
    network.pump()
    network.pass_time()
    again = run_one(network, BIG)
    assert again is not None
    network.lose(again)
    network.settle(2)
    assert run_one(network, BIG * 3) is not None
    network.settle()
    assert (sender.read(sender.submitted[oid][0]) == BIG * 3).all()
    assert sender.recovery.lineage.retries(oid) == 0
    assert_nothing_kept(network)


def test_retry_of_a_recomputation_counts(network: Network, sender: Side) -> None:
    """Its result is lost before its bytes were here: two runs were made of it."""
    oid, runner = submit_and_run(network, BIG, retries=2)
    network.lose(runner)
    sender.remote_objects.want(oid, lambda: None)
    network.settle(2)
    again = next(side for side in network.living if side.take_task())
    network.lose(again)
    network.pump()
    network.pass_time()
    last = run_one(network, BIG)
    assert last is not None
    network.lose(last)
    network.settle(2)
    assert not any(side.take_task() for side in network.living)
    assert "used up" in sender.read(sender.submitted[oid][0])


@pytest.mark.parametrize("count", [20_000, 80_000])
def test_remote_reader_gets_a_recomputed_value_of_another_size(
    network: Network, sender: Side, count: int
) -> None:
    """A reader elsewhere knew the size of the first one."""
    oid, runner = submit_and_run(network, BIG)
    reader = next(side for side in network.living[1:] if side is not runner)
    (hold,) = remote_hold(network, reader, ids.pack_id(sender.host_id, oid))
    there = reader.imports.by_object[ids.pack_id(sender.host_id, oid)].oid
    network.lose(runner)
    assert reader.remote_objects.want(there, lambda: None)
    network.settle(2)
    assert run_one(network, np.ones(count)) is not None
    network.settle()
    assert (reader.read(hold) == np.ones(count)).all()


def test_chain_of_lost_results_is_recomputed_from_its_start(network: Network, sender: Side) -> None:
    """Steps that nobody holds but by what was made of them are made again from the first one on."""
    first, runner = submit_and_run(network, BIG)
    steps, runners = [first], {runner}
    for step in range(2):
        oid, runner = submit_and_run(network, BIG + step + 1, ref(sender, steps[-1]))
        forget(sender, steps[-1])
        steps.append(oid)
        runners.add(runner)
    network.settle()
    assert [is_absent(sender, oid) for oid in steps] == [True, True, False]
    for side in network.living:
        side.store.take_returns()
    held = sum(len(side.store.leases) for side in network.living)
    assert held == 1  # the last one's bytes
    last = runner
    network.lose(last)
    sender.remote_objects.want(steps[-1], lambda: None)
    for step in range(3):
        network.settle()
        assert run_one(network, BIG * (step + 10)) is not None, step
    network.settle()
    assert (sender.read(sender.submitted[steps[-1]][0]) == BIG * 12).all()
    network.settle()
    assert [is_absent(sender, oid) for oid in steps] == [True, True, False]
    assert_nothing_kept(network)


def test_local_result_is_an_argument_of_a_recomputation(network: Network, sender: Side) -> None:
    """A worker of this host has made it: its node learns of it by the block for a big result."""
    for side in network.living[1:]:
        sender.outbound_tasks.lose_runner(side.host_id)
    near = sender.submit()
    task = sender.take_task()
    assert task == near
    before = sender.tasks.begin(task)
    sender.recovery.leases(sender.party.slot)
    sender.complete(task, BIG)
    sender.tasks.end(before, False)
    network.pump()
    drop_arguments(sender, near)
    for side in network.living[1:]:
        sender.outbound_tasks.set_runner(side.host_id, side.number, 1)
    oid, runner = submit_and_run(network, BIG * 2, ref(sender, near))
    forget(sender, near)
    assert len(sender.store.leases) == 1
    sender.recovery.lineage.drop_unneeded()  # the store is full
    sender.store.take_returns()
    assert not sender.store.leases
    assert is_absent(sender, near)
    network.lose(runner)
    sender.remote_objects.want(oid, lambda: None)
    for value in (BIG, BIG * 3):
        network.settle()
        assert run_one(network, value) is not None
    network.settle()
    assert (sender.read(sender.submitted[oid][0]) == BIG * 3).all()
    assert_nothing_kept(network)


def test_long_chain_fails_without_recursion() -> None:
    """More steps than frames fit onto the stack, of which the first cannot be made again."""
    network = Network(2)
    sender, runner = network.nodes
    network.set_runners(sender, runner)
    steps = [submit_and_run(network, BIG)[0]]
    for _ in range(LONG_CHAIN):
        steps.append(submit_and_run(network, BIG, ref(sender, steps[-1]))[0])
        forget(sender, steps[-2])
    network.settle(2)
    sender.recovery.lineage._forget(steps[0])  # as the limit does with the oldest
    sender.party.collect()
    network.lose(runner)
    depth, limit = len(inspect.stack(0)), sys.getrecursionlimit()
    sys.setrecursionlimit(depth + LONG_CHAIN)
    try:
        sender.remote_objects.want(steps[-1], lambda: None)
        for _ in range(LONG_CHAIN + 100):
            network.pump()
            network.pass_time()
            if not sender.recovery.reconstruction.runs:
                break
    finally:
        sys.setrecursionlimit(limit)
    assert "is gone" in str(sender.value(sender.submitted[steps[-1]][0]))
    assert_nothing_kept(network)
    network.close()


def test_freed_argument_fails_the_recomputation(network: Network, sender: Side) -> None:
    object_id, hold = sender.put(BIG)
    oid, runner = submit_and_run(network, BIG, ObjectRef(object_id, hold))
    del hold
    sender.party.collect()
    network.lose(runner)
    sender.remote_objects.want(oid, lambda: None)
    network.settle()
    error = str(sender.value(sender.submitted[oid][0]))
    assert f"ObjectRef({object_id.hex()})" in error
    assert "is gone: it had no ref left" in error
    assert f"node h{runner.number} had it" in error
    assert_nothing_kept(network)


def test_lineage_size_is_bounded(network: Network, sender: Side) -> None:
    lineage = sender.recovery.lineage
    lineage.bytes_max = 8 << 10
    oids = []
    for _ in range(20):
        oids.append(submit_and_run(network, BIG)[0])
    assert len(lineage.entries) < 10
    assert lineage.nbytes <= lineage.bytes_max
    kept = set(lineage.entries)
    assert kept == set(oids[-len(kept) :])
    for side in list(network.living[1:]):
        network.lose(side)
    network.settle()
    assert "lineage_bytes_max" in str(sender.value(sender.submitted[oids[0]][0]))
    assert is_absent(sender, oids[-1])
    assert_nothing_kept(network)


def test_result_deleted_during_its_recomputation_is_dropped(network: Network, sender: Side) -> None:
    oid, runner = submit_and_run(network, BIG)
    network.lose(runner)
    heard: list[int] = []
    sender.remote_objects.want(oid, lambda: heard.append(1))
    network.pump()
    network.pass_time()
    sender.party.delete(oid)
    network.settle()
    assert heard == [1]
    run_one(network, BIG)
    assert_nothing_kept(network)


def test_closed_executor_fails_the_recomputation(network: Network, sender: Side) -> None:
    oid, runner = submit_and_run(network, BIG)
    network.lose(runner)
    sender.parts.workers.close(0, False)
    sender.remote_objects.want(oid, lambda: None)
    network.settle()
    assert "executor that ran its task is closed" in str(sender.value(sender.submitted[oid][0]))
    assert_nothing_kept(network)
