"""Acquire, release, try free, delete, spill and collect: the life of one header.

Every function is one process's steps; each `yield` is one atomic operation, and a kill may come
before any of them. `slot` is the client slot of the process, `id_` a local id.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .header import (
    EMPTY,
    FIRST_BLOCK,
    FREEABLE,
    IN_FILE,
    INLINE,
    JUNK,
    LEASED,
    NOWHERE,
    ONE_ACQUIRE,
    WITHOUT_ACQUIRES,
    Actor,
    State,
    World,
    generation_of,
    generation_of_id,
    header_of,
    is_whole,
    make_id,
    move,
    state_of,
)
from .memory import (
    Memory,
    Op,
    Violation,
    cas,
    exchange,
    fetch_add,
    fetch_and,
    fetch_or,
    ghost,
    load,
    look,
    put,
    store,
    wait,
)

if TYPE_CHECKING:
    from collections.abc import Generator

OK, GONE, MOVING, ELSEWHERE = 1, 0, 2, 3  # outcomes of acquire and pin


def acquire(
    w: World, slot: int, id_: int, *, pin: bool = False, held: int = 0
) -> Generator[Op, int, int]:
    """Private count 0 -> 1. `held`: the generation of this header that the process holds already.

    A bit stands for the header, not for the id: a process that holds another generation must not
    touch the bit, because undoing the stale acquire would take away the holder of the newer object.
    """
    h = header_of(id_)
    generation = generation_of_id(id_)
    mask = (w.pins if pin else w.refs)[h]
    if held and not w.is_broken("count_by_id"):
        return OK if held == generation else GONE
    if w.is_broken("add_before_bit"):
        word = yield fetch_add(w.word[h], ONE_ACQUIRE)
        yield fetch_or(mask, 1 << slot)
    else:
        yield fetch_or(mask, 1 << slot)
        word = yield fetch_add(w.word[h], ONE_ACQUIRE)
    state = state_of(word)
    outcome = OK
    if generation_of(word) != generation or state in EMPTY:
        outcome = GONE
    elif pin and state is not State.SEALED:
        outcome = {State.SPILLING: MOVING, State.SPILLED: ELSEWHERE}.get(state, GONE)
    if outcome == OK:
        yield ghost((w.views if pin else w.holds)[slot][h], generation)
    else:
        yield from release(w, slot, h, pin=pin)
    return outcome


def release(w: World, slot: int, h: int, *, pin: bool = False) -> Generator[Op, int, None]:
    """Private count 1 -> 0, and the undo of an acquire."""
    yield ghost((w.views if pin else w.holds)[slot][h], 0)
    yield fetch_and((w.pins if pin else w.refs)[h], ~(1 << slot))
    yield from try_free(w, slot, h)


def try_free(w: World, slot: int, h: int) -> Generator[Op, int, None]:
    owner = w.headers[h].owner
    word = yield load(w.word[h])
    while state_of(word) in FREEABLE:
        pins = yield load(w.pins[h])
        if pins:
            return
        refs = yield load(w.refs[h])
        if refs:
            if state_of(word) is State.DELETED:
                yield fetch_or(w.freed[owner], 1 << h)
            return
        if w.is_broken("free_ignores_acquires"):
            moved = yield _ignoring_acquires(w.word[h], word, State.FREED)
        else:
            moved = yield from move(w, h, word, State.FREED, Actor.RELEASER, slot)
        if moved:
            yield fetch_or(w.freed[owner], 1 << h)
            return
        word = yield load(w.word[h])


def _ignoring_acquires(address: int, old: int, new: State) -> Op:
    def run(memory: Memory) -> tuple[Memory, int]:
        if (memory[address] ^ old) & WITHOUT_ACQUIRES:
            return memory, 0
        return put(memory, address, (memory[address] & ~0xF) | new), 1

    return Op("cas without acquires", run)


def settled(w: World, slot: int, h: int) -> Generator[Op, int, None]:
    """After every step into a state that can be freed: the last holder may have gone before."""
    if not w.is_broken("done_without_try_free"):
        yield from try_free(w, slot, h)


def read(w: World, slot: int, id_: int, *, refs_held: bool = False) -> Generator[Op, int, int]:
    """Pins, reads the bytes, unpins. The result is 1 if there was something to read."""
    h = header_of(id_)
    outcome = yield from acquire(w, slot, id_, pin=True)
    while outcome == MOVING:
        yield wait(lambda m: state_of(m[w.word[h]]) is not State.SPILLING, f"move of {h}")
        outcome = yield from acquire(w, slot, id_, pin=True)
    if outcome != OK:
        if refs_held and outcome == GONE:
            raise Violation("an object that is held cannot be read")
        return 0
    location = yield load(w.location[h])
    if location < FIRST_BLOCK and location != INLINE:
        raise Violation("a sealed object without bytes")
    data = yield load(w.record[h] if location == INLINE else w.bytes[location - FIRST_BLOCK])
    if not is_whole(data, id_):
        raise Violation(f"read {data:#x} under id {id_:#x}")
    yield from release(w, slot, h, pin=True)
    return 1


def delete(w: World, slot: int, id_: int) -> Generator[Op, int, int]:
    """By anyone, of an object that was put."""
    h = header_of(id_)
    while True:
        word = yield load(w.word[h])
        if generation_of(word) != generation_of_id(id_):
            return 0
        state = state_of(word)
        if state is State.SPILLING:
            yield wait(lambda m: state_of(m[w.word[h]]) is not State.SPILLING, f"move of {h}")
        elif state not in (State.SEALED, State.SPILLED):
            return 0
        elif (yield from move(w, h, word, State.DELETED, Actor.ANYONE, slot)):
            yield from settled(w, slot, h)
            return 1


def recall(w: World, slot: int, h: int, block: int) -> Generator[Op, int, int]:
    """The giver takes the bytes of its sealed object back, if nobody else has pinned them, and
    drops its own pin: 1 if the block is its lease again."""
    word = yield load(w.word[h])
    while state_of(word) is State.SEALED:
        pins = yield load(w.pins[h])
        if pins & ~(1 << slot):
            return 0
        if w.is_broken("recall_ignores_acquires"):
            moved = yield _ignoring_acquires(w.word[h], word, State.DELETED)
        else:
            moved = yield from move(w, h, word, State.DELETED, Actor.ANYONE, slot)
        if moved:
            yield cas(w.block[block], make_id(h, generation_of(word)), LEASED)
            yield fetch_and(w.pins[h], ~(1 << slot))
            yield from try_free(w, slot, h)
            return 1
        word = yield load(w.word[h])
    return 0


def free_block(w: World, block: int, id_: int) -> Generator[Op, int, None]:
    """Return: harmless when repeated late, because the owner word is another one by then."""
    if w.is_broken("return_by_store"):
        yield store(w.block[block], 0)
        yield fetch_or(w.returned[w.blocks[block]], 1 << block)
    elif (yield cas(w.block[block], id_, 0)):
        yield fetch_or(w.returned[w.blocks[block]], 1 << block)


def free_payload(w: World, h: int, generation: int) -> Generator[Op, int, None]:
    location = yield load(w.location[h])
    if location >= FIRST_BLOCK:
        yield from free_block(w, location - FIRST_BLOCK, make_id(h, generation))
    elif location == IN_FILE:
        yield store(w.file[h], 0)


def collect(w: World, slot: int, h: int) -> Generator[Op, int, int]:
    """The owner's step for a freed bit: 1 if the header is FREE afterwards."""
    word = yield load(w.word[h])
    state = state_of(word)
    if state is State.DELETED:
        pins = yield load(w.pins[h])
        if not pins:
            yield from free_payload(w, h, generation_of(word))
        return 0
    if state is not State.FREED:
        return 0
    inside = yield look(w.keeps[slot][h])
    if inside:
        yield ghost(w.keeps[slot][h], 0)
        yield from release(w, slot, header_of(inside))
    yield from free_payload(w, h, generation_of(word))
    kept = w.is_broken("keep_generation")
    generation = generation_of(word) + (0 if kept else 1)
    while True:  # stale acquires may count up the word at any time
        word = yield load(w.word[h])
        if (yield from move(w, h, word, State.FREE, Actor.OWNER, slot, generation=generation)):
            yield ghost(w.completed[h], 0)
            yield ghost(w.attempted[h], 0)
            return 1


