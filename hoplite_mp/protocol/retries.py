"""What a worker asks its node after an exception that counts as its death would.

It must never know: which exceptions those are.
"""

from __future__ import annotations

import msgspec

__all__ = ["TryAgain"]


class TryAgain(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The task that this worker has claimed has failed. Reply: whether it is queued again, with one
    retry less; an actor's call is announced to nobody: the worker runs it next. `failures`: it is
    one item of a chunk that has failed so often, and the reply is whether the worker may try that
    again; the task stays claimed."""

    task: int
    failures: int = 0
