"""Interfaces between a worker and its parts.

A worker creates its parts for concurrent tasks, generators, retries and worker broadcasts, and
these parts call the worker.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections import deque

    from hoplite_mp import _tasks
    from hoplite_mp._client.functions import Exceptions
    from hoplite_mp._client.memory import Memory
    from hoplite_mp._client.runtime import Runtime
    from hoplite_mp._client.submitter import Submitter
    from hoplite_mp._worker.event_loop import EventLoop
    from hoplite_mp._worker.stdio import OutputRouting

__all__ = ["ConcurrentTasksPort", "OfWorker"]


class ConcurrentTasksPort(Protocol):
    """The tasks and calls in the worker's event loop and threads."""

    slots: _tasks.ConcurrentSlots

    @property
    def loop(self) -> EventLoop:
        """The event loop, which is created when first needed."""

    def limit(self, oid: int, at_ns: int) -> None:
        """Sets the time at which the worker is killed if the task is still running; 0 removes the
        limit."""


class OfWorker(Protocol):
    """One worker."""

    runtime: Runtime
    output_routing: OutputRouting
    memory: Memory
    tasks: _tasks.Tasks
    submitter: Submitter
    pid: int
    pool: int
    max_tasks: int
    done_tasks: int
    is_actor: bool
    again: Exceptions  # exceptions after which an actor's calls are retried
    own_again: list[int]  # the actor's calls that must be retried
    running: list[int]  # the main thread's tasks, each nested in the previous task
    untaken: deque[tuple[int, Any]]  # (result's id, refs inside it), until its submitter holds them

    @property
    def concurrent(self) -> ConcurrentTasksPort: ...

    def may_end(self) -> bool:
        """Whether this worker may exit. An actor's worker may exit only if no calls are left."""

    def housekeeping(self, busy: bool) -> None:
        """Frees unused objects and functions, and checks the connection, between two tasks."""

    def check_line(self) -> None:
        """Exits if the worker's connection to the node is lost."""

    def leave_groups(self, failed: bool) -> None:
        """Leaves the Groups that the finished task has joined."""

    def speak_to(self, output_owner: int) -> None:
        """Sets the output owner for all later output."""

    def prepared(self, oid: int, flags: int) -> tuple[Any, ...]:
        """Returns (function, args, kwargs, exceptions after which the task is retried)."""

    def streamed(self, oid: int, function: Any, args: tuple[Any, ...]) -> tuple[Any, Any]:
        """Returns a function that runs a generator to its end, and the function's arguments."""

    def arguments(
        self, oid: int, args_id: int, inline: bytes, copy: bool
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Reads a task's arguments."""

    def run(self, oid: int) -> None:
        """Runs a task that this worker has claimed."""

    def store(self, oid: int, value: Any, failed: bool) -> bool:
        """Writes a result. Returns whether it is an error."""

    def traceback_of(self, error: BaseException) -> str:
        """The traceback as text, without this library's own frames."""