def drain_freed(w: World, slot: int, owner: int) -> Generator[Op, int, int]:
    """What the owner does now and then. The result is the set of headers that became FREE."""
    bits = yield exchange(w.freed[owner], 0)
    gained = 0
    for h in range(len(w.headers)):
        if bits >> h & 1:
            collected = yield from collect(w, slot, h)
            gained |= collected << h
    return gained


def spill(w: World, h: int) -> Generator[Op, int, int]:
    """The node moves the bytes of a sealed object into its file, if nobody has pinned them."""
    if w.is_broken("spill_reads_pins_first"):
        pins = yield load(w.pins[h])
    word = yield load(w.word[h])
    if state_of(word) is not State.SEALED:
        return 0
    if not (yield from move(w, h, word, State.SPILLING, Actor.NODE, 0)):
        return 0
    if not w.is_broken("spill_reads_pins_first"):
        pins = yield load(w.pins[h])
    location = yield load(w.location[h])
    if pins or location < FIRST_BLOCK:
        yield from leave(w, h, State.SEALED, 0)
        return 0
    data = yield load(w.bytes[location - FIRST_BLOCK])
    yield store(w.file[h], data)
    yield store(w.location[h], IN_FILE)
    yield from leave(w, h, State.SPILLED, 0)
    yield from free_block(w, location - FIRST_BLOCK, make_id(h, generation_of(word)))
    return 1


