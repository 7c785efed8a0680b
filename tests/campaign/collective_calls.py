"""Collectives on refs: ops, the first k, deadlines, placements, failing and pending sources."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import numpy as np

import hoplite_mp
from tests.campaign import tasks
from tests.campaign.hand import PATIENCE_S, call
from tests.campaign.model import MANY, Known, Unexplained

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.campaign.hand import Hand

OPS = {
    "sum": np.add, "min": np.minimum, "max": np.maximum, "mean": np.add,
    "and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor, "prod": np.multiply,
    np.maximum: np.maximum, np.gcd: np.gcd,
}  # fmt: skip
WHOLE = ("and", "or", "xor", "prod", np.gcd)  # of integers: products wrap, in any order


def folded(op: Any, values: Sequence[Any]) -> Any:
    """What a reduction of them must be; exact, for the numbers are whole."""
    with np.errstate(over="ignore"):
        total = functools.reduce(OPS[op], values)
    return total / len(values) if op == "mean" else total


def op_and_sources(h: Hand) -> tuple[Any, list[Known]]:
    op = h.dice.choice(list(OPS))
    some = h.alike(h.dice.randint(1, 5), "i8" if op in WHOLE else "f8")
    for one in some:
        if h.dice.random() < 0.2:  # it is late
            late = h.c.options(retries=MANY).submit(tasks.slow, one.ref, h.dice.random() * 0.1)
            some[some.index(one)] = Known(h.world, late, one.value + 1, (one,))
    return op, some


def finish(h: Hand, one: Known, op: Any, some: list[Known], num: int) -> None:
    """Its value follows from who has contributed."""
    try:
        found = h.c.get(one.ref, timeout=PATIENCE_S)
    except Exception as error:
        one.judge(error)
        return
    ranks = one.ref.contributors
    if ranks is None or not num <= len(ranks) <= len(some) or list(ranks) != sorted(set(ranks)):
        raise Unexplained(f"contributors {ranks} of {len(some)}, at least {num}")
    wanted = folded(op, [some[i].value for i in ranks])
    h.same(found, wanted)
    if not one.bound:
        h.keep(one.ref, wanted, *one.above, born=one.born)


@call(5)
def reduce(h: Hand) -> None:
    """Over all, over the first ones to be ready, over what is ready in time."""
    op, some = op_and_sources(h)
    how: dict[str, Any] = {"reproducible": h.dice.random() < 0.3}
    num = len(some)
    if h.dice.random() < 0.4:
        how["num"] = num = h.dice.randint(1, len(some))
    if h.dice.random() < 0.3:
        how["deadline"], num = h.dice.random() * 0.1, 1
    h.note(op, len(some), how)
    born = h.world.tally.mark()
    ref = h.c.reduce([one.ref for one in some], op=op, **how)
    finish(h, Known(h.world, ref, None, tuple(some), born=born), op, some, num)


@call(2)
def allreduce(h: Hand) -> None:
    op, some = op_and_sources(h)
    num = h.dice.randint(1, len(some))
    one = Known(h.world, None, None, tuple(some), bound=True, retries=0, fragile=True)
    one.ref = h.c.allreduce([one.ref for one in some], op=op, num=num)
    finish(h, one, op, some, num)


@call(2)
def reduce_of_failures(h: Hand) -> None:
    """Failed sources are skipped while enough others are left."""
    some = h.alike(3, "f8", 1000)
    turn = h.next_turn()
    broken = h.c.options(retries=MANY).submit(tasks.fail, turn)
    refs = [some[0].ref, broken, some[1].ref, some[2].ref]
    num = h.dice.choice((2, 3, 4))
    one = Known(h.world, h.c.reduce(refs, num=num), None, tuple(some))
    try:
        found = h.c.get(one.ref, timeout=PATIENCE_S)
    except hoplite_mp.ReduceError as error:
        others = any(known.deleted for known in some)  # by another thread
        if (num == 4 or others) and isinstance(error.__cause__, ZeroDivisionError):
            h.same(error.__cause__.args, (turn,))
            return
        one.judge(error)
        return
    except Exception as error:
        one.judge(error)
        return
    ranks = one.ref.contributors
    if num == 4 or 1 in ranks:
        raise Unexplained(f"contributors {ranks}, and 1 has failed")
    by_place = {0: some[0], 2: some[1], 3: some[2]}
    h.same(found, sum(by_place[rank].value for rank in ranks))


@call(2)
def reduce_scatter(h: Hand) -> None:
    some = h.alike(h.dice.randint(1, 4), "f8", h.dice.choice((10, 30_000)))
    refs = h.c.reduce_scatter([one.ref for one in some])
    total = sum(one.value for one in some)
    slices = np.array_split(total, len(some))
    for ref, wanted in zip(refs, slices, strict=True):
        how = {"bound": True, "retries": 0, "fragile": True}
        h.check(Known(h.world, ref, wanted, tuple(some), **how))


@call(3)
def move(h: Hand) -> None:
    """Copies to where they are wanted; then they are read."""
    some = h.alike(h.dice.randint(1, 4))
    refs = [one.ref for one in some]
    kind = h.dice.choice(("broadcast", "gather", "allgather", "alltoall"))
    moved = Known(h.world, None, None, tuple(some), bound=True, retries=0)
    try:
        if kind == "alltoall":
            nodes = [h.any_node() for _ in refs]
            future = h.c.alltoall([refs], nodes)
        else:
            future = getattr(h.c, kind)(refs[0] if kind == "broadcast" else refs)
        future.result(PATIENCE_S)
    except Exception as error:
        moved.judge(error)
    for one in some:
        h.check(one)
