"""The counters of a node, for `stats()` and `c.nodes`, and the collection of all nodes' counters.

A process requests the counters of all nodes from its own node.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hoplite_mp._node.questions import PATIENCE_S
from hoplite_mp._protocol.local import Reply
from hoplite_mp._protocol.peers import CountersQuery, CountersReport

if TYPE_CHECKING:
    from collections.abc import Callable

    from hoplite_mp._node.objects.context import HostContext
    from hoplite_mp._node.questions import Answer
    from hoplite_mp._node.tasks.sweeper import Sweeper
    from hoplite_mp._node.tasks.workers import Workers

__all__ = ["Counters"]


class Counters:
    """This node's counters, and requests for the counters of all nodes."""

    def __init__(self, host: HostContext, sweeper: Sweeper, workers: Workers) -> None:
        self.client = host.client
        self.store = host.store
        self.roster = host.roster
        self.send_peer = host.send_peer
        self.replier = host.replier
        self.questions = host.questions
        self.sweeper = sweeper
        self.workers = workers
        self._more: list[Callable[[], dict[str, int]]] = []

    def add(self, counts: Callable[[], dict[str, int]]) -> None:
        """Registers another component's counters. Counters with the same name are added."""
        self._more.append(counts)

    def own(self) -> dict[str, int]:
        """The counts since the start of this node, and the current sizes. Unneeded memory is freed
        first, so that it is not counted."""
        client, store, workers, sweeper = self.client, self.store, self.workers, self.sweeper
        store.events.drop_unneeded()
        client.reclaim_freed()
        store.take_returns()
        store.purge_spilled()
        sweeper.collect()
        done, failed = client.tasks_ended()
        found = {
            "tasks_done": done + workers.tasks_done,
            "tasks_failed": failed + workers.tasks_failed + sweeper.failed,
            "tasks_retried": sweeper.retried,
            "workers_lost": workers.lost,
            "objects": client.objects(),
            "bytes_used": store.used_bytes(),
            "bytes_limit": store.limit,
            "bytes_spilled": store.spill.used,
            "bytes_sent": 0,
            "bytes_received": 0,
        }
        for counts in self._more:
            for name, count in counts().items():
                found[name] = found.get(name, 0) + count
        return found

    def ask(self, slot: int, number: int) -> None:
        """Replies to a process with the counters of all nodes: {node: {name: count}}."""
        own = self.own()
        reply = self.replier(slot)

        def done(found: dict[int, Answer]) -> None:
            counted = {self.client.number: own}
            for answer in found.values():
                counted[answer.node] = answer.message.counts
            reply(Reply(number, sorted(counted.items())))

        self.questions.ask_all(self.roster.host_ids, CountersQuery, done, PATIENCE_S)

    def asked(self, host_id: int, message: CountersQuery) -> None:
        """Answers another node's request."""
        self.send_peer(host_id, CountersReport(message.number, self.own()))
