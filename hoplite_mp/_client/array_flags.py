"""Array flags at the border of the store: the memory order, and the read-only flag.

Why it exists: `memory.py` deals with blocks and objects; these two functions only need numpy.
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
    """Makes the array read-only, and every array that it is a view of."""
    base: Any = array
    while type(base) is np.ndarray:
        base.flags.writeable = False
        base = base.base
