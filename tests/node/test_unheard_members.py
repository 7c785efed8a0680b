"""Nodes that have missed versions of a Group's members, because a manager died that had sent them
to others: nobody waits for what members send of whom their own host has never heard."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from hoplite_mp._common import ids
from hoplite_mp._node.groups.mailbox import QueuedMessage
from hoplite_mp._protocol.group_calls import GroupPart
from hoplite_mp._protocol.local_groups import PeerGroupMessage
from hoplite_mp._protocol.messages import GroupMembers
from tests.support.messages import WHOLE
from tests.support.node_group_calls import NUMBER, RequestingNode
from tests.support.node_harness import HarnessNetwork

if TYPE_CHECKING:
    from collections.abc import Iterator

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


class Net(HarnessNetwork):
    """Nodes that the manager tells of members; `gone` delivers what these have sent each other."""

    def tell(self, number: int, *versions: GroupMembers) -> None:
        for one in versions:
            self.nodes[number].from_manager(one)

    def box(self, number: int, rank: int) -> Any:
        return self.nodes[number].parts.messages.groups[GENERATION].mailboxes[rank]

    def gone(self, number: int, rank: int) -> int:
        """The ranks, as bits, of which that member knows that nothing more comes."""
        self.pump()
        return int(self.box(number, rank).gone)


@pytest.fixture
def net() -> Iterator[Net]:
    made = Net(3)
    yield made
    made.close()


V1 = shown(1, (0, None, None), (1, 0, 0), False)
V2 = shown(2, (0, 1, None), (1, 2, 0), False)
V3 = shown(3, (0, 1, 2), (1, 2, 3), True, first=True)


@pytest.mark.parametrize("since", [1, 3])
def test_left_ranks_are_those_of_the_announced_member(since: int) -> None:
    """The next member of a rank here may be shown without a version between the two."""
    world = RequestingNode()
    world.from_manager(shown(1, (5, NUMBER), (1, 1), False))
    world.known.here[1] = world.slot, world.life
    world.groups.forget_client(world.slot)
    world.from_manager(shown(4, (5, NUMBER), (1, since), True, first=True))
    expected = ({1}, {1}) if since == 1 else (set(), set())
    assert (world.known.left, world.known.died) == expected
    world.close()


def test_node_that_missed_the_formation_is_updated(net: Net) -> None:
    """And whose own member has died meanwhile."""
    net.tell(0, V1, V2, V3)
    net.tell(2, V3)
    net.tell(1, V2)
    net.nodes[1].parts.groups.known[0].left.add(1)
    v4 = shown(4, (0, None, 2), (1, 0, 3), True, (1,), True)
    for node in (0, 1, 2):
        net.tell(node, v4)
    assert net.gone(0, 0) == 0b010
    assert net.gone(2, 2) == 0b010


def test_messages_of_unannounced_members_are_awaited(net: Net) -> None:
    """A node that has missed that they came awaits what others have sent before."""
    net.tell(0, V1)
    net.tell(0, shown(4, (0, None, None), (1, 0, 0), True, (1,), True))
    box = net.box(0, 0)
    assert box.gone == 0
    letter = QueuedMessage(1, 0, 5, [])
    box.add(1, 1, letter)
    assert net.gone(0, 0) == 0b100
    box.ready(letter, 1)
    assert (box.gone, [*box.arrived.values()]) == (0b110, [letter])


def test_node_that_missed_all_versions_is_updated(net: Net) -> None:
    net.tell(0, V1, V2, V3)
    net.tell(1, V2)
    v4 = shown(4, (0, 1, None), (1, 2, 0), True, (), True)
    for node in (0, 1):
        net.tell(node, v4)
    assert net.gone(0, 0) == 0b100


def test_second_member_of_a_node_that_missed_all_versions_is_found(net: Net) -> None:
    """The other one was found by its request."""
    whole = shown(3, (0, 1, 1), (1, 2, 3), True, first=True)
    net.tell(0, V1, V2, whole)
    v4 = shown(4, (0, 1, None), (1, 2, 0), True, (), True)
    for node in (0, 1):
        net.tell(node, v4)
    assert net.gone(0, 0) == 0b100


def test_new_member_missed_by_its_host_is_removed(net: Net) -> None:
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


def test_node_absent_from_later_versions_is_updated(net: Net) -> None:
    """Only two hosts knew of the member on the third one, and that it has gone."""
    v4, v5 = (
        shown(at, (0, 1, None), (1, 2, 0), True, former) for at, former in ((4, (2,)), (5, ()))
    )
    net.tell(0, V1, V2, V3, v4)
    net.tell(1, V2, V3, v4)
    net.tell(0, v5)
    net.tell(1, v5)
    assert net.gone(0, 0) == 0b100


def test_node_that_missed_two_versions_is_updated(net: Net) -> None:
    """Its other member is there as before."""
    early = shown(2, (0, 1, None), (1, 2, 0), False)
    whole = shown(3, (0, 1, 1), (1, 2, 3), True, first=True)
    net.tell(0, V1, early, whole, shown(4, (0, 1, None), (1, 2, 0), True))
    net.tell(1, early)
    v5 = shown(5, (0, 1, None), (1, 2, 0), True, (), True)
    net.tell(0, v5)
    net.tell(1, v5)
    assert net.gone(0, 0) == 0b100


def test_node_that_missed_versions_does_not_end_other_members(net: Net) -> None:
    net.tell(0, V1, V2, V3)
    net.tell(2, V3)
    net.tell(1, V2)
    v4 = shown(4, (0, 1, None), (1, 2, 0), True, (2,), True)
    net.tell(0, v4)
    net.tell(1, v4)  # it has missed one; rank 2 was node 2's, which has not said its end
    assert net.gone(0, 0) == 0
    net.tell(2, v4)
    assert net.gone(0, 0) == 0b100


@pytest.mark.parametrize("lost", [True, False])
def test_messages_of_an_unknown_group_are_dropped_with_their_node(net: Net, lost: bool) -> None:
    """The number of that group is given again to the next one, and its messages are not for it."""
    first, node, _ = net.nodes
    object_id = ids.pack_id(first.host_id, 1 << 33)
    node.receive(first.host_id, PeerGroupMessage(GENERATION, 2, 1, 0, 1, 0, object_id, None, ()))
    if lost:
        node.lose(0)
    net.tell(1, shown(1, (None, 1), (0, 1), False), shown(2, (2, 1), (2, 1), True, first=True))
    assert (object_id in node.parts.imports.by_object) is not lost


@pytest.mark.parametrize("lost", [True, False])
def test_contributions_to_an_unknown_group_are_dropped_with_their_node(
    net: Net, lost: bool
) -> None:
    first, node, _ = net.nodes
    node.receive(first.host_id, GroupPart(GENERATION, 2, 0, (1,), "barrier", "", 0, ()))
    if lost:
        node.lose(0)
    net.tell(1, shown(2, (1, 2), (2, 1), True, first=True))
    assert (0 in node.cluster.group_calls.states[GENERATION].leading.parts) is not lost
