"""How buffers are copied for a reader that may write.

It must never know where a worker gets its memory from: that puts its own way here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable


def fresh_copy(part: memoryview) -> memoryview:
    """In fresh memory of this process. numpy asks the kernel for huge pages, which a bytearray does
    not, and other threads run meanwhile."""
    made = np.empty(part.nbytes, np.uint8)
    made[:] = np.frombuffer(part, np.uint8)
    return made.data


class LargeCopies:
    """How large buffers are copied for a reader that may write; a worker puts its own way here."""

    bytes_min = 1 << 20
    copy: Callable[[memoryview], Any] = staticmethod(fresh_copy)


large_copies = LargeCopies()


def writable_copy(part: memoryview) -> Any:
    """A copy of `part` that whoever reads may write to."""
    if part.nbytes < large_copies.bytes_min:
        return bytearray(part)
    return large_copies.copy(part)
