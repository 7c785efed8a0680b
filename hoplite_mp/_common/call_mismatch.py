"""Checks whether all ranks of a Group have made the same collective call, and words the error."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

ROOTED = ("broadcast", "reduce", "gather", "scatter")  # these fail if the root is dead
MISMATCH = "made different calls"  # a part of the error text


def different_calls(calls: Mapping[int, tuple[Any, ...]]) -> str:
    """The error text if ranks have made different calls; "" if all have made the same call. calls:
    rank -> (kind, operator, root, ...)."""
    first, expected = next((rank, call[:3]) for rank, call in calls.items())
    for rank, call in calls.items():
        if call[:3] != expected:
            texts = f"{_described(*expected)} and {_described(*call[:3])}"
            return f"ranks {first} and {rank} {MISMATCH}: {texts}"
    return ""


def _described(kind: str, op: str, root: int) -> str:
    if op and kind == "allgather":  # a step of a reduction by a function
        return op
    if root and kind not in ROOTED:
        return f"{kind}, a step of a robust reduction,"
    detail = [repr(op)] * bool(op) + [f"root={root}"] * (kind in ROOTED)
    return f"{kind}({', '.join(detail)})"
