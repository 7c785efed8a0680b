"""Pages of the store: asked for ahead of the first large objects, given back when long idle.

Why it exists: a fresh page costs its first writer a fault, and the zeroing of it; a page that
nobody needs any more is somebody else's memory.
It must never know: what lies in the store.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hoplite_mp.node.main import Node

__all__ = ["Pages"]

# After the start of the host: its workers come first. Higher: the first large objects find none.
POPULATE_DELAY_S = 0.3
# Between two system calls others get the lock of the address space.
POPULATE_STEP_BYTES = 2 << 20
IDLE_LOOK_S = 0.1  # not more often, however short memory_idle_s is


class Pages:
    """Of one node's store."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self._watching = False

    def begin(self) -> None:
        """The host has been started."""
        if self.node.config.populate_ahead_bytes and self.node.start.workers:
            self.node.loop.call_later(POPULATE_DELAY_S, self._populate)

    def _populate(self) -> None:
        """In a thread that yields between steps."""
        node = self.node
        wanted = min(node.config.populate_ahead_bytes, node.store.limit // 4) & -4096
        start = node.store.reserve(wanted) if wanted else None
        if start is None:
            return

        def work() -> None:
            for offset in range(start, start + wanted, POPULATE_STEP_BYTES):
                node.client.populate(offset, min(POPULATE_STEP_BYTES, start + wanted - offset))
                os.sched_yield()

        def done(_: None) -> None:
            node.store.release(start)
            self.watch_idle()

        node.loop.run_in_thread(work, done)

    def watch_idle(self) -> None:
        """The store has grown: what it will not need for memory_idle_s goes back."""
        if not self._watching:
            self._watching = True
            self.node.loop.call_later(
                max(IDLE_LOOK_S, self.node.config.memory_idle_s), self._give_idle_back
            )

    def _give_idle_back(self) -> None:
        due = self.node.store.give_idle_back(self.node.loop.now())
        self._watching = due is not None
        if due is not None:
            self.node.loop.call_later(
                max(IDLE_LOOK_S, due - self.node.loop.now()), self._give_idle_back
            )
