"""Applies the options of a task in its worker: priority, resources, `retry_exceptions`. A worker
survives exceptions of tasks. It asks the node whether a task may be retried.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hoplite_mp import _serialize, _tasks
from hoplite_mp._client.functions import Chunked, Raised, RetryingFunction
from hoplite_mp._common.object_states import TASK_COPY, TASK_STREAM
from hoplite_mp._protocol.local import RetryTask
from hoplite_mp._protocol.resources import ReleaseResources, RetainResources

if TYPE_CHECKING:
    from hoplite_mp._client.functions import Exceptions
    from hoplite_mp._client.runtime import Runtime
    from hoplite_mp._worker.ports import OfWorker

__all__ = ["begins", "ended", "exceptions_of", "prepared", "try_again"]


def prepared(
    worker: OfWorker, oid: int, function: Any, args_id: int, inline: bytes, flags: int
) -> Any:
    """The function to call. A chunk whose items may be retried requests each retry from the
    node."""
    if type(function) is not Chunked or not (function.again or function.catches):
        return function
    return function.prepared(_Items(worker, oid, args_id, inline, flags))


class _Items:
    """The items of a chunk."""

    def __init__(self, worker: OfWorker, oid: int, args_id: int, inline: bytes, flags: int) -> None:
        self._worker = worker
        self._oid = oid
        self._sent = oid, args_id, inline, bool(flags & TASK_COPY)

    def may(self, failures: int) -> bool:
        return bool(self._worker.runtime.channel.call(RetryTask(self._oid, failures)).value)

    def args(self, index: int) -> tuple[Any, ...]:
        columns = self._worker.arguments(*self._sent)[0]
        return tuple(column[index] for column in columns)

    def raised(self, error: BaseException) -> Raised:
        text = self._worker.traceback_of(error)
        _serialize.drop_traceback(error)
        return Raised(error, text)

    def cancelled(self) -> bool:
        return any(map(self._worker.tasks.aborted, self._worker.running))


def exceptions_of(worker: OfWorker, function: Any, flags: int) -> Exceptions:
    """The exceptions after which the task or the actor's call is retried."""
    if flags & TASK_STREAM:
        return ()
    if worker.is_actor:
        return worker.again
    return function.again if type(function) is RetryingFunction else ()


def try_again(worker: OfWorker, oid: int) -> bool:
    """Requests a retry of the task from the node. If the node grants the retry, it queues the task
    again, and the task no longer belongs to this worker."""
    granted = bool(worker.runtime.channel.call(RetryTask(oid)).value)
    if granted and worker.is_actor:
        worker.own_again.append(oid)
    elif granted:
        worker.submitter.waiting.ready(oid)  # an enclosing task may be waiting for it
    return granted


RESOURCES: int = _tasks.RESOURCES_FLAG


# A nested task has at least the priority of its parent, because the parent may be waiting for it.
# The node must be informed immediately when resources become used or free.


def begins(runtime: Runtime, oid: int, flags: int) -> None:
    """Called when a task with options begins, before its function is read."""
    submitter = runtime.submitter
    submitter.inherited_priority = max(submitter.queues.ranked.ranks(oid))
    if flags & RESOURCES:
        runtime.running = oid
        if flags & TASK_STREAM:  # the task's result is done before the generator ends
            runtime.channel.call(RetainResources(oid))
        else:
            runtime.tasks.wake_node()  # there is one fewer idle worker


def ended(runtime: Runtime, oid: int, flags: int) -> None:
    """Called when a task with options has ended and its result, or all items of a generator, have
    been written."""
    if flags & RESOURCES:
        runtime.running = 0
        if flags & TASK_STREAM:
            runtime.channel.tell(ReleaseResources(oid))
        else:
            runtime.tasks.wake_node()
