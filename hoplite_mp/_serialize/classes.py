"""Sends classes by value: cloudpickle's reductions, with support for slots, and without running
hooks.

A received class equals the sender's class: its attributes are sent as its state. The hooks of a
class statement are `__init_subclass__`, and a metaclass's `__new__` and `__init__`. Hooks that are
sent by value do not run again: their effects are in the state, and they may need the keyword
arguments of the class statement, which are not recorded. Hooks that readers import run as usual,
unless they require such arguments.
"""

from __future__ import annotations

import abc
import contextlib
import functools
import importlib
import os
import sys
import threading
import types
import typing
from enum import Enum
from typing import TYPE_CHECKING, Any

from hoplite_mp._common import locks
from hoplite_mp._serialize.code import Reduced, importable, note_native

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["annotations_of", "own_annotations", "with_annotations"]


_HOOK = "__init_subclass__"
_HEAP_TYPE = 1 << 9  # Py_TPFLAGS_HEAPTYPE, set for every class made by a class statement
# Data descriptors of `type` that only set the entry with their name in the namespace of the class.
_PLAIN_DESCRIPTORS = frozenset({
    "__module__", "__qualname__", "__doc__", "__abstractmethods__", "__annotations__",
    "__annotate__", "__type_params__",
})  # fmt: skip
_COMPILED = types.BuiltinFunctionType, types.WrapperDescriptorType
_MEMBER_TYPES = frozenset({object, int, float, complex, str, bytes, tuple})
_hooks = locks.rlock("serial.hooks")  # held while a hook is replaced


def _forked() -> None:
    """Replaces the lock in a forked child: it may be held by a thread that exists only in the
    parent."""
    global _hooks
    _hooks = locks.rlock("serial.hooks")


os.register_at_fork(after_in_child=_forked)


class _Local(threading.local):
    quiet = False  # True: this thread is creating a class without running hooks


_local = _Local()


def cloudpickled(pickler: Any, obj: Any) -> Reduced:
    """cloudpickle's reduction of a function or class that readers cannot import."""
    from cloudpickle import cloudpickle

    if isinstance(obj, type):
        if obj not in cloudpickle._DYNAMIC_CLASS_TRACKER_BY_CLASS:
            note_native(obj)
        if obj not in cloudpickle._BUILTIN_TYPE_NAMES:
            return _reduce_enum(obj) if _is_plain_enum(obj) else _reduce_class(obj)
    elif isinstance(obj, types.FunctionType):
        # This does not use cloudpickle's rule that readers can import everything in sys.modules.
        return pickler._dynamic_function_reduce(with_annotations(obj))
    return cloudpickle.Pickler.reducer_override(pickler, obj)


# -- writing -----------------------------------------------------------------------------------


def _reduce_class(cls: type) -> Reduced:
    from cloudpickle import cloudpickle

    _check_metaclass(cls)
    meta, name, _, namespace, tracker_id, _ = cloudpickle._class_getnewargs(cls)
    namespace["__qualname__"] = cls.__qualname__
    bases = cls.__bases__
    if typing.Generic in bases and "__orig_bases__" in vars(cls):
        namespace["__orig_bases__"] = vars(cls)["__orig_bases__"]  # required by Generic
    if "__slots__" not in vars(cls):
        state = cloudpickle._class_getstate(cls)
    else:
        namespace["__slots__"] = slots = _slots(cls)
        state = _state_of_slotted(cls, slots), {}
    _evaluate_annotations(cls, state[0])
    for attribute in [name for name in state[0] if _must_be_in_namespace(meta, name)]:
        is_property = type(state[0][attribute]) is property  # `fill_class` sets its functions
        namespace[attribute] = property() if is_property else state[0].pop(attribute)
    return load_class, (meta, name, bases, namespace, tracker_id), state, None, None, fill_class


def _check_metaclass(cls: type) -> None:
    """Raises TypeError for a class whose metaclass is compiled: `type` can neither create such a
    class nor set its attributes, and the metaclass needs data that only the class statement
    has."""
    meta = compiled_metaclass(cls)
    if meta is not None:
        raise TypeError(
            f"the class {cls.__qualname__} has a metaclass in compiled code, "
            f"{meta.__module__}.{meta.__qualname__}, so it cannot be sent by value: define it in a "
            "module that the workers can import"
        )


def compiled_metaclass(cls: type) -> type | None:
    """The compiled metaclass that creates this class or sets its attributes; None if there is
    none."""
    kinds: list[type] = type.mro(type(cls))
    for meta in kinds[:-2]:  # excluding `type` and `object`
        if any(isinstance(vars(meta).get(name), _COMPILED) for name in ("__new__", "__setattr__")):
            return meta
    return None


def _must_be_in_namespace(meta: type, name: str) -> bool:
    """Whether only the class statement can set this attribute of a class, because the metaclass
    has a data descriptor of this name."""
    for kind in meta.__mro__:
        found = vars(kind).get(name)
        if found is not None:
            is_plain = kind is type and name in _PLAIN_DESCRIPTORS
            return hasattr(type(found), "__set__") and not is_plain
    return False


