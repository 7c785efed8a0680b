"""Who may say that a call of a Group is decided."""

from __future__ import annotations

from typing import Any
from unittest import mock

import msgspec
import numpy as np
import pytest

from hoplite_mp import _serialize
from hoplite_mp._node.groups import leader, plan_sources
from hoplite_mp._node.groups.group_calls import GroupState, MultiHostCalls
from hoplite_mp._node.groups.group_decisions import ATTEMPT_BITS
from hoplite_mp._node.groups.group_results import GroupResults
from hoplite_mp._planner.link_speeds import HostRates
from hoplite_mp._protocol import codec
from hoplite_mp._protocol.group_calls import (
    PIECE_BYTES_MAX,
    PIECES_BYTES_MAX,
    GroupAttempt,
    GroupCommit,
    GroupDone,
    GroupPart,
    GroupSync,
    Piece,
    bytes_of,
)
from hoplite_mp._protocol.local import GroupCall
from tests.support.node_group_calls import (
    CALL,
    GENERATION,
    GONE,
    HERE,
    OTHER,
    PART_ELEMENTS,
    VERSION,
    group_members,
)
from tests.support.node_group_calls import group_part as large
from tests.support.node_ports import NoEngineCalls

MADE_BEFORE, MADE_SINCE = 2 << 8 | 1, VERSION << 8 | 1  # attempts of the two leaders


def commit(attempt: int) -> GroupCommit:
    return GroupCommit(GENERATION, CALL, (0, 1), "allreduce", "sum", 0, (), attempt)


def calls_of(results: mock.Mock, *others: int) -> MultiHostCalls:
    """Of a node that speaks with those others."""
    roster = mock.Mock(by_number={number: mock.Mock() for number in others})
    results.commit.return_value = 1, []
    host = mock.Mock(client=mock.Mock(number=HERE), clients={}, roster=roster)
    small: Any = NoEngineCalls()
    return MultiHostCalls(host, results, results, small)


def begun(calls: MultiHostCalls, attempt: int) -> GroupState:
    """The group, in whose call that attempt has been made here."""
    state = calls.states[GENERATION]
    state.calls = CALL
    state.begin(GroupAttempt(GENERATION, CALL, attempt, ()))
    return state


def test_late_decision_of_a_departed_leader_is_ignored() -> None:
    """The living have said what they know, and the next leader has begun the call again: what they
    do now must not end by a decision whose bytes have been let go."""
    results = mock.Mock()
    calls = calls_of(results)
    calls.changed(group_members(None, HERE, OTHER), mock.Mock())
    state = begun(calls, MADE_SINCE)
    calls.receive(GONE, commit(MADE_BEFORE))
    assert state.calls == CALL
    assert state.attempt is not None
    results.commit.assert_not_called()
    calls.receive(OTHER, commit(MADE_SINCE))
    assert state.calls == CALL + 1
    results.commit.assert_called_once()


def part(version: int) -> GroupPart:
    return GroupPart(GENERATION, version, CALL, (1,), "barrier", "", 0, ())


@pytest.mark.parametrize("says", ["commit", "sync", "nothing", "dies"])
def test_decision_of_a_leader_whose_members_have_left_is_awaited(says: str) -> None:
    """They have returned from the call that it has decided, and have left: the manager's word of
    that may come before the decision. Only what it does not know of is begun again."""
    results = mock.Mock()
    calls = calls_of(results, GONE)
    before = group_members(GONE, HERE, version=VERSION - 1, first=True)
    calls.changed(before, mock.Mock())
    state = begun(calls, MADE_BEFORE)
    calls.changed(group_members(None, HERE, former=(GONE,)), mock.Mock())
    calls.receive(HERE, part(VERSION))
    assert state.calls == CALL, "it has begun again without having asked"
    if says == "dies":
        calls.changed(group_members(None, HERE, version=VERSION + 1), mock.Mock())
        calls.receive(HERE, part(VERSION + 1))
        assert state.calls == CALL + 1
        assert state.last.ranks == (1,)
        return
    if says == "commit":
        calls.receive(GONE, commit(MADE_BEFORE))
    decided = None if says == "nothing" else commit(MADE_BEFORE)
    committed = CALL if says == "nothing" else CALL + 1
    calls.receive(GONE, GroupSync(GENERATION, VERSION, committed, decided))
    assert state.calls == CALL + 1
    assert state.last.ranks == ((1,) if says == "nothing" else (0, 1))
    if says != "nothing":
        assert results.commit.call_args.args[1].attempt == MADE_BEFORE


