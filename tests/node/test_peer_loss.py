"""The order in which the components of a node receive the loss of another host."""

from __future__ import annotations

import re
from pathlib import Path
from unittest import mock

import pytest

import hoplite_mp
from hoplite_mp._node.runtime.cluster_node import ClusterNode
from hoplite_mp._node.runtime.peer_loss import ORDERS, PHASES, pass_on
from tests.support.lost_peers import gone

NODE = Path(hoplite_mp.__file__).parent / "_node"


@pytest.mark.parametrize("order", ORDERS, ids=" before ".join)
def test_components_receive_the_loss_after_those_they_need(order: tuple[str, str]) -> None:
    earlier, later = (PHASES.index(name) for name in order)
    assert earlier < later, ORDERS[order]


def test_every_component_with_peer_lost_receives_the_loss_once() -> None:
    receivers = ClusterNode.loss_receivers(mock.MagicMock())
    assert sorted(receivers) == sorted(PHASES)
    told: list[str] = []
    pass_on(gone(7, 3), {name: lambda _, name=name: told.append(name) for name in receivers})
    assert told == list(PHASES)
    defined = [
        path.name
        for path in NODE.rglob("*.py")
        for _ in re.findall(r"def (?:backup_)?peer_lost\(self, member", path.read_text())
    ]
    assert len(defined) == len(PHASES), defined
