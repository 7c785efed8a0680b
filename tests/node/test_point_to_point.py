"""Messages of members on other hosts: for whom they are when the members change."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from hoplite_mp._common.object_states import STATE
from hoplite_mp._node.groups.mailbox import PointToPoint
from hoplite_mp._protocol.local import GroupReceived, Request
from hoplite_mp._protocol.local_groups import GroupSent
from hoplite_mp._protocol.messages import GroupMembers
from tests.support.messages import WHOLE

ME, OTHER, OBJECT = 4, 5, bytes(16)


class World:
    """One node with a member; `taken`: numbers that it has told the sender it has."""

    def __init__(self) -> None:
        self.taken: list[int] = []
        host: Any = mock.Mock()
        host.client = SimpleNamespace(number=ME, host_id=77, state=lambda oid: STATE["SEALED"])
        host.roster = SimpleNamespace(by_number={OTHER: SimpleNamespace(host_id=78)})
        host.send_peer = lambda host_id, message: self.taken.append(message.number)
        hold = SimpleNamespace(oid=1)
        host.imports.ask = lambda wanted, held: held([hold for _ in wanted])
        host.remote_objects = {}
        self.messages = PointToPoint(host)
        self.known: Any = SimpleNamespace(left=set(), here={1: (9, 3)}, board=mock.Mock())

    def show(self, version: int, since: tuple[int, ...]) -> None:
        shown = GroupMembers("g", 7, 0, 2, 0b11, 0, True, version, (OTHER, ME), WHOLE, since=since)
        self.messages.changed(shown, self.known)

    def receive(self, version: int, number: int) -> None:
        sent = GroupSent(7, version, number, 0, 1, 0, OBJECT, None, ())
        self.messages.receive(OTHER, sent)

    @property
    def arrived(self) -> int:
        return len(self.messages.groups[7].mailboxes[1].arrived)


@pytest.mark.parametrize(("since", "count"), [((1, 2), 1), ((1, 3), 0)])
def test_a_version_of_the_members_that_this_node_has_never_read(
    since: tuple[int, ...], count: int
) -> None:
    """The manager has died before it told this node; a sender had read it, and has sent. If the
    rank has another member since then, the message was for the one before it."""
    world = World()
    world.show(3, since)
    world.receive(2, 1)
    assert (world.arrived, world.taken) == (count, [1])


def test_a_version_that_this_node_has_yet_to_read() -> None:
    world = World()
    world.show(1, (1, 1))
    world.receive(2, 1)
    assert world.arrived == 0
    world.show(2, (1, 1))
    assert (world.arrived, world.taken) == (1, [1])


@pytest.mark.parametrize("slot", [0, 1, 9])
def test_only_the_member_itself_says_what_it_has_received(slot: int) -> None:
    """Not a process that asks for a rank which nobody of this host holds any more."""
    world = World()
    world.show(1, (1, 1))
    world.receive(1, 1)
    assert world.arrived == 1
    if slot != 9:
        del world.known.here[1]
    world.messages.received(slot, Request(0, 0, GroupReceived(7, 1, 1)))
    assert world.arrived == (0 if slot == 9 else 1)
