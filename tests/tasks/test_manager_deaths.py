"""The manager of one host is killed: the next one goes on where it was, and nobody sees more than
a delay."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import psutil
import pytest

import hoplite_mp
from tests.support.processes import at_rest, processes_named
from tests.support.waiting import PATIENCE_S, eventually

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from hoplite_mp import Cluster


def kill_manager() -> None:
    """Returns when there is another one."""
    (before,) = eventually(lambda: processes_named("hoplite manager"), "there is no manager")
    before.kill()
    eventually(
        lambda: [one for one in processes_named("hoplite manager") if one != before],
        "no other one comes",
    )


def wait_for(path: Path, array: Any) -> Any:
    while not path.exists():
        time.sleep(0.002)
    return array


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    with hoplite_mp.Cluster(workers=3, memory="256MiB") as made:
        assert made.submit(abs, -1).result(PATIENCE_S) == 1
        yield made


def test_reductions_that_were_open(cluster: Cluster, tmp_path: Path) -> None:
    """One waits for sources, one for the first two, one has a deadline, one has just been begun."""
    go = tmp_path / "go"
    arrays = [np.full(1 << 20, i, np.float64) for i in range(3)]
    ready = [cluster.put(array) for array in arrays]
    late = cluster.submit(wait_for, go, arrays[2])
    waits = cluster.reduce([*ready[:2], late])
    some = cluster.reduce([late, *ready], num=3)
    by_then = cluster.reduce([late, ready[1]], deadline=1.0)
    begun = cluster.reduce(ready * 20)
    kill_manager()
    assert np.array_equal(cluster.get(begun, timeout=PATIENCE_S), arrays[0] + 20 * sum(arrays[1:]))
    assert np.array_equal(cluster.get(some, timeout=PATIENCE_S), sum(arrays))
    assert np.array_equal(cluster.get(by_then, timeout=PATIENCE_S), arrays[1])
    go.touch()
    assert np.array_equal(cluster.get(waits, timeout=PATIENCE_S), sum(arrays))


def test_reductions_that_fail(cluster: Cluster, tmp_path: Path) -> None:
    go = tmp_path / "go"
    one = cluster.put(np.ones(4))
    late = cluster.submit(wait_for, go, None)
    other = cluster.submit(wait_for, go, np.ones(5))
    broken = [cluster.reduce([one, late]), cluster.reduce([one, other])]
    kill_manager()
    go.touch()
    for ref in broken:
        with pytest.raises(ValueError, match="source"):
            cluster.get(ref, timeout=PATIENCE_S)


def member(size: int, rank: int, calls: int, folder: Path) -> list[tuple[int, ...]]:
    seen = []
    with hoplite_mp.current().group("g", size, rank, timeout=PATIENCE_S) as g:
        for call in range(calls):
            total = g.allreduce(np.full(4, rank + 1.0))
            assert total[0] == sum(r + 1 for r in g.contributors)
            seen.append(g.contributors)
            (folder / f"{rank}.{call}").touch()
            if call == 0 and rank == 2:
                os.kill(os.getpid(), signal.SIGKILL)
            eventually((folder / "go").exists, "nobody goes on")
    return seen


def test_a_group_whose_members_still_join(cluster: Cluster, tmp_path: Path) -> None:
    (tmp_path / "go").touch()
    first = cluster.submit(member, 2, 0, 3, tmp_path)
    eventually(first.running, "it does not run")
    kill_manager()
    second = cluster.submit(member, 2, 1, 3, tmp_path)
    assert [one.result(PATIENCE_S) for one in (first, second)] == [[(0, 1)] * 3] * 2


def test_a_group_that_is_at_work(cluster: Cluster, tmp_path: Path) -> None:
    """One member dies just when there is no manager to be told, another one leaves later."""
    futures = [cluster.options(retries=0).submit(member, 3, r, 4, tmp_path) for r in range(3)]
    eventually(lambda: all((tmp_path / f"{r}.0").exists() for r in range(3)), "no call is over")
    kill_manager()
    (tmp_path / "go").touch()
    expected = [(0, 1, 2), (0, 1), (0, 1), (0, 1)]
    assert [one.result(PATIENCE_S) for one in futures[:2]] == [expected] * 2
    with pytest.raises(hoplite_mp.WorkerLostError):
        futures[2].result(PATIENCE_S)
    again = [cluster.submit(member, 2, r, 1, tmp_path) for r in range(2)]  # its name is free
    assert [one.result(PATIENCE_S) for one in again] == [[(0, 1)]] * 2


def pair(value: float, leave: Path) -> tuple[tuple[int, ...], float]:
    """One of two, who stay until they are told to leave."""
    with hoplite_mp.current().group("pair", 2, timeout=PATIENCE_S) as g:
        total = float(g.allreduce(np.full(4, value))[0])
        (leave.parent / f"{value} {g.rank}").touch()
        eventually(leave.exists, "nobody leaves")
        return g.contributors, total


def test_groups_of_one_name_that_follow_each_other(cluster: Cluster, tmp_path: Path) -> None:
    """The manager has read neither that the members of the first one left, nor that others ask to
    join, when it dies: those have a group of their own."""
    leave = tmp_path / "leave"
    first = [cluster.submit(pair, 1.0, leave) for _ in range(2)]
    eventually(lambda: len(list(tmp_path.iterdir())) == 2, "they do not call")
    (manager,) = processes_named("hoplite manager")
    manager.send_signal(signal.SIGSTOP)
    leave.touch()
    assert [one.result(PATIENCE_S) for one in first] == [((0, 1), 2.0)] * 2
    second = [cluster.submit(pair, 3.0, leave) for _ in range(2)]
    eventually(lambda: all(one.running() for one in second), "they do not run")
    time.sleep(0.1)  # they ask; if they are later than that there is less to be seen here
    kill_manager()
    assert [one.result(PATIENCE_S) for one in second] == [((0, 1), 6.0)] * 2


def test_nothing_stays_open(cluster: Cluster) -> None:
    (manager,) = eventually(lambda: processes_named("hoplite manager"), "there is no manager")
    supervisor = manager.parent()
    assert supervisor is not None
    (node,) = eventually(lambda: processes_named("hoplite node"), "there is no node")

    def descriptors() -> tuple[int, int]:
        return supervisor.num_fds(), node.num_fds()

    settled: list[tuple[int, int]] = []
    for _ in range(5):
        kill_manager()
        refs = [cluster.put(np.ones(1000)) for _ in range(3)]
        assert cluster.get(cluster.reduce(refs), timeout=PATIENCE_S)[0] == 3
        at_rest(cluster, 3)
        settled.append(descriptors())
    assert all(
        after <= before for after, before in zip(settled[-1], map(max, *settled[:2]), strict=True)
    ), f"descriptors stay open: {settled}"


def test_one_that_dies_all_the_time(capfd: pytest.CaptureFixture[str]) -> None:
    """It is not started for ever: the cluster ends, and says why."""
    with hoplite_mp.Cluster(workers=1) as cluster:
        future = cluster.submit(time.sleep, 600)
        deadline = time.monotonic() + PATIENCE_S
        while not future.done():
            assert time.monotonic() < deadline
            for one in processes_named("hoplite manager"):
                with contextlib.suppress(psutil.NoSuchProcess):
                    one.kill()
            time.sleep(0.01)
        assert isinstance(future.exception(), hoplite_mp.NodeLostError)
    assert "the manager has exited 10 times" in capfd.readouterr().err


def test_a_rank_that_was_left_and_taken_again() -> None:
    """The next manager must not be told by an old word that nobody has it."""
    with hoplite_mp.Cluster(workers=1) as c:
        first, second = c.group("again", 2, 0), c.group("again", 2, 1)
        calls = [first.allreduce_async(np.ones(1)), second.allreduce_async(np.ones(1))]
        assert [call.result(PATIENCE_S)[0] for call in calls] == [2.0, 2.0]
        second.close()
        eventually(lambda: first.alive == (0,), "it has left")
        second = c.group("again", 2, 1)
        kill_manager()
        calls = [first.allreduce_async(np.ones(1)), second.allreduce_async(np.ones(1))]
        assert [call.result(PATIENCE_S)[0] for call in calls] == [2.0, 2.0]
        eventually(lambda: first.alive == (0, 1), "it is let in")
