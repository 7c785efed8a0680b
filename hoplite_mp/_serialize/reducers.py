"""Custom reductions by class, for objects that plain pickle does not handle as required.

Refs become indices into the payload's list of refs; arrays and views become buffers beside the
stream; `code` reduces functions and classes. A handler (the function for one class) is called with
the pickler and the object. It must not depend on the kind of the pickler or on the purpose of the
stream.
"""

from __future__ import annotations

import copyreg
import functools
import gc
import io
import itertools
import pickle
import sys
import types
import typing
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np

from hoplite_mp._common.reduction import Array, dtype_name, raw_bytes
from hoplite_mp._common.ref import ByRef, ObjectRef, named
from hoplite_mp._serialize.code import (
    NeedCloudpickle,
    Reduced,
    importable,
    reduce_code,
    reduce_code_object,
    reduce_module,
    reduce_named,
    reduce_not_by_name,
    register,
)
from hoplite_mp._serialize.layout import INBAND_BYTES_MAX
from hoplite_mp._serialize.out_of_band import GlobalArray, Lender
from hoplite_mp._serialize.reading import (
    load_array,
    load_array_state,
    load_cached_property,
    load_exception,
    load_exception_state,
    load_output,
    load_partialmethod,
    load_raised,
    load_ref,
    load_same,
    load_value,
    load_view,
)
from hoplite_mp._serialize.tensors import handler_of

CLASSES_MAX = 4096


class RefMet(Exception):
    """Internal: raised at the first ref by a pickler that must stop there."""


class Resolve:
    """Replaces a ref in a call's arguments if the task receives the ref's value."""

    __slots__ = ("ref",)

    def __init__(self, ref: ObjectRef[Any]) -> None:
        self.ref = ref


class BareException:
    """Replaces an exception that readers rebuild without its `__init__`, because the `__init__`
    does not accept the exception's own args."""

    __slots__ = ("args", "kind", "state")

    def __init__(
        self, kind: type[BaseException], args: tuple[Any, ...], state: dict[str, Any]
    ) -> None:
        self.kind = kind
        self.args = args
        self.state = state


def _reduce_ref(pickler: Any, ref: ObjectRef[Any]) -> Reduced:
    if pickler.stop_at_refs:
        raise RefMet
    stream = pickler.stream
    if stream is None:
        pickler.holds_refs = True
        return named(ref)
    return load_ref, (stream.index_of(ref),)


def _reduce_future(pickler: Any, future: Any) -> Reduced:
    return _reduce_ref(pickler, future.ref)


def _reduce_resolve(pickler: Any, mark: Resolve) -> Reduced:
    stream = pickler.stream
    stream.dependencies[mark.ref] = None
    return load_value, (stream.index_of(mark.ref),)


def _reduce_by_ref(pickler: Any, mark: ByRef[Any]) -> Reduced:
    return load_same, (mark.value,)


def _reduce_lender(pickler: Any, lender: Lender) -> Reduced:
    if pickler.stream is not None:
        pickler.out_of_band = lender.beside(pickler.stream)
    return load_same, (None,)


def _reduce_bare_exception(pickler: Any, mark: BareException) -> Reduced:
    return load_exception, (mark.kind, mark.args, mark.state)


def _reduce_exception(pickler: Any, exc: BaseException) -> Reduced:
    """Reduces an exception whose class inherits the reduction of a builtin class. Often the
    `__init__` of such a class does not accept the args that pickle would pass."""
    cls: Any = type(exc)
    reduced: Any = cls.__reduce__(exc)
    if not isinstance(reduced, tuple) or reduced[0] is not cls:
        return NotImplemented
    args = cls, reduced[1], cls.__reduce__ is BaseException.__reduce__
    if len(reduced) < 3 or not isinstance(reduced[2], dict):
        return load_raised, args, *reduced[2:]
    if cls.__setstate__ is not BaseException.__setstate__:
        return load_raised, args, reduced[2]
    return load_raised, args, reduced[2], None, None, load_exception_state


def _reduces_as_exception(cls: Any) -> bool:
    """Whether this is a non-builtin exception class that does not define its own pickling. The
    errors of this library keep the default, which is shorter, because their `__init__` accepts any
    args."""
    return (
        issubclass(cls, BaseException)
        and cls.__module__ not in ("builtins", "hoplite_mp")
        and cls not in copyreg.dispatch_table
        and type(cls.__reduce__) is types.MethodDescriptorType
        and cls.__reduce_ex__ is object.__reduce_ex__
    )


def _reduce_global_array(pickler: Any, marker: GlobalArray) -> Reduced:
    return pickler.scan.reduce_global(marker.array)


def _reduce_cell(pickler: Any, cell: types.CellType) -> Reduced:
    """Reduces a variable of a closure to the value that the scan has read."""
    if not pickler.by_value:
        raise NeedCloudpickle
    from cloudpickle import cloudpickle

    contents = pickler.scan.cell(cell)
    return (cloudpickle._make_cell if contents else cloudpickle._make_empty_cell), contents


