"""`hoplite-mp top`: on a terminal, where there is none, and what its numbers mean."""

from __future__ import annotations

import contextlib
import io
import os
import pty
import select
import signal
import subprocess
import sys
import termios
import time
from typing import TYPE_CHECKING

import pytest
from rich.console import Console

import hoplite_mp
from hoplite_mp._api.nodes import Node
from hoplite_mp._cli import main, status
from hoplite_mp._cli.top import COLUMNS, TopSnapshot, _drawn, lines
from tests.support.clusters import PATIENCE_S, ROOT, TOKEN

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

MIB = 1 << 20
NODES = tuple(Node(f"h{i}", f"10.0.0.{i}", f"host{i}", 2, 0, 100 * MIB) for i in range(2))


def counts(**changed: int) -> dict[str, int]:
    names = ("tasks_done", "tasks_failed", "objects", "bytes_used", "bytes_sent", "bytes_received")
    return dict.fromkeys(names, 0) | changed


def cells(line: tuple[str, ...]) -> dict[str, str]:
    return dict(zip(COLUMNS, line, strict=True))


def test_rates_are_differences_of_two_looks() -> None:
    before = TopSnapshot(10.0, NODES[:1], {"h0": counts(tasks_done=5, bytes_sent=MIB)})
    after = TopSnapshot(
        12.0, NODES[:1],
        {"h0": counts(tasks_done=25, bytes_sent=5 * MIB, bytes_used=25 * MIB, objects=3)},
    )  # fmt: skip
    first = cells(lines(before, None)[0])
    assert first["tasks/s"] == first["sent/s"] == first["received/s"] == "-"
    (line,) = lines(after, before)
    found = cells(line)
    assert found["tasks/s"] == "10"
    assert found["done"] == "25"
    assert found["sent/s"] == "2 MiB/s"
    assert found["received/s"] == "0 bytes/s"
    assert found["memory"] == "25% of 100 MiB"
    assert found["objects"] == "3"


def test_who_does_not_answer_who_leaves_and_who_comes() -> None:
    before = TopSnapshot(1.0, NODES, {"h0": counts(tasks_done=4), "h1": counts()})
    silent = TopSnapshot(2.0, NODES, {"h0": counts(tasks_done=6)})
    first, second, total = map(cells, lines(silent, before))
    assert first["tasks/s"] == total["tasks/s"] == "2"
    assert second["memory"] == "no answer"
    assert second["tasks/s"] == ""
    assert total["workers"] == "4"
    gone = TopSnapshot(3.0, NODES[:1], silent.counts)
    assert [line[0] for line in lines(gone, silent)] == ["h0"]
    came = TopSnapshot(4.0, NODES, {"h0": counts(tasks_done=6), "h1": counts(tasks_done=9)})
    assert cells(lines(came, gone)[1])["tasks/s"] == "-"
    # A counter that has fallen is that of another life: there is no rate.
    again = TopSnapshot(5.0, NODES, {"h0": counts(tasks_done=7), "h1": counts(tasks_done=1)})
    first, second, _ = map(cells, lines(again, came))
    assert (first["tasks/s"], second["tasks/s"]) == ("1", "-")


def test_what_runs_now_and_who_is_gone() -> None:
    tasks = {"h0": {"queued": 5, "running": 3}, "h1": {"queued": 2, "running": 1}}
    look = TopSnapshot(
        1.0, NODES, {node.id: counts() for node in NODES}, tasks=tasks,
        gone=("h2 (host2) left 11 s ago",),
    )  # fmt: skip
    assert [cells(line)["running"] for line in lines(look, None)] == ["3", "1", "4"]
    assert [cells(line)["queued"] for line in lines(look, None)] == ["5", "2", "7"]
    console = Console(width=200, file=io.StringIO())
    console.print(_drawn("title", look, None, 200))
    assert isinstance(console.file, io.StringIO)
    assert look.gone[0] in console.file.getvalue().splitlines()
    # A node that has counted, but not said what runs there.
    only = {"h0": {"queued": 0, "running": 2}}
    quiet = TopSnapshot(2.0, NODES, {node.id: counts() for node in NODES}, tasks=only)
    assert [cells(line)["running"] for line in lines(quiet, None)] == ["2", "", "2"]


def test_the_line_of_a_host_that_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    left = [("h0", "host0", 5.0, True), ("h2", "host2", 11.2, True), ("h3", "host3", 700, False)]
    monkeypatch.setattr(status, "gone_nodes", lambda runtime: left)
    seen = object.__new__(hoplite_mp.Cluster)
    monkeypatch.setattr(hoplite_mp.Cluster, "nodes", NODES)
    seen._runtime = None  # type: ignore[assignment]
    said = [status.gone_line(one) for one in status.gone(seen)]
    assert said == ["h2 (host2) left 11 s ago", "h3 (host3) was lost 12 min ago"]


def command(address: str, *options: str) -> list[str]:
    return [sys.executable, "-m", "hoplite_mp", "top", address, "--no-tls", *options]


