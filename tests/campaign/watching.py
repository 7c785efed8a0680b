"""Drivers as the program that runs a campaign sees them: what they say, and that they move.

A campaign must end although anything in it may hang. Each driver's lines are read by a thread;
whoever waits for an answer looks meanwhile whether any driver has failed, has ended without being
told, or stands in one call for longer than any call may take. Then everything that tells where
processes stand is printed: stacks of drivers, of workers, and every wait in the nodes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import signal
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

from tests.campaign.driver import STACKS, Orders

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Callable, Iterable

__all__ = ["ANSWER_S", "STUCK_S", "Failed", "Watched", "answer", "command", "healthy"]

STUCK_S = 40.0
"""Of one call of a hand, on a loaded machine."""
ANSWER_S = 120.0
SILENT_S = 30.0  # a driver that says nothing at all
POLL_S = 0.05


class Failed(AssertionError):
    """A campaign found something."""


def command(orders: Orders) -> list[str]:
    """What starts that driver."""
    text = json.dumps(dataclasses.asdict(orders))
    return [sys.executable, "-m", "tests.campaign.driver", text]


class Watched:
    """One driver."""

    def __init__(
        self, name: str, process: subprocess.Popen[str], signalled: Callable[[int], Any]
    ) -> None:
        self.name = name
        self.process = process
        self._signal = signalled
        self.said: dict[str, dict[str, Any]] = {}
        self.heard = time.monotonic()
        self.doing: list[tuple[str, float]] = []
        self.failures: list[dict[str, Any]] = []
        self.turns = 0
        self.dying = False  # on purpose
        self.interrupted = False  # it may be interrupted
        self.excused = False  # it stands still, on purpose
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if not line.startswith('{"say"'):
                continue  # a worker's output
            found = json.loads(line)
            kind = found.pop("say")
            self.heard = time.monotonic()
            if kind == "beat":
                self.doing = [(name, seconds) for name, seconds in found["doing"]]
                self.turns = found["turns"]
            elif kind == "failure":
                self.failures.append(found)
            else:
                self.said[kind] = found

    def tell(self, word: str) -> None:
        """May be gone by now."""
        assert self.process.stdin is not None
        self.said.clear()
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(word + "\n")
            self.process.stdin.flush()

    def trouble(self) -> str:
        """What is wrong with it."""
        if self.failures:
            one = self.failures[0]
            return f"{self.name}, {one['hand']}, after {one['history']}:\n{one['error']}"
        if self.dying or self.excused:
            return ""
        if self.process.poll() is not None:
            code = self.process.returncode
            return "" if "ended" in self.said else f"{self.name} has ended with {code}"
        quiet = time.monotonic() - self.heard
        if quiet > SILENT_S:
            return f"{self.name} has said nothing for {quiet:.0f} s"
        for name, seconds in self.doing:
            if seconds + quiet > STUCK_S:
                return f"{self.name} stands in {name} for {seconds + quiet:.0f} s"
        return ""

    def goes_on(self) -> None:
        """It stands still no longer."""
        self.heard, self.doing, self.excused = time.monotonic(), [], False

    def stacks(self) -> None:
        """On its stderr."""
        with contextlib.suppress(OSError):
            self._signal(STACKS)

    def interrupt(self) -> None:
        """As by Ctrl-C."""
        with contextlib.suppress(OSError):
            self._signal(signal.SIGINT)

    def kill(self) -> None:
        self.dying = True
        self._signal(9)
        self.process.wait(ANSWER_S)

    def close(self) -> None:
        """It has ended, or is to end now."""
        with contextlib.suppress(OSError):
            if self.process.poll() is None:
                self.kill()
        self._reader.join(ANSWER_S)
        for pipe in (self.process.stdin, self.process.stdout):
            with contextlib.suppress(OSError):
                if pipe is not None:
                    pipe.close()


def healthy(drivers: Iterable[Watched]) -> None:
    """Failed if one of them is in trouble."""
    for one in list(drivers):
        trouble = one.trouble()
        if trouble:
            raise Failed(trouble)


def answer(one: Watched, kind: str, drivers: Iterable[Watched]) -> dict[str, Any]:
    """Waits for that answer, while all are well; {} from one that is killed."""
    deadline = time.monotonic() + ANSWER_S
    while kind not in one.said:
        healthy(drivers)
        if one.dying:
            return {}
        if time.monotonic() > deadline:
            raise Failed(f"{one.name} has not {kind} for {ANSWER_S:g} s")
        time.sleep(POLL_S)
    healthy(drivers)
    return one.said[kind]
