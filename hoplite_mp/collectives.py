"""Collectives on refs: what the caller checks, and what it hands to its node.

Why it exists: mistakes that can be seen at the call are reported at the call; everything else is
decided by the planner while the work runs.
It must never know: how a reduction is executed.
"""

from __future__ import annotations

import numbers
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from hoplite_mp.client.futures import Future
from hoplite_mp.client.memory import whole
from hoplite_mp.ref import ObjectRef

if TYPE_CHECKING:
    from hoplite_mp.client.runtime import Runtime

__all__ = ["OPS", "as_refs", "operation_name", "reduce", "wait_all"]

OPS = ("sum", "prod", "min", "max", "mean", "and", "or", "xor")
DEADLINE_S_MAX = 1e9  # 31 years; more is none
_KERNELS = {
    "add": "sum", "multiply": "prod", "minimum": "min", "maximum": "max",
    "bitwise_and": "and", "bitwise_or": "or", "bitwise_xor": "xor",
}  # fmt: skip
# Associative and commutative, as far as floating point goes.
_UFUNCS = frozenset(
    {
        "fmax", "fmin", "gcd", "lcm", "hypot", "logaddexp", "logaddexp2", "logical_and",
        "logical_or", "logical_xor",
    }
)  # fmt: skip


def operation_name(op: str | Callable[..., Any]) -> str:
    """The name of a reduction's operator; ValueError for one that is unknown or unsuitable."""
    if isinstance(op, str):
        if op not in OPS:
            raise ValueError(f"unknown op {op!r}: use one of {', '.join(OPS)}, or a numpy ufunc")
        return op
    if isinstance(op, np.ufunc):
        name = op.__name__
        if getattr(np, name, None) is op:
            if name in _KERNELS:
                return _KERNELS[name]
            if name in _UFUNCS:
                return name
        raise ValueError(
            f"{op!r} cannot reduce: an associative and commutative binary ufunc of numpy can"
        )
    raise ValueError(f"op must be a name or a numpy ufunc, not {op!r}")


def as_refs(refs: Any) -> list[ObjectRef[Any]]:
    """One ref or Future, or an iterable of them, as a list of refs."""
    if isinstance(refs, ObjectRef):
        return [refs]
    if isinstance(refs, Future):
        return [refs.ref]
    if not isinstance(refs, Iterable):
        raise TypeError(f"expected a ref, a Future, or an iterable of them, not {refs!r}")
    found = []
    for one in refs:
        if isinstance(one, Future):
            one = one.ref
        if not isinstance(one, ObjectRef):
            raise TypeError(f"expected a ref or a Future, not {one!r}")
        found.append(one)
    return found


def reduce(
    runtime: Runtime,
    refs: Sequence[ObjectRef[Any]],
    op: str | Callable[..., Any],
    num: int | None,
    deadline: Any,
    reproducible: bool,
    slices: int = 1,
) -> list[ObjectRef[Any]]:
    """Starts a reduction of `refs`; one result ref for each slice."""
    name = operation_name(op)
    if not refs:
        raise ValueError("there is nothing to reduce: no refs were given")
    wanted = len(refs) if num is None else whole(num)
    if wanted is None or not 1 <= wanted <= len(refs):
        raise ValueError(f"num={num!r}: it must be from 1 to the number of refs, {len(refs)}")
    if deadline is not None:
        number = isinstance(deadline, numbers.Real) and not isinstance(deadline, bool)
        seconds = float(deadline) if number else -1.0
        if not seconds >= 0:
            raise ValueError(f"deadline={deadline!r}: it must be seconds from now, 0 or more")
        deadline = None if seconds > DEADLINE_S_MAX else seconds
    reproducible = bool(reproducible)
    results = runtime.collective(refs, "reduce", name, wanted, deadline, reproducible, slices)
    return [runtime.memory.own_ref(oid) for oid in results]


def wait_all(runtime: Runtime, refs: Sequence[ObjectRef[Any]]) -> Future[None]:
    """A Future that is done when every ref is; on one host nothing needs to move."""
    if not refs:
        raise ValueError("no refs were given")
    (oid,) = runtime.collective(refs, "gather", "", len(refs), None, False, 1)
    return runtime.operation_future(oid)
