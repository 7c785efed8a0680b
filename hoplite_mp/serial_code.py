"""How Python values become pickle streams and come back: the lower half of `serial`.

A payload that is neither one array, bytes nor a number holds a pickle 5 stream whose buffers stand
apart. Two picklers write it. The *light* one is C's own with `reducer_override`, which is called
for every object of a type that C does not know; `persistent_id` would do for refs as well, but
costs a Python call for every element of every list. The *heavy* one is cloudpickle's, asked only
when the light one meets code that readers cannot import: what `__main__` defines, lambdas, local
functions and classes, modules registered to travel by value. Plain pickle would "succeed" for
`__main__` by reference, and readers never import `__main__`.

Reading needs what a stream cannot hold: who makes refs, and whether arrays come out writable. The
functions named in streams find that in a thread-local `Reading`.
"""

from __future__ import annotations

import copyreg
import functools
import pickle
import sys
import threading
import types
import typing
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from hoplite_mp.ref import ByRef, ObjectRef

__all__ = [
    "BareException",
    "NeedCloudpickle",
    "Reading",
    "RefMet",
    "Resolve",
    "Stream",
    "decode_function",
    "dtype_name",
    "encode_function",
    "function_name",
    "importable",
    "load_stream",
    "named_dtype",
    "raw_bytes",
    "ref_types",
    "register_future_type",
    "register_pickle_by_value",
    "write_stream",
]

Array = np.ndarray[Any, np.dtype[Any]]

# Below this an array inside a container stays in the stream: its own line in the buffer table,
# alignment and memoryview would cost more than copying it.
INBAND_BYTES_MAX = 1024
CACHE_ENTRIES_MAX = 4096


# --- dtypes by name ------------------------------------------------------------------------------

_dtype_names: dict[np.dtype[Any], str | None] = {}


def dtype_name(dtype: np.dtype[Any]) -> str | None:
    """The name that `named_dtype` turns back into `dtype`; None for what only pickle describes."""
    if dtype.metadata is not None:  # Equal to the dtype without, but not the same.
        return None
    try:
        return _dtype_names[dtype]
    except KeyError:
        pass
    name: str | None = None
    if dtype.type.__module__ == "ml_dtypes":
        name = dtype.name
    elif dtype.kind in "biufcmMSU" and dtype.itemsize and dtype.isbuiltin != 2:
        name = dtype.str
    if len(_dtype_names) >= CACHE_ENTRIES_MAX:
        _dtype_names.clear()
    _dtype_names[dtype] = name
    return name


@functools.lru_cache(CACHE_ENTRIES_MAX)
def named_dtype(name: str) -> np.dtype[Any]:
    """The dtype that `dtype_name` named so."""
    if name[0] in "<>|=":
        return np.dtype(name)
    import ml_dtypes  # Not needed, and perhaps not installed, where nobody uses its dtypes.

    dtype: np.dtype[Any] = np.dtype(getattr(ml_dtypes, name))
    return dtype


def raw_bytes(array: Array) -> pickle.PickleBuffer:
    """The memory of a contiguous array as a buffer, whatever its dtype and subclass."""
    if type(array) is not np.ndarray:
        array = np.ndarray.view(array, np.ndarray)
    dtype = array.dtype
    if dtype.kind not in "biufcSU" or dtype.isbuiltin == 2:
        # Dates, records and foreign dtypes have no format in the buffer protocol; plain bytes do.
        array = array.view(np.dtype((np.void, dtype.itemsize)))
    buffer: Any = array  # numpy's stubs declare the buffer protocol from Python 3.12 on.
    return pickle.PickleBuffer(buffer)


# --- code: by reference or by value --------------------------------------------------------------

_by_value_modules: dict[str, types.ModuleType] = {}
_MAIN_NAMES = frozenset({"__main__", "__mp_main__"})
_BUILTIN_SINGLETON_TYPES = frozenset({type(None), type(...), type(NotImplemented)})
# Classes that were defined in this process, not received: what comes back must not change them.
_native_classes: weakref.WeakSet[type] = weakref.WeakSet()


def register_pickle_by_value(module: types.ModuleType) -> None:
    """Send the functions and classes of `module` (and of modules below it) by value from now on.

    For modules that exist only in this process, or are being edited: others need not import them.
    """
    if not isinstance(module, types.ModuleType):
        raise TypeError(f"expected a module, not {type(module).__name__}")
    if module.__name__ not in sys.modules:
        raise ValueError(f"{module.__name__} was not imported: it is not in sys.modules")
    _by_value_modules[module.__name__] = module
    _handlers.clear()
    if "cloudpickle" in sys.modules:
        sys.modules["cloudpickle"].register_pickle_by_value(module)


