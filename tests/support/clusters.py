"""Clusters that the command line starts, on emulated hosts or on the loopback interface."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import hoplite_mp
from tests.lan import Lan, forked, why_not
from tests.support.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.lan import Host


ROOT = Path(__file__).resolve().parents[2]
TOKEN = "a token for tests, long enough"
PATIENCE_S = 60.0
# What TLS changes is tested where bytes move; elsewhere `make soak` does.
TLS_OR_PLAIN = [
    pytest.param(True, marks=pytest.mark.soak, id="tls"),
    pytest.param(False, id="plain"),
]
HOPLITE = [sys.executable, "-m", "hoplite_mp"]


class UpCluster:
    """`hoplite-mp up` on the first host, with options `more`, `join` on the others. attaches:
    drivers find the node of their host, as they do for users; else they come with nodes of their
    own."""

    def __init__(
        self,
        lan: Lan,
        *,
        tls: bool,
        workers: int = 1,
        attaches: bool = True,
        memory: str = "256MiB",
        options: tuple[str, ...] = (),
        joins: int = 64,
        more: Sequence[str] = (),
        **env: str,
    ) -> None:
        self.lan = lan
        self.memory = memory
        self.attaches = attaches
        self.options = ["--memory", memory, *([] if tls else ["--no-tls"]), *options]
        self.tls = tls
        self.env = {"HOPLITE_MP_TOKEN": TOKEN, "PYTHONPATH": str(ROOT), **env}
        first = lan[0]
        self.up = first.popen(
            [*HOPLITE, "up", "--listen", f"{first.address}:7000", "--workers", str(workers),
             *more, *self.options],
            env=self.env,
            stdout=subprocess.PIPE,
            text=True,
        )  # fmt: skip
        assert self.up.stdout is not None
        self.line = self.up.stdout.readline().strip()
        self.address = f"{first.address}:7000"
        self.joined = [self.join(host, workers) for host in list(lan)[1 : 1 + joins]]

    def join(self, host: Host, workers: int, more: Sequence[str] = ()) -> subprocess.Popen[str]:
        return host.popen(
            [*HOPLITE, "join", self.address, "--workers", str(workers), *more, *self.options],
            env=self.env,
            text=True,
        )

    def program(self, text: str) -> list[str]:
        """The command of a driver."""
        source = (
            "import os, sys, time, numpy as np, hoplite_mp\n"
            f"with hoplite_mp.Cluster(address={self.address!r}, tls={None if self.tls else False}, "
            f"memory={self.memory!r}) as c:\n" + textwrap.indent(textwrap.dedent(text), "    ")
        )
        return [sys.executable, "-c", source]

    def driver_env(self, host: Host) -> dict[str, str]:
        """The environment of a driver on that host."""
        hidden = {"XDG_RUNTIME_DIR": "", "TMPDIR": str(host.root / "home")}
        return self.env | ({} if self.attaches else hidden)

    def run(
        self, host: Host, program: str, *, check: bool = True, patience_s: float = PATIENCE_S
    ) -> str:
        """A driver on that host; `c` is the cluster, `np` is numpy. Returns what it prints."""
        done = host.run(
            self.program(program),
            env=self.driver_env(host),
            stdout=subprocess.PIPE,
            text=True,
            timeout=patience_s,
        )
        assert not check or done.returncode == 0
        return str(done.stdout)

    def end(self) -> list[int]:
        """SIGTERM to `up`; the exit codes of all."""
        self.lan[0].signal(self.up, signal.SIGTERM)
        assert self.up.stdout is not None
        self.up.stdout.close()
        return [process.wait(PATIENCE_S) for process in (self.up, *self.joined)]

    def kill(self) -> None:
        """All of it that is still there is gone when this returns."""
        for process in (self.up, *self.joined):
            if process.poll() is None:
                with contextlib.suppress(OSError):  # it ends just now
                    self.lan[0].signal(process, signal.SIGKILL)
                process.wait(PATIENCE_S)
        assert self.up.stdout is not None
        self.up.stdout.close()


# As users have it; the other way is taken in nearly all other files.
TLS_FIRST = [
    pytest.param(True, id="tls"),
    pytest.param(False, marks=pytest.mark.soak, id="plain"),
]


@pytest.fixture(scope="session")
def lan_permitted() -> None:
    """Skips where namespaces are not permitted; never where it is the check that counts."""
    reason = why_not()
    if reason is None:
        return
    if os.environ.get("CI") == "true" and os.geteuid() == 0:
        pytest.fail(f"no emulated hosts: {reason}")
    pytest.skip(f"no emulated hosts: {reason}")


class StandbyCluster(UpCluster):
    """The standby is to be on the second host."""

    def __init__(self, lan: Lan, *, tls: bool = False) -> None:
        super().__init__(lan, tls=tls, more=["--standby", f"{lan[1].address}:7001"])
        self.standby, self.second = f"{lan[1].address}:7001", lan[1]

    def command(self, host: Host, word: str, address: str = "") -> subprocess.CompletedProcess[str]:
        tls = [] if self.tls else ["--no-tls"]
        return host.run(
            [*HOPLITE, word, address or self.standby, *tls],
            env=self.env,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            timeout=PATIENCE_S,
        )

    def close(self) -> None:
        """Nothing more is read of the first host."""
        assert self.up.stdout is not None
        self.up.stdout.close()

    def wait_for_standby(self) -> None:
        """Until it has been started, and all nodes follow the manager."""
        eventually(
            lambda: pids_named(self.second, "hoplite standby"), "there is no standby", pause_s=0.05
        )

    def end_standby(self) -> list[int | None]:
        """The standby's host ends in order, and the cluster with it."""
        self.second.signal(self.joined[0], signal.SIGTERM)
        self.close()
        return [process.wait(PATIENCE_S) for process in self.joined]


