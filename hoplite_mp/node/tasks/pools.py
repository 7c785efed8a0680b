"""Pools of workers: how many there are, how many there should be, who replaces whom.

Why it exists: a pool keeps its number of workers that can run a task: one that died is replaced,
one that waits inside a task counts as blocked and gets a stand-in, up to a named limit; surplus
ones retire when idle. Workers that die before their first task are started again after pauses that
grow, and for ever: what kills them may end. It only counts and asks; the supervisor forks.
It must never know: tasks' contents, sockets.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hoplite_mp.config import Config
    from hoplite_mp.planner.resources import Demand
    from hoplite_mp.protocol.birth import Environment

__all__ = ["Pool", "WorkerInfo"]

SURPLUS_PATIENCE_S = 1.0
STUCK_PATIENCE_S = 1.0


@dataclass(slots=True)
class WorkerInfo:
    """One worker as the node knows it."""

    slot: int
    pool: int
    pid: int = 0
    verdict: str = ""  # why the node killed it: "timeout", "cancelled", "closing", "line"
    verdict_oid: int = 0
    retiring: bool = False
    worked: bool = False
    called: bool = False  # it is to ask what to run between two tasks (node/tasks/rounds.py)
    born: float = 0.0
    interrupted: int = 0  # a task to be interrupted as soon as the pid is known


@dataclass(slots=True)
class Pool:
    """The wanted and the living."""

    number: int
    target: int
    owner: int  # client slot
    max_tasks: int = 0
    setup: int = 0
    actor: bool = False  # its one worker keeps a state, and nobody stands in for it
    audience: int = 0  # who hears what its workers print before their first task
    env: Environment = ()  # changes of their environment
    demand: Demand = ()  # resources of each worker, for life; so nobody stands in for one
    workers: dict[int, WorkerInfo] = field(default_factory=dict)
    closing: bool = False
    broken: str = ""
    host_lost: bool = False  # that is why it is broken
    failing: bool = False  # what comes into its queue fails
    attempts: int = 0  # to start workers, in a row, that died before their first task
    start_again_at: float = 0.0
    ailing: bool = False  # so many that tasks fail, and none is there yet
    proven: bool = False  # a worker has come through the initializer
    why: str = ""  # how the last of them ended
    surplus_since: float | None = None
    stuck_since: float | None = None
    setup_hold: object = None
    descriptors: list[int] = field(default_factory=list)  # that its initializer's arguments need
    setup_error: str = ""  # what the initializer raised, in words
    setup_text: str = ""  # its traceback

    def missing(self, blocked: int, blocked_max: int, now: float) -> int:
        """How many workers to start now; `blocked` of the living wait inside a task."""
        if self.closing or self.broken or now < self.start_again_at:
            return 0
        living = sum(not worker.retiring for worker in self.workers.values())
        wanted = self.target + (0 if self.actor or self.demand else min(blocked, blocked_max))
        short = max(0, wanted - living)
        return min(short, 1) if self.ailing else short  # one to try it

    def stuck(self, blocked: int, blocked_max: int, now: float) -> bool:
        """All its workers have waited inside tasks for a while, and no other one may be started:
        what they have sent to this pool would never run."""
        living = sum(not worker.retiring for worker in self.workers.values())
        limit = 0 if self.demand else blocked_max
        if self.closing or self.actor or blocked <= limit or blocked < living:
            self.stuck_since = None
        elif self.stuck_since is None:
            self.stuck_since = now
        return self.stuck_since is not None and now - self.stuck_since >= STUCK_PATIENCE_S

    def surplus(self, blocked: int, now: float) -> int:
        """How many idle workers may retire; only after the surplus has lasted a while."""
        living = sum(not worker.retiring for worker in self.workers.values())
        extra = living - blocked - self.target
        if extra <= 0 or self.closing:
            self.surplus_since = None
            return 0
        if self.surplus_since is None:
            self.surplus_since = now
        return extra if now - self.surplus_since >= SURPLUS_PATIENCE_S else 0

    def died(
        self, worker: WorkerInfo, code: int, setup_failed: int, how: str, now: float, limits: Config
    ) -> bool:
        """Notes an end before the first task: a pause comes before the next attempt. True: nobody
        knows whether another attempt will do better, and tasks should not wait for it.
        how: the end in words."""
        if code == setup_failed and self.setup and not worker.worked:
            self.broken = f"its initializer raised {self.setup_error or 'an exception'}"
            return False
        wanted = worker.verdict not in ("", "line")
        if wanted or worker.retiring or self.closing or not worker.pid:
            return False
        if worker.worked or now - worker.born >= limits.restart_pause_s_max:
            self.recovered()
            return False
        self.why = how
        if now >= self.start_again_at:  # of several that were started together the first counts
            self.attempts += 1
            if self.attempts > 1:
                pause = limits.restart_pause_s * 2.0 ** min(self.attempts - 2, 60)
                self.start_again_at = now + min(pause, limits.restart_pause_s_max)
        if self.attempts >= limits.start_attempts_max:
            self.ailing = True
            if self.setup and not self.proven:
                self.broken = f"its workers end in the initializer ({how})"
        return self.ailing

    def idle_again(self, limits: Config) -> None:
        """One has come up: the others may start. They will be soon in pauses again if it dies."""
        if self.ailing:
            self.ailing = False
            self.attempts = limits.start_attempts_max - 1
            self.start_again_at = 0.0

    def recovered(self) -> None:
        """One has worked, or lived for long."""
        if self.attempts:
            self.attempts, self.ailing = 0, False
            self.start_again_at = 0.0