def importable(obj: Any) -> bool:
    """Will a reader find this very function or class by its module and qualified name?"""
    module_name = getattr(obj, "__module__", None)
    qualname = getattr(obj, "__qualname__", None) or getattr(obj, "__name__", None)
    if type(module_name) is not str or type(qualname) is not str:
        return False
    if not _module_travels(module_name):
        return False
    found: Any = sys.modules[module_name]
    for name in qualname.split("."):  # "<locals>" and "<lambda>" are no attributes: not found.
        found = getattr(found, name, None)
        if found is None:
            return False
    return found is obj


def _module_travels(module_name: Any) -> bool:
    """May readers import this module: not `__main__`, nor what is registered, nor what is gone."""
    if module_name in _MAIN_NAMES or module_name not in sys.modules:
        return False
    while _by_value_modules and module_name:
        if module_name in _by_value_modules:
            return False
        module_name = module_name.rpartition(".")[0]
    return True


# --- writing -------------------------------------------------------------------------------------


class NeedCloudpickle(Exception):
    """Internal: the light pickler met something that has to travel by value."""


class RefMet(Exception):
    """Internal: a pickler that was told to stop at the first ref has met one."""


class Resolve:
    """Stands in a call's arguments where the task receives the value of `ref`."""

    __slots__ = ("ref",)

    def __init__(self, ref: ObjectRef[Any]) -> None:
        self.ref = ref


class BareException:
    """Stands for an exception to be rebuilt without its `__init__`, which refused its own args."""

    __slots__ = ("exc",)

    def __init__(self, exc: BaseException) -> None:
        self.exc = exc


class Stream:
    """A written pickle stream: what stays inside, the buffers beside it, the refs it names."""

    __slots__ = ("buffers", "chunks", "dependencies", "index", "refs", "write")

    def __init__(self) -> None:
        self.chunks: list[bytes] = []
        self.buffers: list[pickle.PickleBuffer] = []
        self.refs: list[ObjectRef[Any]] = []
        self.dependencies: list[ObjectRef[Any]] = []
        self.index: dict[ObjectRef[Any], int] = {}
        self.write = self.chunks.append  # The picklers take this object for their file.

    def index_of(self, ref: ObjectRef[Any]) -> int:
        """The place of `ref` in the payload's list of refs."""
        index = self.index.setdefault(ref, len(self.refs))
        if index == len(self.refs):
            self.refs.append(ref)
        return index


Reduced = Any  # What __reduce_ex__ may return, or NotImplemented.


def _reducer_override(self: Any, obj: Any) -> Reduced:
    cls = type(obj)
    try:
        handler = _handlers[cls]
    except KeyError:
        handler = _learn_handler(cls)
    return NotImplemented if handler is None else handler(self, obj)


class _LightPickler(pickle.Pickler):
    by_value = False
    stream: Stream | None = None  # None: refs are written as a foreign pickler would.
    stop_at_refs = False
    reducer_override = _reducer_override


@functools.cache
def _heavy_pickler() -> type[pickle.Pickler]:
    import cloudpickle

    for module in _by_value_modules.values():
        cloudpickle.register_pickle_by_value(module)

    class HeavyPickler(cloudpickle.Pickler):  # type: ignore[misc,unused-ignore]
        by_value = True
        stream: Stream | None = None
        stop_at_refs = False
        reducer_override = _reducer_override

    return HeavyPickler


def _reduce_by_value(pickler: Any, obj: Any) -> Reduced:
    """cloudpickle's reduction of a function or class that readers cannot import."""
    from cloudpickle import cloudpickle

    is_class = isinstance(obj, type)
    if is_class and obj not in cloudpickle._DYNAMIC_CLASS_TRACKER_BY_CLASS:
        _native_classes.add(obj)
    reduced = cloudpickle.Pickler.reducer_override(pickler, obj)
    if is_class and isinstance(reduced, tuple) and len(reduced) == 6:
        return (*reduced[:5], _set_class_state)
    return reduced


def _set_class_state(cls: type, state: Any) -> None:
    # A class that comes home finds itself here. Its members are newer here than in the stream.
    if cls not in _native_classes:
        from cloudpickle import cloudpickle

        cloudpickle._class_setstate(cls, state)


