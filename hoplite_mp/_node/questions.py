"""Questions to other nodes, each answered by one message that carries the question's number.

All open questions of this node are in one table, so that the loss of a host ends every question to
that host. A question may also have a deadline, because one hanging host must not block a command
that asks all hosts.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from hoplite_mp._node.ports import LoopPort
    from hoplite_mp._node.roster import Roster
    from hoplite_mp._protocol.messages import Member
    from hoplite_mp._protocol.peers import PeerMessage

__all__ = ["PATIENCE_S", "Answer", "Questions"]

# Timeout of users' questions to other nodes (stats, traces, dumps). Higher: slow hosts still answer
# in time. Lower: the user waits less for an unresponsive host.
PATIENCE_S = 2.0


@dataclass(frozen=True, slots=True)
class Answer:
    """One node's answer, with times on this host's monotonic clock."""

    node: int
    message: Any
    asked_ns: int
    came_ns: int


@dataclass(frozen=True, slots=True)
class _Question:
    host_id: int  # id of the host that was asked
    done: Callable[[Answer | None], None]
    asked_ns: int


class Questions:
    """The unanswered questions of this node."""

    def __init__(
        self, loop: LoopPort, roster: Roster, send: Callable[[int, PeerMessage], bool]
    ) -> None:
        self.loop = loop
        self.roster = roster
        self.send = send
        self.open: dict[int, _Question] = {}  # by number
        self._last = 0

    def ask(
        self,
        host_id: int,
        make: Callable[[int], PeerMessage],
        done: Callable[[Answer | None], None],
        patience_s: float | None = None,
    ) -> None:
        """Sends `make(number)` to the host `host_id`. Calls `done` with the answer, or with None if
        the host is lost or does not answer within `patience_s` seconds."""
        self._last += 1
        number = self._last
        self.open[number] = _Question(host_id, done, self.loop.now_ns())
        if not self.send(host_id, make(number)):
            self._end(number, None)
        elif patience_s is not None:
            self.loop.call_later(patience_s, lambda: self._end(number, None))

    def ask_all(
        self,
        host_ids: Iterable[int],
        make: Callable[[int], PeerMessage],
        done: Callable[[dict[int, Answer]], None],
        patience_s: float | None = None,
    ) -> None:
        """Sends a question to several hosts. Calls `done` with the answers by host id once each
        host has answered, is lost, or has timed out."""
        self.ask_each(dict.fromkeys(host_ids, make), done, patience_s)

    def ask_each(
        self,
        makes: Mapping[int, Callable[[int], PeerMessage]],
        done: Callable[[dict[int, Answer]], None],
        patience_s: float | None = None,
    ) -> None:
        """Like `ask_all`, but with a different message for each host. makes: functions that make
        the messages, by host id."""
        waiting = set(makes)
        found: dict[int, Answer] = {}

        def collect(host_id: int, answer: Answer | None) -> None:
            waiting.discard(host_id)
            if answer is not None:
                found[host_id] = answer
            if not waiting:
                done(found)

        if not waiting:
            done(found)
        for host_id, make in makes.items():
            self.ask(host_id, make, functools.partial(collect, host_id), patience_s)

    def answered(self, host_id: int, message: Any) -> bool:
        """Handles an answer from the host. Returns whether the question was still open."""
        question, node = self.open.get(message.number), self.roster.number_of(host_id)
        if question is None or question.host_id != host_id or node is None:
            return False
        self._end(message.number, Answer(node, message, question.asked_ns, self.loop.now_ns()))
        return True

    def peer_lost(self, member: Member) -> None:
        """Ends the questions to a lost host."""
        for number in [
            number for number, one in self.open.items() if one.host_id == member.host_id
        ]:
            self._end(number, None)

    def _end(self, number: int, answer: Answer | None) -> None:
        question = self.open.pop(number, None)
        if question is not None:
            question.done(answer)
