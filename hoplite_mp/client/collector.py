"""The collector: the thread that looks for completions when nobody waits in a call.

Why it exists: a result is looked after by the thread that waits for it or submits next. Callbacks,
the standard library's waiters and dependencies between tasks have no such thread; for them this one
runs, and sleeps otherwise. It survives whatever a callback or a full store does to it. Those who
wake it may be interrupted anywhere (Ctrl-C), so nothing here is a Condition, an Event or a Thread
of the standard library: interrupted inside, they keep their inner locks for ever.
It must never know: what looking after a result means.
"""

from __future__ import annotations

import _thread
import contextlib
import logging
import queue
import threading
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from hoplite_mp.client.ports import Submitting

__all__ = ["Collector"]

STOP_PATIENCE_S = 1.0
AWAY = -1  # in the place of a thread's ident
_log = logging.getLogger("hoplite_mp")


class Collector:
    """One thread of a process, started when it is first needed."""

    def __init__(self, submitter: Submitting) -> None:
        self._submitter = submitter
        self._armed = 0
        self._tell: Callable[[int], None] | None = None
        self._look_again = False
        self._resting = False  # until somebody wakes it
        self._closed = False
        self._lock = threading.RLock()  # the garbage collector may run inside, and come here again
        self._woken: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._ended: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._thread = 0  # its ident; 0: not started

    def arm(self) -> None:
        """Somebody waits with the standard library's means: completions must be looked for."""
        with self._lock:
            self._armed += 1
            if self._armed == 1 and self._tell is not None:
                self._tell(1)
        self.start()
        self.notice()

    def disarm(self) -> None:
        with self._lock:
            self._armed -= 1
            if not self._armed and self._tell is not None:
                self._tell(-1)

    def tell_armed(self, tell: Callable[[int], None]) -> None:
        """Tells it 1 when somebody waits with the standard library's means, await among them, and
        -1 when nobody does any more."""
        with self._lock:
            if self._tell is None and self._armed:
                tell(1)
            self._tell = tell

    def look_again(self) -> None:
        """News were taken and not looked after: everything must be looked at."""
        self._look_again = True
        self.start()
        self.notice()

    def start(self) -> None:
        """The thread runs from here on."""
        if not self._thread:
            with self._lock:
                if not self._thread and not self._closed:
                    self._thread = _thread.start_new_thread(self._run, ())

    def stay_away(self) -> None:
        """No thread is started: whoever runs this process looks after completions by itself."""
        self._thread = AWAY
        self._ended.put(None)

    def notice(self) -> None:
        """There is something to be looked after now and then."""
        if self._woken.empty():
            self._woken.put(None)

    def look_soon(self) -> None:
        """What nobody waits for is to be looked after within drain_interval_s of its end."""
        self.start()
        if self._resting:
            self.notice()

    def wake(self) -> None:
        """There is something new to wait for."""
        self.notice()
        self._submitter.tasks.wake(self._submitter.client.slot)

    def stop(self) -> None:
        """The thread ends; returns when it has, unless it is the caller or busy in a callback."""
        self._closed = True
        if self._thread and self._thread != threading.get_ident():
            self.wake()
            with contextlib.suppress(queue.Empty):
                self._ended.get(timeout=STOP_PATIENCE_S)

    def _run(self) -> None:
        try:
            self._turns()
        finally:
            self._ended.put(None)

    def _sleep(self, seconds: float | None) -> None:
        with contextlib.suppress(queue.Empty):
            self._woken.get(timeout=seconds)

    def _turns(self) -> None:
        memory = self._submitter.memory
        # Once the node is gone, who has learned of it ends what is pending (client/losing.py).
        while not self._closed and memory.client.usable and memory.lost is None:
            try:
                self._turn()
            except BaseException:  # of a callback, say SystemExit: the others must not wait
                if not self._closed:
                    _log.exception("in the collector thread")
                    self._look_again = True
                    time.sleep(self._submitter.memory.config.drain_interval_s)

    def _turn(self) -> None:
        submitter = self._submitter
        tasks, memory = submitter.tasks, submitter.memory
        seen = tasks.event()
        submitter.drain()
        if submitter.client.news():
            memory.collect()
        submitter.look_at_others()
        interval = memory.config.drain_interval_s
        if self._look_again:
            self._look_again = False
            submitter.look_at_all()
            if self._look_again:  # nothing can be done about it now
                self._sleep(interval)
                return
        if self._armed or submitter.wants_news:
            tasks.wait_event(seen, time.monotonic_ns() + int(interval * 1e9), False)
            return
        self._resting = True  # first: who adds something from here on sees it, or is seen
        if submitter.pending or memory.inner:
            self._resting = False
            self._sleep(interval)
        else:
            self._sleep(None)
            self._resting = False
