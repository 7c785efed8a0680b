"""Sends functions to workers. A function is sent once, as long as it does not change.

A function that workers can import is sent by name. A function that is sent by value contains its
defaults, its closure and the globals that it uses. If any of these captured values change between
two calls, the function must be pickled again. Pickling takes ten times as long as the rest of a
submit, so the captured values are compared first, and unchanged functions are not sent again.
"""

from __future__ import annotations

import functools
import inspect
import types
import weakref
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias

from hoplite_mp import _serialize
from hoplite_mp._client.captured_arrays import CapturedArrays
from hoplite_mp._client.chunks import rows_of
from hoplite_mp._client.memory import whole
from hoplite_mp._common.object_states import CONCURRENCY_MAX, TASK_ASYNC
from hoplite_mp._serialize import code

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hoplite_mp._client.memory import Memory
    from hoplite_mp._common.ref import ObjectRef
    from hoplite_mp._serialize.captured_globals import Read

__all__ = [
    "Caught",
    "Chunked",
    "Exceptions",
    "FrozenFunction",
    "Functions",
    "Raised",
    "RetryingFunction",
    "check_counts",
    "flags_of",
    "is_async",
    "yields",
]

# The kind of a submitted function: plain, async, or a generator.
#
# A worker runs `async def` functions concurrently in its event loop, so it must know the kind
# before it claims a task. Generator functions are only for `stream`. For a plain function the check
# only reads the flags of its code, which costs less than a cache.


_FUNCTION, _BUILTIN = types.FunctionType, types.BuiltinFunctionType
# Set by inspect.markcoroutinefunction and by asyncio.
_MARKS = {"_is_coroutine_mark", "_is_coroutine"}
_YIELDS = inspect.CO_GENERATOR | inspect.CO_ASYNC_GENERATOR
_ANY = _YIELDS | inspect.CO_COROUTINE


def is_async(fn: Any) -> bool:
    """Whether a call returns a coroutine. Also true for an object with an async `__call__`."""
    fn = _inner(fn)
    return inspect.iscoroutinefunction(fn) or inspect.iscoroutinefunction(_called(fn))


def yields(fn: Any) -> bool:
    """Whether `fn` is a generator function, plain or async."""
    call = _called(_inner(fn))
    return inspect.isgeneratorfunction(call) or inspect.isasyncgenfunction(call)


def flags_of(fn: Any) -> int:
    """The flags of a task that runs this function, excluding its concurrency. Raises TypeError if
    `fn` cannot be called, or is a generator function."""
    kind = type(fn)
    if kind is _FUNCTION:  # most functions are plain, and this runs at every submit
        marks = fn.__dict__
        if not (fn.__code__.co_flags & _ANY or (marks and _MARKS & marks.keys())):
            return 0
    elif kind is _BUILTIN or kind is type:
        return 0
    if not callable(fn):
        raise TypeError(f"expected a function or an object that can be called, not {fn!r:.80}")
    if yields(fn):
        _refuse_generator(fn)
    return TASK_ASYNC if is_async(fn) else 0


def check_counts(changes: dict[str, Any]) -> None:
    """Checks the options concurrency= and buffersize=, and converts them to integers. Raises
    ValueError if an option is invalid."""
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
        f"stream({name}, ...) yields its items one by one, each as a ref"
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


_BY_IDENTITY = {types.FunctionType, types.BuiltinFunctionType, type}
# Returned by `send` if the task need not hold anything for its function, but the function's object
# should be freed soon after the task is done.
NOTHING = object()
# Exceptions after which a task is retried, as if its worker had died.
Exceptions: TypeAlias = tuple[type[Exception], ...]
# One list for each argument, all of the same length.
Columns: TypeAlias = "Sequence[list[Any]]"
# How a function is sent: (whether it is wrapped in a Chunked, the exceptions after which it is
# retried, whether the Chunked catches exceptions).
Form: TypeAlias = tuple[bool, Exceptions, bool]


class _Sent(NamedTuple):
    """A function as it was sent last."""

    ref: ObjectRef[Any]
    reads: list[Read] | None  # as `Scan.reads`
    arrays: list[Any]  # the states of its captured arrays
    digest: bytes  # of the pickled function
    by_name: list[Any]  # `code.by_name` at that time


