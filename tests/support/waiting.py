"""Polling with a deadline, and files by which tests and tasks wait for each other."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hoplite_mp._sync.handles import Handle

PATIENCE_S = 30.0
# A fixture of this type runs a coroutine in an event loop of its own (tests/aio/conftest.py).
Run = Callable[[Coroutine[Any, Any, Any]], Any]


def eventually(
    condition: Callable[[], Any],
    what: str = "the condition",
    *,
    within: float = PATIENCE_S,
    pause_s: float = 0.001,
) -> Any:
    """Polls until the condition holds, and returns its value. Fails the test after `within` s."""
    end = time.monotonic() + within
    while not (found := condition()):
        assert time.monotonic() < end, f"{what}: not within {within} s"
        time.sleep(pause_s)
    return found


def settles(look: Callable[[], Any], wanted: Any) -> None:
    """Polls until `look` returns what is wanted. The failure shows the last value."""
    end = time.monotonic() + PATIENCE_S
    while (found := look()) != wanted and time.monotonic() < end:
        time.sleep(0.002)
    assert found == wanted, f"still {found!r} after {PATIENCE_S} s, not {wanted!r}"


def falls_to(look: Callable[[], int], most: int) -> None:
    """Polls until `look` returns at most so much."""
    end = time.monotonic() + PATIENCE_S
    while (found := look()) > most and time.monotonic() < end:
        time.sleep(0.002)
    assert found <= most, f"still {found} after {PATIENCE_S} s, more than {most}"


def waiters_are(handle: Handle, count: int) -> None:
    """Returns when so many callers wait for this queue or lock."""
    eventually(lambda: handle.actor.waiters().result() == count)


def wait_for(path: str | Path) -> str:
    """A task that runs until the file exists."""
    eventually(Path(path).exists)
    return str(path)


def file_exists_in_time(path: Path) -> bool:
    """A task that runs until the file exists, or the time is over."""
    end = time.monotonic() + PATIENCE_S
    while not path.exists() and time.monotonic() < end:
        time.sleep(0.01)
    return path.exists()


def announce(path: str | Path, seconds: float = 60.0) -> None:
    """A task that makes the file, and sleeps."""
    Path(path).touch()
    time.sleep(seconds)


class Gate:
    """A file that tasks wait for."""

    def __init__(self, folder: Path, name: str = "gate") -> None:
        self.path = Path(folder) / name

    def open(self) -> None:
        self.path.touch()

    def wait(self) -> None:
        eventually(self.path.exists, f"gate {self.path.name}")


async def longest_pause(done: asyncio.Event) -> float:
    """The longest time for which the event loop was blocked, until `done`."""
    loop = asyncio.get_running_loop()
    longest, last = 0.0, loop.time()
    while not done.is_set():
        await asyncio.sleep(0.005)
        longest, last = max(longest, loop.time() - last), loop.time()
    return longest
