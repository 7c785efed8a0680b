"""Functions and classes in streams: by reference if readers can import them, otherwise by value.

"By value" means with cloudpickle. Definitions in `__main__`, lambdas, local functions and classes,
and registered modules are sent by value. Plain pickle would write definitions in `__main__` by
reference, but readers never import `__main__`. This module must not depend on payloads, refs or
arrays.
"""

from __future__ import annotations

import builtins
import contextlib
import copyreg
import functools
import importlib.machinery
import os
import pickle
import re
import site
import sys
import types
import typing
import weakref
from typing import TYPE_CHECKING, Any

from hoplite_mp._serialize.mains import MAIN_NAMES
from hoplite_mp._serialize.reading import OWN_IDS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable


by_value_modules: dict[str, types.ModuleType] = {}
# Only the identity of this empty list matters. Each registration makes a new list, so functions
# that were sent by name before are pickled again.
by_name: list[Any] = []
_BUILTIN_SINGLETON_TYPES = frozenset({type(None), type(...), type(NotImplemented)})
_CO_FILENAME = 10  # the index of co_filename among the arguments of types.CodeType
# By-value classes that this process has defined, rather than received. A stream that returns to
# this process must not change them.
_native_classes: weakref.WeakSet[type] = weakref.WeakSet()

UNBOUND: Any = object()  # stands for a variable without a value
Reduced = Any  # a result of __reduce_ex__, or NotImplemented


class NeedCloudpickle(Exception):
    """Internal: the light pickler has found an object that must be sent by value."""


def importable(obj: Any) -> bool:
    """Whether a reader finds the same function or class by its module and qualified name."""
    module_name = getattr(obj, "__module__", None)
    qualname = getattr(obj, "__qualname__", None) or getattr(obj, "__name__", None)
    if type(module_name) is not str or type(qualname) is not str:
        return False
    if not module_travels(module_name):
        return False
    found: Any = sys.modules[module_name]
    for name in qualname.split("."):  # "<locals>" and "<lambda>" are not attributes
        found = getattr(found, name, None)
        if found is None:
            return False
    return found is obj


def register(module: types.ModuleType) -> None:
    """Registers the module and its submodules to be sent by value."""
    global by_name
    by_value_modules[module.__name__] = module
    by_name = []


def module_travels(module_name: Any) -> bool:
    """Whether readers can import this module. They cannot import `__main__`, a module that is
    registered for sending by value, or a module that only this program has imported."""
    if module_name in MAIN_NAMES or module_name not in sys.modules:
        return False
    name = module_name
    while by_value_modules and module_name:
        if module_name in by_value_modules:
            return False
        module_name = module_name.rpartition(".")[0]
    return is_found_by_readers(name)


def reduce_code(pickler: Any, obj: Any) -> Reduced:
    """Reduces a function or class: to its name if readers can import it, otherwise by value."""
    if id(obj) in OWN_IDS:
        return NotImplemented
    if importable(obj) or obj in _BUILTIN_SINGLETON_TYPES:
        return NotImplemented
    if not pickler.by_value:
        raise NeedCloudpickle
    return pickler.reduce_by_value(obj)


class ModuleVariable:
    """Replaces a global of a module that readers can import. Each reader gets its own value of the
    global."""

    def __init__(self, module: Any, name: str) -> None:
        self._place = module, name

    def __reduce__(self) -> Reduced:
        return getattr, self._place


def cell_contents(cell: types.CellType) -> tuple[Any, ...]:
    """A tuple with the value of a closure's variable; an empty tuple if it has no value."""
    try:
        return (cell.cell_contents,)
    except ValueError:
        return ()


def parts_of(function: types.FunctionType) -> tuple[Any, ...]:
    """The code, defaults, keyword defaults and attributes of a function."""
    return function.__code__, function.__defaults__, function.__kwdefaults__, function.__dict__


def captured_values(
    parts: tuple[Any, ...], cells: Iterable[tuple[Any, ...]], found: list[Any]
) -> list[Any]:
    """The parts of a function, its closure and the globals in `found`, in one list."""
    code, defaults, *named = parts
    values = [code, *(defaults or ())]
    for mapping in named:
        if mapping:
            values += [*mapping, *mapping.values()]
    for contents in cells:
        values += contents or (UNBOUND,)
    return values + found


