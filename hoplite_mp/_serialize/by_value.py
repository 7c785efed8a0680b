"""Writes functions and classes by value: cloudpickle's reductions, and captured values.

With cloudpickle, the functions in each stream get separate globals. In our streams, a function
instead names its namespace (the globals of its module), and contains a manifest: one entry for each
global that it uses (see `captured_globals`). A large array is stored as a separate object, and the
stream names this object, so that functions do not repeat the array's bytes.
"""

from __future__ import annotations

import os
import sys
import types
from typing import TYPE_CHECKING, Any

from hoplite_mp._serialize.captured_globals import (
    Entry,
    Namespace,
    Scan,
    Scope,
    namespace_at,
    namespace_of,
    take,
    take_entries,
    variable_of_class,
)
from hoplite_mp._serialize.classes import annotations_of, cloudpickled, own_annotations
from hoplite_mp._serialize.code import Reduced, is_native, module_travels
from hoplite_mp._serialize.mains import MAIN_NAMES, hidden_names, named_in_main
from hoplite_mp._serialize.reading import Private
from hoplite_mp._serialize.sources import Source, keep_source, source_of

if TYPE_CHECKING:
    from hoplite_mp._serialize.captured_globals import Key

_ATTRIBUTES = ("__package__", "__name__", "__path__", "__file__")

# -- writing -----------------------------------------------------------------------------------


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
    found = _found_by_name(scan, obj, None, [])
    if found is not None:
        namespace, manifest = found
        state = (*state, namespace.key, _attributes(namespace.scope), manifest)
    return (*reduced[:2], state, *reduced[3:5], load_class_state)


def _attributes(scope: dict[str, Any]) -> dict[str, Any]:
    """The module attributes that are sent with its functions."""
    return {name: scope[name] for name in _ATTRIBUTES if name in scope}


def _found_by_name(
    scan: Scan, obj: Any, code: types.CodeType | None, known: list[Entry]
) -> tuple[Namespace, list[Entry]] | None:
    """For an object of a script, returns its namespace and the manifest. The manifest contains the
    entries in `known`, and entries for further names that code in tasks may look up in `__main__`:
    the object's own name, and the names in its annotations."""
    if obj.__module__ not in MAIN_NAMES:
        return None
    module = sys.modules.get(obj.__module__)
    if not isinstance(module, types.ModuleType):
        return None
    namespace = scan.namespace(module.__dict__)
    here = {entry[0] for entry in known}
    manifest = list(known)
    root, nested, _ = obj.__qualname__.partition(".")
    method = code is not None and nested  # the name of its class is sent with the class
    if not method and root not in here and _found(module, obj):
        here.add(root)
        manifest += filter(None, [scan.entry(namespace, root)])
    annotations = own_annotations(obj) if code is None else annotations_of(obj)
    for name in hidden_names(namespace.scope, code, annotations):
        if name not in here:
            here.add(name)
            manifest += filter(None, [scan.entry(namespace, name, needed=False)])
    return namespace, manifest


def _found(module: types.ModuleType, obj: Any) -> bool:
    """Whether pickle finds this same object by its name."""
    found: Any = module
    for name in obj.__qualname__.split("."):
        found = vars(found).get(name) if isinstance(found, (type, types.ModuleType)) else None
    return found is obj


def _reduce_function(pickler: Any, function: types.FunctionType, reduced: Any) -> Reduced:
    from cloudpickle import cloudpickle

    scan: Scan = pickler.scan
    (_, attributes, _, _, cells), (state, slots) = reduced[1:3]
    code, slots["__defaults__"], slots["__kwdefaults__"], own = scan.parts(function)
    state = {name: own[name] for name in state if name in own}
    del slots["__globals__"]
    submodules = slots.pop("_cloudpickle_submodules")  # modules used as attributes of packages
    namespace = scan.namespace(function.__globals__)
    names = cloudpickle._extract_code_globals(code)
    manifest = [e for name in names if (e := scan.entry(namespace, name)) is not None]
    found = _found_by_name(scan, function, code, manifest)
    if found is not None and found[0] is namespace:
        manifest = found[1]
    scan.hold(function)
    scan.record(function, (*names, *named_in_main(code)))
    carried: tuple[Any, ...] = (state, slots, submodules, manifest)
    if pickler.stream is not None:  # arrays in a payload would be views that pin stored objects
        carried = (*carried[:3], Private(1), manifest, Private(-1), manifest)
    n_cells = -1 if cells is None else len(cells)
    source = None if module_travels(function.__module__) else source_of(code)
    if source is not None:  # functions defined in one statement share its text
        source = scan.sources.setdefault(source[:2], source)
    args = (code, namespace.key, attributes, n_cells, source)
    return load_function, args, carried, None, None, load_function_state


# -- reading -----------------------------------------------------------------------------------


def load_function(
    code: types.CodeType,
    key: Key,
    attributes: Scope,
    n_cells: int,
    source: Source | None = None,
) -> types.FunctionType:
    """Used in streams: makes a function that was sent by value. Its state is filled in later."""
    namespace = namespace_at(key, attributes)
    if source is not None and not namespace.home:
        keep_source(source)
    cells = tuple(types.CellType() for _ in range(n_cells)) if n_cells >= 0 else None
    return types.FunctionType(code, namespace.scope, None, None, cells)


def load_function_state(function: types.FunctionType, state: tuple[Any, ...]) -> None:
    """Used in streams: fills in a function that was sent by value."""
    attributes, slots, manifest = state[0], state[1], state[-1]
    function.__dict__.update(attributes)
    for own, cell in zip(function.__closure__ or (), slots.pop("__closure__") or (), strict=True):
        try:
            own.cell_contents = cell.cell_contents
        except ValueError:  # The cell is empty.
            continue
    for name, value in slots.items():
        setattr(function, name, value)
    namespace = namespace_of(function.__globals__)
    if not namespace.home:
        take_entries(namespace, manifest)


def load_class_state(cls: type, given: tuple[Any, ...]) -> None:
    """Used in streams: fills in a class that was sent by value."""
    # In the process that defined the class, the class exists already, and its members are newer
    # than those in the stream.
    if is_native(cls):
        return
    state, sender, mark, *names = given
    take(variable_of_class(cls), ("", sender, mark, False, (cls, state)))
    if names:
        key, attributes, manifest = names
        namespace = namespace_at(key, attributes)
        if not namespace.home:
            take_entries(namespace, manifest)
