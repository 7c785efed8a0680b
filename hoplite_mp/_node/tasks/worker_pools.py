"""Worker pools: how many workers each pool has, and how many it needs.

A pool maintains the number of workers that can run a task. A dead worker is replaced. A worker that
is waiting inside a task counts as blocked and gets a stand-in, up to a limit. Surplus workers
retire when they are idle. Workers that die before their first task are restarted without limit,
after growing pauses, because the cause may be temporary. This file only computes the numbers;
workers.py starts and stops workers accordingly.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from hoplite_mp._protocol.fields import NO_OBJECT

if TYPE_CHECKING:
    from collections.abc import Set

    from hoplite_mp._planner.resources import Demand
    from hoplite_mp._protocol.spawning import Environment
    from hoplite_mp.config import Config

__all__ = ["Pool", "WorkerInfo", "next_number"]

POOLS_MAX = 256  # including the common pool, 0
SURPLUS_PATIENCE_S = 1.0
STUCK_PATIENCE_S = 1.0
# Bits of a worker's word in the store (enum client_retire in cext/shm_layout.h).
RETIRE_ENDS, RETIRE_ASKS = 1, 2


@dataclass(slots=True)
class WorkerInfo:
    """The node's record of one worker."""

    slot: int
    pool: int
    pid: int = 0
    # the reason why the node killed the worker: "timeout", "cancelled", "closing", "line"
    verdict: str = ""
    verdict_oid: int = 0
    retiring: bool = False
    worked: bool = False
    stands_in: bool = False  # a stand-in for a worker that is waiting inside a task
    # must request the task of a broadcast before its next task (_node/tasks/worker_broadcast.py)
    called: bool = False
    born: float = 0.0

    @property
    def retire_bits(self) -> int:
        """The worker's duties between two tasks, as bits."""
        return (RETIRE_ENDS if self.retiring else 0) | (RETIRE_ASKS if self.called else 0)


@dataclass(slots=True)
class Pool:
    """One pool: its parameters, its workers, and the state of their starts."""

    number: int
    target: int  # the number of workers that should be able to run a task
    owner: int  # client slot
    max_tasks: int = 0
    setup: int = 0  # object with the initializer and its arguments; 0: none
    actor: bool = False  # the pool's only worker is an actor, which gets no stand-in
    output_owner: int = 0  # the driver that receives the workers' output before their first task
    env: Environment = ()  # changes to the workers' environment
    demand: Demand = ()  # resources of each worker until it exits; these workers get no stand-in
    peers: bool = False  # its tasks wait for one another, so each needs its own worker
    anywhere: bool = False  # hosts without workers of this pool may run its tasks
    team: bytes = NO_OBJECT  # the id of the spmd call whose peers its workers run
    team_size: int = 0  # the number of peers in that call, on all hosts
    workers: dict[int, WorkerInfo] = field(default_factory=dict)
    closing: bool = False
    broken: str = ""  # reason why no more workers will be started
    host_lost: bool = False  # the pool is broken because a host was lost
    failing: bool = False  # a timer repeatedly fails newly queued tasks
    attempts: int = 0  # number of consecutive starts whose workers died before their first task
    start_again_at: float = 0.0
    keeps_failing: bool = False  # after many failed attempts: queued tasks fail as well
    proven: bool = False  # the initializer has returned in some worker
    why: str = ""  # how the last worker that died before its first task exited
    surplus_since: float | None = None
    stuck_since: float | None = None
    setup_hold: object = None
    descriptors: list[int] = field(default_factory=list)  # in the initializer's arguments
    setup_error: str = ""  # the exception raised by the initializer, as text
    setup_text: str = ""  # the traceback of that exception

    @property
    def living(self) -> int:
        """The number of workers that are not retiring."""
        living = 0
        for worker in self.workers.values():
            if not worker.retiring:
                living += 1
        return living

    @property
    def own(self) -> int:
        """The number of workers that are neither retiring nor stand-ins."""
        return sum(not (worker.retiring or worker.stands_in) for worker in self.workers.values())

    def is_settled(self, blocked: int) -> bool:
        """Whether `missing` and `surplus` would return 0 and `stuck` False, at any time. This is
        the usual case, detected with a single count. A pool with a demand is never settled, because
        the resources component must be notified when the pool needs no more workers. blocked: the
        number of workers that are waiting inside a task."""
        return not (
            blocked
            or self.demand
            or self.broken
            or self.surplus_since is not None
            or self.stuck_since is not None
            or (self.living != self.target and not self.closing)
        )

    def missing(self, blocked: int, blocked_max: int, now: float) -> int:
        """The number of workers to start now. blocked: the number of workers that are waiting
        inside a task."""
        if self.closing or self.broken or now < self.start_again_at:
            return 0
        wanted = self.target + (0 if self.actor or self.demand else min(blocked, blocked_max))
        short = max(0, wanted - self.living)
        # After many failed attempts, a single worker shows whether starts succeed.
        return min(short, 1) if self.keeps_failing else short

    def stuck(self, blocked: int, blocked_max: int, now: float) -> bool:
        """Whether the pool is in a deadlock: all workers have been waiting inside tasks for a
        while, and no stand-in may be started, so the tasks that they have submitted to this pool
        can never run."""
        limit = 0 if self.demand else blocked_max
        if self.closing or self.actor or blocked <= limit or blocked < self.living:
            self.stuck_since = None
        elif self.stuck_since is None:
            self.stuck_since = now
        return self.stuck_since is not None and now - self.stuck_since >= STUCK_PATIENCE_S

    def surplus(self, blocked: int, now: float) -> int:
        """The number of idle workers that may retire, once the surplus has lasted for a while."""
        extra = self.living - blocked - self.target
        if extra <= 0 or self.closing:
            self.surplus_since = None
            return 0
        if self.surplus_since is None:
            self.surplus_since = now
        return extra if now - self.surplus_since >= SURPLUS_PATIENCE_S else 0

    def died(
        self, worker: WorkerInfo, code: int, setup_failed: int, how: str, now: float, limits: Config
    ) -> bool:
        """Records the exit of a worker. If several workers in a row exit before their first task,
        the next start is delayed. how: a description of the exit. Returns True if so many attempts
        have failed that tasks should not wait for the next one."""
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
        if now >= self.start_again_at:  # several workers started together count once
            self.attempts += 1
            if self.attempts > 1:
                pause = limits.restart_pause_s * 2.0 ** min(self.attempts - 2, 60)
                self.start_again_at = now + min(pause, limits.restart_pause_s_max)
        if self.attempts >= limits.start_attempts_max:
            self.keeps_failing = True
            if self.setup and not self.proven:
                self.broken = f"its workers exit in the initializer ({how})"
        return self.keeps_failing

    def idle_again(self, limits: Config) -> None:
        """Allows further starts, because a worker is idle. After one more failure, queued tasks
        fail again."""
        if self.keeps_failing:
            self.keeps_failing = False
            self.attempts = limits.start_attempts_max - 1
            self.start_again_at = 0.0

    def recovered(self) -> None:
        """Forgets failed starts, because a worker has run a task or stayed alive long enough."""
        if self.attempts:
            self.attempts, self.keeps_failing = 0, False
            self.start_again_at = 0.0


def next_number(last: int, taken: Set[int]) -> int | None:
    """The number of the next pool, or None if all are taken. Numbers are assigned in turn, because
    messages about the previous pool with a number may still arrive."""
    turn = ((last + step) % (POOLS_MAX - 1) + 1 for step in range(POOLS_MAX - 1))
    return next((number for number in turn if number not in taken), None)
