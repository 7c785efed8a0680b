"""The node's hints, which announce tasks to the workers on this host.

A hint is the id of a queued task, in a queue that workers read. The node posts hints for tasks from
other hosts, for tasks that have received resources, and for tasks whose worker has died. It has up
to four queues for each pool: a ring (first in, first out) and a bag (by rank) for tasks that any
host may run, and a ring and a bag for tasks that must stay on this host.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from hoplite_mp import _tasks
from hoplite_mp._common.object_states import TASK_HERE, UNCLAIMED

if TYPE_CHECKING:
    from hoplite_mp._node.objects.context import HostContext
    from hoplite_mp._node.tasks.inbound_tasks import InboundTasks
    from hoplite_mp._node.tasks.worker_pools import Pool

__all__ = ["CLOSED", "Hints"]

CLOSED = "the executor that ran its task is closed"

# Retry delays after a ring or bag was full: for one hint, and for a pool.
POST_AGAIN_S, POST_ALL_AGAIN_S = 0.05, 0.5


class HintsEvents(Protocol):
    """Requests from this component to the components above it."""

    def waits_for_resources(self, oid: int) -> bool:
        """Whether the task is waiting for resources. If so, its hint is posted later."""

    def has_resources(self, oid: int) -> bool:
        """Whether the task has received resources."""

    def may_leave(self) -> bool:
        """Whether tasks can be sent to other hosts."""

    def pools_named(self) -> set[int]:
        """The numbers of the pools that have tasks on other hosts."""

    def counts_on(self, slot: int) -> bool:
        """Whether a broadcast includes the worker in the slot (see `worker_broadcast.py`)."""


class Hints:
    """The base class of `Workers`, which announces tasks to workers."""

    pools: dict[int, Pool]
    events: HintsEvents

    def __init__(self, host: HostContext, inbound_tasks: InboundTasks) -> None:
        self.loop = host.loop
        self.client = host.client
        self.tasks = host.tasks
        self.inbound_tasks = inbound_tasks
        self.ranked = _tasks.Ranked(host.tasks)
        # (pool, whether its tasks must stay on this host) -> the node's own hint queue
        self.queues: dict[tuple[int, bool], int] = {}
        self.bags: dict[tuple[int, bool], int] = {}  # the same for ranked hints

    def queue(self, pool: int, here: bool = False) -> int:
        """The ring for a pool. here: selects the ring for tasks that must stay on this host."""
        if (pool, here) not in self.queues:
            self.queues[pool, here] = self.tasks.open_queue(pool, here)
        return self.queues[pool, here]

    def bag(self, pool: int, here: bool) -> int:
        """The bag for a pool. here: as for `queue`."""
        if (pool, here) not in self.bags:
            self.bags[pool, here] = self.ranked.open_bag(pool, here)
        return self.bags[pool, here]

    def forget_queues(self, pool: int) -> None:
        """Closes the queues for a pool that has been closed."""
        for queues in (self.queues, self.bags):
            for here in (False, True):
                queue = queues.pop((pool, here), None)
                if queue is not None:
                    self.tasks.close_queue(queue)

    def may_run_again(self, oid: int) -> bool:
        """Whether an ended task may run again to recompute its result. A call to an actor may not,
        because it would change the actor's state twice. A task of a forgotten pool may not, because
        the pool's number may be reused."""
        pool = self.pools.get(self.tasks.pool_of(oid))
        return pool is not None and not pool.actor

    def queue_for(self, number: int, here: bool) -> int | str:
        """Like `queue`, but returns an error text if no worker will run the pool's tasks."""
        pool = self.pools.get(number)
        if pool is None or pool.closing:
            return CLOSED
        return pool.broken or self.queue(number, here)

    def post(self, oid: int, here: bool) -> bool:
        """Announces a task to the workers of its pool. Returns False if the queue is full or all of
        the host's queues are taken."""
        pool = self.tasks.pool_of(oid)
        try:
            if self.tasks.task(oid)[3] & _tasks.RANKED_FLAG:
                return self.ranked.post(oid, self.bag(pool, here))
            return self.tasks.post(oid, self.queue(pool, here))
        except MemoryError:  # all queues are taken
            return False

    def announce(self, oid: int, here: bool) -> None:
        """Posts the hint of a task once the queue has space."""
        if self.client.state(oid) in UNCLAIMED and not self.post(oid, here):
            self.loop.call_later(POST_AGAIN_S, lambda: self.announce(oid, here))

    def post_queued(self, pool: int, tasks: list[int] | None = None) -> None:
        """Announces `tasks`, or all queued tasks of a pool, because a dead worker may have taken
        hints from the queues. Skips tasks that are waiting for resources."""
        for oid in self.client.queued_in(pool) if tasks is None else tasks:
            if self.events.waits_for_resources(oid):
                continue
            here = self.events.may_leave() and self.is_bound(oid)
            if not self.post(oid, here or self.events.has_resources(oid)):
                self.loop.call_later(POST_ALL_AGAIN_S, lambda: self.post_queued(pool))
                return

    def is_bound(self, oid: int) -> bool:
        """Whether only workers on this host may run the task."""
        if oid in self.inbound_tasks or not self.events.may_leave():
            return True
        return bool(self.tasks.task(oid)[3] & TASK_HERE)
