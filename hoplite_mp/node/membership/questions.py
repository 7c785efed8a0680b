"""Questions to other nodes, answered by message, each with a deadline.

Why it exists: what is asked of all nodes is answered when the last one has, or when the patience
ends: a host that hangs must not make the others look so, and a host that is lost is not waited for.
It must never know: what is asked, what becomes of the answers.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from hoplite_mp.node.objects.context import HostContext
    from hoplite_mp.protocol.peers import PeerMessage

__all__ = ["PATIENCE_S", "Answer", "Questions"]

# How long other nodes may take to answer. Higher: slow hosts are heard; lower: who asks waits less
# for one that does not answer.
PATIENCE_S = 2.0


@dataclass(frozen=True, slots=True)
class Answer:
    """Of one node. Times are those of this host's monotonic clock."""

    node: int
    message: Any
    asked_ns: int
    came_ns: int


@dataclass(slots=True)
class _Question:
    waiting: set[int]  # homes of hosts that have not answered
    done: Callable[[dict[int, Answer]], None]
    asked_ns: int
    found: dict[int, Answer] = field(default_factory=dict)  # by home


class Questions:
    """All that this node has asked and not heard all answers to."""

    def __init__(self, host: HostContext) -> None:
        self.loop = host.loop
        self.roster = host.roster
        self.send_peer = host.send_peer
        self.open: dict[int, _Question] = {}
        self._next = 1

    def ask(
        self,
        homes: Iterable[int],
        make: Callable[[int], PeerMessage],
        done: Callable[[dict[int, Answer]], None],
        patience_s: float | None = PATIENCE_S,
    ) -> None:
        """Sends `make(number)` to these hosts; `done` gets the answers that came, by home. patience
        None: until all have answered, or are lost."""
        self.ask_each(dict.fromkeys(homes, make), done, patience_s)

    def ask_each(
        self,
        makes: Mapping[int, Callable[[int], PeerMessage]],
        done: Callable[[dict[int, Answer]], None],
        patience_s: float | None = PATIENCE_S,
    ) -> None:
        """The same, with a message of its own for each host. makes: by home."""
        number, self._next = self._next, self._next + 1
        waiting = set(makes)
        question = self.open[number] = _Question(waiting, done, self.loop.now_ns())
        for home, make in makes.items():
            if not self.send_peer(home, make(number)):
                waiting.discard(home)
        self._look(number)
        if patience_s is not None and self.open.get(number) is question:
            self.loop.call_later(patience_s, lambda: self._end(number))

    def told(self, home: int, message: Any) -> bool:
        """An answer; its `number` says to what. False: nobody waits for it any more."""
        question, node = self.open.get(message.number), self.roster.number_of(home)
        if question is None or home not in question.waiting or node is None:
            return False
        question.waiting.discard(home)
        question.found[home] = Answer(node, message, question.asked_ns, self.loop.now_ns())
        self._look(message.number)
        return True

    def lose_peer(self, home: int) -> None:
        """That host will not answer."""
        for number, question in list(self.open.items()):
            question.waiting.discard(home)
            self._look(number)

    def _look(self, number: int) -> None:
        question = self.open.get(number)  # None: the last one was lost while it was asked
        if question is not None and not question.waiting:
            self._end(number)

    def _end(self, number: int) -> None:
        question = self.open.pop(number, None)
        if question is not None:
            question.done(question.found)
