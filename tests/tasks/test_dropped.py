"""A Cluster or Executor that nobody holds ends by itself, after pending work."""

from __future__ import annotations

import gc
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pytest

import hoplite_mp
from tests.support.processes import Program
from tests.support.waiting import PATIENCE_S, eventually

if TYPE_CHECKING:
    from collections.abc import Callable


def slow(value: int) -> int:
    time.sleep(0.2)
    return value


def family() -> set[int]:
    return {one.pid for one in psutil.Process().children(recursive=True)}


@pytest.mark.parametrize("make", [hoplite_mp.Cluster, hoplite_mp.Executor])
def test_five_are_dropped(make: Callable[[int], Any]) -> None:
    before = family()
    futures = [make(1).submit(slow, i) for i in range(5)]
    eventually(lambda: family() <= before)
    assert [future.result(PATIENCE_S) for future in futures] == list(range(5))
    with pytest.raises(hoplite_mp.ClosedError):
        hoplite_mp.current()


def test_in_a_cycle() -> None:
    before = family()
    held: list[Any] = [hoplite_mp.Cluster(1)]
    held.append(held)
    future = held[0].submit(slow, 1)
    del held
    gc.collect()
    eventually(lambda: family() <= before)
    assert future.result(PATIENCE_S) == 1


def test_an_executor_of_a_cluster() -> None:
    with hoplite_mp.Cluster(1) as c:
        made = c.executor(1)
        pid = made.submit(os.getpid).result(PATIENCE_S)
        future = made.submit(slow, 3)
        del made
        eventually(lambda: not Path(f"/proc/{pid}").exists())
        assert future.result(PATIENCE_S) == 3
        assert c.submit(abs, -1).result(PATIENCE_S) == 1


def test_what_holds_its_cluster() -> None:
    before = family()
    for make in (
        lambda c: c.options(name="x"),
        lambda c: c.executor(1),
        lambda c: c.options(name="x").executor(1).options(name="y"),
    ):
        held = make(hoplite_mp.Cluster(1))
        gc.collect()
        assert held.submit(slow, 2).result(PATIENCE_S) == 2
        del held
        gc.collect()
        eventually(lambda: family() <= before)
    member = hoplite_mp.Cluster(1).group("one", 1, 0)
    gc.collect()
    assert member.allreduce(1) == 1
    member.close()
    del member
    gc.collect()
    eventually(lambda: family() <= before)


def test_refs_do_not_hold_it() -> None:
    before = family()
    ref = hoplite_mp.Cluster(1).put(b"x" * 5000)
    eventually(lambda: family() <= before)
    assert len(ref.id) == 32


def test_the_program_ends_just_then() -> None:
    """What is pending finishes first, and nothing is printed."""
    program = Program(
        """
        future = hoplite_mp.Cluster(1).submit(time.sleep, 0.3)
        future.add_done_callback(lambda f: say("done", f.exception()))
        pool = hoplite_mp.Cluster(1)
        made = pool.executor(1)
        made.submit(time.sleep, 0.2)
        made.shutdown(wait=False)
        del made
        """
    )
    out, err = program.process.communicate(timeout=PATIENCE_S)
    assert (out, err, program.process.returncode) == ("done None\n", "", 0)


def test_program_that_ends_during_the_last_callback_waits_for_it() -> None:
    program = Program(
        """
        began = threading.Event()
        def last(future):
            began.set()
            time.sleep(0.5)
            say("done", future.exception())
        cluster = hoplite_mp.Cluster(1)
        # The collector's thread is busy, so the thread that ends the cluster calls the other one.
        cluster.submit(abs, 1).add_done_callback(lambda future: began.wait(30))
        cluster.submit(time.sleep, 0.2).add_done_callback(last)
        del cluster
        assert began.wait(30)
        """
    )
    out, err = program.process.communicate(timeout=PATIENCE_S)
    assert (out, err, program.process.returncode) == ("done None\n", "", 0)
