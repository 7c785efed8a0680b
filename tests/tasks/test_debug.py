"""Cluster(debug=True): tasks run at the call, in the calling process."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import hoplite_mp
from tests.support.functions import add
from tests.support.waiting import PATIENCE_S

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hoplite_mp import Cluster


@pytest.fixture(scope="module")
def debug() -> Iterator[Cluster]:
    with hoplite_mp.Cluster(workers=1, memory="128MiB", debug=True) as made:
        yield made


class Counter:
    def pid(self) -> int:
        return os.getpid()


def where(*_: Any) -> tuple[int, int]:
    return os.getpid(), threading.get_ident()


HERE = where()


class Quits(BaseException):
    """No Exception, and none that ends programs."""


def quit_now() -> None:
    raise Quits


def test_tasks_run_in_order_at_the_call_in_the_calling_thread(debug: Cluster) -> None:
    seen: list[int] = []
    futures = [debug.submit(seen.append, i) for i in range(3)]
    assert seen == [0, 1, 2]
    assert all(future.done() for future in futures)
    assert debug.submit(where).result() == HERE
    assert debug.options(retries=0, name="named").submit(where).result() == HERE
    assert list(debug.map(where, range(3))) == [HERE] * 3
    unread = debug.map(seen.append, range(3, 6), chunksize=2)
    assert seen == [0, 1, 2, 3, 4, 5]
    assert list(unread) == [None] * 3
    assert sorted(debug.map(abs, [-2, -1], ordered=False)) == [1, 2]


def test_arguments_and_results_are_those_of_tasks(debug: Cluster) -> None:
    ref = debug.put(np.arange(4.0))
    total = debug.submit(np.sum, ref)
    assert float(total.result()) == 6.0
    nested = debug.submit(lambda x: x, {"a": [ref, (total, 1)], "b": hoplite_mp.by_ref(ref)})
    found = nested.result()
    assert found["a"][1] == (6.0, 1)
    assert found["a"][0].tolist() == [0.0, 1.0, 2.0, 3.0]
    assert found["b"] == ref
    assert debug.get(total.ref) == 6.0
    result = debug.submit(np.ones, 1 << 17).result()
    assert not result.flags.writeable
    assert debug.options(copy=True).submit(np.ones, 1 << 17).result().flags.writeable
    assert debug.get(debug.reduce([debug.submit(add, i) for i in range(4)])) == 6
    inner = debug.submit(lambda: hoplite_mp.current().submit(where).result())
    assert inner.result() == HERE


def test_exceptions_are_raised_as_themselves_with_their_frames(debug: Cluster) -> None:
    error = debug.submit(divmod, 1, 0).exception()
    assert isinstance(error, ZeroDivisionError)

    def fails() -> None:
        raise own

    own = LookupError("the very object")
    assert debug.submit(fails).exception() is own
    with pytest.raises(LookupError) as caught:
        debug.submit(add, debug.submit(fails)).result()
    assert "the very object" in str(caught.value)
    assert isinstance(debug.submit(threading.Lock).exception(), TypeError)
    with pytest.raises(hoplite_mp.TaskError, match="SystemExit"):
        debug.submit(sys.exit, 3).result()
    assert type(debug.submit(quit_now).exception()) is Quits
    tries: list[int] = []

    def third() -> int:
        tries.append(1)
        if len(tries) < 3:
            raise OSError("again")
        return len(tries)

    assert debug.options(retry_exceptions=OSError).submit(third).result() == 3


def test_async_tasks_run_within_an_event_loop_and_without(debug: Cluster) -> None:
    async def double(x: int) -> int:
        await asyncio.sleep(0)
        return 2 * x

    async def main() -> int:
        return int(await debug.submit(double, 4))

    assert debug.submit(double, 3).result() == 6
    assert asyncio.run(main()) == 8


def test_actors_executors_and_peers_keep_their_processes(debug: Cluster) -> None:
    own = os.getpid()
    actor: Any = debug.actor(Counter)
    assert actor.pid().result(PATIENCE_S) != own
    with debug.executor(1) as pool:
        assert pool.submit(os.getpid).result(PATIENCE_S) != own
    assert debug.spmd(lambda rank: os.getpid(), 1)[0].result(PATIENCE_S) != own


def test_pdb_stops_in_the_calling_process(debug: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    stopped: list[int] = []
    monkeypatch.setattr(sys, "breakpointhook", lambda: stopped.append(os.getpid()))
    debug.submit(breakpoint).result()
    assert stopped == [os.getpid()]


def test_calls_after_shutdown_raise_closed_error() -> None:
    made = hoplite_mp.Cluster(workers=0, debug=True)
    future = made.submit(abs, -1)
    made.shutdown()
    assert future.result() == 1
    with pytest.raises(hoplite_mp.ClosedError):
        made.submit(abs, -1)
