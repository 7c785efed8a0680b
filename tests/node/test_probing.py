"""Latencies that a node measures when it joins."""

from __future__ import annotations

from hoplite_mp._node.peers.link_estimator import PEERS_MAX, Probing
from hoplite_mp._node.questions import Questions
from hoplite_mp._node.roster import Roster
from hoplite_mp._protocol.messages import LinkMeasured, Member
from hoplite_mp._protocol.peers import Probe, ProbeResponse
from tests.support.lost_peers import gone
from tests.support.node_ports import ManualLoop


def member(node: int) -> Member:
    return Member(node, 1, 1000 + node, 2, f"host{node}", (f"10.0.0.{node}:1",), 1 << 30)


class Network:
    """A clock; who was asked; what the manager heard."""

    def __init__(self) -> None:
        self.loop = ManualLoop()
        self.sent: list[tuple[int, Probe]] = []
        self.told: list[LinkMeasured] = []
        roster = Roster()
        for node in range(1, 30):
            roster.add(member(node))
        self.questions = Questions(self.loop, roster, self.send)
        self.probing = Probing(lambda: 9, self.questions, self.told.append)

    def send(self, host_id: int, message: object) -> bool:
        assert isinstance(message, Probe)
        self.sent.append((host_id, message))
        return True

    def answer(self, after_s: float) -> None:
        (host_id, probe), *self.sent = self.sent
        self.loop.pass_time(after_s)
        self.questions.answered(host_id, ProbeResponse(probe.number))


def test_fastest_probe_after_the_first_counts() -> None:
    network = Network()
    network.probing.begin([member(1)])
    for after_s in (1e-9, 4e-3, 1e-3, 2e-3):
        network.answer(after_s)
    (told,) = network.told
    assert (told.node, told.peer) == (9, 1)
    assert abs(told.latency_s - 0.5e-3) < 1e-9
    assert not network.sent
    assert not network.questions.open


def test_some_peers_are_probed_one_by_one() -> None:
    network = Network()
    network.probing.begin([member(n) for n in range(1, 30)])
    assert [host_id for host_id, _ in network.sent] == [1000 + n for n in range(30 - PEERS_MAX, 30)]
    while network.sent:
        network.answer(1e-3)
    assert len(network.told) == PEERS_MAX


def test_lost_peer_and_unexpected_replies_are_ignored() -> None:
    network = Network()
    network.probing.begin([member(1), member(2)])
    network.questions.peer_lost(gone(1001))
    network.questions.answered(1001, ProbeResponse(network.sent[0][1].number))
    network.questions.answered(1002, ProbeResponse(99))
    network.sent = [one for one in network.sent if one[0] == 1002]
    while network.sent:
        network.answer(1e-3)
    assert [told.peer for told in network.told] == [2]
