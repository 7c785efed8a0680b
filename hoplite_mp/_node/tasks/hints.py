"""The node's own hints, which announce tasks to the workers of this host.

A hint names a queued task. The node posts hints of tasks of other hosts, of tasks that were given
resources, and of tasks whose worker has died. It has up to four queues for each pool: one for hints
in order (a ring) and one for ranked hints (a bag), each for all tasks and for tasks that must stay
on this host.
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
    """Reports and requests of this component to the components above it."""

    def waits_for_resources(self, oid: int) -> bool:
        """Whether the task waits for resources. Its hint is posted when it gets them."""

    def has_resources(self, oid: int) -> bool:
        """Whether the task was given resources."""

    def may_leave(self) -> bool:
        """Whether tasks can be handed to other hosts."""

    def pools_named(self) -> set[int]:
        """Numbers of pools that occur in tasks on other hosts."""

    def counts_on(self, slot: int) -> bool:
        """Whether a broadcast includes the worker in the slot; see `worker_broadcast.py`."""


class Hints:
    """The part of `Workers` that announces tasks."""

    pools: dict[int, Pool]
    events: HintsEvents

    def __init__(self, host: HostContext, inbound_tasks: InboundTasks) -> None:
        self.loop = host.loop
        self.client = host.client
        self.tasks = host.tasks
        self.inbound_tasks = inbound_tasks
        self.ranked = _tasks.Ranked(host.tasks)
        # (pool, whether for workers of this host only) -> the node's own hint queue
        self.queues: dict[tuple[int, bool], int] = {}
        self.bags: dict[tuple[int, bool], int] = {}  # the same for ranked hints

    def queue(self, pool: int, here: bool = False) -> int:
        """The ring to a pool. `here`: the ring for tasks that must stay on this host."""
        if (pool, here) not in self.queues:
            self.queues[pool, here] = self.tasks.open_queue(pool, here)
        return self.queues[pool, here]

    def bag(self, pool: int, here: bool) -> int:
        """The bag to a pool; see queue()."""
        if (pool, here) not in self.bags:
            self.bags[pool, here] = self.ranked.open_bag(pool, here)
        return self.bags[pool, here]

    def forget_queues(self, pool: int) -> None:
        """A pool has ended."""
        for queues in (self.queues, self.bags):
            for here in (False, True):
                queue = queues.pop((pool, here), None)
                if queue is not None:
                    self.tasks.close_queue(queue)

    def may_run_again(self, oid: int) -> bool:
        """Whether an ended task may be run again for its result. Calls of actors may not, because
        they would be applied to the actor twice. Tasks of a forgotten pool may not, because its
        number may be reused."""
        pool = self.pools.get(self.tasks.pool_of(oid))
        return pool is not None and not pool.actor

    def queue_for(self, number: int, here: bool) -> int | str:
        """As queue(), or the reason why no worker will run the pool's tasks."""
        pool = self.pools.get(number)
        if pool is None or pool.closing:
            return CLOSED
        return pool.broken or self.queue(number, here)

    def post(self, oid: int, here: bool) -> bool:
        """Announces a task to the workers of its pool. False: the queue is full, or all of the
        host's queues are taken."""
        pool = self.tasks.pool_of(oid)
        try:
            if self.tasks.task(oid)[3] & _tasks.RANKED_FLAG:
                return self.ranked.post(oid, self.bag(pool, here))
            return self.tasks.post(oid, self.queue(pool, here))
        except MemoryError:  # no queue is left
            return False

    def announce(self, oid: int, here: bool) -> None:
        """Posts the hint of a task once the queue has space."""
        if self.client.state(oid) in UNCLAIMED and not self.post(oid, here):
            self.loop.call_later(POST_AGAIN_S, lambda: self.announce(oid, here))

    def post_queued(self, pool: int, tasks: list[int] | None = None) -> None:
        """Announces all queued tasks of a pool, or `tasks`, because a dead worker may have taken
        hints from the queues. Skips tasks that wait for resources."""
        for oid in self.client.queued_in(pool) if tasks is None else tasks:
            if self.events.waits_for_resources(oid):
                continue
            here = self.events.may_leave() and self.is_bound(oid)
            if not self.post(oid, here or self.events.has_resources(oid)):
                self.loop.call_later(POST_ALL_AGAIN_S, lambda: self.post_queued(pool))
                return

    def is_bound(self, oid: int) -> bool:
        """Whether only workers of this host may run the task."""
        if oid in self.inbound_tasks or not self.events.may_leave():
            return True
        return bool(self.tasks.task(oid)[3] & TASK_HERE)