def restore(w: World, h: int, block: int) -> Generator[Op, int, int]:
    """The node moves the bytes back into a block of its own."""
    word = yield load(w.word[h])
    if state_of(word) is not State.SPILLED:
        return 0
    in_place = w.is_broken("restore_in_place")
    if not in_place and not (yield from move(w, h, word, State.SPILLING, Actor.NODE, 0)):
        return 0
    id_ = make_id(h, generation_of(word))
    data = yield load(w.file[h])
    yield store(w.block[block], LEASED)
    yield ghost(w.known_free[block], 0)
    yield store(w.bytes[block], data)
    yield store(w.location[h], block + FIRST_BLOCK)
    yield cas(w.block[block], LEASED, id_)
    if in_place:
        if not (yield from move(w, h, word, State.SEALED, Actor.NODE, 0)):
            yield from free_block(w, block, id_)
            return 0
    else:
        yield store(w.file[h], 0)
        yield from leave(w, h, State.SEALED, 0)
    return 1


def leave(w: World, h: int, state: State, slot: int) -> Generator[Op, int, None]:
    """Out of SPILLING, which nobody else can leave; only the acquires may change."""
    word = yield load(w.word[h])
    while not (yield from move(w, h, word, state, Actor.NODE, slot)):
        word = yield load(w.word[h])
    yield from settled(w, slot, h)


def lease(w: World, block: int) -> Generator[Op, int, None]:
    """The lessee takes a block that it knows to be free; nobody else touches the word then."""
    yield store(w.block[block], LEASED)
    yield ghost(w.known_free[block], 0)


def drain_returned(w: World, lessee: int) -> Generator[Op, int, int]:
    """The lessee learns which blocks are free again: a flag is a hint, the owner word decides."""
    bits = yield exchange(w.returned[lessee], 0)
    free = 0
    for block in range(len(w.blocks)):
        if bits >> block & 1:
            owner = yield load(w.block[block])
            if owner == 0:
                yield ghost(w.known_free[block], 1)
                free |= 1 << block
    return free


def new_put(w: World, slot: int, h: int, block: int, *, data: int = 0) -> Generator[Op, int, int]:
    """Makes an object in the own header `h` (FREE) and the own block; the result is its id. `data`:
    its payload, if that is not its own."""
    late = w.is_broken("owner_bit_after_seal")
    if not late:
        yield fetch_or(w.refs[h], 1 << slot)
    word = yield load(w.word[h])
    while not (yield from move(w, h, word, State.CLAIMED, Actor.OWNER, slot, claimed=True)):
        word = yield load(w.word[h])
    id_ = make_id(h, generation_of(word))
    yield ghost(w.holds[slot][h], generation_of(word))
    yield from lease(w, block)
    yield from write_block(w, h, block, id_, data or id_)
    word = yield load(w.word[h])
    while not (yield from move(w, h, word, State.SEALED, Actor.CLAIMANT, slot)):
        word = yield load(w.word[h])
    if late:
        yield fetch_or(w.refs[h], 1 << slot)
    return id_


def new_import(w: World, h: int) -> Generator[Op, int, int]:
    """The node makes a header for an object of another host; the result is its id."""
    yield fetch_or(w.refs[h], 1)
    word = yield load(w.word[h])
    while not (yield from move(w, h, word, State.CLAIMED, Actor.OWNER, 0, claimed=True)):
        word = yield load(w.word[h])
    yield ghost(w.holds[0][h], generation_of(word))
    yield store(w.location[h], NOWHERE)
    return make_id(h, generation_of(word))


def arrive_elsewhere(w: World, h: int, id_: int) -> Generator[Op, int, None]:
    """The other host has the whole value: done, to be fetched when somebody wants the bytes."""
    yield store(w.file[h], id_)
    yield store(w.location[h], IN_FILE)
    word = yield load(w.word[h])
    while not (yield from move(w, h, word, State.SPILLED, Actor.CLAIMANT, 0)):
        word = yield load(w.word[h])
    yield from settled(w, 0, h)


def write_block(w: World, h: int, block: int, id_: int, data: int) -> Generator[Op, int, None]:
    """Half the bytes, all the bytes, the location, then bind; the seal follows."""
    yield store(w.bytes[block], data | JUNK)
    yield store(w.bytes[block], data)
    yield store(w.location[h], block + FIRST_BLOCK)
    yield cas(w.block[block], LEASED, id_)