def _reduce_view(pickler: Any, view: memoryview) -> Reduced:
    if view.c_contiguous and view.format in _CASTABLE and view.nbytes:
        return load_view, (pickle.PickleBuffer(view.cast("B")), view.format, view.shape)
    return memoryview, (np.asarray(view),)


_CASTABLE = frozenset("cbB?hHiIlLqQnNfd")


def is_bytes_alone(array: Array) -> bool:
    """Whether the array is completely described by its bytes, dtype, shape and class."""
    dtype = array.dtype
    return not dtype.hasobject and bool(dtype.itemsize) and _reduces_as_ndarray(type(array))


def _reduce_array(pickler: Any, array: Array) -> Reduced:
    cls = type(array)
    dtype = array.dtype
    if not is_bytes_alone(array):
        # The array stays in the stream, reduced by numpy or the subclass. The setter makes the
        # result read-only if the payload's other arrays are.
        reduced: Any = array.__reduce_ex__(5)
        if isinstance(reduced, str):
            return reduced
        func, args, *rest = reduced
        state = rest[0] if rest else None
        setter = rest[3] if len(rest) > 3 else None
        return func, args, (state, setter), None, None, load_array_state
    out_of_band = pickler.out_of_band
    if out_of_band is not None and out_of_band.takes(array):
        return out_of_band.reduce(array)
    flags = array.flags
    if not (flags.c_contiguous or flags.f_contiguous):
        array = np.array(array, order="C", copy=True, subok=False)
        flags = array.flags
    order = "C" if flags.c_contiguous else "F"
    small = array.nbytes <= INBAND_BYTES_MAX
    data = np.ndarray.tobytes(array, "A") if small else raw_bytes(array)
    args = (data, dtype_name(dtype) or dtype, array.shape, order)
    return load_array, (args if cls is np.ndarray else (*args, cls))


def _reduces_as_ndarray(cls: type) -> bool:
    base: Any = np.ndarray
    own: Any = cls
    return cls is base or (
        own.__reduce__ is base.__reduce__
        and own.__reduce_ex__ is base.__reduce_ex__
        and own.__setstate__ is base.__setstate__
    )


def _reduce_cached_property(pickler: Any, prop: functools.cached_property[Any]) -> Reduced:
    """Reduces a `cached_property` without its lock (up to Python 3.11), because each process needs
    its own lock."""
    state = {name: value for name, value in vars(prop).items() if name != "lock"}
    return load_cached_property, (type(prop), "lock" in vars(prop)), state


def _reduce_partialmethod(pickler: Any, method: functools.partialmethod[Any]) -> Reduced:
    """Reduces a `partialmethod` with its function. Since Python 3.15 its `__new__` needs the
    function, which the default reduction omits."""
    made = {"func", "args", "keywords", "_phcount", "_merger"}
    state = {name: value for name, value in vars(method).items() if name not in made}
    args = type(method), method.func, method.args, method.keywords
    return load_partialmethod, args, state or None


def _reduce_weak_dict(pickler: Any, found: Any) -> Reduced:
    """Reduces a weak dictionary to its entries. In the reader, an entry is kept as long as the
    reader refers to its key or value."""
    return type(found), (dict(found),)


def _reduce_proxy(pickler: Any, proxy: types.MappingProxyType[Any, Any]) -> Reduced:
    """Reduces a view of a dictionary together with the dictionary itself, so that the reader's view
    shows later changes of the reader's dictionary."""
    below = gc.get_referents(proxy)
    if len(below) == 1 and type(below[0]) is dict:
        return types.MappingProxyType, (below[0],)
    return types.MappingProxyType, (dict(proxy),)


FILES = (io.TextIOWrapper, io.BufferedReader, io.BufferedWriter, io.BufferedRandom, io.FileIO)
OUTPUTS = ("stdout", "stderr", "__stdout__", "__stderr__")
_REDUCTIONS = frozenset({"__reduce__", "__reduce_ex__", "__getstate__"})


def _reduce_file(pickler: Any, file: Any) -> Reduced:
    """Reduces an output stream of this process to the same output stream of the reader. Raises
    TypeError for all other files, because cloudpickle would send the text of the file."""
    for name in OUTPUTS:
        if file is getattr(sys, name, None):
            return load_output, (name,)
    try:
        name = repr(file.name)
    except (AttributeError, ValueError):
        name = "without a name"
    raise TypeError(
        f"{name} is an open file, which cannot be sent to another process; pass its path, and "
        "open it where it is read"
    )


def _is_file(cls: type) -> bool:
    """Whether this is a class of open files that does not define its own pickling."""
    if not issubclass(cls, FILES) or cls in copyreg.dispatch_table:
        return False
    own = itertools.takewhile(lambda base: base not in FILES, cls.__mro__)
    return not any(_REDUCTIONS & vars(base).keys() for base in own)


_HEAP_TYPE = 1 << 9  # Py_TPFLAGS_HEAPTYPE, set for every class made by a class statement

