"""The small components of the planner, where a scenario would say it less directly."""

from __future__ import annotations

import random
from typing import get_args

from hoplite_mp._planner.membership import ClusterMembership
from hoplite_mp._planner.operation import TRANSITIONS, OperationState
from hoplite_mp._planner.planner_core import _HANDLERS, Planner
from hoplite_mp._planner.step_result import _DRAWN, StepResult
from hoplite_mp._planner.tree_shapes import owners, single_vertex
from hoplite_mp._protocol import messages as m
from hoplite_mp._protocol.fields import NODES_MAX
from hoplite_mp._protocol.membership import Member, Report
from tests.support.messages import ID, SAMPLES


def test_every_message_is_handled_and_every_answer_can_be_drawn() -> None:
    for message in SAMPLES:
        if isinstance(message, (m.ClusterEnded, *get_args(Report))):
            continue  # the manager's own word; and what `ManagerRecovery` takes
        assert (type(message) in _HANDLERS) != (type(message) in _DRAWN)
    answers = tuple((0, message) for message in SAMPLES if type(message) in _DRAWN)
    text = StepResult(answers, 2.5).as_text()  # type: ignore[arg-type]
    assert text.count("-> node 0: ") == len(answers)
    assert text.endswith("wake at 2.5")
    assert StepResult().as_text() == "nothing"


def test_owner_messages_have_a_text() -> None:
    sends = (
        (0, m.OwnerReport(ID, 3)),
        (0, m.OwnerReport(ID, NODES_MAX)),
        (0, m.OwnersReassigned(2, (ID, ID[::-1]), (1, NODES_MAX), ((), ()), ((), ()), False)),
    )
    lines = StepResult(sends).as_text().splitlines()
    assert lines[0].endswith(": node 3")
    assert lines[1].endswith(": none")
    assert "after node 2" in lines[2]
    assert [line.split(" at ")[1] for line in lines[3:]] == ["node 1", "none"]


def test_every_transition_belongs_to_a_state() -> None:
    assert {state for state, _ in TRANSITIONS} == set(OperationState)


def test_stripe_plan_of_one_node_has_one_stripe() -> None:
    stripes = single_vertex(3)
    assert owners(stripes) == {3}
    assert [(s.begin_share, s.end_share) for s in stripes] == [(0, m.SHARES)]


def test_incarnations_of_nodes_are_distinguished() -> None:
    nodes = ClusterMembership()
    assert nodes.join(m.NodeJoined(77, 2, 1)).node == 0
    assert nodes.join(m.NodeJoined(88, 0, 1)).node == 1
    assert not nodes.is_joining(0, 2)
    assert not nodes.is_joining(0, 1)
    assert nodes.is_joining(0, 3)
    assert nodes.is_living(0)
    assert not nodes.is_living(0, 1)
    nodes.lose(0)
    assert nodes.node_of(77) is None
    assert not nodes.is_joining(0, 2)
    assert nodes.join(m.NodeJoined(77, 3, 1)).node == 0  # its host id, so its number
    assert nodes.nodes == (1, 0)
    assert nodes.join(m.NodeJoined(99, 0, 1)).node == 2  # numbers are never used again


def test_next_manager_assigns_no_number_twice() -> None:
    """Neither one that a member has, nor one of a node that is gone."""
    for known, first in ((1, 3), (5, 5)):
        nodes = ClusterMembership()
        nodes.restore([Member(0, 1, 77, 1), Member(2, 1, 88, 1)], known)
        assert nodes.number_of(88) == 2
        assert nodes.number_of(99) == first


def test_generations_of_client_slots_are_distinguished() -> None:
    nodes = ClusterMembership()
    nodes.join(m.NodeJoined(77, 1, 1))
    nodes.lose_client(0, 5, 7)
    nodes.lose_client(0, 5, 6)  # late: does not call generation 7 back
    assert nodes.is_client_gone(0, 5, 7)
    assert not nodes.is_client_gone(0, 5, 8)
    assert not nodes.is_client_gone(0, 6, 0)
    nodes.lose(0)
    assert not nodes.is_client_gone(0, 5, 7)


def test_many_deadlines_pass_in_order_and_only_for_open_operations() -> None:
    rng = random.Random(0)
    planner = Planner()
    planner.step(m.NodeJoined(77, 1, 1), 0.0)
    numbers = rng.sample(range(1, 501), 500)
    for number in numbers:
        planner.step(m.ReduceRequested(number, 0, 0, (ID, ID[::-1]), "sum", 2, number / 4), 0.0)
        planner.step(m.SourceReady(number, 1, 0), 0.0)
    for number in numbers[:250]:
        planner.step(m.OperationDropped(number), 1.0)
    seen: list[int] = []
    wake_at = planner.tick(0.0).wake_at
    while wake_at is not None:
        plan = planner.tick(wake_at)
        seen += [message.operation for _, message in plan.sends if type(message) is m.ExecuteReduce]
        wake_at = plan.wake_at
    assert seen == sorted(numbers[250:])
