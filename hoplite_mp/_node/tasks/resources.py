"""Grants resources to the tasks and workers of this host that are waiting for them.

A task that requests resources may only begin on a host where enough of them are free. Workers do
not know which resources are free, so the submitter announces the task only to its own node. The
node keeps the task until some host has enough free resources. Then the node announces the task to
workers on this host, or sends the task to another host. Workers of executors and actors wait in the
same queue, and keep their resources until they exit.

**Invariant: each node alone decides about its own resources.** It accepts or refuses another host's
task immediately. A refused task ("full") returns to its host, which is notified when resources
become free. A node's view of other hosts may therefore be outdated, which can cost a message but
never overbooks a resource. A task always waits for resources on its submitter's host.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from hoplite_mp import _tasks
from hoplite_mp._common.object_states import STATE, TASK_HERE, UNCLAIMED, UNFINISHED
from hoplite_mp._planner.resources import (
    ResourceLedger,
    WaitingRow,
    WaitingRows,
    demand_words,
    parse_amounts,
)
from hoplite_mp._protocol.local import Reply
from hoplite_mp._protocol.peers import ResourcesFreed

if TYPE_CHECKING:
    from hoplite_mp._node.objects.context import HostContext
    from hoplite_mp._node.tasks.outbound_tasks import OutboundTasks, Runner
    from hoplite_mp._node.tasks.worker_pools import Pool
    from hoplite_mp._node.tasks.workers import Workers
    from hoplite_mp._planner.resources import Assigned, Demand
    from hoplite_mp._protocol.local import Request
    from hoplite_mp._protocol.membership import Member

__all__ = ["Resources"]

COMMON_POOL = 0
ANYWHERE = 0
GONE = -1  # the host to which the task was bound is gone
WORKERS_MAX = 200
# The number of tasks that receive resources here beyond the number of idle workers. Higher: workers
# wait less often for the node. Lower: fewer resources are reserved for tasks that have not begun.
AHEAD_TASKS = 2


@dataclass(slots=True)
class HeldResources:
    """The resources of a task that runs here, or of an outbound task."""

    demand: Demand
    host_id: int  # id of the host where the task runs
    token: Any  # the task's key in the ledger of that host
    assigned: Assigned = field(default_factory=dict)
    slot: int = 0  # for a generator, which runs on after its task is done: its worker's slot


class Resources:
    """The resources of one node, and its view of the resources of other nodes."""

    def __init__(self, host: HostContext, outbound_tasks: OutboundTasks, workers: Workers) -> None:
        self.config = host.config
        self.loop = host.loop
        self.client = host.client
        self.tasks = host.tasks
        self.roster = host.roster
        self.send_peer = host.send_peer
        self.reply = host.reply
        self.outbound_tasks = outbound_tasks
        self.workers = workers
        self.ranked = _tasks.Ranked(host.tasks)
        text = host.config.resources
        self.ledger = ResourceLedger(parse_amounts(text) if text else ())
        self.totals: Demand = tuple(self.ledger.totals.items())
        # Host id -> its resources. Only tasks of this host count as using them.
        self.others: dict[int, ResourceLedger] = {}
        self.full: dict[int, set[str]] = {}  # host id -> names of resources that it has too few of
        self.refused: set[int] = set()  # ids of hosts to notify when resources become free here
        self.rows = WaitingRows()
        self.held: dict[int, HeldResources] = {}  # by task
        # slot -> resources that its worker keeps until it exits
        self.slots: dict[int, tuple[Any, Assigned]] = {}
        # pool -> number of its workers that are waiting for resources
        self.pools: dict[int, int] = {}
        self._order = 0
        self._serving = False
        # Whether, since the last pass, resources of this host were returned, or a task or worker
        # for which resources were reserved has stopped waiting.
        self._freed = False

    # -- requests from clients -----------------------------------------------------------------

    def take(self, slot: int, request: Request) -> None:
        """Handles a process's announcement of a task whose arguments are ready."""
        ask: Any = request.ask
        self.wait(ask.oid, ask.demand)

    def wait(self, oid: int, demand: Demand) -> None:
        """Makes a task wait for these resources. The task begins when they are granted."""
        self._wait(oid, demand)
        self.serve()

    def give_back(self, slot: int, request: Request) -> None:
        oid = request.ask.oid  # type: ignore[union-attr]
        if oid in self.held:
            self._release(oid)
            self.serve()

    def keep_for_stream(self, slot: int, request: Request) -> None:
        held = self.held.get(request.ask.oid)  # type: ignore[union-attr]
        if held is not None:
            held.slot = slot
        self.reply(slot, Reply(request.number))

    def places(self, slot: int, request: Request) -> None:
        demand = request.ask.demand  # type: ignore[union-attr]
        mine = self.workers.pools[COMMON_POOL].target
        found = [(self.client.number, mine, *_times(self.ledger, demand))]
        for member in self.roster.by_host_id.values():
            ledger = self.others.get(member.host_id)
            if ledger is not None and member.host_id not in self.roster.leaving:
                found.append((member.node, member.workers, *_times(ledger, demand)))
        self.reply(slot, Reply(request.number, found))

    def assigned(self, slot: int, request: Request) -> None:
        held = self.held.get(request.ask.oid)  # type: ignore[union-attr]
        own = self.slots.get(slot)
        found = held.assigned if held is not None else {} if own is None else own[1]
        self.reply(slot, Reply(request.number, found))

    def counts(self) -> dict[str, int]:
        """Counters for `stats()` and `nodes`."""
        free = dict(self.ledger.free())
        return {
            f"{what}:{name}": amounts[name]
            for what, amounts in (("resource", self.ledger.totals), ("free", free))
            for name in amounts
        }

    # -- other hosts ---------------------------------------------------------------------------

    def peer_joined(self, member: Member) -> None:
        """Handles a host that has joined or whose number of workers has changed."""
        if member.host_id not in self.others:
            self.others[member.host_id] = ResourceLedger(member.resources)
        self.ranked.resources_changed()
        self.serve()

    def peer_lost(self, member: Member) -> None:
        """Forgets the resources and requests of a lost host."""
        self.others.pop(member.host_id, None)
        self.full.pop(member.host_id, None)
        self.refused.discard(member.host_id)
        self.ranked.resources_changed()
        self.loop.call_later(0.0, self.serve)  # deferred: its tasks must be queued again first

    def freed_there(self, host_id: int) -> None:
        """Handles a notification from a host that refused a task and now has free resources."""
        self.full.pop(host_id, None)
        self.serve()

    def demand_of(self, oid: int) -> Demand:
        """The resources of the task."""
        held = self.held.get(oid)
        return () if held is None else held.demand

    def again(self, oid: int, refused_by: int = 0) -> None:
        """Makes a task that had resources wait again. refused_by: the id of the host that refused
        the task, or 0 if none did."""
        held = self.held.pop(oid, None)
        if held is None:
            return
        ledger = self.others.get(held.host_id)
        if ledger is not None:
            ledger.give_back(held.token)
        if refused_by:
            self.full.setdefault(refused_by, set()).update(name for name, _ in held.demand)
        self._wait(oid, held.demand)
        self.loop.call_later(0.0, self.serve)

    def take_back(self, oid: int) -> Demand:
        """Frees the resources of a task that will not run for now. Returns its demand."""
        held = self.held.get(oid)
        if held is None:
            return ()
        self._release(oid)
        self.loop.call_later(0.0, self.serve)
        return held.demand

    def admit(self, peer: int, task: bytes, demand: Demand, needed: bool) -> bool:
        """Reserves resources for another host's task. Returns False if they are in use. Tasks and
        workers of this host come first, unless another task may be waiting for this one
        (`needed`)."""
        if (self._is_kept(demand) and not needed) or self.ledger.take(task, demand) is None:
            self.refused.add(peer)
            return False
        return True

    def is_available(self, demand: Demand) -> bool:
        """Whether a request for these resources would be granted immediately."""
        return self.ledger.fits(demand) and not self._is_kept(demand)

    def _is_kept(self, demand: Demand) -> bool:
        """Whether some of these resources are reserved for a waiting task or worker."""
        names = {name for name, _ in demand}
        return any(
            (row.where in (ANYWHERE, self.client.host_id) or isinstance(row.where, tuple))
            and not names.isdisjoint(name for name, _ in row.demand)
            and self.ledger.could_ever(row.demand)
            and not self.ledger.fits(row.demand)
            for row in self.rows.rows.values()
        )

    def admitted(self, oid: int, task: bytes, demand: Demand) -> None:
        """Records the header of an accepted inbound task."""
        self.held[oid] = HeldResources(
            demand, self.client.host_id, task, self.ledger.assigned(task)
        )

    def dropped(self, task: bytes) -> None:
        """Releases the resources of an accepted inbound task that will not run here. Its header may
        remain, but is removed from `held`. Otherwise the header's end could release the resources
        of the same task after the task was sent here again."""
        for oid in [oid for oid, held in self.held.items() if held.token == task]:
            del self.held[oid]
        if self._give_back_here(task):
            self.serve()

    # -- workers -------------------------------------------------------------------------------

    def wait_workers(self, pool: Pool, count: int) -> None:
        """Sets the number of the pool's workers that wait for resources. Each starts when its
        resources are granted."""
        who = ("pool", pool.number)
        if not count:
            self.pools.pop(pool.number, None)
            if who in self.rows:
                self._stop_waiting(who)
                self.loop.call_later(0.0, self.serve)
            return
        self.pools[pool.number] = count
        if who not in self.rows:
            self._order += 1
            self.rows.add(who, pool.demand, who, (0, 0, 0, self._order))
        self.serve()

    def worker_gone(self, slot: int) -> None:
        """Takes back the resources of the worker in the slot, which has exited."""
        token, _ = self.slots.pop(slot, (None, None))
        if token is not None:
            self._give_back_here(token)
        for oid, held in list(self.held.items()):
            if held.slot != slot:
                continue
            if self.client.state(oid) in UNFINISHED:
                held.slot = 0  # the generator is retried and keeps its resources
            else:
                self._release(oid)
        if self._freed:
            self.loop.call_later(0.0, self.serve)

    def _stop_waiting(self, who: Any) -> None:
        self.rows.remove(who)
        self._freed = True

    def _give_back_here(self, token: Any) -> bool:
        freed = self.ledger.give_back(token)
        self._freed = self._freed or freed
        return freed

    # -- granting ------------------------------------------------------------------------------

    def _wait(self, oid: int, demand: Demand) -> None:
        priority, floor = self.ranked.ranks(oid)
        near = 2 if floor != _tasks.NO_FLOOR else 1
        self._order += 1
        rank = (-max(priority, floor), -near, -priority, self._order)
        self.rows.add(oid, demand, self._where(oid), rank, near == 2)

    def _where(self, oid: int) -> int:
        """The id of the host to which the task is bound, ANYWHERE, or GONE."""
        if self.tasks.task(oid)[3] & TASK_HERE:
            return self.client.host_id
        pool = self.tasks.pool_of(oid)
        if pool == COMMON_POOL:
            return ANYWHERE
        bound = self.outbound_tasks.bound_to(pool)
        return GONE if bound is None else bound

    def poll(self) -> None:
        """Polls for ended tasks and idle workers."""
        for oid, held in list(self.held.items()):
            if not held.slot and self.client.state(oid) not in UNFINISHED:
                self._release(oid)
        self.serve()

    def _release(self, oid: int) -> None:
        held = self.held.pop(oid)
        if held.host_id == self.client.host_id:
            self._give_back_here(held.token)
        elif held.host_id in self.others:
            self.others[held.host_id].give_back(held.token)
            self.full.pop(held.host_id, None)

    def serve(self) -> None:
        """Grants free resources by rank, then in order of arrival. To avoid starvation, a task must
        not use resources for which an earlier task is waiting, unless another task may be waiting
        for this task. A worker of an actor or an executor may use any free resources. Otherwise
        there could be a deadlock: an earlier worker may be waiting for resources that the later
        worker's program releases only after the later worker has started."""
        if self._serving:
            return
        self._serving = True
        try:
            self._serve()
        finally:
            self._serving = False
        if self._freed:
            self._freed = False
            if self.refused and any(units for _, units in self.ledger.free()):
                refused, self.refused = self.refused, set()
                for host_id in refused:
                    self.send_peer(host_id, ResourcesFreed())

    def _serve(self) -> None:
        turn = _Turn(self)
        skip: set[Any] = set()
        while (row := self.rows.first(skip)) is not None:
            who = row.members[0][1]
            if isinstance(who, int) and self.client.state(who) not in UNCLAIMED:
                self._stop_waiting(who)  # the task was cancelled, or its submitter has died
                continue
            if not (self._start(row, who) if isinstance(who, tuple) else turn.begin(row, who)):
                skip.add(row.key)
                turn.reserve(row)

    def _start(self, row: WaitingRow, who: tuple[str, int]) -> bool:
        """Starts a waiting worker. Returns False if there are not enough resources."""
        pool = self.workers.pools.get(who[1])
        if pool is None or not self.pools.get(who[1]):
            self._stop_waiting(who)
            return True
        self._order += 1
        token = ("worker", self._order)
        assigned = self.ledger.take(token, row.demand)
        if assigned is None:
            return False
        slot = self.workers.start_one(pool, assigned)
        if slot < 0:
            self.ledger.give_back(token)
            return False
        self.slots[slot] = token, assigned
        self.pools[who[1]] -= 1
        if not self.pools[who[1]]:
            self.wait_workers(pool, 0)
        return True

    def give_here(self, oid: int, demand: Demand) -> bool:
        """Grants a task resources of this host, and announces the task to this host's workers.
        Returns False if there are not enough resources."""
        assigned = self.ledger.take(oid, demand)
        if assigned is None:
            return False
        self.held[oid] = HeldResources(demand, self.client.host_id, oid, assigned)
        self.rows.remove(oid)
        self.workers.announce(oid, True)
        return True

    def give_there(self, oid: int, demand: Demand, runner: Runner) -> bool:
        """Sends a task to another host. Returns False if there are not enough resources there."""
        ledger = self.others[runner.host_id]
        if ledger.take(oid, demand) is None:
            return False
        self._stop_waiting(oid)
        if not (self.tasks.take(oid) or self.tasks.claim(oid)):  # the task has just been cancelled
            ledger.give_back(oid)
            return True
        self.held[oid] = HeldResources(demand, runner.host_id, oid)
        self.outbound_tasks.delegate(oid, runner)
        return True

    # -- demands that no node can meet ---------------------------------------------------------

    def lost(self, row: WaitingRow, why: str) -> bool:
        """Handles a row (waiting tasks with the same demand) whose resources no node has. why: the
        text for the tasks' errors. Returns True if it has failed all tasks of the row, because they
        have waited for resource_wait_s or are bound to a lost node."""
        patience = self.config.resource_wait_s
        if row.where == GONE:
            self._fail(row, "the node to which it is bound is gone")
            return True
        if row.lost is None:
            row.lost = marker = object()

            def over() -> None:
                if row.lost is marker:
                    row.given_up = True
                    self.serve()

            self.loop.call_later(patience, over)
        if not row.given_up:
            return False
        self._fail(
            row,
            f"{why}, and no such node has joined within {patience:g} s (resource_wait_s)",
        )
        return True

    def _fail(self, row: WaitingRow, why: str) -> None:
        for oid in self.rows.everybody(row):
            self._stop_waiting(oid)
            self.workers.fail(oid, why, host_lost=True)


