"""What processes and the manager ask of a host's Groups: requests to join, ends of tasks."""

from __future__ import annotations

from typing import TYPE_CHECKING
from unittest import mock

import pytest

from hoplite_mp._common import ids
from hoplite_mp._protocol.groups import GroupEnd
from hoplite_mp._protocol.messages import (
    GroupClosed,
    GroupJoined,
    GroupMemberRemoved,
    GroupRefused,
    GroupTasksQuery,
)
from tests.support.node_group_calls import NUMBER, RequestingNode

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def world() -> Iterator[RequestingNode]:
    made = RequestingNode()
    yield made
    made.close()


def test_join_request_is_answered_once(world: RequestingNode) -> None:
    request = world.request_join()
    assert [one.request for one in world.open_joins()] == [request]
    joined = GroupJoined(request, "g", 7, 1, 2, 0, False, False)
    world.from_manager(joined)
    ((slot, reply),) = world.replies()
    assert (slot, reply.number) == (world.slot, 1)
    assert reply.value == (0, 7, 1, True, (NUMBER, world.slot, world.life))
    assert world.known.here == {1: (world.slot, world.life)}
    assert not world.open_joins()
    world.from_manager(joined)  # by the next manager
    assert not world.replies()


@pytest.mark.parametrize(("error", "value"), [("value", None), ("ended", "no")])
def test_refused_join_is_answered_with_the_error(
    world: RequestingNode, error: str, value: str | None
) -> None:
    world.from_manager(GroupRefused(world.request_join(), "no", error))
    ((_, reply),) = world.replies()
    assert (reply.value, reply.error) == (value, "" if value else "no")
    assert world.groups.refused == {"g": "no"}
    assert not world.open_joins()


@pytest.mark.parametrize("joins", [True, False])
def test_join_reply_for_a_dead_process_is_dropped(world: RequestingNode, joins: bool) -> None:
    """Its slot may be another one's, which must not take the answer for one to its own question."""
    request = world.request_join()
    world.groups.forget_client(world.slot)
    assert not world.open_joins()
    joined = GroupJoined(request, "g", 7, 1, 2, 0, False, False)
    world.from_manager(joined if joins else GroupRefused(request, "no"))
    assert not world.replies()
    assert not world.known.here
    assert world.known.board.member(1)[3] == -1


def test_end_of_an_awaited_task_is_reported_once(world: RequestingNode) -> None:
    """Who is asked of again while one still runs waits with the first; each is told once."""
    worker = world.process()
    tasks = [worker.submit() for _ in range(3)]
    ran, runs, returns = (ids.pack_id(world.host_id, one.oid) for one in tasks)
    far, again = ids.pack_id(world.host_id + 1, 1), {tasks[2].oid}
    world.node_events.runs_again = again.__contains__  # type: ignore[method-assign]

    def end(oid: int) -> None:
        assert worker.tasks.claim(oid)
        worker.finish(oid, None)

    def asked(*tasks: bytes) -> list[bytes]:
        world.from_manager(GroupTasksQuery(tasks))
        return world.told()

    end(tasks[0].oid)
    end(tasks[2].oid)
    assert asked(ran, runs, returns, far) == [ran, far]
    assert asked(runs) == []
    assert set(world.groups.awaited) == {runs, returns}
    world.poll()
    assert world.told() == []
    end(tasks[1].oid)
    assert asked(runs) == [runs]
    again.clear()
    world.poll()
    assert world.told() == [returns]
    assert not world.groups.awaited


def test_late_close_does_not_close_the_next_group_on_the_board(
    world: RequestingNode,
) -> None:
    """The manager died between the end of the first and the beginning of the second: its successor
    says both at once, and the first one's end may come last."""
    world.from_manager(GroupClosed("an earlier one", 6, 0))
    assert world.groups.known == {0: world.known}
    assert world.known.board.look()[:3] == (False, 1, 0)
    world.from_manager(GroupClosed("g", 7, 0))
    assert not world.groups.known
    assert world.known.board.look()[:3] == (True, 0, 0)


@pytest.mark.parametrize(
    ("generation", "slots_on", "life", "given_up"),
    [(7, 0, 0, True), (6, 0, 0, False), (8, 0, 0, False), (7, 0, 1, False), (7, 1, 0, False)],
)
def test_member_of_a_group_that_cannot_fill_is_woken(
    world: RequestingNode, generation: int, slots_on: int, life: int, given_up: bool
) -> None:
    """And not who has its slot, its rank or its board after it. life, slots_on: how much later."""
    world.from_manager(GroupJoined(world.request_join(), "g", 7, 1, 2, 0, False, False))
    tasks = world.groups.tasks = mock.Mock(wraps=world.node_tasks)
    client = world.slot + slots_on, world.life + life
    world.from_manager(GroupMemberRemoved("g", generation, 0, 1, *client, "nobody comes"))
    assert tasks.wake.call_args_list == ([mock.call(world.slot)] if given_up else [])
    assert world.groups.given_up == ({world.slot: {(7, 1): "nobody comes"}} if given_up else {})
    assert world.known.left == ({1} if given_up else set())
    assert (1 in world.known.here) is not given_up


def test_ends_of_groups_are_reported_to_the_next_manager(world: RequestingNode) -> None:
    """Also of groups of driver threads, of which nothing else is to be remembered: another node may
    not have heard of the end."""
    task = bytes(16)
    ends = [
        GroupEnd("died", 3, (task,), (task,), ((0, 1, 1, 0),)),
        GroupEnd("left", 4, (), (task,), ((0, 1, 1, 0),)),
    ]
    for end in ends:
        world.from_manager(GroupClosed(end.name, end.generation, 1, end))
    world.from_manager(GroupClosed("of threads", 5, 1, None))
    told = [one for one in world.groups.report() if isinstance(one, GroupEnd)]
    assert told == [*ends, GroupEnd("of threads", 5, (), (), ())]