def test_restarted_call_has_a_new_attempt_number() -> None:
    """Also with the same members, when another manager has named them: what nodes say of the first
    attempt must not count for the second one."""
    results = mock.Mock()
    results.move.return_value = None
    calls = calls_of(results, GONE)
    parts = {
        node: msgspec.structs.replace(large(rank), generation=GENERATION, version=VERSION)
        for rank, node in enumerate((HERE, GONE))
    }
    attempts = []
    for _ in range(3):
        calls.changed(group_members(HERE, GONE, first=True), mock.Mock())
        calls.receive(GONE, GroupSync(GENERATION, VERSION, 0, None, ((1, 0),)))
        for node, given in parts.items():
            calls.receive(node, given)
        sent = [each.args[1] for each in calls.send_peer.call_args_list]
        attempts.append([one for one in sent if isinstance(one, GroupAttempt)][-1].attempt)
    assert len({*attempts}) == 3
    assert {attempt >> ATTEMPT_BITS for attempt in attempts} == {VERSION}
    calls.receive(GONE, GroupDone(GENERATION, 0, attempts[0]))
    state = calls.states[GENERATION]
    assert state.leading.attempt is not None
    assert state.leading.attempt.waiting == {HERE, GONE}


@pytest.mark.parametrize("fits", [True, False])
def test_early_call_is_decided_again_if_the_late_part_differs(
    fits: bool,
) -> None:
    """Its node begins nothing with it, so nobody else would end the attempt."""
    calls = calls_of(mock.Mock(), 1, 2, 3)
    calls.changed(group_members(HERE, 1, 2, 3, first=True), mock.Mock())
    state = calls.states[GENERATION]
    state.leading.rates[HERE] = HostRates(1e9, 1e9)

    def gives(rank: int, **like: Any) -> None:
        given = large(rank, **like)
        calls.receive(rank, msgspec.structs.replace(given, generation=GENERATION, version=VERSION))

    for rank in (1, 2, 3):
        calls.receive(rank, GroupSync(GENERATION, VERSION, 0, None, ((rank, 0),)))
    for rank in (HERE, 1, 3):
        gives(rank)
    assert state.leading.attempt is None
    _, over = calls.loop.call_later.call_args.args  # type: ignore[attr-defined]
    over()
    assert state.leading.attempt is not None
    assert state.leading.attempt.missing == {2}
    gives(2, count=PART_ELEMENTS if fits else PART_ELEMENTS + 1)
    if fits:
        assert state.leading.attempt is not None
        assert not state.leading.attempt.missing
    else:
        assert state.leading.attempt is None
        assert state.last is not None
        assert (state.last.call, state.calls) == (0, 1)
        assert state.last.error


