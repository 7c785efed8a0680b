"""Calls about tasks: arguments, nesting, results that are refs, ends of every kind, waiting."""

from __future__ import annotations

import asyncio
import concurrent.futures
import functools
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

import hoplite_mp
from tests.campaign import tasks
from tests.campaign.hand import PATIENCE_S, call
from tests.campaign.model import MANY, Known, Unexplained

if TYPE_CHECKING:
    from tests.campaign.hand import Hand

TIMEOUT_S, LONG_S = 0.3, 600.0


@call(8)
def submit(h: Hand) -> None:
    function = h.dice.choice((tasks.double, tasks.published))
    h.submit(function, h.steady() if h.dice.random() < 0.7 else h.array())


@call(3)
def submit_slow(h: Hand) -> None:
    h.submit(tasks.slow, h.steady(), h.dice.random() * 0.2)


@call(3)
def by_value(h: Hand) -> None:
    """A function of its own, with what it carries; the arguments are the task's own."""
    extra, x = h.array(1000, "f8"), h.array(1000, "f8")
    wanted = x + extra + 1
    future = h.c.options(retries=MANY).submit(lambda y: tasks.change(y) + extra, x)
    one = h.keep(future, wanted)
    if h.dice.random() < 0.5:
        h.check(one)


@call(4)
def containers(h: Hand) -> None:
    """Refs anywhere among the arguments; keywords; options."""
    a, b, c, d = h.alike(4)
    future = h.c.options(retries=MANY, name="of many", copy=h.dice.random() < 0.5).submit(
        tasks.combine, {"x": [a.ref, (b.ref, {"y": c.ref})]}, d.ref, factor=3
    )
    value = (a.value + b.value + c.value + d.value) * 3
    h.keep(future, value, a, b, c, d)


@call(3)
def nest(h: Hand) -> None:
    count = h.dice.choice((10, 1000, 30_000))
    x = h.array(count, "f8")
    how = h.dice.choice(("nested", "deep", "mapped"))
    options = h.c.options(retries=MANY)
    if how == "nested":
        one = h.keep(options.submit(tasks.nested, 3, x), x * 7)
    elif how == "deep":
        one = h.keep(options.submit(tasks.deep, 3, x), x + 3)
    else:
        one = h.keep(options.submit(tasks.mapped, x, 4), x * 4 + 6)
    if h.dice.random() < 0.5:
        h.check(one)


@call(2)
def reduce_in_task(h: Hand) -> None:
    some = h.alike(3, "f8", 1000)
    refs = hoplite_mp.by_ref([one.ref for one in some])
    future = h.c.options(retries=MANY).submit(tasks.reduced, refs, "sum")
    h.keep(future, sum(one.value for one in some), *some)


@call(3)
def refs_out(h: Hand) -> None:
    """A task returns refs of what it has put, or of a task that it has sent."""
    turn = h.next_turn()
    if h.dice.random() < 0.5:
        made = Known(h.world, h.c.options(retries=MANY).submit(tasks.gives_refs, turn, 2000), None)
        wanted = [tasks.array(turn + i, 2000) for i in range(3)]
    else:
        x = h.array(2000, "f8")
        made = Known(h.world, h.c.options(retries=MANY).submit(tasks.gives_pending, x), None)
        wanted = [x * 2]
    made.fragile = h.world.lossy
    try:
        refs = h.c.get(made.ref, timeout=PATIENCE_S)
    except Exception as error:
        made.judge(error)
        return
    pending = not isinstance(refs, list)
    for ref, value in zip([refs] if pending else refs, wanted, strict=True):
        inner = Known(h.world, ref, value, born=made.born, fragile=pending or h.world.lossy)
        inner.retries = 0 if pending else MANY
        h.check(inner)


@call(3)
def failing(h: Hand) -> None:
    """Its own exception, also for those that depend on it."""
    turn = h.next_turn()
    future = h.c.options(retries=MANY).submit(tasks.fail, turn)
    one = h.keep(future, None, error=ZeroDivisionError)
    after = h.c.submit(tasks.double, future)
    two = h.keep(after, None, one, error=ZeroDivisionError)
    h.check(two)
    error = future.exception(PATIENCE_S)
    if isinstance(error, ZeroDivisionError) and error.args != (turn,):
        raise Unexplained(f"the error of another task: {error.args}, not {turn}")


@call(2)
def dying(h: Hand) -> None:
    """The first try ends in a death; or the only one does."""
    if h.dice.random() < 0.5:
        x = h.array(1000, "f8")
        h.check(h.keep(h.c.options(retries=MANY).submit(tasks.leave_once, h.path(), x), x + 7))
        return
    future = h.c.options(retries=0).submit(tasks.leave, 3)
    one = Known(h.world, future, None, error=hoplite_mp.WorkerLostError, retries=0, bound=True)
    h.check(one)


