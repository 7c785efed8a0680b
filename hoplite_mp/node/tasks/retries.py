"""Tasks that run again because of what they have raised (`options(retry_exceptions=)`).

Why it exists: such an exception costs one of the task's `retries`, as a worker's death does, and
only the node takes a task from its worker and queues it again.
It must never know: exceptions.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hoplite_mp.node.objects.store import NODE_SLOT
from hoplite_mp.protocol.local import Reply

if TYPE_CHECKING:
    from hoplite_mp.node.objects.context import HostContext
    from hoplite_mp.node.tasks.sweeper import Sweeper
    from hoplite_mp.node.tasks.workers import Workers
    from hoplite_mp.protocol.local import Request

__all__ = ["Retries"]


class Retries:
    """Of this host's workers."""

    def __init__(self, host: HostContext, sweeper: Sweeper, workers: Workers) -> None:
        self.client = host.client
        self.reply = host.reply
        self.sweeper = sweeper
        self.workers = workers

    def ask(self, slot: int, request: Request) -> None:
        """One more try, if any is left."""
        ask: Any = request.ask
        oid = ask.task
        header = self.client.inspect(oid)
        claimed = (header["id"], header["state"], header["claimant"]) == (oid, "CLAIMED", slot)
        granted = False
        if claimed and ask.failures:
            granted = ask.failures <= header["retries_left"]
        elif claimed and header["retries_left"]:
            # A task whose submitter is gone is in a table of the node's: nobody waits for it.
            wanted = header["owner"] != NODE_SLOT or self.sweeper.above.is_guest(oid)
            granted = wanted and self.client.requeue(oid, slot)
        if granted:
            self.sweeper.retried += 1
        if granted and not ask.failures:
            pool = self.workers.pools.get(header["pool"])
            if pool is None or pool.broken:
                self.workers.fail(oid, "its pool is closed" if pool is None else pool.broken)
            elif not pool.actor:
                self.workers.post_queued(pool.number, [oid])
        self.reply(slot, Reply(request.number, granted))
