"""Announcements: somebody is told, without a thread of his own, that an object is done.

Why it exists: an event loop, and an iteration over what becomes done, wait for many objects and
must not wait for each in a thread. Who looks after completions (`Submitter.drain`, the collector)
tells them, and wakes each of them once when it has looked after all that were done together.
It must never know: what an event loop is, what is done with an object that is done.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from hoplite_mp.client.ports import Submitting

__all__ = ["Watch", "watch", "withdraw"]


class Watch:
    """Stands among the tasks that wait for an object (`Submitting.waits`).

    `tell` is called when the object is done, or never will be because its cluster has ended; in
    whichever thread sees that, and perhaps more than once. It must neither raise nor wait.
    """

    __slots__ = ("missing", "oid", "tell")

    def __init__(self, oid: int, tell: Callable[[], None]) -> None:
        self.oid = oid
        self.tell = tell
        self.missing: set[int] = set()


def watch(submitter: Submitting, oid: int, tell: Callable[[], None]) -> Watch:
    """From now on; at once if it is done. Whoever wants to be told holds the object meanwhile."""
    memory = submitter.memory
    memory.check()
    made = Watch(oid, tell)
    try:
        with submitter.waits_lock:
            first = not submitter.waits
            submitter.begin_wait(oid, made)
        # Looked at after it is listed: its news may have come before that.
        if submitter.tasks.done(oid) or memory.lost is not None:
            submitter.release(oid)
            submitter.wake_told()
        else:
            submitter.collector.start()
            if first:  # later ones are announced by a change of the event word, on which it sleeps
                submitter.collector.notice()
    except BaseException:  # Ctrl-C: what stands in the list is to be found again
        submitter.collector.look_again()
        raise
    return made


def withdraw(submitter: Submitting, made: Watch) -> None:
    """Nobody wants to be told any more. The list of those who wait is replaced, not changed:
    another thread may be going through it."""
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
