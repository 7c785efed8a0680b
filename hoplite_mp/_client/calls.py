"""Concurrent calls in one process: the state of each call, and a check against deadlocks.

If a process runs one task at a time, the task's state (the Groups that it has joined, its waits)
belongs to the process. If several calls run concurrently, in threads or in an event loop, the state
belongs to the current call. An actor's call that waits for a later call to the same actor may wait
indefinitely. The wait raises an error if calls with such waits occupy all places where the later
call could run.
"""

from __future__ import annotations

import contextlib
import contextvars
import threading
from typing import TYPE_CHECKING, Any

from hoplite_mp._common import locks

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hoplite_mp._tasks import Tasks

__all__ = ["Call", "OwnCalls", "current_call"]


class Call:
    """One of several calls that are running in this process."""

    def __init__(self, oid: int) -> None:
        self.oid = oid
        self.leaves: list[Any] = []  # functions to call when the call ends


current_call: contextvars.ContextVar[Call | None] = contextvars.ContextVar("call", default=None)


class OwnCalls:
    """The waits of an actor's calls for other calls to the same actor."""

    def __init__(self, tasks: Tasks, pool: int, places: int) -> None:
        """places: the maximum number of the actor's calls that run at the same time."""
        self._tasks = tasks
        self._pool = pool
        self._places = places
        self._thread = threading.get_ident()  # the thread that runs calls, if one runs at a time
        self._loop = 0  # the thread of the event loop that runs calls; 0 if there is none
        self._async_flag = 0
        self._waiting: dict[int, int] = {}  # call -> number of its current waits
        self._lock = locks.lock("client.own_calls")

    def loop_runs_in(self, thread: int, async_flag: int) -> None:
        """Records that calls with `async_flag` run in an event loop, in `thread`."""
        self._loop, self._async_flag = thread, async_flag

    def _first_of(self, oids: list[int]) -> int:
        """The first of these objects that is the result of an unfinished call to this actor; 0 if
        there is none."""
        for oid in oids:
            ours = self._tasks.pool_of(oid) == self._pool and not self._tasks.done(oid)
            if ours and self._tasks.name(oid):
                return oid
        return 0

    @contextlib.contextmanager
    def waits(self, oids: list[int], awaits: bool = False) -> Iterator[None]:
        """A context manager around a wait. Raises RuntimeError if the wait would never end."""
        here = threading.get_ident()
        call = current_call.get()
        oid = 0 if call is None and here != self._thread else self._first_of(oids)
        if not oid:
            yield
            return
        me = 0 if call is None else call.oid
        with self._lock:
            others = len(self._waiting.keys() - {me})
            blocks_loop = here == self._loop and not awaits
            blocks_loop = blocks_loop and bool(self._tasks.task(oid)[3] & self._async_flag)
            if others + 1 >= self._places or blocks_loop:
                raise RuntimeError(self._why(oid))
            self._waiting[me] = self._waiting.get(me, 0) + 1
        try:
            yield
        finally:
            with self._lock:
                self._waiting[me] -= 1
                if not self._waiting[me]:
                    del self._waiting[me]

    def _why(self, oid: int) -> str:
        name = self._tasks.name(oid)
        if self._places == 1:
            return (
                f"{name}() is a later call to this actor: it begins when the current call has "
                "ended, so waiting for it here would never end"
            )
        return (
            f"{name}() is a call to this actor: all {self._places} calls that it runs at a time "
            "(concurrency=) would then be waiting for its own calls, so this wait would never end; "
            "await the call in an async method, or raise concurrency="
        )
