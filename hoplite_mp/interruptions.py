"""Which exceptions a signal handler has raised.

Why it exists: Python runs signal handlers between any two steps of the main thread, so what a
handler raises (a timeout, say) comes out of whatever step was running. A call that reports errors
of its arguments to other members must not take that for one.
It must never know: what was running.
"""

from __future__ import annotations

import functools
import signal
import threading
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from types import CodeType

__all__ = ["check_interrupted", "interruption_in"]


def interruption_in(error: BaseException) -> BaseException | None:
    """The exception that a signal handler of this process has raised: `error`, or one that it was
    raised from. None: no handler has. Handlers without Python code are not recognised."""
    if threading.current_thread() is not threading.main_thread():
        return None  # Python runs handlers in the main thread only
    handlers = {_code_of(signal.getsignal(number)) for number in signal.valid_signals()} - {None}
    found: BaseException | None = error
    seen: set[int] = set()
    while handlers and found is not None and id(found) not in seen:
        seen.add(id(found))
        step = found.__traceback__
        while step is not None:
            if step.tb_frame.f_code in handlers:
                return found
            step = step.tb_next
        found = found.__cause__ or found.__context__
    return None


def check_interrupted(error: BaseException) -> None:
    """Raises what a signal handler has raised, if `error` is that or was raised from it, because it
    is no failure of what was running."""
    interruption = interruption_in(error)
    try:
        if interruption is not None:
            raise interruption
    finally:
        del error, interruption  # no reference cycle through its traceback


def _code_of(handler: Any) -> CodeType | None:
    """The code that runs when the handler is called."""
    while isinstance(handler, functools.partial):
        handler = handler.func
    if not callable(handler):
        return None  # SIG_DFL, SIG_IGN, or a handler of C
    code: CodeType | None = getattr(handler, "__code__", None)
    return code or getattr(type(handler).__call__, "__code__", None)
