"""Invariants of all data that plans deliver.

A plan that delivers wrong bytes must not be praised for its speed. A copy contains its object,
complete. A result contains each contributor that its commit names exactly once in every byte, and
is made of the same additions on every host, so it has the same bits.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hoplite_mp._simulation.scale.streams import WrongPlace

if TYPE_CHECKING:
    from collections.abc import Iterable

    from hoplite_mp._protocol.messages import Commit, ExecuteReduce
    from hoplite_mp._simulation.scale.streams import Content, ScaleCell

__all__ = ["ScaleOracle", "WrongCompletion"]


class WrongCompletion(AssertionError):
    """Something ended as it must not, or did not end."""


class ScaleOracle:
    """The invariants of one run."""

    def __init__(self) -> None:
        self.sizes: dict[bytes, int] = {}  # bytes of all objects and results
        self._sums: dict[tuple[int, int], Content] = {}  # by operation and first byte
        self._commits: dict[int, Commit] = {}

    def check_copy(self, object_id: bytes, cells: Iterable[ScaleCell]) -> None:
        """These cells are to be a copy of that object."""
        for cell in _in_order(cells, 0, self.sizes[object_id]):
            if cell.content != object_id:
                raise WrongPlace(f"a copy of {object_id.hex()} has {cell}")

    def check_commit(self, commit: Commit) -> None:
        """All commits of an operation must be equal."""
        known = self._commits.setdefault(commit.operation, commit)
        if commit != known:
            raise WrongCompletion(f"{commit} and {known}")

    def check_result(
        self, plan: ExecuteReduce, commit: Commit, cells: Iterable[ScaleCell], begin: int, end: int
    ) -> None:
        """A destination is told to seal these cells as bytes [begin, end) of the result."""
        if commit.contributors != plan.members:
            raise WrongPlace(f"{commit} is about other members than {plan.members}")
        for cell in _in_order(cells, begin, end):
            place = plan.operation, cell.begin
            if place not in self._sums:
                self._sums[place] = cell.content
                _check_sum(plan, cell.content)
            elif self._sums[place] != cell.content:
                raise WrongPlace(f"{cell} has other bits than elsewhere")


def _in_order(cells: Iterable[ScaleCell], begin: int, end: int) -> list[ScaleCell]:
    """The cells that are not empty, in order; they must be full and cover [begin, end)."""
    found = sorted((cell for cell in cells if cell.nbytes), key=lambda cell: cell.begin)
    at = begin
    for cell in found:
        if cell.begin != at or cell.watermark != cell.nbytes:
            raise WrongPlace(f"bytes from {at} on are to be there, and it is {cell}")
        at += cell.nbytes
    if at != end:
        raise WrongPlace(f"bytes {at} to {end} are missing")
    return found


def _check_sum(plan: ExecuteReduce, content: Content) -> None:
    leaves = []
    left = [content]
    while left:  # not recursive, because a chain of a thousand nodes nests a thousand folds
        one = left.pop()
        if isinstance(one, tuple):
            left.extend(reversed(one))
        else:
            leaves.append(one)
    if sorted(leaves) != list(plan.members):
        raise WrongPlace(f"contributors {leaves}, not {plan.members}")
    if plan.rule == "fold" and leaves != list(plan.order):
        raise WrongPlace(f"contributors are folded as {leaves}, not as {plan.order}")
