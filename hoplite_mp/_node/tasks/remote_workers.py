"""Requests for pools and workers, and the workers of pools on other hosts.

The peers (tasks) of an `spmd` call wait for one another, so each needs its own worker. When a
peer's host is lost or leaves, a worker is started elsewhere. Otherwise the peer could only begin
after another peer has ended, and that peer may be waiting for it. After the first loss, the node
compares the pool's queued tasks with its workers once a second, so losses need not be counted.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from hoplite_mp._common import ids
from hoplite_mp._common.object_states import NODE_SLOT, STATE
from hoplite_mp._node.tasks.outbound_tasks import AHEAD_TASKS
from hoplite_mp._node.tasks.worker_pools import Pool
from hoplite_mp._protocol.fields import NO_OBJECT
from hoplite_mp._protocol.local import (
    AddWorkers,
    BindPool,
    ClosePool,
    InitializerDone,
    InitializerFailed,
    Interrupt,
    OpenPool,
    Reply,
    RetryTask,
)
from hoplite_mp._protocol.peers import CloseRemotePool, OpenRemotePool, RemotePoolOpened

if TYPE_CHECKING:
    from collections.abc import Callable

    from hoplite_mp._node.dispatch import Handler, Requests
    from hoplite_mp._node.objects.context import HostContext
    from hoplite_mp._node.questions import Answer
    from hoplite_mp._node.tasks.inbound_tasks import InboundTasks
    from hoplite_mp._node.tasks.outbound_tasks import OutboundTasks
    from hoplite_mp._node.tasks.resources import Resources
    from hoplite_mp._node.tasks.sweeper import Sweeper
    from hoplite_mp._node.tasks.workers import Workers
    from hoplite_mp._protocol.local import Request

__all__ = ["PoolRequests", "RemoteWorkers"]


COMMON_POOL = 0
# Interval at which a pool's tasks are compared with its workers after a loss. Lower: more messages
# while resources are in use.
POLL_AGAIN_S = 1.0


@dataclass(slots=True)
class _Short:
    """A pool of peers that has lost workers."""

    pool: Pool
    since: float  # the last time at which the pool is known to have had a worker on some host
    asked: Counter[int] = field(default_factory=Counter)  # requested workers, by host id
    refused: set[int] = field(default_factory=set)  # hosts that refused in the current second


class RemoteWorkers:
    """The workers of this host's pools on other hosts."""

    def __init__(
        self,
        host: HostContext,
        workers: Workers,
        outbound_tasks: OutboundTasks,
        resources: Resources,
    ) -> None:
        self.config = host.config
        self.loop = host.loop
        self.client = host.client
        self.roster = host.roster
        self.send_peer = host.send_peer
        self.questions = host.questions
        self.workers = workers
        self.outbound_tasks = outbound_tasks
        self.resources = resources
        self.short: dict[int, _Short] = {}  # by number of the pool

    def is_open(self, pool: Pool) -> bool:
        return self.workers.pools.get(pool.number) is pool and not pool.closing

    # -- opening a pool ------------------------------------------------------------------------

    def start(self, pool: Pool, wanted: dict[int, int], done: Callable[[str, bool], None]) -> None:
        """Starts workers on other hosts. wanted: the number of workers, by host id. Calls `done`
        with an error text, or "", and with whether one of the hosts was lost."""

        def opened(found: dict[int, Answer]) -> None:
            error = ""
            for host_id, answer in found.items():
                error = self._opened(pool, host_id, wanted[host_id], answer.message) or error
            done(error, any(host_id not in found or self._is_gone(host_id) for host_id in wanted))

        makes = {host_id: self._make(pool, count, False) for host_id, count in wanted.items()}
        self.questions.ask_each(makes, opened)

    def _make(self, pool: Pool, count: int, at_once: bool) -> Callable[[int], OpenRemotePool]:
        """Returns a function that creates the request for `count` workers, given the number that
        identifies the request."""
        setup = ids.pack_id(self.client.host_id, pool.setup) if pool.setup else NO_OBJECT
        return lambda number: OpenRemotePool(
            number=number,
            workers=count,
            max_tasks=pool.max_tasks,
            setup=setup,
            output_owner=pool.output_owner,
            env=pool.env,
            demand=pool.demand,
            at_once=at_once,
            team=pool.team,
            team_size=pool.team_size,
        )

    def _opened(self, pool: Pool, host_id: int, count: int, there: RemotePoolOpened) -> str:
        """Handles a host's answer. Returns the reason why the host cannot start workers, or ""."""
        if there.error:
            return there.error
        if not self.is_open(pool):  # the pool's owner has died, or has closed it
            self.send_peer(host_id, CloseRemotePool(there.pool, True))
        elif not self._is_gone(host_id):
            ahead = 0 if pool.peers else AHEAD_TASKS
            self.outbound_tasks.add_remote(pool.number, host_id, there.pool, count, ahead)
        return ""

    def _is_gone(self, host_id: int) -> bool:
        return host_id not in self.outbound_tasks.runners

    # -- after a loss --------------------------------------------------------------------------

    def lost(self, number: int) -> None:
        """Handles the loss of a pool's workers on another host."""
        pool = self.workers.pools.get(number)
        if pool is None or not pool.peers:
            return
        known = self.short.get(number)
        if known is not None and known.pool is pool:
            self._check_later(known)
            return
        short = self.short[number] = _Short(pool, self.loop.now())
        # Check later, because tasks of the lost host must be queued again first.
        self.loop.call_later(0.0, lambda: self._check_repeatedly(short))

    def forget(self, pool: Pool) -> None:
        """Forgets a closed pool."""
        short = self.short.get(pool.number)
        if short is not None and short.pool is pool:
            del self.short[pool.number]

    def _check_later(self, short: _Short) -> None:
        def check() -> None:
            self._check(short)

        self.loop.call_later(0.0, check)

    def _check_repeatedly(self, short: _Short) -> None:
        """Compares the pool's tasks with its workers now, and then each second while it is open."""
        short.refused.clear()
        if self._check(short):
            self.loop.call_later(POLL_AGAIN_S, lambda: self._check_repeatedly(short))

    def _check(self, short: _Short) -> bool:
        """Starts workers for peers without one. Returns False if the pool is closed or broken."""
        pool = short.pool
        if not self.is_open(pool) or pool.broken:
            self.forget(pool)
            return False
        missing = len(self.client.queued_in(pool.number, True)) - self._free(pool)
        missing -= short.asked.total()
        while missing > 0 and (host_id := self._place(short)) is not None:
            if host_id != self.client.host_id:
                self._ask(short, host_id)
            elif not self._start_here(pool):
                short.refused.add(host_id)
                continue
            missing -= 1
        if missing > 0 and not short.asked.total():
            self._give_up(short)
        return True

    def _free(self, pool: Pool) -> int:
        """The number of the pool's workers without a task."""
        running = sum(bool(self.client.client_info(slot)["running"]) for slot in pool.workers)
        remote = self.outbound_tasks.remote_runners.get(pool.number, ())
        return max(0, pool.target - running) + sum(runner.free for runner in remote)

    def _place(self, short: _Short) -> int | None:
        """The id of the host for the next worker, or None if no host is left. Chooses the host with
        the fewest workers of the pool. If the pool may use any host, this number is taken relative
        to the size of the host's common pool."""
        pool, own = short.pool, self.client.host_id
        now = {own: pool.target}
        for runner in self.outbound_tasks.remote_runners.get(pool.number, ()):
            now[runner.host_id] = now.get(runner.host_id, 0) + runner.workers
        weights = dict.fromkeys(now, 1)
        able = {one for one, workers in now.items() if workers}
        if pool.anywhere:
            members = self.roster.by_host_id.items()
            weights = {one: member.workers for one, member in members}
            weights[own] = self.workers.pools[COMMON_POOL].target
            able = {one for one in weights if self._can_ever_start(pool, one, weights[one])}
        able -= short.refused | self.roster.leaving

        def relative_load(host_id: int) -> float:
            there = now.get(host_id, 0) + short.asked[host_id]
            return (there + 1) / max(1, weights[host_id])

        return min(sorted(able, key=lambda one: one != own), key=relative_load, default=None)

    def _can_ever_start(self, pool: Pool, host_id: int, workers: int) -> bool:
        """Whether the host could ever have workers of the pool."""
        if not pool.demand:
            return workers > 0
        if host_id == self.client.host_id:
            return self.resources.ledger.could_ever(pool.demand)
        ledger = self.resources.others.get(host_id)
        return ledger is not None and ledger.could_ever(pool.demand)

    def _start_here(self, pool: Pool) -> bool:
        """Starts a worker here. Returns False if its resources are in use."""
        if pool.demand and not self.resources.is_available(pool.demand):
            return False
        pool.target += 1
        self.workers.start_missing(pool)
        return True

    def _ask(self, short: _Short, host_id: int) -> None:
        """Requests one worker from the host."""
        short.asked[host_id] += 1

        def answered(answer: Answer | None) -> None:
            short.asked[host_id] -= 1
            leaves = host_id in self.roster.leaving
            if leaves and answer is not None and not answer.message.error:
                self.send_peer(host_id, CloseRemotePool(answer.message.pool, True))
            elif leaves or answer is None or self._opened(short.pool, host_id, 1, answer.message):
                short.refused.add(host_id)
            self._check_later(short)

        self.questions.ask(host_id, self._make(short.pool, 1, True), answered)

    def _give_up(self, short: _Short) -> None:
        """Called when no host can start a worker now. Fails the pool's tasks if the pool has no
        workers left and none can be expected."""
        pool, now = short.pool, self.loop.now()
        remote = self.outbound_tasks.remote_runners.get(pool.number, ())
        if pool.target or any(runner.workers for runner in remote):
            short.since = now
        elif not pool.anywhere or now - short.since >= self.config.resource_wait_s:
            pool.broken, pool.host_lost = "no remaining host has the resources for it", True
            self.workers.fail_queued(pool)


