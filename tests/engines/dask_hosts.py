"""A Dask cluster on emulated hosts, by Dask's own command line: scheduler on the first host."""

from __future__ import annotations

import sys
import textwrap
from typing import TYPE_CHECKING, Any

from tests.engines.programs import ROOT, Logs, Program, start

if TYPE_CHECKING:
    import subprocess

    from tests.lan import Host, Lan

__all__ = ["DaskHosts"]

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


class DaskHosts:
    """`dask scheduler` on the first host, `dask worker` on others."""

    def __init__(self, lan: Lan, logs: Logs) -> None:
        self.lan = lan
        self.logs = logs
        self.env = {
            "PYTHONPATH": str(ROOT),
            "HOPLITE_MP_BESIDE_IDLE_S": "2",
            "DASK_DISTRIBUTED__WORKER__MEMORY__TERMINATE": "false",
            "DASK_DISTRIBUTED__COMM__TIMEOUTS__CONNECT": "10s",
            # Every 2 s it drops copies that no task waits for: tests count copies.
            "DASK_DISTRIBUTED__SCHEDULER__ACTIVE_MEMORY_MANAGER__START": "false",
        }
        first = lan[0]
        self.scheduler = self._start(
            first, "scheduler", "--host", first.address, "--port", str(PORT), "--no-dashboard"
        )
        self.workers: dict[int, subprocess.Popen[Any]] = {}
        self.count = 0

    def _start(self, host: Host, kind: str, *arguments: str) -> subprocess.Popen[Any]:
        log = self.logs.of(f"{kind}-{host.name}")
        return start(host, [*PYTHON, kind, *arguments], self.env, log)

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
        return Program(host, command, self.env, self.logs.of(f"client-{host.name}"))

    def run(self, host: Host, text: str) -> list[str]:
        """A program's lines."""
        return self.program(host, text).end()
