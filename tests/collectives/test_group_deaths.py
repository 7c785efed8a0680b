"""Members are killed, between calls and during them: all survivors get the same, bit for bit."""

from __future__ import annotations

import os
import random
import signal
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import numpy as np
import psutil
import pytest

import hoplite_mp
from hoplite_mp import PeerLostError
from tests.support.group_members import check_survivors, make_calls, pid_of_rank, wait_for_call
from tests.support.waiting import Gate, eventually

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from hoplite_mp import Cluster


class Over(Exception):
    """The test is done."""


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    with suppress(Over), hoplite_mp.Cluster(workers=5, memory="256MiB") as made:
        yield made
        raise Over  # a cluster that is left by an exception does not wait for tasks that hang


@pytest.mark.parametrize("victim", [0, 1, 2], ids=["leader", "middle", "last"])
def test_a_member_is_killed_between_calls(cluster: Cluster, tmp_path: Path, victim: int) -> None:
    def member(rank: int, gate: Gate, folder: Path) -> Any:
        group = hoplite_mp.current().group("between", 3, rank)
        first = group.allreduce(np.ones(2)).tolist()
        if rank == victim:
            (folder / "pid").write_text(str(os.getpid()))
            gate.wait()
        eventually(lambda: victim not in group.alive, "the death")
        second = group.allreduce(np.ones(2)).tolist()
        with pytest.raises(PeerLostError):
            group.broadcast(np.ones(2), root=victim)
        gathered = group.allgather(np.array(rank))
        return first, second, group.contributors, [g if g is None else int(g) for g in gathered]

    gate = Gate(tmp_path, "never")
    run = cluster.options(retries=0)
    tasks = [run.submit(member, rank, gate, tmp_path) for rank in range(3)]
    pid = int(eventually(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text()))
    os.kill(pid, signal.SIGKILL)
    others = tuple(rank for rank in range(3) if rank != victim)
    listed = [None if rank == victim else rank for rank in range(3)]
    for rank in others:
        assert tasks[rank].result(timeout=30) == ([3.0] * 2, [2.0] * 2, others, listed)
    with pytest.raises(hoplite_mp.WorkerLostError):
        tasks[victim].result(timeout=30)


def test_members_that_wait_for_the_dead_one_go_on(cluster: Cluster, tmp_path: Path) -> None:
    """It dies in the middle of a call that it has not made."""

    def member(rank: int, gate: Gate, folder: Path) -> Any:
        with hoplite_mp.current().group("waiting", 3, rank) as group:
            group.barrier()
            if rank == 1:
                (folder / "pid").write_text(str(os.getpid()))
                gate.wait()
            (folder / f"begun-{rank}").touch()
            return group.allreduce(np.array(10**rank)).tolist(), group.contributors

    run = cluster.options(retries=0)
    never = Gate(tmp_path, "never")
    tasks = [run.submit(member, rank, never, tmp_path) for rank in range(3)]
    eventually(lambda: all((tmp_path / f"begun-{rank}").exists() for rank in (0, 2)))
    pid = int(eventually(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text()))
    os.kill(pid, signal.SIGKILL)
    assert [tasks[rank].result(timeout=30) for rank in (0, 2)] == [(101, (0, 2))] * 2


