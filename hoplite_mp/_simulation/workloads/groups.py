"""Groups in a run: members on many hosts that make collective calls, and may die at any time.

Survivors continue, and must agree on the contributors and the result of each call.
"""

from __future__ import annotations

import functools
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from hoplite_mp._serialize.contributions import LOST_SHARE
from hoplite_mp._simulation.oracle.oracle import WrongEnd
from hoplite_mp._simulation.oracle.values import Leaf, WrongBytes, contributors_in
from hoplite_mp._simulation.workloads.programs import HANGS_S
from hoplite_mp.errors import (
    HopliteTimeoutError,
    ObjectLostError,
    PeerLostError,
    StoreFullError,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from hoplite_mp._api.cluster import Cluster
    from hoplite_mp._simulation.oracle.oracle import Oracle
    from hoplite_mp._simulation.workloads.programs import Programs

__all__ = ["begin_group", "begin_p2p", "begin_rejoining"]


MEMBERS_MAX = 8
CALLS_MAX = 5
# Some Groups make this many times as many calls, of kinds that engines can execute. The first call
# opens the engines, which then execute most of the remaining calls.
LONG_FACTOR = 4
# Groups with salt % SPLIT == 1 are split at the end: a quarter of all, because salts are odd.
SPLIT = 8
# Groups with salt % SPLIT == REPEATED repeat a few calls, which are not small: their nodes reuse
# the plans of earlier calls. One call has a different size. Members pass an array of at least
# REPEATED_ITEMS_MIN items. Half of these Groups have one member per host, if there are enough
# hosts, and make more calls, on which engines vote.
REPEATED, REPEATED_ITEMS_MIN = 3, (4_000, 12_000)
VOTES_SALT_MIN = 16  # of salt % (4 * SPLIT)
# Groups with salt % SPLIT == OTHERS use other operators: the mean of bytes is eight times as large
# as its inputs, and hypot has no kernel. In half of their calls, parts barely fit into messages.
OTHERS, INSIDE_ITEMS = 5, 1_500
OPERATORS: tuple[tuple[Any, Any], ...] = (
    ("mean", np.uint8), (np.hypot, np.float64), ("max", np.int16),
)  # fmt: skip
# Members of Groups with salt % SPLIT == TIMED leave by a timeout (even ranks, after the first
# call), or by an interruption (every other odd rank), and then immediately write to their arrays.
TIMED, TIMEOUT_S = 7, 0.004
# Some Groups of at most FEW members pass values so large that the first bytes are sent while the
# member still writes the rest (WRITE_ROUND_BYTES).
FEW, LARGE_ITEMS = 3, 400_000
KINDS = ("allreduce", "allreduce", "reduce_scatter", "broadcast", "reduce", "gather", "allgather",
         "alltoall", "scatter", "scan", "exscan", "refs", "barrier")  # fmt: skip
SMALL = ("allreduce", "broadcast", "reduce", "gather", "allgather", "reduce_scatter", "barrier",
         "allreduce", "barrier", "scan")  # fmt: skip


def begin_group(work: Programs) -> None:
    """Starts programs that become members of one Group and make the same calls."""
    hosts, rng = work.hosts(), work.rng
    if not hosts:
        return
    work.groups += 1
    size, salt = rng.randint(1, MEMBERS_MAX), work.salt()
    calls = [rng.choice(KINDS) for _ in range(rng.randint(1, CALLS_MAX))]
    if rng.random() < 0.3:
        calls = [rng.choice(SMALL) for _ in range(LONG_FACTOR * len(calls))]
    items = [work.items(2 * size) for _ in calls]
    if size <= FEW and rng.random() < 0.25:
        items[0] = LARGE_ITEMS
    roots = [rng.randrange(size) for _ in calls]
    plan = tuple(zip(calls, items, roots, strict=True))
    votes = False
    if salt % SPLIT == REPEATED:
        votes = salt % (4 * SPLIT) >= VOTES_SALT_MIN and size <= len(hosts)
        plan = _repeated(plan, REPEATED_ITEMS_MIN[salt // SPLIT % 2], votes)
    if salt % SPLIT == OTHERS:
        inside = [items if at % 2 else INSIDE_ITEMS for at, items in enumerate(items)]
        plan = tuple(zip(calls, inside, roots, strict=True))
    places = [rng.choice(hosts) for _ in range(size)]
    if votes:
        at = hosts.index(places[0])
        places = [*hosts[at:], *hosts[:at]][:size]
    holds = work.no_errors_on(*places)
    leave: list[int] = []  # ranks that leave before the last call
    if salt % SPLIT == TIMED:
        leave += range(0, size, 2)
    for rank in range(size):
        late = rng.choice([0.0, 0.0, 0.001, 0.1]) * rng.random()
        pauses = [rng.choice([0.0, 0.0, 0.0, 0.01]) * rng.random() for _ in calls]
        leaves_after = rng.choice([None] * 5 + [rng.randint(1, len(calls))])
        if leaves_after is not None:
            leave.append(rank)
        member = partial(
            _member, work.oracle, salt, size, rank, plan, late, pauses, leaves_after,
            lambda: not leave and holds(),
        )  # fmt: skip
        work.program(places[rank], f"rank {rank} of group {salt}", member)


def _repeated(
    plan: tuple[tuple[str, int, int], ...], items_min: int, votes: bool
) -> tuple[tuple[str, int, int], ...]:
    """Returns repetitions of the first and the last call of the plan."""
    first, last = ((kind, max(items, items_min), root) for kind, items, root in (plan[0], plan[-1]))
    kind, items, root = first
    other = kind, 2 * items, root
    more = [first, first, first, first, last, last, first] if votes else []
    return first, first, last, first, other, first, last, first, *more


def _member(
    oracle: Oracle,
    salt: int,
    size: int,
    rank: int,
    plan: tuple[tuple[str, int, int], ...],
    late: float,
    pauses: list[float],
    leaves_after: int | None,
    holds: Callable[[], bool],
    c: Cluster,
) -> None:
    import time

    time.sleep(late)
    with c.group(f"group {salt}", size, rank) as g:
        for call, (kind, items, root) in enumerate(plan):
            if call == leaves_after:
                return
            if salt % SPLIT == TIMED:
                _arrange_timeout(g, salt, call)
            time.sleep(pauses[call % len(pauses)])
            oracle.world.calls_begun += 1
            try:
                given = _given(g, _array(salt, call, rank, items), (salt + call + rank) % 2 == 0)
                value = _call(c, g, kind, _operator(salt, call)[0], given, rank, root)
                given[...] = 1  # allowed: no other rank reads it after the call
            except (HopliteTimeoutError, Interrupted):
                given[...] = 1
                if salt % SPLIT != TIMED:
                    raise
                c.group(f"group {salt}", size, rank).close()  # the rank is free
                return
            except (PeerLostError, ObjectLostError) as error:
                oracle.check_error(f"{kind} {call} of group {salt}", error, holds())
                if isinstance(error, PeerLostError) and LOST_SHARE not in str(error):
                    oracle.note_call((salt, call), ("lost",))
                continue
            _check(oracle, salt, call, kind, items, root, rank, size, value, g.contributors)
        if salt % SPLIT == 1:
            _split(oracle, g, Leaf(salt + len(plan), rank, 1), holds)


class Interrupted(Exception):
    """Raised during a call, as by a signal handler."""


def _arrange_timeout(g: Any, salt: int, call: int) -> None:
    """Arranges a timeout or an interruption of the next call, for some ranks."""
    if g.rank % 2 == 0 and call:
        g._member.timeout = TIMEOUT_S * (1 + g.rank)
    if g.rank % 4 == 1 and call == 1 + salt // SPLIT % 2:
        polls, wait = iter(range(salt // SPLIT % 5)), g._member.wait

        def interrupted(condition: Callable[[], Any], *limits: Any) -> None:
            def poll() -> Any:
                if next(polls, None) is None:
                    raise Interrupted
                return condition()

            wait(poll, *limits)

        g._member.wait = interrupted


def _split(oracle: Oracle, g: Any, leaf: Leaf, holds: Callable[[], bool]) -> None:
    """Splits the Group into even and odd ranks, which sum their values."""
    try:
        with g.split(leaf.index % 2) as part:
            value = part.allreduce(leaf.array())
    except PeerLostError as error:
        oracle.check_error(f"split of group {leaf.salt}", error, holds())
        return
    oracle.reads += 1
    found = contributors_in(value, leaf.salt)
    if leaf.index not in found or any((leaf.index - one) % 2 for one in found):
        raise WrongBytes(f"split of group {leaf.salt} at rank {leaf.index}: contributors {found}")


def _operator(salt: int, call: int) -> tuple[Any, Any]:
    """Returns the operator of a call, and the dtype of its members' values."""
    if salt % SPLIT != OTHERS:
        return "sum", np.int64
    return OPERATORS[(salt // SPLIT + call) % len(OPERATORS)]


def _array(salt: int, call: int, rank: int, items: int) -> Any:
    """Returns the member's value: 8 * `items` bytes."""
    dtype = np.dtype(_operator(salt, call)[1])
    return Leaf(salt + call, rank, 8 * items // dtype.itemsize).array().astype(dtype, copy=False)


def _given(g: Any, array: Any, in_place: bool) -> Any:
    """Returns the member's value; in the store if `in_place` and if it fits."""
    if not in_place:
        return array
    try:
        stored = g.empty(array.shape, array.dtype)
    except StoreFullError:
        return array
    stored[...] = array
    return stored


def _call(c: Cluster, g: Any, kind: str, op: Any, given: Any, rank: int, root: int) -> Any:
    """Makes the call. The part for a rank is the member's value plus that rank."""
    if kind == "barrier":
        return g.barrier()
    if kind == "broadcast":
        return g.broadcast(given if rank == root else None, root=root)
    if kind == "gather":
        return g.gather(given, root=root)
    if kind == "reduce":
        return g.reduce(given, root=root, op=op)
    if kind in ("alltoall", "scatter"):
        parts = [given + to for to in range(g.size)]
        if kind == "alltoall":
            return g.alltoall(parts)
        return g.scatter(parts if rank == root else None, root=root)
    if kind == "refs":  # only the call holds these objects
        gathered = g.allgather({"ref": c.put(given.copy()), "pad": bytes(8 * given.size)})
        return [None if one is None else c.get(one["ref"], timeout=HANGS_S) for one in gathered]
    if kind == "allgather":
        return g.allgather(given)
    return getattr(g, kind)(given, op=op)


def _folded(op: Any, arrays: list[Any]) -> Any:
    """Returns the reduction of the arrays, in the order of ranks."""
    if op == "mean":
        return sum(array.astype(np.float64) for array in arrays) / len(arrays)
    return functools.reduce({"sum": np.add, "max": np.maximum}.get(op, op), arrays)


def _check(
    oracle: Oracle,
    salt: int,
    call: int,
    kind: str,
    items: int,
    root: int,
    rank: int,
    size: int,
    value: Any,
    contributors: tuple[int, ...],
) -> None:
    """Checks that members agree on the contributors, and that the value results from these."""
    what = f"{kind} {call} of group {salt}"
    if rank not in contributors:
        raise WrongEnd(f"{what}: rank {rank} is not among the contributors {contributors}")
    oracle.note_call((salt, call), contributors)
    leaves = {one: _array(salt, call, one, items) for one in contributors}
    op = _operator(salt, call)[0]
    if kind in ("allreduce", "reduce", "reduce_scatter"):
        whole = _folded(op, [leaves[one] for one in contributors])
        if kind == "reduce" and rank != root:
            expected: Any = None
        else:
            expected = np.array_split(whole, size)[rank] if kind == "reduce_scatter" else whole
    elif kind in ("scan", "exscan"):
        below = [leaves[one] for one in contributors if one < rank + (kind == "scan")]
        expected = _folded(op, below) if below else None
    elif kind == "broadcast":
        expected = leaves[root]
    elif kind == "scatter":
        expected = leaves[root] + rank
    elif kind == "alltoall":
        expected = [leaves[one] + rank if one in leaves else None for one in range(size)]
    elif kind in ("allgather", "refs") or (kind == "gather" and rank == root):
        expected = [leaves.get(one) for one in range(size)]
    else:
        expected = None
    oracle.reads += 1
    if not _equal(value, expected):
        raise WrongBytes(f"{what}, contributors {contributors}: {str(value)[:200]}")
    if isinstance(value, np.ndarray) and value.flags.writeable:
        value += 1  # allowed: each rank has its own result


def _equal(value: Any, expected: Any) -> bool:
    if isinstance(expected, list):
        return (
            isinstance(value, list)
            and len(value) == len(expected)
            and all(map(_equal, value, expected))
        )
    if expected is None or value is None:
        return value is expected
    return value.dtype == expected.dtype and np.array_equal(value, expected)


# Point-to-point messages, and members that rejoin.
#
# The messages received from a rank are a prefix of those sent. They are complete if the rank called
# close(), or died while its host lived. A rank that rejoins takes part from the first call that no
# rank had started, and all members agree on that call.


SIZE_MAX, MESSAGES_MAX, STEPS_MAX = 4, 12, 12
# Pause between the calls of a Group, which must not end before its member rejoins.
STEP_S = 0.02


# ---- point-to-point messages


def begin_p2p(work: Programs) -> None:
    """Starts members that send numbered messages to all other members, and receive theirs."""
    hosts, rng = work.hosts(), work.rng
    if not hosts:
        return
    work.groups += 1
    size, salt = rng.randint(2, SIZE_MAX), work.salt()
    counts = [rng.randint(0, MESSAGES_MAX) for _ in range(size)]
    items = work.items(size * max(1, sum(counts)))
    sent: set[tuple[int, int, int]] = set()
    for rank in range(size):
        body = partial(_exchange, work, salt, rank, counts, items, rng.random() * 0.05, sent)
        work.program(rng.choice(hosts), f"rank {rank} of letters {salt}", body)


def _exchange(
    work: Programs,
    salt: int,
    rank: int,
    counts: list[int],
    items: int,
    pause: float,
    sent: set[tuple[int, int, int]],
    c: Cluster,
) -> None:
    """sent: (rank, number, receiver) of each message that any rank has sent."""
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
            holds = (
                hosts_stay and (source, expected, g.rank) in sent and not work.oracle.small_stores
            )
            work.oracle.check_error(f"letter {expected} of {source} in {salt}", error, holds)
            return
        if number != expected:
            raise WrongEnd(f"message {number} of {source} in {salt}, expected {expected}")
        work.oracle.check_value(
            value, Leaf(salt, source, items).array() + number, f"a letter of {salt}"
        )


# ---- members that rejoin


def begin_rejoining(work: Programs) -> None:
    """Starts members that repeat the same call. Some ranks are killed and rejoin."""
    hosts, rng = work.hosts(), work.rng
    if not hosts:
        return
    work.groups += 1
    size, salt = rng.randint(2, SIZE_MAX + 1), work.salt()
    steps = rng.randint(3, STEPS_MAX)
    for rank in range(size):
        body = partial(_step, work, salt, size, rank, 1, steps, 0.0)
        work.program(rng.choice(hosts), f"rank {rank} of rejoined {salt}", body)
    dies = rng.sample(range(size), rng.choice([0, 1, 1, 2]))
    for rank in dies:
        at = rng.random() * steps * STEP_S
        work.world.timeline.after(at, work.kill, f"rank {rank} of rejoined {salt}")
        late = at + rng.choice([0.001, 0.05]) * rng.random()
        body = partial(_step, work, salt, size, rank, 2, steps, late)
        work.program(rng.choice(hosts), f"rank {rank} again of rejoined {salt}", body)


def _step(
    work: Programs,
    salt: int,
    size: int,
    rank: int,
    incarnation: int,
    steps: int,
    late: float,
    c: Cluster,
) -> None:
    import time

    time.sleep(late)
    try:
        g = c.group(f"rejoined {salt}", size, rank)
    except (ValueError, PeerLostError):
        if incarnation == 1:
            raise
        return  # the first incarnation still lives, or the Group has ended
    with g:
        while (g.calls or 0) < steps:
            time.sleep(STEP_S)
            mine = np.zeros(size)
            mine[rank] = incarnation
            total = g.allreduce(mine)
            if tuple(np.flatnonzero(total)) != g.contributors:
                raise WrongEnd(f"call {g.calls} of {salt}: {total}, contributors {g.contributors}")
            if total[rank] != incarnation:
                raise WrongEnd(
                    f"call {g.calls} of {salt}: {total} at incarnation {incarnation} of rank {rank}"
                )
            work.oracle.reads += 1
            # After the end of all first incarnations, the second ones form a new Group.
            call = f"{salt} ({g._member.generation})", g.calls or 0
            work.oracle.note_call(call, (*g.contributors, *map(int, total)))
