"""How long somebody may be silent: by what was seen, within bounds."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from hoplite_mp._manager.heartbeats import Heartbeats
from hoplite_mp._transport.stream import LATELY_S, PATIENCE_FACTOR, PATIENCE_MOST, Silence

PATIENCE_S = 1.5


def heard(silence: Silence, times: list[float]) -> Silence:
    for at in times:
        silence.heard(at)
    return silence


def test_regular_beats_leave_the_least_patience() -> None:
    silence = heard(Silence(0.0, PATIENCE_S), [0.2 * i for i in range(1, 50)])
    assert silence.deadline == silence.heard_at + PATIENCE_S


def test_a_long_silence_gives_more_time_for_a_while() -> None:
    silence = heard(Silence(0.0, PATIENCE_S), [0.2, 0.4, 1.4, 1.6])
    assert silence.deadline == 1.6 + PATIENCE_FACTOR * 1.0
    beats = [1.6 + 0.2 * i for i in range(1, int(2.2 * LATELY_S / 0.2))]
    assert heard(silence, beats).deadline == beats[-1] + PATIENCE_S


@given(st.lists(st.floats(0.0, 100.0), max_size=50))
def test_it_is_bounded_both_ways(gaps: list[float]) -> None:
    silence, now = Silence(0.0, PATIENCE_S), 0.0
    for gap in gaps:
        now += gap
        silence.heard(now)
        patience = silence.deadline - now  # a difference of sums, which are rounded
        assert PATIENCE_S - 1e-6 <= patience <= PATIENCE_MOST * PATIENCE_S + 1e-6


def test_time_in_which_nobody_listened_does_not_count() -> None:
    silence = heard(Silence(0.0, PATIENCE_S), [0.2, 0.4])
    silence.excuse(60.0)
    assert silence.deadline == 60.4 + PATIENCE_S


def test_who_is_silent_is_named_once_it_is_too_long() -> None:
    beats: Heartbeats[str] = Heartbeats(0.2, PATIENCE_S)
    assert beats.wake_at is None
    beats.add("a", 0.0)
    beats.add("b", 0.0)
    now, lost = 0.0, {}
    while not lost:
        assert beats.wake_at is not None
        now = beats.wake_at
        beats.data_received("a", now)
        due, lost = beats.poll(now)
        assert due in (["a", "b"], ["a"])
    assert list(lost) == ["b"]
    assert PATIENCE_S <= lost["b"] <= PATIENCE_S + 0.2
    beats.drop("b")
    assert beats.poll(now + 0.2) == (["a"], {})


def test_who_listens_late_blames_nobody() -> None:
    beats: Heartbeats[str] = Heartbeats(0.2, PATIENCE_S)
    beats.add("a", 0.0)
    beats.add("b", 0.0)
    assert beats.poll(30.0) == (["a", "b"], {})
    beats.data_received("a", 30.1)
    due, lost = beats.poll(30.2 + PATIENCE_S)
    assert (due, list(lost)) == (["a", "b"], [])  # late again
    for step in range(1, 10):
        beats.data_received("a", 31.7 + 0.2 * step)
        due, lost = beats.poll(31.7 + 0.2 * step)
        if lost:
            break
    assert list(lost) == ["b"]
