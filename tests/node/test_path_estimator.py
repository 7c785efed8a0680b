"""Which paths between hosts are taken for narrow, and which slow flows are not."""

from __future__ import annotations

from hoplite_mp._node.peers.link_estimator import POLL_S
from hoplite_mp._node.peers.path_estimator import (
    SAY_AGAIN_S,
    SLOW_S,
    TELL_AGAIN_S,
    Flow,
    PathEstimator,
)
from tests.support.lost_peers import gone
from tests.support.node_ports import ManualLoop

LINK = 100e6  # bytes per second of each link, as its node knows it
NARROW = 10e6


class Wire:
    """What moves between this host and others, and what is concluded from it."""

    def __init__(self) -> None:
        self.loop = ManualLoop(0.0)
        self.moved: dict[int, Flow] = {}
        self.said: list[int] = []
        self.told: list[tuple[int, float]] = []
        self.pairs = PathEstimator(
            lambda: dict(self.moved),
            lambda: (LINK, LINK),
            self.loop,
            self.said.append,
            lambda node, rate: self.told.append((node, rate)),
        )

    def go_on(
        self,
        seconds: float,
        sent: dict[int, float] | None = None,
        received: dict[int, float] | None = None,
        backlogged: float = 1.0,
    ) -> None:
        """sent, received: bytes per second, by node. backlogged: the part of the time."""
        sent, received = sent or {}, received or {}
        for _ in range(round(seconds / POLL_S)):
            for node in {*sent, *received}:
                one = self.moved.get(node, Flow(0, 0, 0))
                self.moved[node] = Flow(
                    one.sent + int(sent.get(node, 0) * POLL_S),
                    one.received + int(received.get(node, 0) * POLL_S),
                    one.backlogged_ns + int(backlogged * POLL_S * 1e9),
                )
            self.loop.pass_time(POLL_S)
            self.pairs.sample()

    def burst(self, rates: dict[int, float], *held: int, seconds: float = 0.3) -> None:
        """Bytes arrive at these rates, and those nodes say that theirs are held up."""
        self.pairs.begin()
        self.go_on(seconds, received=rates)
        for node in held:
            self.pairs.congested(node)
        self.go_on(POLL_S, received=rates)
        self.pairs.end()


def test_sender_reports_a_congested_path_at_intervals() -> None:
    channel = Wire()
    channel.pairs.begin()
    channel.go_on(0.9 * SAY_AGAIN_S, sent={2: NARROW})
    assert channel.said == [2]
    channel.go_on(2 * SAY_AGAIN_S, sent={2: NARROW})
    assert 2 <= len(channel.said) <= 3


def test_flow_with_pauses_is_not_congested() -> None:
    channel = Wire()
    channel.pairs.begin()
    channel.go_on(0.5, sent={2: NARROW}, backlogged=0.6)
    assert channel.said == []


def test_backlogged_time_is_measured() -> None:
    """For the estimator of the host's own link (link_estimator.py)."""
    channel = Wire()
    channel.pairs.begin()
    channel.go_on(0.5, sent={2: 80e6, 3: NARROW})
    assert 0.3 < channel.pairs.backlogged_s <= 0.5
    channel.pairs.begin()
    channel.go_on(0.5, sent={2: 80e6}, backlogged=0.6)
    assert channel.pairs.backlogged_s == 0.0


def test_saturated_link_does_not_make_paths_congested() -> None:
    channel = Wire()
    channel.pairs.begin()
    channel.go_on(0.5, sent={2: NARROW, 3: 80e6})
    assert channel.said == []
    channel.go_on(0.5, sent={2: NARROW, 3: 60e6})
    assert set(channel.said) == {2}


def test_flows_limited_by_the_processor_are_not_congested() -> None:
    """Seven flows at 60 % of the link, divided unevenly."""
    channel = Wire()
    channel.pairs.begin()
    channel.go_on(0.5, sent=dict.fromkeys(range(2, 8), 8.8e6) | {8: 7.5e6})
    assert channel.said == []


def test_rate_is_accepted_after_two_equal_bursts() -> None:
    channel = Wire()
    channel.burst({2: NARROW, 3: 50e6}, 2)
    assert channel.told == []
    channel.burst({2: 1.2 * NARROW}, 2)
    assert [node for node, _ in channel.told] == [2]
    assert abs(channel.told[0][1] - 1.2 * NARROW) < 0.02 * NARROW
    channel.burst({2: 1.2 * NARROW}, 2)  # nothing new
    assert len(channel.told) == 1


def test_differing_bursts_are_ignored() -> None:
    channel = Wire()
    for rate in (NARROW, 2 * NARROW, NARROW, 4 * NARROW):
        channel.burst({2: rate}, 2)
    assert channel.told == []


def test_slow_flow_without_congestion_is_ignored() -> None:
    channel = Wire()
    for _ in range(5):
        channel.burst({2: NARROW, 3: 50e6})
    assert channel.told == []


def test_saturated_receiver_does_not_make_paths_narrow() -> None:
    channel = Wire()
    for _ in range(5):
        channel.burst({2: NARROW, 3: 80e6}, 2)
    assert channel.told == []
    for _ in range(5):
        channel.burst({node: 9e6 for node in range(2, 8)}, *range(2, 8))  # equal parts of 54 %
    assert channel.told == []


