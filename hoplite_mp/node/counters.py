"""What a node counts, for `stats()` and `c.nodes`; of all nodes when one of them asks.

Why it exists: every node counts for itself; a question goes to all, and is answered when the last
one has, or when the patience ends: a host that hangs must not make the others look so.
It must never know: what users do with the numbers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from hoplite_mp.protocol.local import Reply
from hoplite_mp.protocol.peers import CountersAsked, CountersNow

if TYPE_CHECKING:
    from hoplite_mp.node.main import Node

__all__ = ["Counters"]

# How long other nodes may take to answer. Higher: slow hosts are in the numbers; lower: who asks
# waits less for one that does not answer.
PATIENCE_S = 2.0
CLIENTS_MAX = 256
_UNFINISHED = ("FREED", "WAITING", "QUEUED", "CLAIMED")


@dataclass(slots=True)
class Question:
    """One that a process of this host has asked."""

    slot: int
    number: int  # of the reply
    found: dict[int, dict[str, int]]  # node -> what it counts
    waiting: set[int]  # homes of hosts that have not answered


class Counters:
    """Counts of this node, and questions for those of all."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self.questions: dict[int, Question] = {}
        self._next = 1

    def own(self) -> dict[str, int]:
        """Since this node's start."""
        node = self.node
        client, store, workers = node.client, node.store, node.workers
        client.reclaim_freed()
        store.take_returns()
        store.purge_spilled()
        node.sweeper.collect()
        done = failed = 0
        for number in range(1, CLIENTS_MAX):
            info = client.client_info(number)
            done += info["tasks_done"]
            failed += info["tasks_failed"]
        objects = sum(header["state"] not in _UNFINISHED for header in client.scan())
        sent, received = (0, 0) if node.lan is None else node.lan.links.moved()
        return {
            "tasks_done": done + workers.tasks_done,
            "tasks_failed": failed + workers.tasks_failed + node.sweeper.failed,
            "tasks_retried": node.sweeper.retried,
            "workers_lost": workers.lost,
            "objects": objects,
            "bytes_used": store.used_bytes(),
            "bytes_limit": store.limit,
            "bytes_spilled": store.spill.used,
            "bytes_sent": sent,
            "bytes_received": received,
        }

    def ask(self, slot: int, number: int) -> None:
        """A process wants those of all nodes: {node: {name: count}}."""
        lan = self.node.lan
        homes = set() if lan is None else set(lan.peers.by_home)
        question = Question(slot, number, {self.node.number: self.own()}, homes)
        mine, self._next = self._next, self._next + 1
        self.questions[mine] = question
        for home in list(homes):
            self.node.send_peer(home, CountersAsked(mine))
        self._look(mine)
        if mine in self.questions:
            self.node.after(PATIENCE_S, lambda: self._end(mine))

    def asked(self, home: int, message: CountersAsked) -> None:
        """Another node wants to know."""
        self.node.send_peer(home, CountersNow(message.number, self.own()))

    def told(self, home: int, node: int, message: CountersNow) -> None:
        """Another node's answer."""
        question = self.questions.get(message.number)
        if question is not None and home in question.waiting:
            question.waiting.discard(home)
            question.found[node] = message.counts
            self._look(message.number)

    def lose_peer(self, home: int) -> None:
        """That host will not answer."""
        for number, question in list(self.questions.items()):
            question.waiting.discard(home)
            self._look(number)

    def _look(self, number: int) -> None:
        question = self.questions.get(number)  # None: the last one was lost while it was asked
        if question is not None and not question.waiting:
            self._end(number)

    def _end(self, number: int) -> None:
        question = self.questions.pop(number, None)
        if question is not None:
            found = sorted(question.found.items())
            self.node.reply(question.slot, Reply(question.number, found))
