"""A user who may have only a few processes and threads (ulimit -u)."""

from __future__ import annotations

import ctypes
import os
import resource
import subprocess
import sys

import pytest

from tests.support.waiting import PATIENCE_S

PR_CAPBSET_DROP, CAP_SYS_ADMIN, CAP_SYS_RESOURCE = 24, 21, 24
LEAST = 7  # the program, its thread, supervisor, node, manager, a worker, and one thread more

pytestmark = pytest.mark.skipif(
    os.geteuid() != 0, reason="only root can be a user who has no processes yet"
)


def run(text: str, limit: int) -> list[str]:
    """What the program prints, as a user who has nothing else and may have so many processes."""
    user = 200_000 + os.getpid()

    def become_another() -> None:
        """A user who is not root, but reads its files; limits of processes hold for it."""
        resource.setrlimit(resource.RLIMIT_NPROC, (limit, limit))
        libc = ctypes.CDLL(None)
        for capability in (CAP_SYS_ADMIN, CAP_SYS_RESOURCE):
            libc.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0)
        os.setresuid(user, 0, 0)

    done = subprocess.run(
        [sys.executable, "-c", f"import hoplite_mp, os, subprocess, time\n{text}"],
        capture_output=True,
        text=True,
        timeout=3 * PATIENCE_S,
        preexec_fn=become_another,
        env={**os.environ, "OPENBLAS_NUM_THREADS": "1", "HOPLITE_MP_RESTART_PAUSE_S": "0.01"},
        check=False,
    )
    assert "Traceback" not in done.stderr, done.stderr
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.parametrize("limit", [1, 4, 6])
def test_too_few_processes_are_an_error_before_anything_has_begun(limit: int) -> None:
    text = """
try:
    hoplite_mp.Cluster(1)
except hoplite_mp.ConfigError as error:
    print(error)
    print(subprocess.__name__, len(os.listdir("/proc/self/task")))
"""
    words, rest = run(text, limit)
    assert f"workers=1 needs 6 more processes and threads, and {limit - 1} are allowed" in words
    assert "(ulimit -u): raise the limit" in words
    assert rest == "subprocess 1"


def test_just_enough_processes_run_tasks() -> None:
    text = """
with hoplite_mp.Cluster(1) as c:
    print(c.submit(abs, -1).result(30), c.get(c.put(3)))
"""
    assert run(text, LEAST) == ["1 3"]


USES = """
class Actor:
    def f(self):
        return 1
    async def g(self):
        return 2
def use(name, call):
    try:
        print(name, call())
    except (hoplite_mp.HopliteError, ValueError) as error:
        print(name, type(error).__name__, error)
with hoplite_mp.Cluster(1) as c:
    BEFORE
    use("queue", lambda: hoplite_mp.Queue().put(1))
    use("actor", lambda: c.actor(Actor).f().result())
    use("async", lambda: c.actor(Actor).g().result())
    use("concurrent", lambda: c.options(concurrency=2).actor(Actor).f().result())
    use("executor", lambda: c.executor(1).submit(abs, -1).result())
    use("task", lambda: c.submit(abs, -1).result())
"""


@pytest.mark.parametrize("more", [0, 1, 2, 3])
def test_too_few_processes_later_are_errors_that_say_why(more: int) -> None:
    """Each call works or names the cause; no bare RuntimeError comes out of any."""
    found = run(USES.replace("BEFORE", "pass"), LEAST + more)
    names = ["queue", "actor", "async", "concurrent", "executor", "task"]
    assert [line.split()[0] for line in found] == names
    for line in found:
        _, kind, *words = line.split()
        if kind in ("None", "1", "2"):
            continue
        assert kind in ("ConfigError", "WorkerLostError", "ValueError"), line
        reasons = ("cannot start the thread", "Resource temporarily unavailable")
        assert any(reason in " ".join(words) for reason in reasons), line
    assert found[-1] == "task 1"


def test_actor_of_a_queue_that_cannot_start_says_why() -> None:
    """The program's own threads run already; no process is left for the actor."""
    before = """
    called = threading.Event()
    c.submit(abs, -1).add_done_callback(lambda _: called.set())
    assert called.wait(30)"""
    found = run("import threading" + USES.replace("    BEFORE", before), LEAST)
    (queue,) = [line for line in found if line.startswith("queue")]
    assert "WorkerLostError" in queue
    assert " s: Resource temporarily unavailable" in queue
