"""What a node counts, for `stats()` and `c.nodes`; of all nodes when one of them asks.

Why it exists: every node counts for itself, and a question goes to all.
It must never know: what users do with the numbers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hoplite_mp.protocol.local import Reply
from hoplite_mp.protocol.peers import CountersAsked, CountersNow

if TYPE_CHECKING:
    from hoplite_mp.node.main import Node
    from hoplite_mp.node.questions import Answer

__all__ = ["Counters"]


class Counters:
    """Counts of this node, and questions for those of all."""

    def __init__(self, node: Node) -> None:
        self.node = node

    def own(self) -> dict[str, int]:
        """Since this node's start."""
        node = self.node
        client, store, workers = node.client, node.store, node.workers
        store.unwanted()
        client.reclaim_freed()
        store.take_returns()
        store.purge_spilled()
        node.sweeper.collect()
        done, failed = client.tasks_ended()
        sent = received = 0
        retried, lan = node.sweeper.retried, node.lan
        if lan is not None:
            sent, received = lan.links.moved()
            retried += lan.delegation.retried + lan.recovering.remaking.begun
        return {
            "tasks_done": done + workers.tasks_done,
            "tasks_failed": failed + workers.tasks_failed + node.sweeper.failed,
            "tasks_retried": retried,
            "workers_lost": workers.lost,
            "objects": client.objects(),
            "bytes_used": store.used_bytes(),
            "bytes_limit": store.limit,
            "bytes_spilled": store.spill.used,
            "bytes_sent": sent,
            "bytes_received": received,
            **node.resources.counts(),
        }

    def ask(self, slot: int, number: int) -> None:
        """A process wants those of all nodes: {node: {name: count}}."""
        node = self.node
        own = self.own()
        reply = node.replier(slot)

        def done(found: dict[int, Answer]) -> None:
            counted = {node.number: own}
            for answer in found.values():
                counted[answer.node] = answer.message.counts
            reply(Reply(number, sorted(counted.items())))

        homes = () if node.lan is None else node.lan.peers.by_home
        node.questions.ask(list(homes), CountersAsked, done)

    def asked(self, home: int, message: CountersAsked) -> None:
        """Another node wants to know."""
        self.node.send_peer(home, CountersNow(message.number, self.own()))
