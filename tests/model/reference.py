"""The tables as a sequential object: what each operation gives when nobody is beside it.

The compiled code is compared with this class, call by call, by a state machine of hypothesis; the
programs of this package are compared with it in `test_reference.py`. It knows no words and no
interleavings, only states, counts and outcomes.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from enum import Enum

from .header import EMPTY, FREEABLE, State

NODE = 0


class Outcome(Enum):
    OK = "done"
    GONE = "another generation, or freed"
    REFUSED = "the state does not allow it"
    MOVING = "the node is moving the bytes: wait"
    SPILLED = "ask the node to bring the bytes back"
    NOT_HELD = "this client does not hold it"


@dataclass(frozen=True)
class Id:
    table: int
    index: int
    generation: int


@dataclass
class Entry:
    """A header. Counts are private to each client; a holder bit is a count that is not zero."""

    state: State = State.FREE
    generation: int = 1
    attempt: int = 0
    claimant: int = NODE
    tries: int = 0
    has_bytes: bool = False
    ref_counts: Counter[int] = field(default_factory=Counter)
    pin_counts: Counter[int] = field(default_factory=Counter)

    @property
    def refs(self) -> frozenset[int]:
        return frozenset(slot for slot, count in self.ref_counts.items() if count)

    @property
    def pins(self) -> frozenset[int]:
        return frozenset(slot for slot, count in self.pin_counts.items() if count)


class Reference:
    """All tables of a host; a table is named by the client slot that owns it."""

    def __init__(self, tables: dict[int, int]) -> None:
        self.entries = {(t, i): Entry() for t, size in tables.items() for i in range(size)}
        self.dead: set[int] = set()

    # What can be seen.

    def entry(self, id_: Id) -> Entry | None:
        """The header of an id, unless it is used for another object by now."""
        entry = self.entries[id_.table, id_.index]
        return entry if entry.generation == id_.generation else None

    def state(self, id_: Id) -> str:
        entry = self.entry(id_)
        return "GONE" if entry is None else entry.state.name

    # Beginnings.

    def new_put(self, slot: int, index: int) -> Id:
        """CLAIMED by its maker, who holds a ref."""
        return self._begin(slot, index, State.CLAIMED, claimant=slot, tries=0)

    def new_task(self, slot: int, index: int, *, tries: int = 1, waiting: bool = False) -> Id:
        state = State.WAITING if waiting else State.QUEUED
        return self._begin(slot, index, state, claimant=NODE, tries=tries)

    def _begin(self, slot: int, index: int, state: State, *, claimant: int, tries: int) -> Id:
        entry = self.entries[slot, index]
        if entry.state is not State.FREE:
            raise ValueError(f"header {index} of slot {slot} is {entry.state.name}")
        entry.state, entry.claimant, entry.tries = state, claimant, tries
        entry.attempt = 1 if state is State.CLAIMED else 0
        entry.has_bytes = False
        entry.ref_counts[slot] += 1
        return Id(slot, index, entry.generation)

    def make_ready(self, slot: int, id_: Id) -> Outcome:
        return self._go(id_, [State.WAITING], State.QUEUED, allowed=slot == id_.table)

    # Holders.

    def acquire(self, slot: int, id_: Id) -> Outcome:
        entry = self.entry(id_)
        if entry is None or entry.state in EMPTY:
            return Outcome.GONE
        entry.ref_counts[slot] += 1
        return Outcome.OK

    def release(self, slot: int, id_: Id) -> Outcome:
        return self._let_go(slot, id_, pin=False)

    def pin(self, slot: int, id_: Id) -> Outcome:
        entry = self.entry(id_)
        if entry is None or entry.state in EMPTY:
            return Outcome.GONE
        if not entry.pin_counts[slot] and entry.state is not State.SEALED:
            moved = {State.SPILLING: Outcome.MOVING, State.SPILLED: Outcome.SPILLED}
            return moved.get(entry.state, Outcome.REFUSED)
        entry.pin_counts[slot] += 1
        return Outcome.OK

    def unpin(self, slot: int, id_: Id) -> Outcome:
        return self._let_go(slot, id_, pin=True)

    def _let_go(self, slot: int, id_: Id, *, pin: bool) -> Outcome:
        entry = self.entry(id_)
        counts = None if entry is None else entry.pin_counts if pin else entry.ref_counts
        if entry is None or counts is None or not counts[slot]:
            return Outcome.NOT_HELD
        counts[slot] -= 1
        self._try_free(entry)
        return Outcome.OK

    def _try_free(self, entry: Entry) -> None:
        if entry.state in FREEABLE and not entry.refs and not entry.pins:
            entry.state = State.FREED

    # Claims and their ends.

    def claim(self, slot: int, table: int, index: int) -> Outcome:
        """By a hint, which names a header and no generation."""
        entry = self.entries[table, index]
        if entry.state is not State.QUEUED:
            return Outcome.REFUSED
        entry.state, entry.claimant = State.CLAIMED, slot
        entry.attempt += 1
        return Outcome.OK

    def seal(self, slot: int, id_: Id) -> Outcome:
        """The end of a put, of a running task or of a reduction. REFUSED: it was aborted."""
        return self.complete(slot, id_)

    def complete(self, slot: int, id_: Id, *, failed: bool = False) -> Outcome:
        entry = self.entry(id_)
        if entry is None or entry.claimant != slot:
            return Outcome.REFUSED
        if entry.state is State.ABORTED:
            self._go(id_, [State.ABORTED], State.CANCELLED)
            return Outcome.REFUSED
        entry.has_bytes = entry.state is State.CLAIMED and not failed
        return self._go(id_, [State.CLAIMED], State.FAILED if failed else State.SEALED)

    def cancel(self, slot: int, id_: Id) -> Outcome:
        pending = [State.WAITING, State.QUEUED]
        return self._go(id_, pending, State.CANCELLED, allowed=slot == id_.table)

    def abort(self, slot: int, id_: Id) -> Outcome:
        """A forced cancel: what runs is aborted, and CANCELLED once its claimant has noticed."""
        outcome = self.cancel(slot, id_)
        if outcome is Outcome.REFUSED:
            allowed = slot == id_.table
            outcome = self._go(id_, [State.CLAIMED], State.ABORTED, allowed=allowed)
        return outcome

    def delete(self, slot: int, id_: Id) -> Outcome:
        """Sealed bytes by anyone; what is pending or running by its owner only."""
        entry = self.entry(id_)
        if entry is None:
            return Outcome.GONE
        if entry.state is State.SPILLING:
            return Outcome.MOVING
        if entry.state is State.CLAIMED:
            return self._go(id_, [State.CLAIMED], State.ABORTED, allowed=slot == id_.table)
        pending = [State.WAITING, State.QUEUED] if slot == id_.table else []
        return self._go(id_, [State.SEALED, State.SPILLED, *pending], State.DELETED)

    # The node.

    def spill(self, id_: Id) -> Outcome:
        entry = self.entry(id_)
        if entry is not None and entry.pins:
            return Outcome.REFUSED
        return self._go(id_, [State.SEALED], State.SPILLED)

    def restore(self, id_: Id) -> Outcome:
        return self._go(id_, [State.SPILLED], State.SEALED)

    def collect(self, table: int) -> frozenset[int]:
        """By the owner, or the node for a dead one: the indices that are FREE now."""
        gained = set()
        for (t, index), entry in self.entries.items():
            if t != table:
                continue
            if entry.state is State.DELETED and not entry.pins:
                entry.has_bytes = False
            if entry.state is State.FREED:
                entry.state, entry.has_bytes = State.FREE, False
                entry.generation += 1
                entry.attempt = entry.claimant = entry.tries = 0
                gained.add(index)
        return frozenset(gained)

    def sweep(self, slot: int) -> None:
        """After the death of a client."""
        self.dead.add(slot)
        for (table, _), entry in self.entries.items():
            self._settle(table, entry, slot)
            entry.ref_counts.pop(slot, None)
            entry.pin_counts.pop(slot, None)
            self._try_free(entry)
        self.collect(slot)

    def _settle(self, table: int, entry: Entry, slot: int) -> None:
        if entry.claimant == slot and entry.state is State.CLAIMED:
            again = entry.attempt < entry.tries and table not in self.dead
            entry.state = State.QUEUED if again else State.FAILED
        elif entry.claimant == slot and entry.state is State.ABORTED:
            entry.state = State.CANCELLED
        elif table == slot and entry.state in (State.WAITING, State.QUEUED):
            entry.state = State.FAILED

    def _go(self, id_: Id, before: list[State], to: State, *, allowed: bool = True) -> Outcome:
        entry = self.entry(id_)
        if entry is None:
            return Outcome.GONE
        if not allowed or entry.state not in before:
            return Outcome.REFUSED
        entry.state = to
        self._try_free(entry)
        return Outcome.OK
