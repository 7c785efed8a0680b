"""What a worker does around a task that has a priority or resources.

Why it exists: tasks submitted by such a task must have at least its level, because it may wait for
them; and the node must learn at once that resources are in use, or free again.
It must never know: how a task runs, how resources are assigned.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hoplite_mp import _tasks
from hoplite_mp._client.function_kind import FLAG_STREAM
from hoplite_mp._protocol.resources import GiveBack, KeepForStream

if TYPE_CHECKING:
    from hoplite_mp._client.runtime import Runtime

__all__ = ["begins", "ended"]

RESOURCES: int = _tasks.RESOURCES_FLAG


def begins(runtime: Runtime, oid: int, flags: int) -> None:
    """To be called before the task's function is read."""
    submitter = runtime.submitter
    submitter.floor = max(submitter.queues.ranked.ranks(oid))
    if flags & RESOURCES:
        runtime.running = oid
        if flags & FLAG_STREAM:  # the header, which is done sooner, cannot tell its end
            runtime.channel.call(KeepForStream(oid))
        else:
            runtime.tasks.wake_node()  # there is one idle worker less


def ended(runtime: Runtime, oid: int, flags: int) -> None:
    """To be called when the result is written; for a generator, all of its items."""
    if flags & RESOURCES:
        runtime.running = 0
        if flags & FLAG_STREAM:
            runtime.channel.tell(GiveBack(oid))
        else:
            runtime.tasks.wake_node()
