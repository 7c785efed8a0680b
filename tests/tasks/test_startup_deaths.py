"""Workers that die before their first task: no pool ends by that, and tasks fail only meanwhile."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

import psutil
import pytest

import hoplite_mp
from tests.tasks.helpers import PATIENCE_S, add, eventually

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

KILLS = 9  # more than attempts after which tasks fail


def host_of(cluster: hoplite_mp.Cluster) -> psutil.Process:
    host = cluster._host
    assert host is not None
    return psutil.Process(host.process.pid)


def kill_workers(supervisor: psutil.Process) -> int:
    killed = 0
    for child in supervisor.children():
        try:
            if child.name() == "hoplite worker" and child.status() != psutil.STATUS_ZOMBIE:
                os.kill(child.pid, signal.SIGKILL)
                killed += 1
        except (psutil.NoSuchProcess, ProcessLookupError):
            continue
    return killed


@contextmanager
def killing(supervisor: psutil.Process) -> Iterator[Callable[[], int]]:
    """Kills each worker as soon as it is seen; tells how many."""
    stop, count = threading.Event(), [0]

    def run() -> None:
        while not stop.is_set():
            count[0] += kill_workers(supervisor)
            time.sleep(0.0005)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield lambda: count[0]
    finally:
        stop.set()
        thread.join()


def quick() -> hoplite_mp.Config:
    return dataclasses.replace(
        hoplite_mp.Config(), restart_pause_s=0.02, restart_pause_s_max=0.3, memory_bytes=64 << 20
    )


def until_it_fails(cluster: hoplite_mp.Cluster) -> None:
    """Now and then a worker is quicker than who kills it."""
    while True:
        cluster.submit(add, 1, 2).result(PATIENCE_S)


def test_tasks_fail_only_while_workers_die() -> None:
    with hoplite_mp.Cluster(2, config=quick()) as cluster:
        assert cluster.submit(add, 1, 2).result(PATIENCE_S) == 3
        with killing(host_of(cluster)) as killed:
            eventually(lambda: killed() >= KILLS)
            with pytest.raises(hoplite_mp.WorkerLostError, match=r"start.*SIGKILL") as caught:
                until_it_fails(cluster.options(retries=100))
            assert "add()" in str(caught.value)
            eventually(lambda: cluster.nodes[0].workers == 0)
        assert cluster.submit(add, 3, 4).result(PATIENCE_S) == 7
        eventually(lambda: cluster.nodes[0].workers == 2)


def test_add_workers_begins_anew_at_once() -> None:
    config = dataclasses.replace(quick(), restart_pause_s=0.2, restart_pause_s_max=300.0)
    with hoplite_mp.Cluster(1, config=config) as cluster:
        with killing(host_of(cluster)), pytest.raises(hoplite_mp.WorkerLostError):
            until_it_fails(cluster)
        cluster.add_workers(1)
        eventually(lambda: cluster.nodes[0].workers == 2, 3.0)
        assert cluster.submit(add, 3, 4).result(PATIENCE_S) == 7


def nothing() -> None:
    """An initializer."""


@pytest.mark.parametrize("kind", ["plain", "set up"])
def test_an_executor_goes_on(kind: str) -> None:
    with hoplite_mp.Cluster(0, config=quick()) as cluster:
        initializer = nothing if kind == "set up" else None
        with cluster.executor(2, initializer=initializer) as pool:
            assert pool.submit(add, 1, 2).result(PATIENCE_S) == 3
            with killing(host_of(cluster)) as killed:
                eventually(lambda: killed() >= KILLS)
                with pytest.raises(hoplite_mp.WorkerLostError):
                    pool.submit(add, 1, 2).result(PATIENCE_S)
            assert pool.submit(add, 3, 4).result(PATIENCE_S) == 7


def test_an_initializer_that_always_kills_its_process_breaks_the_pool() -> None:
    with hoplite_mp.Cluster(0, config=quick()) as cluster:
        pool = cluster.executor(1, initializer=os._exit, initargs=(3,))
        with pytest.raises(hoplite_mp.WorkerLostError, match="exit code 3"):
            pool.submit(add, 1, 2).result(PATIENCE_S)
        supervisor = host_of(cluster)
        time.sleep(0.5)
        assert kill_workers(supervisor) == 0  # no more are started


def test_workers_that_end_in_peace_before_their_first_task() -> None:
    """The same with exit code 0: no process is started as fast as others end."""
    with hoplite_mp.Cluster(0, config=quick()) as cluster:
        pool = cluster.executor(1, initializer=os._exit, initargs=(0,))
        with pytest.raises(hoplite_mp.WorkerLostError, match="exit code 0"):
            pool.submit(add, 1, 2).result(PATIENCE_S)


def test_other_hosts_run_what_this_one_cannot(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("a token for this test\n")
    token.chmod(0o600)
    settings = {"HOPLITE_MP_RESTART_PAUSE_S": "0.02", "HOPLITE_MP_RESTART_PAUSE_S_MAX": "0.3"}
    with hoplite_mp.Cluster(0, listen="127.0.0.1:0", token=token, tls=False) as cluster:
        command = [sys.executable, "-m", "hoplite_mp", "join", str(cluster.address), "--no-tls"]
        command += ["--workers", "1", "--memory", "64MiB", "--token-file", str(token)]
        joined = []
        try:
            for number in (1, 2):
                joined.append(subprocess.Popen(command, env={**os.environ, **settings}))
                eventually(lambda n=number: len(cluster.nodes) == n + 1)  # type: ignore[misc]
            (sick,) = psutil.Process(joined[0].pid).children()
            with killing(sick) as killed:
                eventually(lambda: killed() >= KILLS)
                tasks = [cluster.submit(add, i, 1) for i in range(20)]
                assert [task.result(PATIENCE_S) for task in tasks] == list(range(1, 21))
                eventually(lambda: cluster.nodes[1].workers == 0)
            eventually(lambda: cluster.nodes[1].workers == 1)
            assert cluster.options(node="h1").submit(add, 1, 2).result(PATIENCE_S) == 3
        finally:
            cluster.shutdown()
            for one in joined:
                one.wait(PATIENCE_S)
