"""Deaths of homes that hosts, processes and the manager learn of in different order."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from hoplite_mp.protocol.messages import NodeLost
from tests.node.losses import LossNetwork
from tests.node.test_imports import away_hold
from tests.node.test_remaking import clean

if TYPE_CHECKING:
    from collections.abc import Iterator

BIG = np.arange(40_000, dtype=np.float64)


@pytest.fixture
def network() -> Iterator[LossNetwork]:
    made = LossNetwork(4)
    yield made
    made.close()


# -- a process asks for what is kept here ----------------------------------------------------------


def test_a_copy_here_is_asked_for_when_its_home_cannot_answer(network: LossNetwork) -> None:
    """Its own node becomes the home and is the one that waits for an answer."""
    home, keeper, *_ = network.living
    object_id, mine = home.put(BIG)
    keeper.keep(object_id, home)
    network.pump()
    found = keeper.hold(object_id)
    assert not found
    network.lose(home)
    network.settle()
    assert (keeper.read(found[0]) == BIG).all()
    found.clear()
    del mine
    clean(network)
    assert not network.planner.homes.named


def test_a_copy_here_is_asked_for_while_there_is_no_manager(network: LossNetwork) -> None:
    home, keeper, second, _ = network.living
    object_id, mine = home.put(BIG)
    keeper.keep(object_id, home)
    second.keep(object_id, home)
    network.pump()
    network.notice(home)
    network.no_manager = True
    found = keeper.hold(object_id)
    others = second.hold(object_id)
    network.pump()
    network.restart_manager()
    network.report(home)
    network.settle()
    assert (keeper.read(found[0]) == BIG).all()
    assert (second.read(others[0]) == BIG).all()
    found.clear()
    others.clear()
    del mine
    clean(network)
    assert not network.planner.homes.named


# -- the manager knows less, or more ---------------------------------------------------------------


def test_asked_before_the_manager_knows_of_the_death(network: LossNetwork) -> None:
    home, keeper, late, other = network.living
    object_id, mine = home.put(BIG)
    keeper.keep(object_id, home)
    network.pump()
    (hold,) = away_hold(network, other, object_id)
    network.notice(home)
    found = late.hold(object_id)
    network.pump()
    assert not found
    network.to_manager(NodeLost(home.number, 0))
    network.report(home)
    network.settle()
    assert (late.read(found[0]) == BIG).all()
    assert (other.read(hold) == BIG).all()
    found.clear()
    del hold, mine
    clean(network)


def test_a_ref_of_a_host_that_is_not_known_yet(network: LossNetwork) -> None:
    """The manager's word of it is on the way."""
    home, _, late, _ = network.living
    object_id, mine = home.put(BIG)
    network.held_back = []
    send, late.imports.send = late.imports.send, lambda to, message: False
    found = late.hold(object_id)
    late.imports.send = send
    held, network.held_back = network.held_back, None
    network.say(held)
    network.settle()
    assert (late.read(found[0]) == BIG).all()
    found.clear()
    del mine
    clean(network)
