"""The order of a Group's calls that were begun in the background.

Why it exists: calls of a Group are matched by their order. If one of them was not over in time, its
rank has to make it again before any other. A program that has begun several calls does not know of
the failure before it reads a Future, so what it has begun until then must not be made in place of
the call that failed: it would be matched with another call of the other ranks. If the program
has dropped that Future, it is taken to know as soon as it reads that a later call was not made.
It must never know: what a call is, how it is made, which thread makes it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

from hoplite_mp.client.thread_futures import ThreadFuture
from hoplite_mp.errors import HopliteTimeoutError

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["CallFuture", "CallOrder"]

T = TypeVar("T")


class CallOrder:
    """Which of the calls of one Group may be made. They are numbered as they were begun."""

    def __init__(self, name: str) -> None:
        """name: of the Group, for errors."""
        self._name = name
        self._begun = 0  # calls
        self._late: int | None = None  # the number of the call that was not over in time
        self._future: Callable[[], Any] = _gone  # its Future, None if nobody has it any more
        self._known_at: int | None = None  # how many were begun when its error was read

    def begin(self) -> int:
        """The number of a new call."""
        self._begun += 1
        return self._begun - 1

    def make(
        self,
        number: int,
        future: Callable[[], Any],
        calls_over: Callable[[], int | None],
        call: Callable[[], T],
    ) -> T:
        """Makes a call when its turn has come. future: the call's, None if nobody has it any more.
        calls_over: tells how many calls of the Group are over. HopliteTimeoutError: the call was
        not over in time, or must not be made."""
        if self._late is not None:
            if self._known_at is None or number < self._known_at:
                raise HopliteTimeoutError(
                    f"group {self._name!r}: this call was not made, because an earlier one in "
                    "the background was not over in time: read the error of its Future, make that "
                    "one again, and then this one"
                )
            self._late = None
        before = calls_over()
        try:
            return call()
        except HopliteTimeoutError:
            if (
                before is None or calls_over() == before
            ):  # otherwise what was received has raised it
                self._late, self._future, self._known_at = number, future, None
            raise

    def read(self, number: int) -> None:
        """The program reads a HopliteTimeoutError of the call with that number. If it learns so of
        the call that was not over, what it begins from now on may be made."""
        if self._late is None or self._known_at is not None:
            return
        if number == self._late or (number > self._late and self._future() is None):
            self._known_at = self._begun


def _gone() -> None:
    """In place of a weak reference."""


class CallFuture(ThreadFuture[T]):
    """Of a call that was begun in the background."""

    def __init__(self, order: CallOrder) -> None:
        super().__init__()  # the thread that makes the call counts as blocked itself
        self._order = order
        self.number = order.begin()

    def result(self, timeout: float | None = None) -> T:
        """As of `concurrent.futures.Future`."""
        try:
            return super().result(timeout)
        except HopliteTimeoutError:
            self._order.read(self.number)
            raise
        finally:
            self = None  # type: ignore[assignment]  # no reference cycle through the traceback

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """As of `concurrent.futures.Future`."""
        error = super().exception(timeout)
        if isinstance(error, HopliteTimeoutError):
            self._order.read(self.number)
        return error
