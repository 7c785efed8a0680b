"""Functions and classes by value in our streams: cloudpickle's reductions, and captured values.

cloudpickle gives the functions of each stream separate globals. Functions in our streams name their
namespace instead, and contain a manifest of the globals that they use, each with its mark
(`namespaces`). A large array is stored as a separate object, and the stream names this object, so
that functions do not repeat the array's bytes. The object's mark is also the array's mark.
"""

from __future__ import annotations

import os
import sys
import types
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from hoplite_mp._serialize.classes import annotations_of, cloudpickled, own_annotations
from hoplite_mp._serialize.code import UNBOUND, Reduced, importable, module_travels
from hoplite_mp._serialize.fingerprints import fingerprint
from hoplite_mp._serialize.mains import MAIN_NAMES, hidden_names
from hoplite_mp._serialize.namespaces import (
    ABSENT,
    Entry,
    Namespace,
    load_class_state,
    load_function,
    load_function_state,
    namespace_of,
    process,
    variable_of_class,
)
from hoplite_mp._serialize.out_of_band import (
    GlobalArray,
    described,
    load_global_array,
    load_private_copy,
)
from hoplite_mp._serialize.reading import Private
from hoplite_mp._serialize.reducers import is_bytes_alone
from hoplite_mp._serialize.sources import Source, source_of
from hoplite_mp.errors import HopliteError

if TYPE_CHECKING:
    from hoplite_mp._common.reduction import Array
    from hoplite_mp._serialize.layout import PickleStream
    from hoplite_mp._serialize.out_of_band import KeptArray

_ATTRIBUTES = ("__package__", "__name__", "__path__", "__file__")


_NAMED = b"named"  # the mark of a ModuleVariable


class ModuleVariable:
    """Stands for a global of a module that readers can import, and is read as their value."""

    def __init__(self, module: Any, name: str) -> None:
        self._place = module, name

    def __reduce__(self) -> Reduced:
        return getattr, self._place


class ArrayStore(Protocol):
    """Stores large arrays as objects, each value once."""

    nbytes_min: int

    def copy_of(self, array: Array) -> tuple[KeptArray, Any]:
        """The object that contains the array, and the array's state, which keeps the object
        up to date as long as it is held."""

    def hold(self, fn: Any, known: list[Any]) -> None:
        """Holds the states of arrays as long as that function lives."""

    def bound(self, module: types.ModuleType, name: str, value: Any, known: list[Any]) -> None:
        """Holds the states of a variable's arrays as long as the variable has this value, so that
        the arrays keep their marks."""

    def warn(self, module: str, name: str, array: Array) -> None:
        """Warns that the value of a global variable is a large array."""


