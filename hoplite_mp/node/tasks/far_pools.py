"""Pools of workers of one's own on other hosts: opened, closed, and whose they are.

Why it exists: an executor's workers, or the peers of an spmd, may be on any node. Here a pool has a
number and perhaps some workers; each other node opens one for it, with workers of its own, and runs
only what this node sends there. The pool is open when all have answered.
It must never know: what tasks do, how messages travel.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from hoplite_mp import ids
from hoplite_mp.node.objects.store import NODE_SLOT
from hoplite_mp.node.tasks.delegation import AHEAD_TASKS
from hoplite_mp.node.tasks.guests import NO_OBJECT
from hoplite_mp.node.tasks.pools import Pool
from hoplite_mp.protocol.peers import CloseFarPool, FarPoolOpened, OpenFarPool

if TYPE_CHECKING:
    from collections.abc import Callable

    from hoplite_mp.node.objects.context import HostContext
    from hoplite_mp.node.tasks.delegation import Delegation
    from hoplite_mp.node.tasks.guests import Guests
    from hoplite_mp.node.tasks.resources import Resources
    from hoplite_mp.node.tasks.workers import Workers
    from hoplite_mp.protocol.local import OpenPool

__all__ = ["FarPools"]


@dataclass(slots=True)
class Opening:
    """A pool that waits for the answers of other nodes."""

    pool: int
    local: Pool
    exact: bool
    done: Callable[[str, bool], None]
    waiting: dict[int, int] = field(default_factory=dict)  # home -> workers there
    homes: set[int] = field(default_factory=set)  # of all that were asked
    error: str = ""
    lost: bool = False  # that is why


class FarPools:
    """Both sides of it, on one node."""

    def __init__(
        self,
        host: HostContext,
        delegation: Delegation,
        guests: Guests,
        workers: Workers,
        resources: Resources,
    ) -> None:
        self.client = host.client
        self.imports = host.imports
        self.roster = host.roster
        self.send = host.send_peer
        self.delegation = delegation
        self.guests = guests
        self.workers = workers
        self.resources = resources
        self.openings: dict[int, Opening] = {}  # by number
        self._last = 0

    # -- the one whose tasks they run ----------------------------------------------------------

    def open(self, pool: int, ask: OpenPool, done: Callable[[str, bool], None]) -> None:
        """Workers on other nodes for a pool of this host; `done` hears "", or why there are none,
        and whether that is because a node is lost."""
        members = self.roster.by_number
        if any(number not in members for number, _ in ask.far):
            gone = next(number for number, _ in ask.far if number not in members)
            self.workers.close(pool, True)
            done(f"node h{gone} is gone", True)
            return
        self._last += 1
        opening = self.openings[self._last] = Opening(
            pool, self.workers.pools[pool], ask.exact, done
        )
        setup = ids.pack_id(self.client.home, ask.setup) if ask.setup else NO_OBJECT
        for number, workers in ask.far:
            opening.waiting[members[number].home] = workers
        opening.homes = set(opening.waiting)
        audience = opening.local.audience
        for home, workers in list(opening.waiting.items()):
            message = OpenFarPool(
                self._last, workers, ask.max_tasks, setup, audience, ask.env, ask.demand
            )
            self.send(home, message)

    def opened(self, home: int, message: FarPoolOpened) -> None:
        """Another node's answer."""
        opening = self.openings.get(message.number)
        if opening is None or home not in opening.waiting:
            return
        workers = opening.waiting.pop(home)
        if message.error:
            opening.error = message.error
        elif not self._is_open(opening):  # its owner has died, or closed it
            self.send(home, CloseFarPool(message.pool, True))
            opening.error = "the pool has been closed while its workers were started"
        elif home in self.delegation.runners:
            ahead = 0 if opening.exact else AHEAD_TASKS
            self.delegation.add_far(opening.pool, home, message.pool, workers, ahead)
        self._look(message.number, opening)

    def _is_open(self, opening: Opening) -> bool:
        return self.workers.pools.get(opening.pool) is opening.local and (not opening.local.closing)

    def _look(self, number: int, opening: Opening) -> None:
        if opening.waiting:
            return
        del self.openings[number]
        if opening.error and self._is_open(opening):
            self.workers.close(opening.pool, True)
        opening.done(opening.error, opening.lost)

    def close(self, pool: int, kill: bool) -> None:
        """The pool's workers elsewhere end, too."""
        for runner in list(self.delegation.far.get(pool, ())):
            if runner.pool:  # else it is bound to that host, and has no workers of its own there
                self.send(runner.home, CloseFarPool(runner.pool, kill))

    # -- the one that has the workers ----------------------------------------------------------

    def asked(self, home: int, message: OpenFarPool) -> None:
        """Another node wants workers of its own here."""
        if message.setup == NO_OBJECT:
            self._start(home, message, 0)
            return

        def ready(holds: list[Any]) -> None:
            if holds[0] is None:
                answer = FarPoolOpened(message.number, 0, "its initializer is gone")
                self.send(home, answer)
            else:
                self._start(home, message, holds[0].oid)

        self.imports.ask([message.setup], ready)

    def _start(self, home: int, message: OpenFarPool, setup: int) -> None:
        if home not in self.roster.by_home:
            return
        pool = None
        able = self.resources.ledger.could_ever(message.demand)
        if able and not self.roster.leaves:
            audience = self.guests.audience_here(home, message.audience)
            about = audience, message.env, message.demand
            opened = Pool(0, message.workers, NODE_SLOT, message.max_tasks, setup, False, *about)
            pool = opened.number if self.workers.open(opened) else None
        error = "" if pool is not None else f"node h{self.client.number} can start no more workers"
        if pool is None and self.workers.pauses():
            error += f": {self.workers.trouble}"
        if pool is not None:
            self.guests.pools[pool] = home
        self.send(home, FarPoolOpened(message.number, pool or 0, error))

    def closed(self, home: int, message: CloseFarPool) -> None:
        """That node needs them no more."""
        if self.guests.pools.get(message.pool) == home:
            del self.guests.pools[message.pool]
            self.workers.close(message.pool, message.kill)

    def lose_peer(self, home: int) -> None:
        """That node is gone, and nobody else gives its workers anything."""
        for pool in [pool for pool, owner in self.guests.pools.items() if owner == home]:
            del self.guests.pools[pool]
            self.workers.close(pool, True)
        for number, opening in list(self.openings.items()):
            opening.waiting.pop(home, None)
            if home in opening.homes:
                opening.error = "a node was lost while its workers were started"
                opening.lost = True
                self._look(number, opening)
