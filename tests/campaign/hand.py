"""One thread of a driver: it picks calls by its own dice and knows what each must give.

What all calls need stands here: making arrays that name their turn, the refs that the threads of a
driver share, reading and judging. The calls themselves are functions of a Hand, listed by the
decorator `call`.
"""

from __future__ import annotations

import random
import threading
import time
from collections import Counter, deque
from typing import TYPE_CHECKING, Any

import numpy as np

import hoplite_mp
from tests.campaign import tasks
from tests.campaign.model import MANY, Known, Unexplained, World, alike

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["CALLS", "PATIENCE_S", "Board", "Hand", "call"]

PATIENCE_S = 100.0
"""Of each call: longer than who watches needs to say where everybody stands."""
COUNTS = (10, 1000, 30_000, 300_000)
DTYPES = ("f8", "f8", "f8", "i8", "f4")
KNOWN_MAX = 40
TURNS_MAX = 1 << 20  # of one hand, so that no two hands make the same array
CALLS: dict[str, tuple[Callable[[Hand], None], int]] = {}


def call(weight: int) -> Callable[[Callable[[Hand], None]], Callable[[Hand], None]]:
    """Lists a function of a Hand among what hands do, so often in comparison with others."""

    def listed(function: Callable[[Hand], None]) -> Callable[[Hand], None]:
        CALLS[function.__name__] = function, weight
        return function

    return listed


class Board:
    """What the threads of one driver share."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.known: list[Known] = []
        self.kept: deque[tuple[Any, Any]] = deque(maxlen=6)  # arrays that are in use, and copies

    def add(self, one: Known, dice: random.Random) -> Known:
        with self.lock:
            self.known.append(one)
            if len(self.known) > KNOWN_MAX:
                del self.known[dice.randrange(len(self.known))]
        return one

    def pick(self, dice: random.Random, wanted: Callable[[Known], bool]) -> Known | None:
        with self.lock:
            found = [one for one in self.known if wanted(one)]
        return dice.choice(found) if found else None

    def drop(self) -> None:
        with self.lock:
            self.known.clear()
            self.kept.clear()


class Hand(threading.Thread):
    """Makes calls until it is told to stop, or one of them cannot be explained."""

    def __init__(
        self, c: Any, world: World, board: Board, number: int, seed: int, scratch: str
    ) -> None:
        super().__init__(name=f"hand {number}", daemon=True)
        self.c, self.world, self.board, self.scratch = c, world, board, scratch
        self.number = number
        self.dice = random.Random(seed)
        self.turn = number * TURNS_MAX
        self.done: Counter[str] = Counter()
        self.history: deque[str] = deque(maxlen=12)
        self.since = time.monotonic()
        self.now = ""
        self.over = threading.Event()
        self.begun = False
        self.ended = threading.Event()
        self.failure: BaseException | None = None
        self.lost = False

    def run(self) -> None:
        self.begun = True
        try:
            self.work()
        finally:
            self.now = ""
            self.ended.set()

    def work(self) -> None:
        names = list(CALLS)
        weights = [weight for _, weight in CALLS.values()]
        while not self.over.is_set() and not self.lost and self.failure is None:
            try:
                self.make(self.dice.choices(names, weights)[0])
            except KeyboardInterrupt as error:  # of the bookkeeping, if not of a call
                if not self.world.interrupted:
                    self.failure = error
            except BaseException as error:
                self.failure = error

    def make(self, name: str) -> None:
        """One call, whatever it is made of."""
        self.since, self.now = time.monotonic(), name
        self.history.append(f"{self.turn}:{name}")
        try:
            CALLS[name][0](self)
        except Unexplained:
            raise
        except Exception as error:
            if self.world.gone(error):
                self.lost = True
            elif not self.hard_up(error):
                raise
        self.done[name] += 1

    def hard_up(self, error: BaseException) -> bool:
        """Anything may fail for want of room, in a world where that is scarce."""
        return Known(self.world, None, None).explained(error)

    def note(self, *words: Any) -> None:
        """Of the call under way, for whoever reads what has failed."""
        self.history[-1] += " " + " ".join(map(str, words))

    # ---- what they are made from

    def next_turn(self) -> int:
        """Turns are spread, so that arrays of consecutive ones belong to the same call."""
        self.turn += 10
        return self.turn

    def array(self, count: int | None = None, kind: str | None = None) -> Any:
        count = self.dice.choice(COUNTS) if count is None else count
        return tasks.array(self.next_turn(), count, kind or self.dice.choice(DTYPES))

    def path(self) -> str:
        """A file that nobody has made."""
        return f"{self.scratch}/{self.next_turn()}"

    def steady(self) -> Known:
        """An array that can be relied on; a new one if there is none."""
        found = self.board.pick(
            self.dice, lambda one: one.steady and isinstance(one.value, np.ndarray)
        )
        if found is None or self.dice.random() < 0.2:
            value = self.array()
            found = self.keep(self.c.put(value), value)
        return found

    def alike(self, count: int, kind: str | None = None, size: int | None = None) -> list[Known]:
        """Some that fit together."""
        size = self.dice.choice(COUNTS) if size is None else size
        kind = kind or self.dice.choice(("f8", "i8"))
        found = []
        for _ in range(count):
            value = self.array(size, kind)
            if self.dice.random() < 0.5:
                found.append(self.keep(self.c.put(value), value))
            else:
                found.append(self.submit(tasks.double, value))
        return found

    def any_node(self) -> Any:
        return self.dice.choice(self.c.nodes)

    # ---- what becomes of it

    def keep(self, ref: Any, value: Any, *above: Known, **how: Any) -> Known:
        """For later calls of any thread."""
        return self.board.add(Known(self.world, ref, value, above, **how), self.dice)

    def submit(self, function: Any, *args: Any, **how: Any) -> Known:
        """A task of plain arrays and Knowns, whose value is computed here, too."""
        retries = how.pop("retries", MANY)
        given = [one.ref if isinstance(one, Known) else one for one in args]
        values = [one.value.copy() if isinstance(one, Known) else one for one in args]
        born = self.world.tally.mark()
        options = {"retries": retries, **how.pop("options", {})}
        future = self.c.options(**options).submit(function, *given)
        above = tuple(one for one in args if isinstance(one, Known))
        value = function(*values)
        ref = future if self.dice.random() < 0.5 else future.ref
        return self.keep(ref, value, *above, retries=retries, born=born, **how)

    def check(self, one: Known) -> Any:
        """Reads it by one of the ways; what it gave, None if it failed as it may."""
        future = isinstance(one.ref, hoplite_mp.Future) and self.dice.random() < 0.5
        try:
            if future:
                found = one.ref.result(PATIENCE_S)
            else:
                found = self.c.get(one.ref, timeout=PATIENCE_S, copy=self.dice.random() < 0.2)
        except Exception as error:
            one.judge(error)
            return None
        one.check(found)
        return found

    def expect(self, one: Known, function: Callable[[], Any]) -> Any:
        """The same for a value that is there by another way."""
        try:
            found = function()
        except Exception as error:
            one.judge(error)
            return None
        one.check(found)
        return found

    def same(self, found: Any, wanted: Any) -> None:
        if not alike(found, wanted):
            raise Unexplained(f"{found!r} in place of {wanted!r}")
