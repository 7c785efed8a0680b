"""The node's side of worker processes: starts, replacements, interrupts, deadlines.

The module `worker_pools` computes how many workers a pool needs; this file starts and stops them,
kills workers whose deadline has passed, and interrupts tasks. The cleanup after a killed worker
begins when the supervisor reports that the worker has exited.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Protocol

from hoplite_mp import errors
from hoplite_mp._common.object_states import CLIENT_WORKER, SLOTS_MAX, TASK_ASYNC
from hoplite_mp._node.tasks import hints
from hoplite_mp._node.tasks.sweeper import how_it_ended, is_ending
from hoplite_mp._node.tasks.worker_pools import POOLS_MAX, Pool, WorkerInfo, next_number
from hoplite_mp._protocol.local import POOL_BROKEN, SETUP_FAILED
from hoplite_mp._protocol.spawning import Spawn

if TYPE_CHECKING:
    from collections.abc import Iterable

    from hoplite_mp._node.objects.context import HostContext
    from hoplite_mp._node.ports import ProcessesPort
    from hoplite_mp._node.tasks.inbound_tasks import InboundTasks
    from hoplite_mp._node.tasks.outbound_tasks import OutboundTasks
    from hoplite_mp._protocol.messages import Member

__all__ = ["Workers"]

POOL_FREE, POOL_OPEN, POOL_CLOSING = 0, 1, 2
POLL_AGAIN_S = 0.5
LINE_GRACE_S = 0.05  # grace period for the exit of a worker whose connection was closed
# How long a forced cancel waits before it repeats its signal. Each later pause is twice as long. If
# a signal arrives just before a blocking call, Python handles it only after that call, so the
# signal must be repeated. Higher: a task in such a call is interrupted later. Lower: system calls
# in cleanup code are interrupted more often.
INTERRUPT_AGAIN_S = 0.05
# How long tasks wait for a worker while none can be started. Higher: a longer shortage of
# descriptors or processes only delays tasks. Lower: tasks fail sooner, with the reason.
START_PATIENCE_S = 10.0
FEWER = (
    "close executors, end actors (an actor ends with its last handle, or by Actor.kill), keep "
    "several objects in one actor, or use another node (options(node=))"
)

_log = logging.getLogger("hoplite_mp")


class WorkersEvents(hints.HintsEvents, Protocol):
    """Reports and requests from this component to the components above it."""

    def is_round(self, pool: int) -> bool:
        """Whether the pool belongs to a worker broadcast (_node/tasks/worker_broadcast.py)."""

    def pool_forgotten(self, pool: Pool) -> None:
        """Called when a closed pool has no workers left, so that its number may be reused."""

    def fail_delayed(self, pool: int) -> None:
        """Fails the tasks of a broken pool that are waiting for a retry."""

    def wait_for_resources(self, pool: Pool, count: int) -> None:
        """Starts `count` workers of the pool once there are resources for them."""

    def actor_died(self, pool: Pool, worker: WorkerInfo, how: str) -> None:
        """Called when the process of an actor on this host has exited."""

    def workers_are(self, count: int) -> None:
        """Announces the number of workers on this host to which other hosts may send tasks."""


class Workers(hints.Hints):
    """All workers on this host, by pool."""

    events: WorkersEvents

    def __init__(
        self,
        host: HostContext,
        processes: ProcessesPort,
        outbound_tasks: OutboundTasks,
        inbound_tasks: InboundTasks,
        events: WorkersEvents,
    ) -> None:
        super().__init__(host, inbound_tasks)
        self.config = host.config
        self.results = host.results
        self.processes = processes
        self.outbound_tasks = outbound_tasks
        self.events = events
        self.pools: dict[int, Pool] = {}
        self.all: dict[int, WorkerInfo] = {}
        self._opened = 0  # number of the pool opened last
        self.pipes: dict[int, list[int]] = {}
        self.lost = 0
        # Numbers of tasks that exited workers have run. `tasks_failed` also counts tasks that never
        # began.
        self.tasks_done = self.tasks_failed = 0
        self._due: float | None = None
        self.full = False  # the last start of a worker failed because all slots were taken
        self.start_error = ""  # reason why no worker can be started now
        self._trouble_since = self._start_again_at = 0.0

    # -- pools ---------------------------------------------------------------------------------

    def open(self, pool: Pool, descriptors: list[int] | None = None) -> bool:
        """Gives the pool a number and starts its workers. Returns False if all numbers are taken or
        no worker can be started. descriptors: moved to the pool; the workers inherit them."""
        number = self._next_number()
        if number is None:
            return False
        self._opened = pool.number = number
        while descriptors:
            pool.descriptors.insert(0, descriptors.pop())
        if pool.setup:
            pool.setup_hold = self.client.hold(pool.setup)
        self.pools[number] = pool
        self.client.open_pool(number, POOL_OPEN)
        self.start_missing(pool)
        # The workers of a pool with a demand may be waiting for resources.
        if pool.workers or not pool.target or pool.demand:
            return True
        self.close(number, False)
        return False

    def open_first(self, workers: int, owner: int, slots: Iterable[int]) -> None:
        """Opens the common pool. The supervisor starts the pool's first workers, in these slots."""
        pool = Pool(0, workers, owner)
        self.pools[0] = pool
        self.client.open_pool(0, POOL_OPEN)
        for slot in slots:
            self.client.register(slot, CLIENT_WORKER, 0)
            pool.workers[slot] = self.all[slot] = WorkerInfo(slot, 0, born=self.loop.now())

    def grow(self, count: int) -> int:
        """Adds workers to the common pool, unless none can be started now. Ends the pause, if any,
        that began because workers died before their first task. Returns the new target."""
        pool = self.pools[0]
        if not self.pauses():
            pool.recovered()
            self.ranked.resources_changed()  # the host may have had no workers before
            before, pool.target = pool.target, pool.target + count
            self.start_missing(pool)
            if self.pauses() or self.full:
                pool.target = max(before, pool.own)  # the target does not include stand-ins
        return pool.target

    def open_bound(self, owner: int, output_owner: int) -> int | None:
        """Opens a pool without workers on this host. Returns its number, or None if all numbers are
        taken."""
        pool = Pool(0, 0, owner, output_owner=output_owner)
        return pool.number if self.open(pool) else None

    def desert(self, number: int, why: str) -> None:
        """Marks a pool as broken if it no longer has workers on any host."""
        pool = self.pools.get(number)
        if pool and not (pool.target or pool.anywhere or self.events.is_round(number)):
            pool.broken, pool.host_lost = why, True
            self.fail_queued(pool)

    def close(self, number: int, kill: bool) -> None:
        pool = self.pools.get(number)
        if pool is None:
            return
        pool.closing = True
        self.outbound_tasks.close_remote(number, kill)
        self.client.open_pool(number, POOL_CLOSING)
        self.tasks.wake_pool(number)
        if kill:
            for worker in list(pool.workers.values()):
                self.kill(worker, "closing")
        self.forget_if_empty(pool)

    def close_lent(self, host_id: int, number: int, kill: bool) -> None:
        """Closes a pool that was opened on behalf of another host."""
        if self.inbound_tasks.pools.get(number) == host_id:
            del self.inbound_tasks.pools[number]
            self.close(number, kill)

    def peer_lost(self, member: Member) -> None:
        """Closes the pools that were opened on behalf of a lost host."""
        for number in [
            pool for pool, owner in self.inbound_tasks.pools.items() if owner == member.host_id
        ]:
            self.close_lent(member.host_id, number, True)

    def close_owned(self, owner: int) -> None:
        """Closes the pools of a process that has exited."""
        for pool in list(self.pools.values()):
            if pool.owner == owner and not pool.closing:
                self.close(pool.number, False)

    def forget_if_empty(self, pool: Pool) -> None:
        if pool.closing and not pool.workers:
            if not pool.actor:  # for example, tasks that were requeued after their worker's death
                for oid in self.client.queued_in(pool.number):
                    self.fail_closed(oid)
            self.processes.close(pool.descriptors)
            self.client.open_pool(pool.number, POOL_FREE)
            if pool.actor:
                self.tasks.close_queues_to(pool.number)
            self.pools.pop(pool.number, None)
            self.outbound_tasks.forget_pool(pool.number)
            self.forget_queues(pool.number)
            self.events.pool_forgotten(pool)

    def pauses(self) -> bool:
        """Whether no worker may be started now, because a start has just failed."""
        return bool(self.start_error) and self.loop.now() < self._start_again_at

    @property
    def why_none(self) -> str:
        """The reason why a request for workers or a pool failed."""
        if self.pauses():
            return f"no worker can be started: {self.start_error}"
        actors = sum(pool.actor for pool in self.pools.values())
        if self._next_number() is None:
            return (
                f"node h{self.client.number} has as many pools as a node can have, "
                f"{POOLS_MAX - 1} besides the common one, {actors} of them actors: {FEWER}"
            )
        return (
            f"node h{self.client.number} has reached its limit of {SLOTS_MAX} processes (workers, "
            f"actors, programs and the node itself); {actors} are actors: {FEWER}"
        )

    def _next_number(self) -> int | None:
        """The number of the next pool, or None if all are taken."""
        return next_number(self._opened, self.pools.keys() | self.events.pools_named())

    def not_started(self, why: str) -> None:
        """Handles a start that failed for lack of a descriptor, a process or memory. The start is
        retried later."""
        now = self.loop.now()
        if not self.start_error:
            self._trouble_since = now
            _log.error("no worker can be started now: %s", why)
        self.start_error = why
        self._start_again_at = now + POLL_AGAIN_S
        self.loop.call_later(POLL_AGAIN_S, lambda: None)
        if now - self._trouble_since >= START_PATIENCE_S:
            self.loop.call_later(0.0, self._fail_waiting)

    def _fail_waiting(self) -> None:
        """Fails tasks of pools whose workers cannot be started, unless other hosts can run the
        tasks."""
        others = self.outbound_tasks.capacity > 0
        why = f"no worker could be started for {START_PATIENCE_S:g} s: {self.start_error}"
        for pool in self.pools.values():
            if not pool.workers and pool.target and not pool.broken:
                for oid in self.client.queued_in(pool.number):
                    if not others or self.is_bound(oid):
                        self.fail(oid, why)

    def start_missing(self, pool: Pool, blocked: int | None = None) -> None:
        """Starts the workers that the pool lacks. blocked: the number of its workers that are
        waiting inside a task, if already known."""
        if self.pauses():
            return
        if blocked is None:
            blocked = self.blocked(pool)
        if pool.living > pool.own:
            self._promote(pool)
        missing = pool.missing(blocked, self.config.blocked_workers_max, self.loop.now())
        if pool.demand:
            self.events.wait_for_resources(pool, missing)
            return
        for _ in range(missing):
            if self.start_one(pool, {}) < 0:
                return

    def start_one(self, pool: Pool, assigned: dict[str, list[int]]) -> int:
        """Starts a worker. Returns its slot, or -1 if none can be started now. assigned: the
        indices of the resource units that the worker keeps until it exits."""
        if self.pauses():
            return -1
        slot = self.client.register(0, CLIENT_WORKER, pool.number)
        self.full = slot < 0
        if self.full:
            return -1
        ask = Spawn(
            slot,
            pool.number,
            pool.max_tasks,
            pool.setup,
            pool.output_owner,
            pool.env,
            assigned,
            0 if pool.actor else pool.target,
        )
        why = self.processes.spawn(ask, pool.descriptors)
        if why:
            self.not_started(why)
            self.client.unregister(slot)
            return -1
        worker = WorkerInfo(slot, pool.number, born=self.loop.now())
        worker.stands_in = not pool.actor and not pool.demand and pool.own >= pool.target
        if worker.stands_in:
            self.client.set_stands_in(slot, True)
        self.all[slot] = pool.workers[slot] = worker
        return slot

    def _promote(self, pool: Pool) -> None:
        """Turns stand-ins into regular workers if regular workers have exited or the pool grows."""
        lacking = pool.target - pool.own
        for worker in pool.workers.values():
            if lacking > 0 and worker.stands_in and not worker.retiring:
                worker.stands_in = False
                self.client.set_stands_in(worker.slot, False)
                self.tasks.wake_for_task(worker.slot)
                lacking -= 1

    def blocked(self, pool: Pool) -> int:
        return sum(
            bool(self.client.client_info(slot)["blocked"])
            for slot, worker in pool.workers.items()
            if not worker.retiring
        )

    # -- starts and deaths ---------------------------------------------------------------------

    def spawned(self, slot: int, pid: int) -> None:
        worker, self.start_error = self.all.get(slot), ""
        if worker is not None:
            worker.pid = pid
            self.tasks.set_pid(slot, pid)
            if worker.verdict:
                self.kill(worker, worker.verdict)

    def exited(self, worker: WorkerInfo | None, code: int, again: list[int]) -> None:
        """Replaces a dead worker after the cleanup. again: the requeued tasks."""
        if worker is None:
            return
        info = self.client.client_info(worker.slot)
        worker.worked = worker.worked or bool(info["tasks_done"] or info["running"])
        self.tasks_done += info["tasks_done"]
        self.tasks_failed += info["tasks_failed"]
        pool = self.pools.get(worker.pool)
        if pool is None:
            return
        pool.workers.pop(worker.slot, None)
        if (code != 0 or info["running"]) and worker.verdict != "closing":
            self.lost += 1
        if pool.actor:
            if worker.pid:  # otherwise the worker never started, and the actor has no state to lose
                self.events.actor_died(pool, worker, how_it_ended(code, worker))
            if not pool.broken:
                self.start_missing(pool)
        else:
            self._replace(pool, worker, code)
        self.forget_if_empty(pool)
        for oid in again:
            if self.tasks.pool_of(oid) not in self.pools:
                self.fail_closed(oid)

    def _replace(self, pool: Pool, worker: WorkerInfo, code: int) -> None:
        """Replaces an exited worker, now or after a pause. Fails the queued tasks if the pool is
        broken."""
        was_failing, now = pool.keeps_failing, self.loop.now()
        how = how_it_ended(code, worker)
        fail_now = pool.died(worker, code, SETUP_FAILED, how, now, self.config)
        if pool.broken and code == SETUP_FAILED and not pool.closing:
            self.client.open_pool(pool.number, POOL_BROKEN)  # `submit` now raises immediately
        if pool.broken:
            self.fail_queued(pool)
            return
        if fail_now:
            self._fail_meanwhile(pool, was_failing)
        if pool.start_again_at > now:
            self.loop.call_later(pool.start_again_at - now, lambda: None)
        self.start_missing(pool)
        self.post_queued(pool.number)

    def _fail_meanwhile(self, pool: Pool, known: bool) -> None:
        """Fails the queued tasks, because the pool's workers die before their first task. Later
        tasks wait for the next attempt."""
        if not known:
            _log.error(
                "workers exit before their first task and are restarted; the last one %s", pool.why
            )
        if len(pool.workers) > self.blocked(pool):
            return  # another worker can run the tasks
        others = pool.number == 0 and self.outbound_tasks.capacity > 0
        if pool.number == 0:
            self.tell_workers()
        times = "" if known else f" {pool.attempts} times in a row"
        why = f"its workers exited before their first task{times}; the last one {pool.why}"
        for oid in self.client.queued_in(pool.number):
            if others and oid in self.inbound_tasks:
                self.inbound_tasks.give_back(oid)
            elif not others or self.is_bound(oid):
                self.fail(oid, why)

    def tell_workers(self) -> None:
        """Announces the number of workers to which other hosts may send tasks."""
        pool = self.pools.get(0)
        if pool is not None:
            self.events.workers_are(0 if pool.keeps_failing and not pool.workers else pool.target)

    def set_up(self, slot: int) -> None:
        """Records that the worker's initializer has returned."""
        worker = self.all.get(slot)
        pool = self.pools.get(worker.pool) if worker is not None else None
        if pool is not None:
            pool.proven = True

    def setup_failed(self, slot: int, summary: str, text: str) -> None:
        """Records the exception raised by the worker's initializer. The worker will exit."""
        worker = self.all.get(slot)
        pool = self.pools.get(worker.pool) if worker is not None else None
        if pool is not None and not pool.setup_error:
            pool.setup_error, pool.setup_text = summary, text

    def fail_queued(self, pool: Pool, *, again: bool = False) -> None:
        """Fails all queued tasks of a broken pool, now and repeatedly until the pool is closed."""
        if self.pools.get(pool.number) is not pool:
            return  # the pool's number was reused
        self.events.fail_delayed(pool.number)
        for oid in self.client.queued_in(pool.number):
            self.fail(oid, pool.broken, pool.setup_text, pool.host_lost)
        if not pool.closing and (again or not pool.failing):
            pool.failing = True
            self.loop.call_later(POLL_AGAIN_S / 10, lambda: self.fail_queued(pool, again=True))

    def fail_waited_for(self, pool: Pool) -> None:
        """Ends a deadlock of a pool whose workers are all waiting, by failing the tasks that they
        have submitted to the pool."""
        limit = self.config.blocked_workers_max
        why = (
            f"all {len(pool.workers)} workers of its pool are waiting inside tasks, and no further "
            f"stand-in is allowed (blocked_workers_max={limit}); raise this limit, or wait for "
            "fewer tasks at once"
        )
        for oid in self.client.queued_in(pool.number):
            if self.client.inspect(oid)["owner"] in pool.workers:
                self.fail(oid, why)

    def fail(self, oid: int, why: str, text: str = "", host_lost: bool = False) -> None:
        """Fails a task that no worker can run. text: the traceback of the cause."""
        name = self.client.task_name(oid)
        if self.client.take_over(oid, 0):
            self.tasks_failed += 1
            kind = errors.NodeLostError if host_lost else errors.WorkerLostError
            self.results.store_error(oid, kind(f"no worker can run {name}(): {why}"), text)

    def fail_closed(self, oid: int) -> None:
        """Fails a task that was requeued after its pool was closed."""
        self.fail(oid, "its pool is closed")

    # -- interrupting --------------------------------------------------------------------------

    def interrupt(self, oid: int, slot: int) -> None:
        """Interrupts the task if it is still running in the slot. As a last resort, kills the
        worker."""
        worker = self.all.get(slot)
        if worker is None or not self._runs(slot, oid):
            return
        actor = self.pools[worker.pool].actor
        if actor and not self.tasks.task(oid)[3] & TASK_ASYNC:
            return  # an interrupt outside an await could leave the actor inconsistent

        def runs() -> bool:
            return self.all.get(slot) is worker and self._runs(slot, oid)

        def signal(again_s: float) -> None:
            if runs():
                if worker.pid:  # otherwise the supervisor has not reported the process yet
                    self.processes.interrupt(worker.pid)
                self.loop.call_later(again_s, lambda: signal(2 * again_s))

        def end() -> None:
            if runs():
                self.kill(worker, "cancelled")

        signal(INTERRUPT_AGAIN_S)
        if not actor:
            self.loop.call_later(self.config.cancel_grace_s, end)

    def _runs(self, slot: int, oid: int) -> bool:
        return self.tasks.claimant(oid) == slot and self.tasks.aborted(oid)

    def line_ended(self, slot: int) -> None:
        """Kills a worker whose connection was closed, unless it is already exiting."""
        worker = self.all.get(slot)

        def poll() -> None:
            if worker is not None and self.all.get(slot) is worker and not worker.verdict:
                if worker.pid and not is_ending(worker.pid):
                    self.kill(worker, "line")
                else:
                    self.loop.call_later(LINE_GRACE_S, poll)

        self.loop.call_later(LINE_GRACE_S, poll)

    def kill(self, worker: WorkerInfo, verdict: str, oid: int = 0) -> None:
        worker.verdict, worker.verdict_oid = verdict, oid
        if worker.pid:
            self.processes.kill(worker.pid)

    # -- polling the workers' slots ------------------------------------------------------------

    def poll(self) -> None:
        """Polls for expired deadlines, blocked workers, and surplus workers."""
        now_ns, now = self.loop.now_ns(), self.loop.now()
        due: int | None = None
        waiting = dict.fromkeys(self.pools, 0)  # pool -> number of workers waiting inside a task
        for slot, worker in self.all.items():
            blocked, worked, deadline, deadline_id = self.client.worker_info(slot)
            if blocked and not worker.retiring and worker.pool in waiting:
                waiting[worker.pool] += 1
            if worked and not worker.worked:
                worker.worked = True
                if (pool := self.pools.get(worker.pool)) is not None:
                    pool.recovered()
            if deadline and not worker.verdict:
                if deadline <= now_ns:
                    self.kill(worker, "timeout", deadline_id)
                elif due is None or deadline < due:
                    due = deadline
        for pool in list(self.pools.values()):
            blocked = waiting[pool.number]
            if pool.keeps_failing and self.tasks.idle(pool.number):
                pool.idle_again(self.config)
            if pool.is_settled(blocked):
                continue
            if not pool.broken:
                self.start_missing(pool, blocked)
            if pool.stuck(blocked, self.config.blocked_workers_max, now):
                self.fail_waited_for(pool)
            surplus = pool.surplus(blocked, now)
            if surplus:
                self.retire(pool, surplus)
            if blocked:
                self.tasks.release_stand_ins(pool.number)
            if pool.surplus_since is not None or pool.stuck_since is not None:
                due = min(due or 1 << 62, now_ns + int(POLL_AGAIN_S * 1e9))
        self.tell_workers()
        self._wake_at(due)

    def _wake_at(self, due_ns: int | None) -> None:
        if due_ns is None:
            return
        due, now = due_ns / 1e9, self.loop.now()
        if self._due is None or self._due <= now or due < self._due:
            self._due = due
            self.loop.call_later(max(0.0, due - now), lambda: None)

    def retire(self, pool: Pool, count: int) -> None:
        for slot in sorted(pool.workers, key=lambda slot: (pool.workers[slot].stands_in, slot))[
            ::-1
        ]:
            busy = self.client.client_info(slot)["running"] or self.events.counts_on(slot)
            if count > 0 and not pool.workers[slot].retiring and not busy:
                self.replace(pool.workers[slot])
                count -= 1

    def replace(self, worker: WorkerInfo) -> None:
        """Lets the worker exit when it is idle. `poll` starts another one if needed."""
        worker.retiring = True
        self.client.set_retire(worker.slot, worker.retire_bits)
        self.tasks.wake_for_task(worker.slot)
