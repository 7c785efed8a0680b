"""How many workers of one's own there may be, and on which nodes.

It must never know: how they are started.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["WORKERS_MAX", "refusal", "spread"]

WORKERS_MAX = 200


def refusal(max_workers: Any) -> str:
    """Of a number of workers; it begins with the words of the standard library."""
    return (
        f"max_workers must be greater than 0 and at most {WORKERS_MAX}, or None, "
        f"not {max_workers!r}"
    )


def spread(
    count: int, places: Sequence[tuple[int, int]], most: dict[int, int] | None = None
) -> list[tuple[int, int]]:
    """`count` workers over (node, weight): (node, how many), none with 0. Each goes to the first
    of those that have the fewest for their weight; `most`: so many fit there."""
    given = dict.fromkeys((number for number, _ in places), 0)
    for _ in range(count):
        open_ = [one for one in places if most is None or given[one[0]] < most[one[0]]]
        number, _ = min(open_, key=lambda place: (given[place[0]] + 1) / place[1])
        given[number] += 1
    return [(number, workers) for number, workers in given.items() if workers]
