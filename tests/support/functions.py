"""Functions and classes for tasks and actors, importable in workers."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from hoplite_mp._client import captured_arrays
from tests.support.waiting import Gate, wait_for

if TYPE_CHECKING:
    from collections.abc import Callable

    from hoplite_mp import Cluster
    from hoplite_mp._serialize import Array


def fail(text: str = "the reason") -> None:
    raise LookupError(text)


def add(*numbers: int) -> int:
    return sum(numbers)


def after(gate: Gate, value: Any) -> Any:
    """A task's body: the value, once the gate is open."""
    gate.wait()
    return value


def failing_after(gate: Gate, text: str) -> Any:
    gate.wait()
    raise KeyError(text)


def raise_key_error(text: str) -> Any:
    raise KeyError(text)


def echo(value: Any, seconds: float = 0.0) -> Any:
    time.sleep(seconds)
    return value


def raise_error(error: BaseException) -> None:
    raise error


def checksum(array: Any) -> int:
    return int(np.asarray(array).sum(dtype=np.int64))


def pid_of_worker(*_: Any) -> int:
    return os.getpid()


def integers(seed: int, count: int) -> Any:
    return np.random.default_rng(seed).integers(-1000, 1000, count).astype(np.float64)


def double(array: Any) -> Any:
    return array * 2


def read_into(c: Cluster, found: list[Any], stream: Any) -> None:
    for ref in stream:
        found.append(c.get(ref))


class Counter:
    """Counts, and remembers in which order it was called."""

    def __init__(self, value: int = 0) -> None:
        self.value = value
        self.seen: list[Any] = []

    def add(self, amount: int = 1) -> int:
        self.value += amount
        return self.value

    def note(self, what: Any) -> int:
        self.seen.append(what)
        return len(self.seen)

    def notes(self) -> list[Any]:
        return self.seen

    def pid(self) -> int:
        return os.getpid()

    def wait(self, seconds: float) -> str:
        time.sleep(seconds)
        return "waited"

    def wait_for(self, path: str) -> str:
        wait_for(path)
        return "waited"

    def fail(self) -> None:
        raise KeyError("on purpose")

    def end(self, code: int = 3) -> None:
        os._exit(code)

    def call_me(self, handle: Any) -> Any:
        return handle.add().result()

    def pass_on(self, handle: Any) -> Any:
        return handle

    def __call__(self, factor: int) -> int:
        return self.value * factor

    @staticmethod
    def double(x: int) -> int:
        return 2 * x


class Refuses:
    """Cannot be made."""

    def __init__(self, why: str = "no") -> None:
        raise ValueError(why)

    def anything(self) -> None: ...


class MadeWhen(Counter):
    """Once that file is there; says in another one who waits for it."""

    def __init__(self, path: str) -> None:
        here = Path(path + ".here")
        here.with_suffix(".new").write_text(str(os.getpid()))
        here.with_suffix(".new").rename(here)
        wait_for(path)
        super().__init__()


class Journal:
    """Keeps what it was called with, and tells who has it: the process, and everything so far."""

    def __init__(self) -> None:
        self.kept: list[int] = []

    def add(self, number: int) -> tuple[int, tuple[int, ...]]:
        self.kept.append(number)
        return os.getpid(), tuple(self.kept)

    def die(self, number: int) -> None:
        self.kept.append(number)
        os._exit(7)

    def fail(self, number: int) -> None:
        self.kept.append(number)
        raise KeyError(os.getpid(), tuple(self.kept))


class Member:
    """A process of its own that uses what it is given."""

    def __init__(self, used: Any) -> None:
        self.used = used

    def call(self, method: str, *args: Any) -> Any:
        return getattr(self.used, method)(*args)

    def pid(self) -> int:
        return os.getpid()

    def hold_and_wait(self, path: str) -> None:
        self.used.acquire()
        wait_for(path)


WATCHES = captured_arrays.available()


def captured_arrays(cluster: Cluster) -> Any:
    return cluster._runtime.submitter._functions._arrays


def function_with_globals(**values: Any) -> tuple[dict[str, Any], Callable[..., Any]]:
    """A function and its globals; it gives a checksum of `x`."""
    scope = {"__name__": "a script", "np": np, **values}
    exec("def total(): return int(x.astype(np.int64).sum()), str(x.dtype), x.shape", scope)
    return scope, scope["total"]


def expected_total(x: Array) -> tuple[int, str, tuple[int, ...]]:
    return int(x.astype(np.int64).sum()), str(x.dtype), x.shape
