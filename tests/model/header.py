"""Header word, state table and the layout of the small worlds that the model explores.

The state table is data, so that the protocol steps (`holders.py`, `blocks.py`, `tasks.py`,
`sweep.py`) cannot make a transition that it does not name, and the compiled code can be compared
with it. It is the table of docs/architecture.md with what exploring it taught: AMENDED_* says
where, and a mutation (see `MUTATIONS`) shows the interleaving that each amendment prevents.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, IntEnum
from typing import TYPE_CHECKING, NamedTuple

from .memory import Memory, Op, Violation, cas

if TYPE_CHECKING:
    from collections.abc import Generator


class State(IntEnum):
    FREE = 0
    WAITING = 1
    QUEUED = 2
    CLAIMED = 3
    ABORTED = 4
    SEALED = 5
    FAILED = 6
    CANCELLED = 7
    DELETED = 8
    SPILLING = 9
    SPILLED = 10
    FREED = 11


class Actor(Enum):
    OWNER = "owner of the header's table, or the node for a dead owner"
    WORKER = "any worker of the pool"
    CLAIMANT = "the client that the word names, or the node after its death"
    NODE = "the node"
    RELEASER = "whoever saw that no holder is left"
    ANYONE = "any client"


S, A = State, Actor
AS_WRITTEN: frozenset[tuple[State, State, Actor]] = frozenset(
    [
        *((S.FREE, to, A.OWNER) for to in (S.WAITING, S.QUEUED, S.CLAIMED)),
        *((S.WAITING, to, A.OWNER) for to in (S.QUEUED, S.FAILED, S.CANCELLED, S.DELETED)),
        (S.QUEUED, S.CLAIMED, A.WORKER),
        *((S.QUEUED, to, A.OWNER) for to in (S.CANCELLED, S.DELETED, S.FAILED)),
        *((S.CLAIMED, to, A.CLAIMANT) for to in (S.SEALED, S.FAILED)),
        (S.CLAIMED, S.ABORTED, A.OWNER),
        *((S.CLAIMED, to, A.NODE) for to in (S.QUEUED, S.FAILED)),
        *((S.ABORTED, to, A.CLAIMANT) for to in (S.CANCELLED, S.DELETED)),
        *((S.ABORTED, to, A.NODE) for to in (S.CANCELLED, S.DELETED)),
        (S.SEALED, S.DELETED, A.ANYONE),
        (S.SEALED, S.SPILLING, A.NODE),
        *((S.SPILLING, to, A.NODE) for to in (S.SEALED, S.SPILLED)),
        (S.SPILLED, S.SEALED, A.NODE),
        (S.SPILLED, S.DELETED, A.ANYONE),
        *(
            (was, S.FREED, A.RELEASER)
            for was in (S.SEALED, S.FAILED, S.CANCELLED, S.DELETED, S.SPILLED)
        ),
        (S.FREED, S.FREE, A.OWNER),
    ]
)
AMENDED_AWAY = frozenset(
    [
        (S.SPILLED, S.SEALED, A.NODE),  # the location of a header that may be freed meanwhile
        (S.QUEUED, S.FAILED, A.OWNER),  # the error would be written beside a worker's result
    ]
)
AMENDED_IN = frozenset(
    [
        (S.SPILLED, S.SPILLING, A.NODE),  # moving in is claimed like moving out
        (S.QUEUED, S.CLAIMED, A.OWNER),  # claim first, then write the error, then FAILED
    ]
)
# What several hosts add: whoever claimed may say that the bytes are there, but on another host.
# A task that was claimed for another host and is not begun there goes back into the queue.
# A value that is lost there becomes an error, in the place of the bytes that were to be moved in.
BETWEEN_HOSTS = frozenset([(S.CLAIMED, S.SPILLED, A.CLAIMANT), (S.SPILLING, S.FAILED, A.NODE)])
TRANSITIONS = (AS_WRITTEN - AMENDED_AWAY) | AMENDED_IN | BETWEEN_HOSTS

DONE = frozenset([S.SEALED, S.SPILLING, S.SPILLED, S.FAILED, S.CANCELLED, S.DELETED, S.ABORTED])
FREEABLE = frozenset([S.SEALED, S.FAILED, S.CANCELLED, S.DELETED, S.SPILLED])
EMPTY = frozenset([S.FREE, S.FREED])

# How the protocol can be broken by name; each test of a mutation expects a violation.
MUTATIONS = {
    # The order of steps and the guards of the CAS.
    "release_before_acquire": "a ref is handed on and released before the receiver holds it",
    "add_before_bit": "acquire counts first and sets its holder bit afterwards",
    "free_ignores_acquires": "try free compares state and generation, not the acquires",
    "keep_generation": "a collected header keeps its generation",
    "owner_bit_after_seal": "the creator sets its own holder bit after the object is sealed",
    "return_by_store": "a block is returned by a plain store, not by CAS on its owner word",
    "spill_reads_pins_first": "the node looks for pins before it moves to SPILLING",
    "complete_by_store": "a worker completes by a plain store",
    # What the sweep must do.
    "sweep_done_once": "the sweep does not repeat the done bits of a dead worker",
    "sweep_freed_once": "the sweep does not repeat the freed bits",
    "sweep_returned_once": "the sweep does not repeat the returned flags",
    "sweep_blocks_first": "the sweep looks at blocks before it has settled the headers",
    "sweep_keeps_location": "a header failed by the sweep keeps the location of the dead claimant",
    "requeue_keeps_location": "a header queued again keeps the location of the dead claimant",
    "sweep_keeps_generation_match": "the sweep keeps a block by generation, whatever the location",
    "sweep_forgets_hints": "the sweep does not post queued hints again",
    "sweep_holds_late": "the sweep clears bits first and acquires refs inside objects afterwards",
    # What the first edition of the tables left open or had wrong.
    "done_without_try_free": "who seals, fails or cancels does not try free afterwards",
    "restore_in_place": "SPILLED -> SEALED without claiming the header first",
    "fail_queued_directly": "QUEUED -> FAILED with the error written beside a claim",
    "count_by_id": "private counts are kept by id, not by header",
    "taken_is_a_flag": "who waits for `taken` does not look at the generation",
    "lose_in_place": "SPILLED -> FAILED without claiming the header first",
    "hand_over_reads_no_pins": "the block of an object is handed over although it is read",
    "hand_over_in_place": "what gets the block of another object is not claimed first",
    "left_clears_pins": "the pins of a driver that has left go before its process does",
    "recall_ignores_acquires": "the bytes are taken back although somebody has just pinned them",
    "waker_clears_sleeping": "the waker clears the sleeping flag after it counted the event",
}

# Fields of the header word, as drawn in docs/architecture.md.
STATE_BITS, CLAIMANT_SHIFT, ATTEMPT_SHIFT, GENERATION_SHIFT, ACQUIRES_SHIFT = 4, 4, 12, 20, 48
ONE_ACQUIRE = 1 << ACQUIRES_SHIFT
WITHOUT_ACQUIRES = ONE_ACQUIRE - 1


class Word(NamedTuple):
    """A header word taken apart."""

    acquires: int
    generation: int
    attempt: int
    claimant: int
    state: State

    def pack(self) -> int:
        return (
            (self.acquires & 0xFFFF) << ACQUIRES_SHIFT
            | (self.generation & 0xFFFFFFF) << GENERATION_SHIFT
            | (self.attempt & 0xFF) << ATTEMPT_SHIFT
            | (self.claimant & 0xFF) << CLAIMANT_SHIFT
            | self.state
        )


def unpack(word: int) -> Word:
    return Word(
        word >> ACQUIRES_SHIFT & 0xFFFF,
        word >> GENERATION_SHIFT & 0xFFFFFFF,
        word >> ATTEMPT_SHIFT & 0xFF,
        word >> CLAIMANT_SHIFT & 0xFF,
        State(word & 0xF),
    )


def state_of(word: int) -> State:
    return State(word & 0xF)


def generation_of(word: int) -> int:
    return word >> GENERATION_SHIFT & 0xFFFFFFF


def make_id(header: int, generation: int) -> int:
    """The table's part of a local id is left out: a world has few headers."""
    return (header + 1) << 8 | generation