class Functions:
    """The functions that one process has sent."""

    def __init__(self, memory: Memory) -> None:
        self._memory = memory
        self._known: weakref.WeakKeyDictionary[Any, dict[Form, _Sent]]
        self._known = weakref.WeakKeyDictionary()
        self._arrays = arrays = CapturedArrays(memory)
        memory.scan = lambda: _serialize.Scan(arrays)

    def __len__(self) -> int:
        return sum(map(len, self._known.values()))

    def close(self) -> None:
        """Ends the tracking of captured arrays. Called when the cluster is closed."""
        self._arrays.close()

    def send(
        self, fn: Any, chunked: bool = False, again: Exceptions = (), catches: bool = False
    ) -> tuple[ObjectRef[Any], Any]:
        """Stores the function, unless the same bytes are stored already. Returns a ref to the
        bytes, and a value that the task must hold until it is done. The value is None if the
        function's object need not be freed soon after the task. If the captured values include
        refs, which may have no other holder, the value contains the function and its captured
        values. Otherwise it is NOTHING, so that an object to which a method is bound is freed when
        its owner drops it. `chunked`: the function is sent as a Chunked, which is called with
        columns of arguments. `catches`: the Chunked catches exceptions of items. `again`: the task
        is retried after these exceptions."""
        kind = type(fn)
        if kind is FrozenFunction:
            sent: tuple[ObjectRef[Any], Any] | None = fn.sent
            if sent is None:
                sent = fn.sent = self.send(fn.fn, fn.chunked, fn.again, fn.catches)
            return sent
        by_identity = kind in _BY_IDENTITY  # other callables may have state, and their own equality
        form = chunked, again, catches
        forms = self._known.get(fn) if by_identity else None
        known = None if forms is None else forms.get(form)
        by_name = code.by_name  # the current list; a registration starts a new one
        scan = None
        if known is not None and known.reads is not None and known.by_name is by_name:
            if known.reads:
                scan = _serialize.Scan(self._arrays)
            if scan is None or scan.unchanged(known.reads):
                return known.ref, None
        scan = _serialize.Scan(self._arrays) if scan is None else scan
        if by_identity and (kind is not type or code.importable(fn)):
            scan.reads = []
        sending = _in_form(fn, chunked, again, catches)
        encoded, beside, refs = _serialize.encode_out_of_band(sending, scan)
        if by_identity:
            digest = _serialize.digest(b"".join((encoded, *[one._id for one in beside])))
            if known is not None and known.digest == digest:
                ref = known.ref
            else:
                ref = self._put(encoded, beside)
            made = _Sent(ref, scan.reads, scan.states(), digest, by_name)
            self._known.setdefault(fn, {})[form] = made
            if scan.reads == []:
                return ref, None
        else:
            ref = self._put(encoded, beside)
            scan.hold(fn)
        return ref, (fn, scan.values) if refs else NOTHING

    def _put(self, encoded: bytes, beside: list[ObjectRef[Any]]) -> ObjectRef[Any]:
        """Puts the function together with refs to its out-of-band objects, which therefore live as
        long as the function's object."""
        return self._memory.put((encoded, beside) if beside else encoded)


class FrozenFunction:
    """The function of one call that submits many tasks, such as `map`. It is sent once, with its
    captured values at the time of the first task. `catches`: see `Chunked`."""

    def __init__(
        self, fn: Any, chunked: bool = False, again: Exceptions = (), catches: bool = False
    ) -> None:
        self.fn = fn
        self.chunked = chunked
        self.again = again
        self.catches = catches
        self.sent: tuple[ObjectRef[Any], Any] | None = None
        self.flags = flags_of(fn)
        self.__name__ = getattr(fn, "__name__", None) or type(fn).__name__


def _in_form(fn: Any, chunked: bool, again: Exceptions, catches: bool) -> Any:
    if chunked:
        return Chunked(fn, again, catches)
    return RetryingFunction(fn, again) if again else fn


