"""Deaths of homes that hosts, processes and the manager learn of in different order."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from tests.node.losses import LossNetwork
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
