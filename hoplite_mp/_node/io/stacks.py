"""The stacks of this host's workers: requested by a signal, read from a file of each worker.

Only the process of a task that hangs knows where the task is, and its interpreter may never run a
signal handler written in Python. So each worker registers a handler of `faulthandler`, written in
C, which writes into an unnamed file (memfd). The code here finds that file among the worker's
descriptors. A worker whose user code has removed the handler is not signalled, because the signal
would kill it.
"""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING, Any

from hoplite_mp._protocol.local import STACKS_FILE, STACKS_SIGNAL

if TYPE_CHECKING:
    from collections.abc import Callable

    from hoplite_mp import _tasks
    from hoplite_mp._node.ports import HasWorkers, LoopPort

__all__ = ["WorkerStacks"]

# How long workers may take to write their stacks. Higher: workers of a loaded host are included.
# Lower: a stopped worker delays the answer for a shorter time.
STACKS_PATIENCE_S = 1.0
POLL_S = 0.02
STACK_CHARS_MAX = 8000  # per worker; deep recursion would fill more


class WorkerStacks:
    """Requests the stacks of all workers of one node."""

    def __init__(self, loop: LoopPort, tasks: _tasks.Tasks, workers: HasWorkers) -> None:
        self.loop = loop
        self.tasks = tasks
        self.workers = workers

    def ask(self, done: Callable[[list[dict[str, Any]]], None]) -> None:
        """`done` gets each worker's stacks as text."""
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
        left = round(STACKS_PATIENCE_S / POLL_S)

        def poll() -> None:
            nonlocal left, sizes
            left -= 1
            now = {slot: _size(path) for slot, path in files.items()}
            if left and not (all(now.values()) and now == sizes):
                sizes = now
                self.loop.call_later(POLL_S, poll)
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

        poll()


def _file_of(pid: int) -> str:
    """The path to a worker's stacks file; "" if there is none that this process may open."""
    with contextlib.suppress(OSError), os.scandir(f"/proc/{pid}/fd") as entries:
        for entry in entries:
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
