"""Groups: members in tasks, in peers of spmd, and in this very thread make every call together.

The parts of each call follow from the Group's number, the call's and the rank, so each member
checks what it gets from who is in it; those who live must then have had the same calls with the
same contributors.
"""

from __future__ import annotations

import contextlib
import functools
import time
from typing import TYPE_CHECKING, Any

import numpy as np

import hoplite_mp
from tests.campaign import tasks
from tests.campaign.hand import PATIENCE_S, call
from tests.campaign.model import MANY, Known, Unexplained

if TYPE_CHECKING:
    from tests.campaign.hand import Hand

KINDS = (
    "allreduce", "reduce", "broadcast", "gather", "allgather", "reduce_scatter", "alltoall",
    "barrier", "scatter", "scan", "exscan", "messages",
)  # fmt: skip
FORM_S = 12.0  # on a machine that is busy with other tests, too
FORM_REMOTE_S = 15.0  # over hosts that may be silent
COUNTS = (8, 1000, 60_000)
REJOINED_CALLS, REJOINED_PAUSE_S = 25, 0.01


def part(turn: int, at: int, rank: int, count: int) -> Any:
    """What that rank gives to that call."""
    return np.arange(count) % 7 + float(turn % 1000 * 100 + at * 10 + rank)


def one_call(g: Any, turn: int, at: int, kind: str, count: int) -> Any:
    """Makes it and checks what comes; PeerLostError may come from one with a root."""
    mine = part(turn, at, g.rank, count)
    root = at % g.size
    parts = functools.partial(part, turn, at, count=count)
    if kind == "messages":
        return round_the_ring(g, mine, parts)
    if kind == "scatter":
        found = g.scatter([mine + rank for rank in range(g.size)], root=root)
    elif kind in ("reduce", "broadcast", "gather"):
        found = getattr(g, kind)(mine, root=root)
    elif kind == "alltoall":
        found = g.alltoall([mine + rank for rank in range(g.size)])
    elif kind == "barrier":
        found = g.barrier()
    else:
        found = getattr(g, kind)(mine) if at % 3 else getattr(g, kind + "_async")(mine).result()
    ranks = g.contributors
    if kind in ("allreduce", "reduce", "reduce_scatter"):
        wanted = sum(parts(rank) for rank in ranks)
        if kind == "reduce_scatter":
            wanted = np.array_split(wanted, g.size)[g.rank]
    elif kind == "broadcast":
        wanted = parts(root)
    elif kind == "scatter":
        wanted = parts(root) + g.rank
    elif kind in ("scan", "exscan"):
        below = [parts(rank) for rank in ranks if rank < g.rank + (kind == "scan")]
        wanted = sum(below) if below else None
    elif kind == "alltoall":
        wanted = [parts(r) + g.rank if r in ranks else None for r in range(g.size)]
    else:
        wanted = [parts(r) if r in ranks else None for r in range(g.size)]
    if kind == "barrier" or (kind in ("reduce", "gather") and g.rank != root):
        wanted = None
    if not same(found, wanted):
        raise Unexplained(f"call {at} ({kind}) of Group {turn}, rank {g.rank}: {found}, {wanted}")
    return ranks


def round_the_ring(g: Any, mine: Any, parts: Any) -> Any:
    """Each sends to the next rank; who is in it the barrier before it has said."""
    g.barrier()
    ranks = g.contributors
    left, right = (g.rank - 1) % g.size, (g.rank + 1) % g.size
    with contextlib.suppress(hoplite_mp.PeerLostError):
        g.send(mine, right)
    with contextlib.suppress(hoplite_mp.PeerLostError):
        found = g.recv(left)
        if not same(found, parts(left)):
            raise Unexplained(f"rank {g.rank} received {found} from rank {left}")
    return ranks


def same(found: Any, wanted: Any) -> bool:
    if isinstance(wanted, list):
        return len(found) == len(wanted) and all(map(same, found, wanted))
    if wanted is None or found is None:
        return wanted is found
    return found.flags.writeable and np.array_equal(found, wanted)


def member(
    rank: int, turn: int, size: int, calls: list[tuple[str, int]], form_s: float, c: Any = None
) -> Any:
    """What the calls gave: {number of the call: contributors, or the name of an error}."""
    c = c or hoplite_mp.current()
    seen: dict[int, Any] = {}
    with c.group(f"group {turn}", size, rank, timeout=form_s) as g:
        for at, (kind, count) in enumerate(calls):
            try:
                seen[at] = one_call(g, turn, at, kind, count)
            except hoplite_mp.PeerLostError:
                seen[at] = "lost"
    return seen