Handler = Callable[[Any, Any], Reduced]
_ref_types: tuple[type, ...] = (ObjectRef,)  # ObjectRef, and the classes registered as Futures
_handlers: dict[type, Handler | None] = {}
_HANDLERS_BY_BASE: tuple[tuple[type | tuple[type, ...], Handler], ...] = (
    (ObjectRef, _reduce_ref),
    (Resolve, _reduce_resolve),
    (ByRef, _reduce_by_ref),
    (Lender, _reduce_lender),
    (BareException, _reduce_bare_exception),
    (np.ndarray, _reduce_array),
    (memoryview, _reduce_view),
    (GlobalArray, _reduce_global_array),
    (types.CellType, _reduce_cell),
    ((type, types.FunctionType), reduce_code),
    (types.CodeType, reduce_code_object),
    (types.MappingProxyType, _reduce_proxy),
    (functools.cached_property, _reduce_cached_property),
    (functools.partialmethod, _reduce_partialmethod),
    ((weakref.WeakKeyDictionary, weakref.WeakValueDictionary), _reduce_weak_dict),
    (types.ModuleType, reduce_module),
    ((functools._lru_cache_wrapper, typing.NewType, typing.TypeVar), reduce_named),
    (typing.ParamSpec, reduce_named),
    (getattr(typing, "TypeVarTuple", typing.ParamSpec), reduce_named),
)


def _reduce_inherited(pickler: Any, obj: Any) -> Reduced:
    """Reduces connections and similar objects, as multiprocessing does while it starts a
    process."""
    context: Any = sys.modules["multiprocessing.context"]
    if context.get_spawning_popen() is None:
        return NotImplemented
    reduction: Any = sys.modules["multiprocessing.reduction"]
    reduced: Reduced = reduction.ForkingPickler._extra_reducers[type(obj)](obj)
    return reduced


def _is_inherited(cls: type) -> bool:
    """Whether multiprocessing passes instances to a new process as file descriptors."""
    reduction: Any = sys.modules.get("multiprocessing.reduction")
    if reduction is None:
        return False
    reduce = reduction.ForkingPickler._extra_reducers.get(cls)
    return getattr(reduce, "__module__", "") in _OF_DESCRIPTORS


_OF_DESCRIPTORS = tuple(
    f"multiprocessing.{name}" for name in ("connection", "heap", "sharedctypes")
)


def _learn_handler(cls: type) -> Handler | None:
    """Determines, once for each class, the function that reduces its instances. None: pickle's own
    reduction."""
    handler: Handler | None = None
    handlers = _handlers  # a registration replaces this dict with a new one
    if issubclass(cls, _ref_types[1:]):
        handler = _reduce_future
    elif _is_file(cls):
        handler = _reduce_file
    elif _is_inherited(cls):
        handler = _reduce_inherited
    elif _reduces_as_exception(cls):
        handler = _reduce_exception
    else:
        handler = next((h for base, h in _HANDLERS_BY_BASE if issubclass(cls, base)), None)
        handler = handler or handler_of(cls)
    if handler is None and cls.__flags__ & _HEAP_TYPE and not importable(cls):
        own_reduce = getattr(cls, "__reduce__", None) is not object.__reduce__
        own_reduce_ex = getattr(cls, "__reduce_ex__", None) is not object.__reduce_ex__
        handler = reduce_not_by_name if own_reduce or own_reduce_ex else None
    if len(handlers) >= CLASSES_MAX:
        handlers.clear()  # otherwise, classes that are created at run time would never be freed
    handlers[cls] = handler
    return handler


def reducer_override(pickler: Any, obj: Any) -> Reduced:
    """Reduces an object. Both picklers use this function as their method `reducer_override`."""
    cls = type(obj)
    try:
        handler = _handlers[cls]
    except KeyError:
        handler = _learn_handler(cls)
    return NotImplemented if handler is None else handler(pickler, obj)


def register_future_type(cls: type) -> None:
    """Registers a class whose instances are sent as the ref in their attribute `ref`."""
    global _ref_types, _handlers
    if cls not in _ref_types:
        _ref_types = (*_ref_types, cls)
        _handlers = {}


def ref_types() -> tuple[type, ...]:
    """ObjectRef and the classes registered as Futures."""
    return _ref_types


def register_pickle_by_value(module: types.ModuleType) -> None:
    """Makes functions and classes of a module be sent by value, even if they were sent before.

    Use this for modules that the other hosts cannot import. Modules that only this program can
    import, for example from a file outside `sys.path`, are sent by value without registration.

    Parameters
    ----------
    module : module
        An imported module. Its submodules are included.

    Raises
    ------
    TypeError
        The argument is not a module.
    ValueError
        The module is not imported.

    Examples
    --------
    >>> import string
    >>> hoplite_mp.register_pickle_by_value(string)
    >>> c.submit(string.capwords, "by value").result()
    'By Value'
    """
    if not isinstance(module, types.ModuleType):
        raise TypeError(f"expected a module, not {type(module).__name__}")
    if module.__name__ not in sys.modules:
        raise ValueError(f"{module.__name__} was not imported: it is not in sys.modules")
    global _handlers
    register(module)
    _handlers = {}
    if "cloudpickle" in sys.modules:
        import cloudpickle  # another thread may be importing it

        cloudpickle.register_pickle_by_value(module)


register_pickle_by_value.__module__ = "hoplite_mp"  # as users import it
