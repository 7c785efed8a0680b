"""`map(progress=)`: a bar in a terminal, its end, and what is said without tqdm."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
import termios
import threading
from typing import TYPE_CHECKING

import pytest

import hoplite_mp

if TYPE_CHECKING:
    from hoplite_mp import Cluster

pytest.importorskip("tqdm")

PROGRAM = """
import os, tempfile, threading, time, hoplite_mp
from tqdm import tqdm
def slow(i):
    time.sleep(0.01)
    return i
def first_is_last(i):
    while i == 0 and not os.path.exists(gate):
        time.sleep(0.01)
    return i
def open_gate():
    while min(bar.n for bar in tqdm._instances) < 29:
        time.sleep(0.01)
    time.sleep(0.2)  # so that the bar is due to be drawn again
    open(gate, "w").close()
folder = tempfile.TemporaryDirectory()
gate = os.path.join(folder.name, "gate")
with folder, hoplite_mp.Cluster(2) as c:
    assert sum(c.map(slow, range(40), chunksize=2, progress="halves")) == 780
    assert sum(c.map(slow, range(40), ordered=False, progress=True)) == 780
    results = c.map(first_is_last, range(30), chunksize=1, progress="late")
    threading.Thread(target=open_gate).start()
    assert next(results) == 0  # by then the others are done, and the bar has said so
    print("first")
    assert sum(results) == 435
print("end")
"""


def in_a_terminal(program: str) -> str:
    """What stands there, line by line."""
    master, slave = pty.openpty()
    termios.tcsetwinsize(slave, (24, 80))
    process = subprocess.Popen([sys.executable, "-c", program], stdout=slave, stderr=slave)
    os.close(slave)
    data = bytearray()
    try:
        while piece := os.read(master, 1 << 16):
            data += piece
    except OSError:  # all who had the other end have closed it
        pass
    assert process.wait(30) == 0, data.decode()
    os.close(master)
    return data.decode().replace("\r\n", "\n")


def test_in_a_terminal() -> None:
    shown = in_a_terminal(PROGRAM)
    finished = [line.rpartition("\r")[2] for line in shown.split("\n") if line]
    assert sum("40/40" in line and "100%" in line for line in finished) == 2
    assert any(line.startswith("halves: 100%") for line in finished)
    assert "30/30" in shown[: shown.index("first")]
    assert finished[-1] == "end"


SPEAKS = """
import time, hoplite_mp
def speak(i):
    print("line", i, flush=True)
    time.sleep(0.15)
with hoplite_mp.Cluster(1) as c:
    list(c.map(speak, range(6), chunksize=1, progress=True))
"""


def test_what_workers_print_stands_beside_the_bar() -> None:
    """Each line alone on its own; the bar is drawn again below it."""
    shown = in_a_terminal(SPEAKS)
    lines = [line.rpartition("\r")[2] for line in shown.split("\n")]
    said = [line.partition(") ")[2] for line in lines if line.startswith("(worker ")]
    assert said == [f"line {i}" for i in range(6)]
    assert not any("(worker" in line for line in lines if "it/s" in line)


def odd(i: int) -> int:
    if i == 7:
        raise KeyError(i)
    return i


@pytest.mark.parametrize("ordered", [True, False])
def test_it_closes_whatever_ends_it(
    cluster: Cluster, capsys: pytest.CaptureFixture[str], ordered: bool
) -> None:
    from tqdm import tqdm

    with pytest.raises(KeyError):
        list(cluster.map(odd, range(20), chunksize=1, progress=True, ordered=ordered))
    assert not tqdm._instances
    for _ in cluster.map(odd, range(6), chunksize=1, progress=True, ordered=ordered):
        break
    assert not tqdm._instances
    results = cluster.map(odd, range(6), progress=True, ordered=ordered)
    assert len(tqdm._instances) == 1
    results.close()
    assert not tqdm._instances
    with pytest.raises(TypeError, match="pickle"):
        cluster.map(odd, [threading.Lock()], progress=True, ordered=ordered)
    assert not tqdm._instances
    assert capsys.readouterr().err.endswith("\n")


def test_totals(cluster: Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    list(cluster.map(pow, range(7), range(5), progress=True))
    assert "5/5" in capsys.readouterr().err
    list(cluster.map(abs, range(7), buffersize=2, progress=True))
    assert "7/7" in capsys.readouterr().err
    list(cluster.map(abs, iter(range(7)), buffersize=2, progress=True))
    shown = capsys.readouterr().err
    assert "7it" in shown
    assert "/" not in shown.rpartition("\r")[2].partition("it ")[0]
    list(cluster.map(abs, [], progress=True))
    assert "0it" in capsys.readouterr().err
    with hoplite_mp.Executor(1) as executor:
        assert list(executor.map(abs, [-1], progress=True)) == [1]
    with cluster.executor(1) as pool:
        assert list(pool.options(name="x").map(abs, [-1], progress="one")) == [1]
    assert "one: 100%" in capsys.readouterr().err


def test_what_is_wrong_is_said_at_the_call(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(TypeError, match="progress=3: it must be True, False or a string"):
        cluster.map(abs, [1], progress=3)  # type: ignore[arg-type]
    monkeypatch.setitem(sys.modules, "tqdm.auto", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'hoplite-mp\[progress\]'"):
        cluster.map(abs, [1], progress=True)
    assert list(cluster.map(abs, [-1])) == [1]
