"""The explorer itself: it finds a lost update, a kill's half work, a wait for ever."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .memory import (
    Memory,
    Op,
    Process,
    Scenario,
    Violation,
    explore,
    fetch_add,
    load,
    run_alone,
    store,
    wait,
)
from .scenarios import hand_over

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    Steps = Generator[Op, int, None]


def increment_by_load_and_store() -> Steps:
    value = yield load(0)
    yield store(0, value + 1)


def increment() -> Steps:
    yield fetch_add(0, 1)


def counting(program: Callable[[], Steps], kills: int = 0) -> Scenario:
    def final(memory: Memory, dead: frozenset[int]) -> None:
        if memory[0] + len(dead) != 2:
            raise Violation(f"counted {memory[0]}")

    return Scenario(
        "counting",
        (0,),
        [Process(f"process {slot}", slot, program, nothing) for slot in (1, 2)],
        lambda memory: None,
        final=final,
        kills=kills,
    )


def nothing() -> Steps:
    yield load(0)


def test_a_lost_update_is_found_by_a_shortest_interleaving() -> None:
    outcome = explore(counting(increment_by_load_and_store))
    assert outcome.violation == "counted 1"
    assert len(outcome.trace) == 4 + 1
    assert "counted 1" in str(outcome)


def test_an_atomic_update_is_never_lost() -> None:
    assert explore(counting(increment), exact=True).violation is None
    assert explore(counting(increment)).states == 4


def test_a_kill_comes_before_any_step() -> None:
    outcome = explore(counting(increment, kills=1))
    assert outcome.violation is None
    assert explore(counting(increment, kills=2)).states > outcome.states


def test_a_wait_for_ever_is_found() -> None:
    def waiter() -> Steps:
        yield wait(lambda m: m[0] == 3, "three")

    outcome = explore(counting(waiter))
    assert outcome.violation is not None
    assert "waits for ever" in outcome.violation


def test_a_program_alone_stops_at_a_wait() -> None:
    def program() -> Steps:
        yield store(0, 5)
        yield wait(lambda m: m[0] == 3, "three")
        yield store(0, 6)

    assert run_alone(program(), (0,)) == (5,)


def test_too_many_states_are_a_failure() -> None:
    outcome = explore(hand_over(), limit=50)
    assert outcome.violation == "more than 50 states"


def test_naming_states_by_frames_loses_nothing() -> None:
    """Frames merge more process states than histories do, and reach the same memories."""
    merged, exact = explore(hand_over()), explore(hand_over(), exact=True)
    assert merged.violation is None
    assert exact.violation is None
    assert merged.states < exact.states
    assert merged.memories == exact.memories
