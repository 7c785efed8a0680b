"""One process's hint queues, and the tasks that are waiting for space or for their turn.

A queue is a bounded ring of hints, which tell a pool's workers that a task is ready. Tasks whose
hints do not fit wait in order. Calls to an actor keep their order: a call that is waiting for its
arguments delays all later calls. Messages to the node are sent under the lock, which preserves
their order; `Channel.tell` acquires no other lock. A request that waits for its reply must not be
made under the lock.
"""

from __future__ import annotations

import heapq
from collections import deque
from typing import TYPE_CHECKING, Any, Protocol

from hoplite_mp import _tasks
from hoplite_mp._protocol.actors import FailActorCalls
from hoplite_mp._protocol.resources import AcquireResources

if TYPE_CHECKING:
    import threading
    from collections.abc import Container

    from hoplite_mp._client.memory import Memory
    from hoplite_mp._common.ref import ObjectRef
    from hoplite_mp._planner.resources import Demand
    from hoplite_mp._tasks import Tasks

__all__ = ["HERE", "PLACE", "SHUT_DOWN", "Pending", "Queues"]


# A value in place of a pool's number: the common pool's workers on this host.
HERE = -1
SHUT_DOWN = "cannot schedule new futures after shutdown: this executor takes no new tasks"
POOL_ENDED = 4  # state of the pool of an ended actor
# A placeholder among a call's missing arguments until `_depend` has checked all of them, so that
# the call is not posted earlier.
PLACE = 0


class Queues:
    """The queues from this process to each pool that it sends tasks to."""

    def __init__(
        self, memory: Memory, tasks: Tasks, lock: threading.RLock, pending: Container[int]
    ) -> None:
        self._memory = memory
        self._tasks = tasks
        self.lock = lock
        self._pending = pending
        self._queues: dict[int, int] = {}  # pool -> queue
        # The number of pools that this process has closed, and the value of this number when each
        # pool was closed. From these, `was_closed` finds out whether a queue that was looked up
        # earlier may now belong to another process, and lead to another pool.
        self.closings = 0
        self._closed: dict[int, int] = {}
        self._bags: dict[int, int] = {}  # pool -> queue for tasks with a rank
        self.ranked = _tasks.Ranked(tasks)
        self._ordered: dict[int, int] = {}  # queue -> pool, for pools of actors
        # Queue -> tasks that are waiting for space in its ring, or behind a call that is not ready.
        self.overflow: dict[int, deque[Pending] | Best] = {}

    def of(self, pool: int) -> int:
        """The hint queue from this process to a pool."""
        queue = self._queues.get(pool)
        if queue is None:
            with self.lock:
                queue = self._queues.get(pool)
                if queue is None:
                    queue = self._tasks.open_queue(max(pool, 0), pool == HERE)
                    self._ordered.pop(queue, None)
                    self._queues[pool] = queue
        return queue

    def bag_of(self, pool: int) -> int:
        """The queue of ranked hints from this process to a pool."""
        with self.lock:
            bag = self._bags.get(pool)
            if bag is None:
                bag = self._bags[pool] = self.ranked.open_bag(max(pool, 0), pool == HERE)
            return bag

    def all_to(self, pool: int) -> set[int]:
        """The queues from this process to that pool."""
        with self.lock:
            return {one[pool] for one in (self._queues, self._bags) if pool in one}

    def close(self, pool: int) -> None:
        """Closes the queues to a pool that receives no more tasks."""
        with self.lock:
            closed = [queues.pop(pool, None) for queues in (self._queues, self._bags)]
            # Set after the removal: a thread that reads the new number must not find one of these
            # queues.
            self.closings += 1
            self._closed[pool] = self.closings
            others = {*self._queues.values(), *self._bags.values()}
            for queue in closed:
                if queue is None or queue in others:  # in others: reused for another pool
                    continue
                self.overflow.pop(queue, None)  # these tasks are all cancelled
                if self._memory.client.usable:
                    self._tasks.close_queue(queue)

    def was_closed(self, pool: int, closings: int) -> bool:
        """Whether that pool was closed after `self.closings` had the value `closings`. Called under
        the lock."""
        return self._closed.get(pool, 0) > closings

    def opened(self, pool: int) -> None:
        """Called when a new pool reuses the number of an earlier actor's pool. Removes the queues
        to the earlier pool, which were closed when that actor exited."""
        with self.lock:
            for queues in (self._queues, self._bags):
                queue = queues.get(pool)
                if queue is not None and not self._tasks.owns_queue(queue, pool):
                    del queues[pool]

    def has_room(self, queue: int) -> bool:
        """Whether no task is waiting for space or its turn in this queue."""
        return queue not in self.overflow

    def post_later(self, pending: Pending) -> None:
        """Posts a task behind the tasks that are waiting for space in the same queue."""
        with self.lock:
            if pending.queue in self._ordered and pending.needs:
                self.post_overflow()  # `keep_place` has already queued it
                return
            if pending.rank is not None:
                if pending.queue not in self._bags.values():
                    return
                self.overflow.setdefault(pending.queue, Best()).append(pending)
                self.post_overflow()
                return
            if pending.queue not in self._queues.values():
                return  # its pool has been closed, which cancels the task
            self.overflow.setdefault(pending.queue, deque()).append(pending)
            self.post_overflow()

    def post_overflow(self) -> None:
        """Posts waiting tasks as far as there is space and their turn has come."""
        with self.lock:
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
        """Posts a task. Returns False if there is no space now."""
        if task.rank is None:
            return self._tasks.post(task.oid, task.queue)
        if task.demand is None:
            return self.ranked.post(task.oid, task.queue)
        self._memory.channel.tell(AcquireResources(task.oid, task.demand))
        return True

    # -- actors --------------------------------------------------------------------------------

    def order(self, pool: int) -> None:
        """Causes calls to an actor to be posted to its pool in the order of submission."""
        queue = self._queues.get(pool)
        if (
            queue is not None
            and self._ordered.get(queue) == pool
            and self._tasks.owns_queue(queue, pool)
        ):
            return
        with self.lock:
            self.opened(pool)
            self._ordered[self.of(pool)] = pool

    def is_ordered(self, queue: int) -> bool:
        """Whether the queue leads to an actor."""
        return queue in self._ordered

    def keep_place(self, pending: Pending) -> None:
        """Queues a call behind its actor's earlier calls before its arguments have been checked."""
        with self.lock:
            pending.missing.add(PLACE)
            self.overflow.setdefault(pending.queue, deque()).append(pending)

    def look_at_actor(self, pool: int) -> None:
        """Makes the node fail calls that were posted after their actor had exited, because the node
        may have missed them."""
        if self._tasks.pool_state(pool) == POOL_ENDED:
            self._memory.channel.tell(FailActorCalls(pool))


