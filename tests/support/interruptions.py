"""Raises at the nth place of a call where the interpreter could run a signal handler."""

from __future__ import annotations

import contextlib
import dis
import functools
import gc
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hoplite_mp

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

OURS = str(Path(hoplite_mp.__file__).parent)
CHECKER = "lockdep.py"  # runs in tests only
# After these the interpreter looks for signals; in between, say inside of `with`, it does not.
LOOKS = {
    dis.opmap[name] for name in ("CALL", "CALL_FUNCTION_EX", "RESUME", "JUMP_BACKWARD")
    if name in dis.opmap
}  # fmt: skip


@contextlib.contextmanager
def no_collection() -> Iterator[None]:
    """While a signal handler of the test may raise: hypothesis runs Python code in each garbage
    collection, where the error of the handler would be lost."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


class Interrupt:
    """Raises at the nth place of this library's Python code where a signal's handler could."""

    def __init__(self, at: int) -> None:
        self.left = at
        self.raised = False
        self.last: dict[Any, int] = {}  # what each frame has just executed

    def __call__(self, frame: Any, event: str, arg: Any) -> Any:
        file = frame.f_code.co_filename
        if self.raised or not file.startswith(OURS) or file.endswith(CHECKER):
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            last, self.last[frame] = self.last.get(frame), opcodes_of(frame.f_code)[frame.f_lasti]
            if last in LOOKS:
                self.left -= 1
                if self.left < 0:
                    self.raised = True
                    self.last.clear()
                    raise KeyboardInterrupt
        return self


@functools.cache
def opcodes_of(code: Any) -> bytes:
    return bytes(code.co_code)


def interrupted(call: Callable[[], Any], at: int) -> bool:
    """Whether it was, before it came to its end."""
    interrupt = Interrupt(at)
    before = sys.gettrace()
    sys._getframe().f_trace_opcodes = True  # Python 3.12 looks for it only in settrace
    sys.settrace(interrupt)
    try:
        call()
    except KeyboardInterrupt:
        pass
    finally:
        sys.settrace(before)
    return interrupt.raised
