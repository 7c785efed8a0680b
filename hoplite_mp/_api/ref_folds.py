"""Reductions of refs by a function of the user: the task that folds the values."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from hoplite_mp._client.deadlines import FOREVER_NS
from hoplite_mp._client.runtime import current_runtime
from hoplite_mp._common import clock
from hoplite_mp._serialize import Folded
from hoplite_mp.errors import ReduceError

if TYPE_CHECKING:
    from collections.abc import Callable

    from hoplite_mp._common.ref import ObjectRef

__all__ = ["fold_refs"]


def fold_refs(
    op: Callable[[Any, Any], Any],
    refs: list[ObjectRef[Any]],
    num: int,
    deadline_s: float | None,
    ready: list[int],
    called: tuple[int, int],
) -> Folded:
    """Folds the first `num` values to be ready, from left to right in the order of `refs`.

    deadline_s: so many seconds after the call the values that are ready are folded; if there are
    none, the first one to become ready is the result. ready: the indices of the refs that were
    ready at the call. called: the number of the caller's node, and the time of the call by the
    monotonic clock of its host. ReduceError: too few refs succeed.
    """
    runtime = current_runtime()
    memory, tasks = runtime.memory, runtime.submitter.tasks
    oids = [memory.local_id(ref) for ref in refs]
    node, called_ns = called
    now = clock.monotonic_ns()
    if node != tasks.node_number:  # another host has another clock
        called_ns = now
    until = FOREVER_NS if deadline_s is None else called_ns + int(deadline_s * 1e9)
    values: dict[int, Any] = {}
    failure: Exception | None = None
    early = set(ready)
    left = [*ready, *(at for at in range(len(refs)) if at not in early)]
    # After the deadline only these are known to have been ready in time.
    known = len(ready) if ready and now >= until else len(refs)
    while len(values) < num:
        if len(left) < num - len(values):
            raise ReduceError(
                f"reduce: {len(values) + len(left)} of {len(refs)} sources are left, and {num} "
                f"are needed; the first failure: {failure!r}"
            ) from failure
        runtime.submitter.waiting.wait_many([oids[at] for at in left], num - len(values), until)
        for at in [at for at in left[:known] if tasks.done(oids[at])]:
            if len(values) == num:
                break
            left.remove(at)
            try:
                values[at] = memory.read(oids[at], FOREVER_NS, True)
            except Exception as error:
                failure = error if failure is None else failure
        known = len(refs)
        if clock.monotonic_ns() >= until:
            num, until = max(1, len(values)), FOREVER_NS
    ranks = sorted(values)
    return Folded(functools.reduce(op, [values[at] for at in ranks]), tuple(ranks))
