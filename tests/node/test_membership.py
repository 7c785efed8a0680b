"""The members as the manager has named them, and what a node says of itself to the others."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from hoplite_mp._node.manager_link.membership import GONE_SHOWN_S, NodeMembership
from hoplite_mp._node.roster import Roster
from hoplite_mp._protocol.local import GoneNodes
from hoplite_mp._protocol.messages import Member
from hoplite_mp._protocol.peers import WorkersNow
from tests.support.node_ports import ManualLoop

OTHERS = {11: 1, 22: 2}


class World:
    """One node that has joined with two workers, beside two others."""

    def __init__(self) -> None:
        self.loop = ManualLoop()
        self.sent: list[tuple[int, Any]] = []
        self.replies: list[Any] = []
        host: Any = SimpleNamespace(
            loop=self.loop,
            client=SimpleNamespace(number=0, host_id=77),
            store=None,
            roster=Roster(),
            send_peer=lambda host_id, message: self.sent.append((host_id, message)),
            reply=lambda slot, reply: self.replies.append(reply.value),
        )
        start: Any = SimpleNamespace(cluster=b"", certificate=None)
        nobody: Any = None
        self.membership = NodeMembership(host, nobody, nobody, 2, start)
        for host_id, number in OTHERS.items():
            member = Member(number, 1, host_id, 4, host=f"host {number}")
            host.roster.add(member)
            self.membership.came(member)

    def gone(self) -> Any:
        self.replies.clear()
        request: Any = SimpleNamespace(number=1, ask=GoneNodes())
        self.membership.asked_gone(3, request)
        return self.replies.pop()


def test_others_are_told_when_the_workers_are_other_ones_than_they_know() -> None:
    world = World()
    for count, told in ((2, False), (3, True), (3, False), (2, True), (2, False)):
        world.sent.clear()
        world.membership.workers_are(count)
        assert world.sent == [(host_id, WorkersNow(count)) for host_id in OTHERS if told]


def test_a_node_that_leaves_says_nothing_of_its_workers() -> None:
    world = World()
    world.membership.roster.leaves = True
    world.membership.workers_are(5)
    assert not world.sent


def test_hosts_that_have_gone_and_how_long_ago() -> None:
    world = World()
    assert world.gone() == []
    world.membership.went(2)
    world.loop.pass_time(5.0)
    world.membership.went(1)
    assert world.membership.went(1) is None  # it was not there any more
    world.loop.pass_time(2.5)
    assert world.gone() == [(2, "host 2", 7.5, False), (1, "host 1", 2.5, False)]
    world.loop.pass_time(GONE_SHOWN_S - 5.0)
    assert world.gone() == [(1, "host 1", GONE_SHOWN_S - 2.5, False)]
    world.loop.pass_time(5.0)
    assert world.gone() == []


def test_gone_hosts_that_announced_their_end_have_left() -> None:
    world = World()
    world.membership.roster.leaving.add(22)  # it has told the other nodes
    world.membership.went(2)
    world.membership.went(1)
    world.membership.has_left(1)  # the manager has told them
    assert world.gone() == [(2, "host 2", 0.0, True), (1, "host 1", 0.0, True)]


def test_a_program_that_only_looked_in_is_no_host_that_has_gone() -> None:
    world = World()
    for number, stays in ((3, False), (4, True)):
        world.membership.came(Member(number, 1, 10 + number, 0, host="asks", stays=stays))
        assert world.membership.went(number) is not None
    assert world.gone() == [(4, "asks", 0.0, False)]
