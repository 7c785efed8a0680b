"""Who may say that a call of a Group is decided."""

from __future__ import annotations

from unittest import mock

from hoplite_mp.node.group_calls import GroupCalls
from hoplite_mp.protocol.group_calls import GroupCommit, GroupGo
from hoplite_mp.protocol.messages import GroupMembers
from tests.protocol.samples import WHOLE

HERE, GONE, OTHER = 0, 5, 3
GENERATION, VERSION, CALL = 7, 3, 1
MADE_BEFORE, MADE_SINCE = 2 << 8 | 1, VERSION << 8 | 1  # attempts of the two leaders


def members(*nodes: int | None) -> GroupMembers:
    alive = sum(1 << rank for rank, node in enumerate(nodes) if node is not None)
    return GroupMembers("g", GENERATION, 0, len(nodes), alive, 0, True, VERSION, nodes, WHOLE)


def commit(attempt: int) -> GroupCommit:
    return GroupCommit(GENERATION, CALL, (0, 1), "allreduce", "sum", 0, (), attempt)


def test_a_late_word_of_a_leader_that_is_gone_is_none() -> None:
    """The living have said what they know, and the next leader has begun the call again: what they
    do now must not end by a decision whose bytes have been let go."""
    results = mock.Mock()
    results.commit.return_value = 1, []
    calls = GroupCalls(mock.Mock(number=HERE, clients={}), mock.Mock(by_number={}), results)
    calls.changed(members(None, HERE, OTHER), mock.Mock())
    state = calls.states[GENERATION]
    state.calls = CALL
    state.go = GroupGo(GENERATION, CALL, MADE_SINCE, ())
    calls.receive(GONE, commit(MADE_BEFORE))
    assert state.calls == CALL
    assert state.go is not None
    results.commit.assert_not_called()
    calls.receive(OTHER, commit(MADE_SINCE))
    assert state.calls == CALL + 1
    results.commit.assert_called_once()