class Scan:
    """Reads all captured values of a function or another value. Each variable, class and array is
    read once, however many functions use it, so the sent value is the compared value."""

    def __init__(self, store: ArrayStore | None = None) -> None:
        self.store = store  # None: arrays stay in the stream
        # Names the objects of arrays. None: arrays stay in the stream, and the objects only mark
        # them. Without marks, an array would count as changed between an initializer and a task.
        self.stream: PickleStream | None = None
        # (id of a dictionary of globals, name) -> value, or UNBOUND; (id of a cell, "") -> its
        # contents, or UNBOUND. These values are sent, even if other threads bind the variables
        # later.
        self.snapshot: dict[tuple[int, str], Any] = {}
        # By id. The arrays are held: a reducer may make a new array at each call, which could
        # otherwise get the id of an earlier array.
        self._arrays: dict[int, tuple[Array, tuple[KeptArray, Any]]] = {}
        self._met: list[Any] = []  # states of the arrays of the present variable
        self._globals: dict[int, GlobalArray] = {}  # by id: pickle's memo needs the same object
        self._namespaces: dict[int, Namespace] = {}
        self._entries: dict[tuple[int, str], Entry | None] = {}
        self._sources: dict[tuple[str, int], Source] = {}
        self._classes: dict[type, tuple[bytes, bool]] = {}

    # -- arrays --------------------------------------------------------------------------------

    def keeps(self, array: Array) -> bool:
        """Whether the array is stored as a separate object."""
        return self.takes(array) and is_bytes_alone(array)

    def takes(self, array: Array) -> bool:
        """Whether the array is large enough to be stored separately."""
        return self.store is not None and array.nbytes >= self.store.nbytes_min

    def copy_of(self, array: Array) -> tuple[KeptArray, Any]:
        """Like `ArrayStore.copy_of`, computed once for each array."""
        found = self._arrays.get(id(array))
        if found is None:
            assert self.store is not None
            found = self._arrays[id(array)] = (array, self.store.copy_of(array))
        self._met.append(found[1][1])
        return found[1]

    def hold(self, fn: Any) -> None:
        """Holds the states of all arrays so far, as long as this function lives."""
        if self.store is not None:
            self.store.hold(fn, [known for _, (_, known) in self._arrays.values()])

    def reduce(self, array: Array) -> Reduced:
        """Reduces an array to an out-of-band object."""
        return load_private_copy, (self._place(self.copy_of(array)[0]), *described(array))

    def reduce_global(self, array: Array) -> Reduced:
        """Reduces an array that is the value of a global variable."""
        place = self._place(self.copy_of(array)[0])
        return load_global_array, (place, array.nbytes, *described(array))

    def _place(self, kept: KeptArray) -> int:
        assert self.stream is not None
        return self.stream.index_of(kept.ref)

    # -- functions, classes and variables ------------------------------------------------------

    def namespace(self, scope: dict[str, Any]) -> Namespace:
        """Like `namespace_of`, computed once for each module."""
        found = self._namespaces.get(id(scope))
        if found is None:
            found = self._namespaces[id(scope)] = namespace_of(scope)
        return found

    def source(self, function: types.FunctionType) -> Source | None:
        """The source text of a function, if readers may not have its file."""
        if module_travels(function.__module__):
            return None
        found = source_of(function.__code__)
        return found and self._sources.setdefault(found[:2], found)

    def entry(self, namespace: Namespace, name: str, needed: bool = True) -> Entry | None:
        """The entry of a global variable; None if it is not sent. `needed` is False if code only
        mentions the variable: it must not make a function unpicklable then."""
        place = id(namespace.scope), name
        if place not in self._entries:
            found = self._entry(namespace, name, needed)
            if found is None and not needed:
                return None
            self._entries[place] = found
        return self._entries[place]

    def _entry(self, namespace: Namespace, name: str, needed: bool) -> Entry | None:
        scope, store = namespace.scope, self.store
        value = self.snapshot.get((id(scope), name), scope.get(name, UNBOUND))
        self._met = []
        if (
            not needed
            and isinstance(value, types.ModuleType)
            and not module_travels(value.__name__)
        ):
            return None
        try:
            own, holds_refs = (ABSENT, False) if value is UNBOUND else self.mark_of(value)
        except Exception as error:
            if not needed:
                return None
            if isinstance(error, (MemoryError, HopliteError)):  # such as a full store
                raise
            if not namespace.home:
                # A task has set this global to a value that cannot be sent, such as an open
                # connection. Readers use their own value, or have none, as in the standard library.
                return None
            module = sys.modules.get(namespace.key[0])
            if module_travels(namespace.key[0]) and vars(module) is scope:
                # A decorator of another module, such as `np.errstate`, gives its wrapper the module
                # of the wrapped function. Readers take the variable of their own module.
                return name, process(), _NAMED, False, ModuleVariable(module, name)
            # It counts as changed, so the pickler will raise the reason.
            own, holds_refs = os.urandom(8), False
        module = sys.modules.get(namespace.key[0])
        if store is not None and isinstance(module, types.ModuleType) and vars(module) is scope:
            store.bound(module, name, value, list(self._met))
        if store is not None and isinstance(value, np.ndarray) and self.keeps(value):
            if self.stream is not None and namespace.home:
                store.warn(namespace.key[0], name, value)
            if self.stream is not None:
                value = self._globals.setdefault(id(value), GlobalArray(value))
        value = None if value is UNBOUND else value
        if namespace.home:
            return name, process(), own, holds_refs, value
        return (name, *namespace.variable(name).sent_as(own), holds_refs, value)

    def mark_of(self, value: Any) -> tuple[bytes, bool]:
        """Like `fingerprint`, computed once for a class, whose state and name in `__main__` need
        it."""
        if not isinstance(value, type) or importable(value):
            return fingerprint(value, keeper=None if self.store is None else self)
        if value not in self._classes:
            self._classes[value] = fingerprint(value)
        return self._classes[value]

    def found_by_name(
        self, obj: Any, code: types.CodeType | None, known: list[Entry]
    ) -> tuple[Namespace, list[Entry]] | None:
        """The entries for names that code in tasks may look up in `__main__` because of this object
        of a script: the object itself, and the names in its annotations. Names in `known` need no
        second entry."""
        if obj.__module__ not in MAIN_NAMES:
            return None
        module = sys.modules.get(obj.__module__)
        if not isinstance(module, types.ModuleType):
            return None
        namespace = self.namespace(module.__dict__)
        here = {entry[0] for entry in known}
        manifest = list(known)
        root, nested, _ = obj.__qualname__.partition(".")
        method = code is not None and nested  # the name of its class is sent with the class
        if not method and root not in here and _found(module, obj):
            here.add(root)
            manifest += filter(None, [self.entry(namespace, root)])
        annotations = own_annotations(obj) if code is None else annotations_of(obj)
        for name in hidden_names(namespace.scope, code, annotations):
            if name not in here:
                here.add(name)
                manifest += filter(None, [self.entry(namespace, name, needed=False)])
        return namespace, manifest


