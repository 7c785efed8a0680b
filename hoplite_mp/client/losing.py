"""Fails everything that a process waits for, when its node is gone or its cluster was closed.

Why it exists: a task that is submitted at that very moment must fail, too. So the end is a state,
`Memory.lost`, set once and before anything is emptied; a thread that adds something pending checks
it afterwards, and empties again if it is set. Whichever of the two comes last fails the Future.
It must never know: why a node ends, who watches it.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from hoplite_mp import errors
from hoplite_mp.errors import ClosedError, ManagerLostError

if TYPE_CHECKING:
    from hoplite_mp.client.pending import Settles
    from hoplite_mp.client.ports import Submitting

__all__ = ["UnlessEnded", "abandon"]

_log = logging.getLogger("hoplite_mp")


class UnlessEnded:
    """Suppresses errors that mean that the node is gone or the cluster is closed. Naming
    NodeLostError creates its class, so that is done only when something was raised: most programs
    never need it."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, value: object, traceback: object) -> bool:
        if kind is None:
            return False
        return issubclass(kind, (errors.NodeLostError, ManagerLostError, ClosedError))


def abandon(submitter: Submitting, error: BaseException) -> None:
    """Fails everything that is not done with `error`, or with the first error if there have been
    several; what is done keeps its result. Callbacks are called after every Future has ended,
    because one of them may wait for another Future."""
    memory, tasks, pending = submitter.memory, submitter.tasks, submitter.pending
    if memory.lost is None:
        memory.lost = error
    ended: list[Settles] = []
    for finished_too in (False, True):
        for oid, one in list(pending.items()):
            if not finished_too and memory.client.usable and tasks.done(oid):
                continue
            future = one.future
            if future is not None and future._settle(False, True, memory.lost_again()):
                ended.append(future)
            # Last, so that entries are found again if Ctrl-C interrupts this.
            pending.pop(oid, None)
            one.holds, one.needs = None, []
        if not finished_too and pending:
            submitter.look_at_all()
    submitter.forget_waiting()
    interrupt: BaseException | None = None
    for future in ended:
        try:
            future._tell()
        except BaseException as problem:  # SystemExit of a callback, say: call the others, too
            _log.exception("in a callback of a Future whose cluster has ended")
            interrupt = problem
    if isinstance(interrupt, KeyboardInterrupt):
        raise interrupt
