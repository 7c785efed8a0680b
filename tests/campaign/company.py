"""The drivers of one program: started, told, ended, and shown when something is wrong.

Programs on one host and on several differ in where drivers run and what happens to them, not in how
they are led.
"""

from __future__ import annotations

import contextlib
import random
import subprocess
import sys
import time
from collections import Counter
from typing import TYPE_CHECKING, Any

from tests.campaign.driver import Orders
from tests.campaign.tally import Tally
from tests.campaign.watching import ANSWER_S, Watched, answer, healthy

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

__all__ = ["Company"]

SHOWN_S = 20.0


class Company:
    """Who takes part. Subclasses say where a driver runs, and where the dump is asked for."""

    small = lossy = exposed = False

    def __init__(self, seed: int, folder: Path) -> None:
        self.seed, self.folder = seed, folder
        self.dice = random.Random(seed)
        self.tally = Tally(folder / "tally", make=True)
        self.drivers: list[Watched] = []
        self.started = 0
        self.calls: Counter[str] = Counter()
        (folder / "scratch").mkdir()

    def popen(self, orders: Orders, place: Any) -> Watched:
        raise NotImplementedError

    def dump(self) -> subprocess.Popen[Any]:
        raise NotImplementedError

    def start(self, cluster: dict[str, Any], place: Any = None, **how: Any) -> Watched:
        """Returns when it is there."""
        self.started += 1
        orders = Orders(
            seed=self.seed,
            number=self.started,
            threads=self.dice.randint(1, 2),
            tally=str(self.folder / "tally"),
            scratch=str(self.folder / "scratch"),
            cluster=cluster,
            small=self.small,
            lossy=self.lossy,
            **{"exposed": self.exposed, **how},
        )
        made = self.popen(orders, place)
        made.interrupted = orders.interrupted
        self.drivers.append(made)
        answer(made, "ready", self.drivers)
        return made

    def ask(self, one: Watched, word: str, kind: str) -> dict[str, Any]:
        """Says it, and returns the answer."""
        one.tell(word)
        return answer(one, kind, self.drivers)

    def healthy(self) -> None:
        healthy(self.drivers)

    def drop(self) -> None:
        """All stop, and hold nothing any more."""
        for one in self.drivers:
            one.tell("drop")
        for one in self.drivers:
            self.calls.update(answer(one, "dropped", self.drivers)["calls"])

    def end(self, one: Watched) -> None:
        """In order."""
        self.ask(one, "end", "ended")
        one.process.wait(ANSWER_S)
        one.close()
        self.drivers.remove(one)

    def lose(self, one: Watched) -> None:
        """Its Cluster is dropped, and then it ends."""
        self.calls.update(self.ask(one, "lose", "dropped")["calls"])
        self.end(one)

    def interrupt(self) -> None:
        """Ctrl-C in one of the drivers that expect it."""
        some = [one for one in self.drivers if one.interrupted and not (one.dying or one.excused)]
        if some:
            self.dice.choice(some).interrupt()

    def forget(self, one: Watched) -> None:
        """Not in order."""
        one.kill()
        self.drivers.remove(one)
        one.close()

    def show(self) -> None:
        """Where everybody stands, on stderr."""
        for one in self.drivers:
            one.stacks()
        time.sleep(0.5)  # they write it
        sys.stderr.flush()
        dumping = self.dump()
        with contextlib.suppress(subprocess.TimeoutExpired):
            dumping.wait(SHOWN_S)
        dumping.kill()
        dumping.wait()

    def close(self) -> None:
        for one in self.drivers:
            one.close()

    @contextlib.contextmanager
    def playing(self) -> Iterator[None]:
        """Its end is the end of all; what goes wrong is shown before."""
        try:
            yield
        except Exception:
            self.show()
            raise
        finally:
            self.close()
