"""Refs in arguments: a single ref, an iterable of refs, or nested containers of refs."""

from __future__ import annotations

import reprlib
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np

from hoplite_mp._client.futures import Future
from hoplite_mp._common.ref import ObjectRef

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["TREE_TYPES", "as_items", "as_ref", "as_refs", "tree_map"]

TREE_TYPES = (list, tuple, dict)  # exact types; a subclass may use its items differently


def as_items(refs: Any) -> list[Any]:
    """One ref or Future, or an iterable of them, as a list. The items of the iterable are not
    checked."""
    if isinstance(refs, (ObjectRef, Future)):
        return [refs]
    if not isinstance(refs, Iterable) or isinstance(refs, (str, bytes, bytearray)):
        raise _not_a_ref("a ref, a Future, or an iterable of them", refs)
    if isinstance(refs, np.ndarray) and refs.dtype != object:
        raise _not_a_ref("a ref, a Future, or an iterable of them", refs)
    return list(refs)


def as_refs(refs: Any) -> list[ObjectRef[Any]]:
    """One ref or Future, or an iterable of them, as a list of refs."""
    found = as_items(refs)
    for i, one in enumerate(found):
        if isinstance(one, Future):
            found[i] = one.ref
        elif not isinstance(one, ObjectRef):
            raise _not_a_ref("a ref or a Future", one)
    return found


def _not_a_ref(wanted: str, got: Any) -> TypeError:
    """An error that describes the wrong value in one line, however large the value is. It explains
    that a task receives the value of a ref, not the ref."""
    hint = (
        "Refs among a task's arguments are replaced by their values; hoplite_mp.by_ref(ref) passes "
        "the ref itself, and put(value) makes a ref of a value"
    )
    return TypeError(f"expected {wanted}, not {_in_words(got)}. {hint}")


def _in_words(value: Any) -> str:
    kind = type(value)
    home = "" if kind.__module__ == "builtins" else f"{kind.__module__}."
    name = f"{home}{kind.__qualname__}"
    shape, dtype = getattr(value, "shape", None), getattr(value, "dtype", None)
    if isinstance(shape, tuple) and dtype is not None:
        return f"{name} of {dtype}, shape {shape}"
    if kind in (bool, int, float, complex, str, bytes, bytearray, type(None)):
        return f"{name} {reprlib.repr(value)}"
    if kind in (list, tuple, dict, set, frozenset):
        return f"{name} of {len(value)} items"
    return name


def as_ref(one: Any) -> ObjectRef[Any]:
    """A ref or Future as a ref. Raises TypeError for anything else."""
    (ref,) = as_refs([one])
    return ref


def tree_map(value: Any, leaf: Callable[[Any], Any]) -> Any:
    """Returns the same nesting, with `leaf(x)` in place of each x whose type is not in TREE_TYPES.
    Items are processed in order; keys are unchanged."""
    kind = type(value)
    if kind is list:
        return [tree_map(one, leaf) for one in value]
    if kind is tuple:
        return tuple([tree_map(one, leaf) for one in value])
    if kind is dict:
        return {key: tree_map(one, leaf) for key, one in value.items()}
    return leaf(value)