@call(3)
def group(h: Hand) -> None:
    size = h.dice.randint(2, 4)
    turn = h.next_turn()
    calls = [(h.dice.choice(KINDS), h.dice.choice(COUNTS)) for _ in range(h.dice.randint(1, 6))]
    how = h.dice.choice(("spmd", "tasks", "mixed"))
    h.note(how, size, [kind for kind, _ in calls])
    form_s = FORM_REMOTE_S if h.world.lossy else FORM_S
    view = h.c.options(retries=0)
    born = h.world.tally.mark()
    if how == "spmd":
        try:
            futures = view.spmd(member, size, turn, size, calls, form_s)
        except hoplite_mp.NodeLostError as error:  # it could not be started there
            Known(h.world, None, None, retries=0, bound=True, born=born).judge(error)
            return
    else:
        ranks = range(how == "mixed", size)
        futures = [view.submit(member, rank, turn, size, calls, form_s) for rank in ranks]
    seen: list[Any] = []
    failed: list[BaseException] = []
    if how == "mixed":
        try:
            seen.append(member(0, turn, size, calls, form_s, h.c))
        except Exception as error:
            failed.append(error)
    for future in futures:
        try:
            seen.append(future.result(PATIENCE_S))
        except Exception as error:
            failed.append(error)
    one = Known(h.world, None, None, retries=0, bound=True, born=born)
    deaths = one.died("worker") + one.died("host")
    for error in failed:
        if not (deaths and isinstance(error, hoplite_mp.HopliteTimeoutError)):
            one.judge(error)
    for at in range(len(calls)):
        found = {one[at] for one in seen if at in one}
        if len(found) > 1 or ("lost" in found and not deaths):
            raise Unexplained(f"members of Group {turn} saw {found} in call {at} of {calls}")
        if not deaths and not h.world.small and found != {tuple(range(size))}:
            raise Unexplained(f"nobody has died, and call {at} of Group {turn} has {found}")


@call(1)
def group_of_another_size(h: Hand) -> None:
    """A mistake of one member is an error on every rank."""
    turn = h.next_turn()
    form_s = FORM_REMOTE_S if h.world.lossy else FORM_S
    view = h.c.options(retries=0)
    futures = [view.submit(mistaken, rank, turn, form_s) for rank in range(2)]
    one = Known(h.world, None, None, retries=0, bound=True)
    for future in futures:
        try:
            future.result(PATIENCE_S)
        except (ValueError, hoplite_mp.HopliteTimeoutError) as error:
            alone = isinstance(error, hoplite_mp.HopliteTimeoutError)
            if alone and not one.died("worker") and not one.died("host"):
                one.judge(error)
        except Exception as error:
            one.judge(error)
        else:
            if not one.died("worker") and not one.died("host"):
                raise Unexplained("shapes differ, and nobody is told")


def mistaken(rank: int, turn: int, form_s: float) -> None:
    with hoplite_mp.current().group(f"group {turn}", 2, rank, timeout=form_s) as g:
        g.allreduce(tasks.array(turn, 10 + rank, "f8"))


@call(1)
def group_that_is_rejoined(h: Hand) -> None:
    """A member dies in the middle; its task, tried again, takes part in the calls that are left."""
    size, turn = h.dice.randint(2, 3), h.next_turn()
    form_s = FORM_REMOTE_S if h.world.lossy else FORM_S
    dies_at = h.dice.randint(1, REJOINED_CALLS // 2)
    path = h.path()
    view = h.c.options(retries=MANY)
    futures = [
        view.submit(rejoining, rank, turn, size, form_s, dies_at if rank == 0 else -1, path)
        for rank in range(size)
    ]
    one = Known(h.world, None, None, retries=0, bound=True)
    seen: list[dict[int, Any]] = []
    for future in futures:
        try:
            seen.append(future.result(PATIENCE_S))
        except Exception as error:
            died = one.died("worker") or one.died("host")
            if not (died and isinstance(error, hoplite_mp.HopliteTimeoutError)):
                one.judge(error)
    if one.died("worker") or one.died("host") or h.world.small:
        return  # all may have died, and have begun again from the first call
    for at in range(REJOINED_CALLS):
        found = {one[at] for one in seen if at in one}
        if len(found) != 1 or (at < dies_at and found != {tuple(range(size))}):
            raise Unexplained(
                f"members of Group {turn} saw {found} in call {at}, one dies {dies_at}"
            )
    if any(len(one) < REJOINED_CALLS for one in seen[1:]):
        raise Unexplained(f"those who live have missed calls: {seen}")


def rejoining(rank: int, turn: int, size: int, form_s: float, dies_at: int, path: str) -> Any:
    """{number of the call: contributors} of the life that ends well."""
    seen: dict[int, Any] = {}
    try:
        group = hoplite_mp.current().group(f"group {turn}", size, rank, timeout=form_s)
    except hoplite_mp.PeerLostError:  # it comes too late
        return seen
    with group as g:
        while not seen or max(seen) + 1 < REJOINED_CALLS:
            if dies_at >= 0 and len(seen) == dies_at:
                tasks.die_once(path)
            time.sleep(REJOINED_PAUSE_S)
            try:
                total = g.allreduce(np.full(10, float(1 << rank)))
            except hoplite_mp.PeerLostError:  # the others have left meanwhile
                return seen
            seen[g.calls - 1] = g.contributors
            wanted = sum(1 << one for one in g.contributors)
            if total.tolist() != [wanted] * 10:
                raise Unexplained(f"call {g.calls - 1}: {total} by {g.contributors}")
    return seen