def test_without_a_terminal(running: str) -> None:
    done = subprocess.run(
        command(running, "--interval", "0.2", "--count", "3"),
        env={**os.environ, "HOPLITE_MP_TOKEN": TOKEN},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert done.returncode == 0, done.stderr
    rows = [line.split() for line in done.stdout.splitlines()]
    assert sum(row[:1] == ["node"] for row in rows) == 3
    nodes = [row for row in rows if row[:1] == ["h0"]]
    assert [row[3] for row in nodes] == ["2"] * 3  # workers
    assert "-" not in nodes[0]  # each table has rates
    assert "\x1b" not in done.stdout


class Terminal:
    """The command on a pseudo-terminal; what it draws is read all the time."""

    def __init__(self, address: str, *options: str) -> None:
        self.master, self.slave = pty.openpty()
        termios.tcsetwinsize(self.slave, (30, 140))
        self.settings = termios.tcgetattr(self.slave)
        self.drawn = b""
        self.process = subprocess.Popen(
            command(address, *options),
            env={**os.environ, "HOPLITE_MP_TOKEN": TOKEN, "TERM": "xterm"},
            cwd=ROOT,
            stdin=self.slave,
            stdout=self.slave,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )

    def until(self, done: Callable[[], bool]) -> None:
        end = time.monotonic() + PATIENCE_S
        while not done():
            assert time.monotonic() < end, self.drawn[-2000:]
            if select.select([self.master], [], [], 0.05)[0]:
                self.drawn += os.read(self.master, 1 << 16)

    def tables(self) -> int:
        return self.drawn.count(b"tasks/s")

    def ended(self) -> bool:
        return self.process.poll() is not None

    def close(self) -> None:
        if not self.ended():
            self.process.kill()
        assert self.process.stderr is not None
        self.process.stderr.close()
        self.process.wait()
        os.close(self.master)
        os.close(self.slave)


@pytest.fixture
def terminal(running: str) -> Iterator[Callable[..., Terminal]]:
    with contextlib.ExitStack() as stack:

        def start(*options: str) -> Terminal:
            made = Terminal(running, *options)
            stack.callback(made.close)
            return made

        yield start


@pytest.mark.parametrize("key", ["q", "x", signal.SIGINT, signal.SIGTERM])
def test_on_a_terminal(terminal: Callable[..., Terminal], key: str | signal.Signals) -> None:
    """Drawn again and again until q, Ctrl-C or SIGTERM; then the terminal is as it was."""
    screen = terminal("--interval", "0.2")
    screen.until(lambda: screen.tables() >= 3)
    assert b"h0" in screen.drawn
    assert b"127.0.0.1" in screen.drawn
    assert not termios.tcgetattr(screen.slave)[3] & termios.ICANON
    if isinstance(key, signal.Signals):
        screen.process.send_signal(key)
    else:
        os.write(screen.master, key.encode())
    if key == "x":  # nothing to do with it
        before = screen.tables()
        screen.until(lambda: screen.tables() >= before + 2)
        assert not screen.ended()
        os.write(screen.master, b"q")
    screen.until(screen.ended)
    assert screen.process.returncode == 0
    assert termios.tcgetattr(screen.slave) == screen.settings
    assert screen.drawn.count(b"\x1b[?1049h") == screen.drawn.count(b"\x1b[?1049l") == 1


def test_a_number_of_tables_on_a_terminal(terminal: Callable[..., Terminal]) -> None:
    screen = terminal("--interval", "0.1", "--count", "2")
    screen.until(screen.ended)
    assert screen.process.returncode == 0


def test_a_terminal_that_hangs_up(terminal: Callable[..., Terminal]) -> None:
    screen = terminal("--interval", "0.2")
    screen.until(lambda: screen.tables() >= 1)
    screen.process.send_signal(signal.SIGHUP)
    screen.until(screen.ended)
    assert screen.process.returncode == 0


def test_a_terminal_that_is_gone(terminal: Callable[..., Terminal]) -> None:
    """Without a signal: what is written fails, and what is read is the end."""
    screen = terminal("--interval", "0.2")
    screen.until(lambda: screen.tables() >= 1)
    os.close(screen.master)
    screen.master = os.open(os.devnull, os.O_RDONLY)
    assert screen.process.wait(PATIENCE_S) in (0, 1)
    assert screen.process.stderr is not None
    assert b"Traceback" not in screen.process.stderr.read()


def test_nobody_there(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("HOPLITE_MP_TOKEN", TOKEN)
    monkeypatch.setenv("HOPLITE_MP_CONNECT_TIMEOUT_S", "0.3")
    assert main.main(["top", "127.0.0.1:9", "--no-tls"]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    (error,) = [line for line in captured.err.splitlines() if "tls=False" not in line]
    assert "127.0.0.1:9" in error


def test_missing_extra(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(main, "_importable", lambda name: name != "rich")
    assert main.main(["top", "127.0.0.1:9"]) == 1
    assert capsys.readouterr().err == "hoplite-mp top needs rich: pip install 'hoplite-mp[top]'\n"


@pytest.mark.parametrize("option", ["--interval=0", "--interval=nan", "--interval=x", "--count=0"])
def test_wrong_options(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as leaving:
        main.main(["top", "127.0.0.1:9", option])
    assert leaving.value.code == 2
    assert option.split("=")[0] in capsys.readouterr().err


@pytest.mark.parametrize("words", [["--help"], ["simulate", "--nodes", "2", "--bytes", "1MiB"]])
def test_output_that_cannot_be_written_is_no_complaint_of_the_interpreter(words: list[str]) -> None:
    """What stands in a buffer at the end fails there: exit code 120, and words about it."""
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "hoplite_mp", *words],
            cwd=ROOT,
            env={**os.environ, "PYTHONUNBUFFERED": ""},
            stdout=full,
            stderr=subprocess.PIPE,
            timeout=PATIENCE_S,
        )
    assert b"Exception ignored" not in done.stderr
    assert done.returncode in (0, 1)
