"""Names of actors whose host is lost: they go along or are free, and nobody gets one meanwhile."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from hoplite_mp._planner.actors import ActorNames
from hoplite_mp._planner.planner_core import Planner
from hoplite_mp._protocol.membership import NodeReturned, ReportComplete
from hoplite_mp._protocol.messages import (
    ActorNameClaimed,
    ActorNameQuery,
    ActorNameReleased,
    ActorNameReport,
    NodeJoined,
    NodeLost,
    OrphansReported,
    OwnersReassigned,
)

if TYPE_CHECKING:
    from hoplite_mp._protocol.messages import Member

IDENTITY = (70).to_bytes(8, "little") + bytes(8)
OTHER = (72).to_bytes(8, "little") + bytes(8)


def joined(nodes: int) -> Planner:
    planner = Planner()
    for node in range(nodes):
        planner.step(NodeJoined(70 + node, 0, 2), 0.0)
    return planner


def holder(planner: Planner, node: int = 1) -> bytes | None:
    """Who has the name, as that node hears."""
    (told,) = planner.step(ActorNameQuery(9, node, "ps"), 0.0).sends
    assert isinstance(told[1], ActorNameReport)
    return told[1].identity


def owners(sends: Any) -> dict[int, tuple[int, ...]]:
    return {node: one.owners for node, one in sends if isinstance(one, OwnersReassigned)}


def test_actor_name_after_failover_belongs_to_the_new_node() -> None:
    planner = joined(4)
    planner.step(ActorNameClaimed(1, 0, "ps", IDENTITY, True), 0.0)
    planner.step(NodeLost(0, 0), 0.0)
    (refused,) = planner.step(ActorNameClaimed(2, 3, "ps", OTHER, True), 0.0).sends
    assert refused[1] == ActorNameReport(2, "ps", IDENTITY)  # nobody knows yet what becomes of it
    planner.step(OrphansReported(1, 0, (IDENTITY,), (5,), (0,)), 0.0)
    planner.step(OrphansReported(2, 0, (IDENTITY,), (6,), (0,)), 0.0)
    sends = planner.step(OrphansReported(3, 0, (IDENTITY,), (0,), (0,), (0, 4)), 0.0).sends
    assert owners(sends) == {1: (3,), 2: (3,), 3: (3,)}  # not the lowest number
    assert holder(planner) == IDENTITY
    planner.step(NodeLost(3, 0), 0.0)
    for node in (1, 2):
        planner.step(OrphansReported(node, 3, (IDENTITY,), (5,), (0,)), 0.0)
    assert holder(planner) is None  # none of them can begin it


def test_actor_name_unknown_to_the_backup_is_released() -> None:
    """Seed 500779: the actor's host had told its backup that the actor has no name any more, and a
    manager that was just being replaced had not heard of it."""
    planner = joined(2)
    planner.step(ActorNameClaimed(1, 0, "ps", IDENTITY, True), 0.0)
    planner.step(ActorNameReleased(1, "", OTHER), 0.0)
    assert holder(planner) == IDENTITY
    planner.step(ActorNameReleased(1, "", IDENTITY), 0.0)
    assert holder(planner) is None


@pytest.mark.parametrize("moves", [False, True])
def test_actor_name_without_failover_is_released(moves: bool) -> None:
    planner = joined(3)
    planner.step(ActorNameClaimed(1, 0, "ps", IDENTITY, moves), 0.0)
    planner.step(NodeLost(0, 0), 0.0)
    assert (holder(planner) is None) == (not moves)
    planner.step(OrphansReported(1, 0, (IDENTITY,), (5,), (0,)), 0.0)
    planner.step(OrphansReported(2, 0), 0.0)
    assert holder(planner) is None


def test_actor_name_after_loss_of_manager_and_host_is_claimed_by_the_backup() -> None:
    """The next one hears the name from the node that can begin the actor again."""
    before = joined(3)
    members: tuple[Member, ...] = before.membership.members
    planner = Planner(again=True, own=1)
    for node in (1, 2):
        planner.step(NodeReturned(node, 0, 3, members), 0.0)
    planner.step(ActorNameClaimed(0, 0, "ps", IDENTITY, True, by_backup=True), 0.0)  # node 2
    planner.step(ActorNameClaimed(4, 1, "ps", OTHER, True), 0.0)  # was open
    planner.step(ReportComplete(1), 0.0)
    planner.step(ReportComplete(2), 0.0)
    planner.tick(60.0)  # node 0 has not come
    assert holder(planner) == IDENTITY
    planner.step(OrphansReported(1, 0, (IDENTITY,), (5,), (0,)), 61.0)
    planner.step(OrphansReported(2, 0, (IDENTITY,), (0,), (0,), (0, 1)), 61.0)
    assert holder(planner) == IDENTITY
    planner.step(NodeLost(2, 0), 62.0)
    planner.step(OrphansReported(1, 2, (IDENTITY,), (5,), (0,)), 62.0)
    assert holder(planner) is None


@pytest.mark.parametrize("lives", [False, True])
def test_backup_claim_is_ignored_if_the_actors_node_reports(lives: bool) -> None:
    """Seed 1101627: the actor had ended, its backup had not heard of it, and then left."""
    members: tuple[Member, ...] = joined(2).membership.members
    planner = Planner(again=True, own=0)
    for node in (0, 1):
        planner.step(NodeReturned(node, 0, 2, members), 0.0)
    if lives:
        planner.step(ActorNameClaimed(0, 0, "ps", IDENTITY, True), 0.0)
    planner.step(ActorNameClaimed(0, 0, "ps", IDENTITY, True, by_backup=True), 0.0)
    planner.step(ReportComplete(0), 0.0)
    planner.step(ReportComplete(1), 0.0)
    assert holder(planner) == (IDENTITY if lives else None)


def test_backup_claim_counts_if_the_actors_node_dies_before_its_report() -> None:
    members: tuple[Member, ...] = joined(3).membership.members
    planner = Planner(again=True, own=1)
    for node in (0, 1, 2):
        planner.step(NodeReturned(node, 0, 3, members), 0.0)
    planner.step(ActorNameClaimed(0, 0, "ps", IDENTITY, True, by_backup=True), 0.0)  # node 2
    planner.step(ReportComplete(1), 0.0)
    planner.step(ReportComplete(2), 0.0)
    planner.tick(60.0)  # node 0 has called, and has not reported
    (refused,) = planner.step(ActorNameClaimed(4, 1, "ps", OTHER, True), 61.0).sends
    assert refused[1] == ActorNameReport(4, "ps", IDENTITY)


def test_backup_claims_of_several_hosts_newest_state_wins() -> None:
    planner = joined(4)
    planner.step(NodeLost(0, 0), 0.0)
    planner.step(OrphansReported(1, 0, (IDENTITY,), (5,), (0,), (0, 0)), 0.0)
    planner.step(OrphansReported(2, 0, (IDENTITY,), (0,), (0,), (0, 7)), 0.0)
    sends = planner.step(OrphansReported(3, 0, (IDENTITY,), (0,), (0,), (0, 3)), 0.0).sends
    assert owners(sends) == {1: (2,), 2: (2,), 3: (2,)}


def test_actor_names_of_forgotten_nodes_are_released() -> None:
    names = ActorNames()
    for node in range(3):
        names.claim(ActorNameClaimed(0, node, f"of {node}", IDENTITY, True))
    names.keep_only(lambda node: node != 1)
    for node in range(3):
        (told,) = names.ask(ActorNameQuery(1, 0, f"of {node}"))
        assert isinstance(told[1], ActorNameReport)
        assert told[1].identity == (None if node == 1 else IDENTITY)
