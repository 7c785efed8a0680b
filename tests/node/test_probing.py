"""Latencies that a node measures when it joins."""

from __future__ import annotations

from hoplite_mp.node.membership.probing import PEERS_MAX, ROUNDS, Probing
from hoplite_mp.protocol.messages import LinkMeasured, Member
from hoplite_mp.protocol.peers import Probe, Probed
from tests.node.manual_loop import ManualLoop


def member(node: int) -> Member:
    return Member(node, 1, 1000 + node, 2, f"host{node}", (f"10.0.0.{node}:1",), 1 << 30)


class Network:
    """A clock; who was asked; what the manager heard."""

    def __init__(self) -> None:
        self.loop = ManualLoop()
        self.sent: list[tuple[int, Probe]] = []
        self.told: list[LinkMeasured] = []
        self.probing = Probing(lambda: 9, self.send, self.told.append, self.loop)

    def send(self, home: int, message: object) -> bool:
        assert isinstance(message, Probe)
        self.sent.append((home, message))
        return True

    def answer(self, after_s: float) -> None:
        (home, probe), *self.sent = self.sent
        self.loop.pass_time(after_s)
        self.probing.answered(home, Probed(probe.number))


def test_the_quickest_counts_but_not_the_first() -> None:
    network = Network()
    network.probing.begin([member(1)])
    for after_s in (1e-9, 4e-3, 1e-3, 2e-3):
        network.answer(after_s)
    (told,) = network.told
    assert (told.node, told.peer) == (9, 1)
    assert abs(told.latency_s - 0.5e-3) < 1e-9
    assert not network.sent
    assert not network.probing.asked


def test_some_are_asked_each_by_itself() -> None:
    network = Network()
    network.probing.begin([member(n) for n in range(1, 30)])
    assert [home for home, _ in network.sent] == [1000 + n for n in range(30 - PEERS_MAX, 30)]
    while network.sent:
        network.answer(1e-3)
    assert len(network.told) == PEERS_MAX


def test_a_node_that_goes_and_answers_that_nobody_waits_for() -> None:
    network = Network()
    network.probing.begin([member(1), member(2)])
    network.probing.lose_peer(1001)
    network.probing.answered(1001, Probed(0))
    network.probing.answered(1002, Probed(ROUNDS))
    network.sent = [one for one in network.sent if one[0] == 1002]
    while network.sent:
        network.answer(1e-3)
    assert [told.peer for told in network.told] == [2]
