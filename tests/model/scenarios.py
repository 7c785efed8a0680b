"""The small worlds that are explored, and what must hold in them.

Each function builds one scenario, whole or broken by a mutation. Slot 0 is the node; after a kill
it runs the sweep as a process of its own, beside the living. A reader may always come too late
(its id is stale then); what it must never do is to read anything but the object of its id.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .header import (
    LEASED,
    ONE_ACQUIRE,
    Header,
    State,
    World,
    generation_of,
    generation_of_id,
    header_of,
    make_id,
    unpack,
)
from .holders import (
    OK,
    acquire,
    arrive_elsewhere,
    delete,
    drain_freed,
    drain_returned,
    new_import,
    new_put,
    read,
    recall,
    release,
    restore,
    spill,
)
from .memory import (
    Memory,
    Op,
    Process,
    Scenario,
    Violation,
    cas,
    fetch_add,
    fetch_or,
    ghost,
    load,
    store,
    wait,
)
from .promises import final, finale, invariant
from .sweep import sweep
from .tasks import cancel, claim, complete, drain_done, pop, submit, was_taken

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    Steps = Generator[Op, int, None]


def scenario(
    w: World,
    name: str,
    programs: dict[int, Callable[[], Steps]],
    *,
    kills: int = 1,
    workers: frozenset[int] = frozenset(),
) -> Scenario:
    def process(slot: int, program: Callable[[], Steps]) -> Process:
        label = (program.__name__ or "").strip("_")
        return Process(label, slot, program, (lambda: sweep(w, slot)) if slot else None)

    return Scenario(
        name=name,
        memory=w.memory(),
        processes=[process(slot, program) for slot, program in programs.items()],
        invariant=lambda memory: invariant(w, memory),
        finale=lambda dead: finale(w, dead),
        final=lambda memory, dead: final(w, memory, dead, workers),
        on_kill=w.after_kill,
        kills=kills,
        names=w.names,
    )


def mail(w: World, box: int, *, unless_dead: int = -1) -> Op:
    """Waits for a message, or for the death of its sender."""

    def ready(memory: Memory) -> bool:
        gone = unless_dead >= 0 and memory[w.dead] >> unless_dead & 1
        return bool(memory[w.mail[box]] or gone)

    return wait(ready, f"for mail[{box}]", idle=True)


def freed(w: World, slot: int) -> Op:
    return wait(lambda m: m[w.freed[slot]] != 0, "freed", idle=False)


# The scenarios.


def reuse(mutation: str = "", kills: int = 1, *, readers: tuple[int, ...] = (2, 3)) -> Scenario:
    """A header and its block are used a second time while readers come with ids."""
    w = World([Header(1)], [1], slots=3, mutation=mutation)

    def putter() -> Steps:
        for _life in (1, 2):
            id_ = yield from new_put(w, 1, 0, 0)
            yield store(w.mail[0], id_)
            yield from release(w, 1, 0)
            if _life == 1:
                gained = 0
                while not gained:
                    yield freed(w, 1)
                    gained = yield from drain_freed(w, 1, 1)
                free = yield from drain_returned(w, 1)
                if not free:
                    raise Violation("the block of a collected object is not free")

    def viewer() -> Steps:
        yield mail(w, 0)
        id_ = yield load(w.mail[0])
        yield from read(w, 2, id_)

    def holder() -> Steps:
        yield mail(w, 0)
        id_ = yield load(w.mail[0])
        outcome = yield from acquire(w, 3, id_)
        if outcome == OK:
            yield from read(w, 3, id_, refs_held=True)
            yield from release(w, 3, 0)

    everybody: dict[int, Callable[[], Steps]] = {1: putter, 2: viewer, 3: holder}
    programs = {slot: everybody[slot] for slot in (1, *readers)}
    return scenario(w, f"reuse, readers {readers}", programs, kills=kills)


def hand_over(mutation: str = "") -> Scenario:
    """A ref is handed on: the receiver must find the object."""
    w = World([Header(1)], [1], slots=2, mutation=mutation, mailboxes=2)

    def giver() -> Steps:
        id_ = yield from new_put(w, 1, 0, 0)
        yield store(w.mail[0], id_)
        if not w.is_broken("release_before_acquire"):
            yield mail(w, 1, unless_dead=2)
        yield from release(w, 1, 0)
        yield from drain_freed(w, 1, 1)

    def receiver() -> Steps:
        yield mail(w, 0)
        id_ = yield load(w.mail[0])
        outcome = yield from acquire(w, 2, id_)
        dead = yield load(w.dead)
        if outcome != OK and not dead:
            raise Violation("a ref that was handed on is gone")
        yield store(w.mail[1], 1)
        if outcome == OK:
            yield from read(w, 2, id_, refs_held=True)
            yield from release(w, 2, 0)

    return scenario(w, "hand over", {1: giver, 2: receiver})


def two_generations(mutation: str = "") -> Scenario:
    """A process that holds an object still has an old id of the same header, and tries it."""
    w = World([Header(1)], [1], slots=2, mutation=mutation, mailboxes=3)

    def putter() -> Steps:
        for box in (0, 1):
            id_ = yield from new_put(w, 1, 0, 0)
            yield store(w.mail[box], id_)
            if box == 1:
                yield mail(w, 2, unless_dead=2)
            yield from release(w, 1, 0)
            yield freed(w, 1)
            yield from drain_freed(w, 1, 1)
            yield from drain_returned(w, 1)

    def reader() -> Steps:
        yield mail(w, 1)
        stale = yield load(w.mail[0])
        id_ = yield load(w.mail[1])
        outcome = yield from acquire(w, 2, id_)
        if outcome == OK:
            yield store(w.mail[2], 1)
            again = yield from acquire(w, 2, stale, held=generation_of_id(id_))
            if again == OK:
                raise Violation("a stale id could be acquired")
            yield from read(w, 2, id_, refs_held=True)
            yield from release(w, 2, 0)

    return scenario(w, "two generations", {1: putter, 2: reader})


def deletion(mutation: str = "") -> Scenario:
    """Deleted while it is read: the block goes when the last view has gone, the header later."""
    w = World([Header(1), Header(1)], [1], slots=3, mutation=mutation)

    def putter() -> Steps:
        id_ = yield from new_put(w, 1, 0, 0)
        yield store(w.mail[0], id_)
        yield wait(lambda m: bool(m[w.freed[1]]) or m[w.dead] >> 3 & 1 == 1, "deletion", idle=True)
        yield from drain_freed(w, 1, 1)
        free = yield from drain_returned(w, 1)
        if free:
            yield from new_put(w, 1, 1, 0)
        yield from release(w, 1, 0)
        yield from drain_freed(w, 1, 1)  # the second return of the block must do nothing
        if free:
            yield from release(w, 1, 1)

    def viewer() -> Steps:
        yield mail(w, 0)
        id_ = yield load(w.mail[0])
        yield from read(w, 2, id_)

    def deleter() -> Steps:
        yield mail(w, 0)
        id_ = yield load(w.mail[0])
        yield from delete(w, 3, id_)

    return scenario(w, "deletion", {1: putter, 2: viewer, 3: deleter})


def lent(mutation: str = "", kills: int = 1, *, readers: tuple[int, ...] = (2,)) -> Scenario:
    """Given in place: others read the block until its giver takes it back, and writes to it."""
    w = World([Header(1)], [1], slots=3, mutation=mutation)

    def giver() -> Steps:
        id_ = yield from new_put(w, 1, 0, 0)
        yield fetch_or(w.pins[0], 1 << 1)  # that of the array over the block
        yield fetch_add(w.word[0], ONE_ACQUIRE)
        yield store(w.mail[0], id_)
        while not (yield from recall(w, 1, 0, 0)):
            yield wait(lambda m: not m[w.pins[0]] & ~(1 << 1), "the readers", idle=False)
        yield store(w.bytes[0], 0)
        yield from release(w, 1, 0)
        yield from drain_freed(w, 1, 1)
        yield cas(w.block[0], LEASED, 0)  # the array goes
        yield ghost(w.known_free[0], 1)

    def reader() -> Steps:
        yield mail(w, 0)
        id_ = yield load(w.mail[0])
        yield from read(w, 2, id_)

    def holder() -> Steps:
        yield mail(w, 0)
        id_ = yield load(w.mail[0])
        outcome = yield from acquire(w, 3, id_)
        if outcome == OK:
            yield from read(w, 3, id_)
            yield from release(w, 3, 0)

    everybody: dict[int, Callable[[], Steps]] = {1: giver, 2: reader, 3: holder}
    chosen = {slot: everybody[slot] for slot in (1, *readers)}
    return scenario(w, "lent", chosen, kills=kills)


def spilling(
    mutation: str = "", kills: int = 1, *, lives: int = 1, deleted: bool = False
) -> Scenario:
    """The node moves the bytes out and in while somebody reads or deletes, frees, uses again."""
    w = World([Header(1)], [1, 0], slots=2, mutation=mutation)

    def putter() -> Steps:
        id_ = yield from new_put(w, 1, 0, 0)
        yield store(w.mail[0], id_)
        yield from release(w, 1, 0)
        yield freed(w, 1)
        gained = yield from drain_freed(w, 1, 1)
        free = yield from drain_returned(w, 1)
        if lives == 2 and free and gained:
            yield from new_put(w, 1, 0, 0)
            yield from release(w, 1, 0)

    def mover() -> Steps:
        yield mail(w, 0)
        moved = yield from spill(w, 0)
        if moved:
            yield from restore(w, 0, 1)

    def other() -> Steps:
        yield mail(w, 0)
        id_ = yield load(w.mail[0])
        yield from (delete(w, 2, id_) if deleted else read(w, 2, id_))

    name = "spilling and deletion" if deleted else "spilling"
    return scenario(w, name, {1: putter, 0: mover, 2: other}, kills=kills)


def from_another_host(mutation: str = "", kills: int = 1, *, lives: int = 1) -> Scenario:
    """The node imports an object, which becomes ready elsewhere and is fetched while others come,
    read, delete and go."""
    w = World([Header(0)], [0], slots=2, mutation=mutation)

    def importer() -> Steps:
        id_ = yield from new_import(w, 0)
        yield store(w.mail[0], id_)
        yield from arrive_elsewhere(w, 0, id_)
        yield from restore(w, 0, 0)
        yield from release(w, 0, 0)
        if lives == 2:
            yield freed(w, 0)
            if (yield from drain_freed(w, 0, 0)):
                yield from new_import(w, 0)
                yield from arrive_elsewhere(w, 0, make_id(0, 2))
                yield from release(w, 0, 0)

    def reader() -> Steps:
        yield mail(w, 0)
        id_ = yield load(w.mail[0])
        if (yield from acquire(w, 1, id_)) == OK:
            yield from read(w, 1, id_)
            yield from release(w, 1, 0)

    def deleter() -> Steps:
        yield mail(w, 0)
        id_ = yield load(w.mail[0])
        yield from delete(w, 2, id_)

    return scenario(w, "from another host", {0: importer, 1: reader, 2: deleter}, kills=kills)


def _worker(w: World, slot: int, *, block: int = -1, fail: bool = False) -> Callable[[], Steps]:
    def worker() -> Steps:
        while True:
            h = yield from pop(w)
            if h < 0:
                continue
            word = yield from claim(w, slot, h)
            if word:
                yield from complete(w, slot, h, word, block=block, fail=fail)

    return worker


def tasks(mutation: str = "", kills: int = 1, *, lives: int = 1) -> Scenario:
    """A task with one retry, two workers, and a submitter that may die as well."""
    w = World([Header(1, tries=2)], [2], slots=3, mutation=mutation)

    def submitter() -> Steps:
        for life in range(lives):
            id_ = yield from submit(w, 1, 0)
            yield wait(lambda m: m[w.done[1]] != 0, "done", idle=True)
            yield from drain_done(w, 1, 1)
            if life + 1 == lives:
                yield from read(w, 1, id_)
            yield from release(w, 1, 0)
            if life + 1 < lives:
                gained = 0
                while not gained:
                    yield freed(w, 1)
                    gained = yield from drain_freed(w, 1, 1)

    programs = {1: submitter, 2: _worker(w, 2, block=0), 3: _worker(w, 3, fail=True)}
    return scenario(w, "tasks", programs, kills=kills, workers=frozenset([2, 3]))


def cancelling(mutation: str = "", *, force: bool = True) -> Scenario:
    """A task is cancelled, by force or not, while two workers want it."""
    w = World([Header(1, tries=2)], [2], slots=3, mutation=mutation)

    def submitter() -> Steps:
        yield from submit(w, 1, 0)
        cancelled = yield from cancel(w, 1, 0, force=force)
        word = yield load(w.word[0])
        if cancelled and unpack(word).state not in (State.ABORTED, State.CANCELLED):
            raise Violation("a cancelled task has another end")
        yield from release(w, 1, 0)

    programs = {1: submitter, 2: _worker(w, 2, block=0), 3: _worker(w, 3)}
    name = "cancelling by force" if force else "cancelling"
    return scenario(w, name, programs, workers=frozenset([2, 3]))


def result_refs(mutation: str = "", *, again: bool = False) -> Scenario:
    """A result contains a ref to an object of the worker; `again`: the header is used at once."""
    w = World([Header(1, tries=1), Header(2)], [2], slots=2, mutation=mutation)

    def submitter() -> Steps:
        yield from submit(w, 1, 0)
        yield wait(lambda m: m[w.done[1]] & 1 != 0, "done", idle=True)
        yield from drain_done(w, 1, 1)
        inside = yield load(w.keeps[1][0])
        if inside:
            yield from read(w, 1, inside, refs_held=True)
        yield from release(w, 1, 0)
        if again:
            yield freed(w, 1)
            yield from drain_freed(w, 1, 1)
            yield from submit(w, 1, 0)
            yield from cancel(w, 1, 0)
            yield from release(w, 1, 0)

    def worker() -> Steps:
        h = yield from pop(w)
        word = yield from claim(w, 2, h)
        if word:
            id_ = yield from new_put(w, 2, 1, 0)
            ended = yield from complete(w, 2, h, word, inside=id_)
            if ended:
                yield was_taken(w, make_id(h, generation_of(word)))
            yield from release(w, 2, header_of(id_))

    name = "result refs, used again" if again else "result refs"
    programs: dict[int, Callable[[], Steps]] = {1: submitter, 2: worker}
    return scenario(w, name, programs, workers=frozenset([2]))
