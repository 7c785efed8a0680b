"""Pages of the store: touched ahead of the first large objects, given back after a long idle time.

The first write to a fresh page costs a page fault and the zeroing of the page; pages that are not
used any more should be available to other programs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hoplite_mp._node.io.processes import yield_core

if TYPE_CHECKING:
    from hoplite_mp import _shm
    from hoplite_mp._node.ports import LoopPort
    from hoplite_mp._node.store.budget import Store
    from hoplite_mp.config import Config

__all__ = ["Pages"]

# Delay after the start of the host, so that its workers start first. Higher: large objects are
# written before the pages were touched.
POPULATE_DELAY_S = 0.3
# Bytes in one system call. Other threads get the lock of the address space between two calls.
POPULATE_STEP_BYTES = 2 << 20
IDLE_POLL_S = 0.1  # between two checks at least, even if memory_idle_s is shorter


class Pages:
    """The pages of one node's store."""

    def __init__(
        self, config: Config, loop: LoopPort, client: _shm.NodeClient, store: Store, workers: int
    ) -> None:
        """workers: how many the host was started with."""
        self.config = config
        self.loop = loop
        self.client = client
        self.store = store
        self.workers = workers
        self._watching = False

    def begin(self) -> None:
        """Called at the start of the host."""
        if self.config.populate_ahead_bytes and self.workers:
            self.loop.call_later(POPULATE_DELAY_S, self._populate)

    def _populate(self) -> None:
        """Touches pages in a thread, which yields between steps."""
        wanted = min(self.config.populate_ahead_bytes, self.store.limit // 4) & -4096
        start = self.store.reserve(wanted) if wanted else None
        if start is None:
            return

        def work() -> None:
            for offset in range(start, start + wanted, POPULATE_STEP_BYTES):
                self.client.populate(offset, min(POPULATE_STEP_BYTES, start + wanted - offset))
                yield_core()

        def done(_: None) -> None:
            self.store.release(start)
            self.watch_idle()

        self.loop.run_in_thread(work, done)

    def watch_idle(self) -> None:
        """Begins to look each memory_idle_s for pages that nobody has needed since the last look,
        because the store has grown."""
        if not self._watching:
            self._watching = True
            self._look_later()

    def _look_later(self) -> None:
        self.loop.call_later(max(IDLE_POLL_S, self.config.memory_idle_s), self._give_back)

    def _give_back(self) -> None:
        self._watching = self.store.give_unneeded_back()
        if self._watching:
            self._look_later()
