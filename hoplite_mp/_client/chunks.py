"""Divides the items of a map into tasks.

A task costs as much as a thousand tiny items, and the cost of an item is unknown in advance. So
chunks are small at first, and grow as long as the workers finish them immediately. Items are sent
as columns, one list for each of the function's arguments, because a list of numbers is written and
read ten times as fast as a list of tuples.
"""

from __future__ import annotations

import itertools
import operator
from typing import TYPE_CHECKING, Any

from hoplite_mp._common import clock

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from hoplite_mp._client.futures import Future

__all__ = ["Chunks", "Items", "rows_of"]

# If a chunk is done within this time after it was sent, the next chunks have twice as many items.
GROWS_WITHIN_S = 0.005
# These have a length, and iterating over them neither changes them nor waits.
_SIZED = {list, tuple, range}


def rows_of(columns: Sequence[Sequence[Any]]) -> Iterator[tuple[Any, ...]]:
    """Yields the arguments of each call."""
    return zip(*columns, strict=True)


class Items:
    """The arguments of a map, in the order of its iterables."""

    def __init__(self, iterables: Sequence[Iterable[Any]], at_once: bool) -> None:
        """at_once: whether to read and count all items now."""
        self.count: int | None = None
        self._alone = len(iterables) == 1
        self._left: Iterator[Any]
        if at_once and not all(type(one) in _SIZED for one in iterables):
            read = list(iterables[0] if self._alone else zip(*iterables, strict=False))
            self.count = len(read)
            self._left = iter(read)
            return
        if at_once:
            self.count = min((len(one) for one in iterables), default=0)  # type: ignore[arg-type]
        self._left = iter(iterables[0]) if self._alone else zip(*iterables, strict=False)
        self._width = len(iterables)

    def rows(self) -> Iterator[tuple[Any, ...]]:
        """Yields the arguments of the remaining calls."""
        return zip(self._left, strict=True) if self._alone else self._left

    def take(self, size: int) -> list[list[Any]]:
        """The columns of the next `size` items; an empty list at the end."""
        rows = list(itertools.islice(self._left, size))
        if not rows:
            return []
        if self._alone:
            return [rows]
        return [list(map(operator.itemgetter(at), rows)) for at in range(len(rows[0]))]


class Chunks:
    """Iterates over (Future, number of items). Each task is sent on demand."""

    def __init__(
        self, items: Items, send: Callable[..., Future[Any]], size: int, size_max: int
    ) -> None:
        """send: submits a task with columns as arguments. size: number of items in the first chunk.
        Later chunks have more items, up to size_max, as long as sending is the bottleneck."""
        self._items = items
        self._send = send
        self._size = size
        self._size_max = size_max
        # A task with the current number of items whose duration is being measured, or None.
        self._watched: Future[Any] | None = None
        self._since = 0.0  # time at which this task was sent

    def __iter__(self) -> Chunks:
        return self

    def __next__(self) -> tuple[Future[Any], int]:
        if self._watched is not None:
            self._look(self._watched)
        columns = self._items.take(self._size)
        if not columns:
            self._watched = None
            raise StopIteration
        began = clock.monotonic()
        future = self._send(*columns)
        if self._watched is None and self._size < self._size_max:
            self._watched, self._since = future, began
        return future, len(columns[0])

    def _look(self, watched: Future[Any]) -> None:
        late = clock.monotonic() - self._since > GROWS_WITHIN_S
        done = watched.done()
        if done and not late:
            self._size = min(2 * self._size, self._size_max)
        if done or late:
            self._watched = None