def _reduce_code(pickler: Any, obj: Any) -> Reduced:
    if id(obj) in _own_ids:
        return NotImplemented
    if importable(obj) or obj in _BUILTIN_SINGLETON_TYPES:
        return NotImplemented
    if not pickler.by_value:
        raise NeedCloudpickle
    return _reduce_by_value(pickler, obj)


def _reduce_only_by_value(pickler: Any, obj: Any) -> Reduced:
    if not pickler.by_value:
        raise NeedCloudpickle
    return NotImplemented  # cloudpickle's dispatch table knows it.


def _reduce_named(pickler: Any, obj: Any) -> Reduced:
    """Objects of the library that pickle would write as a mere name in `__main__`."""
    if importable(obj):
        return NotImplemented
    if isinstance(obj, functools._lru_cache_wrapper):
        return _cached, (obj.__wrapped__, obj.cache_parameters())
    if isinstance(obj, typing.NewType):
        return typing.NewType, (obj.__name__, obj.__supertype__)
    if isinstance(obj, typing.TypeVar):
        return _reduce_only_by_value(pickler, obj)
    return type(obj), (obj.__name__,)


def _cached(function: Callable[..., Any], parameters: dict[str, Any]) -> Any:
    return functools.lru_cache(**parameters)(function)


def _reduce_not_by_name(pickler: Any, obj: Any) -> Reduced:
    """Instances of by-value classes that say themselves how they pickle."""
    reducer = copyreg.dispatch_table.get(type(obj))
    reduced: Any = obj.__reduce_ex__(5) if reducer is None else reducer(obj)
    if isinstance(reduced, str) and not _module_travels(getattr(obj, "__module__", None)):
        raise pickle.PicklingError(
            f"{type(obj).__name__} object pickles as the name {reduced!r}, "
            f"which readers cannot import from {obj.__module__}"
        )
    return reduced


def _reduce_ref(pickler: Any, ref: ObjectRef[Any]) -> Reduced:
    if pickler.stop_at_refs:
        raise RefMet
    stream = pickler.stream
    return ref.__reduce__() if stream is None else (_ref, (stream.index_of(ref),))


def _reduce_future(pickler: Any, future: Any) -> Reduced:
    return _reduce_ref(pickler, future.ref)


def _reduce_resolve(pickler: Any, mark: Resolve) -> Reduced:
    stream = pickler.stream
    if mark.ref not in stream.dependencies:
        stream.dependencies.append(mark.ref)
    return _resolved, (stream.index_of(mark.ref),)


def _reduce_by_ref(pickler: Any, mark: ByRef[Any]) -> Reduced:
    return _same, (mark.value,)


def _reduce_bare_exception(pickler: Any, mark: BareException) -> Reduced:
    exc = mark.exc
    state = {name: part for name, part in exc.__dict__.items() if _can_pickle(part)}
    return _bare_exception, (type(exc), exc.args, state)


def _can_pickle(value: Any) -> bool:
    try:
        write_stream(value)
    except Exception:
        return False
    return True


def _bare_exception(
    cls: type[BaseException], args: tuple[Any, ...], state: dict[str, Any]
) -> BaseException:
    builtin: Any = next(base for base in cls.__mro__ if base.__module__ == "builtins")
    exc: BaseException = builtin.__new__(cls, *args)
    BaseException.__setattr__(exc, "args", args)  # Frozen dataclasses can be exceptions too.
    exc.__dict__.update(state)
    return exc


def _reduce_view(pickler: Any, view: memoryview) -> Reduced:
    if view.c_contiguous and view.format in _CASTABLE and view.nbytes:
        return _view, (pickle.PickleBuffer(view.cast("B")), view.format, view.shape)
    return memoryview, (np.asarray(view),)


_CASTABLE = frozenset("cbB?hHiIlLqQnNfd")


def _reduce_array(pickler: Any, array: Array) -> Reduced:
    cls = type(array)
    dtype = array.dtype
    if dtype.hasobject or not dtype.itemsize or not _reduces_as_ndarray(cls):
        # In band, by numpy or by the subclass; the setter makes the result read-only when read so.
        reduced: Any = array.__reduce_ex__(5)
        if isinstance(reduced, str):
            return reduced
        func, args, *rest = reduced
        state = rest[0] if rest else None
        setter = rest[3] if len(rest) > 3 else None
        return func, args, (state, setter), None, None, _set_array_state
    flags = array.flags
    if not (flags.c_contiguous or flags.f_contiguous):
        array = np.array(array, order="C", copy=True, subok=False)
        flags = array.flags
    order = "C" if flags.c_contiguous else "F"
    small = array.nbytes <= INBAND_BYTES_MAX
    data = np.ndarray.tobytes(array, "A") if small else raw_bytes(array)
    args = (data, dtype_name(dtype) or dtype, array.shape, order)
    return _array, (args if cls is np.ndarray else (*args, cls))