def test_path_rate_is_the_peak_rate() -> None:
    channel = Wire()
    for _ in range(3):
        channel.pairs.begin()
        channel.go_on(0.2, received={2: NARROW})
        channel.pairs.congested(2)
        channel.go_on(0.1, received={2: 75e6})
        channel.pairs.end()
    assert channel.told == []


def test_briefly_slow_flow_is_ignored() -> None:
    """It shares the link with others at first, then nobody knows what it waits for."""
    channel = Wire()
    for _ in range(3):
        channel.pairs.begin()
        channel.go_on(0.3, received=dict.fromkeys((2, 3, 4), 32e6))
        channel.go_on(0.2, received={2: 20e6})
        channel.pairs.congested(2)
        channel.pairs.end()
    assert channel.told == []


def test_congestion_report_without_bytes_is_ignored() -> None:
    channel = Wire()
    channel.pairs.congested(2)
    channel.burst({3: NARROW}, 2)
    channel.burst({3: NARROW}, 2)
    assert channel.told == []


def test_wider_path_is_reported_immediately() -> None:
    channel = Wire()
    channel.burst({2: NARROW}, 2)
    channel.burst({2: NARROW}, 2)
    channel.burst({2: 3 * NARROW})  # nobody says that it is held up
    assert [round(rate / NARROW) for _, rate in channel.told] == [1, 3]
    channel.burst({2: 0.9 * LINK})
    assert [round(rate / NARROW) for _, rate in channel.told] == [1, 3, 9]
    channel.burst({2: NARROW}, 2)  # it begins anew
    assert len(channel.told) == 3


def test_path_rate_falls_gradually() -> None:
    channel = Wire()
    for rate in (3 * NARROW, 3 * NARROW, *(18 * [2.1 * NARROW])):
        channel.burst({2: rate}, 2)
    rates = [rate for _, rate in channel.told]
    assert rates == sorted(rates, reverse=True)
    assert 2.0 * NARROW < rates[-1] < 2.4 * NARROW


def test_confirmed_rate_is_reported_again() -> None:
    channel = Wire()
    channel.burst({2: NARROW}, 2)
    channel.burst({2: NARROW}, 2)
    channel.loop.pass_time(TELL_AGAIN_S)
    channel.burst({2: NARROW})
    assert len(channel.told) == 1  # nobody has confirmed it
    channel.burst({2: NARROW}, 2)
    assert len(channel.told) == 2


def test_confirmed_rate_is_reported_to_the_next_manager() -> None:
    channel = Wire()
    channel.burst({2: NARROW}, 2)
    channel.burst({2: NARROW}, 2)
    channel.pairs.tell_next_manager()
    channel.burst({2: NARROW})
    assert len(channel.told) == 1  # it may have become wider meanwhile
    channel.burst({2: NARROW}, 2)
    assert [node for node, _ in channel.told] == [2, 2]


def test_lost_node_clears_its_path_rates() -> None:
    channel = Wire()
    channel.burst({2: NARROW}, 2)
    channel.pairs.peer_lost(gone(node=2))
    channel.burst({2: NARROW}, 2)
    assert channel.told == []


def test_closed_link_clears_its_counters() -> None:
    channel = Wire()
    channel.pairs.begin()
    channel.go_on(0.2, received={2: NARROW})
    channel.moved[2] = Flow(0, 0, 0)
    channel.go_on(0.2, received={2: NARROW})
    channel.pairs.congested(2)
    channel.pairs.end()
    assert abs(channel.pairs.peaks[2] - NARROW) < 0.02 * NARROW


def slow_wire() -> tuple[Wire, list[tuple[int, int]]]:
    channel, found = Wire(), []
    channel.pairs.when_slow(lambda up, down: found.append((up, down)))
    channel.pairs.begin()
    return channel, found


def test_slow_link_is_reported_during_a_burst() -> None:
    channel, found = slow_wire()
    channel.go_on(0.5, sent={2: 40e6, 3: 40e6})
    assert found == []
    channel.go_on(SLOW_S + 0.3, sent={2: 12e6, 3: 12e6}, received={3: 5e6})
    assert 1 <= len(found) <= 2
    up, down = found[-1]
    assert abs(up - 24e6) < 1e6
    assert abs(down - 5e6) < 1e6
    found.clear()
    channel.go_on(1.0, sent={2: 40e6, 3: 40e6})
    assert found == []


def test_slow_receiver_does_not_make_the_link_slow() -> None:
    channel, found = slow_wire()
    channel.go_on(2 * SLOW_S, sent={2: 12e6})
    channel.go_on(POLL_S, received={3: 1e6})
    assert found == []


def test_link_is_slow_only_with_a_lasting_backlog() -> None:
    channel, found = slow_wire()
    for _ in range(4):
        channel.go_on(0.5 * SLOW_S, sent={2: 12e6, 3: 12e6})
        channel.go_on(SLOW_S, sent={2: 40e6, 3: 40e6})
    channel.go_on(4 * SLOW_S, sent={2: 12e6, 3: 12e6}, backlogged=0.5)
    assert found == []