def _slots(cls: type) -> tuple[str, ...]:
    """The names of the class's own slots. Private names are already mangled."""
    members = types.MemberDescriptorType, types.GetSetDescriptorType
    return tuple(
        name
        for name, member in vars(cls).items()
        if isinstance(member, members)
        # Python 3.15 has one descriptor of each of these names for all classes.
        and (member.__objclass__ is cls or name in ("__dict__", "__weakref__"))
    )


def _evaluate_annotations(cls: type, state: dict[str, Any]) -> None:
    """Replaces the function that evaluates a class's annotations (PEP 649, since Python 3.14) by
    the annotations, because the function refers to the namespace of the class."""
    state.pop("__classdictcell__", None)  # used by that function
    if "__annotate_func__" in vars(cls):
        state["__annotations_cache__"] = own_annotations(cls)


def _state_of_slotted(cls: type, slots: tuple[str, ...]) -> dict[str, Any]:
    """Like cloudpickle's `_class_getstate`, which does not support every form of `__slots__`."""
    from cloudpickle import cloudpickle

    state: dict[str, Any] = cloudpickle._extract_class_dict(cls)
    for name in (*slots, "__weakref__", "__dict__", "__annotate_func__"):
        state.pop(name, None)
    if not isinstance(state["__slots__"], (str, tuple, list, dict)):
        state["__slots__"] = slots  # an iterator, which is exhausted
    if isinstance(cls, abc.ABCMeta):
        registry = abc._get_dump(cls)[0]  # type: ignore[attr-defined]
        state["_abc_impl"] = [ref() for ref in registry]
    return state


def _is_plain_enum(cls: type) -> bool:
    """Whether the members of this enumeration can be made from builtin values and attributes."""
    return issubclass(cls, Enum) and _builtin_base(cls) in _MEMBER_TYPES


def _builtin_base(cls: type) -> Any:
    """The builtin base class whose `__new__` makes instances of this class."""
    return next(base for base in cls.__mro__ if not base.__flags__ & _HEAP_TYPE)


def _reduce_enum(cls: Any) -> Reduced:
    """Reduces an enumeration with all its members, including aliases and combined members of a
    Flag."""
    from cloudpickle import cloudpickle

    base = _builtin_base(cls)
    arguments = getattr(base, "__getnewargs__", None)
    names = {id(member): name for name, member in cls._member_map_.items()}
    members = {
        id(member): member
        for member in (*cls._member_map_.values(), *cls._value2member_map_.values())
    }
    made = [
        (names.get(id(member)), () if arguments is None else arguments(member), member._value_)
        for member in members.values()
    ]
    aliases = {
        name: member.name for name, member in cls._member_map_.items() if name != member.name
    }
    namespace = {"__module__": cls.__module__, "__qualname__": cls.__qualname__}
    tracker_id = cloudpickle._get_or_create_tracker_id(cls)
    args = type(cls), cls.__name__, cls.__bases__, namespace, made, aliases, tracker_id
    state = (
        cloudpickle._class_getstate(cls)[0],
        [(member, vars(member)) for member in members.values()],
    )
    _evaluate_annotations(cls, state[0])
    return load_enum, args, state, None, None, fill_class


# -- reading -----------------------------------------------------------------------------------


def load_class(
    meta: type[type],
    name: str,
    bases: tuple[type, ...],
    namespace: dict[str, Any],
    tracker_id: str,
) -> type:
    """Used in streams: makes a class that was sent by value. Its attributes are filled in later."""
    from cloudpickle import cloudpickle

    known: type | None = cloudpickle._DYNAMIC_CLASS_TRACKER_BY_ID.get(tracker_id)
    if known is not None:
        return known
    made: type = cloudpickle._lookup_class_or_track(tracker_id, _make(meta, name, bases, namespace))
    return made


def _make(meta: type[type], name: str, bases: tuple[type, ...], namespace: dict[str, Any]) -> type:
    owner = _owner_of_hook(bases)
    fill = functools.partial(_fill, namespace)
    if importable(meta) and (owner is None or importable(owner)):
        # A TypeError means that a hook requires keyword arguments. If it has another reason, it is
        # raised again below.
        with contextlib.suppress(TypeError):
            return types.new_class(name, bases, {"metaclass": meta}, fill)
    create: Any = abc.ABCMeta if issubclass(meta, abc.ABCMeta) else type
    with _without_hook(owner):
        made: type = create.__new__(meta, name, bases, namespace)
    return made


def _fill(namespace: dict[str, Any], scope: dict[str, Any]) -> None:
    scope.update(namespace)


def fill_class(cls: type, state: tuple[dict[str, Any], Any]) -> None:
    """Used in streams: sets the attributes of a class, without using its metaclass's
    `__setattr__`, and the attributes of an enumeration's members."""
    attributes, members = state
    for member, own in members or ():
        vars(member).update(own)
    for name, value in attributes.items():
        if type(value) is property and _must_be_in_namespace(type(cls), name):
            made: Any = vars(cls)[name]
            made.__init__(value.fget, value.fset, value.fdel, value.__doc__)
        elif name != "_abc_impl":
            type.__setattr__(cls, name, value)
    if "__firstlineno__" in attributes:  # setting another attribute has removed it
        type.__setattr__(cls, "__firstlineno__", attributes["__firstlineno__"])
    for registered in attributes.get("_abc_impl", ()):
        cls.register(registered)  # type: ignore[attr-defined]


