"""Parts, members and commits of Group calls, and nodes that take part in them."""

from __future__ import annotations

from typing import Any
from unittest import mock

import numpy as np

from hoplite_mp import _serialize, _tasks
from hoplite_mp._node.groups.engine_commit import EngineCallsOwner
from hoplite_mp._node.groups.group_calls import MultiHostCalls
from hoplite_mp._node.groups.group_state import Known
from hoplite_mp._node.groups.plan_sources import BYTES_MIN
from hoplite_mp._node.objects.remote_objects import payload_layout
from hoplite_mp._planner.tree_shapes import cut
from hoplite_mp._protocol.group_calls import GroupCommit, GroupPart, Piece
from hoplite_mp._protocol.local import GroupJoin
from hoplite_mp._protocol.messages import (
    GroupJoinRequested,
    GroupMembers,
    GroupTasksEnded,
)
from tests.support.messages import WHOLE
from tests.support.node_harness import NodeHarness, member
from tests.support.shm_host import ShmHost

HERE, GONE, OTHER = 0, 5, 3
GENERATION, VERSION, CALL = 7, 3, 1


def group_members(
    *nodes: int | None, version: int = VERSION, former: tuple[int, ...] = (), first: bool = False
) -> GroupMembers:
    alive = sum(1 << rank for rank, node in enumerate(nodes) if node is not None)
    about = "g", GENERATION, 0, len(nodes), alive, 0, True, version, nodes, WHOLE, former, first
    return GroupMembers(*about)


PART_ELEMENTS = BYTES_MIN // 4


def striped_members(size: int) -> GroupMembers:
    nodes = tuple(range(size))
    stripes = cut((node, 1.0) for node in nodes)
    return GroupMembers("g", 1, 0, size, (1 << size) - 1, 0, True, 1, nodes, stripes)


def group_part(
    rank: int, count: int = PART_ELEMENTS, kind: str = "allreduce", op: str = "sum"
) -> GroupPart:
    encoded = _serialize.encode(np.zeros(count, np.float32))
    layout = payload_layout(memoryview(encoded.tobytes()))
    name = bytes([rank + 1] * 16)
    pieces = (Piece(rank, -1, encoded.nbytes, None, name, layout),)
    return GroupPart(1, 1, 0, (rank,), kind, op, 0, pieces)


MEMBER_SLOT = 4


class FollowingNode:
    """A node that does not lead: OTHER does, with rank 0; its own member has rank 1. `sent`: to
    other nodes."""

    def __init__(self) -> None:
        self.host = ShmHost()
        self.engine = mock.Mock()
        self.links = mock.Mock(engine=self.engine, tls=False)
        context = mock.Mock(
            client=self.host.node, tasks=self.host.node_tasks, clients={MEMBER_SLOT: None}
        )
        context.roster.by_number = {n: mock.Mock(host_id=n) for n in (OTHER, GONE)}
        self.sent: list[Any] = []
        context.send_peer = lambda host_id, message: self.sent.append((host_id, message))
        results = mock.Mock()
        results.commit.return_value = 1, []
        results.pin.return_value = []
        results.part.side_effect = lambda members, call, asks: alltoall_part(call)
        self.engine_calls = EngineCallsOwner(context, self.links)
        self.calls = MultiHostCalls(context, results, results, self.engine_calls)
        board = _tasks.Board(self.host.node_tasks, 0)
        shown = group_members(OTHER, HERE, GONE, first=True)
        board.reset(3, GENERATION)
        self.known = Known("g", GENERATION, board, shown, {1: (MEMBER_SLOT, 1)})
        self.change(shown)
        self.sent.clear()

    def change(self, shown: GroupMembers) -> None:
        self.known.shown = shown
        self.calls.changed(shown, self.known)

    def commit(self, call: int, opens: int) -> None:
        about = GENERATION, call, (0, 1, 2), "barrier", "", 0
        self.calls.receive(OTHER, GroupCommit(*about, leader=OTHER, to=HERE, opens=opens))

    def says(self, *event: Any) -> None:
        (take,) = self.links.when_coll.call_args.args
        take(event)


def alltoall_part(call: int) -> GroupPart:
    return GroupPart(GENERATION, VERSION, call, (1,), "alltoall", "", 0, ())


def commit_record() -> bytes:
    """Of call 4, as an engine writes it: the sum of all ranks' parts."""
    total = _serialize.encode(np.array([6])).tobytes()
    head = np.array([4, 0b111], np.uint64).tobytes() + bytes([1, 0, 4, 0])
    head += np.array([1, 64 + len(total), 0], np.uint32).tobytes()
    place = np.array([0, len(total), 64, 0], np.uint32).tobytes()
    return (head + place).ljust(64, b"\0") + total


NUMBER = 4
TWO_MEMBERS = GroupMembers("g", 7, 0, 2, 1, 0, False, 1, (5, None), WHOLE)


class RequestingNode(NodeHarness):
    """A node with a process that asks for rank 1; rank 0 is on another node."""

    def __init__(self) -> None:
        super().__init__([member(5, 0)], number=NUMBER)
        self.slot = self.process().slot
        self.life = self.node.client_info(self.slot)["generation"]
        self.groups = self.parts.groups
        self.from_manager(TWO_MEMBERS)
        self.known = self.groups.known[0]
        self.reports.clear()

    def request_join(self) -> int:
        """The number of the request at the manager."""
        self.ask(self.slot, GroupJoin("g", 2, None))
        return int(self.reports.pop().request)

    def open_joins(self) -> list[Any]:
        """Those of which a new manager is told."""
        return [one for one in self.groups.report() if isinstance(one, GroupJoinRequested)]

    def told(self) -> list[bytes]:
        """The tasks of which the manager has been told that they are over."""
        found = [task for one in self.reports for task in one.tasks]
        assert all(isinstance(one, GroupTasksEnded) and one.node == NUMBER for one in self.reports)
        self.reports.clear()
        return found
