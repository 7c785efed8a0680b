"""Finds the part of a value that cannot be pickled, for error messages.

Called only after pickling has failed. Each part is pickled alone, and the search goes on inside the
first one that fails: the globals, closure and defaults of functions, the attributes of classes and
objects, the items of containers.
"""

from __future__ import annotations

import functools
import itertools
import types
from typing import TYPE_CHECKING, Any

from hoplite_mp._serialize.annotations import annotations_of
from hoplite_mp._serialize.classes import compiled_metaclass
from hoplite_mp._serialize.code import importable
from hoplite_mp._serialize.picklers import write_stream
from hoplite_mp._serialize.streams import UNPICKLABLE
from hoplite_mp.errors import HopliteError

if TYPE_CHECKING:
    from collections.abc import Iterator

# How many parts are pickled in the search, and how many items of one container. Higher: more parts
# are found, and an error takes longer.
PARTS_MAX = 300
ITEMS_MAX = 100
DEPTH_MAX = 20
NAME_CHARS_MAX = 60

ADVICE = "create it in the task or in an initializer, or leave it out with `__getstate__`"


def blamed(value: Any) -> str:
    """Names the part that cannot be pickled, and what to do, after ": "; "" if no part can be
    named. Never raises."""
    try:
        path = _search(value)
    except (Exception, SystemExit, GeneratorExit):
        return ""
    if not path or (isinstance(path[-1][1], type) and compiled_metaclass(path[-1][1])):
        return ""  # the error names such a class itself
    whole = " in ".join(label for label, _ in reversed(path))
    return f": {whole} is a {type(path[-1][1]).__qualname__}; {ADVICE}"


def _search(value: Any) -> list[tuple[str, Any]]:
    path: list[tuple[str, Any]] = []
    tried = itertools.count()
    seen = {id(value)}
    while len(path) < DEPTH_MAX:
        for label, part in _parts(value):
            if id(part) in seen:
                continue
            if next(tried) >= PARTS_MAX:
                return path
            if not _can_travel(part):
                seen.add(id(part))
                path.append((label, part))
                value = part
                break
        else:
            break
    return path


def _can_travel(part: Any) -> bool:
    try:
        write_stream(part)
    except (MemoryError, HopliteError):
        return True  # the part itself is not the cause
    except UNPICKLABLE:
        return False
    return True


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    """What is pickled with a value: (its place, it)."""
    if isinstance(value, types.FunctionType):
        if not importable(value):
            yield from _parts_of_function(value)
    elif isinstance(value, types.MethodType):
        yield f"the object of the method {value.__name__}()", value.__self__
    elif isinstance(value, functools.partial):
        yield "the function of a partial", value.func
        yield from _items("argument", enumerate(value.args))
        yield from _items("argument", value.keywords.items())
    elif isinstance(value, functools._lru_cache_wrapper):
        yield "the function behind a cache", value.__wrapped__
    elif isinstance(value, type):
        if not importable(value) and compiled_metaclass(value) is None:
            yield from _items(f"of class {value.__qualname__}", _attributes(value), "attribute")
            yield from ((f"base class {base.__qualname__}", base) for base in value.__bases__)
            if not importable(type(value)):
                yield f"the metaclass {type(value).__qualname__}", type(value)
    elif isinstance(value, types.ModuleType):
        yield from _items(f"of module {value.__name__}", vars(value).items(), "global")
    elif isinstance(value, dict):
        yield from _items("item", value.items())
        yield from (("a key of the dict", key) for key in itertools.islice(value, ITEMS_MAX))
    elif isinstance(value, (list, tuple)):
        yield from _items("item", enumerate(value))
    elif isinstance(value, (set, frozenset)):
        yield from (("an item of the set", one) for one in itertools.islice(value, ITEMS_MAX))
    else:
        yield from _parts_of_object(value)


def _attributes(cls: type) -> list[tuple[str, Any]]:
    """What travels with a class. Descriptors of slots are made anew where it arrives."""
    made = types.MemberDescriptorType, types.GetSetDescriptorType
    return [(name, part) for name, part in vars(cls).items() if not isinstance(part, made)]


def _items(what: str, items: Any, kind: str = "") -> Iterator[tuple[str, Any]]:
    for name, part in itertools.islice(list(items), ITEMS_MAX):
        shown = repr(name)[:NAME_CHARS_MAX] if type(name) in (str, int, bytes) else "?"
        yield (f"the {kind} {shown} {what}" if kind else f"{what} {shown}"), part


def _parts_of_function(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    name = f"of {function.__qualname__.rpartition('<locals>.')[2]}()"
    from cloudpickle import cloudpickle

    scope = function.__globals__
    for key in cloudpickle._extract_code_globals(function.__code__):
        if key in scope:
            yield f"the global {key!r} {name}", scope[key]
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    for key, cell in cells:
        try:
            yield f"the variable {key!r} in the closure {name}", cell.cell_contents
        except ValueError:  # it is empty
            continue
    defaults = function.__defaults__ or ()
    positional = function.__code__.co_varnames[: function.__code__.co_argcount]
    named = zip(positional[len(positional) - len(defaults) :], defaults, strict=True)
    for key, part in (*named, *(function.__kwdefaults__ or {}).items()):
        yield f"the default of the parameter {key!r} {name}", part
    yield from _items(name, vars(function).items(), "attribute")
    yield from _items(name, annotations_of(function).items(), "annotation")


def _parts_of_object(value: Any) -> Iterator[tuple[str, Any]]:
    kind = type(value)
    if not importable(kind):
        yield f"the class {kind.__qualname__}", kind
    try:
        reduced = value.__reduce_ex__(5)
    except UNPICKLABLE:  # it is the culprit itself
        return
    if not isinstance(reduced, tuple):
        return
    state = reduced[2] if len(reduced) > 2 else None
    parts = state if isinstance(state, tuple) else (state,)
    for one in parts:
        if isinstance(one, dict):
            yield from _items(f"of a {kind.__qualname__}", one.items(), "attribute")
        elif one is not None:
            yield f"the state of a {kind.__qualname__}", one
    for one in reduced[1]:
        if not isinstance(one, type):
            yield f"an argument that makes a {kind.__qualname__}", one
    if len(reduced) > 3 and reduced[3] is not None and isinstance(value, list):
        yield from _items("item", enumerate(value))
