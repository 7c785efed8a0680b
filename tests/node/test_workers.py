"""Workers of one host: when they are looked at, interrupted, killed, and not started."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from hoplite_mp import _tasks
from hoplite_mp._common.object_states import CLIENT_WORKER, DRIVER_SLOT, FIRST_SLOT
from hoplite_mp._node.tasks.worker_pools import STUCK_PATIENCE_S, SURPLUS_PATIENCE_S
from hoplite_mp._node.tasks.workers import INTERRUPT_AGAIN_S, POLL_AGAIN_S
from hoplite_mp._protocol.local import AddWorkers, ClosePool, Interrupt

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.support.node_harness import HarnessProcess, NodeHarness

GRACE_S = 2.0


@pytest.fixture
def node(make_node: Callable[..., NodeHarness]) -> NodeHarness:
    return make_node(alone=True, workers=1, cancel_grace_s=GRACE_S, blocked_workers_max=0)


def timers(node: NodeHarness) -> list[float]:
    return sorted(at for at, *_ in node.loop.timers)


def test_all_task_deadlines_are_met(node: NodeHarness) -> None:
    """Also a later one that is set when the one before has passed, and an earlier one at once."""
    pid = node.worker_started(FIRST_SLOT)
    worker = _tasks.ConcurrentSlots(node.process(FIRST_SLOT).tasks)
    begun = node.loop.time
    for due, passes in ((5.0, 0.0), (3.0, 4.0), (9.0, 0.0), (8.0, 8.5)):
        worker.deadline(1 << 33, round((begun + due) * 1e9))
        node.poll()
        assert any(abs(at - begun - due) < 0.001 for at in timers(node))
        node.loop.pass_to(max(node.loop.time, begun + passes))
    assert not node.processes.killed
    node.loop.pass_to(begun + 10.0)
    node.poll()
    assert node.processes.killed == [pid]


@pytest.mark.parametrize("blocked", [False, True])
def test_surplus_and_blocked_workers_are_checked_again_later(
    node: NodeHarness, blocked: bool
) -> None:
    """Not at once: that would be again and again."""
    assert min(SURPLUS_PATIENCE_S, STUCK_PATIENCE_S) > POLL_AGAIN_S
    if blocked:
        node.process(FIRST_SLOT).tasks.set_blocked(True)
    else:
        node.parts.workers.pools[0].target = 0
    node.poll()
    (at,) = timers(node)
    assert at == pytest.approx(node.loop.time + POLL_AGAIN_S, abs=1e-6)


def test_worker_without_a_slot_is_not_started(node: NodeHarness) -> None:
    while node.node.register(0, CLIENT_WORKER, 0) >= 0:
        pass
    reply = node.answer(DRIVER_SLOT, AddWorkers(1, 0))
    assert "has reached its limit" in reply.error
    assert not node.processes.spawned


def abort(node: NodeHarness, worker: HarnessProcess) -> int:
    """A task of the worker is cancelled while it runs; returns its id."""
    driver = node.process(DRIVER_SLOT)
    task = driver.submit()
    assert worker.next() == task.oid
    driver.tasks.cancel(task.oid, True)
    node.ask(DRIVER_SLOT, Interrupt(task.oid, worker.slot), 0)
    return int(task.oid)


@pytest.mark.parametrize("then", ["runs", "ended", "replaced"])
def test_worker_is_killed_only_if_its_task_continues(node: NodeHarness, then: str) -> None:
    pid, worker, processes = (
        node.worker_started(FIRST_SLOT),
        node.process(FIRST_SLOT),
        node.processes,
    )
    oid = abort(node, worker)
    assert processes.interrupted == [pid]
    node.loop.pass_time(INTERRUPT_AGAIN_S * 7)
    assert processes.interrupted == [pid] * 4  # at once, and after 1, 3 and 7 of these times
    if then == "ended":
        assert worker.tasks.settle(oid)
    elif then == "replaced":
        node.worker_exited(FIRST_SLOT)
        (spawned,) = processes.spawned
        node.worker_started(spawned.slot)
    told = len(processes.interrupted)
    node.loop.pass_time(GRACE_S)
    assert processes.killed == ([pid] if then == "runs" else [])
    assert (len(processes.interrupted) > told) == (then == "runs")


def test_task_is_interrupted_when_its_worker_has_a_pid(node: NodeHarness) -> None:
    abort(node, node.process(FIRST_SLOT))
    assert not node.processes.interrupted
    pid = node.worker_started(FIRST_SLOT)
    node.loop.pass_time(INTERRUPT_AGAIN_S)
    assert node.processes.interrupted == [pid]


@pytest.mark.parametrize("event", ["another waits", "promoted", "replaced", "closed"])
def test_sleeping_substitute_worker_is_woken_immediately(
    make_node: Callable[..., NodeHarness], event: str
) -> None:
    """On the word on which it sleeps: nothing ends its sleep but that wake-up."""
    node = make_node(alone=True, workers=2, played=True)
    workers, slept = node.parts.workers, []
    pool = workers.pools[0]
    own, stand_in = (node.process(slot) for slot in (FIRST_SLOT, FIRST_SLOT + 1))
    worker = workers.all[stand_in.slot]
    worker.stands_in, pool.target = True, 1
    node.node.set_stands_in(stand_in.slot, True)

    def sleep(word: int) -> None:
        slept.append(word)
        node.loop.woken.clear()
        if event == "another waits":
            own.tasks.set_blocked(True)
            node.poll()
        elif event == "promoted":
            workers.all[own.slot].retiring = True
            workers.start_missing(pool)
        elif event == "closed":
            node.ask(DRIVER_SLOT, ClosePool(0, kill=False), 0)
        else:
            workers.replace(worker)

    node.loop.sleeps = sleep
    stand_in.tasks.next(0, 60 * 10**9)
    assert slept[0] in node.loop.woken
    assert worker.stands_in == (event != "promoted")