def note_native(cls: type) -> None:
    """Records that this class, which is sent by value, was defined in this process."""
    _native_classes.add(cls)


def reduce_code_object(pickler: Any, obj: types.CodeType) -> Reduced:
    """Reduces a code object like cloudpickle, but with the file name, which cloudpickle omits
    since version 3.1."""
    if not pickler.by_value:
        raise NeedCloudpickle
    from cloudpickle import cloudpickle

    kind, args = cloudpickle._code_reduce(obj)
    # Interned, so that a pickler writes the name only once for several code objects.
    return kind, (*args[:_CO_FILENAME], sys.intern(obj.co_filename), *args[_CO_FILENAME + 1 :])


def is_native(cls: type) -> bool:
    """Whether this class, which is sent by value, was defined in this process."""
    return cls in _native_classes


def reduce_module(pickler: Any, module: types.ModuleType) -> Reduced:
    """Reduces a module to its name, or to all its contents if readers cannot import it."""
    if not pickler.by_value:
        raise NeedCloudpickle
    name = module.__name__
    if name in MAIN_NAMES or (sys.modules.get(name) is module and module_travels(name)):
        return NotImplemented  # cloudpickle's dispatch table has an entry for it
    state = {key: value for key, value in vars(module).items() if key not in _OF_IMPORT}
    # The contents are the state, which follows the module, because functions in it may refer to the
    # module.
    return types.ModuleType, (name,), state, None, None, load_module_state


def load_module_state(module: types.ModuleType, state: dict[str, Any]) -> None:
    """Used in streams: fills in a module that was sent by value."""
    vars(module).update(state, __builtins__=builtins.__dict__)


# Attributes of a module that describe its import in this process.
_OF_IMPORT = frozenset({"__builtins__", "__cached__", "__loader__", "__spec__"})


def reduce_only_by_value(pickler: Any, obj: Any) -> Reduced:
    """Reduces objects that plain pickle cannot write, such as modules."""
    if not pickler.by_value:
        raise NeedCloudpickle
    return NotImplemented  # cloudpickle's dispatch table has an entry for it


def reduce_named(pickler: Any, obj: Any) -> Reduced:
    """Reduces objects of the standard library that pickle would write as a name in `__main__`."""
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
    """Used in streams: makes a function with a `functools.lru_cache`."""
    return functools.lru_cache(**parameters)(function)


def reduce_not_by_name(pickler: Any, obj: Any) -> Reduced:
    """Reduces instances of by-value classes that define their own pickling."""
    reducer = copyreg.dispatch_table.get(type(obj))
    reduced: Any = obj.__reduce_ex__(5) if reducer is None else reducer(obj)
    if isinstance(reduced, str) and not module_travels(getattr(obj, "__module__", None)):
        raise pickle.PicklingError(
            f"{type(obj).__name__} object pickles as the name {reduced!r}, "
            f"which readers cannot import from {obj.__module__}"
        )
    return reduced


# The functions below determine which modules readers can import, and which modules only this
# program has imported. Workers have the `sys.path` that this program had when it started them, and
# the finders that `site` installs. Readers can import a module if this path and these finders lead
# to the same file. They cannot import a module that the program has created in another way: from a
# file in another directory, in memory, or with its own finder.


_OWN_FINDERS: tuple[Any, ...] = (
    importlib.machinery.BuiltinImporter,
    importlib.machinery.FrozenImporter,
    importlib.machinery.PathFinder,
)
_BUILT_IN = frozenset({"built-in", "frozen"})
_CYTHON = "_cython_", "cython_runtime"  # modules that compiled code makes, without a file
Path = list[str] | None  # None: `sys.path`
Answer = tuple[weakref.ref[types.ModuleType], Path, bool, tuple[Any, ...] | None]
_path: Path = None  # the path of the workers that this process started last
# Name -> the checked module, the searched path, the answer and, for a module without a `__spec__`,
# the attributes on which the answer is based (because the program may still be setting these
# attributes).
_answers: dict[str, Answer] = {}
_site_finders: dict[str, bool] = {}  # name of a finder's module -> whether `site` installs it


