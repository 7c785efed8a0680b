"""The sequential reference and the explored programs agree on every sequence of operations."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from . import holders, tasks
from .header import Header, State, World, make_id, unpack
from .memory import Op, run_alone
from .reference import Id, Outcome, Reference
from .sweep import sweep

if TYPE_CHECKING:
    from collections.abc import Generator

OWNERS = (1, 2)  # one header each; slot 3 owns none
OPERATIONS = [
    "put", "submit", "acquire", "release", "pin", "unpin", "claim", "complete", "fail", "cancel",
    "abort", "delete", "spill", "restore", "collect", "sweep",
]  # fmt: skip


class Both:
    """One world of words and one reference, which make the same calls one after the other."""

    def __init__(self) -> None:
        self.world = World([Header(owner, tries=2) for owner in OWNERS], [1, 2, 0, 0], slots=3)
        self.memory = self.world.memory()
        self.reference = Reference({owner: 1 for owner in OWNERS})

    def run(self, program: Generator[Op, int, Any]) -> Any:
        results = []

        def capture() -> Generator[Op, int, None]:
            results.append((yield from program))

        self.memory = run_alone(capture(), self.memory)
        return results[0] if results else None

    def apply(self, name: str, slot: int, h: int) -> None:
        w, reference, owner = self.world, self.reference, OWNERS[h]
        entry = reference.entries[owner, 0]
        id_ = Id(owner, 0, entry.generation)
        word_id = make_id(h, entry.generation)
        word = self.memory[w.word[h]]
        if slot in reference.dead:
            return
        if name == "put" and owner == slot and entry.state is State.FREE:
            if self.run(holders.drain_returned(w, slot)) is not None and self.memory[w.block[h]]:
                return
            self.run(holders.new_put(w, slot, h, h))
            reference.seal(slot, reference.new_put(slot, 0))
        elif name == "submit" and owner == slot and entry.state is State.FREE:
            self.run(tasks.submit(w, slot, h))
            reference.new_task(slot, 0, tries=2)
        elif name in ("acquire", "pin"):
            pin = name == "pin"
            counts = entry.pin_counts if pin else entry.ref_counts
            if counts[slot]:
                return  # a second count is private and changes no word
            outcome = getattr(reference, name)(slot, id_)
            got = self.run(holders.acquire(w, slot, word_id, pin=pin))
            assert (got == holders.OK) == (outcome is Outcome.OK)
            assert (got == holders.ELSEWHERE) == (outcome is Outcome.SPILLED)
        elif name in ("release", "unpin"):
            outcome = getattr(reference, name)(slot, id_)
            if outcome is Outcome.OK:
                self.run(holders.release(w, slot, h, pin=name == "unpin"))
        elif name == "claim":
            outcome = reference.claim(slot, owner, 0)
            assert bool(self.run(tasks.claim(w, slot, h))) == (outcome is Outcome.OK)
        elif name in ("complete", "fail"):
            running = unpack(word).state in (State.CLAIMED, State.ABORTED)
            if running and unpack(word).claimant == slot:
                fail = name == "fail"
                outcome = reference.complete(slot, id_, failed=fail)
                ended = self.run(tasks.complete(w, slot, h, word, fail=fail))
                assert bool(ended) == (outcome is Outcome.OK)
        elif name in ("cancel", "abort") and owner == slot:
            outcome = getattr(reference, name)(slot, id_)
            ended = self.run(tasks.cancel(w, slot, h, force=name == "abort"))
            assert bool(ended) == (outcome is Outcome.OK)
        elif name == "delete" and entry.state not in (State.QUEUED, State.CLAIMED):
            outcome = reference.delete(slot, id_)
            assert bool(self.run(holders.delete(w, slot, word_id))) == (outcome is Outcome.OK)
        elif name == "spill" and self.memory[w.location[h]] != 1:  # inline results stay
            outcome = reference.spill(id_)
            assert bool(self.run(holders.spill(w, h))) == (outcome is Outcome.OK)
        elif name == "restore" and not self.memory[w.block[2 + h]]:
            outcome = reference.restore(id_)
            assert bool(self.run(holders.restore(w, h, 2 + h))) == (outcome is Outcome.OK)
        elif name == "collect":
            gained = self.run(holders.drain_freed(w, slot if slot == owner else 0, owner))
            assert bool(gained >> h & 1) == bool(reference.collect(owner))
        elif name == "sweep":
            self.memory = w.after_kill(self.memory, slot)
            self.run(sweep(w, slot))
            reference.sweep(slot)

    def compare(self) -> None:
        for h, owner in enumerate(OWNERS):
            word = unpack(self.memory[self.world.word[h]])
            entry = self.reference.entries[owner, 0]
            assert (word.state, word.generation) == (entry.state, entry.generation)
            assert word.attempt == entry.attempt
            assert _slots(self.memory[self.world.refs[h]]) == entry.refs
            assert _slots(self.memory[self.world.pins[h]]) == entry.pins


def _slots(mask: int) -> frozenset[int]:
    return frozenset(slot for slot in range(8) if mask >> slot & 1)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(
    st.lists(
        st.tuples(st.sampled_from(OPERATIONS), st.sampled_from([1, 2, 3]), st.sampled_from([0, 1])),
        max_size=40,
    )
)
def test_programs_and_reference_agree(calls: list[tuple[str, int, int]]) -> None:
    both = Both()
    for name, slot, h in calls:
        both.apply(name, slot, h)
        both.compare()


def test_a_life() -> None:
    reference = Reference({1: 1})
    id_ = reference.new_put(1, 0)
    assert reference.pin(2, id_) is Outcome.REFUSED
    assert reference.seal(1, id_) is Outcome.OK
    assert reference.pin(2, id_) is Outcome.OK
    assert reference.spill(id_) is Outcome.REFUSED
    assert reference.release(1, id_) is Outcome.OK
    assert reference.state(id_) == "SEALED"
    assert reference.delete(2, id_) is Outcome.OK
    assert reference.unpin(2, id_) is Outcome.OK
    assert reference.state(id_) == "FREED"
    assert reference.collect(1) == {0}
    assert reference.acquire(2, id_) is Outcome.GONE
    assert reference.release(2, id_) is Outcome.NOT_HELD
    assert reference.state(id_) == "GONE"


def test_an_aborted_task_ends_cancelled() -> None:
    reference = Reference({1: 1})
    id_ = reference.new_task(1, 0, tries=1, waiting=True)
    assert reference.make_ready(2, id_) is Outcome.REFUSED
    assert reference.make_ready(1, id_) is Outcome.OK
    assert reference.claim(2, 1, 0) is Outcome.OK
    assert reference.cancel(1, id_) is Outcome.REFUSED
    assert reference.abort(1, id_) is Outcome.OK
    assert reference.complete(2, id_) is Outcome.REFUSED
    assert reference.state(id_) == "CANCELLED"


def test_a_header_in_use_is_not_handed_out() -> None:
    reference = Reference({1: 1})
    reference.new_put(1, 0)
    with pytest.raises(ValueError, match="CLAIMED"):
        reference.new_put(1, 0)
