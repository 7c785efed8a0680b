"""What is in a byte: an object, a member of a fold, or a fold of those, in its order.

Why it exists: no arithmetic is done in a simulation, but every block says who is in it. Contents
that are made of the same things in the same order are one and the same Python object, so to
compare them is to compare bits: floating-point sums in another order are other bits.
It must never know: where bytes lie.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence

__all__ = ["Content", "Contents"]


class Content:
    """One of `name` (a leaf) and `parts` (a fold, from left to right)."""

    __slots__ = ("name", "parts")

    def __init__(self, name: Hashable, parts: tuple[Content, ...]) -> None:
        self.name = name
        self.parts = parts

    def leaves(self) -> list[Hashable]:
        """Everybody who is in it, in folding order."""
        found: list[Hashable] = []
        left = [self]
        while left:  # a chain of a thousand nodes is a thousand folds deep
            one = left.pop()
            if one.parts:
                left.extend(reversed(one.parts))
            else:
                found.append(one.name)
        return found

    def __repr__(self) -> str:
        return f"Content({self.leaves()!r})"


class Contents:
    """All contents of a run, each once."""

    def __init__(self) -> None:
        self._leaves: dict[Hashable, Content] = {}
        self._folds: dict[tuple[int, ...], Content] = {}

    def leaf(self, name: Hashable) -> Content:
        """What has that name."""
        found = self._leaves.get(name)
        if found is None:
            found = self._leaves[name] = Content(name, ())
        return found

    def fold(self, parts: Sequence[Content]) -> Content:
        """What comes out if these are added up; one alone stays what it is."""
        if len(parts) == 1:
            return parts[0]
        key = tuple(map(id, parts))
        found = self._folds.get(key)
        if found is None:  # which keeps its parts, so their ids stay theirs
            found = self._folds[key] = Content(None, tuple(parts))
        return found
