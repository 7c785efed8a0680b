"""A Dask cluster on emulated hosts, by Dask's own command line: scheduler on the first host."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.lan import Host, Lan

__all__ = ["DaskHosts", "Program", "kill", "processes", "until"]

ROOT = Path(__file__).resolve().parents[2]
PATIENCE_S = 90.0
PORT = 8786
PYTHON = [sys.executable, "-W", "ignore", "-m", "dask"]

HEAD = """
import operator, os, pickle, signal, sys, time
import numpy as np
import hoplite_mp
from distributed import Client, as_completed, wait
from hoplite_mp.integrations import dask as hoplite_dask

PATIENCE_S = 60.0

def until(reached, what):
    deadline = time.monotonic() + PATIENCE_S
    while not reached():
        if time.monotonic() > deadline:
            raise SystemExit("not within time: " + what)
        time.sleep(0.05)

def say(*words):
    print(*words, flush=True)

def heard():
    return sys.stdin.readline().strip()

def where():
    return os.uname().nodename

def here():
    c = hoplite_mp.current()
    return where(), os.getpid(), c._runtime.tasks.node_number, c._host.attached

def put(i, n=300_000):
    return hoplite_mp.current().put(np.full(n, float(i)))

def total_of(ref):
    return float(hoplite_mp.current().get(ref).sum())

def on(host):
    return [w for w in client.scheduler_info(n_workers=-1)["workers"] if f"10.77.0.{host}:" in w]

client = Client("tcp://10.77.0.1:8786", timeout=60)
client.wait_for_workers(WORKERS, timeout=60)
"""


def until(reached: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not reached():
        assert time.monotonic() < deadline, what
        time.sleep(0.05)


class Program:
    """A program that runs on a host and is spoken with."""

    def __init__(self, process: subprocess.Popen[Any]) -> None:
        self.process = process

    def line(self) -> str:
        """What it prints next."""
        assert self.process.stdout is not None
        return str(self.process.stdout.readline()).rstrip("\n")

    def go_on(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def end(self) -> list[str]:
        """The lines that are left; it must end well."""
        out, _ = self.process.communicate("\n", timeout=PATIENCE_S)
        assert self.process.returncode == 0, out
        return str(out).splitlines()


class DaskHosts:
    """`dask scheduler` on the first host, `dask worker` on others."""

    def __init__(self, lan: Lan, logs: Path) -> None:
        self.lan = lan
        self.logs = logs
        self.env = {
            "PYTHONPATH": str(ROOT),
            "HOPLITE_MP_BESIDE_IDLE_S": "2",
            "DASK_DISTRIBUTED__WORKER__MEMORY__TERMINATE": "false",
            "DASK_DISTRIBUTED__COMM__TIMEOUTS__CONNECT": "10s",
        }
        first = lan[0]
        self.scheduler = self._start(
            first, "scheduler", "--host", first.address, "--port", str(PORT), "--no-dashboard"
        )
        self.workers: dict[int, subprocess.Popen[Any]] = {}
        self.count = 0

    def _start(self, host: Host, kind: str, *arguments: str) -> subprocess.Popen[Any]:
        log = open(self.logs / f"{kind}-{host.name}", "ab")  # noqa: SIM115 - for the process
        with log:
            return host.popen(
                [*PYTHON, kind, *arguments], env=self.env, stdout=log, stderr=subprocess.STDOUT
            )

    def add_workers(self, host: Host, count: int = 1) -> None:
        """So many worker processes with two threads each."""
        self.workers[host.number] = self._start(
            host, "worker", f"tcp://{self.lan[0].address}:{PORT}", "--host", host.address,
            "--nthreads", "2", "--nworkers", str(count), "--no-dashboard",
            "--local-directory", str(host.root / "tmp"),
        )  # fmt: skip
        self.count += count

    def program(self, host: Host, text: str) -> Program:
        """A client of all workers that were started."""
        source = HEAD.replace("WORKERS", str(self.count)) + textwrap.dedent(text)
        command = [sys.executable, "-W", "ignore", "-c", source]
        with open(self.logs / f"client-{host.name}", "ab") as log:
            return Program(
                host.popen(
                    command,
                    env=self.env,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    text=True,
                )
            )

    def run(self, host: Host, text: str) -> list[str]:
        """A program's lines."""
        return self.program(host, text).end()

    def said(self) -> str:
        """For the message of a failed test."""
        words = []
        for path in sorted(self.logs.iterdir()):
            words.append(f"== {path.name}\n{path.read_text(errors='replace')[-3000:]}")
        return "\n".join(words)


def processes(host: Host, word: str) -> list[int]:
    """Pids, inside the host, of those whose command line has that word."""
    done = subprocess.run(
        host.enter("ps", "-ww", "-eo", "pid,args"), capture_output=True, text=True, check=True
    )
    found = []
    for line in done.stdout.splitlines()[1:]:
        pid, _, words = line.strip().partition(" ")
        if word in words and "ps -ww" not in words:
            with contextlib.suppress(ValueError):
                found.append(int(pid))
    return found


def kill(host: Host, pid: int) -> None:
    """A process inside the host, at once."""
    subprocess.run(host.enter("kill", "-9", str(pid)), check=True)
