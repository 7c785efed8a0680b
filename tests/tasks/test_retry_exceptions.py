"""options(retry_exceptions=): what a task raises counts as the death of its worker does."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import hoplite_mp
from tests.support.waiting import eventually

if TYPE_CHECKING:
    from pathlib import Path

    from hoplite_mp import Cluster


def flaky(path: Path, failures: int, array: Any = None) -> int:
    """Raises so many times, then returns how often it has."""
    done = len(path.read_text()) if path.exists() else 0
    with path.open("a") as file:
        file.write("x")
    if array is not None:
        assert not array.any(), "it sees what the try before has done to its argument"
        array += 1
    if done < failures:
        raise ConnectionError(f"try {done}")
    return done


def retried(cluster: Cluster) -> int:
    found: int = cluster.stats()["tasks_retried"]
    return found


def test_it_runs_again_with_its_arguments_as_they_were(cluster: Cluster, tmp_path: Path) -> None:
    before = retried(cluster)
    view = cluster.options(retry_exceptions=(OSError,), retries=3)
    assert view.submit(flaky, tmp_path / "a", 3, np.zeros(3)).result() == 3
    assert retried(cluster) == before + 3


def test_the_last_one_is_raised_as_itself(cluster: Cluster, tmp_path: Path) -> None:
    before = cluster.stats()
    view = cluster.options(retry_exceptions=OSError, retries=2)
    with pytest.raises(ConnectionError, match="try 2") as caught:
        view.submit(flaky, tmp_path / "a", 9).result()
    assert "in flaky" in str(caught.value.__cause__)
    eventually(lambda: cluster.stats()["tasks_failed"] == before["tasks_failed"] + 1)
    assert retried(cluster) == before["tasks_retried"] + 2


def test_others_are_raised_at_once(cluster: Cluster, tmp_path: Path) -> None:
    for view in (cluster, cluster.options(retry_exceptions=[KeyError, ValueError])):
        path = tmp_path / str(id(view))
        with pytest.raises(ConnectionError, match="try 0"):
            view.submit(flaky, path, 9).result()


def test_deaths_and_exceptions_count_together(tmp_path: Path) -> None:
    def die_then_raise(path: Path) -> int:
        done = len(path.read_text()) if path.exists() else 0
        with path.open("a") as file:
            file.write("x")
        if done == 0:
            os._exit(3)
        if done < 3:
            raise OSError(f"try {done}")
        return done

    with hoplite_mp.Cluster(1) as cluster:
        enough = cluster.options(retry_exceptions=OSError, retries=3)
        assert enough.submit(die_then_raise, tmp_path / "a").result() == 3
        with pytest.raises(OSError, match="try 2"):
            enough.options(retries=2).submit(die_then_raise, tmp_path / "b").result()


@pytest.mark.parametrize("chunksize", [1, 4, 16])
def test_map_tries_each_item_by_itself(cluster: Cluster, tmp_path: Path, chunksize: int) -> None:
    before = retried(cluster)
    view = cluster.options(retry_exceptions=(OSError,), retries=3)
    paths = [tmp_path / str(i) for i in range(16)]
    failures = [i % 4 for i in range(16)]
    arrays = [np.zeros(2) for _ in paths]
    assert list(view.map(flaky, paths, failures, arrays, chunksize=chunksize)) == failures
    assert [len(path.read_text()) for path in paths] == [one + 1 for one in failures]
    assert retried(cluster) == before + sum(failures)
    with pytest.raises(ConnectionError, match="try 3"):
        list(view.map(flaky, [tmp_path / "x", tmp_path / "y"], [0, 9], chunksize=chunksize))


@pytest.mark.parametrize("chunksize", [1, 8])
def test_async_functions(cluster: Cluster, tmp_path: Path, chunksize: int) -> None:
    async def wobble(path: Path, failures: int) -> int:
        return flaky(path, failures)

    view = cluster.options(retry_exceptions=(OSError,), concurrency=4)
    failures = [i % 4 for i in range(8)]
    paths = [tmp_path / str(i) for i in range(8)]
    assert list(view.map(wobble, paths, failures, chunksize=chunksize)) == failures


def test_executors_and_peers(cluster: Cluster, tmp_path: Path) -> None:
    with cluster.executor(1, retry_exceptions=(OSError,)) as executor:
        assert executor.submit(flaky, tmp_path / "a", 3).result() == 3
        assert executor.options(retries=1).submit(flaky, tmp_path / "b", 1).result() == 1

    def peer(rank: int, folder: Path) -> int:
        return flaky(folder / str(rank), 2)

    (tmp_path / "c").mkdir()
    view = cluster.options(retry_exceptions=(OSError,))
    assert [one.result() for one in view.spmd(peer, 2, tmp_path / "c")] == [2, 2]


def test_what_waits_inside_a_task(cluster: Cluster, tmp_path: Path) -> None:
    def outer(path: Path) -> int:
        view = hoplite_mp.current().options(retry_exceptions=(OSError,))
        found: int = view.submit(flaky, path, 2).result()
        return found

    assert [one.result() for one in [cluster.submit(outer, tmp_path / str(i)) for i in range(4)]]


def test_an_exception_that_travels_by_value(cluster: Cluster, tmp_path: Path) -> None:
    class Mine(Exception):
        pass

    def fail_once() -> int:
        if not (tmp_path / "seen").exists():
            (tmp_path / "seen").touch()
            raise Mine
        return 1

    assert cluster.options(retry_exceptions=(Mine,)).submit(fail_once).result() == 1


class Log:
    def __init__(self) -> None:
        self.calls: list[str] = []

    def flaky(self, path: Path, failures: int) -> int:
        self.calls.append(path.name)
        return flaky(path, failures)

    async def later(self, path: Path, failures: int) -> int:
        return self.flaky(path, failures)

    def log(self) -> list[str]:
        return self.calls


@pytest.mark.parametrize("options", [{}, {"concurrency": 3}, {"checkpoint": 1}, {"checkpoint": 3}])
def test_calls_of_actors(cluster: Cluster, tmp_path: Path, options: dict[str, int]) -> None:
    view = cluster.options(retry_exceptions=(OSError,), retries=2, **options)
    log = view.actor(Log)
    calls = [log.flaky(tmp_path / str(i), i) for i in range(4)]
    assert [one.result() for one in calls[:3]] == [0, 1, 2]
    with pytest.raises(ConnectionError, match="try 2"):
        calls[3].result()
    if "concurrency" not in options:  # no later call comes between two tries
        assert log.log().result() == ["0", *"11", *"222", *"333"]
    assert log.later(tmp_path / "later", 2).result() == 2
    without = cluster.options(retry_exceptions=(OSError,)).actor(Log)  # retries are 0 of actors
    with pytest.raises(ConnectionError, match="try 0"):
        without.flaky(tmp_path / "without", 1).result()


def test_mistakes(cluster: Cluster) -> None:
    for wrong in (3, "OSError", (OSError, int), OSError("x"), KeyboardInterrupt):
        with pytest.raises(TypeError, match="retry_exceptions="):
            cluster.options(retry_exceptions=wrong)
    assert cluster.options(retry_exceptions=None).submit(abs, -1).result() == 1
    with pytest.raises(ValueError, match="not for stream"):
        cluster.options(retry_exceptions=OSError).stream(iter, [1])