# Requests for pools and workers, from processes on this host and from other nodes.
#
# An executor's workers, or the peers of an spmd, may be on any node. The pool has a number on this
# host, and perhaps some workers here. Every other node that provides workers opens its own pool,
# which runs only tasks from this node. The pool is open when all nodes have answered.


class PoolRequestsEvents(Protocol):
    """Reports and requests from this component to the components above it."""

    def output_owner_of(self, slot: int) -> int:
        """The driver that receives the output of the process in the slot."""

    def tell_workers(self, count: int) -> None:
        """Announces this host's number of workers in the common pool."""

    def grow_remote(self, number: int, count: int) -> bool:
        """Asks another node to start more workers. Returns False if there is no such node."""


class PoolRequests:
    """Handles the requests to one node."""

    def __init__(
        self,
        host: HostContext,
        requests: Requests,
        sweeper: Sweeper,
        workers: Workers,
        outbound_tasks: OutboundTasks,
        inbound_tasks: InboundTasks,
        resources: Resources,
        events: PoolRequestsEvents,
    ) -> None:
        self.client = host.client
        self.imports = host.imports
        self.roster = host.roster
        self.send_peer = host.send_peer
        self.lines = host.clients
        self.reply = host.reply
        self.replier = host.replier
        self.requests = requests
        self.sweeper = sweeper
        self.workers = workers
        self.outbound_tasks = outbound_tasks
        self.inbound_tasks = inbound_tasks
        self.resources = resources
        self.remote_workers = RemoteWorkers(host, workers, outbound_tasks, resources)
        self.events = events
        self._teams = 0  # number of spmd calls made on this host

    @property
    def handlers(self) -> dict[type, Handler]:
        """Handlers by type of request."""
        return {
            Interrupt: self.interrupt,
            OpenPool: self.open,
            AddWorkers: self.add_workers,
            BindPool: self.bind,
            ClosePool: self.close,
            InitializerDone: self.set_up,
            InitializerFailed: self.setup_failed,
            RetryTask: self.try_again,
        }

    def interrupt(self, slot: int, request: Request) -> None:
        """Interrupts a task's worker, here or on another host."""
        ask: Any = request.ask
        if not self.outbound_tasks.cancel(ask.oid):
            self.workers.interrupt(ask.oid, ask.slot)

    def open(self, slot: int, request: Request) -> None:
        """Opens a pool with its own workers, or without workers on this host."""
        ask: Any = request.ask
        workers = self.workers
        pool = Pool(
            number=0,
            target=ask.workers,
            owner=slot,
            max_tasks=ask.max_tasks,
            setup=ask.setup,
            output_owner=self.events.output_owner_of(slot),
            env=ask.env,
            demand=ask.demand,
            peers=ask.exact,
            anywhere=ask.anywhere,
        )
        if pool.peers:
            self._teams += 1
            pool.team = ids.pack_id(self.client.host_id, self._teams)
            pool.team_size = ask.workers + sum(count for _, count in ask.remote)
        if not workers.open(pool, self.requests.given):
            self.reply(slot, Reply(request.number, None, workers.why_none))
            return
        number = pool.number
        line, reply = self.lines.get(slot), self.replier(slot)

        def done(error: str, lost: bool) -> None:
            if not error and self.lines.get(slot) is line:
                if not self.requests.is_latest(slot, request.number):  # the caller was interrupted
                    workers.close(number, True)
                    return
                undo = lambda: workers.close(number, True)  # noqa: E731
                self.requests.undo_unread(slot, request.number, undo)
            if lost:
                reply(Reply(request.number, error))
            else:
                reply(Reply(request.number, None if error else number, error))

        self._open_remote(number, ask, done)

    def _open_remote(self, pool: int, ask: OpenPool, done: Callable[[str, bool], None]) -> None:
        """Opens pools on other nodes for a pool of this host. Calls `done` with an error text, or
        "", and with whether a node was lost."""
        local, members = self.workers.pools[pool], self.roster.by_number
        gone = next((number for number, _ in ask.remote if number not in members), None)
        if gone is not None:
            self.workers.close(pool, True)
            done(f"node h{gone} is gone", True)
            return
        wanted = {members[number].host_id: workers for number, workers in ask.remote}

        def opened(error: str, lost: bool) -> None:
            is_open = self.remote_workers.is_open(local)
            if lost:
                error = "a node was lost while its workers were started"
            elif not is_open:
                error = "the pool has been closed while its workers were started"
            if error and is_open:
                self.workers.close(pool, True)
            done(error, lost)

        self.remote_workers.start(local, wanted, opened)

    def add_workers(self, slot: int, request: Request) -> None:
        """Starts more workers on this node, or asks another node to do so."""
        ask: Any = request.ask
        error, gone = "", False
        if ask.node == self.client.number:
            wanted = self.workers.pools[0].target + ask.count
            now = self.workers.grow(ask.count)
            error = self.workers.why_none if now < wanted else ""
            self.events.tell_workers(now)
        elif not self.events.grow_remote(ask.node, ask.count):
            error, gone = f"node h{ask.node} is gone", True
        self.reply(slot, Reply(request.number, None, error, gone=gone))

    def bind(self, slot: int, request: Request) -> None:
        """Opens a pool whose tasks run only on one other node."""
        wanted = request.ask.node  # type: ignore[union-attr]
        workers = self.workers
        number = workers.open_bound(slot, 0)
        if number is None:
            self.reply(slot, Reply(request.number, None, workers.why_none))
        elif not self.outbound_tasks.bind(number, wanted):
            workers.close(number, False)
            self.reply(slot, Reply(request.number, None, f"node h{wanted} is gone", gone=True))
        else:
            self.reply(slot, Reply(request.number, number))

    def close(self, slot: int, request: Request) -> None:
        """Closes a process's pool."""
        ask: Any = request.ask
        self.workers.close(ask.pool, ask.kill)

    def set_up(self, slot: int, request: Request) -> None:
        """Records that a worker's initializer has returned."""
        self.workers.set_up(slot)

    def setup_failed(self, slot: int, request: Request) -> None:
        """Records that a worker's initializer has raised an exception."""
        ask: Any = request.ask
        self.workers.setup_failed(slot, ask.summary, ask.text)
        self.reply(slot, Reply(request.number))

    def try_again(self, slot: int, request: Request) -> None:
        """Handles a worker's request to retry its task, which has raised an exception. The reply
        states whether a retry is granted."""
        ask: Any = request.ask
        header = self.client.inspect(ask.task)
        claimed = (header["id"], header["state"], header["claimant"]) == (ask.task, "CLAIMED", slot)
        if claimed and ask.failures:
            granted = ask.failures <= header["retries_left"]
            self.sweeper.retried += granted
        else:
            granted = claimed and self.sweeper.requeue(header, slot)
        if granted and not ask.failures:
            pool = self.workers.pools.get(header["pool"])
            if pool is None or pool.broken:
                self.workers.fail(ask.task, "its pool is closed" if pool is None else pool.broken)
            elif not pool.actor and self.client.state(ask.task) == STATE["QUEUED"]:
                self.workers.post_queued(pool.number, [ask.task])
        self.reply(slot, Reply(request.number, granted))

    # -- requests from other nodes -------------------------------------------------------------

    def asked(self, host_id: int, message: OpenRemotePool) -> None:
        """Opens a pool here that runs only tasks from the requesting node."""
        if message.setup == NO_OBJECT:
            self._start(host_id, message, 0)
            return

        def ready(holds: list[Any]) -> None:
            if holds[0] is None:
                answer = RemotePoolOpened(message.number, 0, "its initializer is gone")
                self.send_peer(host_id, answer)
            else:
                self._start(host_id, message, holds[0].oid)

        self.imports.ask([message.setup], ready)

    def _start(self, host_id: int, message: OpenRemotePool, setup: int) -> None:
        if host_id not in self.roster.by_host_id:
            return
        pool = None
        able = self.resources.ledger.could_ever(message.demand)
        if able and not self.roster.leaves:
            output_owner = self.inbound_tasks.output_owner_here(host_id, message.output_owner)
            opened = Pool(
                number=0,
                target=message.workers,
                owner=NODE_SLOT,
                max_tasks=message.max_tasks,
                setup=setup,
                output_owner=output_owner,
                env=message.env,
                demand=message.demand,
                team=message.team,
                team_size=message.team_size,
            )
            pool = opened.number if self.workers.open(opened) else None
            if pool is not None and message.at_once and len(opened.workers) < message.workers:
                self.workers.close(pool, True)  # the missing workers would wait for resources
                pool = None
        error = ""
        if pool is None:
            why = self.workers.why_none if able else "it does not have these resources"
            error = f"node h{self.client.number} can start no more workers: {why}"
        if pool is not None:
            self.inbound_tasks.pools[pool] = host_id
        self.send_peer(host_id, RemotePoolOpened(message.number, pool or 0, error))