def load_enum(
    meta: Any,
    name: str,
    bases: tuple[type, ...],
    namespace: dict[str, Any],
    members: list[tuple[str | None, tuple[Any, ...], Any]],
    aliases: dict[str, str],
    tracker_id: str,
) -> type:
    """Used in streams: makes an enumeration with its members. Its other attributes are filled in
    later. The members can already be found by their values, because attributes may refer to
    members."""
    from cloudpickle import cloudpickle

    known: type | None = cloudpickle._DYNAMIC_CLASS_TRACKER_BY_ID.get(tracker_id)
    if known is not None:
        return known
    namespace["__new__"] = Enum.__new__
    with _without_hook(_owner_of_hook(bases)):
        cls: Any = type.__new__(meta, name, bases, namespace)
    by_name: dict[str, Any] = {}
    by_value: dict[Any, Any] = {}
    type.__setattr__(cls, "_member_map_", by_name)
    type.__setattr__(cls, "_value2member_map_", by_value)
    unhashable: dict[str, list[Any]] = {}
    type.__setattr__(cls, "_unhashable_values_map_", unhashable)  # since Python 3.13
    base = _builtin_base(cls)
    for member_name, arguments, value in members:
        member = base.__new__(cls, *arguments)
        vars(member)["_value_"] = value
        if member_name is not None:
            by_name[member_name] = member
        try:
            by_value[value] = member
        except TypeError:  # not hashable, so the member is found by comparison
            if member_name is not None:
                unhashable.setdefault(member_name, []).append(value)
    by_name.update({alias: by_name[name] for alias, name in aliases.items() if name in by_name})
    made: type = cloudpickle._lookup_class_or_track(tracker_id, cls)
    return made


def _owner_of_hook(bases: Any) -> type | None:
    """The class whose `__init_subclass__` would be called by a class statement with these bases."""
    for base in bases:
        for cls in base.__mro__[:-1]:
            if _HOOK in vars(cls):
                return cls  # type: ignore[no-any-return]
    return None


@contextlib.contextmanager
def _without_hook(owner: type | None) -> Iterator[None]:
    """A context manager inside which classes that this thread creates do not call the hook;
    classes that other threads create still call it."""
    if owner is None:
        yield
        return
    with _hooks:
        hook = vars(owner)[_HOOK]

        def call(cls: type, /, **arguments: Any) -> None:
            if not _local.quiet:
                hook.__get__(None, cls)(**arguments)

        type.__setattr__(owner, _HOOK, classmethod(call))
        _local.quiet = True
        try:
            yield
        finally:
            _local.quiet = False
            type.__setattr__(owner, _HOOK, hook)


# The annotations of a function or class, without an error for names that do not exist. Since
# Python 3.14 annotations are evaluated when they are read (PEP 649). A name that only type
# checkers import then raises an error. A function by value is sent with the current values of its
# annotations, or with their text if one of them cannot be evaluated.


IS_LAZY = sys.version_info >= (3, 14)


def annotations_of(function: Any) -> dict[str, Any]:
    """The annotations of a function."""
    try:
        found: dict[str, Any] = function.__annotations__
    except Exception:
        if not IS_LAZY:
            raise
        return _as_text(function, function.__annotate__)
    return found


def own_annotations(cls: type) -> dict[str, Any] | None:
    """The annotations in the body of a class; None if there are none."""
    own = vars(cls)
    found: dict[str, Any] | None = own.get("__annotations__", own.get("__annotations_cache__"))
    annotate = own.get("__annotate_func__")
    if found is not None or annotate is None:
        return found
    try:
        found = annotate(1)  # annotationlib.Format.VALUE, without the import
    except Exception:
        return _as_text(cls, annotate)
    return found


def with_annotations(function: types.FunctionType) -> types.FunctionType:
    """The function, or a copy with annotations as text if the annotations cannot be evaluated."""
    if not IS_LAZY:
        return function
    try:
        function.__annotations__  # noqa: B018
    except Exception:
        copy: Any = types.FunctionType(
            function.__code__,
            function.__globals__,
            name=function.__name__,
            argdefs=function.__defaults__,
            closure=function.__closure__,
        )
        copy.__dict__.update(vars(function))
        for name in ("__kwdefaults__", "__qualname__", "__module__", "__doc__", "__type_params__"):
            setattr(copy, name, getattr(function, name))
        copy.__annotations__ = annotations_of(function)
        return copy  # type: ignore[no-any-return]
    return function


def _as_text(owner: Any, annotate: Any) -> dict[str, Any]:
    library = importlib.import_module("annotationlib")
    found: dict[str, Any] = library.call_annotate_function(
        annotate, library.Format.STRING, owner=owner
    )
    return found
