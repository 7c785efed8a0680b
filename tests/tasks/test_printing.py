"""The end of a cell waits for workers' lines, and for no longer than it may."""

from __future__ import annotations

import contextlib
import io
import threading
from typing import TYPE_CHECKING

import hoplite_mp
from hoplite_mp._client import printing
from tests.support.processes import run_program
from tests.support.waiting import PATIENCE_S

if TYPE_CHECKING:
    import pytest


def test_a_cell_ends_although_another_thread_asks_the_node(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its question may take long, and the mark's has to wait for it."""
    monkeypatch.setattr(printing, "CELL_WAIT_S", 0.05)
    gate, asked = threading.Event(), threading.Event()

    def ask(number: int) -> None:
        gate.wait(PATIENCE_S)
        asked.set()

    printing.Printer(ask).wait()
    assert not asked.is_set()
    gate.set()
    assert asked.wait(PATIENCE_S)


def test_a_cell_ends_at_once_when_there_is_no_node(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(printing, "CELL_WAIT_S", None)  # else for ever

    def ask(number: int) -> None:
        raise OSError("it has ended")

    printing.Printer(ask).wait()


def test_result_waits_for_lines_no_longer_than_its_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(printing, "CELL_WAIT_S", 600.0)  # else until the lines are written
    gate, started, written = threading.Event(), threading.Event(), threading.Event()

    class Slow(io.StringIO):
        def write(self, text: str) -> int:
            started.set()
            gate.wait(PATIENCE_S)
            written.set()
            return len(text)

    with hoplite_mp.Cluster(workers=1) as c, contextlib.redirect_stdout(Slow()):
        futures = [c.submit(print, "text") for _ in range(3)]
        assert started.wait(PATIENCE_S)
        c.wait(futures)
        for future, timeout in zip(futures[:2], (0, 0.1), strict=True):
            future.result(timeout)
        c.get(futures[2], timeout=0.1)
        assert not written.is_set()
        gate.set()


PRINTS = """
def prints(i):
    for k in range(3):
        print("line", i, k)
def fails(i):
    prints(i)
    raise LookupError(i)
class Printer:
    def prints(self, i):
        prints(i)
calls = [
    lambda i: c.submit(prints, i).result(),
    lambda i: c.get(c.submit(prints, i)),
    lambda i: list(c.map(prints, [i])),
    lambda i: c.submit(fails, i).exception(),
    lambda i: actor.prints(i).result(),
]
def report(count):
    for i in range(count):
        calls[i % len(calls)](i)
        print("result", i, flush=True)
"""


def check_order(out: str, count: int) -> None:
    """All lines of a task come before its result, in their order."""
    found = [line.split(") ")[-1] for line in out.splitlines()]
    wanted = [[*(f"line {i} {k}" for k in range(3)), f"result {i}"] for i in range(count)]
    assert found == [line for lines in wanted for line in lines]


def test_lines_of_a_task_appear_before_its_result() -> None:
    body = (
        "with hoplite_mp.Cluster(workers=2) as c:\n    actor = c.actor(Printer)\n    report(200)\n"
    )
    check_order(run_program(PRINTS + body), 200)


def test_results_without_lines_send_no_request_to_the_node() -> None:
    with hoplite_mp.Cluster(workers=1) as c:
        assert c._host is not None
        printer = c._host._printer
        c.submit(print, "shown").result(PATIENCE_S)
        before = next(printer._numbers)
        for i in range(50):
            assert c.submit(abs, -i).result(PATIENCE_S) == i
        assert next(printer._numbers) == before + 1


def test_results_are_given_out_although_nobody_reads_the_output() -> None:
    """The program's stdout is a pipe that is full."""
    out = run_program(
        """
        import select
        def prints():
            print("x" * 1000)
        read, write = os.pipe()
        kept = os.dup(1)
        os.set_blocking(write, False)
        try:
            while True:
                os.write(write, bytes(4096))
        except BlockingIOError:
            os.set_blocking(write, True)
        os.dup2(write, 1)
        c = hoplite_mp.Cluster(workers=1)
        begun = time.monotonic()
        for _ in range(3):
            c.submit(prints).result(30)
        took = time.monotonic() - begun
        while select.select([read], [], [], 0)[0]:
            os.read(read, 1 << 16)
        os.dup2(kept, 1)
        say(took < 20)
        os.close(write)
        """
    )
    assert "True" in out.splitlines()
