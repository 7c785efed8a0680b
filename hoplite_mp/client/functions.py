"""Functions on their way to workers: each travels once, as long as it stays what it is.

Why it exists: a function that readers can import is a name. One that travels by value carries its
defaults, its closure and the globals that it uses, and those may change between two calls; then it
has to be written again. Writing takes ten times as long as all the rest of a submit, so what is
carried along is compared first, and bytes that are what they were are not sent again.
It must never know: tasks, workers.
"""

from __future__ import annotations

import contextlib
import types
import weakref
from operator import is_
from typing import TYPE_CHECKING, Any

import numpy as np

from hoplite_mp import serial
from hoplite_mp.client.carried import Carried as Arrays
from hoplite_mp.client.carried import Kept, Look
from hoplite_mp.client.kinds import flags_of, is_async
from hoplite_mp.serial.code import importable

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hoplite_mp.client.memory import Memory
    from hoplite_mp.ref import ObjectRef

__all__ = ["Fixed", "Functions"]

_BY_IDENTITY = {types.FunctionType, types.BuiltinFunctionType, type}
_IMMUTABLE = {
    int, float, complex, str, bytes, bool, type(None), types.ModuleType, types.BuiltinFunctionType,
}  # fmt: skip
_ABSENT = object()
NOTHING = object()  # is to be held, but the function's object is to go soon after its task
# What was sent last: the object, what it carried if a change would be seen, its digest, and what is
# known of its large arrays.
Known = weakref.WeakKeyDictionary[
    Any, tuple["ObjectRef[Any]", "list[Any] | None", bytes, "list[Kept]"]
]
_BY_NAME: list[Any] = []  # what is carried along by a function that readers import: nothing


class Functions:
    """The functions that one process has sent."""

    def __init__(self, memory: Memory) -> None:
        self._memory = memory
        self._known: Known = weakref.WeakKeyDictionary()
        self._chunked: Known = weakref.WeakKeyDictionary()
        self._arrays = arrays = Arrays(memory)
        memory.keep = lambda: Look(arrays)

    def __len__(self) -> int:
        return len(self._known)

    def close(self) -> None:
        """At the end of the cluster."""
        self._arrays.close()

    def send(self, fn: Any, chunked: bool = False) -> tuple[ObjectRef[Any], Any]:
        """The function as an object in the store; and, if that object is to go soon after the task
        is done, what to hold until then: refs that the function carries along are held by nobody
        else on the way. Without refs nothing is held, so that what the function is bound to goes
        when its owner drops it. `chunked`: as a function of a list of arguments."""
        kind = type(fn)
        if kind is Fixed:
            sent: tuple[ObjectRef[Any], Any] | None = fn.sent
            if sent is None:
                sent = fn.sent = self.send(fn.fn, fn.chunked)
            return sent
        look = Look(self._arrays)
        if kind not in _BY_IDENTITY:  # it may have a state, and an equality of its own
            sending = _Chunked(fn) if chunked else fn
            encoded, beside, refs = serial.encode_with_aside(sending, look)
            ref = self._put(encoded, beside)
            look.used_by(fn)
            return ref, fn if refs else NOTHING
        table = self._chunked if chunked else self._known
        known = table.get(fn)
        if known is not None:
            ref, before, *_ = known
            if before is _BY_NAME:
                return ref, None
            now, constant = _carried(fn, look)
            if constant and before and len(now) == len(before) and all(map(is_, now, before)):
                return ref, None
        elif importable(fn):
            now, constant = _BY_NAME, True
        else:
            now, constant = _carried(fn, look)
        encoded, beside, refs = serial.encode_with_aside(_Chunked(fn) if chunked else fn, look)
        digest = serial.digest(b"".join((encoded, *[one._id for one in beside])))
        if known is None or known[2] != digest:
            ref = self._put(encoded, beside)
        if constant:
            table[fn] = ref, now, digest, look.kept
            return ref, None if now is _BY_NAME else NOTHING
        table[fn] = ref, None, digest, look.kept
        return ref, (fn, now) if refs else NOTHING

    def _put(self, encoded: bytes, beside: list[ObjectRef[Any]]) -> ObjectRef[Any]:
        """With the objects beside it: they live as long as this one does."""
        return self._memory.put((encoded, beside) if beside else encoded)


class Fixed:
    """A function as it is at one call that makes many tasks: it is looked at for the first."""

    def __init__(self, fn: Any, chunked: bool = False) -> None:
        self.fn = fn
        self.chunked = chunked
        self.sent: tuple[ObjectRef[Any], Any] | None = None
        self.flags = flags_of(fn)
        self.__name__ = getattr(fn, "__name__", None) or type(fn).__name__


class _Chunked:
    """A function of a list of arguments, one call for each; made anew in the worker."""

    def __init__(self, fn: Any) -> None:
        self.fn = fn
        self.__qualname__ = getattr(fn, "__qualname__", None) or type(fn).__qualname__

    def __reduce__(self) -> Any:
        return _Chunked, (self.fn,)

    def __call__(self, chunk: list[tuple[Any, ...]]) -> Any:
        if is_async(self.fn):
            return self._one_by_one(chunk)
        return [self.fn(*args) for args in chunk]

    async def _one_by_one(self, chunk: list[tuple[Any, ...]]) -> list[Any]:
        return [await self.fn(*args) for args in chunk]


def _carried(fn: Any, look: Look) -> tuple[list[Any], bool]:
    """What travels with a function by value, and whether a change of it would be seen."""
    if type(fn) is not types.FunctionType:
        return [], False
    found: list[Any] = []
    constant = True
    seen, ahead = {fn}, [fn]
    while ahead:
        function = ahead.pop()
        constant = constant and not function.__dict__
        found.append(function.__code__)
        for value in _values(function):
            kind = type(value)
            if kind is types.FunctionType:
                found.append(weakref.ref(value))  # the same object for the same function
                if value not in seen and not importable(value):
                    seen.add(value)
                    ahead.append(value)
            elif (
                value is _ABSENT
                or kind in _IMMUTABLE
                or (isinstance(value, type) and importable(value))
            ):
                found.append(value)
            elif isinstance(value, np.ndarray) and look.keeps(value):
                found += look.copy_of(value)
            else:
                found.append(value)
                constant = False
    return found, constant


def _contents(cell: types.CellType) -> Iterator[Any]:
    """Nothing if the cell is empty."""
    with contextlib.suppress(ValueError):
        yield cell.cell_contents


def _values(function: types.FunctionType) -> Iterator[Any]:
    """Defaults, closure, and the globals that the code names."""
    yield from function.__defaults__ or ()
    yield from (function.__kwdefaults__ or {}).values()
    for cell in function.__closure__ or ():
        yield next(_contents(cell), cell)
    scope = function.__globals__
    codes = [function.__code__]
    while codes:
        code = codes.pop()
        for name in code.co_names:
            yield scope.get(name, _ABSENT)
        codes += [const for const in code.co_consts if type(const) is types.CodeType]
