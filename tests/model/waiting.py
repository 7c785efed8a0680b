"""Parking and waking: no waiter sleeps on while what it waits for has happened.

Real waits are sliced, so that a lost wake-up costs half a second and not for ever; here there are
no slices, and a lost wake-up is a process that waits for ever. One client waits for an event on a
bucket that it shares with another id, whose waker wakes it in vain.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .memory import Memory, Op, Process, Scenario, fetch_add, fetch_or, load, put, store, wait

if TYPE_CHECKING:
    from collections.abc import Generator

# The words: two states, the parking bucket of both, and the waiter's slot.
OTHER, MINE, PARKED, EVENT, SLEEPING, ASLEEP = range(6)
NAMES = dict(enumerate(["other", "mine", "parked", "event", "sleeping", "asleep"]))


def _futex_wait(expected: int) -> Op:
    """Falls asleep unless the word has changed: one step, as in the kernel."""

    def run(memory: Memory) -> tuple[Memory, int]:
        return (put(memory, ASLEEP, 1) if memory[EVENT] == expected else memory), 0

    return Op("futex wait", run)


def _waiter() -> Generator[Op, int, None]:
    while True:
        event = yield load(EVENT)
        yield fetch_or(PARKED, 1)
        done = yield load(MINE)
        if done:
            break
        yield store(SLEEPING, 1)
        yield _futex_wait(event)
        yield wait(lambda m: not m[ASLEEP], "futex")
        yield store(SLEEPING, 0)
    yield store(PARKED, 0)


def _waker(state: int, *, clears: bool) -> Generator[Op, int, None]:
    yield store(state, 1)
    parked = yield load(PARKED)
    if not parked:
        return
    yield fetch_add(EVENT, 1)
    sleeping = yield load(SLEEPING)
    if sleeping:
        if clears:
            yield store(SLEEPING, 0)
        yield store(ASLEEP, 0)  # futex wake of all


def _sweep() -> Generator[Op, int, None]:
    """After a waker's death everybody is woken: it may have owed any wake-up."""
    done = yield load(MINE)
    if not done:
        yield store(MINE, 1)  # the failure of what the dead one was to do
    yield fetch_add(EVENT, 1)
    yield store(ASLEEP, 0)


def waking(mutation: str = "") -> Scenario:
    clears = mutation == "waker_clears_sleeping"
    return Scenario(
        name="waking",
        memory=(0,) * len(NAMES),
        processes=[
            Process("waiter", 1, _waiter),
            Process("other waker", 2, lambda: _waker(OTHER, clears=clears)),
            Process("waker", 3, lambda: _waker(MINE, clears=clears), _sweep),
        ],
        invariant=lambda memory: None,
        names=NAMES,
    )
