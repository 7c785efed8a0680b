"""The checker of lock orders finds what could hang, although nothing hangs."""

from __future__ import annotations

import ast
import gc
import os
import re
import subprocess
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from hoplite_mp._common import locks
from hoplite_mp._common.lockdep import Checker, LockOrderError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "hoplite_mp"
# Locks that one thread takes and another thread releases.
SIGNALS = {"background.py": 1}
MAKERS = {"locks.py", "lockdep.py"}


@pytest.fixture
def checker() -> Iterator[Checker]:
    made = Checker()
    yield made
    made.close()


@pytest.fixture
def ranked() -> Iterator[Checker]:
    made = Checker({"outer": True, "middle": False, "inner": False})
    yield made
    made.close()


def in_thread(work: Callable[[], object]) -> None:
    thread = threading.Thread(target=work, name="another")
    thread.start()
    thread.join()


def take(*locks: Any) -> None:
    """Takes these, each under those before it."""
    if locks:
        with locks[0]:
            take(*locks[1:])


def test_an_inversion_in_two_threads_that_hangs_nobody_is_reported(checker: Checker) -> None:
    a, b = checker.lock("a"), checker.lock("b")
    take(a, b)
    assert not checker.findings
    in_thread(lambda: take(b, a))
    (found,) = checker.findings
    assert "a thread takes a under b: a cycle" in found
    assert found.count("in take") >= 4  # where each of both was taken, in both threads
    assert "(another)" in found
    assert "(MainThread)" in found


def test_an_inversion_is_reported_once(checker: Checker) -> None:
    a, b = checker.lock("a"), checker.lock("b")
    for _ in range(3):
        take(a, b)
        take(b, a)
    assert len(checker.findings) == 1


def test_an_inversion_of_other_locks_of_the_same_names_is_reported(checker: Checker) -> None:
    take(checker.lock("a"), checker.lock("b"))
    take(checker.lock("b"), checker.lock("a"))
    assert len(checker.findings) == 1


def test_a_circle_of_three_is_reported_with_all_its_steps(checker: Checker) -> None:
    a, b, c = (checker.lock(name) for name in "abc")
    take(a, b)
    take(b, c)
    assert not checker.findings
    take(c, a)
    (found,) = checker.findings
    for step in ("then a at", "then b at", "then c at"):
        assert step in found


def test_locks_in_one_order_are_no_finding(checker: Checker) -> None:
    a, b, c = (checker.lock(name) for name in "abc")
    take(a, b, c)
    take(a, c)
    in_thread(lambda: take(b, c))
    assert not checker.findings


def test_a_lock_that_was_released_is_not_held(checker: Checker) -> None:
    a, b = checker.lock("a"), checker.lock("b")
    take(a, b)
    b.acquire()
    b.release()
    take(a)
    assert not checker.findings


def test_a_lock_released_out_of_order_is_not_held(checker: Checker) -> None:
    a, b, c = (checker.lock(name) for name in "abc")
    a.acquire()
    b.acquire()
    a.release()
    take(c)
    b.release()
    assert ("b", "c") in checker._edges
    assert ("a", "c") not in checker._edges


def test_an_attempt_that_does_not_wait_is_no_step(checker: Checker) -> None:
    a, b = checker.lock("a"), checker.lock("b")
    take(a, b)
    with b:
        assert a.acquire(blocking=False)
        a.release()
    assert not checker.findings


def test_a_lock_taken_under_a_successful_attempt_is_a_step(checker: Checker) -> None:
    a, b = checker.lock("a"), checker.lock("b")
    assert a.acquire(blocking=False)
    take(b)
    a.release()
    take(b, a)
    assert len(checker.findings) == 1


def test_a_lock_taken_twice_by_one_thread_raises(checker: Checker) -> None:
    a = checker.lock("a")
    with a:
        assert not a.acquire(blocking=False)
        assert not a.acquire(timeout=0.01)
        with pytest.raises(LockOrderError, match="a is taken twice"):
            a.acquire()
    assert len(checker.findings) == 1
    assert not a.locked()


def test_a_reentrant_lock_taken_twice_is_no_finding(checker: Checker) -> None:
    a, b = checker.rlock("a"), checker.lock("b")
    take(a, b, a, a)
    assert not checker.findings
    in_thread(lambda: take(a))  # it is free


def test_two_locks_of_one_name_at_a_time_are_reported(checker: Checker) -> None:
    take(checker.lock("a"), checker.lock("a"))
    (found,) = checker.findings
    assert "two locks named a at a time" in found


def test_conditions_of_several_futures_at_a_time_are_no_finding(checker: Checker) -> None:
    take(checker.condition("client.future"), checker.condition("client.future"))
    assert not checker.findings


def test_a_condition_is_not_held_while_it_waits(checker: Checker) -> None:
    condition, a = checker.condition("c"), checker.lock("a")
    ready: list[bool] = []

    def notify() -> None:
        take(a, condition)
        with condition:
            ready.append(True)
            condition.notify_all()

    thread = threading.Thread(target=notify)
    with condition:
        thread.start()
        assert condition.wait_for(lambda: ready, 30)
    thread.join()
    assert not checker.findings
    take(condition, a)  # and it is held again after that
    assert len(checker.findings) == 1


