"""Whether a process may be asked by a signal where its threads stand: one that does not handle it
would die of it."""

from __future__ import annotations

import os
import signal
from types import SimpleNamespace
from typing import Any

from hoplite_mp._node.io.processes import STACKS_PATIENCE_S, WorkerStacks
from hoplite_mp._protocol.local import STACKS_FILE, STACKS_SIGNAL
from tests.support.node_ports import ManualLoop

SLOT, OTHER = 4, 5


def ask() -> tuple[ManualLoop, list[Any]]:
    """Of two workers: this process, and one whose start has not been reported yet."""
    loop = ManualLoop()
    tasks: Any = SimpleNamespace(running=lambda slot: 0)
    workers: Any = SimpleNamespace(
        all={SLOT: SimpleNamespace(pid=os.getpid()), OTHER: SimpleNamespace(pid=0)}
    )
    found: list[Any] = []
    WorkerStacks(loop, tasks, workers).ask(found.extend)
    return loop, found


def test_who_handles_the_signal_is_read_and_who_does_not_is_left_alone() -> None:
    fd = os.memfd_create(STACKS_FILE)
    old = signal.signal(STACKS_SIGNAL, lambda *_: os.write(fd, b"in a call"))
    try:
        loop, found = ask()
        loop.pass_time(STACKS_PATIENCE_S)
        assert found == [
            {"worker": SLOT, "pid": os.getpid(), "idle": True, "text": "in a call"},
            {"worker": OTHER, "pid": 0, "idle": False, "text": "it cannot be asked"},
        ]
        signal.signal(STACKS_SIGNAL, signal.SIG_IGN)
        loop, found = ask()
        assert [one["text"] for one in found] == ["it cannot be asked"] * 2
    finally:
        signal.signal(STACKS_SIGNAL, old)
        os.close(fd)