@pytest.mark.parametrize("length", [10, 100_000], ids=["tiny", "large"])
def test_kills_at_random_instants(cluster: Cluster, tmp_path: Path, length: int) -> None:
    """Again and again, whoever it is, wherever it just is; up to all but one."""
    random_ = random.Random(length)
    run = cluster.options(retries=0)
    count = 1000 if length < 1000 else 40  # of tiny calls many happen in a millisecond
    for number in range(3):
        name, size = f"random-{number}", random_.choice([2, 3, 4, 5])
        tasks = [
            run.submit(make_calls, rank, name, size, count, length, tmp_path)
            for rank in range(size)
        ]
        victims = random_.sample(range(size), random_.randint(1, size - 1))
        pids = [pid_of_rank(tmp_path, name, rank) for rank in victims]
        wait_for_call(tmp_path, name, victims[0], random_.randint(0, count // 8))
        for pid in pids:
            end = time.monotonic() + random_.random() * 0.004  # the instant is what is tried out
            while time.monotonic() < end:
                pass
            if psutil.pid_exists(pid):
                os.kill(pid, signal.SIGKILL)
        found = {
            rank: tasks[rank].result(timeout=30) for rank in range(size) if rank not in victims
        }
        check_survivors(found, set(victims), size, length)
        for rank in victims:
            assert isinstance(tasks[rank].exception(timeout=30), hoplite_mp.WorkerLostError)


def test_a_task_that_is_tried_again_is_a_replacement(cluster: Cluster, tmp_path: Path) -> None:
    """Killed once each, the same ranks come back by themselves; everybody agrees on every call."""

    def member(rank: int, folder: Path) -> Any:
        group = hoplite_mp.current().group("again", 3, rank)
        (folder / f"again-{rank}.pid").write_text(str(os.getpid()))
        found: dict[int, Any] = {}
        for _ in range(100_000):
            full = len(group.contributors) == 3 and (folder / "last").exists()
            total = int(group.allreduce(np.array(10**rank + 1000 * full)))
            assert group.calls is not None
            found[group.calls - 1] = (group.contributors, total)
            if total >= 3000:
                return found
        raise AssertionError("the group never was full again")

    tasks = [cluster.submit(member, rank, tmp_path) for rank in range(3)]
    for rank in (2, 0, 1):
        pid = pid_of_rank(tmp_path, "again", rank)
        os.kill(pid, signal.SIGKILL)
        eventually(lambda r=rank, p=pid: pid_of_rank(tmp_path, "again", r) != p, "the replacement")
    (tmp_path / "last").touch()
    found = [task.result(timeout=30) for task in tasks]
    for call in sorted(set().union(*found)):
        said = {one[call] for one in found if call in one}
        assert len(said) == 1
        contributors, total = said.pop()
        assert total % 1000 == sum(10**rank for rank in contributors)


def test_a_replacement_takes_part_in_the_next_call_that_nobody_has_begun(
    cluster: Cluster,
) -> None:
    first, second = cluster.group("next", 2, 0, timeout=20), cluster.group("next", 2, 1, timeout=20)
    waiting = first.barrier_async()
    second.barrier()
    waiting.result(20)
    second.close()
    assert first.allreduce(np.ones(1)).tolist() == [1.0]
    new = cluster.group("next", 2, 1, timeout=20)
    assert (new.calls, first.calls) == (None, 2)
    late = first.allreduce_async(np.ones(1))
    assert new.allreduce(np.ones(1)).tolist() == [2.0]
    assert late.result(20).tolist() == [2.0]
    assert new.calls == first.calls == 3
    assert new.contributors == first.contributors == (0, 1)
    new.close()
    begun = first.allreduce_async(np.ones(1))  # of itself, and the next one with the newcomer
    assert begun.result(20).tolist() == [1.0]
    for group in (first, cluster.group("next", 2, 1)):
        group.close()


def test_strict_members_learn_of_a_death(cluster: Cluster, tmp_path: Path) -> None:
    def member(rank: int, folder: Path) -> Any:
        group = hoplite_mp.current().group("strict", 3, rank, strict=True)
        group.barrier()
        (folder / f"strict-{rank}.pid").write_text(str(os.getpid()))

        def calls() -> None:
            while True:
                group.allreduce(np.ones(10))

        with pytest.raises(PeerLostError, match=r"ranks \[1\]"):
            calls()
        return group.contributors

    run = cluster.options(retries=0)
    tasks = [run.submit(member, rank, tmp_path) for rank in range(3)]
    os.kill(pid_of_rank(tmp_path, "strict", 1), signal.SIGKILL)
    assert [tasks[rank].result(timeout=30) for rank in (0, 2)] == [(0, 2)] * 2


def test_a_block_that_an_exception_ends_raises_that_although_the_node_has_ended() -> None:
    def end_the_node(cluster: Cluster) -> None:
        host = cluster._host
        assert host is not None
        for process in [host.process, *psutil.Process(host.process.pid).children()]:
            process.kill()
        host.process.wait()

    for fails in (True, False):
        cluster = hoplite_mp.Cluster(workers=0)
        found = pytest.raises(KeyError if fails else hoplite_mp.NodeLostError)
        with found as raised, cluster.group("ends", 1) as group:
            group.barrier()
            end_the_node(cluster)
            if fails:
                raise KeyError("the block's own")
        assert raised.value.__context__ is None or not fails
        with suppress(hoplite_mp.NodeLostError):
            cluster.shutdown()
