"""When the calls of a Group are the engine's, and what waits until it has given them back."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from unittest import mock

import msgspec
import numpy as np
import pytest

from hoplite_mp import _engine, _serialize, _tasks
from hoplite_mp._node.groups.group_calls import MultiHostCalls
from hoplite_mp._node.groups.group_decisions import decide
from hoplite_mp._node.groups.group_state import Known
from hoplite_mp._node.groups.small_calls import EngineCallsOwner
from hoplite_mp._protocol.group_calls import (
    GroupCommit,
    GroupGo,
    GroupPart,
    GroupSmall,
    GroupSync,
)
from hoplite_mp._protocol.local import GroupCall
from tests.cext.host import Host
from tests.node.test_group_commits import GENERATION, GONE, HERE, OTHER, VERSION, members
from tests.node.test_speculative_start import members as of_one_rank_each
from tests.node.test_speculative_start import part as large

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hoplite_mp._protocol.messages import GroupMembers

SLOT = 4


class Node:
    """A node that does not lead: OTHER does, with rank 0; its own member has rank 1. `sent`: to
    other nodes."""

    def __init__(self) -> None:
        self.host = Host()
        self.engine = mock.Mock()
        self.links = mock.Mock(engine=self.engine, tls=False)
        context = mock.Mock(client=self.host.node, tasks=self.host.node_tasks, clients={SLOT: None})
        context.roster.by_number = {n: mock.Mock(host_id=n) for n in (OTHER, GONE)}
        self.sent: list[Any] = []
        context.send_peer = lambda host_id, message: self.sent.append((host_id, message))
        results = mock.Mock()
        results.commit.return_value = 1, []
        results.pin.return_value = []
        results.part.side_effect = lambda members, call, asks: part(call)
        self.small = EngineCallsOwner(context, self.links)
        self.calls = MultiHostCalls(context, results, self.small)
        board = _tasks.Board(self.host.node_tasks, 0)
        shown = members(OTHER, HERE, GONE, first=True)
        board.reset(3, GENERATION)
        self.known = Known("g", GENERATION, board, shown, {1: (SLOT, 1)})
        self.change(shown)
        self.sent.clear()

    def change(self, shown: GroupMembers) -> None:
        self.known.shown = shown
        self.calls.changed(shown, self.known)

    def commit(self, call: int, opens: int) -> None:
        about = GENERATION, call, (0, 1, 2), "barrier", "", 0
        self.calls.receive(OTHER, GroupCommit(*about, leader=OTHER, to=HERE, opens=opens))

    def says(self, *event: Any) -> None:
        (take,) = self.links.when_small.call_args.args
        take(event)


@pytest.fixture
def node() -> Iterator[Node]:
    made = Node()
    yield made
    made.host.close()


def part(call: int) -> GroupPart:
    return GroupPart(GENERATION, VERSION, call, (1,), "alltoall", "", 0, ())


def ask(call: int) -> GroupCall:
    return GroupCall(GENERATION, 1, call, "alltoall", "", 0, [b"a", b"b", b"c"])


def record() -> bytes:
    """Of call 4, as an engine writes it: the sum of all ranks' parts."""
    total = _serialize.encode(np.array([6])).tobytes()
    head = np.array([4, 0b111], np.uint64).tobytes() + bytes([1, 0, 4, 0])
    head += np.array([1, 64 + len(total), 0], np.uint32).tobytes()
    place = np.array([0, len(total), 64, 0], np.uint32).tobytes()
    return (head + place).ljust(64, b"\0") + total


def test_a_commit_opens_what_it_was_decided_for(node: Node) -> None:
    node.commit(0, VERSION - 1)
    node.engine.small_open.assert_not_called()
    node.commit(1, VERSION)
    node.engine.small_open.assert_called_once_with(GENERATION, VERSION, 2, (OTHER, HERE, GONE))
    assert node.small.boards[GENERATION].is_open()


def test_a_call_that_is_not_small_waits_for_the_engine(node: Node) -> None:
    node.commit(0, VERSION)
    node.calls.member_called(SLOT, ask(1))
    node.engine.small_yield.assert_called_once_with(GENERATION, 1)
    assert not node.sent
    node.says(_engine.SMALL_TAKEN, GENERATION, 1, b"")
    assert node.sent == [(OTHER, part(1))]


