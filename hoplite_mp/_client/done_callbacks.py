"""Watches: callbacks for objects that become done, without a thread for each wait.

An event loop, or an iteration over what becomes done, waits for many objects and cannot afford a
thread for each. The code that processes completions (`Submitter.drain`, the collector) notifies the
watches, and wakes each waiter once for all objects that were done together.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from hoplite_mp._client.ports import Submitting

__all__ = ["DoneCallback", "begin", "watch", "withdraw"]


class DoneCallback:
    """An entry among the tasks that wait for an object (`Submitting.waits`).

    `tell` is called when the object is done, or when it can never be done because its cluster has
    ended. It may be called in any thread, and more than once. It must neither raise nor block.
    """

    __slots__ = ("oid",)

    def __init__(self, oid: int) -> None:
        self.oid = oid

    def tell(self) -> None:
        """Notifies whoever waits."""
        raise NotImplementedError


class _Call(DoneCallback):
    """A watch that calls a function."""

    __slots__ = ("tell",)

    def __init__(self, oid: int, tell: Callable[[], None]) -> None:
        self.oid = oid
        self.tell = tell  # type: ignore[method-assign]


def watch(submitter: Submitting, oid: int, tell: Callable[[], None]) -> DoneCallback:
    """Starts a watch that calls `tell`."""
    made = _Call(oid, tell)
    begin(submitter, made)
    return made


def begin(submitter: Submitting, made: DoneCallback) -> None:
    """Starts a watch; it fires at once if the object is done. The caller must hold the object as
    long as the watch exists."""
    oid, memory = made.oid, submitter.memory
    memory.check()
    try:
        with submitter.waits_lock:
            first = not submitter.waits
            submitter.begin_wait(oid, made)
        # Check only now that the watch is listed: if the completion was processed before that, no
        # other thread will notify the watch.
        if submitter.tasks.done(oid) or memory.lost is not None:
            submitter.release(oid)
            submitter.wake_waiters()
        else:
            submitter.collector.start()
            # Later watches need no notice: while there is any watch, the collector sleeps on the
            # event word, which the completion of a watched object changes.
            if first:
                submitter.collector.notice()
    except BaseException:  # Ctrl-C may leave an entry in the list, which the collector must find
        submitter.collector.look_again()
        raise


def withdraw(submitter: Submitting, made: DoneCallback) -> None:
    """Cancels a watch. The list of waiters is replaced instead of changed, because another thread
    may be iterating over it."""
    oid = made.oid
    with submitter.waits_lock:
        listed = submitter.waits.get(oid)
        if listed is None or made not in listed:
            return
        left = [one for one in listed if one is not made]
        if left:
            submitter.waits[oid] = left
        elif submitter.memory.client.usable:
            submitter.end_waits(oid)
