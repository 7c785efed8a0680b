"""Functions and classes by value in our streams: cloudpickle's reductions, and what they carry.

The package cloudpickle gives the functions of every stream globals of their own. Functions in our
streams name the namespace to which they belong, and bring a manifest of the globals that they use,
each with its fingerprint.
"""

from __future__ import annotations

import os
import sys
import types
from typing import TYPE_CHECKING, Any

import numpy as np

from hoplite_mp._serialize.classes import annotations_of, cloudpickled, own_annotations
from hoplite_mp._serialize.code import Reduced, importable, module_travels
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
    seen_of_class,
)
from hoplite_mp._serialize.out_of_band import UNBOUND
from hoplite_mp._serialize.reading import Private
from hoplite_mp._serialize.reducers import is_bytes_alone
from hoplite_mp._serialize.sources import Source, source_of
from hoplite_mp.errors import HopliteError

if TYPE_CHECKING:
    from hoplite_mp._serialize.out_of_band import Keep, OutOfBand

_ATTRIBUTES = ("__package__", "__name__", "__path__", "__file__")
_NOT_LOOKED_AT: Any = object()


class Manifests:
    """The globals that one pickler has met: each is written once, however many functions use it."""

    __slots__ = ("aside", "classes", "entries", "keep", "namespaces", "sources")

    def __init__(self, aside: OutOfBand | None, keep: Keep | None) -> None:
        self.aside = aside
        # Large arrays count by the marks of their copies also where they travel in the stream
        # itself. Else an array would count as changed between an initializer and a task.
        self.keep = keep if aside is None else aside.keep
        self.namespaces: dict[int, Namespace] = {}
        self.entries: dict[tuple[int, str], Entry | None] = {}
        self.sources: dict[tuple[str, int], Source] = {}
        self.classes: dict[type, tuple[bytes, bool]] = {}

    def namespace(self, scope: dict[str, Any]) -> Namespace:
        found = self.namespaces.get(id(scope))
        if found is None:
            found = self.namespaces[id(scope)] = namespace_of(scope)
        return found

    def source(self, function: types.FunctionType) -> Source | None:
        """The text of a function whose file readers cannot be expected to have."""
        if module_travels(function.__module__):
            return None
        found = source_of(function.__code__)
        return found and self.sources.setdefault(found[:2], found)

    def entry(self, namespace: Namespace, name: str) -> Entry | None:
        place = id(namespace.scope), name
        if place not in self.entries:
            self.entries[place] = self._entry(namespace, name)
        return self.entries[place]

    def class_mark(self, cls: type) -> tuple[bytes, bool]:
        """As `fingerprint`, once for each class: its state and its name in `__main__` need it."""
        known = self.classes.get(cls)
        if known is None:
            known = self.classes[cls] = fingerprint(cls)
        return known

    def found_by_name(
        self, obj: Any, code: types.CodeType | None, known: list[Entry]
    ) -> tuple[Namespace, list[Entry]] | None:
        """What code in tasks may look up by name in `__main__` because of this object of a script:
        the object itself, and what its annotations name. `known` need no second entry."""
        if obj.__module__ not in MAIN_NAMES:
            return None
        module = sys.modules.get(obj.__module__)
        if not isinstance(module, types.ModuleType):
            return None
        namespace = self.namespace(module.__dict__)
        here = {entry[0] for entry in known}
        manifest = list(known)
        root, nested, _ = obj.__qualname__.partition(".")
        method = code is not None and nested  # its class brings its own name
        if not method and root not in here and _found(module, obj):
            here.add(root)
            manifest += filter(None, [self.entry(namespace, root)])
        annotations = own_annotations(obj) if code is None else annotations_of(obj)
        for name in hidden_names(namespace.scope, code, annotations):
            if name not in here and self._can_travel(namespace.scope[name]):
                here.add(name)
                manifest += filter(None, [self.entry(namespace, name)])
        return namespace, manifest

    def _can_travel(self, value: Any) -> bool:
        """Code only mentions the value, so it must not make a function unpicklable."""
        if isinstance(value, types.ModuleType):
            return module_travels(value.__name__)
        try:
            if isinstance(value, type) and not importable(value):
                self.class_mark(value)
            else:
                fingerprint(value, keep=None if self.keep is None else self.keep.part())
        except Exception:
            return False
        return True

    def _entry(self, namespace: Namespace, name: str) -> Entry | None:
        """The entry of one global; None if it is not sent."""
        scope, holds_refs, keep = namespace.scope, False, self.keep
        part = None if keep is None else keep.part()
        key = id(scope), name
        value = _NOT_LOOKED_AT if keep is None else keep.snapshot.get(key, _NOT_LOOKED_AT)
        if value is _NOT_LOOKED_AT:
            value = scope.get(name, UNBOUND)
        if value is UNBOUND:
            value, own = None, ABSENT
        else:
            try:
                if isinstance(value, type) and not importable(value):
                    own, holds_refs = self.class_mark(value)
                else:
                    own, holds_refs = fingerprint(value, keep=part)
            except (MemoryError, HopliteError):  # such as no room
                raise
            except Exception:
                if not namespace.home:
                    # A task has set this global to a value that cannot travel, such as an open
                    # connection. Readers have their own, or none, as in the standard library.
                    return None
                # It counts as changed, so the pickler will raise why it cannot be pickled.
                own = os.urandom(8)
        if keep is not None and part is not None:
            module = sys.modules.get(namespace.key[0])
            if isinstance(module, types.ModuleType) and module.__dict__ is scope:
                keep.bound(module, name, value, part)
        aside = self.aside
        if (
            aside is not None
            and isinstance(value, np.ndarray)
            and value.nbytes >= aside.nbytes_min
            and is_bytes_alone(value)
        ):
            if namespace.home:
                aside.keep.named(namespace.key[0], name, value)
            value = aside.share(value, process())
        if namespace.home:
            return name, process(), own, holds_refs, value
        return (name, *namespace.seen_of(name).sent_as(own), holds_refs, value)


