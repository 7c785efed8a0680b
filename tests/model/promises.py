"""What must hold in every state of a scenario, and what must hold when everything is at rest.

In every state: sealed means whole, and the block belongs to the id; a holder finds its object; a
view finds its bytes; no task is completed twice. At rest: nothing leaks and no task is lost.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .header import (
    EMPTY,
    ERROR,
    FIRST_BLOCK,
    IN_FILE,
    INLINE,
    State,
    World,
    is_whole,
    make_id,
    unpack,
)
from .holders import drain_freed, drain_returned
from .memory import Memory, Op, Violation
from .tasks import drain_done

if TYPE_CHECKING:
    from collections.abc import Generator


def invariant(w: World, memory: Memory) -> None:
    """What holds in every state."""
    for h, header in enumerate(w.word):
        word = unpack(memory[header])
        id_ = make_id(h, word.generation)
        if word.state is State.SEALED:
            _check_payload(w, memory, h, id_)
        if word.state is State.FAILED and not _has_error(w, memory, h, id_):
            raise Violation(f"header {h} has failed without a whole error")
        if word.state is State.SPILLED and (
            memory[w.location[h]] == IN_FILE and not is_whole(memory[w.file[h]], id_)
        ):
            raise Violation(f"the file does not hold the bytes of {id_:#x}")
        if memory[w.completed[h]] > 1:
            raise Violation(f"task {id_:#x} is completed twice")
        for slot in range(w.slots + 1):
            held, viewed = memory[w.holds[slot][h]], memory[w.views[slot][h]]
            if (held and held != word.generation) or (viewed and viewed != word.generation):
                raise Violation(f"slot {slot} holds header {h}, which was used again")
            if (held or viewed) and word.state in EMPTY:
                raise Violation(f"header {h} is {word.state.name} although slot {slot} holds it")
            if viewed:
                _check_payload(w, memory, h, id_)


def _has_error(w: World, memory: Memory, h: int, id_: int) -> bool:
    """In the record, or, for a value that was lost elsewhere, in a block."""
    location = memory[w.location[h]]
    if location == INLINE:
        return memory[w.record[h]] & 0x3FFFFFFFF == id_ | ERROR
    block = location - FIRST_BLOCK
    return block >= 0 and memory[w.block[block]] == id_ and memory[w.bytes[block]] == id_ | ERROR


def _check_payload(w: World, memory: Memory, h: int, id_: int) -> None:
    location = memory[w.location[h]]
    if location == INLINE:
        if not is_whole(memory[w.record[h]], id_):
            raise Violation(f"the record does not hold the result of {id_:#x}")
        return
    block = location - FIRST_BLOCK
    if block < 0:
        raise Violation(f"{id_:#x} has no bytes")
    if memory[w.block[block]] != id_:
        raise Violation(f"block {block} of {id_:#x} has the owner word {memory[w.block[block]]:#x}")
    if not is_whole(memory[w.bytes[block]], w.same.get(id_, id_)):
        raise Violation(f"block {block} does not hold the bytes of {id_:#x}")


def final(w: World, memory: Memory, dead: frozenset[int], workers: frozenset[int]) -> None:
    """What holds at rest: every header is free, or holds a task that no worker is left to do."""
    for h, header in enumerate(w.word):
        word = unpack(memory[header])
        if word.state is State.QUEUED and not workers - dead:
            continue  # a task without a worker: it waits, and is held
        if word.state is not State.FREE:
            raise Violation(f"header {h} stays {word.state.name} at rest")
        if memory[w.refs[h]] or memory[w.pins[h]]:
            raise Violation(f"holder bits are left on the free header {h}")
        if memory[w.file[h]]:
            raise Violation(f"bytes of header {h} are left in the file")
    for block, lessee in enumerate(w.blocks):
        if memory[w.block[block]]:
            raise Violation(f"block {block} is never returned")
        if lessee not in dead and not memory[w.known_free[block]]:
            raise Violation(f"the lessee of block {block} never learns that it is free")


def finale(w: World, dead: frozenset[int]) -> Generator[Op, int, None]:
    """Every owner and every lessee looks at its hints once more (at refs inside objects: twice)."""
    for _round in (1, 2):
        for owner in sorted({header.owner for header in w.headers}):
            acting = 0 if owner in dead else owner
            yield from drain_done(w, acting, owner)
            yield from drain_freed(w, acting, owner)
    for lessee in sorted(set(w.blocks)):
        yield from drain_returned(w, lessee)
