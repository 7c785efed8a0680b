"""Memory that the streaming engine works in, and when it may be used for something else.

Why it exists: a closed cell is let go by the engine's thread a moment later; until then bytes may
still be written. Whoever frees a block asks its engine buffer first.
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
    """The memory that some cells lie in; `keep` lives as long as any of them."""

    keep: list[Any] = field(default_factory=list)
    closing: int = 0  # cells that are closed, and not yet let go
    then: list[Callable[[], None]] = field(default_factory=list)

    def when_free(self, action: Callable[[], None]) -> None:
        """Calls `action` when no closed cell is being written any more."""
        if self.closing:
            self.then.append(action)
        else:
            action()

    def let_go(self) -> None:
        """The engine has let go of one closed cell."""
        self.closing -= 1
        if not self.closing:
            actions, self.then = self.then, []
            for action in actions:
                action()
