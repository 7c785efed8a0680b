"""What a manager answers to a node that has voted for a standby that does not lead."""

from __future__ import annotations

from typing import Any

import pytest

from hoplite_mp._manager.leadership import Leadership
from hoplite_mp._planner.terms import Candidate
from hoplite_mp._protocol import messages as m
from hoplite_mp._protocol import terms as t

LEASE_S = 1.5
STANDBY = ("10.0.0.2:7001",)
MEMBERS = [m.Member(node, 0, 70 + node, 1, stays=True) for node in range(4)]


class Stage:
    """The manager of four hosts, and what it has written."""

    def __init__(self, **how: Any) -> None:
        self.said: list[tuple[str, Any]] = []
        self.leadership: Leadership[str] = Leadership(
            STANDBY, lease_s=LEASE_S, write=lambda *one: self.said.append(one), **how
        )

    def ask(self, term: int, now: float) -> list[tuple[str, Any]]:
        self.said.clear()
        assert self.leadership.handle("voter", t.NoLeader(term), now)
        return self.said


def test_voter_of_a_deciding_manager_is_declared_dead() -> None:
    stage = Stage(own=0)
    stage.leadership.set_members(MEMBERS)
    assert stage.ask(2, 10.0) == []  # the candidate may win yet
    stage.leadership.handle("third", t.LeaderHeartbeatAck(3, 1, 10_000_000, 0), 10.0)
    assert stage.leadership.decides(10.0)
    assert stage.ask(2, 10.0) == [("voter", m.DeclaredDead(0.0))]
    assert stage.ask(1, 10.0) == []  # it has not voted, so it may return
    assert stage.ask(2, 10.0 + LEASE_S) == []


@pytest.mark.parametrize("how", [{"again": True}, {"candidate": Candidate(1, 9)}])
def test_voter_query_to_an_undecided_manager_gets_no_reply(how: dict[str, Any]) -> None:
    """A manager that was just started again, and the standby itself, which takes it for no vote."""
    stage = Stage(own=1, **how)
    assert stage.ask(2, 10.0) == []
    assert not stage.leadership.decides(10.0)
    assert stage.leadership.leads == ("candidate" not in how)
