"""How engines begin and end, and what their callers do wrong."""

from __future__ import annotations

import gc
import os
import signal
import socket
import subprocess
import sys
import time
import warnings
from pathlib import Path

import numpy as np
import pytest

from hoplite_mp import _engine
from tests.support.engine_hosts import EngineHost, join, random_bytes
from tests.support.waiting import PATIENCE_S

# -- begin and end --------------------------------------------------------------------------------


def threads_of_this_process() -> set[str]:
    """By their numbers: those of earlier tests may end at any time."""
    return {task.name for task in Path("/proc/self/task").iterdir()}


def have_ended(threads: set[str]) -> bool:
    """Whether all threads but these are gone: the system lists one a moment longer than join."""
    end = time.monotonic() + PATIENCE_S
    while not threads_of_this_process() <= threads and time.monotonic() < end:
        time.sleep(0.001)
    return threads_of_this_process() <= threads


def test_nothing_is_left_after_stop() -> None:
    gc.collect()  # what other tests have left open is closed now, not meanwhile
    threads, descriptors = threads_of_this_process(), set(os.listdir("/proc/self/fd"))
    buffer = bytearray(1_000_000)
    one, other = EngineHost(1), EngineHost(2)
    links = [join(one, other) for _ in range(5)]
    one.engine.cell((1, 0, 0, 0), buffer, filled=500_000)
    cell = other.engine.cell((1, 0, 0, 0), bytearray(1_000_000))
    other.engine.pull(cell, links[0][1])
    waiting = other.engine.cell((2, 0, 0, 0), bytearray(10))
    other.engine.pull(waiting, links[1][1])
    total = other.engine.cell(None, bytearray(1_000_000))
    other.engine.fold(total, [cell], "sum", "uint8")
    assert len(threads_of_this_process() - threads) == 2
    one.engine.stop()
    other.engine.stop()
    one.engine.stop()
    assert have_ended(threads)
    assert set(os.listdir("/proc/self/fd")) == descriptors
    buffer.append(0)
    for call in (one.engine.fileno, one.engine.events, lambda: one.engine.cell(None, buffer)):
        with pytest.raises(RuntimeError, match="stopped"):
            call()


def test_an_engine_that_is_forgotten_ends() -> None:
    threads = threads_of_this_process()
    host = EngineHost(1)
    cycle: list[object] = [host]
    cycle.append(cycle)
    host.engine.cell(None, bytearray(1000))
    assert len(threads_of_this_process() - threads) == 1
    del host, cycle
    gc.collect()
    assert have_ended(threads)


def test_a_forked_child_is_refused(pair: tuple[EngineHost, EngineHost]) -> None:
    host, _ = pair
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if not pid:
        code = 1
        try:
            host.engine.events()
        except RuntimeError:
            code = 0
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_signals_reach_python(pair: tuple[EngineHost, EngineHost]) -> None:
    """The engine's thread blocks them all."""
    hit: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda number, frame: hit.append(number))
    masks = [
        line.split()[1]
        for task in Path("/proc/self/task").iterdir()
        for line in (task / "status").read_text().splitlines()
        if line.startswith("SigBlk")
    ]
    os.kill(os.getpid(), signal.SIGUSR1)
    signal.signal(signal.SIGUSR1, before)
    assert hit == [signal.SIGUSR1]
    assert sum(int(mask, 16) & 1 << signal.SIGUSR1 - 1 != 0 for mask in masks) >= 2


KILLED = """
import socket, sys
from hoplite_mp import _engine
engine = _engine.Engine(5)
engine.connect(int(sys.argv[1]), 0)
engine.cell((1, 0, 0, 0), bytearray(50_000_000), filled=25_000_000)
sys.stdin.read()
"""


def test_a_peer_that_is_killed(pair: tuple[EngineHost, EngineHost]) -> None:
    """All that it has sent arrives; then the link is lost, and the pull with it."""
    _, client = pair
    mine, theirs = socket.socketpair()
    process = subprocess.Popen(
        [sys.executable, "-c", KILLED, str(theirs.fileno())],
        pass_fds=[theirs.fileno()],
        stdin=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(Path(_engine.__file__).parent.parent)},
    )
    theirs.close()
    link = client.connect(mine, peer=2**64 - 1)
    cell = client.engine.cell((1, 0, 0, 0), bytearray(50_000_000))
    client.engine.pull(cell, link)
    client.wait(lambda: client.engine.watermark(cell) > 1_000_000)
    process.kill()
    process.wait()
    assert process.stdin
    process.stdin.close()
    assert client.wait_for(_engine.LINK_LOST, link)[2] == 2**64 - 1
    client.wait_for(_engine.PULL_FAILED, cell)
    assert client.engine.watermark(cell) <= 25_000_000


# -- what callers do wrong -------------------------------------------------------------------------


def test_mistakes_get_one_clear_error(pair: tuple[EngineHost, EngineHost]) -> None:
    engine = pair[0].engine
    for arguments in [(0,), (2**64,), (1, 1000), (1, 16385), (1, 2**21), (1, 65536, -1)]:
        with pytest.raises(ValueError, match="must be"):
            _engine.Engine(*arguments)
    with pytest.raises(KeyError):
        engine.pull(99, 99)
    cell = engine.cell((1, 2, 3, 4), bytearray(100))
    with pytest.raises(ValueError, match="key"):
        engine.cell((1, 2, 3, 4), bytearray(100))
    with pytest.raises(KeyError):
        engine.pull(cell, 99)
    for key in [(2**64, 0, 0, 0), (0, 2**32, 0, 0), (-1, 0, 0, 0), (1, 2, 3)]:
        with pytest.raises(ValueError):  # noqa: PT011
            engine.cell(key, bytearray(1))  # type: ignore[arg-type]
    for offset, nbytes, filled in [(101, 0, 0), (-1, 1, 0), (50, 51, 0), (0, -1, 0), (0, 10, 11)]:
        with pytest.raises(ValueError, match="bytes"):
            engine.cell(None, bytearray(100), offset, nbytes, filled)
    with pytest.raises((BufferError, TypeError)):
        engine.cell(None, b"read-only")
    with pytest.raises(ValueError, match="read-only"):
        engine.advance(engine.cell(None, b"read-only", filled=True), 3)
    with pytest.raises((BufferError, ValueError)):
        engine.cell(None, np.zeros(100)[::2])
    with open(os.devnull, "rb") as file, pytest.raises(OSError, match="not a socket"):
        engine.connect(file.fileno(), 0)
    with socket.socket() as lonely, pytest.raises(OSError, match="not connected"):
        engine.connect(lonely.fileno(), 0)


def test_checksums_by_all_ways() -> None:
    assert _engine.crc32c(b"123456789") == 0xE3069283  # the check value of CRC-32C
    sizes = [*range(100), *range(250, 700, 7), 767, 768, 769, 4096, 12287, 12288, 12289, 100_003]
    for nbytes in sizes:
        data = random_bytes(nbytes)
        whole = _engine.crc32c(data)
        assert whole == _engine.crc32c(data, way="table")
        assert whole == _engine.crc32c(data, way="instruction")
        assert whole == _engine.crc32c(data[nbytes // 3 :], _engine.crc32c(data[: nbytes // 3]))
