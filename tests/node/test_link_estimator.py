"""What is learnt of links from bytes that move."""

from __future__ import annotations

from hoplite_mp._node.peers.link_estimator import (
    LATER_POLL_S,
    LONG_S,
    POLL_S,
    QUIET_S,
    YOUNG_S,
    LinkEstimator,
)
from tests.support.node_ports import ManualLoop

STEP_S = 0.001


class Follower:
    """Looks at bursts, and knows how long bytes waited in them."""

    def __init__(self, backlogged_s: float) -> None:
        self.backlogged_s = backlogged_s
        self.bursts: list[str] = []

    def begin(self) -> None:
        self.bursts.append("")

    def sample(self) -> None:
        self.bursts[-1] += "."

    def end(self) -> None:
        self.bursts[-1] += "!"


class Wire:
    """A clock, counters, and one timer."""

    def __init__(self, backlogged_s: float | None = None) -> None:
        """backlogged_s: of each burst, if something looks beside the estimator."""
        self.loop = ManualLoop(0.0)
        follower = None if backlogged_s is None else Follower(backlogged_s)
        self.up = self.down = 0
        self.told: list[tuple[int, int]] = []
        self.link_estimator = LinkEstimator(
            lambda: (self.up, self.down),
            self.loop,
            lambda up, down: self.told.append((up, down)),
            follower,
        )

    def whole_burst(self, seconds: float, up: float, down: float) -> None:
        """A burst from its beginning to its end."""
        self.link_estimator.begin()
        self.burst(seconds, up, down)
        self.link_estimator.end()
        self.burst(LATER_POLL_S, 0, 0)

    def burst(self, seconds: float, up: float, down: float) -> None:
        """Bytes per second for so long."""
        for _ in range(round(seconds / STEP_S)):
            self.up += int(up * STEP_S)
            self.down += int(down * STEP_S)
            assert len(self.loop.timers) <= 1
            self.loop.pass_time(STEP_S)


def close(got: float, expected: float) -> bool:
    return abs(got - expected) < 0.02 * expected


def test_estimate_is_the_rate_of_the_fastest_interval() -> None:
    channel = Wire()
    assert channel.link_estimator.rates == (0, 0)
    channel.link_estimator.begin()
    channel.burst(0.2, 100e6, 60e6)
    channel.burst(0.5, 10e6, 30e6)
    up, down = channel.link_estimator.rates
    assert close(up, 100e6)
    assert close(down, 60e6)


def test_estimate_rises_immediately_and_falls_gradually() -> None:
    channel = Wire()
    for rate in (100e6, 20e6):
        channel.whole_burst(0.3, rate, rate)
        assert not channel.loop.timers
    assert 20e6 < channel.link_estimator.rates[0] < 100e6
    for _ in range(40):
        channel.whole_burst(0.1, 20e6, 20e6)
    assert close(channel.link_estimator.rates[0], 20e6)
    channel.link_estimator.begin()
    channel.burst(0.2, 120e6, 20e6)
    assert close(channel.link_estimator.rates[0], 120e6)


def test_slow_rate_is_accepted_after_two_equal_bursts() -> None:
    channel = Wire(backlogged_s=0.3)
    for rate in (100e6, 30e6, 27e6):
        channel.whole_burst(0.3, rate, rate)
    assert close(channel.link_estimator.rates[0], 30e6)
    assert (
        channel.link_estimator.rates[1] > 70e6
    )  # nobody sees whether bytes waited for the way down
    channel.whole_burst(0.3, 90e6, 90e6)
    assert close(channel.link_estimator.rates[0], 90e6)
    channel.whole_burst(0.3, 30e6, 30e6)
    assert channel.link_estimator.rates[0] > 70e6
    follower = channel.link_estimator.follower
    assert isinstance(follower, Follower)
    assert len(follower.bursts) == 5
    assert all(set(burst[:-1]) == {"."} and burst[-1] == "!" for burst in follower.bursts)


def test_estimate_falls_gradually_after_differing_or_unbacklogged_bursts() -> None:
    for channel, rates in (
        (Wire(backlogged_s=0.3), (100e6, 30e6, 50e6, 30e6)),
        (Wire(backlogged_s=0.02), (100e6, 30e6, 30e6, 30e6)),
        (Wire(), (100e6, 30e6, 30e6, 30e6)),
    ):
        for rate in rates:
            channel.whole_burst(0.3, rate, rate)
        assert channel.link_estimator.rates[0] > 70e6


def test_small_transfer_does_not_change_the_estimate() -> None:
    channel = Wire()
    channel.link_estimator.begin()
    channel.burst(0.3, 1e5, 1e5)
    channel.link_estimator.end()
    channel.burst(LATER_POLL_S, 0, 0)
    assert channel.link_estimator.rates == (0, 0)


def test_burst_that_does_not_saturate_the_link_does_not_change_the_estimate() -> None:
    channel = Wire()
    for _ in range(10):
        channel.link_estimator.begin((False, True))
        channel.burst(0.3, 20e6 if channel.link_estimator.known[0] else 100e6, 100e6)
        channel.link_estimator.end()
        channel.burst(LATER_POLL_S, 0, 0)
    assert close(channel.link_estimator.rates[0], 100e6)


