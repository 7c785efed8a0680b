"""Requests for pools and workers, from processes of this host and from other nodes.

An executor's workers, or the peers of an spmd, may be on any node. The pool has a number on this
host, and perhaps some workers here. Every other node that is to have workers for it opens a pool of
its own, which runs only what this node sends there. The pool is open when all nodes have answered.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from hoplite_mp._common import ids
from hoplite_mp._common.object_states import NODE_SLOT, STATE
from hoplite_mp._node.tasks.pools import Pool
from hoplite_mp._node.tasks.remote_workers import RemoteWorkers
from hoplite_mp._protocol.fields import NO_OBJECT
from hoplite_mp._protocol.local import (
    AddWorkers,
    BindPool,
    ClosePool,
    Interrupt,
    OpenPool,
    Reply,
    SetUp,
    SetupFailed,
    TryAgain,
)
from hoplite_mp._protocol.peers import FarPoolOpened

if TYPE_CHECKING:
    from collections.abc import Callable

    from hoplite_mp._node.objects.context import HostContext
    from hoplite_mp._node.requests import Handler, Requests
    from hoplite_mp._node.tasks.inbound_tasks import InboundTasks
    from hoplite_mp._node.tasks.outbound_tasks import OutboundTasks
    from hoplite_mp._node.tasks.resources import Resources
    from hoplite_mp._node.tasks.sweeper import Sweeper
    from hoplite_mp._node.tasks.workers import Workers
    from hoplite_mp._protocol.local import Request
    from hoplite_mp._protocol.peers import OpenFarPool

__all__ = ["PoolRequests"]


class PoolRequestsEvents(Protocol):
    """What this component reports to components above it, and asks of them."""

    def output_owner_of(self, slot: int) -> int:
        """The driver that gets what workers print for the process in that slot."""

    def tell_workers(self, count: int) -> None:
        """Announces this host's number of workers in the common pool."""

    def grow_remote(self, number: int, count: int) -> bool:
        """Asks another node to start more workers; False: there is no such node."""


class PoolRequests:
    """The requests to one node."""

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
        self._teams = 0  # spmd calls of this host so far

    @property
    def handlers(self) -> dict[type, Handler]:
        """Handlers by type of request."""
        return {
            Interrupt: self.interrupt,
            OpenPool: self.open,
            AddWorkers: self.add_workers,
            BindPool: self.bind,
            ClosePool: self.close,
            SetUp: self.set_up,
            SetupFailed: self.setup_failed,
            TryAgain: self.try_again,
        }

    def interrupt(self, slot: int, request: Request) -> None:
        """Interrupts the worker that runs a task, here or on another host."""
        ask: Any = request.ask
        if not self.outbound_tasks.cancel(ask.oid):
            self.workers.interrupt(ask.oid, ask.slot)

    def open(self, slot: int, request: Request) -> None:
        """Opens a pool with workers of its own, or one without workers on this host."""
        ask: Any = request.ask
        workers = self.workers
        about = self.events.output_owner_of(slot), ask.env, ask.demand, ask.exact, ask.anywhere
        pool = Pool(0, ask.workers, slot, ask.max_tasks, ask.setup, False, *about)
        if pool.peers:
            self._teams += 1
            pool.team = ids.pack_id(self.client.host_id, self._teams)
            pool.team_size = ask.workers + sum(count for _, count in ask.far)
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
        """Opens pools on other nodes for a pool of this host. `done` gets "", or the reason of a
        failure, and whether a lost node is the reason."""
        local, members = self.workers.pools[pool], self.roster.by_number
        gone = next((number for number, _ in ask.far if number not in members), None)
        if gone is not None:
            self.workers.close(pool, True)
            done(f"node h{gone} is gone", True)
            return
        wanted = {members[number].host_id: workers for number, workers in ask.far}

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
        """Starts more workers on this node, or has another one do so."""
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
        """Opens a pool whose tasks run on one other node only."""
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
        """A process closes its pool."""
        ask: Any = request.ask
        self.workers.close(ask.pool, ask.kill)

    def set_up(self, slot: int, request: Request) -> None:
        """A worker's initializer has returned."""
        self.workers.set_up(slot)

    def setup_failed(self, slot: int, request: Request) -> None:
        """A worker's initializer has raised."""
        ask: Any = request.ask
        self.workers.setup_failed(slot, ask.summary, ask.text)
        self.reply(slot, Reply(request.number))

    def try_again(self, slot: int, request: Request) -> None:
        """A task has raised an error for which it is retried, as after its worker's death."""
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

    # -- requests of other nodes ---------------------------------------------------------------

    def asked(self, host_id: int, message: OpenFarPool) -> None:
        """Another node asks for a pool here that only runs its tasks."""
        if message.setup == NO_OBJECT:
            self._start(host_id, message, 0)
            return

        def ready(holds: list[Any]) -> None:
            if holds[0] is None:
                answer = FarPoolOpened(message.number, 0, "its initializer is gone")
                self.send_peer(host_id, answer)
            else:
                self._start(host_id, message, holds[0].oid)

        self.imports.ask([message.setup], ready)

    def _start(self, host_id: int, message: OpenFarPool, setup: int) -> None:
        if host_id not in self.roster.by_host_id:
            return
        pool = None
        able = self.resources.ledger.could_ever(message.demand)
        if able and not self.roster.leaves:
            output_owner = self.inbound_tasks.output_owner_here(host_id, message.output_owner)
            about = output_owner, message.env, message.demand
            opened = Pool(0, message.workers, NODE_SLOT, message.max_tasks, setup, False, *about)
            opened.team, opened.team_size = message.team, message.team_size
            pool = opened.number if self.workers.open(opened) else None
            if pool is not None and message.at_once and len(opened.workers) < message.workers:
                self.workers.close(pool, True)  # they would wait for resources
                pool = None
        error = ""
        if pool is None:
            why = self.workers.why_none if able else "it never has these resources"
            error = f"node h{self.client.number} can start no more workers: {why}"
        if pool is not None:
            self.inbound_tasks.pools[pool] = host_id
        self.send_peer(host_id, FarPoolOpened(message.number, pool or 0, error))
