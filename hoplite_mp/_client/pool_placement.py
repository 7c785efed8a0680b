"""How many workers of its own an executor may have, and on which nodes.

It must never know: how they are started.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["WORKERS_MAX", "refusal", "spread"]

WORKERS_MAX = 200


def refusal(max_workers: Any) -> str:
    """The error for an invalid number of workers; begins like the standard library's."""
    return (
        f"max_workers must be greater than 0 and at most {WORKERS_MAX}, or None, "
        f"not {max_workers!r}"
    )


def spread(
    count: int, places: Sequence[tuple[int, int]], most: dict[int, int] | None = None
) -> list[tuple[int, int]]:
    """Distributes `count` workers over (node, weight): returns (node, workers) without zeros. Each
    worker goes to the node that then has the fewest in proportion to its weight, the first of
    several. `most`: how many workers fit on a node."""
    given = dict.fromkeys((number for number, _ in places), 0)
    for _ in range(count):
        open_ = [one for one in places if most is None or given[one[0]] < most[one[0]]]
        number, _ = min(open_, key=lambda place: (given[place[0]] + 1) / place[1])
        given[number] += 1
    return [(number, workers) for number, workers in given.items() if workers]
