"""Classes for actors of the tests, importable in workers."""

import os
import time
from pathlib import Path
from typing import Any

from tests.tasks.helpers import wait_for


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
