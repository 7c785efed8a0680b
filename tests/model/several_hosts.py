"""What several hosts, and drivers that come and go, add to the life of a header.

    lost        a value that was elsewhere becomes an error        SPILLED -> SPILLING -> FAILED
    made again  a task is run again under a header of the node's own, whose block becomes that of
                the result that was lost (`hand_over`)
    left        a driver's line has ended: its refs go, but its process still reads what it has
                pinned, until that ends, too

The node is one thread: what it does after a death is not beside what it does for these.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .header import (
    ERROR,
    FIRST_BLOCK,
    LEASED,
    NOWHERE,
    Actor,
    Header,
    State,
    World,
    generation_of,
    make_id,
    move,
    state_of,
)
from .holders import (
    OK,
    acquire,
    arrive_elsewhere,
    delete,
    drain_freed,
    lease,
    leave,
    new_import,
    new_put,
    read,
    release,
    settled,
    try_free,
)
from .memory import Memory, Op, Violation, cas, fetch_and, ghost, load, store, wait
from .scenarios import freed, mail, scenario
from .tasks import claim, pop, submit

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from .memory import Scenario

    Steps = Generator[Op, int, None]

__all__ = ["handed_over", "left", "lost_import", "lost_result"]


# ---- the node's steps


def lose(w: World, h: int, block: int) -> Generator[Op, int, int]:
    """The value is nowhere any more: its readers get an error, which is in a block."""
    word = yield load(w.word[h])
    if state_of(word) is not State.SPILLED:
        return 0
    in_place = w.is_broken("lose_in_place")
    if not in_place and not (yield from move(w, h, word, State.SPILLING, Actor.NODE, 0)):
        return 0
    id_ = make_id(h, generation_of(word))
    yield from lease(w, block)
    yield store(w.bytes[block], id_ | ERROR)
    yield cas(w.block[block], LEASED, id_)
    yield store(w.location[h], block + FIRST_BLOCK)
    yield store(w.file[h], 0)
    if not in_place:
        yield from leave(w, h, State.FAILED, 0)
    else:
        while not (yield from move(w, h, word, State.FAILED, Actor.NODE, 0)):
            word = yield load(w.word[h])
            if state_of(word) is not State.SPILLED:
                return 0
        yield from settled(w, 0, h)
    return 1


def hand_over(w: World, source: int, h: int) -> Generator[Op, int, int]:
    """The block of a sealed object becomes that of a spilled one, if nobody reads it."""
    word = yield load(w.word[source])
    if state_of(word) is not State.SEALED:
        return 0
    if not (yield from move(w, source, word, State.SPILLING, Actor.NODE, 0)):
        return 0
    if not w.is_broken("hand_over_reads_no_pins"):
        pins = yield load(w.pins[source])
        if pins:
            yield from leave(w, source, State.SEALED, 0)
            return 0
    in_place = w.is_broken("hand_over_in_place")
    target = yield load(w.word[h])
    claimed = 0
    while state_of(target) is State.SPILLED and not claimed:
        claimed = 1
        if not in_place:
            claimed = yield from move(w, h, target, State.SPILLING, Actor.NODE, 0)
        if not claimed:
            target = yield load(w.word[h])
    if not claimed:
        yield from leave(w, source, State.SEALED, 0)
        return 0
    location = yield load(w.location[source])
    yield store(w.block[location - FIRST_BLOCK], make_id(h, generation_of(target)))
    yield store(w.location[h], location)
    yield store(w.location[source], NOWHERE)
    if in_place:
        yield from move(w, h, target, State.SEALED, Actor.NODE, 0)
    else:
        yield from leave(w, h, State.SEALED, 0)
    yield from leave(w, source, State.SPILLED, 0)
    return 1


def sweep_left(w: World, slot: int) -> Generator[Op, int, None]:
    """As the sweep after a death, without its pins and blocks."""
    for h in range(len(w.headers)):
        yield fetch_and(w.refs[h], ~(1 << slot))
        if w.is_broken("left_clears_pins"):
            yield fetch_and(w.pins[h], ~(1 << slot))
        yield from try_free(w, 0, h)


# ---- the worlds


def lost_import(mutation: str = "", kills: int = 1) -> Scenario:
    """An object of another host is lost there, while others come, read, delete and go."""
    w = World([Header(0)], [0], slots=2, mutation=mutation)

    def importer() -> Steps:
        id_ = yield from new_import(w, 0)
        yield store(w.mail[0], id_)
        yield from arrive_elsewhere(w, 0, id_)
        yield from release(w, 0, 0)
        yield from lose(w, 0, 0)

    def deleter() -> Steps:
        yield mail(w, 0)
        id_ = yield load(w.mail[0])
        yield from delete(w, 2, id_)

    programs = {0: importer, 1: _reader(w, 1), 2: deleter}
    return scenario(w, "an import is lost", programs, kills=kills)


def _reader(w: World, slot: int) -> Callable[[], Steps]:
    """Whoever has got the id holds the object for a while, and reads it if it can be read."""

    def reader() -> Steps:
        yield mail(w, 0)
        id_ = yield load(w.mail[0])
        if (yield from acquire(w, slot, id_)) == OK:
            yield from read(w, slot, id_)
            yield from release(w, slot, 0)

    return reader


def _owner(w: World, block: int) -> Callable[[], Steps]:
    """Sends a task, drops its result at once, and uses the header again as soon as it is free."""

    def owner() -> Steps:
        id_ = yield from submit(w, 1, 0)
        yield store(w.mail[0], id_)
        yield from release(w, 1, 0)
        yield freed(w, 1)
        if (yield from drain_freed(w, 1, 1)):
            yield from new_put(w, 1, 0, block)
            yield from release(w, 1, 0)

    return owner


def lost_result(mutation: str = "") -> Scenario:
    """The same of a result that another host has; its submitter uses the header again."""
    w = World([Header(1, tries=1)], [0, 1], slots=2, mutation=mutation)

    def node() -> Steps:
        h = yield from pop(w)
        word = yield from claim(w, 0, h)
        if word:
            yield from arrive_elsewhere(w, 0, make_id(0, 1))
            yield from lose(w, 0, 0)

    programs = {0: node, 1: _owner(w, 1), 2: _reader(w, 2)}
    return scenario(w, "a result is lost", programs, kills=0, workers=frozenset([0]))


def handed_over(mutation: str = "", *, again: bool = False) -> Scenario:
    """A lost result gets the block of what was made again. Somebody holds the result, or (`again`)
    its submitter uses its header again; somebody with an old id looks at what was made."""
    w = World([Header(1, tries=1), Header(0)], [0, 1], slots=2, mutation=mutation, mailboxes=2)
    w.same = {make_id(1, 1): make_id(0, 1)}  # one value

    def node() -> Steps:
        h = yield from pop(w)
        word = yield from claim(w, 0, h)
        if not word:
            return
        word = yield load(w.word[0])
        while not (yield from move(w, 0, word, State.SPILLED, Actor.CLAIMANT, 0)):
            word = yield load(w.word[0])  # absent: done, and nowhere
        yield from settled(w, 0, 0)
        made = yield from new_put(w, 0, 1, 0, data=make_id(0, 1))
        yield store(w.mail[1], made)
        yield from hand_over(w, 1, 0)
        yield from release(w, 0, 1)
        yield from drain_freed(w, 0, 0)

    def late() -> Steps:
        yield mail(w, 1)
        made = yield load(w.mail[1])
        outcome = yield from acquire(w, 2, made, pin=True)
        if outcome == OK:
            location = yield load(w.location[1])
            data = yield load(w.bytes[location - FIRST_BLOCK])
            if data != make_id(0, 1):
                raise Violation(f"a view of {made:#x} shows {data:#x}")
            yield from release(w, 2, 1, pin=True)

    def dropper() -> Steps:
        id_ = yield from submit(w, 1, 0)
        yield store(w.mail[0], id_)
        yield from read(w, 1, id_)
        yield from release(w, 1, 0)

    programs = {0: node, 1: _owner(w, 1) if again else dropper, 2: late}
    return scenario(w, "handed over", programs, kills=0, workers=frozenset([0]))


def left(mutation: str = "", kills: int = 1) -> Scenario:
    """A driver's line ends while it has a ref and a view; its process reads on, and ends later."""
    w = World([Header(1)], [1], slots=2, mutation=mutation, mailboxes=2)

    def putter() -> Steps:
        id_ = yield from new_put(w, 1, 0, 0)
        yield store(w.mail[0], id_)
        yield wait(lambda m: bool(m[w.mail[1]] or m[w.dead]), "for the driver", idle=True)
        yield from delete(w, 1, id_)
        yield from release(w, 1, 0)
        yield from drain_freed(w, 1, 1)

    def driver() -> Steps:
        yield mail(w, 0)
        id_ = yield load(w.mail[0])
        if (yield from acquire(w, 2, id_)) != OK:
            return
        outcome = yield from acquire(w, 2, id_, pin=True)
        yield ghost(w.holds[2][0], 0)  # what it holds is nobody's any more
        yield store(w.mail[1], 1)
        if outcome == OK:
            location = yield load(w.location[0])
            data = yield load(w.bytes[location - FIRST_BLOCK])
            if data != id_:
                raise Violation(f"a view of {id_:#x} shows {data:#x}")
            yield from release(w, 2, 0, pin=True)

    def node() -> Steps:
        yield wait(_has_left(w), "for its line to end", idle=True)
        yield from sweep_left(w, 2)

    return scenario(w, "left", {0: node, 1: putter, 2: driver}, kills=kills)


def _has_left(w: World) -> Callable[[Memory], bool]:
    return lambda m: bool(m[w.mail[1]])
