"""Where the threads of this host's workers stand: asked by a signal, read from a file of theirs.

Why it exists: what a task that hangs is doing only its own process can say, and its interpreter may
never get to a Python handler. A worker registers a handler of `faulthandler`, in C, which writes
into a file without a name; this file finds that by the worker's descriptors. A worker whose user
code has taken the handler away is not signalled: it would die of it.
It must never know: what tasks do.
"""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING, Any

from hoplite_mp.protocol.local import STACKS_FILE, STACKS_SIGNAL

if TYPE_CHECKING:
    from collections.abc import Callable

    from hoplite_mp import _tasks
    from hoplite_mp.node.ports import HasWorkers, Loop

__all__ = ["Stacks"]

# How long workers may take to say where they stand. Higher: those on a loaded host are heard;
# lower: who asks waits less for one that is stopped.
STACKS_PATIENCE_S = 1.0
LOOK_S = 0.02
STACK_CHARS_MAX = 8000  # of one worker; deep recursion fills more


class Stacks:
    """Asks all workers of one node."""

    def __init__(self, loop: Loop, tasks: _tasks.Tasks, workers: HasWorkers) -> None:
        self.loop = loop
        self.tasks = tasks
        self.workers = workers

    def ask(self, done: Callable[[list[dict[str, Any]]], None]) -> None:
        """`done` gets what they have said, in words, one for each worker."""
        workers = [(slot, worker.pid) for slot, worker in self.workers.all.items()]
        idle = {slot for slot, pid in workers if pid and not self.tasks.running(slot)}
        files: dict[int, str] = {}
        for slot, pid in workers:
            path = _file_of(pid) if pid else ""
            if path and _handled(pid):
                with contextlib.suppress(OSError):
                    os.truncate(path, 0)
                    os.kill(pid, STACKS_SIGNAL)
                    files[slot] = path
        sizes: dict[int, int] = {}
        left = round(STACKS_PATIENCE_S / LOOK_S)

        def look() -> None:
            nonlocal left, sizes
            left -= 1
            now = {slot: _size(path) for slot, path in files.items()}
            if left and not (all(now.values()) and now == sizes):
                sizes = now
                self.loop.call_later(LOOK_S, look)
                return
            done(
                [
                    {
                        "worker": slot,
                        "pid": pid,
                        "idle": slot in idle,
                        "text": _read(files.get(slot, "")),
                    }
                    for slot, pid in workers
                ]
            )

        look()


def _file_of(pid: int) -> str:
    """The path that leads to a worker's file; "" if it has none that we may see."""
    with contextlib.suppress(OSError):
        for entry in os.scandir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                if os.readlink(entry.path).startswith(f"/memfd:{STACKS_FILE}"):
                    return entry.path
    return ""


def _handled(pid: int) -> bool:
    """Does that process have a handler for the signal?"""
    with contextlib.suppress(OSError, ValueError), open(f"/proc/{pid}/status") as status:
        for line in status:
            if line.startswith("SigCgt:"):
                return bool(int(line.split()[1], 16) >> (STACKS_SIGNAL - 1) & 1)
    return False


def _size(path: str) -> int:
    with contextlib.suppress(OSError):
        return os.stat(path).st_size
    return 0


def _read(path: str) -> str:
    if not path:
        return "it cannot be asked"
    with contextlib.suppress(OSError), open(path, "rb") as file:
        text = file.read(STACK_CHARS_MAX).decode(errors="replace")
        return text or "it does not answer"
    return "it has ended"