def reduce_by_value(pickler: Any, obj: Any) -> Reduced:
    """How the heavy pickler reduces functions and classes that readers cannot import."""
    reduced = cloudpickled(pickler, obj)
    if not isinstance(reduced, tuple) or len(reduced) != 6:
        return reduced
    if isinstance(obj, types.FunctionType):
        return _reduce_function(pickler, obj, reduced)
    manifests = _manifests(pickler)
    try:
        own, _ = manifests.class_mark(obj)
    except Exception:
        own = os.urandom(8)
    sender, mark = seen_of_class(obj).sent_as(own)
    state: tuple[Any, ...] = (reduced[2], sender, mark)
    found = manifests.found_by_name(obj, None, [])
    if found is not None:
        namespace, manifest = found
        state = (*state, namespace.key, _attributes(namespace.scope), manifest)
    return (*reduced[:2], state, *reduced[3:5], load_class_state)


def _manifests(pickler: Any) -> Manifests:
    found: Manifests | None = pickler.manifests
    if found is None:
        aside = pickler.globals_aside or pickler.aside
        found = pickler.manifests = Manifests(aside, pickler.keep)
    return found


def _attributes(scope: dict[str, Any]) -> dict[str, Any]:
    """The names of a module that its functions see wherever they run."""
    return {name: scope[name] for name in _ATTRIBUTES if name in scope}


def _found(module: types.ModuleType, obj: Any) -> bool:
    """Is this the object that pickle finds by its name?"""
    found: Any = module
    for name in obj.__qualname__.split("."):
        found = vars(found).get(name) if isinstance(found, (type, types.ModuleType)) else None
    return found is obj


def _reduce_function(pickler: Any, function: types.FunctionType, reduced: Any) -> Reduced:
    from cloudpickle import cloudpickle

    (code, attributes, _, _, cells), (state, slots) = reduced[1:3]
    del slots["__globals__"]
    submodules = slots.pop("_cloudpickle_submodules")  # modules used as attributes of packages
    manifests = _manifests(pickler)
    namespace = manifests.namespace(function.__globals__)
    names = cloudpickle._extract_code_globals(code)
    manifest = [e for name in names if (e := manifests.entry(namespace, name)) is not None]
    found = manifests.found_by_name(function, code, manifest)
    if found is not None and found[0] is namespace:
        manifest = found[1]
    if manifests.keep is not None:
        manifests.keep.used_by(function)
    carried: tuple[Any, ...] = (state, slots, submodules, manifest)
    if pickler.stream is not None:  # In a payload globals would be views, which pin objects.
        carried = (*carried[:3], Private(1), manifest, Private(-1), manifest)
    n_cells = -1 if cells is None else len(cells)
    args = (code, namespace.key, attributes, n_cells, manifests.source(function))
    return load_function, args, carried, None, None, load_function_state
