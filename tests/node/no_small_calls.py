"""Stands in for _node/groups/small_calls.py where a test is about calls that Python decides: the
engine is never given any.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["NoSmallCalls"]


class NoSmallCalls:
    """Every group's calls stay where they are."""

    possible = False

    def serve(self, events: Any, states: Mapping[int, Any]) -> None:
        pass

    def add(self, known: Any) -> None:
        pass

    def forget(self, generation: int) -> None:
        pass

    def open(self, state: Any, call: int) -> None:
        pass
