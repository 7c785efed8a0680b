"""The kind of a submitted function: plain, async, or a generator.

A worker runs `async def` functions concurrently in its event loop and must know that before it
takes a task; generator functions belong to `stream`. For a plain function the check is one look at
its code's flags, which costs less than caching the answer would.
"""

from __future__ import annotations

import functools
import inspect
import types
from typing import Any

from hoplite_mp import _tasks
from hoplite_mp._client.memory import whole

__all__ = [
    "CONCURRENCY_MAX",
    "CONCURRENCY_SHIFT",
    "FLAG_ASYNC",
    "FLAG_STREAM",
    "check_counts",
    "flags_of",
    "is_async",
    "yields",
]

FLAG_ASYNC: int = _tasks.ASYNC_FLAG
FLAG_STREAM = 16  # its items are a stream
# The bits of a task's flags from this one up say how many such tasks one worker may run at a time.
CONCURRENCY_SHIFT = 16
CONCURRENCY_MAX = 0xFFFF
_FUNCTION, _BUILTIN = types.FunctionType, types.BuiltinFunctionType
_MARKS = {"_is_coroutine_mark", "_is_coroutine"}  # inspect.markcoroutinefunction, and asyncio's
_YIELDS = inspect.CO_GENERATOR | inspect.CO_ASYNC_GENERATOR
_ANY = _YIELDS | inspect.CO_COROUTINE


def is_async(fn: Any) -> bool:
    """Does calling it return a coroutine? Also true for an object with an async `__call__`."""
    fn = _inner(fn)
    return inspect.iscoroutinefunction(fn) or inspect.iscoroutinefunction(_called(fn))


def yields(fn: Any) -> bool:
    """Is it a generator function, plain or async?"""
    call = _called(_inner(fn))
    return inspect.isgeneratorfunction(call) or inspect.isasyncgenfunction(call)


def flags_of(fn: Any) -> int:
    """Flags of a task that runs it, without its concurrency. TypeError if it cannot be called, or
    is a generator function."""
    kind = type(fn)
    if kind is _FUNCTION:  # most functions are plain, and this runs at every submit
        marks = fn.__dict__
        if not (fn.__code__.co_flags & _ANY or (marks and _MARKS & marks.keys())):
            return 0
    elif kind is _BUILTIN or kind is type:
        return 0
    if not callable(fn):
        raise TypeError(f"expected a function, or an object that can be called, not {fn!r:.80}")
    if yields(fn):
        _refuse_generator(fn)
    return FLAG_ASYNC if is_async(fn) else 0


def check_counts(changes: dict[str, Any]) -> None:
    """Checks the options concurrency= and buffersize=, and makes them integers. ValueError."""
    if "concurrency" in changes:
        given = changes["concurrency"]
        changes["concurrency"] = count = whole(given)
        if count is None or not 1 <= count <= CONCURRENCY_MAX:
            raise ValueError(f"concurrency={given!r}: it must be from 1 to {CONCURRENCY_MAX}")
    if changes.get("buffersize") is not None:
        given = changes["buffersize"]
        changes["buffersize"] = count = whole(given)
        if count is None or count < 1:
            raise ValueError(f"buffersize={given!r}: it must be 1 or more, or None")


def _refuse_generator(fn: Any) -> None:
    name = getattr(fn, "__name__", None) or type(fn).__name__
    raise TypeError(
        f"{name}() is a generator function, and a generator cannot be a task's result: "
        f"stream({name}, ...) gives its items one by one, each as a ref"
    )


def _called(fn: Any) -> Any:
    """The function itself, or the `__call__` of a callable object."""
    if inspect.isroutine(fn) or isinstance(fn, type):
        return fn
    return inspect.getattr_static(type(fn), "__call__", None)


def _inner(fn: Any) -> Any:
    while isinstance(fn, functools.partial):
        fn = fn.func
    return fn
