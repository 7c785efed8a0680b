"""os.fork() in user code: the child has nothing, and disturbs nothing."""

from __future__ import annotations

import os
import sys
import threading
import traceback
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import hoplite_mp
from hoplite_mp._client import futures, runtime
from tests.support.functions import checksum, echo
from tests.support.store import client, gone_or_closed, header, held, objects, warm
from tests.support.values import mib
from tests.support.waiting import settles

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from hoplite_mp import Cluster

pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")


def forked(body: Callable[[], Any]) -> int:
    """The exit code of a child that runs the body; 0 if it returns."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            body()
            code = 0
        except SystemExit as ended:
            code = int(ended.code or 0)
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status)


@pytest.fixture
def quiet() -> Iterator[Cluster]:
    """Nobody else's objects come or go in it; it holds the function that it was warmed with."""
    with hoplite_mp.Cluster(workers=2, memory="64MiB") as made:
        warm(made, echo)
        settles(lambda: objects(made), len(made._runtime.submitter._functions))
        yield made


def test_the_child_of_a_driver_has_closed_everything(quiet: Cluster) -> None:
    cluster, before = quiet, objects(quiet)
    ref, array = cluster.put(mib(1)), None
    array = cluster.get(ref)
    future = cluster.submit(echo, 5)
    made = cluster.empty(1 << 20, np.uint8)
    held_here = held(cluster, ref)

    def child() -> None:
        nonlocal ref, array, made, future
        gone_or_closed(cluster)
        for call in (
            lambda: cluster.get(ref),
            lambda: cluster.delete(ref),
            lambda: cluster.wait(ref),
            lambda: cluster.locations(ref),
            lambda: cluster.empty(3),
            lambda: cluster.reduce([ref]),
            lambda: cluster.get(future),
            hoplite_mp.current,
        ):
            with pytest.raises(hoplite_mp.ClosedError):
                call()
        assert ref is not None
        assert ref.contributors is None
        assert checksum(array) == checksum(mib(1)), "what was mapped stays readable"
        ref = array = made = future = None
        cluster.shutdown()

    assert forked(child) == 0
    assert held(cluster, ref) == held_here
    assert header(cluster, ref)["refs"] == header(cluster, ref)["pins"] == [client(cluster).slot]
    made[:] = 1
    assert checksum(cluster.get(cluster.put(made))) == 1 << 20
    assert future.result() == 5
    ref = array = made = future = None
    settles(lambda: objects(cluster), before)


def test_a_child_that_leaves_the_with_block_by_an_exception() -> None:
    """sys.exit() in the child unwinds through the parent's `with`; the parent goes on."""
    with hoplite_mp.Cluster(workers=1, memory="64MiB") as c:
        ref = c.put(mib(4))
        pending = c.submit(__import__("time").sleep, 0.3)

        def child() -> None:
            with c:
                sys.exit(7)

        assert forked(child) == 7
        pending.result()
        assert (c.get(ref) == mib(4)).all()
        assert (c.submit(echo, ref).result() == mib(4)).all()

        def other() -> None:
            with c:
                pass

        assert forked(other) == 0
        assert (c.get(ref) == mib(4)).all()
        assert c.submit(echo, 1).result() == 1


def test_a_child_may_open_a_cluster_of_its_own(cluster: Cluster) -> None:
    def child() -> None:
        with hoplite_mp.Cluster(workers=1, memory="16MiB") as own:
            assert own.submit(echo, own.put(3)).result() == 3
            assert hoplite_mp.current() is own

    assert forked(child) == 0
    assert cluster.submit(echo, cluster.put(4)).result() == 4


def forking_task(ref: Any, how: str) -> tuple[int, int]:
    c = hoplite_mp.current()
    inside = [c.put(n) for n in range(10)]
    value = c.get(ref.value)

    def child() -> None:
        gone_or_closed(c)
        inside.clear()
        assert checksum(value) == 255
        if how == "exit":
            sys.exit(0)

    if how == "returns":  # the child comes back from the task as if it were the worker
        if os.fork() == 0:
            return -1, -1
        _, status = os.wait()
        return os.waitstatus_to_exitcode(status), sum(c.get(inside))
    if how == "raises":
        if os.fork() == 0:
            raise KeyError("in the child")
        _, status = os.wait()
        return os.waitstatus_to_exitcode(status), sum(c.get(inside))
    return forked(child), sum(c.get(inside))


@pytest.mark.parametrize(
    ("module", "name"),
    [(futures, "_making"), (runtime, "_stack_lock")],
    ids=["futures", "runtimes"],
)
def test_child_has_a_free_lock_in_place_of_one_that_another_thread_holds(
    module: Any, name: str
) -> None:
    taken, over = threading.Event(), threading.Event()

    def hold() -> None:
        with getattr(module, name):
            taken.set()
            over.wait()

    def acquire() -> None:
        assert getattr(module, name).acquire(timeout=1)

    holder = threading.Thread(target=hold)
    holder.start()
    taken.wait()
    try:
        assert forked(acquire) == 0
    finally:
        over.set()
        holder.join()


@pytest.mark.parametrize(("how", "code"), [("ends", 0), ("exit", 0), ("returns", 0), ("raises", 1)])
def test_fork_in_a_task(cluster: Cluster, how: str, code: int) -> None:
    warm(cluster, echo)
    ref = cluster.put(np.ones(255, np.uint8))
    ref_in = type("In", (), {"value": ref})()
    assert cluster.submit(forking_task, ref_in, how).result() == (code, 45)
    assert [cluster.submit(echo, n).result() for n in range(5)] == list(range(5))
    assert cluster.stats()["workers_lost"] == 0
    assert checksum(cluster.get(ref)) == 255
