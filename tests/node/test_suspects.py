"""Nodes that one node has lost by itself: members still, until the manager has chosen."""

from __future__ import annotations

from typing import Any

from hoplite_mp._node.peers.peers import PEER_LOST_SILENCES, Suspects
from hoplite_mp._protocol.messages import Member, PeerLost
from tests.support.node_ports import ManualLoop

SILENCE_S = 1.5
COMPLAINT_S = PEER_LOST_SILENCES * SILENCE_S


class Stage:
    """A clock; what the manager heard; how many were missing when that was looked at."""

    def __init__(self) -> None:
        self.loop = ManualLoop()
        self.told: list[Any] = []
        self.counts: list[int] = []
        self.suspects = Suspects(
            SILENCE_S, self.loop, self.told.append, lambda: 7, self.counts.append
        )

    def wait(self, seconds: float) -> None:
        self.loop.pass_time(seconds)


def member(number: int) -> Member:
    return Member(number, 0, 100 + number, 1)


def test_suspect_confirmed_by_the_manager_is_removed() -> None:
    stage = Stage()
    stage.suspects.add(member(3))
    stage.wait(COMPLAINT_S / 4)
    stage.suspects.confirm([2, 3])
    stage.wait(60)
    assert not stage.told
    assert not stage.suspects.members


def test_unconfirmed_suspect_is_reported_to_the_manager() -> None:
    stage = Stage()
    stage.suspects.add(member(3))
    stage.wait(COMPLAINT_S - 0.01)
    assert not stage.told
    stage.wait(0.02)
    assert stage.told == [PeerLost(7, 3)]
    assert list(stage.suspects.members) == [3]  # until it has


def test_suspect_is_reported_again_to_the_next_manager() -> None:
    """It may have died with that unread."""
    stage = Stage()
    stage.suspects.add(member(3))
    stage.wait(COMPLAINT_S)
    stage.suspects.again()
    stage.wait(COMPLAINT_S)
    assert stage.told == [PeerLost(7, 3)] * 2
    stage.suspects.confirm([3])
    stage.wait(60)
    assert len(stage.told) == 2


def test_many_suspects_trigger_the_isolation_check() -> None:
    stage = Stage()
    for number in range(3):
        stage.suspects.add(member(number))
        stage.wait(0.1)
    stage.wait(COMPLAINT_S / 2)
    assert stage.counts == [3, 3, 3]
