"""Questions to other nodes, and what the answers say about clocks."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import pytest

from hoplite_mp._client.tracing import ahead_ns
from hoplite_mp._node.diagnostics.tracing import best_clock
from hoplite_mp._protocol.diagnostics import ClockQuery, DiagnosticsResponse, TraceReadRequest
from hoplite_mp._protocol.messages import Member
from tests.support.lost_peers import gone

if TYPE_CHECKING:
    from collections.abc import Callable

    from hoplite_mp._node.questions import Questions
    from tests.support.node_harness import NodeHarness


@pytest.fixture
def node(make_node: Callable[..., NodeHarness]) -> NodeHarness:
    """Beside nodes 10, 20 and 30 of hosts 1, 2 and 3."""
    return make_node([Member(10 * host_id, 1, host_id, 4) for host_id in (1, 2, 3)])


@pytest.fixture
def questions(node: NodeHarness) -> Questions:
    return node.parts.questions


def test_request_completes_with_the_last_reply(node: NodeHarness, questions: Questions) -> None:
    found: list[dict[int, Any]] = []
    questions.ask_all([1, 2], ClockQuery, found.append)
    (one, asked), (two, other) = node.sent
    assert (one, two) == (1, 2)
    assert questions.answered(2, DiagnosticsResponse(other.number, 7))
    assert not questions.answered(2, DiagnosticsResponse(other.number, 8))  # doubled
    assert not questions.answered(3, DiagnosticsResponse(asked.number, 9))  # not asked
    assert not questions.answered(2, DiagnosticsResponse(asked.number, 9))  # another one was
    assert not found
    assert questions.answered(1, DiagnosticsResponse(asked.number, 6))
    (answers,) = found
    assert {host_id: (a.node, a.message.value) for host_id, a in answers.items()} == {
        1: (10, 6), 2: (20, 7),
    }  # fmt: skip
    assert all(a.asked_ns <= a.came_ns for a in answers.values())
    node.loop.call_all()
    assert len(found) == 1


def test_request_without_a_timeout_waits_for_all(node: NodeHarness, questions: Questions) -> None:
    """Each may be asked something of its own, and who answers late is told apart."""
    found: list[dict[int, Any]] = []
    makes = {host_id: partial(TraceReadRequest, trace=7, offset=host_id) for host_id in (1, 2)}
    questions.ask_each(makes, found.append)
    assert [(host_id, ask.offset) for host_id, ask in node.sent] == [(1, 1), (2, 2)]
    (_, first), (_, second) = node.sent
    assert questions.answered(1, DiagnosticsResponse(first.number))
    assert not questions.answered(1, DiagnosticsResponse(first.number))
    assert not node.loop.timers
    node.lose(20)
    assert [set(answers) for answers in found] == [{1}]
    assert not questions.answered(2, DiagnosticsResponse(second.number))


def test_request_completes_without_silent_or_lost_hosts(
    node: NodeHarness, questions: Questions
) -> None:
    found: list[dict[int, Any]] = []
    questions.ask_all([1, 2, 9], ClockQuery, found.append)  # nobody has host id 9
    questions.answered(1, DiagnosticsResponse(node.sent[0][1].number))
    node.lose(20)
    assert [set(answers) for answers in found] == [{1}]
    questions.ask_all([1, 3], ClockQuery, found.append, 2.0)
    (_, asked), (_, other) = node.sent[-2:]
    questions.answered(3, DiagnosticsResponse(other.number))
    assert len(found) == 1
    node.loop.call_all()
    assert [set(answers) for answers in found] == [{1}, {3}]
    assert not questions.answered(1, DiagnosticsResponse(asked.number))  # too late
    assert len(found) == 2
    assert not questions.open


def test_single_request_completes_with_a_reply_or_a_loss(
    node: NodeHarness, questions: Questions
) -> None:
    """Without a deadline it is waited for as long as it lives."""
    found: list[Any] = []
    for host_id in (1, 2, 9):
        questions.ask(host_id, ClockQuery, found.append)
    assert found == [None]  # nobody has host id 9
    node.loop.pass_time(1000.0)
    (_, asked), _ = node.sent
    questions.answered(1, DiagnosticsResponse(asked.number, 7))
    node.lose(20)
    assert found[1].message.value == 7
    assert found[1].came_ns - found[1].asked_ns == 1000 * 10**9
    assert found[2] is None
    assert not questions.open


def test_host_lost_while_sending_completes_once(node: NodeHarness, questions: Questions) -> None:
    """The loss is told once, and the others are waited for."""
    found: list[dict[int, Any]] = []
    send = questions.send

    def break_first(host_id: int, message: Any) -> bool:
        if host_id == 1:
            questions.peer_lost(gone(host_id))
        return send(host_id, message) and host_id != 1

    questions.send = break_first
    questions.ask_all([1, 2], ClockQuery, found.append)
    assert not found
    questions.answered(2, DiagnosticsResponse(node.sent[-1][1].number))
    assert [set(answers) for answers in found] == [{2}]


def test_request_to_no_host_completes_immediately(questions: Questions) -> None:
    found: list[dict[int, Any]] = []
    questions.ask_all([], ClockQuery, found.append)
    questions.ask_all([8, 9], ClockQuery, found.append)
    assert found == [{}, {}]


def test_fastest_reply_gives_the_clock_offset() -> None:
    """A clock that is 5 s ahead; ways of 100 and 300 us, then of 20 and 20."""
    ahead = 5_000_000_000
    slow = best_clock(None, 1_000_000, 1_400_000, 1_100_000 + ahead)
    assert abs(slow[1] - ahead) <= slow[2] == 200_000
    fast = best_clock(slow, 2_000_000, 2_040_000, 2_020_000 + ahead)
    assert fast == (2_020_000, ahead, 20_000)
    assert best_clock(fast, 3_000_000, 3_100_000, 0) == fast


def test_clock_offset_is_interpolated() -> None:
    """It was 1000 ns ahead at 10_000 and 3000 ns ahead at 30_000 of ours."""
    clocks = [(10_000, 1_000, 5), (30_000, 3_000, 5)]
    for ours, ahead in [(0, 1_000), (10_000, 1_000), (20_000, 2_000), (30_000, 3_000)]:
        assert ahead_ns(clocks, ours + ahead) == ahead
    assert ahead_ns(clocks, 90_000) == 3_000
    assert ahead_ns(clocks[:1], 90_000) == 1_000
    assert ahead_ns([], 90_000) == 0
    shifted = [at - ahead_ns(clocks, at) for at in range(5_000, 40_000, 7)]
    assert shifted == sorted(shifted)
