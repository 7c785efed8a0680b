"""What the node does after the death of a client, in the order in which it must.

1. settle what the dead client had claimed, and what waits in its tables;
2. hold, in its place, the refs inside objects that nobody else holds yet;
3. clear its bits everywhere, and repeat every hint (done, freed) that it may have owed;
4. take back its blocks, and repeat the returned flags and the queued hints;
5. collect for its tables from now on.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .header import (
    DONE,
    EMPTY,
    ERROR,
    FIRST_BLOCK,
    INLINE,
    LEASED,
    NOWHERE,
    Actor,
    State,
    Word,
    World,
    generation_of,
    generation_of_id,
    header_of,
    make_id,
    move,
    state_of,
    unpack,
)
from .holders import OK, acquire, drain_freed, release, try_free
from .memory import Op, cas, fetch_and, fetch_or, load, look, store, wait
from .tasks import drain_done, post, take, was_taken

if TYPE_CHECKING:
    from collections.abc import Generator


def sweep(w: World, dead: int) -> Generator[Op, int, None]:
    everything = range(len(w.headers))
    if w.is_broken("sweep_blocks_first"):
        yield from _take_back_blocks(w, dead)
    for h in everything:
        yield from _settle(w, dead, h)
    if w.is_broken("sweep_holds_late"):
        yield from _clear_bits(w, dead)
    held = 0
    for h in everything:
        inside = yield from _hold_inside(w, dead, h)
        held = held or inside
    if not w.is_broken("sweep_holds_late"):
        yield from _clear_bits(w, dead)
    if not w.is_broken("sweep_blocks_first"):
        yield from _take_back_blocks(w, dead)
    if not w.is_broken("sweep_forgets_hints"):
        for h in everything:
            word = yield load(w.word[h])
            if state_of(word) is State.QUEUED:
                yield post(w, h)
    if held:  # one at most in these worlds: the result that nobody had taken
        yield was_taken(w, held)
        inside = yield load(w.nested[header_of(held)])
        yield from release(w, 0, header_of(inside))
    yield from _adopt(w, dead)


def _settle(w: World, dead: int, h: int) -> Generator[Op, int, None]:
    owned = w.headers[h].owner == dead
    word = yield load(w.word[h])
    while True:
        before = unpack(word)
        if before.claimant == dead and before.state in (State.CLAIMED, State.ABORTED):
            moved = yield from _settle_claim(w, h, word)
        elif owned and before.state in (State.WAITING, State.QUEUED):
            moved = yield from _fail_pending(w, h, word)
        elif before.claimant == 0 and before.state is State.CLAIMED and owned:
            moved = yield from _fail(w, h, word)
        else:
            completed = before.claimant == dead and before.state in DONE and not owned
            if completed and not w.is_broken("sweep_done_once"):
                yield fetch_or(w.done[w.headers[h].owner], 1 << h)
            return
        word = yield load(w.word[h])
        if moved and state_of(word) is State.QUEUED:
            return


def _settle_claim(w: World, h: int, word: int) -> Generator[Op, int, int]:
    before = unpack(word)
    owner = w.headers[h].owner
    dead_slots = yield look(w.dead)
    if before.state is State.CLAIMED and (
        before.attempt >= w.headers[h].tries or dead_slots >> owner & 1
    ):
        moved = yield from _fail(w, h, word)
        return moved
    if not w.is_broken("requeue_keeps_location"):
        yield store(w.location[h], NOWHERE)
    if before.state is State.ABORTED:
        moved = yield from move(w, h, word, State.CANCELLED, Actor.NODE, 0)
        if moved:
            yield fetch_or(w.done[owner], 1 << h)
        return moved
    moved = yield from move(w, h, word, State.QUEUED, Actor.NODE, 0)
    return moved


def _fail(w: World, h: int, word: int) -> Generator[Op, int, int]:
    """Writes the error in the place of a dead claimant, whose location must not survive it."""
    yield from _write_error(w, h, word)
    moved = yield from move(w, h, word, State.FAILED, Actor.NODE, 0)
    if moved:
        yield fetch_or(w.done[w.headers[h].owner], 1 << h)
    return moved


def _write_error(w: World, h: int, word: int) -> Generator[Op, int, None]:
    if not w.is_broken("sweep_keeps_location"):
        yield store(w.location[h], INLINE)
    yield store(w.record[h], make_id(h, generation_of(word)) | ERROR)


def _fail_pending(w: World, h: int, word: int) -> Generator[Op, int, int]:
    """A dead submitter's task. It is claimed first: only a claimant may write the record."""
    if w.is_broken("fail_queued_directly"):
        yield from _write_error(w, h, word)
        moved = yield from move(w, h, word, State.FAILED, Actor.OWNER, 0)
        return moved
    moved = yield from move(w, h, word, State.CLAIMED, Actor.OWNER, 0, claimed=True)
    return moved


