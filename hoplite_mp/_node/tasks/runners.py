"""The runners of one pool, ordered by the room that each has, so that no choice visits all of them.

Two heaps have an entry for each state that a runner was in; an entry whose runner has changed since
is dropped when it comes to the top. So a choice and a change cost a few steps, however many
runners there are.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

__all__ = ["AHEAD_TASKS", "COMMON_POOL", "AnyRunners", "Entry", "OneRunner", "Runner", "Runners"]

COMMON_POOL = 0
# How many tasks a runner gets beyond the number of its workers; these begin there without another
# message. Higher: no worker waits for the network. Lower: less is queued at a host that is slow.
AHEAD_TASKS = 2
# Entries that a heap may have for each runner before outdated entries are removed.
STALE_MAX = 4

Entry = tuple[int, int, int, int, "Runner"]  # -room, ended, order, stamp


@dataclass(slots=True, eq=False)
class Runner:
    """A pool of workers on another host, and the tasks that were handed to it."""

    host_id: int
    number: int
    workers: int
    pool: int = COMMON_POOL  # number of the pool on that host
    ahead: int = AHEAD_TASKS
    running: dict[int, Any] = field(default_factory=dict)  # oid -> holds on what the task names

    recalled: bool = False  # tasks were recalled, and no answer has come yet
    ended: int = 0  # orders runners by the end of their last task; 0: none has ended
    home: Runners | None = None
    order: int = 0  # in which it was added there
    stamp: int = 0  # of its present state; changes with `workers`, `running` and `ended`

    @property
    def free(self) -> int:
        """Workers without a task."""
        return max(0, self.workers - len(self.running))

    @property
    def room(self) -> int:
        return self.workers + self.ahead - len(self.running) if self.workers else 0

    def changed(self) -> None:
        """To be called after each change of `workers`, `running` or `ended`."""
        if self.home is not None:
            self.home.changed(self)


class Runners:
    """The runners of one pool."""

    def __init__(self) -> None:
        self._all: dict[int, list[Runner]] = {}  # node number -> its runners
        self._added = 0
        self._count = 0
        self._free: list[Entry] = []  # of runners with a worker without a task
        self._roomy: list[Entry] = []  # of runners with room
        self.crowded: dict[Runner, None] = {}  # runners with more tasks than workers
        self._counted: dict[Runner, int] = {}  # runner -> workers without a task, if any
        self.free = 0  # workers without a task
        self.visits = 0  # entries of the heaps that were looked at

    def __len__(self) -> int:
        return self._count

    def add(self, runner: Runner) -> None:
        self._added += 1
        self._count += 1
        runner.home, runner.order = self, self._added
        self._all.setdefault(runner.number, []).append(runner)
        self.changed(runner)

    def remove(self, runner: Runner) -> None:
        some = self._all[runner.number]
        some.remove(runner)
        if not some:
            del self._all[runner.number]
        self._count -= 1
        self._forget(runner)
        for heap in (self._free, self._roomy):  # nothing may keep the holds of its tasks
            heap[:] = [entry for entry in heap if entry[4] is not runner]
            heapq.heapify(heap)

    def close(self) -> None:
        """The pool is gone: drops all runners, so that none outlives it in a cycle."""
        for some in self._all.values():
            for runner in some:
                self._forget(runner)
        for table in (self._all, self._free, self._roomy):
            table.clear()
        self._count = 0

    def _forget(self, runner: Runner) -> None:
        runner.home = None
        runner.stamp += 1
        self.free -= self._counted.pop(runner, 0)
        self.crowded.pop(runner, None)

    def changed(self, runner: Runner) -> None:
        """Lists the runner by its present state."""
        runner.stamp += 1
        free = runner.free
        self.free += free - self._counted.pop(runner, 0)
        if free:
            self._counted[runner] = free
            self._push(self._free, runner)
        if runner.room > 0:
            self._push(self._roomy, runner)
        if len(runner.running) > runner.workers:
            self.crowded[runner] = None
        else:
            self.crowded.pop(runner, None)

    def suitable(self, idle: Callable[[], bool]) -> list[Entry] | None:
        """The heap whose runners may get a task now; None: no runner may get one.
        idle: is there an idle worker on this host? No task is queued behind another one while such
        a worker could begin it."""
        if self.free:
            return self._free
        return None if self._top(self._roomy) is None or idle() else self._roomy

    def best(self, heap: list[Entry], near: Mapping[int, int]) -> Runner:
        """The runner of that heap to which a task goes: first by the bytes of its arguments that
        are there (`near`, by node number), then by room; then the one whose last task ended first,
        because results of tasks that have just ended may still be using the links of the others."""
        queues_ahead = heap is self._roomy
        at = [
            one
            for number, nbytes in near.items()
            if nbytes
            for one in self._all.get(number, ())
            if (one.room if queues_ahead else one.free) > 0
        ]
        self.visits += len(at)
        if at:
            return min(at, key=lambda r: (-near[r.number], -r.room, r.ended, r.order))
        best = self._top(heap)
        assert best is not None
        return best

    def _push(self, heap: list[Entry], runner: Runner) -> None:
        heapq.heappush(heap, (-runner.room, runner.ended, runner.order, runner.stamp, runner))
        if len(heap) > STALE_MAX * max(self._count, 16):
            self.visits += len(heap)
            heap[:] = [entry for entry in heap if entry[3] == entry[4].stamp]
            heapq.heapify(heap)

    def _top(self, heap: list[Entry]) -> Runner | None:
        while heap:
            self.visits += 1
            *_, stamp, runner = heap[0]
            if stamp == runner.stamp:
                return runner
            heapq.heappop(heap)
        return None


class OneRunner:
    """In place of Runners, for a pool that is bound to a host: that host's runner, which belongs to
    the common pool."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner

    def __len__(self) -> int:
        return 1

    def remove(self, runner: Runner) -> None:
        """The host is gone, and so is the pool."""

    def close(self) -> None:
        """The pool is gone."""

    def suitable(self, idle: Callable[[], bool]) -> list[Entry] | None:
        """As of Runners; the heap is empty."""
        runner = self._runner
        return [] if runner.free or (runner.room > 0 and not idle()) else None

    def best(self, heap: list[Entry], near: Mapping[int, int]) -> Runner:
        """As of Runners."""
        return self._runner


AnyRunners = Runners | OneRunner
