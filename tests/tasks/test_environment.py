"""options(env=): the environment of processes of their own, set before anything is imported."""

from __future__ import annotations

import os
import sys
import textwrap
from typing import TYPE_CHECKING, Any

import pytest

import hoplite_mp
from tests.support.waiting import eventually

if TYPE_CHECKING:
    from pathlib import Path

    from hoplite_mp import Cluster

NAME = "HOPLITE_TEST_OF_ENV"


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """One that reads the environment when it is imported; found by a cluster that is made now."""
    text = f"""
        import os, sys
        NUMPY_WAS_THERE = "numpy" in sys.modules
        FOUND = os.environ.get("{NAME}"), os.environ.get("OMP_NUM_THREADS"), os.environ.get("HOME")
    """
    (tmp_path / "reads_environment.py").write_text(textwrap.dedent(text))
    monkeypatch.syspath_prepend(str(tmp_path))
    return "reads_environment"


def imported(module: str) -> tuple[str | None, ...]:
    """What it has found, in this process."""
    __import__(module)
    found: tuple[str | None, ...] = sys.modules[module].FOUND
    return found


def of_process() -> dict[str, str]:
    """The environment that this process was executed with, as the kernel knows it."""
    with open("/proc/self/environ", "rb") as file:
        pairs = [pair.partition(b"=") for pair in file.read().split(b"\0") if pair]
    return {os.fsdecode(name): os.fsdecode(value) for name, _, value in pairs}


def blas_threads() -> list[int]:
    from threadpoolctl import threadpool_info

    return [one["num_threads"] for one in threadpool_info() if one["user_api"] == "blas"]


class Where:
    def imported(self, module: str) -> tuple[str | None, ...]:
        return imported(module)

    def end(self) -> None:
        os._exit(3)


def test_it_is_there_before_imports(module: str) -> None:
    with hoplite_mp.Cluster(1) as cluster:
        view = cluster.options(env={NAME: "yes", "OMP_NUM_THREADS": "1", "HOME": None})
        with view.executor(2) as executor:
            assert executor.submit(imported, module).result() == ("yes", "1", None)
            environment = executor.submit(of_process).result()
            assert environment[NAME] == "yes"
            assert "HOME" not in environment
            assert set(executor.submit(blas_threads).result()) <= {1}
            # One that starts again has it, too.
            pid = executor.submit(os.getpid).result()
            died = executor.options(retries=0).submit(os._exit, 3)
            assert isinstance(died.exception(), hoplite_mp.WorkerLostError)
            for _ in range(4):
                assert executor.submit(imported, module).result() == ("yes", "1", None)
            assert pid
        peers = view.spmd(lambda rank: imported(module), 2)
        assert [one.result()[0] for one in peers] == ["yes", "yes"]
        assert cluster.submit(imported, module).result()[0] is None
        assert os.environ.get(NAME) is None


def test_of_an_actor_and_its_restarts(module: str) -> None:
    with hoplite_mp.Cluster(1) as cluster:
        actor = cluster.options(env={NAME: "π = 3"}, restarts=1).actor(Where)
        assert actor.imported(module).result()[0] == "π = 3"
        with pytest.raises(hoplite_mp.ActorLostError):
            actor.end().result()
        assert actor.imported(module).result()[0] == "π = 3"


def test_an_initializer_and_what_it_inherits(cluster: Cluster) -> None:
    import multiprocessing

    lock = multiprocessing.get_context("spawn").Lock()

    def begin(given: Any) -> None:
        sys.modules["__kept__"] = given  # type: ignore[assignment]

    def use() -> str | None:
        given: Any = sys.modules["__kept__"]
        with given:
            return os.environ.get(NAME)

    with cluster.executor(1, initializer=begin, initargs=(lock,), env={NAME: "x"}) as executor:
        assert executor.submit(use).result() == "x"


def test_what_it_prints_is_shown(cluster: Cluster, capfd: pytest.CaptureFixture[str]) -> None:
    with cluster.executor(1, env={NAME: "x"}) as executor:
        executor.submit(print, "a line of a fresh worker").result()
        found = ""

        def shown() -> bool:
            nonlocal found
            found += capfd.readouterr().out
            return "a line of a fresh worker\n" in found

        eventually(shown)


def test_elsewhere_it_is_an_error(cluster: Cluster) -> None:
    view = cluster.options(env={NAME: "x"})
    with view.executor(1) as executor:
        calls = [
            lambda: view.submit(abs, -1),
            lambda: view.map(abs, []),
            lambda: view.run(abs, -1),
            lambda: view.stream(iter, []),
            lambda: executor.options(env={NAME: "y"}).submit(abs, -1),
        ]
        for call in calls:
            with pytest.raises(ValueError, match="env= is for the new processes"):
                call()
        assert executor.submit(os.getenv, NAME).result() == "x"
    assert view.options(env=None).submit(abs, -1).result() == 1


@pytest.mark.parametrize(
    ("wrong", "kind", "words"),
    [
        ([("A", "1")], TypeError, "must be a dict"),
        ({"A": 1}, TypeError, "must be strings"),
        ({1: "A"}, TypeError, "must be strings"),
        ({"A=B": "1"}, ValueError, "an environment cannot contain"),
        ({"": "1"}, ValueError, "an environment cannot contain"),
        ({"A": "1\0"}, ValueError, "an environment cannot contain"),
        ({"A": "x" * 40_000}, ValueError, "at most 32768"),
    ],
)
def test_mistakes(cluster: Cluster, wrong: Any, kind: type[Exception], words: str) -> None:
    with pytest.raises(kind, match=words):
        cluster.options(env=wrong)


def test_the_largest_travels(cluster: Cluster) -> None:
    with cluster.executor(1, env={"A": "x" * 32_000}) as executor:
        assert len(executor.submit(os.getenv, "A").result()) == 32_000
