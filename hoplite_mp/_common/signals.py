"""Signals: requests to end this process, and exceptions that signal handlers raise.

The process must end properly, after its current work, and the wait for the signal must never hang.
"""

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
    """A signal's request that this process end. It raises no exception, except inside `breaks`,
    where code may be interrupted anywhere.

    It is not a threading.Event, because a signal's handler must not set one: the handler runs in
    the waiting thread, which may hold the event's lock at that moment, and would wait for
    itself."""

    def __init__(self) -> None:
        self._asked = False
        self._breaks = False
        self._wake = os.eventfd(0)  # readable for ever once the end was requested

    def __del__(self) -> None:
        os.close(self._wake)

    def is_set(self) -> bool:
        return self._asked

    def set(self) -> None:
        self._asked = True
        os.eventfd_write(self._wake, 1)

    def wait(self, timeout: float) -> bool:
        """Waits until the end is requested, or for `timeout` seconds. Returns whether it is
        requested."""
        select.select([self._wake], [], [], timeout)
        return self._asked

    def signalled(self, *_: object) -> None:
        """The handler of the signals."""
        self.set()
        if self._breaks:
            self._breaks = False
            raise KeyboardInterrupt

    @contextlib.contextmanager
    def breaks(self) -> Iterator[None]:
        """A signal interrupts this block with KeyboardInterrupt, instead of waiting for its end."""
        self._breaks = not self.is_set()
        try:
            yield
        finally:
            self._breaks = False


# Recognises exceptions that a signal handler has raised.
#
# Python runs signal handlers between any two steps of the main thread, so a handler's exception (a
# timeout, say) is raised by whatever step was running. A call that reports errors of its arguments
# to other members must not mistake it for one, nor a pickler for the error of a value.


# As `error.__traceback__`, for exceptions whose class refuses or redefines the attribute.
_traceback_of = vars(BaseException)["__traceback__"].__get__
PACKAGE = (
    os.path.dirname(os.path.dirname(__file__)) + os.sep
)  # no handler of its own raises an Exception


def is_interruption(error: BaseException) -> bool:
    """Whether a signal handler has raised the error. A handler is recognised in the traceback by
    its arguments, the signal's number and the interrupted frame. Handlers without Python code, and
    those that have deleted their arguments, are not recognised."""
    step = _traceback_of(error)
    while step is not None:
        for one, other in pairwise(_arguments(step.tb_frame)):
            # By type: isinstance reads `__class__` of arguments, whose classes may refuse that.
            if issubclass(type(one), int) and type(other) is FrameType:
                return True
        step = step.tb_next
    return False


def _arguments(frame: FrameType) -> list[Any]:
    """The positional arguments of a call, as far as they still have their names."""
    code = frame.f_code
    has_more = bool(code.co_flags & inspect.CO_VARARGS)
    if code.co_argcount + 2 * has_more < 2:
        return []
    if code.co_filename.startswith(PACKAGE):
        return []  # the frame would keep a copy of its variables, perhaps of the error: a cycle
    found = frame.f_locals
    arguments = [found.get(name) for name in code.co_varnames[: code.co_argcount]]
    if has_more:
        more = found.get(code.co_varnames[code.co_argcount + code.co_kwonlyargcount])
        arguments += more if type(more) is tuple else ()
    return arguments
