"""Large calls that a node begins by itself and its engine commits."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any
from unittest import mock

import msgspec
import pytest

from hoplite_mp import _engine
from hoplite_mp._common.object_states import NODE_SLOT
from hoplite_mp._node.groups.call_state import Prepared
from hoplite_mp._node.groups.group_decisions import ATTEMPT_BITS, REPEATED, UndecidedCall, decide
from hoplite_mp._node.groups.group_results import GroupResults
from hoplite_mp._node.groups.repeated_plans import LED_EVERY
from hoplite_mp._node.store.budget import PROMISED
from hoplite_mp._node.store.growing_block import GrowingBlocks
from hoplite_mp._protocol.group_calls import (
    GroupAttempt,
    GroupCommit,
    GroupDone,
    GroupPart,
    GroupSync,
)
from hoplite_mp._protocol.local import GroupCall, GroupLeave
from tests.support.node_group_calls import (
    GENERATION,
    GONE,
    HERE,
    MEMBER_SLOT,
    OTHER,
    VERSION,
    FollowingNode,
    group_members,
)
from tests.support.node_group_calls import group_part as large
from tests.support.node_group_calls import striped_members as of_one_rank_each
from tests.support.shm_host import ShmHost

if TYPE_CHECKING:
    from collections.abc import Iterator

MADE = VERSION << ATTEMPT_BITS | 1
NODES = OTHER, HERE, GONE  # of ranks 0, 1, 2
RANK = 1  # here


class Repeating(FollowingNode):
    """A node of rank 1 of three, which has made call 0 by a plan of the leading node, so that its
    engine owns the calls from number 1 on."""

    def __init__(self) -> None:
        super().__init__()
        self.results = self.calls.results
        self.results.part.side_effect = lambda members, call, asks: self.part(call)
        self.results.prepare.side_effect = lambda *about: Prepared(oid=77)
        self.results.settle.return_value = 77, []
        self.results.is_begun.return_value = True
        self.results.is_written.return_value = True
        self.results.has_lent.return_value = False
        self.results.plan_runner.link_estimator.rates = 5, 6
        self.results.plan_runner.streaming_sources.get.return_value = None
        self.results.plan_runner.link_estimator.moved.return_value = 0, 0
        self.count = 1 << 18
        self.calls.clients[MEMBER_SLOT] = None
        self.calls.member_called(MEMBER_SLOT, self.ask(0))
        given = {rank: large(rank, self.count) for rank in range(3)}
        outcome = decide(UndecidedCall(group_members(*NODES), 0, MADE, (0, 1, 2), given, {}))
        self.calls.receive(OTHER, GroupAttempt(GENERATION, 0, MADE, outcome.plans, tuple(NODES)))
        about = GENERATION, 0, (0, 1, 2), "allreduce", "sum", 0, (), MADE
        commit = GroupCommit(*about, leader=OTHER, to=HERE, opens=VERSION, keeps=True)
        self.calls.receive(OTHER, commit)
        self.sent.clear()
        self.engine.reset_mock()
        self.results.reset_mock()

    def part(self, call: int) -> GroupPart:
        about = large(1, self.count)
        return msgspec.structs.replace(about, generation=GENERATION, version=VERSION, call=call)

    def ask(self, call: int) -> GroupCall:
        return GroupCall(GENERATION, 1, call, "allreduce", "sum", 0, [8])

    def moves(self, call: int) -> Any:
        """The member makes that call; returns what is to be called when all bytes are here."""
        self.calls.member_called(MEMBER_SLOT, self.ask(call))
        done = self.results.move.call_args.args[1]
        self.results.when_written.side_effect = lambda holds, say: say()
        return done

    @property
    def state(self) -> Any:
        return self.calls.states[GENERATION]


@pytest.fixture
def node() -> Iterator[Repeating]:
    made = Repeating()
    yield made
    made.host.close()


def attempt(distance: int) -> int:
    return VERSION << ATTEMPT_BITS | REPEATED | distance


def test_repeated_call_is_committed_by_engines_without_the_leader(
    node: Repeating,
) -> None:
    done = node.moves(1)
    node.engine.coll_begin.assert_called_once_with(GENERATION, 1, attempt(1))
    node.engine.coll_result.assert_called_once_with(GENERATION, 1, 77, False)
    assert node.results.move.call_args.kwargs == {
        "always": True,
        "vote": (GENERATION, 1, attempt(1)),
    }
    done("", "")
    node.engine.coll_vote.assert_called_once_with(GENERATION, 1, attempt(1))
    node.says(_engine.COLL_MOVED, GENERATION, 1, b"")
    assert not node.sent
    assert (node.state.calls, node.state.attempt) == (2, None)
    assert (node.state.last.call, node.state.last.attempt) == (1, attempt(1))
    node.results.settle.assert_called_once()
    node.results.commit.assert_not_called()
    assert node.known.board.look()[4] == 1, "the engine has written the commit, not this process"


def test_engine_does_not_vote_while_a_member_is_writing(node: Repeating) -> None:
    node.results.is_written.return_value = False
    node.moves(1)
    assert node.results.move.call_args.kwargs["vote"] is None


def test_every_nth_repeated_call_is_led(node: Repeating) -> None:
    for call in range(1, 2 * LED_EVERY + 1):
        node.calls.member_called(MEMBER_SLOT, node.ask(call))
        if call % LED_EVERY:
            node.says(_engine.COLL_MOVED, GENERATION, call, b"")
            continue
        node.engine.coll_yield.assert_called_with(GENERATION, call)
        node.says(_engine.COLL_TAKEN, GENERATION, call, b"")
        ((to, part),) = node.sent
        assert (to, part.call, part.repeats) == (OTHER, call, 1)
        go = node.state.attempt.go
        about = GENERATION, call, (0, 1, 2), "allreduce", "sum", 0, (), go.attempt
        node.calls.receive(
            OTHER, GroupCommit(*about, leader=OTHER, to=HERE, opens=VERSION, keeps=True)
        )
        node.sent.clear()


def test_result_is_held_despite_a_late_report_of_an_earlier_small_call(
    node: Repeating,
) -> None:
    """Call 1 was a small one; the board shows the commit of call 2 before the engine's word of
    call 1 is read."""
    node.results.settle.return_value = 77, ["hold"]
    node.moves(2)
    node.known.board.commit(2, 77)
    node.calls.member_called(MEMBER_SLOT, node.ask(2))  # interrupted, and made again
    node.says(_engine.COLL_FIRST, GENERATION, 2, b"")
    assert node.state.result == ["hold"]
    node.says(_engine.COLL_FIRST, GENERATION, 4, b"")
    assert node.state.result == []


@pytest.mark.parametrize("why", ["another form", "a mistake", "two members on a host"])
def test_different_calls_are_returned_to_the_leader(node: Repeating, why: str) -> None:
    ask = node.ask(1)
    if why == "another form":
        node.count += 8
    elif why == "a mistake":
        ask = msgspec.structs.replace(ask, mistake="no", error="value")
    else:
        node.state.members = group_members(OTHER, HERE, HERE)
    node.calls.member_called(MEMBER_SLOT, ask)
    node.engine.coll_begin.assert_not_called()
    node.engine.coll_yield.assert_called_once_with(GENERATION, 1)


@pytest.mark.parametrize("ended", [False, True])
def test_returned_call_continues_with_the_begun_plan(node: Repeating, ended: bool) -> None:
    done = node.moves(1)
    if ended:
        done("", "")
    node.says(_engine.COLL_TAKEN, GENERATION, 1, b"")
    if not ended:
        assert [type(message) for _, message in node.sent] == [GroupPart]
        done("", "")
    part, said = (message for _, message in node.sent)
    assert (part.call, part.repeats) == (1, 1)
    assert said == GroupDone(GENERATION, 1, attempt(1), "", 5, 6, "")
    assert node.results.move.call_count == 1
    about = GENERATION, 1, (0, 1, 2), "allreduce", "sum", 0, (), attempt(1)
    node.calls.receive(OTHER, GroupCommit(*about, leader=OTHER, to=HERE))
    assert node.state.calls == 2
    node.results.settle.assert_called_once()
    assert node.known.board.look()[4] == 2


def test_failed_call_is_yielded_before_it_is_reported(node: Repeating) -> None:
    done = node.moves(1)
    done("no room", "full")
    node.engine.coll_vote.assert_not_called()
    node.engine.coll_yield.assert_called_once_with(GENERATION, 1)
    node.results.take_back.assert_called_once()
    node.says(_engine.COLL_TAKEN, GENERATION, 1, b"")
    _, said = (message for _, message in node.sent)
    assert (said.failure, said.error) == ("no room", "full")


def test_new_attempt_withdraws_the_prepared_result(node: Repeating) -> None:
    node.moves(1)
    node.says(_engine.COLL_TAKEN, GENERATION, 1, b"")
    node.calls.receive(OTHER, GroupAttempt(GENERATION, 1, MADE + 1, ()))
    node.results.take_back.assert_called_once()
    assert node.state.vote is None


def test_sync_after_a_member_change_contains_the_engine_commit(
    node: Repeating,
) -> None:
    node.moves(1)
    node.change(group_members(OTHER, HERE, None, version=VERSION + 1))
    assert not node.sent
    node.says(_engine.COLL_MOVED, GENERATION, 1, b"")
    node.says(_engine.COLL_TAKEN, GENERATION, 2, b"")
    sync = node.sent[0][1]
    assert isinstance(sync, GroupSync)
    assert (sync.committed, sync.last.call, sync.last.attempt) == (2, 1, attempt(1))


def test_call_committed_on_another_node_is_committed_with_local_bytes(
    node: Repeating,
) -> None:
    done = node.moves(1)
    done("", "")
    node.change(group_members(OTHER, HERE, None, version=VERSION + 1))
    node.says(_engine.COLL_TAKEN, GENERATION, 1, b"")
    about = GENERATION, 1, (0, 1, 2), "allreduce", "sum", 0, (), attempt(1)
    node.calls.receive(OTHER, GroupCommit(*about, leader=GONE, to=OTHER, whole=False))
    assert node.state.calls == 2
    node.results.settle.assert_called_once()
    assert (node.state.last.leader, node.state.last.to) == (GONE, HERE)


def test_member_may_make_the_next_call_before_the_engine_report(node: Repeating) -> None:
    node.moves(1)
    node.known.board.commit(1, 77)  # as the engine does
    node.calls.member_called(MEMBER_SLOT, node.ask(2))
    node.results.settle.assert_called_once()
    assert node.state.attempt.go.call == 2
    node.says(_engine.COLL_MOVED, GENERATION, 1, b"")
    assert node.state.attempt.go.call == 2


def test_group_closed_before_the_engine_report_delivers_the_result(
    node: Repeating,
) -> None:
    node.moves(1)
    node.known.board.commit(1, 77)
    node.calls.closed(GENERATION)
    node.results.settle.assert_called_once()
    node.results.take_back.assert_not_called()


def test_ended_group_holds_no_result(node: Repeating) -> None:
    """Whatever still refers to its state: its last result may be large."""
    holds = [Blocks.Hold()]
    gone, state = weakref.ref(holds[0]), node.state
    node.results.settle.side_effect = lambda *about: (77, [holds.pop()])
    node.moves(1)
    node.says(_engine.COLL_MOVED, GENERATION, 1, b"")
    assert gone() is not None
    node.calls.closed(GENERATION)
    assert gone() is None
    assert state.calls == 2


def test_member_that_leaves_before_the_commit_gets_no_blocks(node: Repeating) -> None:
    node.moves(1)
    left = GroupLeave("g", GENERATION, RANK, 1)
    node.calls.member_left(left, MEMBER_SLOT)
    node.says(_engine.COLL_MOVED, GENERATION, 1, b"")
    assert node.results.settle.call_args.args[2] == {}


@pytest.mark.parametrize(("calls", "frees"), [(1, True), (2, False)])
def test_member_that_leaves_after_the_commit_frees_its_untaken_blocks(
    node: Repeating, calls: int, frees: bool
) -> None:
    node.results.given = {RANK: [4096]}
    node.moves(1)
    node.says(_engine.COLL_MOVED, GENERATION, 1, b"")
    node.calls.member_left(GroupLeave("g", GENERATION, RANK, calls), MEMBER_SLOT)
    assert node.results.take_untaken.called == frees


def test_early_report_on_the_next_call_is_kept(node: Repeating) -> None:
    """They have heard of the end of this one before."""
    node.moves(1)
    said = GroupDone(GENERATION, 2, attempt(2), "no room", 0, 0, "full")
    node.calls.receive(OTHER, said)
    node.says(_engine.COLL_MOVED, GENERATION, 1, b"")
    assert node.state.leading.early == {OTHER: said}


def test_lending_member_requests_an_immediate_report(node: Repeating) -> None:
    node.results.has_lent.return_value = True
    node.moves(1)
    node.engine.coll_result.assert_called_once_with(GENERATION, 1, 77, True)


def test_only_repeated_calls_open_the_engines() -> None:
    all_ = of_one_rank_each(3)
    given = {rank: large(rank) for rank in range(3)}
    outcome = decide(UndecidedCall(all_, 1, MADE, (0, 1, 2), given, {}))
    before = GroupCommit(1, 0, (0, 1, 2), "allreduce", "sum", 0, (), MADE)
    assert outcome.opens(all_, before) == 0
    outcome.attempt = attempt(1)
    assert outcome.opens(all_, before) == all_.version
    outcome.keeps = False
    assert outcome.opens(all_, before) == 0
    outcome.keeps = True
    shared = msgspec.structs.replace(all_, nodes=(0, 0, 1))
    assert outcome.opens(shared, before) == 0
    given = {rank: large(rank, op="hypot") for rank in range(3)}
    folded = decide(UndecidedCall(all_, 1, attempt(1), (0, 1, 2), given, {}))
    assert folded.opens(all_, before) == 0


# -- the prepared result ---------------------------------------------------------------------------


class Blocks:
    """The results of a node whose plan has filled one block for rank 1, in a real store."""

    class Hold:
        """On an object."""

    def __init__(self) -> None:
        self.node = ShmHost()
        self.payload = self.node.store.lease(1 << 20, NODE_SLOT)
        host = mock.Mock(client=self.node.node, store=self.node.store, results=self.node.results)
        self.executor = mock.Mock()
        self.executor.made.return_value = {0: (self.payload, 80)}
        self.results = GroupResults(host, self.executor)
        self.commit = GroupCommit(1, 1, (0, 1), "allreduce", "sum", 0, (), attempt(1))
        self.go = GroupAttempt(1, 1, attempt(1), (mock.Mock(operation=9, kind="allreduce"),))
        self.prepared = self.results.prepare(self.commit, self.go, {1: MEMBER_SLOT})

    @property
    def lessee(self) -> int | None:
        """None: the block is free."""
        self.node.store.take_returns()
        return self.node.store.leases.get(self.payload)


@pytest.fixture
def one() -> Iterator[Blocks]:
    made = Blocks()
    yield made
    made.node.close()


def test_prepared_block_belongs_to_the_member_after_the_commit(one: Blocks) -> None:
    assert one.lessee == PROMISED
    one.executor.take.assert_not_called()
    one.results.settle(one.prepared, one.go, {1: MEMBER_SLOT})
    one.results.let_go(one.prepared)
    assert one.lessee == MEMBER_SLOT
    one.executor.take.assert_called_once_with(9, {one.payload: 1})


def test_prepared_block_of_a_departed_member_is_freed(one: Blocks) -> None:
    one.results.settle(one.prepared, one.go, {})
    one.results.let_go(one.prepared)
    assert one.lessee is None


def test_block_returned_before_the_engine_report_is_freed_after_it(
    one: Blocks,
) -> None:
    """Until then the engine's cells lie in it."""
    one.node.node.give_back(one.payload)
    assert one.lessee == PROMISED
    one.results.settle(one.prepared, one.go, {1: MEMBER_SLOT})
    one.results.let_go(one.prepared)
    assert one.lessee is None


def test_block_is_prepared_only_once(one: Blocks) -> None:
    assert not one.results.prepare(one.commit, one.go, {1: MEMBER_SLOT}).blocks


def test_withdrawn_block_belongs_to_the_plan(one: Blocks) -> None:
    one.results.take_back(one.prepared)
    assert one.lessee == NODE_SLOT
    assert not one.prepared.holds
    one.executor.take.assert_not_called()


def test_block_lent_again_before_its_release_stays() -> None:
    store = mock.Mock(leases={4096: MEMBER_SLOT})
    store.size_of.return_value = 1 << 20
    sources = GrowingBlocks(store, mock.Mock(host_id=1), mock.Mock())
    first = sources.take(MEMBER_SLOT, 4096, 100, 100)
    store.leases[4096] = MEMBER_SLOT
    again = sources.take(MEMBER_SLOT, 4096, 100, 100)
    sources.keep(first)
    assert sources.blocks == {4096: again}
