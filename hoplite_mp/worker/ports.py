"""What the parts of a worker know of the whole.

Why it exists: tasks that run beside one another, generators, retries and rounds are parts of a
worker, which makes them, and ask it in turn.
It must never know: who implements it (worker/main.py).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections import deque

    from hoplite_mp import _tasks
    from hoplite_mp.client.functions import Exceptions
    from hoplite_mp.client.memory import Memory
    from hoplite_mp.client.runtime import Runtime
    from hoplite_mp.client.submitter import Submitter
    from hoplite_mp.worker.event_loop import EventLoop
    from hoplite_mp.worker.voice import Voice

__all__ = ["OfWorker", "Several"]


class Several(Protocol):
    """What runs in the worker's event loop and threads."""

    slots: _tasks.Beside

    @property
    def loop(self) -> EventLoop:
        """Made when it is first needed."""

    def limit(self, oid: int, at_ns: int) -> None:
        """The worker is killed at that moment, unless it is told otherwise; 0: never."""


class OfWorker(Protocol):
    """One worker."""

    runtime: Runtime
    voice: Voice
    memory: Memory
    tasks: _tasks.Tasks
    submitter: Submitter
    pool: int
    max_tasks: int
    done_tasks: int
    is_actor: bool
    again: Exceptions  # of an actor's calls: after these they are tried again
    own_again: list[int]  # those of its calls that are
    untaken: deque[tuple[int, Any]]  # generators' results that their readers do not hold yet

    @property
    def beside(self) -> Several: ...

    def may_end(self) -> bool:
        """Has an actor no calls left?"""

    def keep_house(self, busy: bool) -> None:
        """Between two tasks."""

    def check_line(self) -> None:
        """Ends the worker if it has lost its node."""

    def leave_groups(self) -> None:
        """The task that has run is a member no more."""

    def speak_to(self, audience: int) -> None:
        """Who hears what is printed from here on."""

    def prepared(self, oid: int, flags: int) -> tuple[Any, ...]:
        """What is to be called, with which arguments, and after which exceptions again."""

    def streamed(self, oid: int, function: Any, args: tuple[Any, ...]) -> tuple[Any, Any]:
        """The same of a generator."""

    def arguments(
        self, args_id: int, inline: bytes, copy: bool
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Reads a task's arguments."""

    def run(self, oid: int) -> None:
        """Runs a task that this worker has claimed."""

    def store(self, oid: int, value: Any, failed: bool) -> bool:
        """Writes a result; returns whether it is an error."""

    def traceback_of(self, error: BaseException) -> str:
        """In words, without this library's own frames."""
