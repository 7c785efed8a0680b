"""Workers die, drivers die, users press Ctrl-C: the rest goes on and nothing is left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from typing import TYPE_CHECKING, Any

import psutil
import pytest

import hoplite_mp
from tests.lan import forked

if TYPE_CHECKING:
    from pathlib import Path

PATIENCE_S = 30.0


def die(how: str) -> None:
    if how == "exit":
        os._exit(7)
    if how == "segfault":
        import ctypes

        ctypes.string_at(0)
    os.kill(os.getpid(), getattr(signal, how))


def die_once(path: str) -> str:
    try:
        os.close(os.open(path, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return "second time"
    os.kill(os.getpid(), signal.SIGKILL)
    return "never"


@pytest.mark.parametrize(
    ("how", "says"),
    [("SIGKILL", "SIGKILL"), ("exit", "exit code 7"), ("segfault", "SIGSEGV")],
)
def test_a_worker_that_dies_is_named(how: str, says: str) -> None:
    with hoplite_mp.Cluster(workers=2) as cluster:
        others = [cluster.submit(time.sleep, 0.01) for _ in range(20)]
        future = cluster.options(retries=1).submit(die, how)
        with pytest.raises(hoplite_mp.WorkerLostError) as caught:
            future.result(PATIENCE_S)
        message = str(caught.value)
        for word in (says, "die()", "tried 2 times"):
            assert word in message
        assert ("GiB in use" in message) == (how != "exit")
        assert "memory" not in message or how != "exit"
        assert [other.result(PATIENCE_S) for other in others] == [None] * 20
        assert cluster.stats()["workers_lost"] == 2


def test_a_task_is_tried_again(tmp_path: Path) -> None:
    with hoplite_mp.Cluster(workers=1) as cluster:
        assert cluster.submit(die_once, str(tmp_path / "x")).result(PATIENCE_S) == "second time"
        with pytest.raises(hoplite_mp.WorkerLostError, match="tried 1 time"):
            cluster.options(retries=0).submit(die, "SIGKILL").result(PATIENCE_S)


def test_exceptions_that_do_not_travel() -> None:
    class Odd(Exception):
        def __reduce__(self) -> Any:
            raise TypeError("not me")

    def odd() -> None:
        raise Odd("inside")

    def leave() -> None:
        raise SystemExit(3)

    with hoplite_mp.Cluster(workers=1) as cluster:
        with pytest.raises(Exception, match="inside") as caught:
            cluster.submit(odd).result(PATIENCE_S)
        assert "odd" in str(caught.value.__cause__)
        with pytest.raises(hoplite_mp.TaskError, match="raised SystemExit: 3"):
            cluster.submit(leave).result(PATIENCE_S)
        with pytest.raises(TypeError, match="pickle"):
            cluster.submit(threading.Lock).result(PATIENCE_S)
        assert cluster.submit(abs, -1).result(PATIENCE_S) == 1


def test_a_fork_inside_a_task_and_in_the_driver() -> None:
    def forks() -> int:
        cluster = hoplite_mp.current()
        ref = cluster.put(list(range(100)))
        read, write = os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                cluster.get(ref)
                os.write(write, b"n")
            except hoplite_mp.ClosedError:
                os.write(write, b"y")
            return -1  # comes back into the worker's loop of the child
        os.close(write)
        answer = os.read(read, 1)
        os.waitpid(pid, 0)
        assert answer == b"y"
        return sum(cluster.get(ref))

    with hoplite_mp.Cluster(workers=1) as cluster:
        assert cluster.submit(forks).result(PATIENCE_S) == 4950
        ref = cluster.put(5)
        pid = os.fork()
        if pid == 0:
            try:
                cluster.get(ref)
            except hoplite_mp.ClosedError:
                os._exit(0)
            os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        assert cluster.get(ref) == 5
        assert cluster.submit(abs, ref).result(PATIENCE_S) == 5


def test_after_the_end() -> None:
    with hoplite_mp.Cluster(workers=1) as cluster:
        ref = cluster.put(1)
        future = cluster.submit(abs, -1)
    assert future.done()
    for call in (
        lambda: cluster.put(1),
        lambda: cluster.get(ref),
        lambda: cluster.submit(abs, 1),
        lambda: cluster.stats(),
        hoplite_mp.current,
    ):
        with pytest.raises(hoplite_mp.ClosedError):
            call()


def test_leaving_by_an_exception_does_not_wait() -> None:
    def leave() -> None:
        with hoplite_mp.Cluster(workers=1) as cluster:
            # A wait for these would exceed the time that a test has.
            futures = [cluster.submit(time.sleep, 600) for _ in range(3)]
            while not futures[0].running():
                time.sleep(0.001)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        leave()


# -- whole programs -------------------------------------------------------------------------------

HEAD = """
import os, signal, sys, time, numpy as np, hoplite_mp
signal.signal(signal.SIGINT, signal.default_int_handler)  # whatever started the tests ignores it
def mine(n):
    return helper(n) + 1