def test_idle_link_is_not_sampled() -> None:
    channel = Wire()
    channel.link_estimator.begin()
    channel.burst(0.2, 50e6, 50e6)
    channel.burst(QUIET_S - POLL_S, 0, 0)
    assert channel.loop.timers
    channel.burst(2 * LATER_POLL_S, 0, 0)
    assert not channel.loop.timers
    channel.link_estimator.begin()
    channel.burst(0.2, 80e6, 50e6)
    assert close(channel.link_estimator.rates[0], 80e6)


def test_long_burst_is_sampled_less_often() -> None:
    channel = Wire(backlogged_s=0.0)
    channel.whole_burst(LONG_S, 50e6, 50e6)
    channel.whole_burst(LONG_S + 10 * LATER_POLL_S, 50e6, 50e6)
    follower = channel.link_estimator.follower
    assert isinstance(follower, Follower)
    few, many = (len(burst) for burst in follower.bursts)
    assert few >= YOUNG_S / POLL_S
    assert 9 <= many - few <= 12


def test_long_burst_ends_with_its_last_transfer() -> None:
    """The next call, which may follow at once, is planned with what this one has shown; and it is
    not counted a second time when the timer of its samples runs out."""
    channel = Wire(backlogged_s=0.0)
    channel.link_estimator.begin()
    channel.burst(LONG_S + LATER_POLL_S, 100e6, 100e6)
    assert not channel.told
    channel.link_estimator.end()
    assert len(channel.told) == 1
    channel.burst(2 * QUIET_S, 0, 0)
    assert len(channel.told) == 1
    follower = channel.link_estimator.follower
    assert isinstance(follower, Follower)
    assert [burst[-1] for burst in follower.bursts] == ["!"]
    assert follower.bursts[0].count("!") == 1


def test_burst_soon_after_a_long_one_is_separate() -> None:
    channel = Wire(backlogged_s=0.0)
    for gap_s in (0.5 * POLL_S, 1.5 * POLL_S, LATER_POLL_S, 0.0):
        channel.link_estimator.begin()
        channel.burst(0.52, 100e6, 100e6)
        channel.link_estimator.end()
        channel.burst(gap_s, 0, 0)
    channel.burst(LATER_POLL_S, 0, 0)
    follower = channel.link_estimator.follower
    assert isinstance(follower, Follower)
    assert len(follower.bursts) == 4
    assert all(burst.endswith("!") for burst in follower.bursts)


def test_consecutive_short_bursts_are_one_burst() -> None:
    channel = Wire(backlogged_s=0.0)
    for _ in range(4):
        channel.link_estimator.begin()
        channel.burst(0.1, 100e6, 100e6)
        channel.link_estimator.end()
        channel.burst(0.5 * POLL_S, 0, 0)
    channel.burst(LATER_POLL_S, 0, 0)
    follower = channel.link_estimator.follower
    assert isinstance(follower, Follower)
    assert len(follower.bursts) == 1


def test_slow_host_is_detected_during_consecutive_calls() -> None:
    """In the middle of the second of them; the next two agree that it is slow."""
    channel = Wire(backlogged_s=1.0)
    rates = []
    for call in (
        [(0.5, 100e6)],
        [(0.25, 100e6), (1.0, 25e6)],
        [(1.0, 25e6)],
        [(1.0, 25e6)],
        [(1.0, 25e6)],
    ):
        channel.link_estimator.begin()
        rates.append(channel.link_estimator.known[0])
        for seconds, rate in call:
            channel.burst(seconds, rate, rate)
        channel.link_estimator.end()
    assert close(rates[1], 100e6)
    assert close(rates[-1], 25e6)


def test_only_large_changes_of_the_estimate_are_reported() -> None:
    channel = Wire()
    for rate in (100e6, 99e6, 102e6, 120e6):
        channel.link_estimator.begin()
        channel.burst(0.3, rate, 40e6)
        channel.link_estimator.end()
        channel.burst(LATER_POLL_S, 0, 0)
    assert len(channel.told) == 2
    assert close(channel.told[0][0], 100e6)
    assert close(channel.told[1][0], 120e6)
    assert close(channel.told[1][1], 40e6)


def test_unsaturated_direction_of_a_link_has_no_estimate() -> None:
    channel = Wire()
    channel.link_estimator.begin((True, False))
    channel.burst(0.3, 100e6, 60e6)
    channel.link_estimator.end()
    channel.burst(LATER_POLL_S, 0, 0)
    assert close(channel.told[0][0], 100e6)
    assert channel.told[0][1] == 0
    channel.link_estimator.begin((True, True))
    channel.burst(0.3, 100e6, 90e6)
    channel.link_estimator.end()
    channel.burst(LATER_POLL_S, 0, 0)
    assert close(channel.told[1][1], 90e6)