class RetryingFunction:
    """Wraps a function whose task is retried after some exceptions, as if its worker had died. The
    worker unpickles it as a RetryingFunction, and reads `again` from it."""

    def __init__(self, fn: Any, again: Exceptions) -> None:
        self.fn = fn
        self.again = again
        self.__qualname__ = getattr(fn, "__qualname__", None) or type(fn).__qualname__

    def __reduce__(self) -> Any:
        return RetryingFunction, (self.fn, self.again)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.fn(*args, **kwargs)


class Raised:
    """The exception of one item, in the results of a chunk. text: its traceback."""

    def __init__(self, error: BaseException, text: str) -> None:
        self.error = error
        self.text = text

    def __reduce__(self) -> Any:
        return Raised, (_serialize.portable_error(self.error), self.text)


class Caught(list[Any]):
    """The results of a chunk. An exception of an item is a Raised."""


class Chunked:
    """A callable that receives columns of arguments, and calls the wrapped function once for each
    row. catches: whether an item's exception becomes the item's result (a Raised) instead of ending
    the chunk."""

    def __init__(self, fn: Any, again: Exceptions = (), catches: bool = False) -> None:
        self.fn = fn
        self.again = again  # only an item that raises one of these is retried
        self.catches = catches
        self.__qualname__ = getattr(fn, "__qualname__", None) or type(fn).__qualname__

    def __reduce__(self) -> Any:
        return Chunked, (self.fn, self.again, self.catches)

    def __call__(self, *columns: list[Any]) -> Any:
        fn = self.fn
        if is_async(fn):
            return self._one_by_one(columns)
        if len(columns) == 1:  # not map(), because a StopIteration from `fn` would end it
            return [fn(item) for item in columns[0]]
        return [fn(*args) for args in rows_of(columns)]

    async def _one_by_one(self, columns: Columns) -> list[Any]:
        return [await self.fn(*args) for args in rows_of(columns)]

    def prepared(self, tries: Tries) -> Any:
        """The function to call in place of this object, if items may be retried or may raise."""
        each = self._each_in_loop if is_async(self.fn) else self._each
        return functools.partial(each, tries)

    def _no_results(self) -> list[Any]:
        return Caught() if self.catches else []

    def _each(self, tries: Tries, *columns: list[Any]) -> list[Any]:
        results = self._no_results()
        for index, args in enumerate(rows_of(columns)):
            try:
                results.append(self._try(tries, index, args))
            except BaseException as error:
                if not self.catches or (_is_kind(error, KeyboardInterrupt) and tries.cancelled()):
                    raise
                results.append(tries.raised(error))
        return results

    def _try(self, tries: Tries, index: int, args: tuple[Any, ...]) -> Any:
        failures = 0
        while True:
            try:
                return self.fn(*args)
            except self.again:
                failures += 1
                if not tries.may(failures):
                    raise
            args = tries.args(index)

    async def _each_in_loop(self, tries: Tries, *columns: list[Any]) -> list[Any]:
        from asyncio import CancelledError, current_task

        own: Any = current_task()
        results = self._no_results()
        for index, args in enumerate(rows_of(columns)):
            try:
                results.append(await self._try_in_loop(tries, index, args))
            except BaseException as error:
                if not self.catches or (_is_kind(error, CancelledError) and own.cancelling()):
                    raise
                results.append(tries.raised(error))
        return results

    async def _try_in_loop(self, tries: Tries, index: int, args: tuple[Any, ...]) -> Any:
        failures = 0
        while True:
            try:
                return await self.fn(*args)
            except self.again:
                failures += 1
                if not tries.may(failures):
                    raise
            args = tries.args(index)


class Tries(Protocol):
    """A worker's decisions about the items of a chunk."""

    def may(self, failures: int) -> bool:
        """Whether an item may be retried after this number of failures."""

    def args(self, index: int) -> tuple[Any, ...]:
        """The arguments of an item as they were sent. (The failed try may have changed its own
        copy.)"""

    def raised(self, error: BaseException) -> Raised:
        """The result for an item that has raised this exception."""

    def cancelled(self) -> bool:
        """Whether the chunk, or a task that is waiting for it in this process, was cancelled."""


def _is_kind(error: BaseException, kind: type[BaseException]) -> bool:
    return issubclass(type(error), kind)
