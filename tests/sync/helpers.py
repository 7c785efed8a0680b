"""What the tests of queues and locks run elsewhere, and how they learn that somebody waits."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hoplite_mp._api.actor import Actor
from tests.tasks.helpers import eventually, wait_for

if TYPE_CHECKING:
    from hoplite_mp._sync.handles import Handle

PATIENCE_S = 30


def waits(handle: Handle, count: int) -> None:
    """Returns when so many wait there."""
    eventually(lambda: handle.actor.waiters().result() == count)


def say_pid(path: str) -> None:
    """In a file that is whole when it is there."""
    new = Path(path + ".new")
    new.write_text(str(os.getpid()))
    new.rename(path)


def kill_pid_in(path: Path) -> None:
    """The process that has written it."""
    wait_for(str(path))
    os.kill(int(path.read_text()), signal.SIGKILL)


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


def kill(member: Any, pid: int) -> None:
    """Its process is killed, as by the kernel."""
    del member
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


__all__ = ["PATIENCE_S", "Actor", "Member", "kill", "kill_pid_in", "say_pid", "waits"]
