"""The functions that pickle streams call, and the state that they need while a stream is read.

These functions make refs, and make arrays that are writable or read-only as the reader requires. A
stream cannot contain this state, so a thread-local `Reading` contains it. The names of the
functions begin with `load_`, and are part of the payloads.
"""

from __future__ import annotations

import contextlib
import functools
import pickle
import sys
import threading
from typing import TYPE_CHECKING, Any

import numpy as np

from hoplite_mp._common.reduction import Array, named_dtype

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from hoplite_mp._common.ref import ObjectRef


class Reading:
    """The state that functions in a stream need while it is read."""

    __slots__ = (
        "_make_ref",
        "_refs",
        "_resolve",
        "_values",
        "ids",
        "nbytes",
        "private",
        "writable",
    )

    def __init__(
        self,
        ids: Sequence[bytes],
        make_ref: Callable[[bytes], ObjectRef[Any]],
        resolve: Callable[[ObjectRef[Any]], Any] | None,
        writable: bool,
    ) -> None:
        self.ids = ids
        self.nbytes = 0  # size of the out-of-band arrays that were described so far
        self._make_ref = make_ref
        self._resolve = resolve
        self._refs: dict[int, ObjectRef[Any]] = {}
        self._values: dict[int, Any] = {}
        self.writable = writable
        self.private = 0  # above 0 while an object with private memory is read

    def ref(self, index: int) -> ObjectRef[Any]:
        """The ref at `index`, made at its first use."""
        if index not in self._refs:
            self._refs[index] = self._make_ref(self.ids[index])
        return self._refs[index]

    def value(self, index: int) -> Any:
        """The value of the ref at `index`. If the ref occurs several times in the arguments, this
        is always the same object."""
        if self._resolve is None:
            return self.ref(index)
        if index not in self._values:
            self._values[index] = self._resolve(self.ref(index))
        return self._values[index]


class _Local(threading.local):
    reading: Reading | None = None


_local = _Local()


def load_stream(stream: Any, buffers: Iterable[Any], reading: Reading) -> Any:
    """Unpickles a stream. Calls may be nested, because user code may read another object during the
    unpickling."""
    outer = _local.reading
    _local.reading = reading
    try:
        return pickle.loads(stream, buffers=buffers)
    finally:
        _local.reading = outer


def load_foreign(stream: Any) -> Any:
    """Unpickles a stream that is not part of a payload. Its arrays are made as by plain pickle."""
    outer, _local.reading = _local.reading, None
    try:
        return pickle.loads(stream)
    finally:
        _local.reading = outer


def now() -> Reading:
    """The state of the stream that this thread is reading."""
    reading = _local.reading
    if reading is None:
        raise pickle.UnpicklingError("this stream is part of a hoplite_mp payload, not a pickle")
    return reading


def load_ref(index: int) -> ObjectRef[Any]:
    """Used in streams: returns a ref that stays a ref."""
    return now().ref(index)


def load_value(index: int) -> Any:
    """Used in streams: returns the value of a ref, which the task receives in place of the ref."""
    return now().value(index)


def load_same(value: Any) -> Any:
    """Used in streams: returns the value itself, for example for `by_ref`."""
    return value


class Private:
    """A marker in a stream before (1) and after (-1) an object whose arrays are always writable.
    Each marker must be a separate instance, because pickle calls an instance's function only
    once."""

    __slots__ = ("step",)

    def __init__(self, step: int) -> None:
        self.step = step

    def __reduce__(self) -> tuple[Callable[[int], None], tuple[int]]:
        return load_private, (self.step,)


def load_private(step: int) -> None:
    """Used in streams: marks the beginning (1) or the end (-1) of a part in which arrays and views
    get private memory."""
    now().private += step


def _is_writable() -> bool:
    reading = _local.reading
    return reading is None or reading.writable or reading.private > 0


def load_view(data: Any, format: str, shape: tuple[int, ...]) -> memoryview:
    """Used in streams: makes a memoryview, with private memory if it must be writable."""
    view = memoryview(data)
    if not _is_writable():
        view = view.toreadonly()
    elif view.readonly:
        view = memoryview(bytearray(view))
    return view.cast("B").cast(format, shape)  # type: ignore[call-overload,no-any-return]


