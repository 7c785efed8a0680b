"""What is learnt of links from bytes that move."""

from __future__ import annotations

from hoplite_mp.node.meter import LOOK_S, Meter


class Wire:
    """A clock, counters, and one timer."""

    def __init__(self) -> None:
        self.now, self.up, self.down = 0.0, 0, 0
        self.timers: list[object] = []
        self.meter = Meter(
            lambda: (self.up, self.down),
            lambda seconds, action: self.timers.append(action),
            lambda: self.now,
        )

    def burst(self, seconds: float, up: float, down: float) -> None:
        """Bytes per second for so long."""
        for _ in range(round(seconds / LOOK_S)):
            self.now += LOOK_S
            self.up += int(up * LOOK_S)
            self.down += int(down * LOOK_S)
            (timer,) = self.timers
            self.timers = []
            timer()  # type: ignore[operator]


def close(got: float, expected: float) -> bool:
    return abs(got - expected) < 0.02 * expected


def test_the_fastest_stretch_counts() -> None:
    wire = Wire()
    assert wire.meter.rates == (0, 0)
    wire.meter.begin()
    wire.burst(0.2, 100e6, 60e6)
    wire.burst(0.5, 10e6, 30e6)
    up, down = wire.meter.rates
    assert close(up, 100e6)
    assert close(down, 60e6)


def test_faster_is_believed_at_once_and_slower_bit_by_bit() -> None:
    wire = Wire()
    for rate in (100e6, 20e6):
        wire.meter.begin()
        wire.burst(0.3, rate, rate)
        wire.meter.end()
        wire.burst(LOOK_S, 0, 0)
        assert not wire.timers
    assert 20e6 < wire.meter.rates[0] < 100e6
    for _ in range(40):
        wire.meter.begin()
        wire.burst(0.1, 20e6, 20e6)
        wire.meter.end()
        wire.burst(LOOK_S, 0, 0)
    assert close(wire.meter.rates[0], 20e6)
    wire.meter.begin()
    wire.burst(0.2, 120e6, 20e6)
    assert close(wire.meter.rates[0], 120e6)


def test_a_few_bytes_say_nothing() -> None:
    wire = Wire()
    wire.meter.begin()
    wire.burst(0.3, 1e5, 1e5)
    wire.meter.end()
    wire.burst(LOOK_S, 0, 0)
    assert wire.meter.rates == (0, 0)
