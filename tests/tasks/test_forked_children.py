"""Children that user code forks in a task, and in a program whose other threads import."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.waiting import PATIENCE_S

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    from hoplite_mp import Cluster

WAYS = {
    "exit": 7, "large": 3, "text": 1, "none": 0, "raise": 1, "_exit": 9, "return": 0,
}  # fmt: skip


def fork(how: str) -> int:
    """The exit code of a child that ends in that way."""
    pid = os.fork()
    if pid:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if how == "raise":
        raise ValueError("in the child")
    if how == "_exit":
        os._exit(9)
    codes: dict[str, Any] = {"exit": 7, "large": 259, "text": "words of the child", "none": None}
    if how in codes:
        sys.exit(codes[how])
    return 5


async def fork_async(how: str) -> int:
    return fork(how)


def fork_in_stream(how: str) -> Iterator[int]:
    yield fork(how)


async def fork_in_async_stream(how: str) -> AsyncIterator[int]:
    yield fork(how)


def exit_of_process() -> int | None:
    process = multiprocessing.get_context("fork").Process(target=sys.exit, args=(4,))
    process.start()
    process.join()
    return process.exitcode


class Forking:
    def __init__(self, how: str = "") -> None:
        self.code = fork(how) if how else None

    def fork(self, how: str) -> int:
        return fork(how)

    def found(self) -> int | None:
        return self.code


@pytest.mark.parametrize("how", WAYS)
def test_child_forked_in_a_task_ends_with_its_own_exit_code(cluster: Cluster, how: str) -> None:
    code = WAYS[how]
    assert cluster.submit(fork, how).result(PATIENCE_S) == code
    assert cluster.submit(fork_async, how).result(PATIENCE_S) == code
    assert [cluster.get(one) for one in cluster.stream(fork_in_stream, how)] == [code]
    assert [cluster.get(one) for one in cluster.stream(fork_in_async_stream, how)] == [code]
    assert list(cluster.map(fork, [how])) == [code]


@pytest.mark.parametrize("how", WAYS)
def test_child_forked_in_an_actor_ends_with_its_own_exit_code(cluster: Cluster, how: str) -> None:
    code = WAYS[how]
    assert cluster.actor(Forking).fork(how).result(PATIENCE_S) == code
    assert cluster.options(concurrency=2).actor(Forking).fork(how).result(PATIENCE_S) == code
    assert cluster.actor(Forking, how).found().result(PATIENCE_S) == code


def test_child_forked_in_an_initializer_ends_with_its_own_exit_code(cluster: Cluster) -> None:
    def begin() -> None:
        global _found
        _found = fork("exit")

    def found() -> int:
        return _found

    with cluster.executor(1, initializer=begin) as executor:
        assert executor.submit(found).result(PATIENCE_S) == 7


def test_process_of_multiprocessing_in_a_task_ends_with_its_own_exit_code(cluster: Cluster) -> None:
    assert cluster.submit(exit_of_process).result(PATIENCE_S) == 4


_found = 0
# Stands still in the midst of importing cloudpickle, as long as a child is forked and lives.
PROGRAM = """
import importlib.abc, importlib.machinery, os, sys, threading, time
import hoplite_mp
inside, goes_on = threading.Event(), threading.Event()
class Slow(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == "cloudpickle" and threading.current_thread() is not threading.main_thread():
            inside.set()
            goes_on.wait()
        return None
with hoplite_mp.Cluster(1) as c:
    sys.meta_path.insert(0, Slow())
    thread = threading.Thread(target=lambda: (c.submit(lambda: 1).result(), inside.set()))
    thread.start()
    inside.wait()
    pid = os.fork()
    if not pid:
        import cloudpickle
        cloudpickle.dumps(lambda: 1)
        os._exit(0)
    for _ in range(600):
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            break
        time.sleep(0.05)
    else:
        os.kill(pid, 9)
        os.waitpid(pid, 0)
    goes_on.set()
    thread.join()
    print("the child ended" if done else "the child hung")
"""


def test_child_forked_while_another_thread_pickles_first_can_pickle() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        capture_output=True,
        text=True,
        timeout=2 * PATIENCE_S,
        check=False,
    )
    assert done.stdout.strip() == "the child ended", done.stderr


def test_opening_a_cluster_imports_what_pickling_needs() -> None:
    text = "import sys, hoplite_mp\nhoplite_mp.Cluster(1)\nprint('cloudpickle' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "True"
