"""Messages of members on other hosts: for whom they are when the members change."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from hoplite_mp._common import ids
from hoplite_mp._common.object_states import DRIVER_SLOT, FIRST_SLOT
from hoplite_mp._protocol.local import GroupMessageAck
from hoplite_mp._protocol.local_groups import PeerGroupMessage, PeerGroupMessageAck
from hoplite_mp._protocol.messages import GroupMembers
from tests.support.messages import WHOLE
from tests.support.node_harness import NodeHarness, member

if TYPE_CHECKING:
    from collections.abc import Iterator

ME, OTHER = 4, member(5)


class World(NodeHarness):
    """A node with a worker that is a member; another member is on another node."""

    def __init__(self) -> None:
        super().__init__([OTHER], number=ME, workers=1)

    def show(self, version: int, since: tuple[int, ...]) -> None:
        nodes = OTHER.node, ME
        self.from_manager(
            GroupMembers("g", 7, 0, 2, 0b11, 0, True, version, nodes, WHOLE, since=since)
        )
        self.parts.groups.known[0].here[1] = FIRST_SLOT, 1
        self.describe("the message")

    def hear(self, version: int) -> None:
        object_id = ids.pack_id(OTHER.host_id, 1 << 33)
        self.receive(OTHER.host_id, PeerGroupMessage(7, version, 1, 0, 1, 0, object_id, None, ()))
        self.describe("the message")

    @property
    def arrived(self) -> int:
        return len(self.parts.messages.groups[7].mailboxes[1].arrived)

    @property
    def told(self) -> list[int]:
        """Numbers of the messages that the sender is told to have arrived."""
        return [one.number for _, one in self.sent if isinstance(one, PeerGroupMessageAck)]


@pytest.fixture
def world() -> Iterator[World]:
    made = World()
    yield made
    made.close()


@pytest.mark.parametrize(("since", "count"), [((1, 2), 1), ((1, 3), 0)])
def test_message_for_an_unread_version_goes_to_the_right_member(
    world: World, since: tuple[int, ...], count: int
) -> None:
    """The manager has died before it told this node; a sender had read it, and has sent. If the
    rank has another member since then, the message was for the one before it."""
    world.show(3, since)
    world.hear(2)
    assert (world.arrived, world.told) == (count, [1])


def test_message_for_a_later_version_waits_for_it(world: World) -> None:
    world.show(1, (1, 1))
    world.hear(2)
    assert world.arrived == 0
    world.show(2, (1, 1))
    assert (world.arrived, world.told) == (1, [1])


@pytest.mark.parametrize("asker", ["the member", "another process", "a former member"])
def test_only_the_member_acknowledges_its_messages(world: World, asker: str) -> None:
    """Not a process that asks for a rank which nobody of this host holds any more."""
    world.show(1, (1, 1))
    world.hear(1)
    assert world.arrived == 1
    if asker == "a former member":
        del world.parts.groups.known[0].here[1]
    slot = DRIVER_SLOT if asker == "another process" else FIRST_SLOT
    world.ask(slot, GroupMessageAck(7, 1, 1), 0)
    assert world.arrived == (0 if asker == "the member" else 1)
