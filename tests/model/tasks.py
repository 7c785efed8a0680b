"""Submit, claim, complete, cancel: the life of a task, and refs inside its result.

The rings of all producers are one ring here, to which posting is one step: a hint is only a hint,
and what matters is that it can be lost with the worker that took it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .header import (
    ATTEMPT,
    ERROR,
    INLINE,
    JUNK,
    NOWHERE,
    Actor,
    State,
    World,
    generation_of,
    header_of,
    make_id,
    move,
    state_of,
    unpack,
)
from .holders import OK, acquire, free_block, lease, settled, write_block
from .memory import (
    Memory,
    Op,
    Violation,
    cas,
    exchange,
    fetch_or,
    ghost,
    ghost_add,
    load,
    put,
    store,
    wait,
)

if TYPE_CHECKING:
    from collections.abc import Generator

RING = 4


def post(w: World, h: int) -> Op:
    def run(memory: Memory) -> tuple[Memory, int]:
        count = memory[w.posted]
        memory = put(memory, w.hints[count % RING], h)
        return put(memory, w.posted, count + 1), 0

    return Op(f"post hint {h}", run)


def submit(w: World, slot: int, h: int) -> Generator[Op, int, int]:
    """The record first, the own holder bit before anybody can complete it, then QUEUED."""
    yield fetch_or(w.refs[h], 1 << slot)
    yield store(w.taken[h], 0)
    yield store(w.location[h], NOWHERE)
    word = yield load(w.word[h])
    while not (yield from move(w, h, word, State.QUEUED, Actor.OWNER, slot)):
        word = yield load(w.word[h])
    yield ghost(w.holds[slot][h], generation_of(word))
    yield post(w, h)
    return make_id(h, generation_of(word))


def pop(w: World) -> Generator[Op, int, int]:
    """The next hint, or -1 if another worker took it."""
    yield wait(lambda m: m[w.posted] != m[w.popped], "hint", idle=True)
    count = yield load(w.popped)
    posted = yield load(w.posted)
    if count == posted:
        return -1
    h = yield load(w.hints[count % RING])
    if (yield cas(w.popped, count, count + 1)):
        return h
    return -1


def claim(w: World, slot: int, h: int) -> Generator[Op, int, int]:
    """The claimed word, or 0. The hint may be stale: the word decides."""
    word = yield load(w.word[h])
    while state_of(word) is State.QUEUED:
        if (yield from move(w, h, word, State.CLAIMED, Actor.WORKER, slot, claimed=True)):
            attempt = unpack(word).attempt + 1
            earlier = yield _exchange_ghost(w.attempted[h], attempt)
            if earlier == attempt:
                raise Violation(f"attempt {attempt} of a task begins twice")
            return unpack(word)._replace(attempt=attempt).pack()
        word = yield load(w.word[h])
    return 0


def _exchange_ghost(address: int, value: int) -> Op:
    return Op("ghost", lambda m: (put(m, address, value), m[address]), ghost=True)


def complete(
    w: World,
    slot: int,
    h: int,
    claimed: int,
    *,
    block: int = -1,
    inside: int = 0,
    fail: bool = False,
) -> Generator[Op, int, int]:
    """The claimant writes what the task gave and ends it: 1 sealed or failed, 0 it was aborted."""
    id_ = make_id(h, generation_of(claimed))
    data = id_ | unpack(claimed).attempt << ATTEMPT
    if block >= 0:
        yield from lease(w, block)
        yield from write_block(w, h, block, id_, data)
    else:
        yield store(w.record[h], data | JUNK)
        yield store(w.record[h], data | (ERROR if fail else 0))
        yield store(w.location[h], INLINE)
    yield ghost(w.nested[h], inside)  # a part of the payload
    end = State.FAILED if fail else State.SEALED
    ended = yield from _end(w, slot, h, end)
    if not ended and block >= 0:
        yield from free_block(w, block, id_)
    if not ended:
        yield from _settle_aborted(w, slot, h)
    yield fetch_or(w.done[w.headers[h].owner], 1 << h)
    yield from settled(w, slot, h)
    return ended


def _end(w: World, slot: int, h: int, end: State) -> Generator[Op, int, int]:
    word = yield load(w.word[h])
    while w.is_broken("complete_by_store") or state_of(word) is State.CLAIMED:
        if w.is_broken("complete_by_store"):
            yield store(w.word[h], unpack(word)._replace(state=end).pack())
            moved = 1
        else:  # a CAS also fails when somebody has acquired meanwhile
            moved = yield from move(w, h, word, end, Actor.CLAIMANT, slot)
        if moved:
            yield ghost_add(w.completed[h], 1)
            return 1
        word = yield load(w.word[h])
    return 0


def _settle_aborted(w: World, slot: int, h: int) -> Generator[Op, int, None]:
    word = yield load(w.word[h])
    while not (yield from move(w, h, word, State.CANCELLED, Actor.CLAIMANT, slot)):
        word = yield load(w.word[h])


def cancel(w: World, slot: int, h: int, *, force: bool = False) -> Generator[Op, int, int]:
    """By the submitter. With `force` a running task is aborted; else only a queued one ends."""
    while True:
        word = yield load(w.word[h])
        state = state_of(word)
        if state in (State.WAITING, State.QUEUED):
            to = State.CANCELLED
        elif state is State.CLAIMED and force:
            to = State.ABORTED
        else:
            return 0
        if (yield from move(w, h, word, to, Actor.OWNER, slot)):
            yield from settled(w, slot, h)
            return 1


def take(w: World, slot: int, h: int) -> Generator[Op, int, None]:
    """The owner of the table (or the node for it) holds what a result contains, then says so."""
    inside = yield load(w.nested[h])
    if not inside:
        return
    outcome = yield from acquire(w, slot, inside)
    if outcome == OK:
        yield ghost(w.keeps[slot][h], inside)
        yield store(w.taken[h], 1)
        return
    word = yield load(w.word[h])
    if state_of(word) is not State.FREED:  # else nobody holds the result, nor what it contains
        raise Violation(f"the ref {inside:#x} inside a result is gone")


def drain_done(w: World, slot: int, owner: int) -> Generator[Op, int, int]:
    """The owner of the table sees what has ended. The result is the set of those headers."""
    bits = yield exchange(w.done[owner], 0)
    for h in range(len(w.headers)):
        if bits >> h & 1:
            word = yield load(w.word[h])
            taken = yield load(w.taken[h])
            if state_of(word) is State.SEALED and not taken:
                yield from take(w, slot, h)
    return bits


def was_taken(w: World, id_: int) -> Op:
    """Waits until the owner of the table holds what the result contains.

    A result that was freed needs nobody; a header of another generation must have been taken, and
    its `taken` word may already be the next one's.
    """
    h = header_of(id_)

    def ready(memory: Memory) -> bool:
        if memory[w.taken[h]]:
            return True
        moved_on = make_id(h, generation_of(memory[w.word[h]])) != id_
        freed = state_of(memory[w.word[h]]) is State.FREED
        return (moved_on or freed) and not w.is_broken("taken_is_a_flag")

    return wait(ready, "taken")
