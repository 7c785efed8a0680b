"""Calls about objects: put, empty, get, wait, delete, locations, arrays that outlive their refs."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import numpy as np

from tests.campaign import tasks
from tests.campaign.hand import PATIENCE_S, call
from tests.campaign.model import Known

if TYPE_CHECKING:
    from tests.campaign.hand import Hand

WAIT_S = 0.02


@call(6)
def put(h: Hand) -> None:
    value = h.array()
    if h.dice.random() < 0.3:
        value = {"a": value, "rest": [value[:3].copy(), (1, "two", b"three", None)]}
    h.keep(h.c.put(value), value)


@call(2)
def put_copies(h: Hand) -> None:
    """On as many hosts as there are."""
    count = min(2, len(h.c.nodes))
    value = h.array()
    one = Known(h.world, None, value, bound=True, retries=0)
    try:
        one.ref = h.c.put(value, copies=count)
    except ValueError as error:  # a host has died meanwhile
        if not one.died("host") or "copies" not in str(error):
            raise
        return
    except Exception as error:
        one.judge(error)
        return
    h.keep(one.ref, value)


@call(3)
def publish(h: Hand) -> None:
    """An array of the store, published without a copy; another one that is not."""
    value = h.array()
    room = h.c.empty(value.shape, value.dtype)
    room[:] = value
    one = h.keep(h.c.put(room), value)
    assert not room.flags.writeable
    h.c.empty(1000).fill(1.0)
    h.board.kept.append((room, value.copy()))
    h.check(one)


@call(10)
def read(h: Hand) -> None:
    one = h.board.pick(h.dice, lambda one: True)
    if one is not None:
        found = h.check(one)
        if isinstance(found, np.ndarray) and h.dice.random() < 0.3:
            h.board.kept.append((found, one.value))


@call(4)
def read_several(h: Hand) -> None:
    """The first failure in the given order, or all."""
    some = [one for one in (h.board.pick(h.dice, lambda one: True) for _ in range(4)) if one]
    try:
        found = h.c.get([one.ref for one in some], timeout=PATIENCE_S)
    except Exception as error:
        if not any(one.explained(error) for one in some):
            raise
    else:
        for one, value in zip(some, found, strict=True):
            one.check(value)


@call(3)
def still_there(h: Hand) -> None:
    """Arrays in use, whatever has become of their refs."""
    for found, wanted in list(h.board.kept):
        h.same(found, wanted)
    if h.board.kept and h.dice.random() < 0.5:
        h.board.kept.clear()


@call(3)
def delete(h: Hand) -> None:
    one = h.board.pick(h.dice, lambda one: not one.deleted)
    if one is not None:
        one.deleted = True
        h.c.delete(one.ref)
        h.check(one) if h.dice.random() < 0.3 else None


@call(4)
def forget(h: Hand) -> None:
    with h.board.lock:
        if h.board.known:
            del h.board.known[h.dice.randrange(len(h.board.known))]


@call(3)
def locations(h: Hand) -> None:
    one = h.board.pick(h.dice, lambda one: True)
    if one is not None:
        found = h.c.locations(one.ref)
        assert len(set(found)) == len(found), found


@call(4)
def wait(h: Hand) -> None:
    """The first `num` of the done ones, and the others, in order."""
    some = [one for one in (h.board.pick(h.dice, lambda one: True) for _ in range(5)) if one]
    refs = [one.ref for one in some]
    num = h.dice.randint(0, len(refs))
    timeout = h.dice.choice((0, WAIT_S, PATIENCE_S))
    begun = time.monotonic()
    done, others = h.c.wait(refs, num=num, timeout=timeout)
    assert len(done) + len(others) == len(refs)
    assert len(done) <= num
    assert len(done) == num or time.monotonic() - begun >= timeout
    assert timeout < PATIENCE_S or len(done) == num, "a ref is not done for very long"


@call(3)
def refs_inside(h: Hand) -> None:
    """An object of refs holds what they name, also when nobody else does."""
    values = [h.array(1000, "f8") for _ in range(3)]
    refs = [h.c.put(value) for value in values]
    one = Known(h.world, h.c.put({"refs": refs}), None)
    del refs
    try:
        inner = h.c.get(one.ref, timeout=PATIENCE_S)["refs"]
        total = h.c.options(retries=100).submit(tasks.opened, h.c.put(inner))
        del inner
        found = h.c.get(total, timeout=PATIENCE_S)
    except Exception as error:
        one.judge(error)
    else:
        h.same(found, sum(values, np.zeros(1)))


@call(1)
def look(h: Hand) -> None:
    """What only looks."""
    stats = h.c.stats()
    assert stats["objects"] >= 0
    assert stats["bytes_used"] <= stats["bytes_limit"]
    assert h.c.nodes
    repr(h.c)
