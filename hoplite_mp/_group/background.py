"""A Group's calls that a thread of the Group makes, one after the other, as they were begun.

Members match their calls by the order, so a call that was begun keeps its place until it is over,
however long the other ranks take. It has no deadline. What may take too long is a wait for its
Future: after the Group's `timeout` that wait raises HopliteTimeoutError, and the call goes on. Only
a plain call, which its caller makes again after a HopliteTimeoutError, is withdrawn. A signal
handler may raise an exception between any two steps of the threads that wait. So one step begins a
call (`put` of the queue), and what is counted is counted by the Group's thread.
"""

from __future__ import annotations

import contextvars
import functools
import itertools
import logging
import queue
import threading
from typing import TYPE_CHECKING, Any, TypeVar

from hoplite_mp._client.thread_futures import ThreadFuture
from hoplite_mp._client.threads import starting_thread
from hoplite_mp._common import clock, locks
from hoplite_mp._group.member_lifecycle import NotWholeError
from hoplite_mp.errors import ClosedError, HopliteTimeoutError, PeerLostError

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Background", "CallFuture"]

T = TypeVar("T")
FOREVER_S = 1e9
# The longest step of a wait. Another thread that was interrupted just after it had passed the
# turnstile of the Future holds others up for so long.
SLICE_S = 0.5
_log = logging.getLogger("hoplite_mp")


class CallFuture(ThreadFuture[T]):
    """Of a call that the Group's thread makes. A wait without a timeout of its own ends after the
    Group's. No wait takes the condition of the standard library's Future, which an exception of a
    signal handler can leave held, so that the Group's thread could not settle the Future."""

    def __init__(self, background: Background, number: int) -> None:
        super().__init__()  # the thread that makes the call counts as blocked itself
        self._background = background
        self.number = number  # in the order of the calls; a number may be missing
        self.withdrawn = False  # the call is to end as soon as it would have to wait
        self.left = False  # it has ended so, or was not made
        # Held until the call is over. Another thread releases it, the one that has made the call,
        # so it has no place in the order of locks.
        self._turnstile = turnstile = threading.Lock()
        turnstile.acquire()

        def over(_: object) -> None:
            turnstile.release()

        self.add_done_callback(over)  # the first one, so that others hold up no wait
        self.set_running_or_notify_cancel()  # `cancel` returns False: the call keeps its place

    def result(self, timeout: float | None = None) -> T:
        """As of `concurrent.futures.Future`, but without a timeout the Group's limits the wait: see
        `Background.patience_s`."""
        try:
            self.wait(timeout)
            return self.outcome()
        finally:
            self = None  # type: ignore[assignment]  # no reference cycle through the traceback

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """As `result`."""
        self.wait(timeout)
        return self._exception

    def outcome(self) -> T:
        """What the call, which is over, has returned or raised."""
        error = self._exception
        if error is not None:
            try:
                raise error
            finally:
                del self, error  # no reference cycle through the traceback
        return self._result  # type: ignore[return-value]

    def wait(self, timeout: float | None = None) -> None:
        """Waits until the call is over. TimeoutError: `timeout` seconds were not enough;
        HopliteTimeoutError: no timeout was given, and the Group's has passed. RuntimeError: the
        thread that makes the call would wait for itself."""
        since = clock.monotonic()
        if not self.is_settled and timeout != 0 and self._background.is_here():
            raise RuntimeError(self._background.waits_for_itself)
        while not self.is_settled:
            if timeout is None:
                left = self.patience_s(since)
            else:
                left = since + timeout - clock.monotonic()
                if left <= 0:
                    raise TimeoutError
            step = SLICE_S if left is None else min(left, SLICE_S)
            if self._turnstile.acquire(timeout=step):
                self._turnstile.release()

    def patience_s(self, since: float) -> float | None:
        """As of `ThreadFuture`."""
        return self._background.patience_s(since)


