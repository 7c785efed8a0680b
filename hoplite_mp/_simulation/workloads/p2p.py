"""Messages between two members of a Group, and members that rejoin.

What is received from a rank is a prefix of what it has sent, and all of it if the rank left in
order, or died alone while its host lived. A rank that rejoins takes part beginning with a call that
no rank had begun, and all members agree which call that is.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from hoplite_mp._simulation.oracle.oracle import WrongEnd
from hoplite_mp._simulation.oracle.values import Leaf
from hoplite_mp.errors import PeerLostError

if TYPE_CHECKING:
    from hoplite_mp._api.cluster import Cluster
    from hoplite_mp._simulation.workloads.programs import Programs

__all__ = ["begin_letters", "begin_rejoining"]

SIZE_MAX, LETTERS_MAX, STEPS_MAX = 4, 12, 12
# Pause between the calls of a Group, so that it has not ended before its member returns.
STEP_S = 0.02


# ---- letters


def begin_letters(work: Programs) -> None:
    """Begins members that send numbered messages to all others, and receive theirs."""
    hosts, chance = work.hosts(), work.chance
    if not hosts:
        return
    work.groups += 1
    size, salt = chance.randint(2, SIZE_MAX), work.salt()
    counts = [chance.randint(0, LETTERS_MAX) for _ in range(size)]
    items = work.items(size * max(1, sum(counts)))
    sent: set[tuple[int, int, int]] = set()
    for rank in range(size):
        body = partial(_correspond, work, salt, rank, counts, items, chance.random() * 0.05, sent)
        work.program(chance.choice(hosts), f"rank {rank} of letters {salt}", body)


def _correspond(
    work: Programs,
    salt: int,
    rank: int,
    counts: list[int],
    items: int,
    pause: float,
    sent: set[tuple[int, int, int]],
    c: Cluster,
) -> None:
    """sent: (rank, number, receiver) of letters that were sent, by any rank."""
    import time

    others = [one for one in range(len(counts)) if one != rank]
    with c.group(f"letters {salt}", len(counts), rank) as g:
        for number in range(counts[rank]):
            for to in others:
                try:
                    g.send((number, Leaf(salt, rank, items).array() + number), to=to)
                except PeerLostError as error:
                    work.oracle.check_error(f"a letter of {salt} to {to}", error)
                else:
                    sent.add((rank, number, to))
            if number == counts[rank] // 2:
                time.sleep(pause)
        for source in others:
            _receive(work, g, salt, source, counts[source], items, sent)


def _receive(
    work: Programs,
    g: Any,
    salt: int,
    source: int,
    count: int,
    items: int,
    sent: set[tuple[int, int, int]],
) -> None:
    for expected in range(count):
        try:
            number, value = g.recv(source=source)
        except PeerLostError as error:
            world = work.world
            disturbed = world.cuts or world.resets or world.stops or world.crawls
            hosts_stay = not (world.lost or disturbed)
            holds = hosts_stay and (source, expected, g.rank) in sent and not work.oracle.tight
            work.oracle.check_error(f"letter {expected} of {source} in {salt}", error, holds)
            return
        if number != expected:
            raise WrongEnd(f"letter {number} of {source} in {salt} came in the place of {expected}")
        work.oracle.check_value(
            value, Leaf(salt, source, items).array() + number, f"a letter of {salt}"
        )


# ---- members that rejoin


def begin_rejoining(work: Programs) -> None:
    """Begins members that repeat the same call; some ranks have a second life."""
    hosts, chance = work.hosts(), work.chance
    if not hosts:
        return
    work.groups += 1
    size, salt = chance.randint(2, SIZE_MAX + 1), work.salt()
    steps = chance.randint(3, STEPS_MAX)
    for rank in range(size):
        body = partial(_step, work, salt, size, rank, 1, steps, 0.0)
        work.program(chance.choice(hosts), f"rank {rank} of rejoined {salt}", body)
    dies = chance.sample(range(size), chance.choice([0, 1, 1, 2]))
    for rank in dies:
        at = chance.random() * steps * STEP_S
        work.world.timeline.after(at, _kill, work, f"rank {rank} of rejoined {salt}")
        late = at + chance.choice([0.001, 0.05]) * chance.random()
        body = partial(_step, work, salt, size, rank, 2, steps, late)
        work.program(chance.choice(hosts), f"rank {rank} again of rejoined {salt}", body)


def _kill(work: Programs, name: str) -> None:
    for host in work.world.hosts:
        for process in host.programs:
            if process.name == name and process.alive and host.alive:
                work.world.kill(host, process)


def _step(
    work: Programs,
    salt: int,
    size: int,
    rank: int,
    life: int,
    steps: int,
    late: float,
    c: Cluster,
) -> None:
    import time

    time.sleep(late)
    try:
        g = c.group(f"rejoined {salt}", size, rank)
    except (ValueError, PeerLostError):
        if life == 1:
            raise
        return  # the first life is still there, or the Group has ended
    with g:
        while (g.calls or 0) < steps:
            time.sleep(STEP_S)
            mine = np.zeros(size)
            mine[rank] = life
            total = g.allreduce(mine)
            if tuple(np.flatnonzero(total)) != g.contributors:
                raise WrongEnd(f"call {g.calls} of {salt} is {total}, of {g.contributors}")
            if total[rank] != life:
                raise WrongEnd(f"call {g.calls} of {salt} is {total} for life {life} of {rank}")
            work.oracle.reads += 1
            # When all first lives are over, the second ones make another Group of that name.
            call = f"{salt} ({g._generation})", g.calls or 0
            work.oracle.note_call(call, (*g.contributors, *map(int, total)))
