"""Workers that processes of this host ask for: pools, more workers, tasks at one node.

Why it exists: a pool of every host (`far`) is open only when the other hosts have opened theirs.
It must never know: what the workers run, how other hosts are reached.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from hoplite_mp.node.tasks.pools import Pool
from hoplite_mp.protocol.local import (
    AddWorkers,
    BindPool,
    ClosePool,
    Interrupt,
    OpenPool,
    Reply,
    SetUp,
    SetupFailed,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from hoplite_mp.node.objects.context import HostContext
    from hoplite_mp.node.requests import Handler, Requests
    from hoplite_mp.node.tasks.delegation import Delegation
    from hoplite_mp.node.tasks.workers import Workers
    from hoplite_mp.protocol.local import Request

__all__ = ["PoolRequests"]


class Above(Protocol):
    """What rooms above this one do for pools and workers of other hosts."""

    def audience_of(self, slot: int) -> int:
        """Where what workers print is sent, that the process in this slot asks for."""

    def open_far(self, number: int, ask: OpenPool, done: Callable[[str, bool], None]) -> None:
        """Opens this pool at all other hosts. `done` gets why it could not be, or "", and whether
        because a host was lost."""

    def tell_workers(self, count: int) -> None:
        """This host has so many workers for everybody's tasks."""

    def grow_far(self, number: int, count: int) -> bool:
        """More workers on another host; False: there is no such node."""


class PoolRequests:
    """Of the processes of one host."""

    def __init__(
        self,
        host: HostContext,
        requests: Requests,
        workers: Workers,
        delegation: Delegation,
        above: Above,
    ) -> None:
        self.client = host.client
        self.lines = host.clients
        self.reply = host.reply
        self.replier = host.replier
        self.requests = requests
        self.workers = workers
        self.delegation = delegation
        self.above = above

    @property
    def handlers(self) -> dict[type, Handler]:
        """By kind of request."""
        return {
            Interrupt: self.interrupt,
            OpenPool: self.open,
            AddWorkers: self.add_workers,
            BindPool: self.bind,
            ClosePool: self.close,
            SetUp: self.set_up,
            SetupFailed: self.setup_failed,
        }

    def interrupt(self, slot: int, request: Request) -> None:
        """What runs that task, here or elsewhere, is to stop."""
        ask: Any = request.ask
        if not self.delegation.cancel(ask.oid):
            self.workers.interrupt(ask.oid, ask.slot)

    def open(self, slot: int, request: Request) -> None:
        """A pool of its own workers, or one that only binds tasks to a place."""
        ask: Any = request.ask
        workers = self.workers
        audience = self.above.audience_of(slot)
        if ask.workers:
            about = audience, ask.env, ask.demand
            pool = Pool(0, ask.workers, slot, ask.max_tasks, ask.setup, False, *about)
            number = pool.number if workers.open(pool, self.requests.given) else None
        else:
            number = workers.open_bound(slot, audience)
        if number is None:
            self.reply(slot, Reply(request.number, None, workers.why_none))
            return
        line, reply = self.lines.get(slot), self.replier(slot)

        def done(error: str, lost: bool) -> None:
            if not error and self.lines.get(slot) is line:
                if not self.requests.is_latest(slot, request.number):  # nobody waits for it
                    workers.close(number, True)
                    return
                undo = lambda: workers.close(number, True)  # noqa: E731
                self.requests.undo_unread(slot, request.number, undo)
            if lost:
                reply(Reply(request.number, error))
            else:
                reply(Reply(request.number, None if error else number, error))

        if ask.far:
            self.above.open_far(number, ask, done)
        else:
            done("", False)

    def add_workers(self, slot: int, request: Request) -> None:
        """More workers on this node, or on another one."""
        ask: Any = request.ask
        error, gone = "", False
        if ask.node == self.client.number:
            now = self.workers.grow(ask.count)
            error = self.workers.why_none if self.workers.pauses() else ""
            self.above.tell_workers(now)
        elif not self.above.grow_far(ask.node, ask.count):
            error, gone = f"node h{ask.node} is gone", True
        self.reply(slot, Reply(request.number, None, error, gone=gone))

    def bind(self, slot: int, request: Request) -> None:
        """A pool whose tasks run at one node alone."""
        wanted = request.ask.node  # type: ignore[union-attr]
        workers = self.workers
        number = workers.open_bound(slot, 0)
        if number is None:
            self.reply(slot, Reply(request.number, None, workers.why_none))
        elif not self.delegation.bind(number, wanted):
            workers.close(number, False)
            self.reply(slot, Reply(request.number, None, f"node h{wanted} is gone", gone=True))
        else:
            self.reply(slot, Reply(request.number, number))

    def close(self, slot: int, request: Request) -> None:
        """Nobody submits to that pool any more."""
        ask: Any = request.ask
        self.workers.close(ask.pool, ask.kill)

    def set_up(self, slot: int, request: Request) -> None:
        """That worker's initializer has run."""
        self.workers.set_up(slot)

    def setup_failed(self, slot: int, request: Request) -> None:
        """That worker's initializer has raised."""
        ask: Any = request.ask
        self.workers.setup_failed(slot, ask.summary, ask.text)
        self.reply(slot, Reply(request.number))
