"""Functions and classes in streams: by reference where readers can import them, else by value.

By value means by cloudpickle. It is used for what `__main__` defines, for lambdas, for local
functions and classes, and for modules that are registered to travel so. Plain pickle would
"succeed" for `__main__` by reference, but readers never import `__main__`. This module must never
know payloads, refs and arrays.
"""

from __future__ import annotations

import builtins
import copyreg
import functools
import pickle
import sys
import types
import typing
import weakref
from typing import TYPE_CHECKING, Any

from hoplite_mp._serialize.imports import is_found_by_readers
from hoplite_mp._serialize.mains import MAIN_NAMES
from hoplite_mp._serialize.reading import OWN_IDS

if TYPE_CHECKING:
    from collections.abc import Callable


by_value_modules: dict[str, types.ModuleType] = {}
# The globals and closures that travel with a function that readers import: none. Each registration
# makes a new list, so that no function counts any longer as sent by its name.
by_name: list[Any] = []
_BUILTIN_SINGLETON_TYPES = frozenset({type(None), type(...), type(NotImplemented)})
_CO_FILENAME = 10  # the place of co_filename among the arguments of types.CodeType
# Classes that were defined in this process, not received. A stream that comes back must not change
# them.
_native_classes: weakref.WeakSet[type] = weakref.WeakSet()

Reduced = Any  # What __reduce_ex__ may return, or NotImplemented.


class NeedCloudpickle(Exception):
    """Internal: the light pickler met an object that has to travel by value."""


def importable(obj: Any) -> bool:
    """Will a reader find this very function or class by its module and qualified name?"""
    module_name = getattr(obj, "__module__", None)
    qualname = getattr(obj, "__qualname__", None) or getattr(obj, "__name__", None)
    if type(module_name) is not str or type(qualname) is not str:
        return False
    if not module_travels(module_name):
        return False
    found: Any = sys.modules[module_name]
    for name in qualname.split("."):  # "<locals>" and "<lambda>" are no attributes, so not found.
        found = getattr(found, name, None)
        if found is None:
            return False
    return found is obj


def register(module: types.ModuleType) -> None:
    """Sends the module, and those below it, by value from now on."""
    global by_name
    by_value_modules[module.__name__] = module
    by_name = []


def module_travels(module_name: Any) -> bool:
    """Can readers import this module? Not `__main__`, nor a module that is registered to travel by
    value, nor one that only this program has imported."""
    if module_name in MAIN_NAMES or module_name not in sys.modules:
        return False
    name = module_name
    while by_value_modules and module_name:
        if module_name in by_value_modules:
            return False
        module_name = module_name.rpartition(".")[0]
    return is_found_by_readers(name)


def reduce_code(pickler: Any, obj: Any) -> Reduced:
    """A function or class: by its name if that is enough."""
    if id(obj) in OWN_IDS:
        return NotImplemented
    if importable(obj) or obj in _BUILTIN_SINGLETON_TYPES:
        return NotImplemented
    if not pickler.by_value:
        raise NeedCloudpickle
    return pickler.reduce_by_value(obj)


def note_native(cls: type) -> None:
    """Notes that this process has defined this class by value."""
    _native_classes.add(cls)


def reduce_code_object(pickler: Any, obj: types.CodeType) -> Reduced:
    """As cloudpickle does, with the name of the file that it leaves out since version 3.1."""
    if not pickler.by_value:
        raise NeedCloudpickle
    from cloudpickle import cloudpickle

    kind, args = cloudpickle._code_reduce(obj)
    # Interned, so that a pickler that meets several code objects writes the name once.
    return kind, (*args[:_CO_FILENAME], sys.intern(obj.co_filename), *args[_CO_FILENAME + 1 :])


def is_native(cls: type) -> bool:
    """Was this class by value defined in this process?"""
    return cls in _native_classes


def reduce_module(pickler: Any, module: types.ModuleType) -> Reduced:
    """A module: by its name, or with all that is in it if readers cannot import it."""
    if not pickler.by_value:
        raise NeedCloudpickle
    name = module.__name__
    if name in MAIN_NAMES or (sys.modules.get(name) is module and module_travels(name)):
        return NotImplemented  # cloudpickle's dispatch table knows it.
    state = {key: value for key, value in vars(module).items() if key not in _OF_IMPORT}
    # The state comes later than the module, because its functions may name the module.
    return types.ModuleType, (name,), state, None, None, load_module_state


def load_module_state(module: types.ModuleType, state: dict[str, Any]) -> None:
    """Named in streams: fills in a module that came by value."""
    vars(module).update(state, __builtins__=builtins.__dict__)


# Names in a module that describe how this process has imported it.
_OF_IMPORT = frozenset({"__builtins__", "__cached__", "__loader__", "__spec__"})


def reduce_only_by_value(pickler: Any, obj: Any) -> Reduced:
    """Objects that plain pickle cannot write at all, such as modules."""
    if not pickler.by_value:
        raise NeedCloudpickle
    return NotImplemented  # cloudpickle's dispatch table knows it.


def reduce_named(pickler: Any, obj: Any) -> Reduced:
    """Objects of the library that pickle would write as a mere name in `__main__`."""
    if importable(obj):
        return NotImplemented
    if isinstance(obj, functools._lru_cache_wrapper):
        return load_cached, (obj.__wrapped__, obj.cache_parameters())
    if isinstance(obj, typing.NewType):
        return typing.NewType, (obj.__name__, obj.__supertype__)
    if isinstance(obj, typing.TypeVar):
        return reduce_only_by_value(pickler, obj)
    return type(obj), (obj.__name__,)


def load_cached(function: Callable[..., Any], parameters: dict[str, Any]) -> Any:
    """Named in streams: a function behind `functools.lru_cache`."""
    return functools.lru_cache(**parameters)(function)


def reduce_not_by_name(pickler: Any, obj: Any) -> Reduced:
    """Instances of by-value classes that define themselves how they pickle."""
    reducer = copyreg.dispatch_table.get(type(obj))
    reduced: Any = obj.__reduce_ex__(5) if reducer is None else reducer(obj)
    if isinstance(reduced, str) and not module_travels(getattr(obj, "__module__", None)):
        raise pickle.PicklingError(
            f"{type(obj).__name__} object pickles as the name {reduced!r}, "
            f"which readers cannot import from {obj.__module__}"
        )
    return reduced
