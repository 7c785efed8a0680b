"""How buffers are copied for a reader that may write."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable


def fresh_copy(part: memoryview) -> memoryview:
    """A copy in fresh memory of this process. Unlike bytearray, numpy asks the kernel for huge
    pages, and lets other threads run during the copy."""
    made = np.empty(part.nbytes, np.uint8)
    made[:] = np.frombuffer(part, np.uint8)
    return made.data


class LargeCopies:
    """How large buffers are copied for a reader that may write; a worker sets its own function."""

    bytes_min = 1 << 20
    copy: Callable[[memoryview], Any] = staticmethod(fresh_copy)


large_copies = LargeCopies()


def writable_copy(part: memoryview) -> Any:
    """A copy of `part` that the reader may write to."""
    if part.nbytes < large_copies.bytes_min:
        return bytearray(part)
    return large_copies.copy(part)
