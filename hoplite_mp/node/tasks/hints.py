"""The node's own hints to workers of this host: for tasks that it sends, or announces again.

Why it exists: tasks of other hosts, tasks that have been given resources, and tasks whose worker
has died are announced by the node. A pool has up to four rows for that: hints in order (a ring) and
ranked ones (a bag), and of each one that is not to be sent on to other hosts.
It must never know: who runs what, why a task is queued.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from hoplite_mp import _tasks
from hoplite_mp.client.submitter import FLAG_HERE
from hoplite_mp.headers import UNCLAIMED

if TYPE_CHECKING:
    from hoplite_mp.node.objects.context import HostContext
    from hoplite_mp.node.tasks.guests import Guests
    from hoplite_mp.node.tasks.pools import Pool

__all__ = ["Hints"]

# After a ring or a bag was full: until one hint is tried again, and until all of a pool are.
POST_AGAIN_S, POST_ALL_AGAIN_S = 0.05, 0.5


class Above(Protocol):
    """What rooms above this one know of tasks."""

    def waits_for_resources(self, oid: int) -> bool:
        """It is announced when it is given them."""

    def has_resources(self, oid: int) -> bool:
        """It has been given some of this host."""

    def may_leave(self) -> bool:
        """Could a task go to another host?"""


class Hints:
    """The part of `Workers` that announces tasks."""

    pools: dict[int, Pool]
    above: Above

    def __init__(self, host: HostContext, guests: Guests) -> None:
        self.loop = host.loop
        self.client = host.client
        self.tasks = host.tasks
        self.guests = guests
        self.ranked = _tasks.Ranked(host.tasks)
        # (pool, only for workers of this host) -> the node's own hint queue
        self.queues: dict[tuple[int, bool], int] = {}
        self.bags: dict[tuple[int, bool], int] = {}  # the same, of ranked hints

    def queue(self, pool: int, here: bool = False) -> int:
        """`here`: for tasks of other hosts, which are not to be sent on."""
        if (pool, here) not in self.queues:
            self.queues[pool, here] = self.tasks.open_queue(pool, here)
        return self.queues[pool, here]

    def bag(self, pool: int, here: bool) -> int:
        """As queue(), of ranked hints."""
        if (pool, here) not in self.bags:
            self.bags[pool, here] = self.ranked.open_bag(pool, here)
        return self.bags[pool, here]

    def forget_queues(self, pool: int) -> None:
        """That pool has ended."""
        for queues in (self.queues, self.bags):
            for here in (False, True):
                queue = queues.pop((pool, here), None)
                if queue is not None:
                    self.tasks.close_queue(queue)

    def queue_for(self, number: int, here: bool) -> int | str:
        """As queue(), or why nobody will run that pool's tasks."""
        pool = self.pools.get(number)
        if pool is None or pool.closing:
            return "the executor that ran its task is closed"
        return pool.broken or self.queue(number, here)

    def post(self, oid: int, here: bool) -> bool:
        """Announces a task to the workers of its pool; False: there is no room for the hint."""
        pool = self.tasks.pool_of(oid)
        if self.tasks.task(oid)[3] & _tasks.RANKED_FLAG:
            return self.ranked.post(oid, self.bag(pool, here))
        return self.tasks.post(oid, self.queue(pool, here))

    def announce(self, oid: int, here: bool) -> None:
        """Posts the hint as soon as there is room for it."""
        if self.client.state(oid) in UNCLAIMED and not self.post(oid, here):
            self.loop.call_later(POST_AGAIN_S, lambda: self.announce(oid, here))

    def post_queued(self, pool: int, tasks: list[int] | None = None) -> None:
        """The dead one may have taken hints with it: all queued tasks, or these, are announced, but
        those that wait for resources."""
        for oid in self.client.queued_in(pool) if tasks is None else tasks:
            if self.above.waits_for_resources(oid):
                continue
            here = self.above.may_leave() and self.is_bound(oid)
            if not self.post(oid, here or self.above.has_resources(oid)):
                self.loop.call_later(POST_ALL_AGAIN_S, lambda: self.post_queued(pool))
                return

    def is_bound(self, oid: int) -> bool:
        """Must workers of this host run it?"""
        if oid in self.guests or not self.above.may_leave():
            return True
        return bool(self.tasks.task(oid)[3] & FLAG_HERE)