# The submitter's record of each unfinished task.
#
# The lists of tasks that are waiting for arguments, or for space in a queue, contain these records.


class Settles(Protocol):
    """The interface of a Future for the code that processes the completion of its task."""

    _oid: int
    _kept: memoryview | None  # the payload, kept when the cluster closed
    _unkept: str  # the reason why the payload could not be kept
    _reports: bool  # whether an unread failure is reported when the cluster is closed

    def cancelled(self) -> bool:
        """Whether the task was cancelled."""

    def _complete(self, cancelled: bool, failed: bool = False) -> None:
        """Called when the task is done."""

    def _settle(self, cancelled: bool, failed: bool, error: BaseException | None = None) -> bool:
        """Settles the Future when the task is done, or will never be done. If the method returns
        True, the caller must then call `_tell`."""

    def _tell(self) -> None:
        """Calls the Future's callbacks."""

    @property
    def _is_unread(self) -> bool:
        """Whether this process still needs the store to read the result."""


class Pending:
    """One task, until it is done."""

    __slots__ = ("demand", "future", "holds", "missing", "needs", "oid", "queue", "rank")

    def __init__(self, oid: int, queue: int, future: Settles | None, holds: Any) -> None:
        self.oid = oid
        self.queue = queue
        self.future = future
        self.holds = holds
        self.missing: set[int] = set()  # dependencies that are not known to be done
        self.needs: list[ObjectRef[Any]] = []  # all its dependencies
        # (priority, inherited priority) of a task whose hint is in a bag (see below)
        self.rank: tuple[int, int] | None = None
        # The resources that the task needs. The node decides when such a task begins.
        self.demand: Demand | None = None


# Priorities of tasks: a task's level, and the order of tasks that are waiting for space.
#
# Tasks with a priority are posted to bags (cext/shm_bag.h) instead of the ordinary queues. A bag
# has limited space. Tasks that do not fit wait in their process, the highest priority first.


NO_FLOOR: int = _tasks.NO_FLOOR


def rank_of(
    priority: int, inherited_priority: int, demand: Demand | None
) -> tuple[int, int] | None:
    """(priority, inherited priority) of a task that is submitted now; None if the task needs no
    rank. inherited_priority: the level of the submitting task, or NO_FLOOR."""
    return (
        (priority, inherited_priority)
        if priority or inherited_priority > 0 or demand is not None
        else None
    )


def level_of(rank: tuple[int, int]) -> int:
    """The task's level: its priority, but at least the level of the submitting task, which may be
    waiting for this task."""
    return max(rank)


class Best:
    """A priority queue with the interface of a deque: the first item has the highest priority."""

    def __init__(self) -> None:
        self._heap: list[tuple[tuple[int, ...], Pending]] = []
        self._count = 0

    def __bool__(self) -> bool:
        return bool(self._heap)

    def __getitem__(self, at: int) -> Pending:
        return self._heap[at][1]

    def append(self, pending: Pending) -> None:
        assert pending.rank is not None
        self._count += 1
        # A task with a demand is only announced to the node. It needs no space, so it is first.
        first = pending.demand is None
        key = (first, -level_of(pending.rank), -pending.rank[0], self._count)
        heapq.heappush(self._heap, (key, pending))

    def popleft(self) -> Pending:
        return heapq.heappop(self._heap)[1]