def test_undecidable_call_fails_on_every_rank(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Members would wait for ever for a leading node that only logs why it cannot decide."""
    calls = calls_of(mock.Mock(), 1)
    calls.changed(group_members(HERE, 1, first=True), mock.Mock())
    monkeypatch.setattr(plan_sources, "decide", mock.Mock(side_effect=MemoryError("no room")))
    calls.receive(1, GroupSync(GENERATION, VERSION, 0, None, ((1, 0),)))
    for rank in (0, 1):
        given = large(rank)
        calls.receive(rank, msgspec.structs.replace(given, generation=GENERATION, version=VERSION))
    told = [each.args[1] for each in calls.send_peer.call_args_list]
    (commit,) = [one for one in told if isinstance(one, GroupCommit)]
    assert (commit.error, commit.ranks) == ("full", (0, 1))
    assert "call 0 cannot be decided: MemoryError('no room')" in commit.message
    assert calls.states[GENERATION].calls == 1
    assert "call 0 cannot be decided" in caplog.text


def test_result_that_cannot_be_made_fails_only_this_host(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Not a wait without end: the other hosts may have theirs."""
    host = mock.Mock(client=mock.Mock(**{"new.return_value": 1}))
    results = GroupResults(host, mock.Mock())
    results.streaming_sources.get.side_effect = MemoryError("no room")  # type: ignore[attr-defined]
    pieces = tuple(Piece(rank, -1, 1 << 20) for rank in (0, 1))
    decided = msgspec.structs.replace(commit(MADE_SINCE), op="hypot", pieces=pieces)
    oid, _ = results.commit(decided, None, {0: 1})
    (stored, encoded, *_) = host.results.store_value.call_args.args
    mask, error, message, data = _serialize.decode(encoded.tobytes(), make_ref=mock.Mock())
    assert (stored, mask, error, data) == (oid, 0b11, "full", None)
    assert message == f"the result of call {CALL} cannot be made here: MemoryError('no room')"
    assert f"the result of call {CALL} of a group cannot be made" in caplog.text


def test_large_decision_is_sent_once_to_each_leader() -> None:
    """Its members leave one after another: megabytes for each would fill the connection, and the
    node would be given up. Small ones are told each time."""
    calls = calls_of(mock.Mock(), GONE, OTHER)
    calls.changed(group_members(GONE, HERE, OTHER), mock.Mock())
    state = calls.states[GENERATION]
    for payload, times in ((b"x", 4), (b"x" * (PIECE_BYTES_MAX * 4), 2)):
        pieces = tuple(Piece(0, target, 9, payload) for target in range(3))
        state.last = msgspec.structs.replace(commit(0), pieces=pieces)
        state.calls = CALL + 1
        calls.send_peer.reset_mock()  # type: ignore[attr-defined]
        for version, nodes in enumerate(
            ((GONE, HERE, OTHER), (GONE, HERE, None), (None, OTHER, HERE), (None, OTHER, None))
        ):
            calls.changed(group_members(*nodes, version=VERSION + 1 + version), mock.Mock())
        told = [one.args[1] for one in calls.send_peer.call_args_list]  # type: ignore[attr-defined]
        synced = [one for one in told if isinstance(one, GroupSync)]
        assert len(synced) == 4
        assert sum(one.last is not None for one in synced) == times


def test_decision_received_before_its_version_is_kept() -> None:
    """The leading node hears of the members' version after the node that has told the decision."""
    results = mock.Mock()
    calls = calls_of(results, OTHER)
    calls.changed(group_members(HERE, OTHER, first=True), mock.Mock())
    state = calls.states[GENERATION]
    state.calls = CALL
    decided = msgspec.structs.replace(commit(0), pieces=(Piece(0, -1, 9, b"sum"),), to=OTHER)
    calls.receive(OTHER, GroupSync(GENERATION, VERSION + 1, CALL + 1, decided, ((1, 0),)))
    calls.receive(OTHER, GroupSync(GENERATION, VERSION + 2, CALL + 1, None, ((1, 0),)))
    results.commit.assert_not_called()
    calls.changed(group_members(HERE, OTHER, version=VERSION + 2), mock.Mock())
    assert state.calls == CALL + 1
    assert results.commit.call_args.args[0].pieces == decided.pieces


def test_parts_too_large_for_a_message_fail_the_call() -> None:
    """As many as the members of one host can give to an alltoall of 64 ranks."""
    host = mock.Mock()
    results = GroupResults(host, mock.Mock())
    payload = _serialize.encode(np.zeros(4000, np.uint8)).tobytes()
    size = 64

    def given(ranks: int) -> GroupPart:
        asks = [
            GroupCall(GENERATION, CALL, rank, "alltoall", "", 0, (payload,) * size)
            for rank in range(ranks)
        ]
        return results.part(group_members(*[HERE] * size), CALL, asks)

    fits = given(63)
    assert not fits.mistake
    assert PIECES_BYTES_MAX - (1 << 20) < len(codec.encode(fits)) <= bytes_of(fits.pieces) + 1000
    refused = given(size)
    assert not refused.pieces
    assert refused.mistake.startswith("group 'g': alltoall of 4096 small parts with 1")
    assert f"its messages have at most {PIECES_BYTES_MAX} bytes" in refused.mistake


def test_decision_too_large_for_a_message_fails_on_every_rank(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls = calls_of(mock.Mock(), 1)
    calls.changed(group_members(HERE, 1, first=True), mock.Mock())
    calls.receive(1, GroupSync(GENERATION, VERSION, 0, None, ((1, 0),)))
    monkeypatch.setattr(leader, "too_large", lambda kind, pieces: f"{kind} is too large")
    for rank in (0, 1):
        given = GroupPart(GENERATION, VERSION, 0, (rank,), "barrier", "", 0, ())
        calls.receive(rank, given)
    told = [each.args[1] for each in calls.send_peer.call_args_list]  # type: ignore[attr-defined]
    (decided,) = [one for one in told if isinstance(one, GroupCommit)]
    assert (decided.error, decided.message) == ("value", "group 'g': barrier is too large")
