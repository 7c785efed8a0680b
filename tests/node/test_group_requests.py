"""What processes and the manager ask of a host's Groups: requests to join, ends of tasks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from hoplite_mp._common import ids
from hoplite_mp._node.groups.group_state import Known
from hoplite_mp._node.groups.groups import HostGroups
from hoplite_mp._protocol.groups import GroupEnd
from hoplite_mp._protocol.local import GroupJoin
from hoplite_mp._protocol.messages import (
    GroupClosed,
    GroupGivenUp,
    GroupJoined,
    GroupJoinRequested,
    GroupMembers,
    GroupRefused,
    GroupTasksAsked,
    GroupTasksOver,
)
from tests.protocol.samples import WHOLE

HOST_ID, OTHER_HOST_ID, NUMBER, SLOT = 77, 78, 4, 9
MEMBERS = GroupMembers("g", 7, 0, 2, 1, 0, False, 1, (5, None), WHOLE)


class World:
    """One node; `over`: tasks that are done, `again`: and will be run once more."""

    def __init__(self) -> None:
        self.said: list[Any] = []
        self.replies: list[tuple[int, Any]] = []
        self.over: set[int] = set()
        self.again: set[int] = set()
        self.parked: list[int] = []
        host: Any = SimpleNamespace(
            store=None,
            client=SimpleNamespace(
                host_id=HOST_ID, number=NUMBER, client_info=lambda slot: {"generation": 3}
            ),
            tasks=SimpleNamespace(done=self.over.__contains__, park=self.park, unpark=self.unpark),
            send_manager=self.said.append,
            reply=lambda slot, reply: self.replies.append((slot, reply)),
        )
        events: Any = SimpleNamespace(
            task_of=lambda slot, call: (b"", 0),
            team_of=lambda slot, size: b"",
            runs_again=self.again.__contains__,
        )
        self.groups = HostGroups(host, mock.Mock(), mock.Mock(), events)
        self.known = self.groups.known[0] = Known("g", 7, mock.Mock(), MEMBERS)

    def park(self, oids: list[int]) -> list[int]:
        self.parked += oids
        return oids

    def unpark(self, oids: list[int]) -> None:
        for oid in oids:
            self.parked.remove(oid)

    def join(self) -> int:
        """The number of the request at the manager."""
        self.groups.join(GroupJoin("g", 2, None), SLOT, 1, 64)
        return int(self.said.pop().request)

    def open_joins(self) -> list[Any]:
        """Those of which a new manager is told."""
        return [one for one in self.groups.report() if isinstance(one, GroupJoinRequested)]

    def ask(self, *tasks: bytes) -> list[bytes]:
        """Which of them the manager is told to be over now."""
        self.groups.receive(GroupTasksAsked(tasks))
        return self.told()

    def told(self) -> list[bytes]:
        found = [task for one in self.said for task in one.tasks]
        assert all(isinstance(one, GroupTasksOver) and one.node == NUMBER for one in self.said)
        self.said.clear()
        return found


@pytest.fixture
def world() -> World:
    return World()


def test_a_process_that_joins(world: World) -> None:
    request = world.join()
    assert [one.request for one in world.open_joins()] == [request]
    world.groups.receive(GroupJoined(request, "g", 7, 1, 2, 0, False, False))
    ((slot, reply),) = world.replies
    assert (slot, reply.number, reply.value) == (SLOT, 1, (0, 7, 1, False, (NUMBER, SLOT, 3)))
    assert world.known.here == {1: (SLOT, 3)}
    assert not world.open_joins()
    world.groups.receive(GroupJoined(request, "g", 7, 1, 2, 0, False, False))  # by the next manager
    assert len(world.replies) == 1


@pytest.mark.parametrize(("error", "value"), [("value", None), ("ended", "no")])
def test_one_that_is_refused(world: World, error: str, value: str | None) -> None:
    world.groups.receive(GroupRefused(world.join(), "no", error))
    ((_, reply),) = world.replies
    assert (reply.value, reply.error) == (value, "" if value else "no")
    assert world.groups.refused == {"g": "no"}
    assert not world.open_joins()


@pytest.mark.parametrize("joins", [True, False])
def test_the_answer_for_a_process_that_has_died(world: World, joins: bool) -> None:
    """Its slot may be another one's, which must not take the answer for one to its own question."""
    request = world.join()
    world.groups.forget_client(SLOT)
    assert not world.open_joins()
    joined = GroupJoined(request, "g", 7, 1, 2, 0, False, False)
    world.groups.receive(joined if joins else GroupRefused(request, "no"))
    assert not world.replies
    assert not world.known.here
    assert not world.known.board.set_client.called  # type: ignore[attr-defined]


