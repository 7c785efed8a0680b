"""Nested containers of refs, as `get` takes them.

Why it exists: programs have refs in lists of lists and in dicts by name, and want the values in the
same places.
It must never know: how a value is read.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hoplite_mp.collectives import as_refs

if TYPE_CHECKING:
    from collections.abc import Callable

    from hoplite_mp.ref import ObjectRef

__all__ = ["NESTS", "as_ref", "in_nest"]

NESTS = (list, tuple, dict)  # exact types, because only a subclass knows what its items mean


def as_ref(one: Any) -> ObjectRef[Any]:
    """A ref or Future as a ref; TypeError for anything else."""
    (ref,) = as_refs([one])
    return ref


def in_nest(value: Any, leaf: Callable[[Any], Any]) -> Any:
    """The same nesting, with `leaf(x)` in the place of each x that is none of NESTS; items are
    taken in order, and keys stay as they are."""
    kind = type(value)
    if kind is list:
        return [in_nest(one, leaf) for one in value]
    if kind is tuple:
        return tuple([in_nest(one, leaf) for one in value])
    if kind is dict:
        return {key: in_nest(one, leaf) for key, one in value.items()}
    return leaf(value)
