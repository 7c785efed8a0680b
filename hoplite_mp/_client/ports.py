"""Interfaces to a process's submitter and membership, for modules that these two use.

The submitter creates Futures, waits and watches, which call the submitter. The membership creates
actors, demands and descriptions, which call the membership. These modules import only the
interfaces, so there are no circular imports.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import threading
    from collections import deque
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    from hoplite_mp import _shm, _tasks
    from hoplite_mp._client.calls import OwnCalls
    from hoplite_mp._client.channel import Channel
    from hoplite_mp._client.failures import Failures
    from hoplite_mp._client.memory import Memory
    from hoplite_mp._client.queues import Pending, Queues, Settles

__all__ = ["Collecting", "MembershipPort", "Submitting", "WaitsPort"]


class Collecting(Protocol):
    """The thread that processes completions when no call waits for them."""

    def arm(self) -> None:
        """Records a waiter from the standard library."""

    def disarm(self) -> None:
        """Removes a waiter from the standard library."""

    def start(self) -> None:
        """Starts the thread."""

    def notice(self) -> None:
        """Makes the thread check for completions periodically."""

    def look_again(self) -> None:
        """Makes the thread check all pending objects."""

    def call_back(self) -> None:
        """Makes the thread call the callbacks of finished Futures."""


class WaitsPort(Protocol):
    """How this process waits for its objects."""

    @property
    def run_in_place(self) -> Callable[[int], bool] | None:
        """Runs a task in this worker if no other worker has begun it."""

    @property
    def own_calls(self) -> OwnCalls | None:
        """Refuses an actor's wait for a later call to the same actor."""

    def own_waits(self, oids: list[int], awaits: bool = False) -> AbstractContextManager[None]:
        """A context manager around a wait. Raises RuntimeError if the wait would never end, because
        it is for a later call to the same actor."""

    def wait_done(self, oid: int, deadline: int) -> None:
        """Waits until the object is done. Raises HopliteTimeoutError at the deadline."""

    def count_blocked(self, change: int) -> None:
        """Adds `change` to the number of threads in this worker that are waiting inside a task."""


class Submitting(Protocol):
    """Sends tasks and processes their completions, for one process."""

    # Threads that read values that an event loop cannot read immediately; created when first
    # needed.
    readers: Any

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
    def ended_futures(self) -> deque[Settles]:
        """Futures whose callbacks have not been called yet."""

    @property
    def queues(self) -> Queues: ...
    @property
    def collector(self) -> Collecting: ...
    @property
    def failures(self) -> Failures: ...
    @property
    def waiting(self) -> WaitsPort: ...
    @property
    def waits_lock(self) -> threading.RLock: ...
    @property
    def waits(self) -> dict[int, list[Any]]:
        """Object -> the tasks that need it, and the callbacks to call when it is done."""

    @property
    def wants_news(self) -> bool:
        """Whether completions must be processed even if no call is waiting."""

    def begin_wait(self, oid: int, one: Any) -> None:
        """Adds a task or watch that waits for the object. Called under the lock."""

    def release(self, oid: int) -> None:
        """Notifies all waiters of an object that is done."""

    def end_waits(self, oid: int) -> None:
        """Stops watching an object that has no more waiters. Called under the lock."""

    def drain(self) -> None:
        """Processes all completions of this process."""

    def look_at_all(self) -> None:
        """Like `drain`, but checks all pending objects, not only the completions that the tables
        report."""

    def look_at_others(self) -> None:
        """Processes dependencies that other processes own."""

    def wake_waiters(self) -> None:
        """Wakes every waiter that was notified since the last call, once."""

    def call_back(self) -> None:
        """Calls the callbacks of finished Futures."""

    def is_done(self, oid: int) -> bool:
        """Whether the object is done."""

    def cancel(self, oid: int, force: bool) -> bool:
        """Cancels the task. Returns False if it has ended, or is running and `force` is False."""

    def forget_waiting(self) -> None:
        """Drops tasks that are waiting for arguments or for space in a queue. They will not be
        sent."""


class MembershipPort(Protocol):
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
