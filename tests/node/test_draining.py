"""A node that leaves: when it says that nothing of it is needed any more."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from hoplite_mp._common.object_states import KIND_OPERATION, KIND_TASK, NODE_SLOT
from hoplite_mp._node.roster import Roster
from hoplite_mp._node.tasks.draining import POLL_S, Draining
from hoplite_mp._protocol.messages import Member
from hoplite_mp._protocol.peers import Leaving
from tests.support.node_ports import ManualLoop

NUMBER, OTHER = 3, 11
DRIVER, WORKER = 1, 2


class World:
    """A node beside one other, with the headers that a test puts there."""

    def __init__(self) -> None:
        self.loop = ManualLoop()
        self.headers: list[dict[str, Any]] = []
        self.sent: dict[int, int] = {}  # tasks, and when they were sent
        self.inbound_tasks: Any = mock.MagicMock(by_task={}, recall_all=lambda host_id: None)
        self.inbound_oids: set[int] = set()
        self.inbound_tasks.__contains__.side_effect = self.inbound_oids.__contains__
        self.imported: dict[int, None] = {}
        self.told: list[tuple[int, Any]] = []
        self.left: list[Any] = []
        roster = Roster()
        roster.add(Member(1, 1, OTHER, 4))
        host: Any = SimpleNamespace(
            loop=self.loop,
            client=SimpleNamespace(number=NUMBER, scan=lambda: self.headers),
            tasks=SimpleNamespace(submitted_ns=self.sent.__getitem__),
            store=None,
            remote_objects=None,
            imports=SimpleNamespace(by_oid=self.imported),
            roster=roster,
            send_peer=lambda host_id, message: self.told.append((host_id, message)),
        )
        workers: Any = SimpleNamespace(all={WORKER: None})
        self.standing = True
        events: Any = SimpleNamespace(leaves_now=lambda: None, drained=self.drained)
        self.draining = Draining(host, self.inbound_tasks, workers, events)

    def drained(self) -> bool:
        if self.standing:
            self.left.append(NUMBER)
        return self.standing

    def add(self, state: str, kind: int = KIND_TASK, owner: int = DRIVER) -> dict[str, Any]:
        header = {"id": len(self.headers), "kind": kind, "state": state, "owner": owner}
        self.headers.append(header)
        self.sent[header["id"]] = self.loop.now_ns()
        return header

    def begin(self) -> None:
        self.draining.begin()
        assert self.told == [(OTHER, Leaving())]
        self.draining.evacuated(OTHER)

    def has_left(self) -> bool:
        self.loop.pass_time(2 * POLL_S)
        return self.left == [NUMBER]


def test_a_node_that_was_not_let_in_leaves_when_it_is() -> None:
    """The manager died after it had told the others of this node, one of which removes it."""
    world = World()
    world.standing = False
    world.begin()
    world.draining.evacuated(OTHER)
    world.loop.pass_time(3 * POLL_S)
    assert world.left == []
    world.standing = True
    world.loop.pass_time(2 * POLL_S)
    assert world.left == [NUMBER]


def test_the_others_need_something_first() -> None:
    world = World()
    world.draining.begin()
    assert not world.has_left()
    world.draining.evacuated(OTHER)
    assert world.has_left()


@pytest.mark.parametrize("runs_here", [True, False])
def test_a_task_that_has_gone_back_to_its_owner_is_not_waited_for(runs_here: bool) -> None:
    """Its header stays for those who hold its result here, and it may run for hours elsewhere."""
    world = World()
    task = world.add("CLAIMED", owner=NODE_SLOT)
    world.imported[task["id"]] = None
    if runs_here:
        world.inbound_oids.add(task["id"])
    world.begin()
    assert world.has_left() is not runs_here


@pytest.mark.parametrize("state", ["WAITING", "QUEUED", "CLAIMED"])
def test_tasks_of_its_processes_end_first(state: str) -> None:
    world = World()
    task = world.add(state)
    world.begin()
    assert not world.has_left()
    task["state"] = "SEALED"
    assert world.has_left()


def test_tasks_that_are_done_and_what_is_no_task_keep_nobody() -> None:
    world = World()
    for owner in (DRIVER, WORKER, NODE_SLOT):
        world.add("SEALED", owner=owner)
        world.add("CLAIMED", KIND_OPERATION, owner)
    world.begin()
    assert world.has_left()


@pytest.mark.parametrize(("owner", "waits"), [(DRIVER, False), (WORKER, True), (NODE_SLOT, True)])
def test_what_a_driver_sends_after_that_goes_with_it(owner: int, waits: bool) -> None:
    world = World()
    world.inbound_tasks.by_task[b"t"] = None
    world.begin()
    world.loop.pass_time(1.0)
    world.add("QUEUED", owner=owner)
    world.inbound_tasks.by_task.clear()
    assert world.has_left() is not waits