def pids_named(host: Host, name: str) -> list[int]:
    found = host.run(["pgrep", "-x", name], stdout=subprocess.PIPE, text=True).stdout
    return [int(pid) for pid in found.split()]


def signal_all(host: Host, number: int) -> None:
    """A signal to all processes of that host but its first."""
    found = host.run(["ps", "-eo", "pid="], stdout=subprocess.PIPE, text=True).stdout.split()
    # Among them is the one that has looked, and is gone.
    host.run(["kill", f"-{number}", *found[1:]], stderr=subprocess.DEVNULL)
    for process in host.processes:  # nsenter stops with what it has started
        if number == signal.SIGCONT and process.poll() is None:
            process.send_signal(number)


class Driver:
    """A program on a host; it prints lines, and waits for some."""

    def __init__(self, cluster: UpCluster, host: Host, program: str) -> None:
        self.process = host.popen(
            cluster.program(program),
            env=cluster.driver_env(host),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def hear(self) -> str:
        assert self.process.stdout is not None
        return str(self.process.stdout.readline()).rstrip("\n")

    def say(self, line: str = "") -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def end(self) -> int:
        """It has nothing more to read; its exit code."""
        with self.process:
            self.process.communicate(timeout=PATIENCE_S)
        return int(self.process.returncode)

    def __enter__(self) -> Driver:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        with self.process:
            if kind is not None:
                self.process.kill()
            else:
                assert self.process.wait(PATIENCE_S) == 0


def kill_manager(host: Host) -> None:
    """As soon as there is one: the last one has just been killed, perhaps."""
    deadline = time.monotonic() + PATIENCE_S
    while host.run(["pkill", "-KILL", "-x", "hoplite manager"]).returncode:
        assert time.monotonic() < deadline, "there is no manager"
        time.sleep(0.005)


def nodes_running(host: Host) -> int:
    """Processes of this library on a host."""
    listing = host.run(["ps", "-eo", "args"], stdout=subprocess.PIPE, text=True).stdout
    return sum("-m hoplite_mp join" in line for line in listing.splitlines())


def all_joins_ended(lan: Lan) -> bool:
    deadline = time.monotonic() + 40  # one that was still joining tries for 30 s
    while any(nodes_running(host) for host in lan):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


class LoopbackCluster:
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
