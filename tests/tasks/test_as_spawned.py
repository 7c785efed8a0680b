"""What programs find in a spawned process they find in a worker."""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import select
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

import hoplite_mp
from hoplite_mp._worker.inherited_context import _end_of
from tests.support.processes import Program
from tests.support.waiting import PATIENCE_S

if TYPE_CHECKING:
    from pathlib import Path


def describe() -> dict[str, Any]:
    me, parent = multiprocessing.current_process(), multiprocessing.parent_process()
    assert parent is not None
    return {
        "name": me.name,
        "daemon": me.daemon,
        "pid": me.pid == os.getpid(),
        "parent": (parent.name, parent.pid, parent.is_alive()),
        "argv": sys.argv,
        "faulthandler": faulthandler.is_enabled(),
    }


def read(path: str) -> bytes:
    with open(path, "rb") as file:
        return file.read()


def append(shared: Any, value: int) -> int:
    shared.append(value)
    return len(shared)


def test_as_a_spawned_process() -> None:
    assert faulthandler.is_enabled()  # by pytest
    with hoplite_mp.Cluster(2, memory="64MiB") as cluster:
        found = cluster.submit(describe).result(PATIENCE_S)
    assert found["name"] in ("SpawnProcess-1", "SpawnProcess-2")
    del found["name"]
    assert found == {
        "daemon": False,
        "pid": True,
        "parent": ("MainProcess", os.getpid(), True),
        "argv": sys.argv,
        "faulthandler": True,
    }


@pytest.mark.parametrize("imported", ["before", "after"])
def test_proxies_of_a_manager(imported: str) -> None:
    body = f"""
        if {imported == "before"}:
            import multiprocessing
        with hoplite_mp.Executor(2) as pool:
            say(pool.submit(lambda: "multiprocessing" in sys.modules).result(30))
            import multiprocessing
            with multiprocessing.Manager() as manager:
                shared, lock = manager.list(), manager.Lock()
                def add(number, shared=shared):
                    with lock:
                        shared.append(number)
                    return multiprocessing.current_process().name
                names = set(pool.map(add, range(10), chunksize=1))
                say(sorted(shared) == list(range(10)), all("Spawn" in name for name in names))
                say(multiprocessing.current_process().name)
    """
    assert Program(body).end()[0].splitlines() == ["False", "True True", "MainProcess"]


def test_the_key_is_seen_nowhere() -> None:
    import psutil

    key = bytes(multiprocessing.current_process().authkey)
    with hoplite_mp.Cluster(1, memory="64MiB") as cluster:
        assert cluster.submit(abs, -1).result(PATIENCE_S) == 1
        looked_at = 0
        for one in psutil.Process().children(recursive=True):
            try:
                said = [read(f"/proc/{one.pid}/{name}") for name in ("cmdline", "environ")]
            except (FileNotFoundError, ProcessLookupError):
                continue  # a process of a test before this one, which has ended meanwhile
            assert not any(key in what for what in said)
            looked_at += 1
        assert looked_at >= 3  # supervisor, node and worker


def test_the_start_method_is_that_of_the_program() -> None:
    body = """
        import multiprocessing
        multiprocessing.set_start_method("spawn")
        with hoplite_mp.Executor(1) as pool:
            def method():
                import multiprocessing
                return multiprocessing.get_start_method()
            say(pool.submit(method).result(30))
    """
    assert Program(body).end()[0] == "spawn\n"


def test_the_program_has_ended_before_multiprocessing_is_imported() -> None:
    """Its end can be seen all the same, and the import goes through."""
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    fd = _end_of(child.pid)
    try:
        assert select.select([fd], [], [], 0)[0] == [fd]
    finally:
        os.close(fd)


SCRIPT = """
import multiprocessing
import sys

import hoplite_mp


class Number:
    value = 3


def square(x):
    return x * x * Number.value


def child():
    with hoplite_mp.Cluster(workers=1, memory="64MiB") as c:
        print(c.submit(square, 2).result(timeout=60))


if __name__ == "__main__":
    process = multiprocessing.get_context(sys.argv[1]).Process(target=child)
    process.start()
    process.join()
"""


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_functions_of_the_script_of_a_spawned_process(tmp_path: Path, method: str) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(
        [sys.executable, str(script), method], capture_output=True, text=True, env=environment
    )
    assert (done.stdout, done.stderr) == ("12\n", "")
