"""Outbound tasks: tasks of this host that run on other hosts.

A runner is a pool of workers on another host. The node claims queued tasks of this host, as a local
worker does, and sends each to a runner with free capacity. The result is written to the task's
header (its entry in shared memory), or the header records that the runner's host has the result.
Submitters therefore need not know where a task has run. A task that no runner can accept stays
queued until any worker is free.
"""

from __future__ import annotations

import heapq
import logging
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from hoplite_mp import _serialize, _tasks, errors
from hoplite_mp._common import ids
from hoplite_mp._common.object_states import NODE_SLOT, STATE
from hoplite_mp._protocol.fields import NO_OBJECT
from hoplite_mp._protocol.peers import CancelTask, CloseRemotePool, RecallTasks, Release, RunTask
from hoplite_mp.errors import StoreFullError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from hoplite_mp._node.objects.imports import Imports
    from hoplite_mp._node.objects.remote_objects import RemoteObjects
    from hoplite_mp._node.objects.results import ResultWriter
    from hoplite_mp._planner.resources import Demand
    from hoplite_mp._protocol.messages import Member
    from hoplite_mp._protocol.peers import PeerMessage, TaskEnded

__all__ = [
    "AHEAD_TASKS",
    "COMMON_POOL",
    "AnyRunners",
    "Entry",
    "OneRunner",
    "OutboundTasks",
    "Runner",
    "Runners",
]

# `Runners` orders the runners of one pool by free capacity, so that choosing one does not visit all
# of them. When a runner changes, a new entry is pushed onto each of the two heaps to which the
# runner belongs. Outdated entries are dropped when they reach the top.


COMMON_POOL = 0
# The number of tasks sent to a runner beyond its number of workers. These tasks can begin without
# another message. Higher: workers wait less often for the network. Lower: fewer tasks are queued at
# a slow host.
AHEAD_TASKS = 2
# The number of entries per runner at which outdated entries are removed from a heap.
STALE_MAX = 4

Entry = tuple[int, int, int, int, "Runner"]  # (-capacity, ended, order, stamp, runner)


@dataclass(slots=True, eq=False)
class Runner:
    """A pool of workers on another host, and the tasks sent to it."""

    host_id: int
    number: int
    workers: int
    pool: int = COMMON_POOL  # number of the pool on that host
    ahead: int = AHEAD_TASKS
    running: dict[int, Any] = field(default_factory=dict)  # task -> holds on its arguments

    recalled: bool = False  # tasks were recalled, and the host has not answered yet
    ended: int = 0  # when its last task ended, as a sequence number; 0: no task has ended
    home: Runners | None = None
    order: int = 0  # sequence number of this runner's addition
    stamp: int = 0  # incremented when `workers`, `running` or `ended` changes

    @property
    def free(self) -> int:
        """The number of workers without a task."""
        return max(0, self.workers - len(self.running))

    @property
    def capacity(self) -> int:
        return self.workers + self.ahead - len(self.running) if self.workers else 0

    def changed(self) -> None:
        """Must be called after each change to `workers`, `running` or `ended`."""
        if self.home is not None:
            self.home.changed(self)


