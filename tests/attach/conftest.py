"""A cluster of one host that others can join, and drivers that attach to its node."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import hoplite_mp
from tests.lan import forked

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

ROOT = Path(__file__).resolve().parents[2]
TOKEN = "a token for tests, long enough"
PATIENCE_S = 60.0


class Up:
    """`hoplite-mp up` on the loopback interface."""

    def __init__(self, folder: Path, workers: int, cwd: Path) -> None:
        self.folder = folder
        options = ["--workers", str(workers), "--memory", "256MiB"]
        self.process = forked.popen(
            [sys.executable, "-m", "hoplite_mp", "up", "--listen", "127.0.0.1:0", *options],
            env={**os.environ, "PYTHONPATH": str(ROOT), "HOPLITE_MP_CANCEL_GRACE_S": "0.2"},
            cwd=cwd,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        self.address = self.process.stdout.readline().split()[2]
        self.drivers: list[subprocess.Popen[str]] = []

    def names(self) -> list[str]:
        """What stands in the directory of sockets."""
        return sorted(os.listdir(self.folder)) if self.folder.exists() else []

    def attach(self, **options: Any) -> hoplite_mp.Cluster:
        """This process as a driver."""
        return hoplite_mp.Cluster(address=self.address, **options)

    def driver(
        self, text: str, cwd: Path | None = None, *, err: bool = False
    ) -> subprocess.Popen[str]:
        """A program; `c` is the cluster. It speaks with the test over its stdin and stdout, and its
        stderr if that is wanted."""
        source = (
            "import os, sys, time, numpy as np, hoplite_mp\n"
            f"with hoplite_mp.Cluster(address={self.address!r}) as c:\n"
            "    assert c._host.attached\n" + textwrap.indent(textwrap.dedent(text), "    ")
        )
        process = forked.popen(
            [sys.executable, "-c", source],
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            cwd=cwd,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE if err else None,
            text=True,
        )
        self.drivers.append(process)
        return process

    def end(self, number: int = signal.SIGTERM) -> int:
        """Its exit code."""
        for process in self.drivers:
            if process.poll() is None:
                process.kill()
            process.communicate()
        self.process.send_signal(number)
        assert self.process.stdout is not None
        self.process.stdout.close()
        return self.process.wait(PATIENCE_S)


@pytest.fixture
def make_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Up]]:
    """Starts clusters, with a directory for sockets of the test's own."""
    runtime = tmp_path / "runtime"
    runtime.mkdir(mode=0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setenv("HOPLITE_MP_TOKEN", TOKEN)
    made: list[Up] = []

    def make(workers: int = 2) -> Up:
        made.append(Up(runtime / "hoplite_mp", workers, tmp_path))
        return made[-1]

    yield make
    for up in made:
        if up.process.poll() is None:
            up.end()


@pytest.fixture
def up(make_up: Callable[..., Up]) -> Iterator[Up]:
    """A cluster with two workers; at its end no name is left."""
    made = make_up()
    yield made
    if made.process.poll() is None:
        assert made.end() == 0
        assert made.names() == []