def load_array(
    data: Any,
    dtype: np.dtype[Any] | str,
    shape: tuple[int, ...],
    order: str,
    cls: type[Array] = np.ndarray,
) -> Array:
    """Used in streams: makes an array over `data`. For a subclass, `__array_finalize__(None)` is
    called, as when numpy unpickles an array."""
    if isinstance(dtype, str):
        dtype = named_dtype(dtype)
    writable = _is_writable()
    if writable and (type(data) is bytes or (type(data) is memoryview and data.readonly)):
        data = bytearray(data)
    # numpy keeps the *owner* of a memoryview, not an export of it; an array made by frombuffer
    # keeps the memoryview itself, so the memory is pinned by the rules of the buffer protocol.
    flat = np.frombuffer(data, np.uint8) if len(data) else None
    array = np.ndarray.__new__(cls, shape, dtype, flat, 0, None, order)  # type: ignore[arg-type]
    if flat is None and not writable:
        array.flags.writeable = False
    return array


def load_array_state(array: Any, state: tuple[Any, Any]) -> None:
    """Used in streams: sets the state of an array that was reduced by numpy or a subclass. Then
    makes the array read-only if the payload's other arrays are."""
    inner, setter = state
    if setter is not None:
        setter(array, inner)
    elif inner is not None:
        array.__setstate__(inner)
    if not _is_writable() and isinstance(array, np.ndarray):
        array.flags.writeable = False
        for part in getattr(array, "__dict__", {}).values():  # a masked array's mask
            if type(part) is np.ndarray and part.base is None:
                part.flags.writeable = False


def load_cached_property(cls: Any, locked: bool) -> Any:
    """Used in streams: makes a `functools.cached_property`, whose attributes are filled in
    later."""
    prop = cls.__new__(cls)
    if locked:
        prop.lock = vars(functools.cached_property(len))["lock"]
    return prop


def load_partialmethod(cls: Any, func: Any, args: Any, keywords: Any) -> Any:
    """Used in streams: makes a `functools.partialmethod`."""
    return cls(func, *args, **keywords)


def load_output(name: str) -> Any:
    """Used in streams: returns one of the files to which this process prints."""
    return getattr(sys, name)


def load_exception(
    cls: type[BaseException], args: tuple[Any, ...], state: dict[str, Any]
) -> BaseException:
    """Used in streams: makes an exception without its class's `__init__`."""
    exc = _made(cls, args)
    _set_args(exc, args)
    load_exception_state(exc, state)
    return exc


def load_raised(cls: type[BaseException], args: tuple[Any, ...], exact: bool) -> BaseException:
    """Used in streams: makes an exception by calling its class or, if the class does not accept
    the args, without the class's `__init__`. exact: whether the attribute `args` must be set to
    `args`."""
    exc: Any
    try:
        exc = cls(*args)
    except Exception:
        exc = None
    if type(exc) is not cls:
        exc = _made(cls, args)
    if exact:
        _set_args(exc, args)
    return exc  # type: ignore[no-any-return]


def load_exception_state(exc: BaseException, state: dict[str, Any]) -> None:
    """Used in streams: sets the attributes of an exception, even if its class does not allow
    that."""
    for name, part in state.items():
        try:
            BaseException.__setattr__(exc, name, part)
        except Exception:  # e.g. a property without a setter
            _dict_of(exc)[name] = part


# Accessors for attributes that some classes redefine or do not allow to be set.
_dict_of = vars(BaseException)["__dict__"].__get__
_set_args = vars(BaseException)["args"].__set__


def _made(cls: type[BaseException], args: tuple[Any, ...]) -> BaseException:
    """An instance of the class, made by the first builtin base whose `__new__` accepts the class.
    (Not every base fits the layout of every derived class.)"""
    bases: list[Any] = [base for base in cls.__mro__ if base.__module__ == "builtins"]
    for base in bases[:-1]:
        try:
            exc: BaseException = base.__new__(cls, *args)
        except TypeError:
            continue
        with contextlib.suppress(Exception):
            base.__init__(exc, *args)  # sets the attributes of builtin classes, such as `errno`
        return exc
    return Exception.__new__(cls)


# The ids of the functions that occur most often in streams. They are recognized by these ids,
# without a lookup by name.
OWN_IDS = frozenset(
    map(id, (load_ref, load_value, load_same, load_view, load_array, load_array_state))
)
