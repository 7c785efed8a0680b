"""The hint queues of one process, and tasks that wait for room in them, or for their turn.

Why it exists: a queue is a ring of bounded length, so what does not fit waits here, in order. Calls
of an actor keep their order: one that waits for its arguments delays those behind it.
It must never know: what a task consists of, who runs it.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from hoplite_mp import _tasks
from hoplite_mp.client.ranking import Best
from hoplite_mp.protocol.actors import FailActorCalls
from hoplite_mp.protocol.resources import TakeResources

if TYPE_CHECKING:
    import threading
    from collections.abc import Container

    from hoplite_mp._tasks import Tasks
    from hoplite_mp.client.memory import Memory
    from hoplite_mp.client.pending import Pending

__all__ = ["HERE", "PLACE", "Queues"]

# Instead of a pool's number: the common pool, but only its workers on this host.
HERE = -1
POOL_ENDED = 4  # state of an actor's pool
# Stands among a call's missing arguments until all of these have been looked at.
PLACE = 0


class Queues:
    """The queues from this process to each pool that it sends tasks to."""

    def __init__(
        self, memory: Memory, tasks: Tasks, lock: threading.RLock, pending: Container[int]
    ) -> None:
        self._memory = memory
        self._tasks = tasks
        self._lock = lock
        self._pending = pending
        self._queues: dict[int, int] = {}  # pool -> queue
        self._bags: dict[int, int] = {}  # pool -> queue for tasks with a rank
        self.ranked = _tasks.Ranked(tasks)
        self._ordered: dict[int, int] = {}  # queue -> pool, for pools of actors
        # Queue -> tasks that wait for room in its ring, or behind a call that is not ready.
        self.overflow: dict[int, deque[Pending] | Best] = {}

    def of(self, pool: int) -> int:
        """The hint queue from this process to a pool."""
        queue = self._queues.get(pool)
        if queue is None:
            with self._lock:
                queue = self._queues.get(pool)
                if queue is None:
                    queue = self._tasks.open_queue(max(pool, 0), pool == HERE)
                    self._ordered.pop(queue, None)
                    self._queues[pool] = queue
        return queue

    def bag_of(self, pool: int) -> int:
        """The queue of ranked hints from this process to a pool."""
        with self._lock:
            bag = self._bags.get(pool)
            if bag is None:
                bag = self._bags[pool] = self.ranked.open_bag(max(pool, 0), pool == HERE)
            return bag

    def all_to(self, pool: int) -> set[int]:
        """The queues from this process to that pool."""
        with self._lock:
            return {one[pool] for one in (self._queues, self._bags) if pool in one}

    def close(self, pool: int) -> None:
        """Closes the queues to that pool, to which nothing more is sent."""
        with self._lock:
            for queues in (self._queues, self._bags):
                queue = queues.pop(pool, None)
                if queue is None:
                    continue
                self.overflow.pop(queue, None)  # these tasks are all cancelled
                if self._memory.client.usable:
                    self._tasks.close_queue(queue)

    def opened(self, pool: int) -> None:
        """That number has been given to a new pool. A queue from this process to an earlier pool of
        that number, an actor's, was closed when that actor ended."""
        with self._lock:
            for queues in (self._queues, self._bags):
                queue = queues.get(pool)
                if queue is not None and not self._tasks.owns_queue(queue, pool):
                    del queues[pool]

    def has_room(self, queue: int) -> bool:
        """Is there room, so that nothing waits for it?"""
        return queue not in self.overflow

    def post_later(self, pending: Pending) -> None:
        """Posts a task behind those that wait for room in the same queue."""
        with self._lock:
            if pending.queue in self._ordered and pending.needs:
                self.post_overflow()  # it has its place in the row already
                return
            if pending.rank is not None:
                if pending.queue not in self._bags.values():
                    return
                self.overflow.setdefault(pending.queue, Best()).append(pending)
                self.post_overflow()
                return
            if pending.queue not in self._queues.values():
                return  # its pool has been closed, and it is cancelled
            self.overflow.setdefault(pending.queue, deque()).append(pending)
            self.post_overflow()

    def post_overflow(self) -> None:
        """Posts tasks for which there is room and whose turn has come."""
        with self._lock:
            for queue, tasks in list(self.overflow.items()):
                posted = False
                while tasks:
                    task = tasks[0]
                    if task.oid in self._pending:
                        if task.missing or not self._post(task):
                            break
                        posted = True
                    tasks.popleft()
                else:
                    del self.overflow[queue]
                if posted and queue in self._ordered:
                    self.look_at_actor(self._ordered[queue])

    def _post(self, task: Pending) -> bool:
        """Posts a task; False if there is no room now."""
        if task.rank is None:
            return self._tasks.post(task.oid, task.queue)
        if task.demand is None:
            return self.ranked.post(task.oid, task.queue)
        self._memory.channel.tell(TakeResources(task.oid, task.demand))
        return True

    # -- actors --------------------------------------------------------------------------------

    def order(self, pool: int) -> None:
        """Makes tasks for that pool, an actor's, be posted in the order in which they are
        submitted."""
        queue = self._queues.get(pool)
        if (
            queue is not None
            and self._ordered.get(queue) == pool
            and self._tasks.owns_queue(queue, pool)
        ):
            return
        with self._lock:
            self.opened(pool)
            self._ordered[self.of(pool)] = pool

    def is_ordered(self, queue: int) -> bool:
        """Does the queue lead to an actor?"""
        return queue in self._ordered

    def keep_place(self, pending: Pending) -> None:
        """Puts a call into the row of its actor's calls before its arguments have been looked
        at."""
        with self._lock:
            pending.missing.add(PLACE)
            self.overflow.setdefault(pending.queue, deque()).append(pending)

    def look_at_actor(self, pool: int) -> None:
        """To be called after a call was posted: if the actor had ended before, the node did not
        see that call, and is asked to fail it."""
        if self._tasks.pool_state(pool) == POOL_ENDED:
            self._memory.channel.tell(FailActorCalls(pool))