def reduce_by_value(pickler: Any, obj: Any) -> Reduced:
    """The heavy pickler's reduction of functions and classes that readers cannot import."""
    reduced = cloudpickled(pickler, obj)
    if not isinstance(reduced, tuple) or len(reduced) != 6:
        return reduced
    if isinstance(obj, types.FunctionType):
        return _reduce_function(pickler, obj, reduced)
    scan: Scan = pickler.scan
    try:
        own, _ = scan.mark_of(obj)
    except Exception:
        own = os.urandom(8)
    sender, mark = variable_of_class(obj).sent_as(own)
    state: tuple[Any, ...] = (reduced[2], sender, mark)
    found = scan.found_by_name(obj, None, [])
    if found is not None:
        namespace, manifest = found
        state = (*state, namespace.key, _attributes(namespace.scope), manifest)
    return (*reduced[:2], state, *reduced[3:5], load_class_state)


def _attributes(scope: dict[str, Any]) -> dict[str, Any]:
    """The module attributes that are sent with its functions."""
    return {name: scope[name] for name in _ATTRIBUTES if name in scope}


def _found(module: types.ModuleType, obj: Any) -> bool:
    """Whether pickle finds the object itself by its name."""
    found: Any = module
    for name in obj.__qualname__.split("."):
        found = vars(found).get(name) if isinstance(found, (type, types.ModuleType)) else None
    return found is obj


def _reduce_function(pickler: Any, function: types.FunctionType, reduced: Any) -> Reduced:
    from cloudpickle import cloudpickle

    (code, attributes, _, _, cells), (state, slots) = reduced[1:3]
    del slots["__globals__"]
    submodules = slots.pop("_cloudpickle_submodules")  # modules used as attributes of packages
    scan: Scan = pickler.scan
    namespace = scan.namespace(function.__globals__)
    names = cloudpickle._extract_code_globals(code)
    manifest = [e for name in names if (e := scan.entry(namespace, name)) is not None]
    found = scan.found_by_name(function, code, manifest)
    if found is not None and found[0] is namespace:
        manifest = found[1]
    scan.hold(function)
    carried: tuple[Any, ...] = (state, slots, submodules, manifest)
    if pickler.stream is not None:  # In a payload, globals would be views that pin objects.
        carried = (*carried[:3], Private(1), manifest, Private(-1), manifest)
    n_cells = -1 if cells is None else len(cells)
    args = (code, namespace.key, attributes, n_cells, scan.source(function))
    return load_function, args, carried, None, None, load_function_state