def _reduces_as_ndarray(cls: type) -> bool:
    base: Any = np.ndarray
    own: Any = cls
    return cls is base or (
        own.__reduce__ is base.__reduce__
        and own.__reduce_ex__ is base.__reduce_ex__
        and own.__setstate__ is base.__setstate__
    )


_HEAP_TYPE = 1 << 9  # Py_TPFLAGS_HEAPTYPE: made by a class statement, not by C.

Handler = Callable[[Any, Any], Reduced]
_ref_types: tuple[type, ...] = (ObjectRef,)  # With the classes registered as Futures.
_handlers: dict[type, Handler | None] = {}
_HANDLERS_BY_BASE: tuple[tuple[type | tuple[type, ...], Handler], ...] = (
    (ObjectRef, _reduce_ref),
    (Resolve, _reduce_resolve),
    (ByRef, _reduce_by_ref),
    (BareException, _reduce_bare_exception),
    (np.ndarray, _reduce_array),
    (memoryview, _reduce_view),
    ((type, types.FunctionType), _reduce_code),
    (types.ModuleType, _reduce_only_by_value),
    ((functools._lru_cache_wrapper, typing.NewType, typing.TypeVar), _reduce_named),
    (typing.ParamSpec, _reduce_named),
    (getattr(typing, "TypeVarTuple", typing.ParamSpec), _reduce_named),
)


def _learn_handler(cls: type) -> Handler | None:
    """Find out once per class how its instances are reduced; None leaves it to pickle."""
    handler: Handler | None = None
    if issubclass(cls, _ref_types[1:]):
        handler = _reduce_future
    else:
        handler = next((h for base, h in _HANDLERS_BY_BASE if issubclass(cls, base)), None)
    if handler is None and cls.__flags__ & _HEAP_TYPE and not importable(cls):
        own_reduce = getattr(cls, "__reduce__", None) is not object.__reduce__
        own_reduce_ex = getattr(cls, "__reduce_ex__", None) is not object.__reduce_ex__
        handler = _reduce_not_by_name if own_reduce or own_reduce_ex else None
    if len(_handlers) >= CACHE_ENTRIES_MAX:
        _handlers.clear()  # Else classes made at run time would live as long as the process.
    _handlers[cls] = handler
    return handler


def register_future_type(cls: type) -> None:
    """Let instances of `cls` stand for the ref in their attribute `ref`."""
    global _ref_types
    if cls not in _ref_types:
        _ref_types = (*_ref_types, cls)
        _handlers.clear()


def ref_types() -> tuple[type, ...]:
    """ObjectRef and the classes registered as Futures."""
    return _ref_types


def write_stream(value: Any, *, stop_at_refs: bool = False) -> Stream:
    """Pickle `value` with its large buffers and its refs beside the stream.

    Raises whatever the value's own reducers raise, or RefMet if asked to stop there.
    """
    stream = Stream()
    light = _LightPickler(stream, 5, buffer_callback=stream.buffers.append)
    light.stream = stream
    light.stop_at_refs = stop_at_refs
    try:
        light.dump(value)
    except (RefMet, MemoryError):
        raise
    except Exception:  # NeedCloudpickle, or something that perhaps cloudpickle can do.
        stream = Stream()
        heavy: Any = _heavy_pickler()(stream, 5, buffer_callback=stream.buffers.append)
        heavy.stream = stream
        heavy.stop_at_refs = stop_at_refs
        heavy.dump(value)
    return stream


# --- reading -------------------------------------------------------------------------------------


class Reading:
    """What the functions named in a stream need to know while it is read."""

    __slots__ = ("_ids", "_make_ref", "_refs", "_resolve", "_values", "writable")

    def __init__(
        self,
        ids: Sequence[bytes],
        make_ref: Callable[[bytes], ObjectRef[Any]],
        resolve: Callable[[ObjectRef[Any]], Any] | None,
        writable: bool,
    ) -> None:
        self._ids = ids
        self._make_ref = make_ref
        self._resolve = resolve
        self._refs: dict[int, ObjectRef[Any]] = {}
        self._values: dict[int, Any] = {}
        self.writable = writable

    def ref(self, index: int) -> ObjectRef[Any]:
        """The ref at `index`, made when first asked for."""
        if index not in self._refs:
            self._refs[index] = self._make_ref(self._ids[index])
        return self._refs[index]

    def value(self, index: int) -> Any:
        """The value of the ref at `index`: the same object wherever the arguments name it."""
        if self._resolve is None:
            return self.ref(index)
        if index not in self._values:
            self._values[index] = self._resolve(self.ref(index))
        return self._values[index]


