"""The event loop of a worker: one thread that lives as long as the worker does.

Why it exists: what an async task leaves behind, a session, a pool of connections, is bound to its
event loop, so the next one must find the same. It has a thread of its own, because the worker's
own thread waits for tasks and writes results, which would stop everything that is awaited.
It must never know: tasks, results, who interrupts whom.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Coroutine

__all__ = ["EventLoop"]

# How long the end of a worker waits for what its tasks have left in the loop. Higher: more of it
# ends in order; lower: a worker that leaves is gone sooner.
CLOSE_PATIENCE_S = 1.0
_log = logging.getLogger("hoplite_mp")


class EventLoop:
    """Runs coroutines for other threads."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._ends = False
        self._thread = threading.Thread(target=self._run, name="hoplite_mp event loop", daemon=True)
        self._thread.start()

    @property
    def ident(self) -> int:
        return self._thread.ident or 0

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        while not self._ends:
            try:
                self.loop.run_forever()
            except BaseException:  # SystemExit of something that a task has left behind
                _log.exception("in the event loop of a worker")

    def run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        """Its result; for any thread but the loop's own. An interrupt meanwhile cancels it."""
        future = asyncio.run_coroutine_threadsafe(coroutine, self.loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()  # without effect if it is the coroutine that has raised
            raise

    def close(self) -> None:
        """Cancels what is left, and ends the thread."""
        self._ends = True
        asyncio.run_coroutine_threadsafe(self._cancel_all(), self.loop)
        self._thread.join(CLOSE_PATIENCE_S)

    async def _cancel_all(self) -> None:
        left = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)
        await self.loop.shutdown_asyncgens()
        self.loop.stop()
