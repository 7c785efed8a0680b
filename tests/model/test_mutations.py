"""The model can fail: each way to break the protocol is found, and for the reason named here.

A scenario that passes says little unless the same scenario fails when the protocol is wrong. Some
of these mutations are mistakes that one could make; the others are what the first edition of the
state tables said or left open.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from .header import MUTATIONS
from .memory import explore
from .scenarios import (
    cancelling,
    deletion,
    hand_over,
    lent,
    result_refs,
    reuse,
    spilling,
    tasks,
    two_generations,
)
from .several_hosts import handed_over, left, lost_result
from .waiting import waking

if TYPE_CHECKING:
    from collections.abc import Callable

    from .memory import Scenario

EXPECTED: dict[str, tuple[Callable[[str], Scenario], str]] = {
    "release_before_acquire": (hand_over, "handed on is gone"),
    "add_before_bit": (lambda m: reuse(m, kills=0), "FREED although|used again"),
    "free_ignores_acquires": (lambda m: reuse(m, kills=0), "FREED although|used again"),
    "keep_generation": (reuse, "read|FREE although|has no bytes|owner word"),
    "owner_bit_after_seal": (reuse, "FREED although|used again"),
    "return_by_store": (deletion, "owner word"),
    "spill_reads_pins_first": (spilling, "owner word|has no bytes"),
    "complete_by_store": (cancelling, "another end"),
    "sweep_done_once": (tasks, "stays SEALED|stays FAILED"),
    "sweep_freed_once": (reuse, "stays FREED|waits for ever"),
    "sweep_returned_once": (lambda m: tasks(m, lives=2), "never learns"),
    "sweep_blocks_first": (tasks, "never returned"),
    "sweep_keeps_location": (tasks, "without a whole error"),
    "requeue_keeps_location": (tasks, "never returned"),
    "sweep_keeps_generation_match": (tasks, "never returned"),
    "sweep_forgets_hints": (tasks, "stays QUEUED"),
    "sweep_holds_late": (result_refs, "is gone"),
    "done_without_try_free": (cancelling, "stays"),
    "restore_in_place": (lambda m: spilling(m, kills=0, lives=2), "owner word|has no bytes"),
    "fail_queued_directly": (tasks, "record"),
    "count_by_id": (two_generations, "FREED although|used again|cannot be read"),
    "taken_is_a_flag": (lambda m: result_refs(m, again=True), "waits for ever"),
    "lose_in_place": (lost_result, "owner word|has no bytes|never returned"),
    "hand_over_reads_no_pins": (handed_over, "owner word|has no bytes"),
    "hand_over_in_place": (lambda m: handed_over(m, again=True), "owner word|has no bytes"),
    "left_clears_pins": (left, "FREED although|used again"),
    "recall_ignores_acquires": (lent, "owner word|does not hold|read"),
    "waker_clears_sleeping": (waking, "waits for ever"),
}


def test_every_mutation_is_tried() -> None:
    assert set(EXPECTED) == set(MUTATIONS)


@pytest.mark.parametrize("mutation", EXPECTED)
def test_a_mutation_is_found(mutation: str) -> None:
    build, reason = EXPECTED[mutation]
    outcome = explore(build(mutation))
    print(MUTATIONS[mutation])
    print(outcome)
    assert outcome.violation is not None
    assert any(part in outcome.violation for part in reason.split("|")), outcome.violation
