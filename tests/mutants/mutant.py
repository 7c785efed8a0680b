"""A mistake that somebody could make in a shipped line, and the promise that it breaks."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Mutant"]


@dataclass(frozen=True)
class Mutant:
    """One mistake. before: text that occurs exactly once in the file. after: what it becomes."""

    name: str
    path: str  # below the repository
    before: str
    after: str
    promise: str
