"""The question of a worker to its node after an exception that is retried like a worker's death.

It must never know: which exceptions those are.
"""

from __future__ import annotations

import msgspec

__all__ = ["TryAgain"]


class TryAgain(msgspec.Struct, frozen=True, tag="TryAgain", array_like=True):
    """The task that this worker has claimed has failed. Reply: whether it is queued again, with one
    retry less; an actor's call is not announced to workers, because this worker runs it next.
    `failures`: only one item of a chunk has failed, for the `failures`-th time. Then the reply is
    whether the worker may try the item again; the task stays claimed."""

    task: int
    failures: int = 0
