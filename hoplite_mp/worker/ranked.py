"""What a worker does around a task with a priority, or with resources.

Why it exists: tasks that such a task sends must count at least as much as it does, because it may
wait for them; and the node learns at once that resources are in use, or free again.
It must never know: how a task runs, who shares out resources.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hoplite_mp import _tasks
from hoplite_mp.client.kinds import FLAG_STREAM
from hoplite_mp.protocol.resources import GiveBack, KeepForStream

if TYPE_CHECKING:
    from hoplite_mp.client.runtime import Runtime

__all__ = ["begins", "ended"]

RESOURCES: int = _tasks.RESOURCES_FLAG


def begins(runtime: Runtime, oid: int, flags: int) -> None:
    """Before its function is read."""
    submitter = runtime.submitter
    submitter.floor = max(submitter.queues.ranked.ranks(oid))
    if flags & RESOURCES:
        runtime.running = oid
        if flags & FLAG_STREAM:  # its header is done before its generator is
            runtime.channel.call(KeepForStream(oid))
        else:
            runtime.tasks.wake_node()  # a worker less is free


def ended(runtime: Runtime, oid: int, flags: int) -> None:
    """Its result is written; of a generator, all of it."""
    if flags & RESOURCES:
        runtime.running = 0
        if flags & FLAG_STREAM:
            runtime.channel.tell(GiveBack(oid))
        else:
            runtime.tasks.wake_node()