def test_a_lock_that_stands_above_the_held_one_is_reported(ranked: Checker) -> None:
    take(ranked.lock("middle"), ranked.lock("inner"))
    assert not ranked.findings
    take(ranked.lock("inner"), ranked.lock("middle"))
    assert len(ranked.findings) == 1
    take(ranked.lock("middle"), ranked.lock("outer"))  # no circle, but against the order
    assert "outer under middle, which must be taken later" in ranked.findings[1]


def test_a_name_that_is_not_in_the_order_is_refused(ranked: Checker) -> None:
    with pytest.raises(KeyError, match="'another' is not in the table"):
        ranked.lock("another")


def test_a_wait_under_a_lock_that_others_need_is_reported(ranked: Checker) -> None:
    with ranked.lock("outer"):
        ranked.waits("a reply")
    assert not ranked.findings
    with ranked.lock("inner"):
        ranked.waits("a reply")
    (found,) = ranked.findings
    assert "a wait for a reply under inner" in found


def test_a_message_under_a_lock_that_a_handler_takes_is_reported(checker: Checker) -> None:
    channel, queues = checker.rlock("channel"), checker.rlock("queues")
    with queues:
        checker.sends("channel")
    assert not checker.findings
    take(channel, queues)  # the handler of a reply
    assert len(checker.findings) == 1


def test_a_callback_under_a_lock_is_reported(checker: Checker) -> None:
    checker.calls_user_code("callbacks are")
    assert not checker.findings
    with checker.lock("a"):
        checker.calls_user_code("callbacks are")
    assert "callbacks are called under a" in checker.findings[0]


class Cycle:
    """Garbage whose finalizer takes locks."""

    def __init__(self, *locks: Any) -> None:
        self.locks = locks
        self.me = self

    def __del__(self) -> None:
        take(*self.locks)


def collect_under(lock: Any, *taken: Any) -> None:
    Cycle(*taken)
    with lock:
        gc.collect()


def test_a_finalizer_that_closes_a_circle_is_reported(checker: Checker) -> None:
    a, b = checker.lock("a"), checker.lock("b")
    take(a, b)
    collect_under(b, a)
    assert "a finalizer takes a under b: a cycle" in checker.findings[0]


def test_two_finalizers_make_no_circle(checker: Checker) -> None:
    """No two threads run the collector at the same time."""
    a, b = checker.lock("a"), checker.lock("b")
    collect_under(a, b)
    collect_under(b, a)
    assert not checker.findings


def test_locks_of_one_finalizer_are_ordinary_steps(checker: Checker) -> None:
    a, b, c = (checker.lock(name) for name in "abc")
    collect_under(c, a, b)
    assert not checker.findings
    take(b, a)
    assert len(checker.findings) == 1


def test_an_exception_in_the_middle_releases_the_lock(checker: Checker) -> None:
    """As a signal handler may raise it between the steps of `acquire`."""
    a = checker.lock("a")

    def interrupt(lock: Any) -> None:
        raise KeyboardInterrupt

    checker.after = interrupt  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        a.acquire()
    assert not a.locked()


def test_findings_of_every_process_are_written_down(tmp_path: Path) -> None:
    program = """
import os
from hoplite_mp._common import locks
a, b = locks.lock("sync.table"), locks.rlock("client.channel")
if not os.fork():
    with b, a:
        pass
"""
    environment = {**os.environ, locks.DEBUG_VARIABLE: str(tmp_path)}
    subprocess.run([sys.executable, "-c", program], env=environment, check=True, cwd=ROOT)
    (written,) = tmp_path.iterdir()
    assert "sync.table under client.channel, which must be taken later" in written.read_text()


def test_without_the_variable_locks_are_plain() -> None:
    program = """
import threading
from hoplite_mp._common import locks
assert type(locks.lock("anything")) is type(threading.Lock())
assert type(locks.rlock("anything")) is type(threading.RLock())
assert type(locks.condition("anything")) is threading.Condition
assert locks.checker is None
"""
    environment = {**os.environ, locks.DEBUG_VARIABLE: "0"}
    subprocess.run([sys.executable, "-c", program], env=environment, check=True, cwd=ROOT)


def plain_locks(path: Path) -> int:
    """How many locks the module makes past `locks`."""
    made = 0
    for one in ast.walk(ast.parse(path.read_text())):
        if isinstance(one, ast.Call):
            called = ast.unparse(one.func)
            made += bool(re.fullmatch(r"((threading|_thread)\.)?(R?Lock|Condition)", called))
            made += called.endswith("allocate_lock")
    return made


def test_every_lock_of_the_library_has_a_name() -> None:
    skipped = ("_simulation", "_sync")  # a run's own baton; `Lock` is a public class
    for path in PACKAGE.rglob("*.py"):
        inside = path.relative_to(PACKAGE)
        if inside.name not in MAKERS and inside.parts[0] not in skipped:
            assert plain_locks(path) == SIGNALS.get(inside.name, 0), path


def test_the_documented_order_is_the_order() -> None:
    text = (ROOT / "docs/architecture.md").read_text()
    part = text.partition("## Locks of a process")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| \d+ \| `([a-z._]+)` \|.*\| (yes|no) \|$", part, flags=re.MULTILINE)
    assert [(name, may == "yes") for name, may in rows] == list(locks.ORDER.items())


def test_every_lock_in_the_order_is_made_somewhere() -> None:
    module = Path(locks.__file__)
    source = "".join(path.read_text() for path in PACKAGE.rglob("*.py") if path != module)
    for name in locks.ORDER:
        assert re.search(rf'locks\.(lock|rlock|condition)\("{name}"\)', source), name
