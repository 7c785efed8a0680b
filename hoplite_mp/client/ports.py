"""What the rooms of a process know of its submitter and of its membership in a cluster.

Why it exists: Futures, waits and announcements are made by the submitter, and ask it in turn;
actors, demands and descriptions belong to the membership, and ask that. They are given these
interfaces, so no file needs another one that needs it.
It must never know: who implements them (client/submitter.py, client/runtime.py).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import threading
    from collections import deque
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    from hoplite_mp import _shm, _tasks
    from hoplite_mp.client.calls import OwnCalls
    from hoplite_mp.client.channel import Channel
    from hoplite_mp.client.memory import Memory
    from hoplite_mp.client.pending import Pending
    from hoplite_mp.client.queues import Queues

__all__ = ["Collecting", "Membership", "Submitting", "Waits"]


class Collecting(Protocol):
    """The thread that looks after completions when nobody waits in a call."""

    def arm(self) -> None:
        """Somebody waits with the standard library's means."""

    def disarm(self) -> None:
        """The same does so no more."""

    def start(self) -> None:
        """It runs from here on."""

    def notice(self) -> None:
        """There is something to be looked after now and then."""

    def look_again(self) -> None:
        """Everything must be looked at."""


class Waits(Protocol):
    """How this process waits for its objects."""

    @property
    def run_in_place(self) -> Callable[[int], bool] | None:
        """In a worker: runs that task here if nobody has begun it."""

    @property
    def own_calls(self) -> OwnCalls | None:
        """Of an actor: calls for which it must not wait."""

    def own_waits(self, oids: list[int], awaits: bool = False) -> AbstractContextManager[None]:
        """Around a wait. RuntimeError: it is for a later call of the actor that waits."""

    def wait_done(self, oid: int, deadline: int) -> None:
        """Until the object is done; HopliteTimeoutError at the deadline."""

    def count_blocked(self, change: int) -> None:
        """So many more threads of this worker's task wait."""


class Submitting(Protocol):
    """What sends tasks and looks after their ends, for one process."""

    readers: Any  # threads that read what is elsewhere for event loops; made when first needed

    @property
    def memory(self) -> Memory: ...
    @property
    def client(self) -> _shm.Client: ...
    @property
    def tasks(self) -> _tasks.Tasks: ...
    @property
    def pending(self) -> dict[int, Pending]: ...
    @property
    def told(self) -> deque[Callable[[], None]]: ...
    @property
    def queues(self) -> Queues: ...
    @property
    def collector(self) -> Collecting: ...
    @property
    def waiting(self) -> Waits: ...
    @property
    def waits_lock(self) -> threading.RLock: ...
    @property
    def waits(self) -> dict[int, list[Any]]:
        """Object -> tasks that need it, and whoever wants to be told."""

    @property
    def wants_news(self) -> bool:
        """Somebody must look for completions though nobody waits."""

    def begin_wait(self, oid: int, one: Any) -> None:
        """One more who waits for the object; under the lock."""

    def release(self, oid: int) -> None:
        """It is done: all who wait for it are told."""

    def end_waits(self, oid: int) -> None:
        """Nobody waits for it any more; under the lock."""

    def drain(self) -> None:
        """Looks after everything of this process that has become done."""

    def look_at_all(self) -> None:
        """The same, without being told which."""

    def look_at_others(self) -> None:
        """Dependencies that others own."""

    def wake_told(self) -> None:
        """One wake-up for each who was told something since the last call."""

    def is_done(self, oid: int) -> bool:
        """Has the object's task ended?"""

    def cancel(self, oid: int, force: bool) -> bool:
        """Cancels the task; False: it runs, without force, or has ended."""

    def forget_waiting(self) -> None:
        """Nobody sends what waits for arguments, or for room in a queue."""


class Membership(Protocol):
    """One process's membership in a cluster."""

    @property
    def client(self) -> _shm.Client: ...
    @property
    def tasks(self) -> _tasks.Tasks: ...
    @property
    def channel(self) -> Channel: ...
    @property
    def memory(self) -> Memory: ...
    @property
    def submitter(self) -> Any: ...
    @property
    def running(self) -> int: ...
    @property
    def label(self) -> str: ...
