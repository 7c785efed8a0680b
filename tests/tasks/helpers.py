"""What several files need: a deadline instead of a pause, and whole programs."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from hoplite_mp import Cluster

PATIENCE_S = 30.0
GONE_S = PATIENCE_S
STILL_S = 0.05


def eventually(condition: Callable[[], Any], within: float = PATIENCE_S) -> None:
    """Returns when the condition holds; fails when it still does not."""
    end = time.monotonic() + within
    while not condition():
        assert time.monotonic() < end, "it did not come true"
        time.sleep(0.001)


def host_of(cluster: Cluster) -> psutil.Process:
    """The supervisor, whose children all others are."""
    host = cluster._host
    assert host is not None
    return psutil.Process(host.process.pid)


def at_rest(cluster: Cluster, workers: int | None = None) -> None:
    """Returns when the processes of a cluster have nothing left to do, and so many workers are up:
    no process runs, or waits for a processor, and none has come, gone or computed between two
    looks. Until then a count of processes, descriptors or objects is that of a moment."""
    supervisor = host_of(cluster)
    cluster.stats()  # the node has begun

    def look() -> list[Any]:
        found: list[Any] = []
        for one in [supervisor, *supervisor.children(recursive=True)]:
            with contextlib.suppress(psutil.NoSuchProcess):
                found.append((one, one.name(), one.status(), one.cpu_times()[:2], one.num_fds()))
        return found

    def quiet() -> bool:
        before = look()
        names = [name for _, name, *_ in before]
        if workers is not None and names.count("hoplite worker") != workers:
            return False
        if names.count("hoplite node") != 1 or names.count("hoplite manager") != 1:
            return False
        time.sleep(STILL_S)
        return before == look() and {status for _, _, status, *_ in before} == {"sleeping"}

    eventually(quiet)


def wait_for(path: str | Path) -> str:
    """A task that runs until somebody makes the file."""
    eventually(Path(path).exists)
    return str(path)


def announce(path: str | Path, seconds: float = 60.0) -> None:
    """A task that says that it runs, and sleeps."""
    Path(path).touch()
    time.sleep(seconds)


def fail(text: str = "the reason") -> None:
    raise LookupError(text)


def add(*numbers: int) -> int:
    return sum(numbers)


HEAD = """
import os, signal, subprocess, sys, threading, time
import numpy as np, psutil
import hoplite_mp

def family():
    return psutil.Process().children(recursive=True)
def say(*words):
    print(*words, flush=True)
"""


class Program:
    """A script in an interpreter of its own, and what it has started."""

    def __init__(self, body: str, *arguments: str, cwd: Path | None = None, **env: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, *arguments, "-c", HEAD + textwrap.dedent(body)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=cwd,
            env={**os.environ, "PYTHONUNBUFFERED": "", **env},
            start_new_session=True,
        )
        self.family: set[psutil.Process] = set()

    def line(self) -> str:
        """The next line of its stdout; its processes so far are remembered."""
        assert self.process.stdout is not None
        text = self.process.stdout.readline().strip()
        if self.process.poll() is None:
            self.family |= set(psutil.Process(self.process.pid).children(recursive=True))
        return text

    def signal(self, number: int) -> None:
        os.kill(self.process.pid, number)

    def end(self, code: int | None = 0, within: float = 40.0) -> tuple[str, str]:
        """Waits for its end; nothing that was seen of it is left. Returns stdout and stderr."""
        try:
            out, err = self.process.communicate(timeout=within)
        finally:
            self.process.kill()
            self.process.wait()
        gone(self.family)
        if code is not None:
            assert self.process.returncode == code, err
        return out, err


def gone(processes: Iterable[psutil.Process]) -> None:
    """All of them have ended within GONE_S."""
    _, alive = psutil.wait_procs(list(processes), timeout=GONE_S)
    assert not alive, alive


def run(body: str, code: int | None = 0, cwd: Path | None = None, **env: str) -> str:
    """A script from beginning to end; returns its stdout."""
    return Program(body, cwd=cwd, **env).end(code)[0]