def test_tasks_that_members_wait_for(world: World) -> None:
    """Who is asked of again while one still runs waits with the first; each is told once."""
    ran, runs, returns, far = (
        ids.pack_id(host_id, oid)
        for host_id, oid in ((HOST_ID, 1), (HOST_ID, 2), (HOST_ID, 3), (OTHER_HOST_ID, 1))
    )
    world.over.update({1, 3})
    world.again.add(3)
    assert world.ask(ran, runs, returns, far) == [ran, far]
    assert world.ask(runs) == []
    assert sorted(world.parked) == [2, 3]
    world.groups.poll()
    assert world.told() == []
    world.over.add(2)
    assert world.ask(runs) == [runs]
    world.again.clear()
    world.groups.poll()
    assert world.told() == [returns]
    assert not world.parked


def test_a_group_that_is_closed_late_does_not_close_the_next_one_on_its_board() -> None:
    """The manager died between the end of the first and the beginning of the second: its successor
    says both at once, and the first one's end may come last."""
    world = World()
    world.groups.receive(GroupClosed("an earlier one", 6, 0))
    assert world.groups.known == {0: world.known}
    world.known.board.set_masks.assert_not_called()  # type: ignore[attr-defined]
    world.groups.receive(GroupClosed("g", 7, 0))
    assert not world.groups.known
    world.known.board.set_masks.assert_called_once_with(0, 0, True)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("generation", "client", "life", "given_up"),
    [(7, SLOT, 3, True), (6, SLOT, 3, False), (8, SLOT, 3, False), (7, SLOT, 2, False),
     (7, SLOT + 1, 3, False)],
)  # fmt: skip
def test_a_member_whose_group_will_never_be_whole_is_woken(
    world: World, generation: int, client: int, life: int, given_up: bool
) -> None:
    """And not who has its slot, its rank or its board after it."""
    world.groups.receive(GroupJoined(world.join(), "g", 7, 1, 2, 0, False, False))
    woken: list[int] = []
    world.groups.tasks.wake = woken.append  # type: ignore[method-assign]
    world.groups.receive(GroupGivenUp("g", generation, 0, 1, client, life, "nobody comes"))
    assert woken == ([SLOT] if given_up else [])
    assert world.groups.given_up == ({SLOT: {(7, 1): "nobody comes"}} if given_up else {})
    assert world.known.left == ({1} if given_up else set())
    assert (1 in world.known.here) is not given_up


def test_the_next_manager_is_told_of_each_end(world: World) -> None:
    """Also of groups of driver threads, of which nothing else is to be remembered: another node may
    not have heard of the end."""
    task = bytes(16)
    ends = [
        GroupEnd("died", 3, (task,), (task,), ((0, 1, 1, 0),)),
        GroupEnd("left", 4, (), (task,), ((0, 1, 1, 0),)),
    ]
    for end in ends:
        world.groups.receive(GroupClosed(end.name, end.generation, 1, end))
    world.groups.receive(GroupClosed("of threads", 5, 1, None))
    told = [one for one in world.groups.report() if isinstance(one, GroupEnd)]
    assert told == [*ends, GroupEnd("of threads", 5, (), (), ())]
