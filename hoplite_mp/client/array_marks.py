"""What an array is told when it meets the store: its order in memory, and that it is read-only.

Why it exists: `memory.py` deals in blocks and objects; these two know numpy alone.
It must never know: the store.
"""

from __future__ import annotations

from typing import Any

import numpy as np

__all__ = ["checked_order", "freeze"]


def checked_order(order: str) -> Any:
    """`order` as numpy takes it; ValueError for what is neither "C" nor "F"."""
    if order not in ("C", "F"):
        raise ValueError(f"order must be 'C' or 'F', not {order!r}")
    return order


def freeze(array: np.ndarray[Any, np.dtype[Any]]) -> None:
    """The array, and what it is a view of, become read-only."""
    base: Any = array
    while type(base) is np.ndarray:
        base.flags.writeable = False
        base = base.base
