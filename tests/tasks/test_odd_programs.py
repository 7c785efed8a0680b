"""Programs in odd surroundings: inside loky, without an executable, without /proc, under trio."""

from __future__ import annotations

import contextlib
import multiprocessing
import operator
import os
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any
from unittest import mock

import numpy as np
import pytest

import hoplite_mp
from tests.support.functions import add
from tests.support.waiting import PATIENCE_S, wait_for

if TYPE_CHECKING:
    from pathlib import Path

    from hoplite_mp import Cluster


def run(text: str, *before: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*before, sys.executable, "-c", text],
        capture_output=True,
        text=True,
        timeout=3 * PATIENCE_S,
        check=False,
    )


class Index:
    """An integer of another library."""

    def __init__(self, value: int) -> None:
        self.value = value

    def __index__(self) -> int:
        return self.value


LOKY = """
from joblib.externals.loky import get_reusable_executor
def inside():
    import hoplite_mp
    def start_method():
        import multiprocessing
        with multiprocessing.Pool(1) as pool:
            pool.map(abs, [1])
        return multiprocessing.get_start_method()
    with hoplite_mp.Cluster(1) as c:
        return c.submit(start_method).result(), c.submit(abs, -3).result()
print(get_reusable_executor(1).submit(inside).result())
"""


def test_cluster_inside_a_worker_of_loky_runs_tasks() -> None:
    done = run(LOKY)
    assert done.stdout.strip() == str((multiprocessing.get_start_method(), 3)), done.stderr


NO_EXECUTABLE = """
import sys, hoplite_mp
sys.executable = GIVEN
with hoplite_mp.Cluster(1) as c:
    print(c.submit(abs, -3).result())
sys.exec_prefix = "/nowhere"
try:
    hoplite_mp.Cluster(1)
except hoplite_mp.ConfigError as error:
    print(error)
"""


@pytest.mark.parametrize("given", ["None", "''"])
def test_program_without_an_executable_finds_one_or_says_what_to_set(given: str) -> None:
    done = run(NO_EXECUTABLE.replace("GIVEN", given))
    first, second = done.stdout.splitlines()
    assert first == "3"
    assert f"sys.executable={given}" in second
    assert "set sys.executable to the path" in second


NO_PROC = """
import os, numpy as np, hoplite_mp
assert not os.listdir("/proc")
class Actor:
    def f(self):
        return 1
def peer(rank):
    return float(hoplite_mp.current().group("g", 2, rank).allreduce(np.ones(100_000)).sum())
with hoplite_mp.Cluster(1) as c:
    assert c.nodes[0].memory_total < 1 << 50
    print(c.submit(abs, -3).result(), c.actor(Actor).f().result())
    print([one.result() for one in c.spmd(peer, 2)])
    print(type(c.options(retries=0).submit(os._exit, 1).exception()).__name__)
    print(c.get(c.submit(np.ones, 1_000_000), copy=True)[0])
"""


def test_cluster_without_proc_runs() -> None:
    command = 'mount -t tmpfs none /proc && exec "$@"'
    done = run(NO_PROC, "unshare", "--mount", "sh", "-c", command, "sh")
    expected = ["3 1", "[200000.0, 200000.0]", "WorkerLostError", "1.0"]
    assert done.stdout.splitlines() == expected, done.stderr


@pytest.mark.parametrize("kind", [np.int64, np.uint8, np.array, Index])
def test_counts_of_any_integer_type_are_accepted(kind: Any) -> None:
    one, two = kind(1), kind(2)
    config = hoplite_mp.Config(retries=kind(2))
    assert type(config.retries) is int
    with hoplite_mp.Cluster(one, config=config, memory="128MiB") as cluster:
        view = cluster.options(retries=one, priority=two)
        assert view.submit(add, 1, 2).result() == 3
        refs = cluster.options(buffersize=two).stream(iter, [1, 2])
        assert [cluster.get(ref) for ref in refs] == [1, 2]
        assert list(cluster.map(abs, [-1, -2, -3], chunksize=two, buffersize=two)) == [1, 2, 3]
        with cluster.executor(one, max_tasks_per_child=two) as executor:
            assert executor.submit(add, 1, 2).result() == 3
        assert [each.result() for each in cluster.spmd(abs, one)] == [0]
        cluster.add_workers(one)
        ref = cluster.put(np.ones(3), copies=one)
        assert cluster.wait([ref], num=one) == ([ref], [])
        assert cluster.get(cluster.reduce([ref, ref], num=two))[0] == 2.0
        assert hoplite_mp.Queue(maxsize=two).qsize() == 0
        assert hoplite_mp.Semaphore(two).acquire()
        cluster.options(restarts=one, checkpoint=one, concurrency=one).actor(list)
    with hoplite_mp.Executor(one, max_tasks_per_child=two) as owner:
        assert owner.submit(add, 1, 2).result() == 3