class _Local(threading.local):
    reading: Reading | None = None


_local = _Local()


def load_stream(stream: Any, buffers: Iterable[Any], reading: Reading) -> Any:
    """Unpickle a stream; readings nest, since user code may read another object meanwhile."""
    outer = _local.reading
    _local.reading = reading
    try:
        return pickle.loads(stream, buffers=buffers)
    finally:
        _local.reading = outer


def _now() -> Reading:
    reading = _local.reading
    if reading is None:
        raise pickle.UnpicklingError("this stream is part of a payload of hoplite_mp, not a pickle")
    return reading


def _ref(index: int) -> ObjectRef[Any]:
    return _now().ref(index)


def _resolved(index: int) -> Any:
    return _now().value(index)


def _same(value: Any) -> Any:
    return value


def _writable_now() -> bool:
    return _local.reading is None or _local.reading.writable


def _view(data: Any, format: str, shape: tuple[int, ...]) -> memoryview:
    view = memoryview(data)
    if not _writable_now():
        view = view.toreadonly()
    elif view.readonly:
        view = memoryview(bytearray(view))
    return view.cast("B").cast(format, shape)  # type: ignore[call-overload,no-any-return]


def _array(
    data: Any,
    dtype: np.dtype[Any] | str,
    shape: tuple[int, ...],
    order: str,
    cls: type[Array] = np.ndarray,
) -> Array:
    """An array over `data`; of a subclass as numpy unpickles one: `__array_finalize__(None)`."""
    if isinstance(dtype, str):
        dtype = named_dtype(dtype)
    writable = _writable_now()
    if writable and type(data) is bytes:
        data = bytearray(data)
    # numpy keeps the *owner* of a memoryview, not an export of it; an array made by frombuffer
    # keeps the memoryview itself, so that the memory is pinned by the rules of the buffer protocol.
    flat = np.frombuffer(data, np.uint8) if len(data) else None
    array = np.ndarray.__new__(cls, shape, dtype, flat, 0, None, order)  # type: ignore[arg-type]
    if flat is None and not writable:
        array.flags.writeable = False
    return array


def _set_array_state(array: Any, state: tuple[Any, Any]) -> None:
    inner, setter = state
    if setter is not None:
        setter(array, inner)
    elif inner is not None:
        array.__setstate__(inner)
    if not _writable_now() and isinstance(array, np.ndarray):
        array.flags.writeable = False
        for part in getattr(array, "__dict__", {}).values():  # A masked array's mask.
            if type(part) is np.ndarray and part.base is None:
                part.flags.writeable = False


# The functions that streams name most are found without being looked up.
_own_ids = frozenset(map(id, (_ref, _resolved, _same, _view, _array, _set_array_state)))


# --- functions -----------------------------------------------------------------------------------


def encode_function(function: Callable[..., Any]) -> bytes:
    """A function for a task: by reference where readers can import it, else by value.

    Refs in its closure travel as in a foreign pickle: they hold nothing on the way, so the caller
    keeps `function` alive until it has arrived.
    """
    name = _display_name(function).encode()[:255]
    stream = Stream()
    try:
        try:
            _LightPickler(stream, 5).dump(function)
        except Exception:
            stream = Stream()
            _heavy_pickler()(stream, 5).dump(function)
    except Exception as error:
        what = type(function).__name__
        raise TypeError(f"cannot pickle the {what} {_display_name(function)}: {error}") from error
    return b"".join((bytes((len(name),)), name, *stream.chunks))


def _display_name(function: Any) -> str:
    while isinstance(function, functools.partial):
        function = function.func
    name = getattr(function, "__qualname__", None) or type(function).__qualname__
    return str(name).rpartition("<locals>.")[2]


def function_name(data: bytes | memoryview) -> str:
    """The display name of an encoded function, read without unpickling."""
    return bytes(data[1 : 1 + data[0]]).decode(errors="replace")


def decode_function(data: bytes | memoryview) -> Any:
    """The function that `encode_function` wrote."""
    outer, _local.reading = _local.reading, None
    try:
        return pickle.loads(data[1 + data[0] :])
    finally:
        _local.reading = outer
