"""Faults on one host, at random instants: kills, and processes that stand still for a while.

Each fault is counted in the tally before it happens, for the model, and is over when this says so:
a killed process is gone, a stopped one goes on.
"""

from __future__ import annotations

import contextlib
import signal
import time
from collections import Counter
from typing import TYPE_CHECKING

import psutil

from tests.support.processes import processes_named

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Mapping

    from tests.campaign.tally import Tally

__all__ = ["Faults"]

PAUSE_S = (0.05, 0.5)
STOP_S = {"hoplite worker": 0.5, "hoplite manager": 0.3, "hoplite node": 0.3}
MANAGER_DEATHS_MAX = 6  # ten within ten seconds are the end of a cluster
MANAGER_PAUSE_S = 2.0
GONE_S = 30.0


class Faults:
    """Makes them, one after the other. kill_driver: kills one of the attached drivers and starts
    another one in its place; more: what else may happen, and how often in comparison."""

    def __init__(
        self, tally: Tally, dice: random.Random, kill_driver: Callable[[], None],
        more: Mapping[Callable[[], None], int],
    ) -> None:  # fmt: skip
        self.tally, self.dice, self.kill_driver = tally, dice, kill_driver
        self.made: Counter[str] = Counter()
        self.kinds = {
            self.kill_worker: 5,
            self.stop_worker: 3,
            self.kill_manager: 2,
            self.stop_manager: 1,
            self.stop_node: 1,
            self.kill_one_driver: 1,
            **more,
        }
        self.manager_died = 0.0

    def make(self) -> None:
        """One of them, after a pause."""
        time.sleep(self.dice.uniform(*PAUSE_S))
        (kind,) = self.dice.choices(list(self.kinds), list(self.kinds.values()))
        self.made[kind.__name__] += 1
        kind()

    def kill_worker(self) -> None:
        self._kill("hoplite worker", "worker")

    def kill_manager(self) -> None:
        now = time.monotonic()
        if now - self.manager_died >= MANAGER_PAUSE_S:
            self.manager_died = now
            self._kill("hoplite manager", "manager")

    def stop_worker(self) -> None:
        self._stop("hoplite worker")

    def stop_manager(self) -> None:
        self._stop("hoplite manager")

    def stop_node(self) -> None:
        self._stop("hoplite node")

    def kill_one_driver(self) -> None:
        with self.tally.fault("driver"):
            self.kill_driver()

    def _victim(self, name: str) -> psutil.Process | None:
        found = processes_named(name)
        return self.dice.choice(found) if found else None

    def _kill(self, name: str, kind: str) -> None:
        victim = self._victim(name)
        if victim is None:
            return
        with self.tally.fault(kind), contextlib.suppress(psutil.NoSuchProcess):
            victim.kill()
            victim.wait(GONE_S)

    def _stop(self, name: str) -> None:
        victim = self._victim(name)
        if victim is None:
            return
        with self.tally.fault("stop"), contextlib.suppress(psutil.NoSuchProcess):
            victim.send_signal(signal.SIGSTOP)
            try:
                time.sleep(self.dice.random() * STOP_S[name])
            finally:
                victim.send_signal(signal.SIGCONT)
