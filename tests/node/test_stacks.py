"""Whether a process may be asked by a signal where its threads stand: one that does not handle it
would die of it."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING, Any

from hoplite_mp._common.object_states import FIRST_SLOT
from hoplite_mp._node.io.processes import STACKS_PATIENCE_S, WorkerStacks
from hoplite_mp._protocol.local import STACKS_FILE, STACKS_SIGNAL

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.support.node_harness import NodeHarness

SLOT, OTHER = FIRST_SLOT, FIRST_SLOT + 1


def ask(node: NodeHarness) -> list[Any]:
    """Of two workers: this process, and one whose start has not been reported yet."""
    node.parts.workers.spawned(SLOT, os.getpid())
    found: list[Any] = []
    WorkerStacks(node.loop, node.node_tasks, node.parts.workers).ask(found.extend)
    return found


def test_stacks_are_read_only_from_processes_with_a_handler(
    make_node: Callable[..., NodeHarness],
) -> None:
    node = make_node(workers=2)
    fd = os.memfd_create(STACKS_FILE)
    old = signal.signal(STACKS_SIGNAL, lambda *_: os.write(fd, b"in a call"))
    try:
        found = ask(node)
        node.loop.pass_time(STACKS_PATIENCE_S)
        assert found == [
            {"worker": SLOT, "pid": os.getpid(), "idle": True, "text": "in a call"},
            {"worker": OTHER, "pid": 0, "idle": False, "text": "its stacks cannot be read"},
        ]
        signal.signal(STACKS_SIGNAL, signal.SIG_IGN)
        found = ask(node)
        assert [one["text"] for one in found] == ["its stacks cannot be read"] * 2
    finally:
        signal.signal(STACKS_SIGNAL, old)
        os.close(fd)
