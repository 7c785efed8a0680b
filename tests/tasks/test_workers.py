"""The workers as a crew: deaths, replacements, stand-ins, pools of their own, threads of BLAS."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from concurrent.futures import BrokenExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pytest

import hoplite_mp
from hoplite_mp._common.machine_limits import cpu_count
from tests.support.functions import add
from tests.support.processes import at_rest, run_program
from tests.support.waiting import PATIENCE_S, announce, eventually, wait_for

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hoplite_mp import Cluster


@pytest.fixture(scope="module")
def crew() -> Iterator[Cluster]:
    """Two workers that may die."""
    with hoplite_mp.Cluster(workers=2, memory="128MiB") as made:
        yield made


def workers_of(cluster: Cluster) -> int:
    """Worker processes that the cluster counts: its first pool's, stand-ins included."""
    return cluster.nodes[0].workers


def rested(cluster: Cluster) -> set[int]:
    """The processes when no worker is coming or going."""
    at_rest(cluster, 2)
    return family()


def family() -> set[int]:
    return {process.pid for process in psutil.Process().children(recursive=True)}


def die_first(path: str, times: int) -> int:
    """Kills its process the first few times that it runs; says how often it has run."""
    runs = len(list(Path(path).iterdir()))
    (Path(path) / str(runs)).touch()
    if runs < times:
        os.kill(os.getpid(), signal.SIGKILL)
    return runs + 1


def recurse(depth: int) -> int:
    return 0 if depth == 0 else 1 + hoplite_mp.current().submit(recurse, depth - 1).result()


def spread(width: int) -> int:
    return sum(hoplite_mp.current().map(add, range(width), chunksize=1))


