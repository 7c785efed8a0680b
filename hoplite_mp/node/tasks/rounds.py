"""Rounds: one task for each worker of the common pool, between two of its tasks.

Why it exists: `Cluster.run` wants every worker once, but whoever is idle first takes what is
queued. So the tasks of a round stand in a pool that no worker looks at. The node gives each worker
of its roster one of them when that worker asks, and a worker asks when a bit in its slot says so.
Other nodes do the same with a pool of their own, to which this node sends as many tasks as that one
has workers. A worker that ends before its turn takes one task of the round with it, which fails.
It must never know: what the tasks do, who waits for them.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from hoplite_mp.headers import NODE_SLOT, STATE
from hoplite_mp.node.tasks.delegation import Runner
from hoplite_mp.protocol.local import Reply
from hoplite_mp.protocol.peers import (
    CloseFarPool,
    EndFarRound,
    FarRoundEnded,
    FarRoundOpened,
    OpenFarRound,
)

if TYPE_CHECKING:
    from hoplite_mp.node.objects.context import HostContext
    from hoplite_mp.node.questions import Answer
    from hoplite_mp.node.tasks.delegation import Delegation
    from hoplite_mp.node.tasks.guests import Guests
    from hoplite_mp.node.tasks.workers import Workers
    from hoplite_mp.protocol.local import Request

__all__ = ["Rounds"]

COMMON_POOL = 0
# Until the next look for tasks that are not queued yet. Lower: more turns of the node while a round
# has lost a worker; higher: who waits for that round learns of it later.
LOOK_S = 0.05
# Who gives a round up waits so long for nodes to say that they know. Higher: a node that stands
# still is waited for, until it is lost; lower: one that is slow may begin a task after that.
END_PATIENCE_S = 1.0
RETIRE, CALLED = 1, 2  # bits of a worker's slot
ENDED = "its worker ended before its turn in this round"


@dataclass(slots=True)
class Round:
    """One call of `Cluster.run`, as far as this node has to do with it."""

    pool: int
    waiting: set[int]  # slots of workers that have not come yet
    begun: bool = False  # all its tasks that are for this host are queued, or on their way here
    given: dict[int, int] = field(default_factory=dict)  # slot -> the task that it has been told
    surplus: int = 0  # tasks whose workers ended before they came
    far: dict[int, tuple[int, int]] = field(default_factory=dict)  # home -> (pool, workers) there
    unsent: dict[int, int] = field(default_factory=dict)  # home -> tasks that are to go there


class Above(Protocol):
    """What rooms above this one know, or must hear."""

    def audience_of(self, slot: int) -> int:
        """Who hears what the client in that slot has others print."""


class Rounds:
    """All rounds of one node, its own and those of other nodes."""

    def __init__(
        self,
        host: HostContext,
        workers: Workers,
        delegation: Delegation,
        guests: Guests,
        above: Above,
    ) -> None:
        self.loop = host.loop
        self.client = host.client
        self.tasks = host.tasks
        self.roster = host.roster
        self.send_peer = host.send_peer
        self.reply = host.reply
        self.replier = host.replier
        self.workers = workers
        self.delegation = delegation
        self.guests = guests
        self.questions = host.questions
        self.above = above
        self.by_pool: dict[int, Round] = {}

    def __contains__(self, pool: int) -> bool:
        return pool in self.by_pool

    # -- the node of the caller ------------------------------------------------------------------

    def open(self, slot: int, request: Request) -> None:
        """Who takes part is decided now, on every node."""
        ask: Any = request.ask
        workers = self.workers
        reply = self.replier(slot)
        number = workers.open_bound(slot, self.above.audience_of(slot))
        if number is None:
            reply(Reply(request.number, None, workers.why_none))
            return
        here = not ask.nodes or self.client.number in ask.nodes
        round = self.by_pool[number] = Round(number, self._roster() if here else set())
        others = [
            member.home
            for member in self.roster.by_home.values()
            if member.workers and (not ask.nodes or member.node in ask.nodes)
        ]
        patience = ask.timeout_s
        deadline = math.inf if patience is None else self.loop.now() + patience

        def opened(found: dict[int, Answer]) -> None:
            there = {home: answer.message for home, answer in found.items()}
            round.far = {home: (one.pool, one.workers) for home, one in there.items() if one.pool}
            if self.by_pool.get(number) is not round:  # its caller has died
                self._close_there(round)
            elif len(found) < len(others) and self.loop.now() >= deadline:
                self.workers.close(number, False)
                reply(Reply(request.number))
            else:
                count = len(round.waiting) + sum(workers for _, workers in round.far.values())
                reply(Reply(request.number, (number, count)))

        self.questions.ask_all(others, OpenFarRound, opened, patience)

    def opened(self, home: int, message: FarRoundOpened) -> None:
        """Another node's answer."""
        if not self.questions.answered(home, message) and message.pool:  # too late
            self.send_peer(home, CloseFarPool(message.pool, False))

    def begin(self, slot: int, request: Request) -> None:
        """All tasks are queued: each node gets its share of them."""
        round = self.by_pool.get(request.ask.pool)  # type: ignore[union-attr]
        if round is not None:
            round.unsent = {home: workers for home, (_, workers) in round.far.items()}
            self._share_out(round)

    def _share_out(self, round: Round) -> None:
        """What is for other nodes goes first: what is left is for the workers here."""
        if self.by_pool.get(round.pool) is not round:
            return
        while round.unsent:
            home = next(iter(round.unsent))
            runner = self.delegation.runners.get(home)
            if runner is None:  # lost meanwhile: nobody runs these
                round.surplus += round.unsent.pop(home)
                continue
            oid = self.tasks.take_queued(round.pool)
            if not oid:  # more than a ring of hints holds
                self.loop.call_later(LOOK_S, functools.partial(self._share_out, round))
                return
            there, workers = round.far[home]
            self.delegation.delegate(oid, [Runner(home, runner.number, workers, there, 0)])
            round.unsent[home] -= 1
            if not round.unsent[home]:
                del round.unsent[home]
        round.begun = True
        self._call(round)
        self._shed(round)

    def end(self, slot: int, request: Request) -> None:
        """The caller waits no longer."""
        reply = self.replier(slot)
        round = self.by_pool.get(request.ask.pool)  # type: ignore[union-attr]
        far = {} if round is None else round.far
        ends = {home: functools.partial(EndFarRound, pool=pool) for home, (pool, _) in far.items()}
        if round is not None:
            self.workers.close(round.pool, False)
        self.questions.ask_each(ends, lambda _: reply(Reply(request.number)), END_PATIENCE_S)

    # -- the node of the workers -----------------------------------------------------------------

    def asked(self, home: int, message: OpenFarRound) -> None:
        """Another node wants every worker of this host once."""
        number, roster = None, self._roster()
        if roster:
            number = self.workers.open_bound(NODE_SLOT, 0)
        if number is not None:
            self.by_pool[number] = Round(number, roster, begun=True)
            self.guests.pools[number] = home
        workers = len(roster) if number is not None else 0
        self.send_peer(home, FarRoundOpened(message.number, number or 0, workers))

    def end_here(self, home: int, message: EndFarRound) -> None:
        """That node's caller waits no longer."""
        self.workers.close_lent(home, message.pool, False)
        self.send_peer(home, FarRoundEnded(message.number))

    def arrived(self, pool: int) -> None:
        """A task of another node is queued in that pool."""
        round = self.by_pool.get(pool)
        if round is not None:
            self._call(round)

    def _roster(self) -> set[int]:
        """The workers of the common pool as of now."""
        if self.roster.leaves:
            return set()
        workers = self.workers.pools[COMMON_POOL].workers
        return {
            slot for slot, one in workers.items() if not one.retiring and one.verdict != "closing"
        }

    def _free(self, round: Round) -> list[int]:
        """Its tasks for this host that nobody has been given."""
        given = set(round.given.values())
        return [oid for oid in self.client.queued_in(round.pool) if oid not in given]

    def _call(self, round: Round) -> None:
        """Those who have not come yet are to come: between two tasks, or while they wait in a
        round of their own."""
        if not (round.begun and round.waiting and self._free(round)):
            return
        for slot in round.waiting:
            worker = self.workers.all[slot]
            worker.called = True
            self.client.set_retire(slot, CALLED | (RETIRE if worker.retiring else 0))
            self.tasks.wake(slot)
        self.tasks.wake_pool(COMMON_POOL)

    def take(self, slot: int, request: Request) -> None:
        """That worker has come."""
        found: list[int] = []
        worker = self.workers.all.get(slot)
        if worker is not None:  # first: a task that comes after this look calls it again
            worker.called = False
            self.client.set_retire(slot, RETIRE if worker.retiring else 0)
        for round in self.by_pool.values():
            if round.begun and slot in round.waiting and (free := self._free(round)):
                round.waiting.discard(slot)
                round.given[slot] = free[0]
                found.append(free[0])
        self.reply(slot, Reply(request.number, found))

    # -- what happens to them --------------------------------------------------------------------

    def exited(self, slot: int) -> None:
        """That worker has ended."""
        for round in list(self.by_pool.values()):
            if slot in round.waiting:
                round.waiting.discard(slot)
                round.surplus += 1
                self._shed(round)
            oid = round.given.pop(slot, 0)
            if oid and self.client.state(oid) == STATE["QUEUED"]:
                self.workers.fail(oid, ENDED)

    def _shed(self, round: Round) -> None:
        """As many tasks fail as workers have ended before they came."""
        if not round.surplus or self.by_pool.get(round.pool) is not round:
            return
        if round.begun:
            for oid in self._free(round)[: round.surplus]:
                self.workers.fail(oid, ENDED)
                round.surplus -= 1
        if round.surplus:  # still on their way
            self.loop.call_later(LOOK_S, functools.partial(self._shed, round))

    def forget(self, pool: int) -> None:
        """The caller needs it no more, or has died."""
        round = self.by_pool.pop(pool, None)
        if round is None:
            return
        self.guests.withdraw(pool)
        self._close_there(round)

    def _close_there(self, round: Round) -> None:
        for home, (pool, _) in round.far.items():
            self.send_peer(home, CloseFarPool(pool, False))
