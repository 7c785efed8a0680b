"""How a node announces tasks to the workers of its host."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from hoplite_mp import _tasks
from hoplite_mp._common.object_states import FLAG_COPY, FLAG_HERE
from hoplite_mp._node.tasks.hints import Hints
from tests.support.shm_host import KIND_TASK, POOL, STATE, ShmHost

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(name="host")
def fixture_host() -> Iterator[ShmHost]:
    made = ShmHost()
    yield made
    made.close()


def test_tasks_without_a_priority_go_in_order_whatever_was_in_their_records(host: ShmHost) -> None:
    context: Any = SimpleNamespace(loop=host.loop, client=host.node, tasks=host.node_tasks)
    hints = Hints(context, inbound_tasks={})  # type: ignore[arg-type]
    sender, worker = host.client(), _tasks.Tasks(host.client())
    tasks, ranked = _tasks.Tasks(sender), _tasks.Ranked(_tasks.Tasks(sender))
    queue, holds, sent = tasks.open_queue(POOL), [], []
    for priority in (-1, 5, 7):
        oid = sender.new(KIND_TASK, STATE["WAITING"], 0, POOL)
        holds.append(sender.hold(oid, False))
        tasks.submit(oid, 0, b"", 0, 0, 0, FLAG_COPY, b"t", queue, False)
        ranked.rank(oid, priority, _tasks.NO_FLOOR)  # of a task of before
        assert hints.post(oid, here=False)
        sent.append(oid)
    assert [worker.next(POOL, 0) for _ in range(4)] == [*sent, 0]


@pytest.mark.parametrize("may_leave", [True, False])
def test_a_task_is_bound_to_this_host_by_its_submitter_or_as_another_hosts(
    host: ShmHost, may_leave: bool
) -> None:
    context: Any = SimpleNamespace(loop=host.loop, client=host.node, tasks=host.node_tasks)
    inbound_tasks: set[int] = set()
    hints = Hints(context, inbound_tasks)  # type: ignore[arg-type]
    events: Any = SimpleNamespace(may_leave=lambda: may_leave)
    hints.events = events
    sender = host.client()
    tasks = _tasks.Tasks(sender)
    queue, found, holds = tasks.open_queue(POOL), [], []
    for flags in (0, FLAG_COPY, FLAG_HERE, FLAG_HERE | FLAG_COPY, FLAG_COPY):
        oid = sender.new(KIND_TASK, STATE["WAITING"], 0, POOL)
        holds.append(sender.hold(oid, False))
        tasks.submit(oid, 0, b"", 0, 0, 0, flags, b"t", queue, False)
        found.append(oid)
    inbound_tasks.add(found[-1])
    bound = [False, False, True, True, True] if may_leave else [True] * 5
    assert [hints.is_bound(oid) for oid in found] == bound


def test_a_host_whose_queues_are_all_taken(host: ShmHost) -> None:
    """The task is announced when one is free again; the node had died of it."""
    context: Any = SimpleNamespace(loop=host.loop, client=host.node, tasks=host.node_tasks)
    hints = Hints(context, inbound_tasks={})  # type: ignore[arg-type]
    sender, worker = host.client(), _tasks.Tasks(host.client())
    tasks = _tasks.Tasks(sender)
    queue = tasks.open_queue(POOL)
    oid = sender.new(KIND_TASK, STATE["WAITING"], 0, POOL)
    hold = sender.hold(oid, False)
    tasks.submit(oid, 0, b"", 0, 0, 0, FLAG_COPY, b"t", queue, False)
    taken = []
    with contextlib.suppress(MemoryError):
        while True:
            taken.append(tasks.open_queue(POOL))
    hints.announce(oid, here=False)
    assert worker.next(POOL, 0) == 0
    tasks.close_queue(taken.pop())
    host.loop.pass_time(1.0)
    assert worker.next(POOL, 0) == oid
    del hold
