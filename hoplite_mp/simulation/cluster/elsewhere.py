"""Tasks that run on other hosts: shared arguments, results with refs, results that differ by run.

Why it exists: a task that stays on its host needs no transfers. These need a resource that their
own host does not have, so that arguments, results and refs inside results travel. Some results
depend on how often the task has run, so that two readers notice if they read different values.
It must never know: which faults come.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from hoplite_mp.simulation.cluster.scarce import NOBODY_HAS_IT, RESOURCE
from hoplite_mp.simulation.cluster.values import Leaf, make_refs, rolled, scaled

if TYPE_CHECKING:
    from hoplite_mp.cluster import Cluster
    from hoplite_mp.simulation.cluster.host import Host
    from hoplite_mp.simulation.cluster.programs import Programs
    from hoplite_mp.simulation.cluster.truth import Truth

__all__ = ["begin_rolled", "begin_shared"]

DEATHS_MAX = 2  # that a task survives: it runs up to four times (Config.retries)
READERS_MAX = 3


def _places(work: Programs) -> tuple[list[Host], list[Host]]:
    """(hosts without the resource, hosts with it)."""
    hosts = work.hosts()
    have = [host for host in hosts if host.config.resources]
    return [host for host in hosts if host not in have], have


def _survives(truth: Truth, others: list[Host]) -> bool:
    """Must the result exist in the end? A host on which the task may run has stayed alive, and
    enough tries were left."""
    world = truth.world
    disturbed = world.cuts or world.resets or world.stops or world.managers or truth.tight
    few = len(world.lost) + world.killed <= DEATHS_MAX
    return not disturbed and few and any(host.alive for host in others) and not world.left


def begin_shared(work: Programs) -> None:
    """Begins a program whose tasks share an argument that only they hold; results are dropped and
    read in any order. In other runs the tasks return refs to what they have put where they ran."""
    (senders, others), chance = _places(work), work.chance
    if not (senders and others):
        return
    salt, width = work.salt(), chance.randint(2, 4)
    leaf = Leaf(salt, 0, max(1, work.items(2 * width)))
    dropped = chance.sample(range(width), chance.randint(0, width - 1))
    late = [chance.choice([0.0, 0.5, 1.0]) * chance.random() * work.span_s for _ in range(2)]
    refs = chance.random() < 0.5
    body = partial(_share, work, leaf, width, dropped, late, refs)
    holds = partial(_survives, work.truth, [] if refs else others)
    work.program(chance.choice(senders), f"shared {salt}", body, holds=holds)


def _share(
    work: Programs,
    leaf: Leaf,
    width: int,
    dropped: list[int],
    late: list[float],
    refs: bool,
    c: Cluster,
) -> None:
    import time

    there = c.options(resources={RESOURCE: 1})
    name = f"shared {leaf.salt}"
    if refs:
        made: Any = there.submit(make_refs, [leaf, leaf]).ref
        time.sleep(late[0])
        inner = work.value(c, made, name)
        del made
        time.sleep(late[1])
        for one in inner:
            work.truth.check_leaf(leaf, work.value(c, one, name))
        return
    argument = c.put(leaf.array())
    results: list[Any] = [there.submit(scaled, argument, factor).ref for factor in range(width)]
    del argument
    time.sleep(late[0])
    for index in dropped:
        results[index] = None
    time.sleep(late[1])
    for factor, ref in enumerate(results):
        if ref is not None:
            work.truth.check_value(work.value(c, ref, name), leaf.array() * factor, name)


def begin_rolled(work: Programs) -> None:
    """Begins programs that read a task's result that tells how often the task has run: as long as
    anybody holds a value of it, all must read that one."""
    (senders, others), chance = _places(work), work.chance
    if not (senders and others):
        return
    leaf = Leaf(work.salt(), 1, max(1, work.items(4)))
    name = f"rolled {leaf.salt}"
    readers = chance.randint(1, READERS_MAX)
    users = [readers + 1]

    def send(c: Cluster) -> None:
        ref = None
        try:
            ref = c.options(resources={RESOURCE: 1}).submit(rolled, leaf).ref
        except ValueError as error:
            if NOBODY_HAS_IT not in str(error):
                raise
        work.board.publish(name, None if ref is None else ref._id)
        if ref is not None:
            c.wait([ref], timeout=work.span_s)
            _roll(work, leaf, name, 0.0, users, ref, c)

    def read(late: float, c: Cluster) -> None:
        ref = work.ref(c, name)
        if ref is not None:
            _roll(work, leaf, name, late, users, ref, c)

    work.program(chance.choice(senders), name, send)
    for _ in range(readers):
        late = chance.choice([0.0, 0.1, 1.0]) * chance.random() * work.span_s
        work.program(chance.choice(work.hosts()), f"reader of {name}", partial(read, late))


def _roll(
    work: Programs, leaf: Leaf, name: str, late: float, users: list[int], ref: Any, c: Cluster
) -> None:
    import time

    try:
        time.sleep(late)
        value = work.value(c, ref, f"reader of {name}")
        run = int(value[0] - leaf.array()[0])
        work.truth.check_value(value, leaf.array() + run, name)
        if not work.truth.tight:  # else a copy may have to be dropped
            work.truth.note_call((name, 0), (run,))
    finally:
        users[0] -= 1
        if not users[0]:
            work.board.publish(f"{name} is not needed", None)
    work.board.find(f"{name} is not needed")  # until then it holds the value that it has read
