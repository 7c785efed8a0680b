"""A peer that joins a Group and leaves, or dies, before the others have joined."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from typing import TYPE_CHECKING, Any

import pytest

import hoplite_mp
from hoplite_mp import PeerLostError
from tests.support.waiting import Gate, eventually

if TYPE_CHECKING:
    from pathlib import Path

    from hoplite_mp import Cluster

AT_ONCE_S = 25.0  # Config.group_wait_s is 30


def leave_group(rank: int, g: Any, how: str) -> None:
    if how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "raises":
        raise KeyError(rank)
    if how == "closes":
        g.close()


def leaves_early(rank: int, name: str, how: str, folder: Path, strict: bool) -> Any:
    """Rank 0 joins and leaves; rank 1 joins before that, rank 2 after it, or both after it."""
    if rank and (how.endswith("alone") or rank == 2):
        Gate(folder, "left").wait()
    begun = time.monotonic()
    try:
        g = hoplite_mp.current().group(name, 3, rank, strict=strict)
        if rank == 0:
            if not how.endswith("alone"):
                eventually(lambda: g.alive == (0, 1), "rank 1")
            return leave_group(rank, g, how.split()[0])
        g.allreduce(1.0)
    except PeerLostError as error:
        return str(error), time.monotonic() - begun
    return "no error", 0.0


@pytest.mark.parametrize("strict", [False, True], ids=["", "strict"])
@pytest.mark.parametrize("alone", ["", " alone"])
@pytest.mark.parametrize("how", ["killed", "raises", "returns", "closes"])
def test_the_others_raise_at_once_when_a_peer_left_before_the_group_was_whole(
    cluster: Cluster, tmp_path: Path, how: str, alone: str, strict: bool
) -> None:
    name = f"left early {how}{alone}{strict}"
    futures = cluster.options(retries=0).spmd(leaves_early, 3, name, how + alone, tmp_path, strict)
    futures[0].exception(20)
    Gate(tmp_path, "left").open()
    for future in futures[1:]:
        text, seconds = future.result(20)
        assert "can never have all its 3 members: rank 0 has left or died" in text
        assert seconds < AT_ONCE_S


def dies_once(rank: int, name: str, folder: Path) -> Any:
    if rank:
        Gate(folder, "died").wait()
    g = hoplite_mp.current().group(name, 2, rank)
    if rank == 0 and not (folder / "died").exists():
        (folder / "died").touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return g.allgather(rank)


def test_a_peer_that_is_tried_again_is_awaited(cluster: Cluster, tmp_path: Path) -> None:
    futures = cluster.spmd(dies_once, 2, "tried again", tmp_path)
    assert [future.result(30) for future in futures] == [[0, 1]] * 2


def joins_again(rank: int, name: str, folder: Path) -> Any:
    if rank:
        Gate(folder, "closed").wait()
    g = hoplite_mp.current().group(name, 2, rank)
    if rank == 0:
        g.close()
        Gate(folder, "closed").open()
        time.sleep(0.2)
        g = hoplite_mp.current().group(name, 2, rank)
    return g.allgather(rank)


def test_a_peer_that_closes_and_joins_again_is_awaited(cluster: Cluster, tmp_path: Path) -> None:
    futures = cluster.spmd(joins_again, 2, "joins again", tmp_path)
    assert [future.result(30) for future in futures] == [[0, 1]] * 2


def test_a_second_run_of_a_name_that_failed_waits_for_its_own_peers(cluster: Cluster) -> None:
    def peer(rank: int, fails: bool) -> Any:
        g = hoplite_mp.current().group("second run", 2, rank)
        if fails and rank == 0:
            raise KeyError(rank)
        if not fails and rank == 0:
            time.sleep(0.3)
        return g.allgather(rank)

    failed = cluster.spmd(peer, 2, True)
    assert isinstance(failed[0].exception(20), KeyError)
    failed[1].exception(20)
    assert [future.result(20) for future in cluster.spmd(peer, 2, False)] == [[0, 1]] * 2


def test_a_rank_is_taken_by_another_task_while_the_first_one_may_come_again(
    cluster: Cluster, tmp_path: Path
) -> None:
    closed, over = Gate(tmp_path, "closed"), Gate(tmp_path, "over")

    def stays() -> None:
        hoplite_mp.current().group("taken over", 3, 0).close()
        closed.open()
        over.wait()

    def comes() -> Any:
        return hoplite_mp.current().group("taken over", 3, 0).allgather("task")

    with cluster.group("taken over", 3, 1, timeout=20) as mine:
        first = cluster.submit(stays)
        closed.wait()
        with cluster.group("taken over", 3, 2, timeout=20) as other:
            waits = [one.allgather_async(one.rank) for one in (mine, other)]
            second = cluster.submit(comes)
            assert [one.result(20) for one in (*waits, second)] == [["task", 1, 2]] * 3
        over.open()
        first.result(20)


def test_tasks_that_share_a_process_are_distinguished(cluster: Cluster, tmp_path: Path) -> None:
    """The member's own task counts, and not another one in that process."""
    begun, over, closed, comes = (Gate(tmp_path, x) for x in ("begun", "over", "closed", "comes"))

    async def opened(gate: Gate) -> None:
        while not gate.path.exists():
            await asyncio.sleep(0.01)

    async def other_task() -> None:
        begun.open()
        await opened(over)

    async def joins() -> Any:
        await opened(begun)
        hoplite_mp.current().group("one process", 3, 0).close()
        closed.open()
        await opened(comes)
        return await hoplite_mp.current().group("one process", 3, 0).allgather_async("task")

    with (
        cluster.executor(1) as executor,
        cluster.group("one process", 3, 1, timeout=20) as mine,
    ):
        pool = executor.options(concurrency=2)
        second, first = pool.submit(joins), pool.submit(other_task)
        closed.wait()
        with cluster.group("one process", 3, 2, timeout=20) as other:
            waits = [one.allgather_async(one.rank) for one in (mine, other)]
            over.open()
            first.result(20)
            time.sleep(0.3)  # the manager would know by then that the first task is over
            comes.open()
            assert [one.result(20) for one in (*waits, second)] == [["task", 1, 2]] * 3


@pytest.mark.parametrize("call", ["fold", "recv_async", "recv", "probe", "send"])
def test_member_given_up_before_its_first_call_gets_the_reason_from_any_call(
    cluster: Cluster, tmp_path: Path, call: str
) -> None:
    name = f"given up {call}"
    left = Gate(tmp_path, "left")

    def late(rank: int) -> Any:
        if rank == 0:
            hoplite_mp.current().group(name, 3, rank).close()
            return None
        left.wait()
        calls = {
            "fold": lambda: g.allreduce(1, op=max),
            "recv_async": lambda: g.recv_async(0).result(20),
            "recv": lambda: g.recv(0),
            "probe": lambda: g.probe(0),
            "send": lambda: g.send(1, to=0),
        }
        try:
            g = hoplite_mp.current().group(name, 3, rank)
            time.sleep(0.5)  # it is given up meanwhile
            calls[call]()
        except PeerLostError as error:
            return str(error)
        return "no error"

    futures = cluster.options(retries=0).spmd(late, 3)
    futures[0].result(20)
    left.open()
    for future in futures[1:]:
        assert "can never have all its 3 members" in future.result(30)
