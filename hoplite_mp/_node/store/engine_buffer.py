"""Memory that the streaming engine uses, and when it may be freed.

Why it exists: the engine's thread may still write into a cell for a moment after the cell was
closed. A block that cells lie in must therefore be freed through its engine buffer.
It must never know: the engine, what the memory is for.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["EngineBuffer"]


@dataclass(slots=True, eq=False)
class EngineBuffer:
    """The memory that some cells lie in. `keep`: objects that must live as long as any of them."""

    keep: list[Any] = field(default_factory=list)
    closing: int = 0  # closed cells that the engine may still write
    then: list[Callable[[], None]] = field(default_factory=list)

    def when_free(self, action: Callable[[], None]) -> None:
        """Calls `action` when the engine writes no closed cell any more."""
        if self.closing:
            self.then.append(action)
        else:
            action()

    def let_go(self) -> None:
        """The engine has released one closed cell."""
        self.closing -= 1
        if not self.closing:
            actions, self.then = self.then, []
            for action in actions:
                action()