def _hold_inside(w: World, dead: int, h: int) -> Generator[Op, int, int]:
    """The id of the object whose inner ref the node now holds until it is taken, or 0."""
    word = yield load(w.word[h])
    before = unpack(word)
    if before.state is not State.SEALED:
        return 0
    if w.headers[h].owner == dead:
        yield from take(w, 0, h)
        return 0
    if before.claimant != dead:
        return 0
    taken = yield load(w.taken[h])
    if taken:
        return 0
    id_ = make_id(h, before.generation)
    outcome = yield from acquire(w, 0, id_)  # keeps the payload readable
    if outcome != OK:
        return 0
    inside = yield load(w.nested[h])
    kept = 0
    if inside:
        outcome = yield from acquire(w, 0, inside)
        kept = id_ if outcome == OK else 0
    yield from release(w, 0, h)
    return kept


def _clear_bits(w: World, dead: int) -> Generator[Op, int, None]:
    for h in range(len(w.headers)):
        yield fetch_and(w.refs[h], ~(1 << dead))
        yield fetch_and(w.pins[h], ~(1 << dead))
        yield from try_free(w, 0, h)
        if not w.is_broken("sweep_freed_once"):
            word = yield load(w.word[h])
            if state_of(word) in (State.FREED, State.DELETED):
                yield fetch_or(w.freed[w.headers[h].owner], 1 << h)


def _take_back_blocks(w: World, dead: int) -> Generator[Op, int, None]:
    """Keeps the blocks to which a live header points; trusts nothing that the dead one wrote."""
    for block, lessee in enumerate(w.blocks):
        if lessee != dead:
            continue
        owner = yield load(w.block[block])
        if owner == LEASED:
            yield store(w.block[block], 0)
        elif owner:
            pointed = yield from _is_pointed_at(w, block, owner)
            if not pointed:
                yield cas(w.block[block], owner, 0)
    if not w.is_broken("sweep_returned_once"):
        for lessee in sorted(set(w.blocks)):
            mine = sum(1 << b for b, owner in enumerate(w.blocks) if owner == lessee)
            yield fetch_or(w.returned[lessee], mine)


def _is_pointed_at(w: World, block: int, id_: int) -> Generator[Op, int, bool]:
    h = header_of(id_)
    word = yield load(w.word[h])
    location = yield load(w.location[h])
    before: Word = unpack(word)
    alive = before.generation == generation_of_id(id_) and before.state not in EMPTY
    here = location == block + FIRST_BLOCK or w.is_broken("sweep_keeps_generation_match")
    return alive and here


def _adopt(w: World, dead: int) -> Generator[Op, int, None]:
    """The node is the owner of the dead client's tables: all headers once, then by the hints."""
    mine = [h for h, header in enumerate(w.headers) if header.owner == dead]
    if not mine:
        return
    bits = sum(1 << h for h in mine)
    del mine
    yield fetch_or(w.freed[dead], bits)
    while True:
        yield from drain_freed(w, 0, dead)
        yield from drain_done(w, 0, dead)
        yield wait(lambda m: bool(m[w.freed[dead]] | m[w.done[dead]]), "adopted", idle=True)