def test_numbers_of_numpy_in_config_become_those_of_python() -> None:
    config = hoplite_mp.Config(memory_bytes=np.int64(1 << 27), put_wait_s=np.float32(2))
    assert (type(config.memory_bytes), type(config.put_wait_s)) == (int, float)
    with pytest.raises(hoplite_mp.ConfigError, match="a whole number"):
        hoplite_mp.Config(retries=np.float64(1.5))
    with hoplite_mp.Cluster(0, memory=np.int64(1 << 27)) as cluster:
        assert cluster.nodes[0].memory_total == 1 << 27


@pytest.mark.parametrize("wrong", [1.0, np.float64(1), "1", True, np.True_, [1], np.array([1])])
def test_counts_that_are_no_integers_are_refused(wrong: Any) -> None:
    with pytest.raises(ValueError, match="must be a number from 0 to 200"):
        hoplite_mp.Cluster(wrong)
    with pytest.raises(ValueError, match="max_workers must be"):
        hoplite_mp.Executor(wrong)


def test_mock_as_a_function_runs_or_is_one_clear_error(cluster: Cluster) -> None:
    assert cluster.submit(mock.Mock(return_value=3)).result(PATIENCE_S) == 3
    assert cluster.submit(mock.MagicMock(return_value=3)).result(PATIENCE_S) == 3
    with pytest.raises(Exception, match="cannot pickle the AsyncMock"):
        cluster.submit(mock.AsyncMock())
    with pytest.raises(TypeError, match="an actor is created from a class"):
        cluster.actor(mock.Mock())


def test_await_outside_asyncio_names_what_to_use_under_trio(
    cluster: Cluster, tmp_path: Path
) -> None:
    """As trio runs coroutines: without a loop of asyncio."""
    future = cluster.submit(wait_for, tmp_path / "go")
    gate = cluster.submit(operator.index, 5)
    coroutines = [
        lambda one: one.__await__(),
        lambda one: one.ref.__await__(),
        lambda one: hoplite_mp.as_completed([one]).__aiter__().__anext__().__await__(),
    ]
    for make in coroutines:
        with pytest.raises(RuntimeError, match=r"trio\.to_thread\.run_sync"):
            next(iter(make(future)))
    assert gate.result() == 5
    (tmp_path / "go").touch()


INTERRUPT_AGAIN_S = 30.0  # an end takes long on a busy machine, and is not to be interrupted
CTRL_C = """
import hoplite_mp, numpy, sys  # numpy turns an interrupt of its own import into an ImportError
print("begins", flush=True)
try:
    while True:
        with hoplite_mp.Cluster(1, memory="64MiB"):
            pass
except KeyboardInterrupt:
    print("interrupted", flush=True)
"""


@pytest.mark.parametrize("after_s", [0.0, 0.1, 0.3])
def test_ctrl_c_during_the_start_prints_no_traceback(after_s: float) -> None:
    """Every process of the terminal gets the signal, at any moment of the start."""
    process = subprocess.Popen(
        [sys.executable, "-c", CTRL_C],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, "HOPLITE_MP_DEBUG_LOCKS": "0"},  # whose checks the signal may strike
    )
    with process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline() == "begins\n"
        time.sleep(after_s)  # the moment is what is varied
        os.killpg(process.pid, signal.SIGINT)
        while process.poll() is None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(INTERRUPT_AGAIN_S)
                break
            os.killpg(process.pid, signal.SIGINT)
        out, err = process.stdout.read(), process.stderr.read()
    assert "boot.py" not in err
    assert out == "interrupted\n"
    # An interrupt in a callback of the interpreter itself is lost, which it prints.
    assert not err or err.startswith("Exception ignored ")
