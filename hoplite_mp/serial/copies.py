"""How buffers are copied for a reader that may write.

It must never know where a worker gets its memory from: that puts its own way here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable


class LargeCopies:
    """How large buffers are copied for a reader that may write; a worker puts its own way here."""

    bytes_min = 1 << 20
    copy: Callable[[memoryview], Any] = bytearray


large_copies = LargeCopies()


def writable_copy(part: memoryview) -> Any:
    """A copy of `part` that whoever reads may write to."""
    if part.nbytes < large_copies.bytes_min:
        return bytearray(part)
    return large_copies.copy(part)
