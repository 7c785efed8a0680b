"""A worker's event loop, in a thread that runs as long as the worker.

Objects that an async task leaves behind (a session, a connection pool) are bound to its event loop,
so the next task must use the same loop. The loop has its own thread, because the worker's main
thread waits for tasks and writes results, and would block coroutines.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from typing import TYPE_CHECKING, Any

from hoplite_mp._common.locks import starting_thread
from hoplite_mp._worker.forked import end_if_forked

if TYPE_CHECKING:
    from collections.abc import Coroutine

__all__ = ["EventLoop"]

# How long a worker that is exiting waits for coroutines that its tasks left in the loop. With a
# higher value, more coroutines finish cleanly. With a lower value, the worker exits sooner.
CLOSE_PATIENCE_S = 1.0
_log = logging.getLogger("hoplite_mp")


class EventLoop:
    """Runs coroutines for other threads."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._pid = os.getpid()
        self._ends = False
        self._thread = threading.Thread(target=self._run, name="hoplite_mp event loop", daemon=True)
        with starting_thread("runs async tasks"):
            self._thread.start()

    @property
    def ident(self) -> int:
        return self._thread.ident or 0

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        while not self._ends:
            try:
                self.loop.run_forever()
            # For example SystemExit, raised by a coroutine that a task has left behind.
            except BaseException:
                _log.exception("in the event loop of a worker")

    def run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        """Runs a coroutine, and returns its result. May be called in any thread except the loop's
        own. If the caller is interrupted, the coroutine is cancelled."""
        future = asyncio.run_coroutine_threadsafe(self._alone(coroutine), self.loop)
        try:
            value, error = future.result()
        except BaseException:
            future.cancel()
            raise
        if error is None:
            return value
        try:
            raise error
        finally:
            del error, future  # no reference cycle through the traceback

    async def _alone(self, coroutine: Coroutine[Any, Any, Any]) -> tuple[Any, BaseException | None]:
        """Runs the coroutine, and returns (value, error), because Python 3.11's Future ignores an
        error whose truth value is false. A child that the coroutine has forked exits when the
        coroutine ends, because the thread that waits for the result does not exist in the child."""
        try:
            value = await coroutine
        except BaseException as error:
            end_if_forked(self._pid, error)
            return None, error
        end_if_forked(self._pid)
        return value, None

    def close(self) -> None:
        """Cancels the remaining coroutines, and stops the thread."""
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