class _Turn:
    """The state of one pass over all waiting tasks and workers: the number of idle workers and the
    reservations on each host."""

    def __init__(self, resources: Resources) -> None:
        self.of = resources
        self.own = resources.client.host_id
        pool = resources.workers.pools.get(COMMON_POOL)
        self.has_workers = pool is not None and (pool.target > 0 or bool(pool.workers))
        self.waiting = sum(
            held.host_id == self.own and resources.client.state(oid) == STATE["QUEUED"]
            for oid, held in resources.held.items()
        )
        self.idle = resources.tasks.idle(COMMON_POOL)
        self.kept: dict[int, set[str]] = {}  # host id -> names of resources reserved there
        self.near: dict[int, Any] = {}

    def reserve(self, row: WaitingRow) -> None:
        """Reserves the resources for which this row is waiting, so that later rows do not take
        them."""
        names = {name for name, _ in row.demand}
        for host_id in self._hosts(row):
            ledger = self.of.ledger if host_id == self.own else self.of.others[host_id]
            if ledger.could_ever(row.demand) and not ledger.fits(row.demand):
                self.kept.setdefault(host_id, set()).update(names)

    def _hosts(self, row: WaitingRow) -> list[int]:
        """The ids of the hosts where the task may run."""
        if isinstance(row.where, tuple):
            return [self.own]
        runners = self.of.outbound_tasks.runners
        able = [
            host_id for host_id, one in runners.items() if one.workers and host_id in self.of.others
        ]
        if row.where == ANYWHERE:
            return [self.own, *able] if self.has_workers else able
        return [host_id for host_id in (self.own, *able) if host_id == row.where]

    def begin(self, row: WaitingRow, oid: int) -> bool:
        """Starts the first task of the row on a host with enough resources. Returns False if there
        is no such host now."""
        of, names = self.of, {name for name, _ in row.demand}
        hosts = self._hosts(row)
        able = [host_id for host_id in hosts if self._ledger(host_id).could_ever(row.demand)]
        if not able:
            words = demand_words(row.demand)
            if row.where == ANYWHERE:
                return of.lost(row, f"no node has {words} any longer")
            return of.lost(row, f"the node to which it is bound no longer has {words}")
        row.lost, row.given_up = None, False
        found = []
        for host_id in able:
            kept = set() if row.needed else self.kept.get(host_id, set())
            if names & (kept | of.full.get(host_id, set())):
                continue
            if (
                self._ledger(host_id).fits(row.demand)
                and (free := self._has_free_worker(host_id)) is not None
            ):
                found.append((free, host_id))
        if not found:
            return False
        best = found[0][1] if len(found) == 1 else self._best(oid, found)
        if best == self.own:
            self.waiting += 1
            return of.give_here(oid, row.demand)
        return of.give_there(oid, row.demand, of.outbound_tasks.runners[best])

    def _ledger(self, host_id: int) -> ResourceLedger:
        return self.of.ledger if host_id == self.own else self.of.others[host_id]

    def _has_free_worker(self, host_id: int) -> bool | None:
        """Whether a worker on the host is idle. None if too many tasks are already waiting for
        one."""
        if host_id != self.own:
            runner = self.of.outbound_tasks.runners[host_id]
            return None if runner.capacity <= 0 else runner.free > 0
        if self.waiting >= self.idle + AHEAD_TASKS:
            return None
        return self.waiting < self.idle

    def _best(self, oid: int, found: list[tuple[bool, int]]) -> int:
        """The best host. A host with an idle worker comes first, then a host with more bytes of the
        arguments, then this host, then a host whose last task ended earlier (see
        `Runners.best`)."""
        near = self.of.outbound_tasks.bytes_near(oid)
        number = self.of.roster.number_of
        runners = self.of.outbound_tasks.runners

        def preference(one: tuple[bool, int]) -> tuple[bool, int, bool, int]:
            free, host_id = one
            is_own = host_id == self.own
            at = self.of.client.number if is_own else number(host_id)
            ended = 0 if is_own else runners[host_id].ended
            return free, near.get(-1 if at is None else at, 0), is_own, -ended

        return max(found, key=preference)[1]


def _times(ledger: ResourceLedger, demand: Demand) -> tuple[int, int]:
    """How many times the demand fits into all resources, and how many times into the free ones."""
    if not ledger.could_ever(demand):
        return 0, 0
    return ledger.times(demand, WORKERS_MAX, False), ledger.times(demand, WORKERS_MAX, True)
