"""Members of Groups for hoplite_mp.ml that die at a chosen call."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hoplite_mp import Group

__all__ = ["DyingGroup"]


class DyingGroup:
    """A Group whose member is killed instead of making its `number`-th call of that kind."""

    def __init__(self, group: Group, kind: str, number: int) -> None:
        self._group, self._kind, self._left = group, kind, number

    def __getattr__(self, name: str) -> Any:
        if name == self._kind:
            self._left -= 1
            if self._left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
        return getattr(self._group, name)