def begun(h: Hand, path: str, future: Any) -> bool:
    """Returns when it runs, True; False if it has come to an end instead."""
    deadline = time.monotonic() + PATIENCE_S
    while not Path(path).exists():
        if future.done():
            return False
        assert time.monotonic() < deadline, "a task has not begun"
        time.sleep(0.002)
    return True


@call(3)
def cancel(h: Hand) -> None:
    """One that waits, or runs, with force and without; a later task depends on it."""
    path = h.path()
    x = h.array(1000, "f8")
    future = h.c.options(retries=MANY).submit(tasks.slow, x, h.dice.random() * 0.05)
    after = h.c.options(retries=MANY).submit(tasks.double, future)
    one = Known(h.world, future, x + 1)
    two = Known(h.world, after, (x + 1) * 2, (one,))
    one.cancelled = future.cancel(force=h.dice.random() < 0.5)
    h.check(two)
    if one.cancelled and not future.cancelled():
        raise Unexplained("cancel() was True, cancelled() is not")
    h.check(one)
    if h.dice.random() < 0.5:
        long = h.c.options(retries=MANY).submit(tasks.linger, path, LONG_S)
        if begun(h, path, long):
            assert long.cancel(force=True) or h.world.lossy
        ended = Known(h.world, long, None, cancelled=True)
        h.check(ended)


@call(1)
def time_out(h: Hand) -> None:
    """Its worker is killed; a quick one in the same options is not."""
    view = h.c.options(timeout=TIMEOUT_S, retries=MANY)
    future = view.submit(tasks.linger, h.path(), LONG_S)
    h.check(Known(h.world, future, None, error=hoplite_mp.HopliteTimeoutError))
    x = h.array(1000, "f8")
    quick = h.c.options(timeout=PATIENCE_S, retries=MANY).submit(tasks.double, x)
    h.keep(quick, x * 2)


@call(3)
def map_all(h: Hand) -> None:
    count, x = h.dice.randint(1, 30), h.array(10, "f8")
    how: dict[str, Any] = {"ordered": h.dice.random() < 0.6}
    if h.dice.random() < 0.5:
        how["buffersize"] = h.dice.randint(1, 5)
    if h.dice.random() < 0.5:
        how["chunksize"] = h.dice.randint(1, 7)
    view = h.c.options(retries=MANY)
    results = view.map(functools.partial(np.add, x), range(count), timeout=PATIENCE_S, **how)
    if h.dice.random() < 0.3:  # broken off
        next(results, None)
        results.close()
        return
    found = [float(one[0]) for one in results]
    h.same(found if how["ordered"] else sorted(found), [float(x[0] + i) for i in range(count)])


@call(3)
def wait_by_futures(h: Hand) -> None:
    """Each of the ways in which the standard library waits."""
    x = h.array(100, "f8")
    view = h.c.options(retries=MANY)
    futures = [view.submit(tasks.slow, x, h.dice.random() * 0.05) for _ in range(4)]
    known = {id(future): Known(h.world, future, x + 1) for future in futures}
    how = h.dice.choice(("as_completed", "wait", "callbacks", "await"))
    h.note(how)
    if how == "as_completed":
        done = list(hoplite_mp.as_completed(futures, timeout=PATIENCE_S))
        assert sorted(map(id, done)) == sorted(known)
    elif how == "wait":
        done, others = concurrent.futures.wait(futures, timeout=PATIENCE_S)
        assert not others, "a Future is not done for very long"
    elif how == "callbacks":
        called: list[Any] = []
        over = threading.Event()

        def done_one(future: Any) -> None:
            called.append(future)
            if len(called) == len(futures):
                over.set()

        for future in futures:
            future.add_done_callback(done_one)
        assert over.wait(PATIENCE_S), "callbacks are not called for very long"
    else:

        async def gather() -> list[Any]:
            return await asyncio.gather(*futures, return_exceptions=True)

        asyncio.run(asyncio.wait_for(gather(), PATIENCE_S))
    for future in futures:
        h.check(known[id(future)])


@call(1)
def bound(h: Hand) -> None:
    """To a node, which may die."""
    node = h.any_node()
    x = h.array(1000, "f8")
    one = Known(h.world, None, x * 2, bound=True)
    try:
        one.ref = h.c.options(node=node, retries=MANY).submit(tasks.double, x)
    except (ValueError, hoplite_mp.NodeLostError):  # it has died, or has no workers
        if node.workers and not one.died("host"):
            raise
        return
    h.check(one)
