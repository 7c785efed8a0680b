"""Operators of reductions: which names, NumPy ufuncs and functions a call accepts as `op`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["OPS", "function_name", "is_function", "operation_name"]

OPS = ("sum", "prod", "min", "max", "mean", "and", "or", "xor")
FUNCTION_NAME_CHARS_MAX = 200  # OP_CHARS_MAX of _protocol/fields.py holds it and a kind of call
_KERNELS = {
    "add": "sum", "multiply": "prod", "minimum": "min", "maximum": "max",
    "bitwise_and": "and", "bitwise_or": "or", "bitwise_xor": "xor",
}  # fmt: skip
# Associative and commutative, as far as floating-point numbers allow it.
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
    if callable(op):
        raise ValueError(
            f"op={op!r}: this call takes a name or a numpy ufunc, and no other function"
        )
    raise ValueError(f"op must be a name, a numpy ufunc or a function of two values, not {op!r}")


def is_function(op: Any) -> bool:
    """Is this operator a function of the user, which folds values of any kind?"""
    return callable(op) and not isinstance(op, np.ufunc)


def function_name(op: Callable[..., Any]) -> str:
    """The module and the qualified name of such a function, by which ranks agree on it."""
    named = op if hasattr(op, "__qualname__") else type(op)
    name = f"{getattr(named, '__module__', None) or 'builtins'}.{named.__qualname__}"
    return name[-FUNCTION_NAME_CHARS_MAX:]
