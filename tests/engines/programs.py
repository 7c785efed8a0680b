"""Programs on emulated hosts that tests of engines start, speak with, look for and kill.

Each engine has a command line of its own; all else of these tests is the same.
"""

from __future__ import annotations

import contextlib
import subprocess
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from tests.lan import Host

__all__ = ["ROOT", "Logs", "Program", "kill", "processes", "start", "until"]

ROOT = Path(__file__).resolve().parents[2]
PATIENCE_S = 90.0
SAID_MAX = 3000  # characters of each log that a failed test shows


def until(reached: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not reached():
        assert time.monotonic() < deadline, what
        time.sleep(0.05)


def start(
    host: Host, command: Sequence[str], env: Mapping[str, str], log: Path
) -> subprocess.Popen[Any]:
    """An engine's process there, which writes to that file."""
    with open(log, "ab") as file:
        return host.popen(command, env=env, stdout=file, stderr=subprocess.STDOUT)


class Program:
    """A program that runs on a host and is spoken with."""

    def __init__(
        self, host: Host, command: Sequence[str], env: Mapping[str, str], log: Path
    ) -> None:
        with open(log, "ab") as errors:
            self.process: subprocess.Popen[Any] = host.popen(
                command,
                env=env,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )

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


class Logs:
    """The files into which the programs of a test write."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(exist_ok=True)

    def of(self, name: str) -> Path:
        return self.folder / name

    def said(self) -> str:
        """For the message of a failed test."""
        words = []
        for path in sorted(self.folder.iterdir()):
            words.append(f"== {path.name}\n{path.read_text(errors='replace')[-SAID_MAX:]}")
        return "\n".join(words)


def processes(host: Host, word: str) -> list[int]:
    """Pids, inside the host, of those whose name or command line has that word."""
    done = subprocess.run(
        host.enter("ps", "-ww", "-eo", "pid,comm:20,args"),
        capture_output=True,
        text=True,
        check=True,
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
