"""Reductions of refs by a function of the user: the task that folds the values."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from hoplite_mp import clock
from hoplite_mp.client.deadlines import FOREVER_NS
from hoplite_mp.client.runtime import current_runtime
from hoplite_mp.errors import ReduceError
from hoplite_mp.serial import Folded

if TYPE_CHECKING:
    from collections.abc import Callable

    from hoplite_mp.ref import ObjectRef

__all__ = ["fold_refs"]


def fold_refs(
    op: Callable[[Any, Any], Any],
    refs: list[ObjectRef[Any]],
    num: int,
    deadline_s: float | None,
) -> Folded:
    """Folds the first `num` values to be ready, from left to right in the order of `refs`.

    `deadline_s`: after so many seconds the values that are ready are folded; if there are none, the
    first one to become ready is the result. ReduceError: too few refs succeed.
    """
    runtime = current_runtime()
    memory, tasks = runtime.memory, runtime.submitter.tasks
    oids = [memory.local_id(ref) for ref in refs]
    until = FOREVER_NS if deadline_s is None else clock.monotonic_ns() + int(deadline_s * 1e9)
    values: dict[int, Any] = {}
    left, failure = list(range(len(refs))), None
    while len(values) < num:
        if len(left) < num - len(values):
            raise ReduceError(
                f"reduce: {len(values) + len(left)} of {len(refs)} sources are left, and {num} "
                f"are needed; the first failure: {failure!r}"
            ) from failure
        runtime.submitter.waiting.wait_many([oids[at] for at in left], num - len(values), until)
        for at in [at for at in left if tasks.done(oids[at])]:
            if len(values) == num:
                break
            left.remove(at)
            try:
                values[at] = memory.read(oids[at], FOREVER_NS, True)
            except Exception as error:
                failure = error if failure is None else failure
        if clock.monotonic_ns() >= until:
            num, until = max(1, len(values)), FOREVER_NS
    ranks = sorted(values)
    return Folded(functools.reduce(op, [values[at] for at in ranks]), tuple(ranks))