class Runners:
    """The runners of one pool."""

    def __init__(self) -> None:
        self._all: dict[int, list[Runner]] = {}  # node number -> its runners
        self._added = 0
        self._count = 0
        self._free: list[Entry] = []  # heap of runners with an idle worker
        self._with_capacity: list[Entry] = []  # heap of runners with capacity
        self.crowded: dict[Runner, None] = {}  # runners with more tasks than workers
        self._counted: dict[Runner, int] = {}  # runner -> number of its idle workers, if above 0
        self.free = 0  # number of idle workers
        self.visits = 0  # number of heap entries visited

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
        # A remaining entry would keep the runner alive, and with it the arguments of its tasks.
        for heap in (self._free, self._with_capacity):
            heap[:] = [entry for entry in heap if entry[4] is not runner]
            heapq.heapify(heap)

    def close(self) -> None:
        """Drops all runners of a closed pool, so that no reference cycle keeps them alive."""
        for some in self._all.values():
            for runner in some:
                self._forget(runner)
        for table in (self._all, self._free, self._with_capacity):
            table.clear()
        self._count = 0

    def _forget(self, runner: Runner) -> None:
        runner.home = None
        runner.stamp += 1
        self.free -= self._counted.pop(runner, 0)
        self.crowded.pop(runner, None)

    def changed(self, runner: Runner) -> None:
        """Updates the heaps and counts after a change of the runner's state."""
        runner.stamp += 1
        free = runner.free
        self.free += free - self._counted.pop(runner, 0)
        if free:
            self._counted[runner] = free
            self._push(self._free, runner)
        if runner.capacity > 0:
            self._push(self._with_capacity, runner)
        if len(runner.running) > runner.workers:
            self.crowded[runner] = None
        else:
            self.crowded.pop(runner, None)

    def suitable(self, idle: Callable[[], bool]) -> list[Entry] | None:
        """The heap of runners that may receive a task now, or None if no runner may. idle: a
        function that returns whether this host has an idle worker. If it has one, only runners with
        an idle worker may receive a task."""
        if self.free:
            return self._free
        return None if self._top(self._with_capacity) is None or idle() else self._with_capacity

    def best(self, heap: list[Entry], near: Mapping[int, int]) -> Runner:
        """Chooses the runner for the next task. A node with more bytes of the task's arguments
        (`near`, by node number) comes first, then a runner with more free capacity, then a runner
        whose last task ended earlier, because a recent result may still be using its runner's
        link."""
        queues_ahead = heap is self._with_capacity
        at = [
            runner
            for number, nbytes in near.items()
            if nbytes
            for runner in self._all.get(number, ())
            if (runner.capacity if queues_ahead else runner.free) > 0
        ]
        self.visits += len(at)
        if at:
            return min(at, key=lambda r: (-near[r.number], -r.capacity, r.ended, r.order))
        best = self._top(heap)
        assert best is not None
        return best

    def _push(self, heap: list[Entry], runner: Runner) -> None:
        heapq.heappush(heap, (-runner.capacity, runner.ended, runner.order, runner.stamp, runner))
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
    """Used instead of Runners for a pool that is bound to a host. The only runner is that host's
    common pool."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner

    def __len__(self) -> int:
        return 1

    def remove(self, runner: Runner) -> None:
        """Does nothing, because a bound pool is closed when its host is lost."""

    def close(self) -> None:
        """Does nothing."""

    def suitable(self, idle: Callable[[], bool]) -> list[Entry] | None:
        """Like `Runners.suitable`, but with an empty heap."""
        runner = self._runner
        return [] if runner.free or (runner.capacity > 0 and not idle()) else None

    def best(self, heap: list[Entry], near: Mapping[int, int]) -> Runner:
        """Like `Runners.best`."""
        return self._runner


AnyRunners = Runners | OneRunner


NONE = Runners()  # for a pool without workers on other hosts
_log = logging.getLogger("hoplite_mp")


class OutboundTasksEvents(Protocol):
    """Reports and requests from this component to the components above it."""

    def post(self, oid: int) -> None:
        """Announces a requeued task to all workers once its resources are granted."""

    def delay(self, oid: int) -> None:
        """Starts the delay before a task's next attempt."""

    def pool_deserted(self, pool: int, why: str) -> None:
        """Called when no other host runs tasks of the pool any longer."""

    def remote_workers_lost(self, pool: int) -> None:
        """Called when a pool has lost its workers on another host, because that host is gone or
        accepts no more tasks."""

    def sends_on(self, output_owner: int, host_id: int) -> None:
        """Called when a task with this output owner is sent to the host."""

    def ends_elsewhere(self, oid: int) -> None:
        """Called when only another host has the task's result, before the task is marked as
        done."""

    def holds_inner(self, oid: int, holds: list[Any]) -> None:
        """Keeps the refs inside a result alive until the result's owner holds them itself."""

    def lost_call(self, oid: int, name: str, number: int) -> Exception | None:
        """The error for a call to an actor on a lost host, or None for any other task."""

    def is_remote_actor(self, pool: int) -> bool:
        """Whether the pool represents an actor on another host."""

    def demand_of(self, oid: int) -> Demand:
        """The resources that are reserved for the task at its runner."""

    def target_of(self, oid: int) -> bytes:
        """The lost result that the task reconstructs (see RunTask)."""

    def was_full(self, oid: int, host_id: int) -> None:
        """Called when the runner has refused the task because its resources are in use."""


