"""Nodes that have missed versions of a Group's members, because a manager died that had sent them
to others: nobody waits for what members send of whom their own host has never heard."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from hoplite_mp._common.object_states import STATE
from hoplite_mp._node.groups.group_calls import MultiHostCalls
from hoplite_mp._node.groups.mailbox import PointToPoint, QueuedMessage
from hoplite_mp._protocol.group_calls import GroupPart
from hoplite_mp._protocol.local_groups import GroupSent
from hoplite_mp._protocol.messages import GroupMembers
from tests.support.lost_peers import gone
from tests.support.messages import WHOLE
from tests.support.node_group_calls import NUMBER, REQUEST_SLOT, RequestingNode
from tests.support.node_ports import NoEngineCalls, deliver

GENERATION = 7


def shown(
    version: int,
    nodes: tuple[int | None, ...],
    since: tuple[int, ...],
    formed: bool = True,
    former: tuple[int, ...] = (),
    first: bool = False,
) -> GroupMembers:
    alive = sum(1 << rank for rank, node in enumerate(nodes) if node is not None)
    about = "g", GENERATION, 0, len(nodes), alive, 0, formed, version, nodes, WHOLE, former, first
    return GroupMembers(*about, since=since)


class Net:
    """Messages between members of some nodes; `gone` delivers what these have sent each other."""

    def __init__(self, *numbers: int) -> None:
        self.nodes: dict[int, PointToPoint] = {}
        self.known: dict[int, Any] = {}
        self.links: list[tuple[int, int, Any]] = []
        for number in numbers:
            host: Any = mock.Mock()
            host.client = SimpleNamespace(number=number, host_id=number)
            others = {n: SimpleNamespace(host_id=n) for n in numbers}
            host.roster = SimpleNamespace(by_number=others)
            host.send_peer = lambda to, message, number=number: self.send(number, to, message)
            self.nodes[number] = PointToPoint(host)
            self.known[number] = SimpleNamespace(left=set(), here={}, board=mock.Mock())

    def send(self, number: int, to: int, message: Any) -> bool:
        self.links.append((number, to, message))
        return True

    def tell(self, number: int, *versions: GroupMembers) -> None:
        for one in versions:
            self.nodes[number].changed(one, self.known[number])

    def gone(self, number: int, rank: int) -> int:
        """The ranks, as bits, of which that member knows that nothing more comes."""
        links, self.links = self.links, []
        for sender, to, message in links:
            self.nodes[to].receive(sender, message)
        return self.nodes[number].groups[GENERATION].mailboxes[rank].gone


V1 = shown(1, (0, None, None), (1, 0, 0), False)
V2 = shown(2, (0, 1, None), (1, 2, 0), False)
V3 = shown(3, (0, 1, 2), (1, 2, 3), True, first=True)


@pytest.mark.parametrize("since", [1, 3])
def test_ranks_that_were_left_are_those_of_the_member_that_was_shown(since: int) -> None:
    """The next member of a rank here may be shown without a version between the two."""
    world = RequestingNode()
    world.known.shown = shown(1, (5, NUMBER), (1, 1), False)
    world.known.here[1] = REQUEST_SLOT, 3
    world.groups.forget_client(REQUEST_SLOT)
    deliver(world.groups, shown(4, (5, NUMBER), (1, since), True, first=True))
    expected = ({1}, {1}) if since == 1 else (set(), set())
    assert (world.known.left, world.known.died) == expected


def test_a_node_that_has_missed_that_the_group_is_whole() -> None:
    """And whose own member has died meanwhile."""
    net = Net(0, 1, 2)
    net.tell(0, V1, V2, V3)
    net.tell(2, V3)
    net.tell(1, V2)
    net.known[1].left = {1}
    v4 = shown(4, (0, None, 2), (1, 0, 3), True, (1,), True)
    for node in (0, 1, 2):
        net.tell(node, v4)
    assert net.gone(0, 0) == 0b010
    assert net.gone(2, 2) == 0b010


def test_what_members_have_sent_who_left_unheard() -> None:
    """A node that has missed that they came awaits what others have sent before."""
    net, asked = Net(0, 1), []
    net.nodes[0].questions = SimpleNamespace(  # type: ignore[assignment]
        ask_all=lambda hosts, make, done: asked.append((list(hosts), done))
    )
    net.tell(0, V1)
    net.tell(0, shown(4, (0, None, None), (1, 0, 0), True, (1,), True))
    box = net.nodes[0].groups[GENERATION].mailboxes[0]
    ((hosts, answered),) = asked
    assert (hosts, box.gone) == ([1], 0)
    letter = QueuedMessage(1, 0, 5, [])
    box.add(1, 1, letter)
    answered({})
    assert box.gone == 0b100
    box.ready(letter, 1)
    assert (box.gone, [*box.arrived.values()]) == (0b110, [letter])


def test_a_node_that_has_never_heard_of_the_group() -> None:
    net = Net(0, 1, 2)
    net.tell(0, V1, V2, V3)
    net.tell(1, V2)
    v4 = shown(4, (0, 1, None), (1, 2, 0), True, (), True)
    for node in (0, 1):
        net.tell(node, v4)
    assert net.gone(0, 0) == 0b100


def test_one_of_two_members_of_a_node_that_has_never_heard() -> None:
    """The other one was found by its request."""
    net = Net(0, 1)
    whole = shown(3, (0, 1, 1), (1, 2, 3), True, first=True)
    net.tell(0, V1, V2, whole)
    v4 = shown(4, (0, 1, None), (1, 2, 0), True, (), True)
    for node in (0, 1):
        net.tell(node, v4)
    assert net.gone(0, 0) == 0b100


def test_a_newcomer_of_whom_its_host_has_never_heard() -> None:
    net = Net(0, 1, 2)
    net.tell(0, V1, V2, V3)
    net.tell(1, V2, V3)
    net.tell(2, V3)
    v4 = shown(4, (0, 1, None), (1, 2, 0), True, (2,))
    for node in (0, 1, 2):
        net.tell(node, v4)
    assert net.gone(0, 0) == 0b100
    for node in (0, 2):
        net.tell(node, shown(5, (0, 1, 1), (1, 2, 5), True, (2,)))
    v6 = shown(6, (0, 1, None), (1, 2, 0), True, (2,))
    for node in (0, 1, 2):
        net.tell(node, v6)
    assert net.gone(0, 0) == 0b100


def test_a_node_that_no_later_version_names() -> None:
    """Only two hosts knew of the member on the third one, and that it has gone."""
    net = Net(0, 1, 2)
    v4, v5 = (
        shown(at, (0, 1, None), (1, 2, 0), True, former) for at, former in ((4, (2,)), (5, ()))
    )
    net.tell(0, V1, V2, V3, v4)
    net.tell(1, V2, V3, v4)
    net.tell(0, v5)
    net.tell(1, v5)
    assert net.gone(0, 0) == 0b100


def test_a_node_that_has_missed_two_versions_between() -> None:
    """Its other member is there as before."""
    net = Net(0, 1, 2)
    early = shown(2, (0, 1, None), (1, 2, 0), False)
    whole = shown(3, (0, 1, 1), (1, 2, 3), True, first=True)
    net.tell(0, V1, early, whole, shown(4, (0, 1, None), (1, 2, 0), True))
    net.tell(1, early)
    v5 = shown(5, (0, 1, None), (1, 2, 0), True, (), True)
    net.tell(0, v5)
    net.tell(1, v5)
    assert net.gone(0, 0) == 0b100


def test_a_node_that_has_missed_versions_does_not_end_members_of_others() -> None:
    net = Net(0, 1, 2)
    net.tell(0, V1, V2, V3)
    net.tell(2, V3)
    net.tell(1, V2)
    v4 = shown(4, (0, 1, None), (1, 2, 0), True, (2,), True)
    net.tell(0, v4)
    net.tell(1, v4)  # it has missed one; rank 2 was node 2's, which has not said its end
    assert net.gone(0, 0) == 0
    net.tell(2, v4)
    assert net.gone(0, 0) == 0b100


def test_what_a_lost_node_has_sent_in_a_group_that_it_alone_had_heard_of() -> None:
    """The number of that group is given again to the next one, and its messages are not for it."""
    net = Net(0, 1, 2)
    node: Any = net.nodes[1]
    node.client.state = lambda oid: STATE["SEALED"]
    node.imports.ask = lambda wanted, held: held([SimpleNamespace(oid=1) for _ in wanted])
    node.remote_objects = {}
    node.receive(0, GroupSent(GENERATION, 2, 1, 0, 1, 0, bytes(16), None, ()))
    node.peer_lost(gone(node=0))
    whole = shown(2, (2, 1), (2, 1), True, first=True)
    net.tell(1, shown(1, (None, 1), (0, 1), False), whole)
    assert not node.groups[GENERATION].mailboxes[1].arrived


def test_what_a_lost_node_has_given_to_a_call_of_such_a_group() -> None:
    host: Any = mock.Mock()
    host.client = SimpleNamespace(number=1, host_id=1)
    host.roster = SimpleNamespace(by_number={n: SimpleNamespace(host_id=n) for n in (1, 2)})
    calls = MultiHostCalls(host, mock.Mock(), mock.Mock(), NoEngineCalls())  # type: ignore[arg-type]
    calls.receive(0, GroupPart(GENERATION, 2, 0, (1,), "barrier", "", 0, ()))
    calls.peer_lost(gone(node=0))
    known: Any = mock.Mock(here={0: (9, 3)})
    calls.changed(shown(2, (1, 2), (2, 1), True, first=True), known)
    assert 0 not in calls.states[GENERATION].leading.parts