def header_of(id_: int) -> int:
    return (id_ >> 8) - 1


def generation_of_id(id_: int) -> int:
    return id_ & 0xFF


LEASED = 1  # owner word of a block that its lessee writes; ids are larger
NOWHERE, INLINE, IN_FILE, FIRST_BLOCK = 0, 1, 2, 3  # values of a location word
# A payload is the id under which it was written, with a tag above.
JUNK, ERROR, ATTEMPT = 1 << 32, 1 << 33, 34


def is_whole(data: int, id_: int) -> bool:
    """Whether these are the sealed bytes of that object, of whichever attempt."""
    return data & 0xFFFFFFFF == id_ and not data & (JUNK | ERROR)


@dataclass(frozen=True)
class Header:
    owner: int
    tries: int = 0  # more than 0: a task


@dataclass(eq=False)
class World:
    """The words of a scenario by name; slots count from 1, slot 0 is the node."""

    headers: list[Header]
    blocks: list[int]  # the lessee of each block
    slots: int
    mutation: str = ""
    mailboxes: int = 1
    names: dict[int, str] = field(default_factory=dict)
    same: dict[int, int] = field(default_factory=dict)  # id -> under which its payload is written

    def __post_init__(self) -> None:
        if self.mutation and self.mutation not in MUTATIONS:
            raise ValueError(self.mutation)
        count = len(self.headers)
        slots = self.slots + 1
        self.word = self._words("word", count)
        self.refs = self._words("refs", count)
        self.pins = self._words("pins", count)
        self.location = self._words("location", count)
        self.record = self._words("record", count)
        self.nested = self._words("nested", count)
        self.taken = self._words("taken", count)
        self.file = self._words("file", count)
        self.block = self._words("block", len(self.blocks))
        self.bytes = self._words("bytes", len(self.blocks))
        self.freed = self._words("freed", slots)
        self.done = self._words("done", slots)
        self.returned = self._words("returned", slots)
        self.mail = self._words("mail", self.mailboxes)
        self.hints = self._words("hint", 4)
        self.posted = self._words("posted", 1)[0]
        self.popped = self._words("popped", 1)[0]
        # Bookkeeping of the model; `keeps` is private memory (the id that an object contains).
        self.holds = [self._words(f"slot{s}-refs", count) for s in range(slots)]
        self.views = [self._words(f"slot{s}-pins", count) for s in range(slots)]
        self.keeps = [self._words(f"slot{s}-keeps", count) for s in range(slots)]
        self.completed = self._words("completed", count)
        self.attempted = self._words("attempted", count)
        self.known_free = self._words("known-free", len(self.blocks))
        self.dead = self._words("dead", 1)[0]

    def _words(self, name: str, count: int) -> list[int]:
        start = len(self.names)
        for i in range(count):
            self.names[start + i] = f"{name}[{i}]"
        return list(range(start, start + count))

    def memory(self) -> Memory:
        words = [0] * len(self.names)
        for address in self.word:
            words[address] = Word(0, 1, 0, 0, S.FREE).pack()
        for address in self.known_free:
            words[address] = 1
        return tuple(words)

    def is_broken(self, mutation: str) -> bool:
        return self.mutation == mutation

    def after_kill(self, memory: Memory, slot: int) -> Memory:
        words = list(memory)
        for address in (*self.holds[slot], *self.views[slot], *self.keeps[slot]):
            words[address] = 0
        words[self.dead] |= 1 << slot
        return tuple(words)


