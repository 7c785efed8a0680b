"""Ways over other nodes: who is asked for one, and what is done when that one is of no help."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from hoplite_mp._node.peers.relays import ANSWER_S, ASKED_MAX, Relays
from hoplite_mp._node.questions import Questions
from hoplite_mp._node.roster import Roster
from hoplite_mp._protocol.messages import Member
from hoplite_mp._protocol.peers import RelayAsked, RelayOpened
from tests.support.lost_peers import gone
from tests.support.node_ports import ManualLoop

REMOTE = 1009  # the host id of the node that cannot be reached


def member(node: int) -> Member:
    return Member(node, 1, 1000 + node, 2, f"host{node}", (f"10.0.0.{node}:1",), 1 << 30)


class Side:
    """A node that knows nine others, its lent ports, and what it sends."""

    def __init__(self) -> None:
        self.loop = ManualLoop()
        self.roster = Roster()
        for node in range(1, 10):
            self.roster.add(member(node))
        self.sent: list[tuple[int, Any]] = []
        self.found: list[list[Any]] = []
        self.lent: list[int] = []
        self.reached = True
        self.questions = Questions(self.loop, self.roster, self.send)
        connections: Any = SimpleNamespace(
            is_reached=lambda endpoints: self.reached, lend=self.lend
        )
        host: Any = SimpleNamespace(loop=self.loop, roster=self.roster, questions=self.questions)
        self.relays = Relays(host, connections, self)

    def send(self, host_id: int, message: Any) -> bool:
        if host_id in self.roster.by_host_id:
            self.sent.append((host_id, message))
        return host_id in self.roster.by_host_id

    def is_member(self, host: str) -> bool:
        return True

    def lend(self, endpoints: Any, may: Any) -> Any:
        self.lent.append(7000 + len(self.lent))
        return SimpleNamespace(port=self.lent[-1], close=self.lent.clear)

    def find(self) -> None:
        self.relays.find(self.roster.by_host_id[REMOTE], self.found.append)

    def answer(self, port: int) -> int:
        """Of the one that was asked last."""
        host_id, asked = self.sent[-1]
        assert asked == RelayAsked(asked.number, REMOTE)
        self.questions.answered(host_id, RelayOpened(asked.number, port))
        return host_id

    def lose(self, host_id: int) -> None:
        self.roster.remove(host_id - 1000)
        self.relays.lose_peer(host_id)
        self.questions.peer_lost(gone(host_id))


@pytest.fixture
def side() -> Side:
    return Side()


def test_the_second_one_has_a_way(side: Side) -> None:
    side.find()
    side.find()  # somebody else waits for the same way
    assert [host_id for host_id, _ in side.sent] == [1001]
    side.answer(0)
    assert side.answer(7001) == 1002
    assert side.found[0] == side.found[1] == side.relays.way(REMOTE)
    (end,) = side.relays.way(REMOTE)
    assert end.sockaddr[:2] == ("10.0.0.2", 7001)
    side.lose(1002)
    assert side.relays.way(REMOTE) == []


def test_nobody_has_one(side: Side) -> None:
    side.find()
    assert [side.answer(0) for _ in range(ASKED_MAX)] == [1001, 1002, 1003]
    assert side.found == [[]]


def test_who_is_silent_or_lost_is_not_waited_for(side: Side) -> None:
    side.find()
    _, late = side.sent[-1]
    side.loop.pass_time(ANSWER_S)
    assert side.sent[-1][0] == 1002
    assert not side.questions.answered(1001, RelayOpened(late.number, 7001))
    side.lose(1002)
    assert side.answer(7003) == 1003
    assert len(side.found[0]) == 1


def test_the_node_that_is_looked_for_is_lost(side: Side) -> None:
    side.find()
    side.lose(REMOTE)
    assert side.found == [[]]
    side.answer(7001)
    assert side.relays.way(REMOTE) == []
    assert len(side.found) == 1


def test_a_port_is_lent_once_to_all(side: Side) -> None:
    for asker, number in ((1001, 5), (1002, 6)):
        side.relays.asked(asker, RelayAsked(number, REMOTE))
    side.loop.call_all()
    side.relays.asked(1003, RelayAsked(7, REMOTE))
    assert side.sent == [(1000 + n, RelayOpened(4 + n, 7000)) for n in (1, 2, 3)]
    side.lose(REMOTE)
    assert side.lent == []


def test_who_looks_for_a_way_itself_or_does_not_get_there_has_none(side: Side) -> None:
    side.reached = False
    side.relays.asked(1002, RelayAsked(5, REMOTE))
    side.loop.call_all()
    assert side.sent == [(1002, RelayOpened(5, 0))]
    side.find()
    side.relays.asked(1002, RelayAsked(6, REMOTE))
    assert side.sent[-1] == (1002, RelayOpened(6, 0))
