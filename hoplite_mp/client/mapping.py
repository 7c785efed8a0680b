"""The results of `map`, one after the other, while more tasks are sent.

Why it exists: `map` is an iterator over Futures that are made as it goes on; whatever ends it, what
has not begun is cancelled, and no Future is held longer than needed.
It must never know: where tasks run, how they are made.
"""

from __future__ import annotations

import itertools
import time
from typing import TYPE_CHECKING, Any

from hoplite_mp.client.memory import FOREVER_NS, deadline_ns
from hoplite_mp.errors import HopliteTimeoutError

if TYPE_CHECKING:
    from collections import deque
    from collections.abc import Iterable, Iterator

    from hoplite_mp.client.futures import Future

__all__ = ["chunks_of", "flattened", "results_of"]


def chunks_of(items: Iterable[Any], size: int) -> Iterator[list[Any]]:
    iterator = iter(items)
    while chunk := list(itertools.islice(iterator, size)):
        yield chunk


def results_of(
    ahead: deque[Future[Any]],
    more: Iterator[Future[Any]],
    deadline: float | None,
    ordered: bool,
    executor: object,
) -> Iterator[Any]:
    """Yields results; whatever ends this, what has not begun is cancelled. `executor` is held."""
    try:
        while ahead:
            future = ahead.popleft() if ordered else _first(ahead, deadline)
            left = None if deadline is None else deadline - time.monotonic()
            try:
                result = [future.result(left)]
                future._submitter.drain()  # it need not keep the Future, and so the result
            finally:
                future.cancel()  # without effect once it is done
                del future
            ahead.extend(itertools.islice(more, 1))
            yield result.pop()  # it is the reader's alone from here on
    finally:
        for future in ahead:
            future.cancel()


def flattened(results: Iterator[list[Any]]) -> Iterator[Any]:
    """The items of chunks; a generator, so that closing it closes `results`."""
    for chunk in results:
        chunk.reverse()
        while chunk:
            yield chunk.pop()  # nothing here holds what the reader has been given


def _first(ahead: deque[Future[Any]], deadline: float | None) -> Future[Any]:
    submitter = ahead[0]._submitter
    oids = [future._oid for future in ahead]
    limit = FOREVER_NS if deadline is None else deadline_ns(deadline - time.monotonic())
    if not submitter.waiting.wait_many(oids, 1, limit):
        raise HopliteTimeoutError(
            f"none of {len(oids)} results under way was ready within the timeout of map()"
        )
    for future in ahead:
        if submitter.tasks.done(future._oid):
            ahead.remove(future)
            return future
    return ahead.popleft()
