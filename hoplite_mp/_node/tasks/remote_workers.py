"""Workers on other hosts for pools of this one: with the pool, and again when hosts are lost.

The peers of an `spmd` wait for one another, so each needs a process of its own. When the host of
one is lost, or leaves, a process is started elsewhere: otherwise the peer would begin again only
when another one has ended, which may be waiting for it. From the first loss on the node compares
the pool's tasks with its workers once a second, so no loss has to be counted.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from hoplite_mp._common import ids
from hoplite_mp._node.tasks.outbound_tasks import AHEAD_TASKS
from hoplite_mp._protocol.fields import NO_OBJECT
from hoplite_mp._protocol.peers import CloseFarPool, OpenFarPool

if TYPE_CHECKING:
    from collections.abc import Callable

    from hoplite_mp._node.objects.context import HostContext
    from hoplite_mp._node.questions import Answer
    from hoplite_mp._node.tasks.outbound_tasks import OutboundTasks
    from hoplite_mp._node.tasks.pools import Pool
    from hoplite_mp._node.tasks.resources import Resources
    from hoplite_mp._node.tasks.workers import Workers
    from hoplite_mp._protocol.peers import FarPoolOpened

__all__ = ["RemoteWorkers"]

COMMON_POOL = 0
# How often the node compares a pool's tasks with its workers, once it has lost some. Lower: more
# messages while resources are in use.
POLL_AGAIN_S = 1.0


@dataclass(slots=True)
class _Short:
    """A pool of peers that has lost workers."""

    pool: Pool
    since: float  # when it had no worker anywhere first
    asked: Counter[int] = field(default_factory=Counter)  # workers asked for, by host id
    refused: set[int] = field(default_factory=set)  # hosts that have refused in this second


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

    # -- with the pool -------------------------------------------------------------------------

    def start(self, pool: Pool, wanted: dict[int, int], done: Callable[[str, bool], None]) -> None:
        """Starts workers on other hosts. wanted: how many, by host id. `done` gets why one cannot
        start them, or ""; and whether a host is lost."""

        def opened(found: dict[int, Answer]) -> None:
            error = ""
            for host_id, answer in found.items():
                error = self._opened(pool, host_id, wanted[host_id], answer.message) or error
            done(error, any(one not in found or self._is_gone(one) for one in wanted))

        makes = {one: self._make(pool, count, False) for one, count in wanted.items()}
        self.questions.ask_each(makes, opened)

    def _make(self, pool: Pool, count: int, at_once: bool) -> Callable[[int], OpenFarPool]:
        """The request for so many workers, but for its number."""
        setup = ids.pack_id(self.client.host_id, pool.setup) if pool.setup else NO_OBJECT
        about = pool.max_tasks, setup, pool.output_owner, pool.env, pool.demand, at_once
        team = pool.team, pool.team_size
        return lambda number: OpenFarPool(number, count, *about, *team)

    def _opened(self, pool: Pool, host_id: int, count: int, there: FarPoolOpened) -> str:
        """A host has answered; returns why it cannot start them, or ""."""
        if there.error:
            return there.error
        if not self.is_open(pool):  # the pool's owner has died, or has closed it
            self.send_peer(host_id, CloseFarPool(there.pool, True))
        elif not self._is_gone(host_id):
            ahead = 0 if pool.peers else AHEAD_TASKS
            self.outbound_tasks.add_remote(pool.number, host_id, there.pool, count, ahead)
        return ""

    def _is_gone(self, host_id: int) -> bool:
        return host_id not in self.outbound_tasks.runners

    # -- after a loss --------------------------------------------------------------------------

    def lost(self, number: int) -> None:
        """That pool has lost workers on another host."""
        pool = self.workers.pools.get(number)
        if pool is None or not pool.peers:
            return
        known = self.short.get(number)
        if known is not None and known.pool is pool:
            self._look_soon(known)
            return
        short = self.short[number] = _Short(pool, self.loop.now())
        # Later, because tasks of the lost host are not queued again yet.
        self.loop.call_later(0.0, lambda: self._look_always(short))

    def forget(self, pool: Pool) -> None:
        """A pool has ended."""
        short = self.short.get(pool.number)
        if short is not None and short.pool is pool:
            del self.short[pool.number]

    def _look_soon(self, short: _Short) -> None:
        def look() -> None:
            self._look(short)

        self.loop.call_later(0.0, look)

    def _look_always(self, short: _Short) -> None:
        """Compares its tasks with its workers now, and each second as long as it is open."""
        short.refused.clear()
        if self._look(short):
            self.loop.call_later(POLL_AGAIN_S, lambda: self._look_always(short))

    def _look(self, short: _Short) -> bool:
        """Starts workers for peers that have none; False: the pool has ended."""
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
        """How many of its workers have no task."""
        running = sum(bool(self.client.client_info(slot)["running"]) for slot in pool.workers)
        far = self.outbound_tasks.far.get(pool.number, ())
        return max(0, pool.target - running) + sum(one.free for one in far)

    def _place(self, short: _Short) -> int | None:
        """The id of the host that shall start the next worker: the one that has the fewest, for its
        number of workers in the common pool if any host may have some; None: there is none."""
        pool, own = short.pool, self.client.host_id
        now = {own: pool.target}
        for runner in self.outbound_tasks.far.get(pool.number, ()):
            now[runner.host_id] = now.get(runner.host_id, 0) + runner.workers
        weights = dict.fromkeys(now, 1)
        able = {one for one, workers in now.items() if workers}
        if pool.anywhere:
            members = self.roster.by_host_id.items()
            weights = {one: member.workers for one, member in members}
            weights[own] = self.workers.pools[COMMON_POOL].target
            able = {one for one in weights if self._could(pool, one, weights[one])}
        able -= short.refused | self.roster.leaving

        def crowd(host_id: int) -> float:
            there = now.get(host_id, 0) + short.asked[host_id]
            return (there + 1) / max(1, weights[host_id])

        return min(sorted(able, key=lambda one: one != own), key=crowd, default=None)

    def _could(self, pool: Pool, host_id: int, workers: int) -> bool:
        """Could that host ever have workers of the pool?"""
        if not pool.demand:
            return workers > 0
        if host_id == self.client.host_id:
            return self.resources.ledger.could_ever(pool.demand)
        ledger = self.resources.others.get(host_id)
        return ledger is not None and ledger.could_ever(pool.demand)

    def _start_here(self, pool: Pool) -> bool:
        """Starts a worker here; False: its resources are in use."""
        if pool.demand and not self.resources.has_room(pool.demand):
            return False
        pool.target += 1
        self.workers.start_missing(pool)
        return True

    def _ask(self, short: _Short, host_id: int) -> None:
        """Asks that host for one worker."""
        short.asked[host_id] += 1

        def answered(answer: Answer | None) -> None:
            short.asked[host_id] -= 1
            leaves = host_id in self.roster.leaving
            if leaves and answer is not None and not answer.message.error:
                self.send_peer(host_id, CloseFarPool(answer.message.pool, True))
            elif leaves or answer is None or self._opened(short.pool, host_id, 1, answer.message):
                short.refused.add(host_id)
            self._look_soon(short)

        self.questions.ask(host_id, self._make(short.pool, 1, True), answered)

    def _give_up(self, short: _Short) -> None:
        """No host can start a worker now. Fails the pool's tasks if it has no worker left that they
        could wait for, and there is no hope."""
        pool, now = short.pool, self.loop.now()
        far = self.outbound_tasks.far.get(pool.number, ())
        if pool.target or any(one.workers for one in far):
            short.since = now
        elif not pool.anywhere or now - short.since >= self.config.resource_wait_s:
            pool.broken, pool.host_lost = "no host that is left has room for it", True
            self.workers.fail_queued(pool)
