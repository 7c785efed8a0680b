"""Fails everything that a process waits for, when its node is gone or its cluster was closed.

A task that is submitted at that very moment must fail, too. So the end is a state, `Memory.lost`,
which is set once, and before the first task is failed. A thread that adds a pending task checks it
afterwards and, if it is set, fails everything that is pending once more. So whichever of the two
threads comes last fails that task's Future.
"""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING

from hoplite_mp import errors
from hoplite_mp.errors import ClosedError, ManagerLostError

if TYPE_CHECKING:
    from hoplite_mp._client.ports import Submitting

__all__ = ["Completion", "call_back", "fail_pending", "suppress_closed"]

_log = logging.getLogger("hoplite_mp")


class suppress_closed:
    """Suppresses errors that mean that the node is gone or the cluster is closed. Naming
    NodeLostError creates its class, so that is done only when something was raised: most programs
    never need it."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, value: object, traceback: object) -> bool:
        if kind is None:
            return False
        return issubclass(kind, (errors.NodeLostError, ManagerLostError, ClosedError))


def fail_pending(submitter: Submitting, error: BaseException) -> None:
    """Fails everything that is not done: with the error in `Memory.lost`, or with `error` if there
    is none yet. A task that is done keeps its result, unless its completion cannot be processed.
    The caller calls `call_back` when it holds no lock."""
    memory, tasks, pending = submitter.memory, submitter.tasks, submitter.pending
    if memory.lost is None:
        memory.lost = error
    for finished_too in (False, True):
        for oid, one in pending.copy().items():
            if not finished_too and memory.client.usable and tasks.done(oid):
                continue
            future = one.future
            if future is not None and future._settle(False, True, memory.lost_again()):
                submitter.ended_futures.append(future)
            # Remove the entry last, so that it is found again if Ctrl-C interrupts this.
            pending.pop(oid, None)
            one.holds, one.needs = None, []
        if not finished_too and pending:
            submitter.look_at_all()
    submitter.forget_waiting()


def call_back(submitter: Submitting) -> None:
    """Calls the callbacks of all Futures that have ended. All Futures have ended before the first
    callback runs, because a callback may wait for another Future."""
    interrupt: BaseException | None = None
    while submitter.ended_futures:
        try:
            future = submitter.ended_futures.popleft()
        except IndexError:  # another thread has taken the last one
            break
        try:
            future._tell()
        except BaseException as problem:  # SystemExit, for example: the other callbacks still run
            _log.exception("in a callback of a Future whose cluster has ended")
            interrupt = problem
    if isinstance(interrupt, KeyboardInterrupt):
        raise interrupt


class Completion:
    """An end that one thread is making. Other threads can wait for it. That thread itself, which
    may run callbacks meanwhile, cannot."""

    def __init__(self) -> None:
        self._thread = threading.get_ident()
        self._over = threading.Event()

    def over(self) -> None:
        """The end has been made, or has failed."""
        self._over.set()

    def wait(self) -> None:
        if threading.get_ident() != self._thread:
            self._over.wait()
