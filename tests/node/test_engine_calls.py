"""When the calls of a Group are the engine's, and what waits until it has given them back."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import numpy as np
import pytest

from hoplite_mp import _engine, _serialize
from hoplite_mp._node.groups.group_decisions import UndecidedCall, decide
from hoplite_mp._protocol.group_calls import (
    GroupAttempt,
    GroupCommit,
    GroupEngineFrame,
    GroupSync,
)
from hoplite_mp._protocol.local import GroupCall
from tests.support.node_group_calls import (
    GENERATION,
    GONE,
    HERE,
    MEMBER_SLOT,
    OTHER,
    VERSION,
    FollowingNode,
    alltoall_part,
    commit_record,
    group_members,
)
from tests.support.node_group_calls import group_part as large
from tests.support.node_group_calls import striped_members as of_one_rank_each

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def node() -> Iterator[FollowingNode]:
    made = FollowingNode()
    yield made
    made.host.close()


def ask(call: int) -> GroupCall:
    return GroupCall(GENERATION, 1, call, "alltoall", "", 0, [b"a", b"b", b"c"])


def test_commit_opens_the_engine_only_for_its_version(node: FollowingNode) -> None:
    node.commit(0, VERSION - 1)
    node.engine.coll_open.assert_not_called()
    node.commit(1, VERSION)
    node.engine.coll_open.assert_called_once_with(GENERATION, VERSION, 2, (OTHER, HERE, GONE))
    assert node.engine_calls.boards[GENERATION].is_open()


def test_large_call_waits_until_the_engine_yields(node: FollowingNode) -> None:
    node.commit(0, VERSION)
    node.calls.member_called(MEMBER_SLOT, ask(1))
    node.engine.coll_yield.assert_called_once_with(GENERATION, 1)
    assert not node.sent
    node.says(_engine.COLL_TAKEN, GENERATION, 1, b"")
    assert node.sent == [(OTHER, alltoall_part(1))]


def test_plan_for_a_later_call_waits_until_the_engine_yields(node: FollowingNode) -> None:
    node.commit(0, VERSION)
    go = GroupAttempt(GENERATION, 5, VERSION << 8 | 1, ())
    node.calls.receive(OTHER, go)
    node.engine.coll_yield.assert_called_once_with(GENERATION, 5)
    node.says(_engine.COLL_TAKEN, GENERATION, 5, commit_record())
    state = node.calls.states[GENERATION]
    assert (state.calls, state.attempt.go) == (5, go)


def test_sync_is_sent_after_the_engine_is_frozen(node: FollowingNode) -> None:
    node.commit(0, VERSION)
    node.change(group_members(OTHER, HERE, None, version=VERSION + 1))
    node.engine.coll_close.assert_called_once_with(GENERATION)
    assert not node.sent
    assert not node.engine_calls.boards[GENERATION].is_open()
    node.says(_engine.COLL_TAKEN, GENERATION, 5, commit_record())
    ((to, sync),) = node.sent
    assert isinstance(sync, GroupSync)
    assert (to, sync.version, sync.committed) == (OTHER, VERSION + 1, 5)
    assert sync.last is not None
    assert (sync.last.call, sync.last.kind, sync.last.op) == (4, "allreduce", "sum")
    assert (sync.last.ranks, sync.last.whole) == ((0, 1, 2), True)
    (piece,) = sync.last.pieces
    assert piece.payload == _serialize.encode(np.array([6])).tobytes()
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(sync), type=GroupSync) == sync


def test_parts_passed_on_by_the_engine_become_calls(node: FollowingNode) -> None:
    node.commit(0, VERSION)
    head = np.array([1, 2, 0], np.uint32).tobytes() + bytes([4, 255, 255, 2])
    node.says(_engine.COLL_PART, GENERATION, 1, head + b"xy")
    assert not node.calls.states[GENERATION].member_calls, "the engine owns it"
    node.says(_engine.COLL_TAKEN, GENERATION, 1, b"")
    node.says(_engine.COLL_PART, GENERATION, 1, head + b"xy")
    called = node.calls.states[GENERATION].member_calls[1]
    assert called.ask == GroupCall(GENERATION, 1, 1, "broadcast", "", 2, [b"xy"])
    assert called.slot == MEMBER_SLOT


def test_engine_frame_without_a_link_is_sent_as_a_message(node: FollowingNode) -> None:
    node.commit(0, VERSION)
    node.says(_engine.COLL_SEND, GENERATION, GONE, VERSION, 1, 3, 641, b"parts")
    message = GroupEngineFrame(GENERATION, VERSION, 1, 3, 641, b"parts")
    assert node.sent == [(GONE, message)]
    node.calls.receive(GONE, message)
    node.engine.coll_frame.assert_called_once_with(GENERATION, GONE, VERSION, 1, 3, 641, b"parts")


def test_engines_are_opened_by_small_calls_of_all_living_members() -> None:
    given = {rank: large(rank, 10, "barrier", "") for rank in range(3)}
    all_ = of_one_rank_each(3)
    outcome = decide(UndecidedCall(all_, 0, 1, (0, 1, 2), given, {}))
    assert outcome.opens(all_, None) == all_.version
    joining = msgspec.structs.replace(all_, alive=0b011, joining=0b100)
    assert outcome.opens(joining, None) == 0
    fewer = decide(UndecidedCall(all_, 0, 1, (0, 1), given, {}))
    assert fewer.opens(all_, None) == 0


def test_large_calls_do_not_reopen_engines() -> None:
    given = {rank: large(rank) for rank in range(3)}
    all_ = of_one_rank_each(3)
    outcome = decide(UndecidedCall(all_, 0, 1, (0, 1, 2), given, {}))
    engine_calls = GroupCommit(1, 0, (0, 1, 2), "barrier", "", 0)
    assert outcome.attempt
    assert outcome.opens(all_, None) == 0
    assert outcome.opens(all_, msgspec.structs.replace(engine_calls, attempt=257)) == 0
    assert outcome.opens(all_, engine_calls) == all_.version