def helper(n):
    return n * 2
"""


def run(body: str, *, expect: int | None = 0, interrupt: bool = False) -> tuple[str, str]:
    """A script as a user would write it; afterwards none of its processes is left."""
    process = forked.popen(
        [sys.executable, "-c", HEAD + textwrap.dedent(body)],
        dict(os.environ),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    family: set[psutil.Process] = set()
    me = psutil.Process(process.pid)
    if interrupt:
        assert process.stdout is not None
        assert process.stdout.readline().strip() == "ready"
        family |= set(me.children(recursive=True))
        assert family
        os.kill(process.pid, signal.SIGINT)
    try:
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
    if expect is not None:
        assert process.returncode == expect, err
    _, alive = psutil.wait_procs(list(family), timeout=PATIENCE_S)
    assert not alive, alive
    return out, err


def test_a_script_needs_no_guard_and_functions_of_main_travel() -> None:
    out, _ = run(
        """
        c = hoplite_mp.Cluster(workers=2)
        print(c.submit(mine, 20).result(), list(c.map(lambda n: n + 1, range(3))))
        class Point:
            def __init__(self, x): self.x = x
        print(c.submit(lambda p: p.x, Point(5)).result())
        """
    )
    assert out.split() == ["41", "[1,", "2,", "3]", "5"]


def test_output_of_workers_comes_line_by_line() -> None:
    out, err = run(
        """
        def talk(n):
            print("line", n); os.write(1, b"raw\\n"); print("problem", file=sys.stderr)
        with hoplite_mp.Cluster(workers=1) as c:
            c.submit(talk, 1).result()
        """
    )
    assert "(worker 2@h0) line 1\n" in out
    assert "(worker 2@h0) raw\n" in out
    assert "(worker 2@h0) problem\n" in err


def test_ctrl_c_during_a_wait_leaves_the_cluster_usable() -> None:
    out, _ = run(
        """
        with hoplite_mp.Cluster(workers=1) as c:
            future = c.submit(time.sleep, 60)
            try:
                print("ready", flush=True)
                c.get(future)
            except KeyboardInterrupt:
                print("interrupted")
            future.cancel(force=True)
            print(c.submit(mine, 1).result(), c.get(c.put(3)))
        """,
        interrupt=True,
    )
    assert out.split() == ["interrupted", "3", "3"]


def test_workers_start_where_the_driver_is(tmp_path: Path) -> None:
    (tmp_path / "beside.py").write_text("value = 11\n")
    out, _ = run(
        f"""
        os.chdir({str(tmp_path)!r}); sys.path.insert(0, {str(tmp_path)!r})
        os.environ["MINE"] = "yes"
        def look():
            import beside
            return os.getcwd(), os.environ["MINE"], beside.value
        with hoplite_mp.Cluster(workers=1) as c:
            print(*c.submit(look).result())
        """
    )
    assert out.split() == [str(tmp_path), "yes", "11"]