def test_a_plan_for_a_later_call_waits_for_the_engine(node: Node) -> None:
    node.commit(0, VERSION)
    go = GroupGo(GENERATION, 5, VERSION << 8 | 1, ())
    node.calls.receive(OTHER, go)
    node.engine.small_yield.assert_called_once_with(GENERATION, 5)
    node.says(_engine.SMALL_TAKEN, GENERATION, 5, record())
    state = node.calls.states[GENERATION]
    assert (state.calls, state.go) == (5, go)


def test_nothing_is_reported_before_the_freeze(node: Node) -> None:
    node.commit(0, VERSION)
    node.change(members(OTHER, HERE, None, version=VERSION + 1))
    node.engine.small_close.assert_called_once_with(GENERATION)
    assert not node.sent
    assert not node.small.boards[GENERATION].is_open()
    node.says(_engine.SMALL_TAKEN, GENERATION, 5, record())
    ((to, sync),) = node.sent
    assert isinstance(sync, GroupSync)
    assert (to, sync.version, sync.committed) == (OTHER, VERSION + 1, 5)
    assert sync.last is not None
    assert (sync.last.call, sync.last.kind, sync.last.op) == (4, "allreduce", "sum")
    assert (sync.last.ranks, sync.last.whole) == ((0, 1, 2), True)
    (piece,) = sync.last.pieces
    assert piece.payload == _serialize.encode(np.array([6])).tobytes()
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(sync), type=GroupSync) == sync


def test_parts_that_the_engine_passes_on_are_calls(node: Node) -> None:
    node.commit(0, VERSION)
    head = np.array([1, 2, 0], np.uint32).tobytes() + bytes([4, 255, 255, 2])
    node.says(_engine.SMALL_PART, GENERATION, 1, head + b"xy")
    assert not node.calls.states[GENERATION].member_calls, "the engine owns it"
    node.says(_engine.SMALL_TAKEN, GENERATION, 1, b"")
    node.says(_engine.SMALL_PART, GENERATION, 1, head + b"xy")
    called = node.calls.states[GENERATION].member_calls[1]
    assert called.ask == GroupCall(GENERATION, 1, 1, "broadcast", "", 2, [b"xy"])
    assert called.slot == SLOT


def test_a_frame_without_a_link_is_a_message(node: Node) -> None:
    node.commit(0, VERSION)
    node.says(_engine.SMALL_SEND, GENERATION, GONE, VERSION, 1, 3, 641, b"parts")
    message = GroupSmall(GENERATION, VERSION, 1, 3, 641, b"parts")
    assert node.sent == [(GONE, message)]
    node.calls.receive(GONE, message)
    node.engine.small_frame.assert_called_once_with(GENERATION, GONE, VERSION, 1, 3, 641, b"parts")


def test_engines_are_opened_by_small_calls_of_exactly_the_living() -> None:
    given = {rank: large(rank, 10, "barrier", "") for rank in range(3)}
    all_ = of_one_rank_each(3)
    about = all_, 0, 1, (0, 1, 2), given, {}
    assert decide(*about).opens(all_, None) == all_.version
    joining = msgspec.structs.replace(all_, alive=0b011, joining=0b100)
    assert decide(*about).opens(joining, None) == 0
    fewer = decide(all_, 0, 1, (0, 1), given, {})
    assert fewer.opens(all_, None) == 0


def test_large_calls_do_not_open_them_time_and_again() -> None:
    given = {rank: large(rank) for rank in range(3)}
    all_ = of_one_rank_each(3)
    outcome = decide(all_, 0, 1, (0, 1, 2), given, {})
    small = GroupCommit(1, 0, (0, 1, 2), "barrier", "", 0)
    assert outcome.attempt
    assert outcome.opens(all_, None) == 0
    assert outcome.opens(all_, msgspec.structs.replace(small, attempt=257)) == 0
    assert outcome.opens(all_, small) == all_.version