def move(
    w: World,
    h: int,
    old: int,
    new: State,
    actor: Actor,
    slot: int,
    *,
    generation: int = 0,
    claimed: bool = False,
) -> Generator[Op, int, int]:
    """One CAS along a transition of the table; the result says whether it succeeded.

    `generation` starts the next life of a header, `claimed` makes the slot its claimant.
    """
    before = unpack(old)
    if (before.state, new, actor) not in TRANSITIONS and not _is_excused(w, before.state, new):
        raise Violation(f"no transition {before.state.name} -> {new.name} by {actor.name}")
    if actor is A.CLAIMANT and before.claimant != slot:
        raise Violation(f"slot {slot} is not the claimant {before.claimant}")
    if actor is A.OWNER and slot not in (0, w.headers[h].owner):
        raise Violation(f"slot {slot} does not own header {h}")
    if actor is A.NODE and slot != 0:
        raise Violation(f"slot {slot} is not the node")
    after = before._replace(state=new)
    if claimed:
        after = after._replace(claimant=slot, attempt=before.attempt + 1)
    if generation:
        after = Word(before.acquires, generation, 0, 0, new)
    succeeded = yield cas(w.word[h], old, after.pack())
    return succeeded


def _is_excused(w: World, old: State, new: State) -> bool:
    return (
        (w.is_broken("restore_in_place") and (old, new) == (S.SPILLED, S.SEALED))
        or (w.is_broken("fail_queued_directly") and (old, new) == (S.QUEUED, S.FAILED))
        or (w.is_broken("lose_in_place") and (old, new) == (S.SPILLED, S.FAILED))
        or (w.is_broken("hand_over_in_place") and (old, new) == (S.SPILLED, S.SEALED))
    )
