"""What processes and the manager ask of a host's Groups: requests to join, ends of tasks."""

from __future__ import annotations

import pytest

from hoplite_mp._common import ids
from hoplite_mp._protocol.groups import GroupEnd
from hoplite_mp._protocol.messages import (
    GroupClosed,
    GroupGivenUp,
    GroupJoined,
    GroupRefused,
)
from tests.support.node_group_calls import (
    HOST_ID,
    NUMBER,
    OTHER_HOST_ID,
    REQUEST_SLOT,
    RequestingNode,
)
from tests.support.node_ports import deliver


@pytest.fixture
def world() -> RequestingNode:
    return RequestingNode()


def test_a_process_that_joins(world: RequestingNode) -> None:
    request = world.join()
    assert [one.request for one in world.open_joins()] == [request]
    deliver(world.groups, GroupJoined(request, "g", 7, 1, 2, 0, False, False))
    ((slot, reply),) = world.replies
    assert (slot, reply.number, reply.value) == (
        REQUEST_SLOT,
        1,
        (0, 7, 1, False, (NUMBER, REQUEST_SLOT, 3)),
    )
    assert world.known.here == {1: (REQUEST_SLOT, 3)}
    assert not world.open_joins()
    deliver(
        world.groups, GroupJoined(request, "g", 7, 1, 2, 0, False, False)
    )  # by the next manager
    assert len(world.replies) == 1


@pytest.mark.parametrize(("error", "value"), [("value", None), ("ended", "no")])
def test_one_that_is_refused(world: RequestingNode, error: str, value: str | None) -> None:
    deliver(world.groups, GroupRefused(world.join(), "no", error))
    ((_, reply),) = world.replies
    assert (reply.value, reply.error) == (value, "" if value else "no")
    assert world.groups.refused == {"g": "no"}
    assert not world.open_joins()


@pytest.mark.parametrize("joins", [True, False])
def test_the_answer_for_a_process_that_has_died(world: RequestingNode, joins: bool) -> None:
    """Its slot may be another one's, which must not take the answer for one to its own question."""
    request = world.join()
    world.groups.forget_client(REQUEST_SLOT)
    assert not world.open_joins()
    joined = GroupJoined(request, "g", 7, 1, 2, 0, False, False)
    deliver(world.groups, joined if joins else GroupRefused(request, "no"))
    assert not world.replies
    assert not world.known.here
    assert not world.known.board.set_client.called  # type: ignore[attr-defined]


def test_tasks_that_members_wait_for(world: RequestingNode) -> None:
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
    world = RequestingNode()
    deliver(world.groups, GroupClosed("an earlier one", 6, 0))
    assert world.groups.known == {0: world.known}
    world.known.board.set_masks.assert_not_called()  # type: ignore[attr-defined]
    deliver(world.groups, GroupClosed("g", 7, 0))
    assert not world.groups.known
    world.known.board.set_masks.assert_called_once_with(0, 0, True)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("generation", "client", "life", "given_up"),
    [(7, REQUEST_SLOT, 3, True), (6, REQUEST_SLOT, 3, False), (8, REQUEST_SLOT, 3, False),
     (7, REQUEST_SLOT, 2, False),
     (7, REQUEST_SLOT + 1, 3, False)],
)  # fmt: skip
def test_a_member_whose_group_will_never_be_whole_is_woken(
    world: RequestingNode, generation: int, client: int, life: int, given_up: bool
) -> None:
    """And not who has its slot, its rank or its board after it."""
    deliver(world.groups, GroupJoined(world.join(), "g", 7, 1, 2, 0, False, False))
    woken: list[int] = []
    world.groups.tasks.wake = woken.append  # type: ignore[method-assign]
    deliver(world.groups, GroupGivenUp("g", generation, 0, 1, client, life, "nobody comes"))
    assert woken == ([REQUEST_SLOT] if given_up else [])
    assert world.groups.given_up == ({REQUEST_SLOT: {(7, 1): "nobody comes"}} if given_up else {})
    assert world.known.left == ({1} if given_up else set())
    assert (1 in world.known.here) is not given_up


def test_the_next_manager_is_told_of_each_end(world: RequestingNode) -> None:
    """Also of groups of driver threads, of which nothing else is to be remembered: another node may
    not have heard of the end."""
    task = bytes(16)
    ends = [
        GroupEnd("died", 3, (task,), (task,), ((0, 1, 1, 0),)),
        GroupEnd("left", 4, (), (task,), ((0, 1, 1, 0),)),
    ]
    for end in ends:
        deliver(world.groups, GroupClosed(end.name, end.generation, 1, end))
    deliver(world.groups, GroupClosed("of threads", 5, 1, None))
    told = [one for one in world.groups.report() if isinstance(one, GroupEnd)]
    assert told == [*ends, GroupEnd("of threads", 5, (), (), ())]
