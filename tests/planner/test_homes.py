"""New homes of very many objects: the words of it fit into frames."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from hoplite_mp.planner import homes
from hoplite_mp.planner.machine import Planner
from hoplite_mp.protocol.codec import FRAME_BYTES_MAX, encode
from hoplite_mp.protocol.homes import HoldingsReported, HomesNamed
from hoplite_mp.protocol.messages import NodeJoined, NodeLost

if TYPE_CHECKING:
    from hoplite_mp.planner.plan import Send

NUMBER_BYTES, HEAD_BYTES = 5, 64


def named(nodes: int, count: int) -> list[Send]:
    """What is told when `nodes` others have that many objects of a node that dies."""
    planner = Planner()
    for node in range(nodes + 1):
        planner.step(NodeJoined(70 + node, 0, 2), 0.0)
    planner.step(NodeLost(0, 0), 0.0)
    objects = tuple((70).to_bytes(8, "little") + at.to_bytes(8, "little") for at in range(count))
    sends: list[Send] = []
    for node in range(1, nodes + 1):
        numbers = tuple(range(1 << 30, (1 << 30) + count))
        report = HoldingsReported(node, 0, objects, numbers, tuple(range(count)))
        encode(report)
        sends += planner.step(report, 0.0).sends
    return [one for one in sends if isinstance(one[1], HomesNamed)]


def test_every_message_fits_into_a_frame(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many objects there are, and hosts that hold them."""
    assert NUMBER_BYTES * homes.NUMBERS_MAX < FRAME_BYTES_MAX // 2
    monkeypatch.setattr(homes, "NUMBERS_MAX", 1000)
    for nodes, count in ((1, 1000), (3, 300), (40, 10)):
        for _, message in named(nodes, count):
            assert len(encode(message)) < NUMBER_BYTES * 1000 + HEAD_BYTES


@pytest.mark.parametrize("numbers_max", [1, 40, 1000])
def test_several_messages_say_what_one_does(
    monkeypatch: pytest.MonkeyPatch, numbers_max: int
) -> None:
    (whole, *_) = [message for node, message in named(3, 40) if node == 1]
    assert isinstance(whole, HomesNamed)
    assert not whole.more
    monkeypatch.setattr(homes, "NUMBERS_MAX", numbers_max)
    parts = [message for node, message in named(3, 40) if node == 1]
    assert [part.more for part in parts] == [True] * (len(parts) - 1) + [False]  # type: ignore[union-attr]
    assert len(parts) == {1: 40, 40: 20, 1000: 1}[numbers_max]
    for name in ("objects", "homes", "counted", "copies"):
        assert [one for part in parts for one in getattr(part, name)] == [*getattr(whole, name)]
