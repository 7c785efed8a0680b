"""Threads of BLAS and of other numerical libraries: each process gets its share of the cores."""

from __future__ import annotations

import os

import pytest

import hoplite_mp
from hoplite_mp._client import launch
from hoplite_mp._supervisor.environment import BLAS_VARIABLES, blas_environment, blas_threads_here

CORES = 8  # that the host is said to have
NAMES = ("OMP_NUM_THREADS", "NUMBA_NUM_THREADS", "MKL_NUM_THREADS")


@pytest.fixture(autouse=True)
def eight_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "cpu_count", lambda: CORES)
    for name in (*BLAS_VARIABLES, "HOPLITE_MP_BLAS_THREADS"):
        monkeypatch.delenv(name, raising=False)


def threads(*_: object) -> set[int | None]:
    """What numpy's OpenBLAS uses, and what libraries that are loaded later will use."""
    return {blas_threads_here(), *(int(os.environ[name]) for name in NAMES)}


class Where:
    def threads(self) -> set[int | None]:
        return threads()


@pytest.mark.parametrize("workers", [0, 2])
def test_threads_in_any_pool_are_cores_divided_by_its_processes(workers: int) -> None:
    with hoplite_mp.Cluster(workers, memory="128MiB") as cluster:
        if workers:
            assert cluster.submit(threads).result() == {4}
        assert [one.result() for one in cluster.spmd(threads, 4)] == [{2}] * 4
        for size in (2, 3, 9):
            with cluster.executor(size) as executor:
                assert executor.submit(threads).result() == {max(1, CORES // size)}
        cluster.add_workers(8)
        if not workers:
            assert cluster.submit(threads).result() == {1}


def test_threads_in_an_actor_are_one_unless_asked() -> None:
    with hoplite_mp.Cluster(0, memory="128MiB") as cluster:
        assert cluster.actor(Where).threads().result() == {1}
        asked = cluster.options(env={"OMP_NUM_THREADS": "2"}).actor(Where)
        assert asked.threads().result() == {2}


def test_threads_that_config_names_are_those_of_every_process() -> None:
    config = hoplite_mp.Config(blas_threads=3)
    with hoplite_mp.Cluster(1, config=config, memory="128MiB") as cluster:
        assert cluster.submit(threads).result() == {3}
        assert cluster.actor(Where).threads().result() == {3}
        assert [one.result() for one in cluster.spmd(threads, 2)] == [{3}, {3}]


def test_threads_that_the_environment_names_are_those_of_every_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    with hoplite_mp.Cluster(1, memory="128MiB") as cluster:
        assert cluster.submit(threads).result() == {5}
        assert cluster.actor(Where).threads().result() == {5}


def test_drop_in_executor_divides_the_cores() -> None:
    with hoplite_mp.Executor(4) as executor:
        assert executor.submit(threads).result() == {2}
    with hoplite_mp.Executor(4, initializer=int) as executor:
        assert executor.submit(threads).result() == {2}


def test_more_processes_than_cores_have_one_thread_each() -> None:
    found = blas_environment(None, 2, 5, {})
    assert {found[name] for name in BLAS_VARIABLES} == {"1"}
