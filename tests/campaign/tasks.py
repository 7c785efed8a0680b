"""What a campaign's tasks do, and what they must give.

Workers and drivers import the same definitions, so a driver computes the expected value by itself,
with the same functions on the same arrays. Arrays hold whole numbers, so that any order of adding
gives the same bits, and begin with the number of the turn that made them, so that a value of
another turn is never taken for this one's.
"""

from __future__ import annotations

import functools
import os
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np

import hoplite_mp

Array = np.ndarray[Any, np.dtype[Any]]
NESTED_RETRIES = 100
SETUP: list[int] = []  # what an initializer has left in this process


def array(turn: int, count: int, kind: str = "f8") -> Array:
    """The array of that turn; whole numbers, the first one is the turn."""
    made = np.random.default_rng(turn).integers(-1000, 1000, count).astype(kind)
    made[0] = turn
    return made


def leaves(tree: Any) -> list[Array]:
    """The arrays in nested containers."""
    if isinstance(tree, np.ndarray):
        return [tree]
    if isinstance(tree, dict):
        tree = [tree[key] for key in sorted(tree)]
    return [leaf for one in tree for leaf in leaves(one)]


# ---- plain ones


def double(x: Array) -> Array:
    return x * 2


def combine(tree: Any, *more: Any, factor: int = 1) -> Array:
    return np.asarray(functools.reduce(np.add, leaves([tree, more])) * factor)


def slow(x: Array, seconds: float) -> Array:
    time.sleep(seconds)
    return x + 1


def change(x: Array) -> Array:
    """It is the task's own."""
    x += 1
    return x


def published(x: Array) -> Array:
    """Written into an array of the store."""
    room = hoplite_mp.current().empty(x.shape, x.dtype)
    np.add(x, 3, out=room)
    return room


def several(x: Array) -> dict[str, Any]:
    return {"twice": x * 2, "nothing": None, "parts": [x[:1], (x[1:],)]}


def fail(turn: int) -> None:
    raise ZeroDivisionError(turn)


# ---- those that use the cluster


def nested(count: int, x: Array) -> Array:
    c = hoplite_mp.current().options(retries=NESTED_RETRIES)
    ref = c.put(x)
    return sum((future.result() for future in [c.submit(double, ref) for _ in range(count)]), x)


def deep(levels: int, x: Array) -> Array:
    if levels == 0:
        return x
    c = hoplite_mp.current().options(retries=NESTED_RETRIES)
    return np.asarray(c.submit(deep, levels - 1, x).result() + 1)


def mapped(x: Array, count: int) -> Array:
    c = hoplite_mp.current().options(retries=NESTED_RETRIES)
    return sum(c.map(np.add, [x] * count, range(count)), np.zeros_like(x))


def reduced(refs: list[Any], op: str) -> Array:
    """Its refs come unresolved."""
    c = hoplite_mp.current()
    return np.array(c.get(c.reduce(refs, op=op)))


def gives_refs(turn: int, count: int) -> list[Any]:
    c = hoplite_mp.current()
    return [c.put(array(turn + i, count)) for i in range(3)]


def gives_pending(x: Array) -> Any:
    """Its result names a task that has not run, perhaps."""
    return hoplite_mp.current().options(retries=NESTED_RETRIES).submit(double, x).ref


def opened(refs: Any) -> Array:
    """Refs inside a value stay refs."""
    return sum(hoplite_mp.current().get(list(refs)), np.zeros(1))


# ---- those that end badly


def leave(code: int) -> None:
    os._exit(code)


def leave_once(path: str, x: Array) -> Array:
    """Dies in the middle the first time that it runs."""
    die_once(path)
    return x + 7


def die_once(path: str) -> None:
    """The file tells later lives of the first one."""
    try:
        Path(path).touch(exist_ok=False)
    except FileExistsError:
        return
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("it is dead")


def linger(path: str, seconds: float) -> None:
    """Says that it runs, and does so for long."""
    Path(path).touch()
    time.sleep(seconds)


# ---- actors


class Ledger:
    """Knows which calls its process has applied."""

    def __init__(self, turn: int | None) -> None:
        if turn is None:
            raise LookupError(turn)
        self.turn = turn
        self.seen: list[int] = []

    def note(self, number: int, x: Any) -> tuple[int, tuple[int, ...]]:
        self.seen.append(number)
        return self.turn, tuple(self.seen)

    def fail(self, turn: int) -> None:
        raise ZeroDivisionError(turn)


def note_there(handle: Any, number: int) -> Any:
    """A call of the process that runs this."""
    return handle.note(number, None).result()


# ---- pools


def set_up(number: int) -> None:
    SETUP.append(number)


def set_up_badly(number: int) -> None:
    raise LookupError(number)


def after_set_up(x: int) -> tuple[int, ...]:
    return (*SETUP, x)
