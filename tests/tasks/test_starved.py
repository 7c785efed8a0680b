"""A host that has no descriptors, or no process, left: what needs one waits or says so, the rest
goes on."""

from __future__ import annotations

import contextlib
import os
import resource
import subprocess
import sys
from typing import TYPE_CHECKING

import numpy as np
import psutil
import pytest

import hoplite_mp
from tests.tasks.helpers import PATIENCE_S, add, at_rest, eventually, host_of

if TYPE_CHECKING:
    from collections.abc import Iterator


def start_sleeper() -> int:
    """A process that a task leaves behind."""
    return os.spawnlp(os.P_NOWAIT, "sleep", "sleep", "600")


def node_of(cluster: hoplite_mp.Cluster) -> psutil.Process:
    family = host_of(cluster).children()
    (found,) = [one for one in family if one.name() == "hoplite node"]
    return found


@contextlib.contextmanager
def starved(process: psutil.Process) -> Iterator[None]:
    """It can open nothing more."""
    soft, hard = resource.prlimit(process.pid, resource.RLIMIT_NOFILE)
    there = {int(name) for name in os.listdir(f"/proc/{process.pid}/fd")}
    free = next(number for number in range(hard) if number not in there)
    resource.prlimit(process.pid, resource.RLIMIT_NOFILE, (free, hard))
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):  # it has ended
            resource.prlimit(process.pid, resource.RLIMIT_NOFILE, (soft, hard))


def test_the_node_has_no_descriptors(capfd: pytest.CaptureFixture[str]) -> None:
    with hoplite_mp.Cluster(workers=2, memory="128MiB") as cluster:
        at_rest(cluster, 2)
        with starved(node_of(cluster)):
            with pytest.raises(ValueError, match="no worker can be started: Too many open files"):
                cluster.add_workers(2)
            with pytest.raises(ValueError, match="no worker can be started: Too many open files"):
                cluster.executor(2)
            parts = [cluster.submit(np.full, 300_000, float(i)) for i in range(3)]
            assert cluster.get(cluster.reduce(parts))[5] == 3.0
            assert cluster.nodes[0].workers == 2

        def grows() -> bool:
            try:
                cluster.add_workers(1)
            except ValueError:
                return False
            return True

        eventually(grows)
        eventually(lambda: cluster.nodes[0].workers == 3)
        assert list(cluster.executor(2).map(add, [1, 2], [3, 4])) == [4, 6]
    err = capfd.readouterr().err
    assert 1 <= err.count("no worker can be started now") <= 3


def test_a_worker_dies_while_its_node_can_open_nothing() -> None:
    """What it reads for the error's text cannot be read: the text says so, and the node lives."""
    with hoplite_mp.Cluster(workers=2, memory="128MiB") as cluster:
        at_rest(cluster, 2)
        with starved(node_of(cluster)):
            with pytest.raises(hoplite_mp.WorkerLostError, match="memory in use: unknown"):
                cluster.options(retries=0).submit(os._exit, 1).result(PATIENCE_S)
            assert cluster.submit(add, 1, 2).result(PATIENCE_S) == 3


def test_the_manager_dies_while_its_host_can_open_nothing() -> None:
    with hoplite_mp.Cluster(workers=2, memory="128MiB") as cluster:
        at_rest(cluster, 2)
        supervisor = host_of(cluster)
        (manager,) = [one for one in supervisor.children() if one.name() == "hoplite manager"]
        with starved(supervisor):
            manager.kill()
            eventually(lambda: not manager.is_running())  # it was reaped, and a start has failed
            with pytest.raises(hoplite_mp.WorkerLostError):  # reaped and reported meanwhile
                cluster.options(retries=0).submit(os._exit, 1).result(PATIENCE_S)
        parts = [cluster.submit(np.full, 300_000, float(i)) for i in range(3)]
        assert cluster.get(cluster.reduce(parts), timeout=PATIENCE_S)[5] == 3.0


def test_a_cluster_ends_while_its_host_has_no_descriptor_for_a_manager() -> None:
    """In order, with all processes that its tasks have started."""
    with contextlib.ExitStack() as stack:
        cluster = stack.enter_context(hoplite_mp.Cluster(workers=2, memory="128MiB"))
        at_rest(cluster, 2)
        left = psutil.Process(cluster.submit(start_sleeper).result(PATIENCE_S))
        supervisor = host_of(cluster)
        (manager,) = [one for one in supervisor.children() if one.name() == "hoplite manager"]
        with starved(supervisor):
            manager.kill()
            eventually(lambda: not manager.is_running())
            stack.close()  # a supervisor that does not listen would be killed alone
    eventually(lambda: not left.is_running())


def test_tasks_for_which_no_worker_can_be_started() -> None:
    """They are not waited for for ever."""
    with hoplite_mp.Cluster(workers=1, memory="64MiB") as cluster:
        assert cluster.submit(add, 1, 2).result(PATIENCE_S) == 3
        at_rest(cluster, 1)  # the supervisor has done what it does after a worker has begun
        with starved(host_of(cluster)):
            with pytest.raises(hoplite_mp.WorkerLostError):
                cluster.options(retries=0).submit(os._exit, 1).result(PATIENCE_S)
            waits = cluster.submit(add, 3, 4)
            with pytest.raises(hoplite_mp.WorkerLostError, match=r"none could be started: Too ma"):
                waits.result(PATIENCE_S)
        assert cluster.submit(add, 5, 6).result(PATIENCE_S) == 11


def test_the_limit_is_known_before_anything_is_started() -> None:
    program = """
import resource, hoplite_mp
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
try:
    hoplite_mp.Cluster(workers=12)
except hoplite_mp.ConfigError as error:
    print(error)
with hoplite_mp.Cluster(workers=2) as cluster:
    print(cluster.submit(abs, -1).result(30))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stderr == ""
    refusal, result = done.stdout.splitlines()
    assert "workers=12 needs about 104 descriptors, and a process may open 64 here" in refusal
    assert result == "1"