def in_threads(count: int) -> list[int]:
    """Threads of one task, each waiting for a task of its own."""
    cluster, found = hoplite_mp.current(), []
    threads = [
        threading.Thread(target=lambda n=n: found.append(cluster.submit(add, n, 1).result()))
        for n in range(count)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sorted(found)


def test_more_deaths_than_a_broken_pool_would_have(crew: Cluster) -> None:
    """Tasks that kill their worker at once are not mistaken for workers that cannot start."""
    lost = crew.stats()
    futures = [crew.options(retries=0).submit(os._exit, 3) for _ in range(12)]
    for future in futures:
        with pytest.raises(hoplite_mp.WorkerLostError, match=r"exit code 3 .*_exit\(\); tried 1 "):
            future.result(PATIENCE_S)
    assert crew.submit(abs, -1).result(PATIENCE_S) == 1
    now = crew.stats()
    assert now["workers_lost"] - lost["workers_lost"] == 12
    assert now["tasks_failed"] - lost["tasks_failed"] == 12
    assert now["tasks_retried"] == lost["tasks_retried"]


def test_leaving_with_code_zero_is_a_death_too(crew: Cluster) -> None:
    lost = crew.stats()["workers_lost"]
    with pytest.raises(hoplite_mp.WorkerLostError, match="exit code 0"):
        crew.options(retries=1).submit(os._exit, 0).result(PATIENCE_S)
    assert crew.stats()["workers_lost"] - lost == 2


@pytest.mark.parametrize("times", [1, 3])
def test_as_many_tries_as_retries_allow(crew: Cluster, tmp_path: Path, times: int) -> None:
    assert crew.submit(die_first, str(tmp_path), times).result(PATIENCE_S) == times + 1
    error = crew.options(retries=0, name="a job").submit(die_first, str(tmp_path), 99).exception()
    assert isinstance(error, BrokenExecutor)
    assert "a job()" in str(error)
    assert "SIGKILL" in str(error)
    assert len(list(tmp_path.iterdir())) == times + 2


def test_a_death_disturbs_nobody_else(crew: Cluster, tmp_path: Path) -> None:
    go = str(tmp_path / "go")
    neighbour = crew.submit(wait_for, go)
    eventually(neighbour.running)
    after = [crew.submit(add, n, 1) for n in range(50)]
    needs = crew.submit(len, neighbour)
    with pytest.raises(hoplite_mp.WorkerLostError):
        crew.options(retries=2).submit(os.kill, 0, signal.SIGKILL).result(PATIENCE_S)
    assert [future.result(PATIENCE_S) for future in after] == list(range(1, 51))
    assert not neighbour.done()
    Path(go).touch()
    assert needs.result(PATIENCE_S) == len(go)


def test_what_a_lost_task_was_needed_for_fails_with_it(crew: Cluster) -> None:
    lost = crew.options(retries=0).submit(os._exit, 1)
    needs = crew.submit(add, crew.submit(add, lost, 1), 1)
    with pytest.raises(hoplite_mp.WorkerLostError, match="exit code 1"):
        needs.result(PATIENCE_S)


def test_the_submitter_dies_and_what_it_had_queued_with_it(crew: Cluster, tmp_path: Path) -> None:
    """Refs to tasks of a dead process: what ran is there, what had not begun is lost."""

    def submits(go: str) -> Any:
        cluster = hoplite_mp.current()
        first, waits = cluster.submit(add, 1, 2), cluster.submit(wait_for, go)
        first.result()
        queued = cluster.submit(len, waits)
        threading.Thread(target=die_when, args=(go + ".die",)).start()
        return [first.ref, queued.ref]

    go = tmp_path / "go"
    first, queued = crew.submit(submits, str(go)).result(PATIENCE_S)
    (tmp_path / "go.die").touch()
    with pytest.raises(hoplite_mp.ObjectLostError, match="submitted"):
        crew.get(queued, PATIENCE_S)
    go.touch()
    assert crew.get(first) == 3
    assert crew.submit(add, 1, 1).result(PATIENCE_S) == 2


def die_when(path: str) -> None:
    wait_for(path)
    os._exit(1)


def test_deep_wide_and_threaded_nesting(crew: Cluster) -> None:
    assert crew.submit(recurse, 60).result(PATIENCE_S) == 60
    assert list(crew.map(spread, [5, 6, 7], chunksize=1)) == [10, 15, 21]
    assert crew.submit(in_threads, 12).result(PATIENCE_S) == list(range(1, 13))


def test_stand_ins_come_and_go(tmp_path: Path) -> None:
    with hoplite_mp.Cluster(workers=1) as cluster:
        go = str(tmp_path / "go")

        def waits(n: int) -> str:
            gate = hoplite_mp.current().options(timeout=60)  # with a timeout: not run in place
            return str(gate.submit(wait_for, go).result()) + str(n)

        futures = [cluster.submit(waits, n) for n in range(3)]
        eventually(lambda: workers_of(cluster) >= 2)
        Path(go).touch()
        assert [future.result(PATIENCE_S) for future in futures] == [f"{go}{n}" for n in range(3)]
        eventually(lambda: workers_of(cluster) == 1)
        assert cluster.stats()["workers_lost"] == 0
        assert cluster.submit(abs, -1).result(PATIENCE_S) == 1


def test_an_executor_takes_its_workers_with_it(crew: Cluster, tmp_path: Path) -> None:
    before = rested(crew)
    with crew.executor(2, name="mine") as own:
        assert own.submit(os.getpid).result(PATIENCE_S) not in before
        error = own.options(retries=0).submit(os._exit, 1).exception(PATIENCE_S)
        assert "mine()" in str(error)
        assert sorted(own.map(add, range(9), range(9))) == list(range(0, 18, 2))
    eventually(lambda: family() <= before)
    with pytest.raises(hoplite_mp.ClosedError):
        own.submit(abs, 1)
    with pytest.raises(ZeroDivisionError), crew.executor(1) as own:  # noqa: PT012
        running = own.submit(announce, str(tmp_path / "x"))
        queued = own.submit(abs, -1)
        eventually((tmp_path / "x").exists)
        raise ZeroDivisionError
    assert running.cancelled()
    assert queued.cancelled()
    eventually(lambda: family() <= before)
    with pytest.raises(TypeError, match="colour"):
        crew.executor(1, colour="red")


def test_an_executor_of_a_task_that_dies(crew: Cluster) -> None:
    count = len(rested(crew))

    def opens(path: str) -> None:
        own = hoplite_mp.current().executor(2)
        own.submit(abs, -1).result()
        os._exit(1)

    with pytest.raises(hoplite_mp.WorkerLostError):
        crew.options(retries=0).submit(opens, "").result(PATIENCE_S)
    eventually(lambda: len(family()) == count)


def test_an_initializer_that_kills_its_worker(crew: Cluster) -> None:
    with crew.executor(1, initializer=os._exit, initargs=(1,)) as own:
        error = own.submit(abs, -1).exception(PATIENCE_S)
    assert isinstance(error, BrokenExecutor)
    assert "exit code 1" in str(error)
    assert crew.submit(abs, -1).result(PATIENCE_S) == 1
    for _ in range(4):  # the next ones have its number, and nothing of its fate
        with crew.executor(1) as own:
            assert own.submit(abs, -1).result(PATIENCE_S) == 1


def test_spmd_peers_run_at_the_same_time(crew: Cluster, tmp_path: Path) -> None:
    def peer(rank: int, folder: str, size: int) -> int:
        (Path(folder) / str(rank)).touch()
        eventually(lambda: len(list(Path(folder).iterdir())) == size)
        return os.getpid()

    before = rested(crew)
    pids = {f.result(PATIENCE_S) for f in crew.spmd(peer, 6, str(tmp_path), 6)}
    assert len(pids) == 6
    eventually(lambda: family() <= before)


def test_current_is_there_in_tasks_alone(crew: Cluster) -> None:
    def inside() -> bool:
        cluster = hoplite_mp.current()
        return cluster.get(cluster.put(cluster is hoplite_mp.current()))  # type: ignore[no-any-return]

    assert crew.submit(inside).result(PATIENCE_S)
    with hoplite_mp.Cluster(workers=1) as inner:
        assert hoplite_mp.current() is inner
    assert hoplite_mp.current() is not inner
    out = run_program(
        """
        try:
            hoplite_mp.current()
        except hoplite_mp.ClosedError as error:
            say("closed")
        with hoplite_mp.Cluster(workers=1) as c:
            say(hoplite_mp.current() is c)
        try:
            hoplite_mp.current()
        except hoplite_mp.ClosedError as error:
            say("closed")
        """
    )
    assert out.split() == ["closed", "True", "closed"]


def test_threads_of_blas_and_what_sets_them() -> None:
    """Counted in the worker, after a product that is large enough for all of them."""
    out = run_program(
        """
        names = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
        def threads():
            a = np.ones((700, 700))
            a @ a
            return len(os.listdir("/proc/self/task")), *(os.environ[n] for n in names)
        for given in (
            {},
            {"OMP_NUM_THREADS": "3"},
            {"OMP_NUM_THREADS": "1"},
            {"OMP_NUM_THREADS": "3,2", "OPENBLAS_NUM_THREADS": "2"},
            {"OMP_NUM_THREADS": "3", "HOPLITE_MP_BLAS_THREADS": "1"},
        ):
            for name in (*names, "HOPLITE_MP_BLAS_THREADS"):
                os.environ.pop(name, None)
            os.environ.update(given)
            with hoplite_mp.Cluster(workers=1) as c:
                say(*c.submit(threads).result())
        """
    )
    cores = str(cpu_count())
    assert [line.split() for line in out.splitlines()] == [
        [cores, cores, cores, cores],
        ["3", "3", "3", "3"],
        ["1", "1", "1", "1"],
        ["2", "3,2", "2", "3,2"],
        ["1", "1", "1", "1"],
    ]


def test_nobody_is_busy_after_the_work(crew: Cluster) -> None:
    at_rest(crew, 2)

    def used() -> float:
        total = 0.0
        for pid in family():
            with contextlib.suppress(psutil.NoSuchProcess):  # a surplus worker has just gone
                total += sum(psutil.Process(pid).cpu_times()[:2])
        return total

    def idle() -> bool:
        before, began = used(), time.monotonic()
        threading.Event().wait(0.5)
        return used() - before <= 0.05 * (time.monotonic() - began)

    eventually(idle)


def test_without_workers_a_task_is_refused_and_a_pool_works() -> None:
    with hoplite_mp.Cluster(workers=0) as cluster:
        with pytest.raises(RuntimeError, match="workers=0"):
            cluster.submit(add, 1, 2)
        with pytest.raises(RuntimeError, match="workers=0"):
            list(cluster.map(add, [1], [2]))
        with cluster.executor(1) as pool:
            assert pool.submit(add, 1, 2).result() == 3


def test_workers_are_added_while_work_runs(tmp_path: Path) -> None:
    with hoplite_mp.Cluster(workers=0) as cluster:
        with pytest.raises(RuntimeError, match="workers=0"):
            cluster.submit(int)
        cluster.add_workers(1)
        slow = cluster.submit(wait_for, tmp_path / "go")
        cluster.add_workers(2)
        assert [f.result() for f in [cluster.submit(pow, 2, n) for n in range(4)]] == [1, 2, 4, 8]
        assert not slow.done()
        (tmp_path / "go").touch()
        assert cluster.nodes[0].workers == 3
        for wrong in (0, -1, 201, 1.5, True, None):
            with pytest.raises(ValueError, match="it must be from 1 to 200"):
                cluster.add_workers(wrong)  # type: ignore[arg-type]
