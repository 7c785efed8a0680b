"""Signals: requests to end this process, and exceptions raised by signal handlers."""

from __future__ import annotations

import contextlib
import inspect
import os
import select
from itertools import pairwise
from types import FrameType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["StopRequest", "is_interruption"]


class StopRequest:
    """A flag that signals set to make this process exit after its current work. No exception is
    raised, except inside `breaks`.

    It is not a threading.Event, because a signal handler must not set one: the handler may run in
    a thread that is waiting for the event and holds its lock, and would deadlock."""

    def __init__(self) -> None:
        self._requested = False
        self._breaks = False
        self._wake = os.eventfd(0)  # readable after the request

    def __del__(self) -> None:
        os.close(self._wake)

    def is_set(self) -> bool:
        return self._requested

    def set(self) -> None:
        self._requested = True
        os.eventfd_write(self._wake, 1)

    def wait(self, timeout: float) -> bool:
        """Waits for the request, for at most `timeout` seconds. Returns whether it was made."""
        select.select([self._wake], [], [], timeout)
        return self._requested

    def signalled(self, *_: object) -> None:
        """The signal handler."""
        self.set()
        if self._breaks:
            self._breaks = False
            raise KeyboardInterrupt

    @contextlib.contextmanager
    def breaks(self) -> Iterator[None]:
        """A context manager for a block that a signal interrupts with KeyboardInterrupt."""
        self._breaks = not self.is_set()
        try:
            yield
        finally:
            self._breaks = False


# Recognition of exceptions raised by signal handlers.
#
# Python runs signal handlers between any two steps of the main thread, so any step can raise a
# handler's exception, such as a timeout. A Group call must not mistake this exception for an error
# in its arguments, and a pickler must not mistake it for an error in a value.


# Like `error.__traceback__`, but works even if the exception's class refuses or redefines the
# attribute.
_traceback_of = vars(BaseException)["__traceback__"].__get__
# Frames in this package are ignored, because its own handlers raise no Exception.
PACKAGE = os.path.dirname(os.path.dirname(__file__)) + os.sep


def is_interruption(error: BaseException) -> bool:
    """Whether a signal handler has raised the error. A handler's frame in the traceback is
    recognised by its arguments: a signal number and the interrupted frame. Handlers that are not
    Python code, or that have deleted their arguments, are not recognised."""
    step = _traceback_of(error)
    while step is not None:
        for number, frame in pairwise(_arguments(step.tb_frame)):
            # isinstance is not used, because it reads `__class__`, which the arguments' classes may
            # refuse.
            if issubclass(type(number), int) and type(frame) is FrameType:
                return True
        step = step.tb_next
    return False


def _arguments(frame: FrameType) -> list[Any]:
    """The positional arguments in a frame that are still bound to their names."""
    code = frame.f_code
    has_more = bool(code.co_flags & inspect.CO_VARARGS)
    if code.co_argcount + 2 * has_more < 2:
        return []
    if code.co_filename.startswith(PACKAGE):
        return []  # f_locals may contain the error, which would create a reference cycle
    found = frame.f_locals
    arguments = [found.get(name) for name in code.co_varnames[: code.co_argcount]]
    if has_more:
        more = found.get(code.co_varnames[code.co_argcount + code.co_kwonlyargcount])
        arguments += more if type(more) is tuple else ()
    return arguments