def set_readers_path(path: list[str]) -> None:
    """Sets the path that readers search for modules."""
    global _path
    _path = path


def is_found_by_readers(name: str) -> bool:
    """Whether a reader that imports this name gets the same module. The name must be in
    sys.modules."""
    module: Any = sys.modules[name]
    known = _answers.get(name)
    path = _path
    if known is not None and known[0]() is module and known[1] is path:
        _, _, found, filled = known
        if filled is None or filled == _filled(module):
            return found
    if not isinstance(module, types.ModuleType):
        return True  # an object that has replaced its module
    unfinished = getattr(module, "__spec__", None) is None
    filled = _filled(module) if unfinished else None
    found = _is_found(name, module)
    _answers[name] = weakref.ref(module), path, found, filled
    return found


def _filled(module: Any) -> tuple[Any, ...]:
    names = vars(module)
    return names.get("__name__"), names.get("__spec__"), names.get("__file__")


def _is_found(name: str, module: types.ModuleType) -> bool:
    real = module.__name__
    if real != name and sys.modules.get(real) is module:
        return is_found_by_readers(real)  # an alias of the same module
    own = getattr(module, "__spec__", None)
    if getattr(own, "origin", None) in _BUILT_IN:
        return True  # part of Python, maybe under another name (for example `collections.abc`)
    files = {getattr(own, "origin", None), getattr(module, "__file__", None)} - {None}
    if any(str(file).endswith(tuple(importlib.machinery.EXTENSION_SUFFIXES)) for file in files):
        return True  # compiled code cannot be sent by value
    try:
        spec = _find(name)
    except Exception:  # a parent's `__path__` may be anything
        return True
    head = name.rpartition(".")[0]
    if head in sys.modules and not is_found_by_readers(head):
        return False
    if spec is None:  # a module without a file belongs to the package that has created it
        return not files and (head in sys.modules or name.startswith(_CYTHON))
    if spec.origin is None or spec.origin in _BUILT_IN:
        return True  # a package without a file, or a module of Python
    if not files:  # a module in memory with the name of a file, or an object in its place
        return own is not None or type(module) is not types.ModuleType
    return any(_same_file(spec.origin, str(file)) for file in files)


def _find(name: str) -> importlib.machinery.ModuleSpec | None:
    head = name.rpartition(".")[0]
    path: Any = _path
    if head:
        path = getattr(sys.modules.get(head), "__path__", None)
        if not isinstance(path, list):  # the path of a package without a file grows with `sys.path`
            parent = _find(head)
            path = None if parent is None else parent.submodule_search_locations
            if path is None:
                return None
    for finder in (*_OWN_FINDERS, *filter(_is_from_site, sys.meta_path)):
        where = path if head or finder is importlib.machinery.PathFinder else None
        found: importlib.machinery.ModuleSpec | None = finder.find_spec(name, where)
        if found is not None:
            return found
    return None


def _same_file(one: str, other: str) -> bool:
    return one == other or os.path.realpath(one) == os.path.realpath(other)


def _is_from_site(finder: Any) -> bool:
    """Whether `site` installs this finder in each process, as for packages in development mode."""
    name = getattr(finder, "__module__", None)
    if type(name) is not str or finder in _OWN_FINDERS:
        return False
    known = _site_finders.get(name)
    if known is None:
        named = re.compile(rf"^import\s.*\b{re.escape(name)}\b", re.MULTILINE)
        customs = {"sitecustomize", "usercustomize"}
        known = name in customs or any(map(named.search, _path_files()))
        _site_finders[name] = known
    return known


def _path_files() -> list[str]:
    """The texts of the .pth files that `site` has executed."""
    texts = []
    for folder in (*site.getsitepackages(), site.getusersitepackages()):
        with contextlib.suppress(OSError):
            for entry in sorted(os.listdir(folder)):
                if entry.endswith(".pth"):
                    with open(os.path.join(folder, entry), errors="replace") as file:
                        texts.append(file.read())
    return texts