class OutboundTasks:
    """All tasks of this host that run on other hosts."""

    def __init__(
        self,
        results: ResultWriter,
        imports: Imports,
        remote_objects: RemoteObjects,
        send: Callable[[int, PeerMessage], bool],
        events: OutboundTasksEvents,
    ) -> None:
        self.results = results
        self.client = results.client
        self.tasks = results.tasks
        self.imports = imports
        self.remote_objects = remote_objects
        self.send = send
        self.events = events
        self.runners: dict[int, Runner] = {}  # common pools of other hosts, by host id
        # Pool -> its own workers on other hosts; for a bound pool, the common pool of its host.
        self.remote_runners: dict[int, list[Runner]] = {}
        self._common = Runners()  # contains the values of `runners`
        self._of_pool: dict[int, AnyRunners] = {}  # contains the runners in `remote_runners`
        self.first: dict[int, deque[int]] = {}  # pool -> queued tasks that precede all others
        self.where: dict[int, Runner] = {}  # task -> its runner
        self.ranked = _tasks.Ranked(self.tasks)
        self._offered: set[int] = set()  # pools in which the node counts as an idle worker
        self._ends = 0  # number of tasks that have ended on other hosts
        self.capacity = 0  # number of workers of all runners
        self.retried = 0  # number of tasks that were requeued because their host was lost

    # -- runners -------------------------------------------------------------------------------

    def set_runner(self, host_id: int, number: int, workers: int) -> None:
        """Adds the common pool of a host that has joined, or updates its number of workers."""
        known = self.runners.get(host_id)
        if known is None:
            self.runners[host_id] = runner = Runner(host_id, number, workers)
            self._common.add(runner)
            self.capacity += workers
        else:
            self.capacity += workers - known.workers
            known.workers = workers
            known.changed()
        self.hand_out()

    def peer_lost(self, member: Member) -> None:
        """See `lose_runner`."""
        self.lose_runner(member.host_id)

    def lose_runner(self, host_id: int) -> None:
        """Handles the loss of a host: its tasks are queued again, or fail."""
        runner = self.runners.pop(host_id, None)
        if runner is None:
            return
        self._common.remove(runner)
        self.capacity -= runner.workers
        for pool, runners in list(self.remote_runners.items()):
            what = "to which it is bound" if runner in runners else "which ran its workers"
            lost = any(other.host_id == host_id and other is not runner for other in runners)
            for other in [other for other in runners if other.host_id == host_id]:
                runners.remove(other)
                self._of_pool[pool].remove(other)
            if not runners:
                del self.remote_runners[pool]
                del self._of_pool[pool]
                self.events.pool_deserted(pool, f"node h{runner.number}, {what}, is gone")
            if lost:
                self.events.remote_workers_lost(pool)
        for oid, one in list(self.where.items()):
            if one.host_id == host_id:
                self._lost(oid, one.number)

    def drain(self, host_id: int) -> None:
        """Handles a leaving host, which finishes its running tasks and accepts no more tasks except
        calls to its actors."""
        for pool, runners in list(self.remote_runners.items()):
            if self.events.is_remote_actor(pool):
                continue
            leaving = [
                runner
                for runner in runners
                if runner.host_id == host_id and runner.pool != COMMON_POOL
            ]
            for runner in leaving:
                runner.workers = 0
                runner.changed()
            if leaving and len(leaving) == len(runners):
                self.events.pool_deserted(
                    pool, f"node h{leaving[0].number}, which runs its workers, is leaving"
                )
            if leaving:
                self.events.remote_workers_lost(pool)

    def bind(self, pool: int, number: int) -> bool:
        """Binds a pool to a node, which then runs all tasks of the pool. Returns False if the node
        is gone."""
        for runner in self.runners.values():
            if runner.number == number:
                self.remote_runners[pool] = [runner]
                self._of_pool[pool] = OneRunner(runner)
                self.hand_out()
                return True
        return False

    def bound_to(self, pool: int) -> int | None:
        """The id of the host to which the pool is bound, or None if it is not bound."""
        runners = self.remote_runners.get(pool)
        return runners[0].host_id if runners and runners[0].pool == COMMON_POOL else None

    def add_remote(
        self,
        pool: int,
        host_id: int,
        there: int,
        workers: int,
        ahead: int,
        first: Iterable[int] = (),
    ) -> None:
        """Adds workers on another host to a pool. there: the number of their pool on that host.
        ahead: the number of tasks to send them beyond the number of workers. first: queued tasks
        that precede all others."""
        if first:
            self.first[pool] = deque(first)
        number = self.runners[host_id].number
        runner = Runner(host_id, number, workers, there, ahead)
        self.remote_runners.setdefault(pool, []).append(runner)
        runners = self._of_pool.get(pool)
        if not isinstance(runners, Runners):
            runners = self._of_pool[pool] = Runners()
        runners.add(runner)
        self.hand_out()

    def close_remote(self, pool: int, kill: bool) -> None:
        """Stops the pool's workers on other hosts."""
        for runner in list(self.remote_runners.get(pool, ())):
            if runner.pool != COMMON_POOL:
                self.send(runner.host_id, CloseRemotePool(runner.pool, kill))

    def forget_pool(self, pool: int) -> None:
        """Forgets a pool that has been closed."""
        self.remote_runners.pop(pool, None)
        if pool in self._of_pool:
            self._of_pool.pop(pool).close()
        self.first.pop(pool, None)
        if pool in self._offered:
            self._offered.discard(pool)
            self.tasks.offer(pool, False)

    def hand_out(self) -> None:
        """Sends queued tasks to runners that can accept them."""
        if not (self.capacity or self._offered or self.remote_runners):
            return
        for pool in (COMMON_POOL, *self.remote_runners):
            runners = self._runners_of(pool)
            suitable = self._suitable(pool, runners)
            if suitable is not None:
                # `offer` counts this node as an idle worker, which submitters wake. It must precede
                # the claims. Otherwise a task posted after the last claim would not wake this node.
                self.tasks.offer(pool, True)
                self._offered.add(pool)
                while suitable is not None and (oid := self._take(pool)):
                    # `suitable` was determined before the claim, because claiming the last task
                    # makes a worker on this host count as idle.
                    near = self.bytes_near(oid) if len(runners) > 1 else {}
                    self.delegate(oid, runners.best(suitable, near))
                    runners = self._runners_of(pool)
                    suitable = self._suitable(pool, runners)
            if suitable is None and pool in self._offered:
                self.tasks.offer(pool, False)
                self._offered.discard(pool)

    def _take(self, pool: int) -> int:
        """Claims and returns the next queued task of the pool, or returns 0 if there is none."""
        row = self.first.get(pool)
        while row:
            oid = row.popleft()
            if self.tasks.claim(oid):
                return oid
        self.first.pop(pool, None)
        return self.tasks.take_queued(pool)

    def _runners_of(self, pool: int) -> AnyRunners:
        if pool == COMMON_POOL:
            return self._common
        return self._of_pool.get(pool, NONE)

    def _suitable(self, pool: int, runners: AnyRunners) -> list[Entry] | None:
        """The heap of runners that may receive a task of the pool, or None if no runner may."""
        return runners.suitable(lambda: self.tasks.idle(pool) > 0)

    def steal(self) -> bool:
        """Recalls tasks that are waiting at busy runners if other workers are idle. Returns whether
        any tasks are waiting at runners."""
        ahead = [r for r in self._common.crowded if self._behind(r)]
        if not ahead:
            return False
        idle = self.tasks.idle(COMMON_POOL) + self._common.free
        for runner in sorted(ahead, key=lambda r: (r.workers - len(r.running), r.order)):
            if idle > 0 and not runner.recalled:
                idle -= self.recall(runner, idle)
        return True

    def _behind(self, runner: Runner) -> list[int]:
        """The runner's tasks that have probably not begun (if the runner runs its tasks in order)
        and that other hosts may run."""
        later = list(runner.running)[runner.workers :]
        return [oid for oid in later if self.tasks.pool_of(oid) == COMMON_POOL]

    def delegate(self, oid: int, runner: Runner) -> None:
        """Sends the runner a task that this node has claimed."""
        function, args_oid, args, flags, timeout_ns, _ = self.tasks.task(oid)
        header = self.client.inspect(oid)
        holds = [self.client.hold(local_id) for local_id in (function, args_oid) if local_id]
        if None in holds:  # the submitter has just died
            self._lost(oid, runner.number)
            return
        output_owner = self.tasks.output_owner(oid)
        if output_owner:
            self.events.sends_on(output_owner, runner.host_id)
        message = RunTask(
            ids.pack_id(self.client.host_id, oid),
            self._public(function),
            args,
            self._public(args_oid) if args_oid else NO_OBJECT,
            header["retries_left"],
            timeout_ns,
            flags,
            self.client.task_name(oid).encode()[:64],
            runner.pool,
            output_owner,
            header["tries"],
            *self.ranked.ranks(oid),
            self.events.demand_of(oid),
            self.events.target_of(oid),
        )
        runner.running[oid] = holds
        runner.changed()
        self.where[oid] = runner
        if not self.send(runner.host_id, message):
            self.lose_runner(runner.host_id)

    def _public(self, oid: int) -> bytes:
        record = self.imports.by_oid.get(oid)
        return ids.pack_id(self.client.host_id, oid) if record is None else record.object

    def bytes_near(self, oid: int) -> dict[int, int]:
        """The number of bytes of the task's arguments on each other node, by node number."""
        _, args_oid, args, *_ = self.tasks.task(oid)
        if args_oid:
            got = self.client.view(args_oid)
            refs = [] if isinstance(got, int) else _serialize.read_refs(memoryview(got))
        else:
            refs = _serialize.read_refs(memoryview(args))
        found: dict[int, int] = {}
        for ref in refs:
            host_id, oid = ids.unpack_id(ref)
            record = self.imports.by_object.get(ref)
            at = (
                oid if host_id == self.client.host_id else (record.oid if record is not None else 0)
            )
            if (remote := self.remote_objects.by_oid.get(at)) is not None:
                for number in remote.holders:
                    found[number] = found.get(number, 0) + remote.nbytes
        return found

    # -- ends of tasks -------------------------------------------------------------------------

    def ended(self, peer: int, message: TaskEnded) -> None:
        """Handles a runner's report that a task has ended. The report is ignored unless the task
        is assigned to that runner."""
        _, oid = ids.unpack_id(message.task)
        if not self._is_with(oid, peer):
            return
        self.where[oid].recalled = False
        if message.outcome in ("returned", "full"):
            self._take_back(oid)
            if self.client.give_task_back(oid):
                if message.outcome == "full":
                    self.events.was_full(oid, peer)
                else:
                    self.events.post(oid)
            else:
                self.tasks.settle(oid)
        elif message.outcome == "again":
            self._take_back(oid)
            if not self._try_again(oid):
                self.tasks.settle(oid)
        elif message.outcome == "cancelled":
            self._take_back(oid)
            if not self.tasks.settle(oid):
                # The task was not aborted here: a process on that host cancelled or deleted it.
                self.tasks.cancel(oid, True)
                self.tasks.settle(oid)
        elif message.payload is None:
            self._elsewhere(oid, peer, message)
        elif message.refs:
            refs = _serialize.read_refs(memoryview(message.payload))
            self._ask(refs, lambda holds: self._store(oid, peer, message, holds))
        else:
            self._store(oid, peer, message, [])
        self.hand_out()

    def _is_with(self, oid: int, peer: int) -> bool:
        return oid in self.where and self.where[oid].host_id == peer

    def _take_back(self, oid: int) -> Runner:
        runner = self.where.pop(oid)
        runner.running.pop(oid, None)
        self._ends += 1
        runner.ended = self._ends
        runner.changed()
        return runner

    def _elsewhere(self, oid: int, peer: int, message: TaskEnded) -> None:
        runner = self._take_back(oid)
        self.events.ends_elsewhere(oid)
        if self.remote_objects.complete(
            oid, message.task, message.nbytes, (runner.number,), message.layout, message.refs
        ):
            self.remote_objects.by_oid[oid].released = lambda: self._release(oid, peer, message)
        else:
            self.send(peer, Release(message.task, 0))

    def _release(self, oid: int, peer: int, message: TaskEnded) -> None:
        """Lets the runner free its copy of a result, because this host has the bytes or the result
        is not needed. Freeing the copy drops the refs in it, so this node first acquires its own
        holds on their objects."""

        def release(holds: list[Any]) -> None:
            if holds:
                self.events.holds_inner(oid, holds)
            self.send(peer, Release(message.task, 0))

        got = self.client.view(oid) if message.refs else 0
        refs = [] if isinstance(got, int) else _serialize.read_refs(memoryview(got))
        self._ask(refs, release)

    def _ask(self, refs: list[bytes], done: Callable[[list[Any]], None]) -> None:
        """Like `Imports.ask`, but calls `done` without holds if the request fails."""
        try:
            self.imports.ask(refs, done)
        except Exception:
            _log.exception("the refs inside a result cannot be held")
            done([])

    def _store(self, oid: int, peer: int, message: TaskEnded, holds: list[Any]) -> None:
        if not self._is_with(oid, peer):
            return  # the runner was lost in the meantime, and the task runs again
        payload = message.payload
        assert payload is not None
        self._take_back(oid)
        if message.refs:
            self.send(peer, Release(message.task, 0))
        encoded = _serialize.Encoded(payload, [], [], len(payload), holds)
        full = StoreFullError(f"no space for the result of a task: {len(payload)} bytes")
        self.results.store_value(oid, encoded, message.outcome == "failed", full)

    def _lost(self, oid: int, number: int) -> None:
        self.where.pop(oid, None)
        if self.tasks.aborted(oid):
            self.client.settle(oid, NODE_SLOT)
        elif self.client.inspect(oid)["retries_left"] and self._try_again(oid):
            self.retried += 1
        elif self.client.take_over(oid, NODE_SLOT):
            name, tries = self.client.task_name(oid), self.client.add_try(oid)
            self.results.store_error(
                oid,
                self.events.lost_call(oid, name, number)
                or errors.NodeLostError(
                    f"node h{number} was lost while it ran {name}(); "
                    f"tried {tries} time{'s' if tries != 1 else ''}."
                ),
            )

    def _try_again(self, oid: int) -> bool:
        """Queues a runner's task again and uses up one retry. Returns False if the task was
        cancelled."""
        if not self.client.requeue(oid, NODE_SLOT):
            return False
        if self.client.state(oid) == STATE["WAITING"]:
            self.events.delay(oid)
        else:
            self.events.post(oid)
        return True

    # -- cancelling and recalling --------------------------------------------------------------

    def cancel(self, oid: int) -> bool:
        """Cancels a task on its runner, after the submitter has aborted the task. Returns False if
        the task is not on a runner."""
        runner = self.where.get(oid)
        if runner is None:
            return False
        self.send(runner.host_id, CancelTask(ids.pack_id(self.client.host_id, oid)))
        return True

    def recall(self, runner: Runner, most: int) -> int:
        """Recalls at most `most` tasks that the runner has probably not begun. Returns their
        number."""
        tasks = self._behind(runner)[-most:]
        runner.recalled = True
        self.send(
            runner.host_id, RecallTasks([ids.pack_id(self.client.host_id, oid) for oid in tasks])
        )
        return len(tasks)