class Background:
    """The thread of one Group, and the calls that it was given."""

    def __init__(
        self, name: str, timeout: float | None, late: Callable[[], str], wake: Callable[[], None]
    ) -> None:
        """name, timeout: the Group's. late: says what the call under way waits for. wake: makes the
        thread look whether its call was withdrawn. Neither may keep the Group alive, because each
        Future keeps this object."""
        self._name = name
        self._timeout = timeout
        self._late = late
        self._wake = wake
        self._jobs: queue.SimpleQueue[list[Any] | None] = queue.SimpleQueue()
        self._numbers = itertools.count()
        self._ended = 0  # all calls with lower numbers are over
        self._turn_at = 0.0  # when the call under way began, on the monotonic clock
        self._under_way: CallFuture[Any] | None = None
        # Guards `withdrawn` and `left` of the Futures.
        self._leaving = locks.lock("group.leaving")
        self._broken = ""  # why no call can be made any more
        self._ending = False  # takes no more calls
        # A daemon, because otherwise Python would wait for it before it lets the cluster end, which
        # gives up what is late.
        self._thread = threading.Thread(target=self._serve, name="hoplite_mp group", daemon=True)
        with starting_thread("makes a Group's calls in the background"):
            self._thread.start()

    # -- the thread that makes calls ---------------------------------------------------------------

    def _serve(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                self._run(job)
            except BaseException:  # what a callback of a Future raises ends nothing else
                _log.exception("group %r: a callback of a call in the background", self._name)
            del job

    def _run(self, job: list[Any]) -> None:
        """job: (Future, function, is it a plain call). It is emptied, because the traceback of an
        error keeps this frame, and what that refers to would refer to the Future that has the
        error."""
        future, call, plain = job
        job.clear()
        with self._leaving:
            self._turn_at, self._under_way = clock.monotonic(), future
            is_wanted = not future.left
        try:
            if is_wanted:
                future.fill(self._made, (call, plain), {})
        finally:
            self._ended = future.number + 1
            self._under_way = None
            del future, call

    def _made(self, call: Callable[[], T], plain: bool) -> T:
        """Makes a call. PeerLostError: the Group has not become whole, which nothing else would
        end, so no call that was begun can keep its place."""
        text = ""
        try:
            if not self._broken:
                try:
                    return call()
                except NotWholeError as error:
                    text = str(error)
        finally:
            del call  # no reference cycle through the traceback
        if not self._broken:
            if plain:
                raise HopliteTimeoutError(text)
            self._broken = (
                f"{text}. The calls in the background are given up: close this Group, and join it "
                "again"
            )
        raise PeerLostError(self._broken)

    def is_here(self) -> bool:
        """Is it this thread that asks? Callbacks of the Futures run in it."""
        return threading.current_thread() is self._thread

    @property
    def waits_for_itself(self) -> str:
        """The text of the error of a callback that would wait for ever."""
        return (
            f"group {self._name!r}: a callback of its Futures runs in the thread that makes its "
            "calls, so it cannot wait for one that is not over; it may make a plain call"
        )

    def ends_now(self) -> bool:
        """Called by the call under way when it would have to wait. True: it was withdrawn, and has
        to end."""
        future = self._under_way
        if future is None or not future.withdrawn or future.is_settled:
            return False
        with self._leaving:
            future.left = future.withdrawn
            return future.left

    # -- all other threads -------------------------------------------------------------------------

    def begin(self, call: Callable[..., T], *args: Any, plain: bool = False) -> CallFuture[T]:
        """Gives the thread a call, which it makes in the caller's context."""
        future: CallFuture[T] = CallFuture(self, next(self._numbers))
        run = functools.partial(contextvars.copy_context().run, call, *args)
        if self._ending:  # a callback has begun this one, while `end` waits
            raise ClosedError(f"group {self._name!r}: this member is leaving")
        self._jobs.put([future, run, plain])
        return future

    def make(self, call: Callable[..., T], *args: Any) -> T:
        """Has the thread make a plain call, and waits for it. HopliteTimeoutError: the Group's
        timeout has passed, and the call is not over, and was withdrawn. Whatever else interrupts
        this wait (Ctrl-C, say) leaves the call under way."""
        future = self.begin(call, *args, plain=True)
        try:
            try:
                future.wait()
            except HopliteTimeoutError:
                self._withdraw(future)
            future.wait(FOREVER_S)  # a call that was withdrawn ends at once
            return future.outcome()
        except HopliteTimeoutError:
            raise
        except BaseException:
            if not future.is_settled or future.left:  # something has interrupted this wait
                self._resume(future, call, *args)
            raise
        finally:
            del future, call, args  # no reference cycle through the traceback

    def _withdraw(self, future: CallFuture[Any]) -> None:
        """Makes the call end as soon as it would have to wait. HopliteTimeoutError: it has not
        begun, and is not made."""
        with self._leaving:
            if future.number > self._ended and self._under_way is not future:
                future.left = True
            else:
                future.withdrawn = True
        if future.left:
            raise HopliteTimeoutError(
                f"group {self._name!r}: this call was not made, because one that was begun in the "
                f"background before it is not over: {self._late()}"
            )
        self._wake()

    def _resume(self, future: CallFuture[Any], call: Callable[..., Any], *args: Any) -> None:
        """Leaves a plain call under way, although it may have been withdrawn: its caller will not
        make it again."""
        with self._leaving:
            future.withdrawn = False
            has_left = future.left
        if has_left and not self._ending:
            self.begin(call, *args, plain=True)

    def patience_s(self, since: float) -> float | None:
        """How many seconds a wait that has begun at that time may go on before it asks again; None:
        for ever. HopliteTimeoutError: it has taken longer than the Group's timeout, and so has the
        call under way."""
        if self._timeout is None:
            return None
        left = max(since, self._turn_at) + self._timeout - clock.monotonic()
        if left > 0:
            return min(left, FOREVER_S)
        raise HopliteTimeoutError(
            f"group {self._name!r}: {self._late()}, after {self._timeout:g} s. The call goes on in "
            "the background: wait for the same Future again, and do not make the call again"
        )

    def end(self, give_up: Callable[[str], None], wait: bool) -> None:
        """Takes no more calls, and waits for those that were begun. give_up: makes the thread fail
        the calls that are left, and is called with the reason if one of them takes longer than the
        Group's timeout."""
        self._ending = True
        self.stop()
        if not wait:
            return
        since = clock.monotonic()
        try:
            while self._thread.is_alive():
                left = self.patience_s(since)
                self._thread.join(SLICE_S if left is None else min(left, SLICE_S))
        except HopliteTimeoutError:
            give_up(f", and its calls in the background were not over within {self._timeout:g} s")
        self._thread.join()

    def stop(self) -> None:
        """Ends the thread after the calls that were begun."""
        self._jobs.put(None)
