"""Pools of workers: how many there are, how many there should be, who replaces whom.

Why it exists: a pool keeps its number of workers that can run a task: one that died is replaced,
one that waits inside a task counts as blocked and gets a stand-in, up to a named limit; surplus
ones retire when idle. It only counts and asks; the supervisor forks.
It must never know: tasks' contents, sockets.
"""

from __future__ import annotations

from dataclasses import dataclass, field

__all__ = ["Pool", "WorkerInfo"]

STARTUP_DEATHS_MAX = 5
SURPLUS_PATIENCE_S = 1.0
STUCK_PATIENCE_S = 1.0


@dataclass(slots=True)
class WorkerInfo:
    """One worker as the node knows it."""

    slot: int
    pool: int
    pid: int = 0
    verdict: str = ""  # why the node killed it: "timeout", "cancelled", "closing"
    verdict_oid: int = 0
    retiring: bool = False
    worked: bool = False
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
    workers: dict[int, WorkerInfo] = field(default_factory=dict)
    closing: bool = False
    broken: str = ""
    host_lost: bool = False  # that is why it is broken
    failing: bool = False  # what comes into its queue fails
    startup_deaths: int = 0
    surplus_since: float | None = None
    stuck_since: float | None = None
    setup_hold: object = None
    setup_error: str = ""  # what the initializer raised, in words
    setup_text: str = ""  # its traceback

    def missing(self, blocked: int, blocked_max: int) -> int:
        """How many workers to start now; `blocked` of the living wait inside a task."""
        if self.closing or self.broken:
            return 0
        living = sum(not worker.retiring for worker in self.workers.values())
        wanted = self.target + (0 if self.actor else min(blocked, blocked_max))
        return max(0, wanted - living)

    def stuck(self, blocked: int, blocked_max: int, now: float) -> bool:
        """All its workers have waited inside tasks for a while, and no other one may be started:
        what they have sent to this pool would never run."""
        living = sum(not worker.retiring for worker in self.workers.values())
        if self.closing or self.actor or blocked <= blocked_max or blocked < living:
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

    def died(self, worker: WorkerInfo, code: int, setup_failed: int) -> None:
        """Counts deaths before the first task: a pool that cannot start is broken."""
        if code == setup_failed and self.setup and not worker.worked:
            self.broken = f"its initializer raised {self.setup_error or 'an exception'}"
        elif not worker.worked and code != 0 and not worker.verdict:
            self.startup_deaths += 1
            healthy = any(other.worked for other in self.workers.values())
            if self.startup_deaths >= STARTUP_DEATHS_MAX and not healthy:
                self.broken = f"its workers end while they start (exit code {code})"
        else:
            self.startup_deaths = 0
