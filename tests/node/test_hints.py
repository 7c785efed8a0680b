"""How a node announces tasks to the workers of its host."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from hoplite_mp import _tasks
from hoplite_mp._common.object_states import DRIVER_SLOT, FIRST_SLOT, TASK_COPY, TASK_HERE
from tests.support.node_harness import member

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.support.node_harness import NodeHarness

PEER = member(1).host_id


def test_tasks_without_a_priority_run_in_order(
    make_node: Callable[..., NodeHarness],
) -> None:
    node = make_node(alone=True, workers=1)
    sender, worker = node.process(DRIVER_SLOT), node.process(FIRST_SLOT)
    ranked, sent = _tasks.Ranked(sender.tasks), []
    for priority in (-1, 5, 7):
        sent.append(sender.submit(flags=TASK_COPY, ready=False))
        ranked.rank(sent[-1].oid, priority, _tasks.NO_FLOOR)  # of a task of before
        assert node.parts.workers.post(sent[-1].oid, here=False)
    assert [worker.next() for _ in range(4)] == [*(hold.oid for hold in sent), 0]


def test_task_is_bound_to_this_host_by_its_submitter_or_sender(
    make_node: Callable[..., NodeHarness],
) -> None:
    alone, one_of_two = make_node(alone=True), make_node([member(1)])
    inbound = one_of_two.run_task(PEER)
    assert one_of_two.parts.workers.is_bound(inbound)
    for node in (alone, one_of_two):
        sender = node.process(DRIVER_SLOT)
        holds = [
            sender.submit(flags=flags, ready=False)
            for flags in (0, TASK_COPY, TASK_HERE, TASK_HERE | TASK_COPY)
        ]
        bound = [node.parts.workers.is_bound(hold.oid) for hold in holds]
        assert bound == ([False, False, True, True] if node is one_of_two else [True] * 4)


def test_task_is_announced_when_a_queue_becomes_free(
    make_node: Callable[..., NodeHarness],
) -> None:
    """When a queue is free again; the node had died of it."""
    node = make_node(alone=True, workers=1)
    sender, worker = node.process(DRIVER_SLOT), node.process(FIRST_SLOT)
    task = sender.submit(flags=TASK_COPY, ready=False)
    taken = []
    with contextlib.suppress(MemoryError):
        while True:
            taken.append(sender.tasks.open_queue(0))
    node.parts.workers.announce(task.oid, here=False)
    assert worker.next() == 0
    sender.tasks.close_queue(taken.pop())
    node.loop.pass_time(1.0)
    assert worker.next() == task.oid
