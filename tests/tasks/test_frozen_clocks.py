"""Programs whose tests freeze the clocks of Python, as freezegun does: timeouts still pass."""

from __future__ import annotations

import subprocess
import sys

import pytest

from hoplite_mp._common import clock
from tests.support.waiting import PATIENCE_S

# As freezegun: the functions of `time`, and every module attribute that refers to one of them,
# except in the modules that it leaves out by default.
FREEZE = """
import concurrent.futures, queue, sys, time
import hoplite_mp
LEFT_OUT = ("threading", "multiprocessing", "queue", "_pytest")
NAMES = ("time", "time_ns", "monotonic", "monotonic_ns", "perf_counter", "perf_counter_ns")
def freeze():
    fakes = {}
    for name in NAMES:
        real = getattr(time, name)
        fakes[id(real)] = (lambda now: lambda: now)(real())
    for module in list(sys.modules.values()):
        if getattr(module, "__name__", "").startswith(LEFT_OUT):
            continue
        for attribute, value in list(vars(module).items()):
            if id(value) in fakes:
                setattr(module, attribute, fakes[id(value)])
def check(name, call):
    try:
        call()
    except (TimeoutError, hoplite_mp.HopliteTimeoutError, queue.Empty):
        print(name)
real_sleep = time.sleep
"""
PROGRAM = (
    FREEZE
    + """
from unittest import mock
WHEN
def slow():
    real_sleep(60)
class Actor:
    def slow(self):
        real_sleep(60)
with hoplite_mp.Cluster(4) as c:
    def inside():
        freeze()
        check("inside", lambda: hoplite_mp.current().get(never, timeout=0.2))
        return time.monotonic() == time.monotonic()
    never = c.actor(Actor).slow()
    assert c.submit(inside).result()
    future = c.submit(slow)
    check("result", lambda: future.result(0.2))
    check("get", lambda: c.get(future, timeout=0.2))
    assert not c.wait([future.ref], timeout=0.2)[0]
    check("as_completed", lambda: list(hoplite_mp.as_completed([future], timeout=0.2)))
    check("map", lambda: list(c.map(lambda _: real_sleep(60), [1], timeout=0.2)))
    check("queue", lambda: hoplite_mp.Queue().get(timeout=0.2))
    lock = hoplite_mp.Lock()
    assert lock.acquire() and not lock.acquire(timeout=0.2)
    check("options", lambda: c.options(timeout=0.2, retries=0).submit(slow).result())
    check("run", lambda: c.run(lambda: None, timeout=0.2))
    with mock.patch("time.sleep"):
        print(c.submit(abs, -1).result())
    future.cancel(force=True)
    raise SystemExit("the cluster ends at once")
"""
)
EXPECTED = ["inside", "result", "get", "as_completed", "map", "queue", "options", "run", "1"]


@pytest.mark.parametrize("when", ["before", "after"])
def test_timeouts_pass_although_the_clocks_of_python_stand_still(when: str) -> None:
    """The clocks are frozen before the library's modules are loaded, or once a cluster ran."""
    warm = "with hoplite_mp.Cluster(1) as c:\n    c.submit(abs, 1).result()\n"
    text = PROGRAM.replace("WHEN", ("" if when == "before" else warm) + "freeze()")
    done = subprocess.run(
        [sys.executable, "-c", text],
        capture_output=True,
        text=True,
        timeout=3 * PATIENCE_S,
        check=False,
    )
    lines = [line for line in done.stdout.splitlines() if not line.startswith("(worker")]
    inside = [line for line in done.stdout.splitlines() if line.startswith("(worker")]
    assert lines == EXPECTED[1:], done.stderr
    assert [line.split()[-1] for line in inside] == EXPECTED[:1]
    assert done.stderr.strip().endswith("the cluster ends at once")


@pytest.mark.parametrize("seconds", [60.0, 1e300])
def test_wait_for_a_process_ends_with_it_whatever_the_timeout(seconds: float) -> None:
    with subprocess.Popen([sys.executable, "-c", "import sys; sys.exit(3)"]) as process:
        assert clock.wait_for_process(process, seconds) == 3
        assert clock.wait_for_process(process, 0.0) == 3


def test_wait_for_a_process_ends_with_the_timeout() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        assert clock.wait_for_process(process, 0.01) is None
        process.communicate(b"\n")
        assert clock.wait_for_process(process, 60.0) == 0
