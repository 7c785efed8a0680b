"""The node's own hints: announcing tasks to the workers of this host.

A hint tells workers which task is queued. The node announces tasks of other hosts, tasks that were
given resources, and tasks whose worker has died. For that it has up to four queues for each pool:
one for hints in order (a ring) and one for ranked hints (a bag), and the same again for tasks that
must not be handed to other hosts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from hoplite_mp import _tasks
from hoplite_mp._common.object_states import FLAG_HERE, UNCLAIMED

if TYPE_CHECKING:
    from hoplite_mp._node.objects.context import HostContext
    from hoplite_mp._node.tasks.inbound_tasks import InboundTasks
    from hoplite_mp._node.tasks.pools import Pool

__all__ = ["CLOSED", "Hints"]

CLOSED = "the executor that ran its task is closed"

# Delays after a ring or a bag was full: for posting a single hint, and all hints of a pool, again.
POST_AGAIN_S, POST_ALL_AGAIN_S = 0.05, 0.5


class HintsEvents(Protocol):
    """What this component reports to components above it, and asks of them."""

    def waits_for_resources(self, oid: int) -> bool:
        """Whether the task waits for resources; it is announced when it gets them."""

    def has_resources(self, oid: int) -> bool:
        """Whether the task was given resources."""

    def may_leave(self) -> bool:
        """Whether tasks can be handed to other hosts."""

    def pools_named(self) -> set[int]:
        """Numbers of pools that tasks on other hosts name."""

    def counts_on(self, slot: int) -> bool:
        """Whether a round counts on the worker in that slot; see `worker_broadcast.py`."""


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
        # (pool, only for workers of this host) -> the node's own hint queue
        self.queues: dict[tuple[int, bool], int] = {}
        self.bags: dict[tuple[int, bool], int] = {}  # the same for ranked hints

    def queue(self, pool: int, here: bool = False) -> int:
        """The ring to a pool. `here`: the one for tasks that must not be handed to other hosts."""
        if (pool, here) not in self.queues:
            self.queues[pool, here] = self.tasks.open_queue(pool, here)
        return self.queues[pool, here]

    def bag(self, pool: int, here: bool) -> int:
        """The bag to a pool; as queue(), for ranked hints."""
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
        """Whether a task that has ended may be run once more for its result. Calls of actors may
        not, because they would be applied to the actor a second time. Tasks of a pool that is
        forgotten may not, because its number may be given to another pool."""
        pool = self.pools.get(self.tasks.pool_of(oid))
        return pool is not None and not pool.actor

    def queue_for(self, number: int, here: bool) -> int | str:
        """As queue(); or the reason, if no worker will run that pool's tasks."""
        pool = self.pools.get(number)
        if pool is None or pool.closing:
            return CLOSED
        return pool.broken or self.queue(number, here)

    def post(self, oid: int, here: bool) -> bool:
        """Announces a task to the workers of its pool. False: there is no room for the hint now, or
        all of the host's queues are taken."""
        pool = self.tasks.pool_of(oid)
        try:
            if self.tasks.task(oid)[3] & _tasks.RANKED_FLAG:
                return self.ranked.post(oid, self.bag(pool, here))
            return self.tasks.post(oid, self.queue(pool, here))
        except MemoryError:  # no queue is left
            return False

    def announce(self, oid: int, here: bool) -> None:
        """Posts the hint of a task as soon as there is room for it."""
        if self.client.state(oid) in UNCLAIMED and not self.post(oid, here):
            self.loop.call_later(POST_AGAIN_S, lambda: self.announce(oid, here))

    def post_queued(self, pool: int, tasks: list[int] | None = None) -> None:
        """Announces all queued tasks of a pool, or `tasks`, because a worker that has died may have
        taken hints from the queues. Tasks that wait for resources are left out."""
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
        return bool(self.tasks.task(oid)[3] & FLAG_HERE)
