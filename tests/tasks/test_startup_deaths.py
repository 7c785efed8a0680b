"""Workers that die before their first task: no pool ends by that, and tasks fail only meanwhile."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
import threading
import time
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

import psutil
import pytest

import hoplite_mp
from tests.support.functions import add
from tests.support.processes import host_of
from tests.support.waiting import PATIENCE_S, eventually

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

KILLS = 7  # more than attempts after which tasks fail
PAUSE_S, PAUSE_S_MAX = 0.005, 5.0  # what has lived for the longest pause does not count


# Kills each worker of a supervisor that it sees, and says so: a process of its own, which waits for
# no lock of the test's, and reads two small files for each look.
KILLER = """
import os, signal, sys, time
supervisor, killed = sys.argv[1], set()
print("ready", flush=True)
while True:
    try:
        with open(f"/proc/{supervisor}/task/{supervisor}/children") as file:
            children = file.read().split()
    except OSError:
        sys.exit()
    for child in children:
        if child in killed:
            continue
        try:
            with open(f"/proc/{child}/comm") as file:
                if file.read().strip() != "hoplite worker":
                    continue
            os.kill(int(child), signal.SIGKILL)
        except OSError:
            continue
        killed.add(child)
        print(child, flush=True)
    time.sleep(0.0002)
"""
NICE = 10  # where others work, a worker needs longer to begin than who kills it needs to see it


@contextmanager
def killing(supervisor: psutil.Process) -> Iterator[Callable[[], int]]:
    """Kills each worker as soon as it is seen; tells how many."""
    killer = subprocess.Popen(
        [sys.executable, "-c", KILLER, str(supervisor.pid)], stdout=subprocess.PIPE, text=True
    )
    assert killer.stdout is not None
    killed: list[str] = []

    def read() -> None:
        for line in killer.stdout or ():
            killed.append(line)

    assert killer.stdout.readline() == "ready\n"
    reader = threading.Thread(target=read)
    reader.start()
    supervisor.nice(NICE)  # what it forks inherits this
    try:
        yield lambda: len(killed)
    finally:
        killer.kill()
        killer.wait()
        reader.join()
        killer.stdout.close()
        with suppress(psutil.AccessDenied, psutil.NoSuchProcess):
            supervisor.nice(0)


def workers_of(supervisor: psutil.Process) -> list[psutil.Process]:
    found = []
    for one in supervisor.children():
        with suppress(psutil.NoSuchProcess):
            if one.name() == "hoplite worker":
                found.append(one)
    return found


def quick() -> hoplite_mp.Config:
    return dataclasses.replace(
        hoplite_mp.Config(),
        restart_pause_s=PAUSE_S,
        restart_pause_s_max=PAUSE_S_MAX,
        memory_bytes=64 << 20,
    )


def until_it_fails(
    pool: hoplite_mp.Cluster | hoplite_mp.Executor, timeout_s: float = PATIENCE_S
) -> None:
    """Now and then a worker is quicker than who kills it."""
    while True:
        pool.submit(add, 1, 2).result(timeout_s)


def test_tasks_fail_only_while_workers_die() -> None:
    with hoplite_mp.Cluster(2, config=quick()) as cluster:
        assert cluster.submit(add, 1, 2).result(PATIENCE_S) == 3
        with killing(host_of(cluster)) as killed:
            eventually(lambda: killed() >= KILLS)
            with pytest.raises(
                hoplite_mp.WorkerLostError, match=r"before their first task.*SIGKILL"
            ) as caught:
                until_it_fails(cluster.options(retries=100))
            assert "add()" in str(caught.value)
            eventually(lambda: cluster.nodes[0].workers == 0)
        assert cluster.submit(add, 3, 4).result(PATIENCE_S) == 7
        eventually(lambda: cluster.nodes[0].workers == 2)


def test_add_workers_begins_anew_at_once() -> None:
    config = dataclasses.replace(
        quick(), start_attempts_max=2, restart_pause_s=10 * PATIENCE_S, restart_pause_s_max=1e3
    )
    with hoplite_mp.Cluster(1, config=config) as cluster:
        # A task that is queued after the last attempt waits for the next one, and times out.
        over = hoplite_mp.WorkerLostError, hoplite_mp.HopliteTimeoutError
        with killing(host_of(cluster)), pytest.raises(over):
            until_it_fails(cluster, timeout_s=PATIENCE_S / 10)
        cluster.add_workers(1)
        eventually(lambda: cluster.nodes[0].workers == 2)
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
                    until_it_fails(pool)
            assert pool.submit(add, 3, 4).result(PATIENCE_S) == 7


def test_an_initializer_that_always_kills_its_process_breaks_the_pool() -> None:
    with hoplite_mp.Cluster(0, config=quick()) as cluster:
        pool = cluster.executor(1, initializer=os._exit, initargs=(3,))
        with pytest.raises(hoplite_mp.WorkerLostError, match="exit code 3"):
            pool.submit(add, 1, 2).result(PATIENCE_S)
        supervisor = host_of(cluster)
        eventually(lambda: not workers_of(supervisor))
        time.sleep(0.5)
        assert not workers_of(supervisor)  # no more are started


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
    settings = {
        "HOPLITE_MP_RESTART_PAUSE_S": str(PAUSE_S),
        "HOPLITE_MP_RESTART_PAUSE_S_MAX": str(PAUSE_S_MAX),
    }
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
