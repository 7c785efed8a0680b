"""Emulated hosts with a running system, on which programs of examples/applications/ run.

The same application is measured on several systems. Each is started on every host by its own
command line, as users do. All processes of a bed end with it."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.common import MIB, ROOT
from tests.lan import Lan

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.lan import Host

__all__ = ["SYSTEMS", "Bed", "python"]

TOKEN = "a token for the benchmarks only"
HOPLITE_PORT, RAY_PORT, DASK_PORT = 7000, 6379, 8786
PATIENCE_S = 240.0
AT_ONCE = 2  # hosts on which Ray starts at a time
SYSTEMS = ("ours", "ray+ours", "ray", "dask", "none")
"""`none`: hosts on which nothing runs, for programs that bring their own (Gloo)."""

ENV = {
    "PYTHONPATH": str(ROOT),
    "HOPLITE_MP_TOKEN": TOKEN,
    "HOPLITE_MP_BESIDE_IDLE_S": "2",
    "HOPLITE_MP_RESOURCE_WAIT_S": "600",  # what has had a place waits for the host that comes back
    # One thread for each process: all hosts share the processors of this machine.
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "PYTHONWARNINGS": "ignore",
    "RAY_AUTH_MODE": "disabled",
    "RAY_TMPDIR": "/tmp",  # its own folder there is private to each host
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_raylet_start_wait_time_s": "240",
    "RAY_DEDUP_LOGS": "0",
    "DASK_DISTRIBUTED__COMM__TIMEOUTS__CONNECT": "30s",
    "DASK_DISTRIBUTED__WORKER__MEMORY__TERMINATE": "false",
    "DASK_DISTRIBUTED__WORKER__MEMORY__PAUSE": "false",
    "DASK_DISTRIBUTED__WORKER__MEMORY__SPILL": "false",
    "DASK_DISTRIBUTED__WORKER__MEMORY__TARGET": "false",
}


def python() -> str:
    """The interpreter that has the engines: this one, or that of `make engines`."""
    made = ROOT / ".venv-engines" / "bin" / "python"
    return str(made) if made.exists() else sys.executable


class Bed:
    """`size` hosts with `system` on each, as a context manager. The driver's is the first one.

    memory: what each store may take on a host. tls: only of ours. env: more of the environment."""

    def __init__(
        self,
        system: str,
        size: int,
        *,
        memory: int = 1024 * MIB,
        rate: str = "1gbit",
        tls: bool = False,
        env: dict[str, str] | None = None,
    ) -> None:
        if system not in SYSTEMS:
            raise ValueError(f"no system {system!r}: there are {', '.join(SYSTEMS)}")
        self.system = system
        self.memory = memory
        self.tls = tls
        self.env = ENV | (env or {})
        self.lan = Lan(size, rate)
        self._began: dict[int, subprocess.Popen[Any]] = {}

    def __enter__(self) -> Bed:
        with contextlib.ExitStack() as stack:
            stack.enter_context(self.lan)
            self.logs = self.lan.root / "logs"
            self.logs.mkdir()
            first, *others = list(self.lan)
            self._begin(first, head=True)
            for at in range(0, len(others), AT_ONCE):
                self._begin_together(others[at : at + AT_ONCE])
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    @property
    def _plain(self) -> list[str]:
        return [] if self.tls else ["--no-tls"]

    @property
    def address(self) -> str:
        """Where the system is reached: what a program is given as `address`."""
        port = {"ours": HOPLITE_PORT, "dask": DASK_PORT}.get(self.system, RAY_PORT)
        return f"{self.lan[0].address}:{port}"

    def host(self, number: int) -> Host:
        """A living one, by its number: the first is 1."""
        return next(host for host in self.lan if host.number == number)

    def kill(self, number: int) -> float:
        """That host dies, with all its processes; when, by time.monotonic()."""
        host = self.host(number)
        at = time.monotonic()
        host.kill()
        return at

    def revive(self, number: int) -> float:
        """An empty host at the address of one that has died, with the system on it; when."""
        host = self.lan.add(number)
        self._begin(host, head=False)
        return time.monotonic()

    def popen(
        self, number: int, module: str, arguments: str, **options: Any
    ) -> subprocess.Popen[Any]:
        """A program of Python on that host."""
        host = self.host(number)
        with self._log(host, "program") as log:
            return host.popen(
                [python(), "-m", module, arguments],
                env=self.env, cwd=ROOT, stderr=log, text=True, **options,
            )  # fmt: skip

    def said(self) -> str:
        """The ends of all logs, for the message of a failure."""
        return "\n".join(
            f"== {path.name}\n{path.read_text(errors='replace')[-2000:]}"
            for path in sorted(self.logs.iterdir())
        )

    def _begin_together(self, hosts: Sequence[Host]) -> None:
        """On these hosts. Ray's start takes seconds of a processor and has deadlines of its own, so
        few begin at a time, and one that has given up tries again."""
        for host in hosts:
            self._begin(host, head=False)
        deadline = time.monotonic() + PATIENCE_S
        waiting = list(hosts) if self.system in ("ray", "ray+ours") else []
        while waiting:
            if time.monotonic() > deadline:
                names = ", ".join(host.name for host in waiting)
                raise TimeoutError(f"Ray does not start on {names}\n{self.said()}")
            for host in list(waiting):
                if "Ray runtime started" in (self.logs / f"{host.name}-ray").read_text():
                    waiting.remove(host)
                elif self._began[host.number].poll() is not None:
                    self._begin(host, head=False)
            time.sleep(0.1)

    # -- the systems -----------------------------------------------------------------------------

    def _begin(self, host: Host, *, head: bool) -> None:
        """The system's processes on that host; returns when the head can be joined."""
        # Room in /dev/shm for the store: the emulated hosts have 1 GiB.
        host.run(["mount", "-o", f"remount,size={self.memory + 256 * MIB}", "/dev/shm"])
        if self.system == "ours":
            self._begin_ours(host, head)
        elif self.system == "dask":
            self._begin_dask(host, head)
        elif self.system != "none":
            self._begin_ray(host, head)

    def _begin_ours(self, host: Host, head: bool) -> None:
        role = ["up", "--listen", self.address] if head else ["join", self.address]
        # For what is to have a host for itself, or one that is not the driver's; as below for Ray.
        role += ["--resources", "place=1" if head else "place=1,away=1"]
        options = [*("--workers", "1", "--memory", str(self.memory)), *self._plain]
        self._start(host, "hoplite", [python(), "-m", "hoplite_mp", *role, *options])
        if head:
            self._until_it_listens(host, HOPLITE_PORT)

    def _begin_dask(self, host: Host, head: bool) -> None:
        dask = [python(), "-m", "dask"]
        if head:
            at = ["--host", host.address, "--port", str(DASK_PORT), "--no-dashboard"]
            self._start(host, "scheduler", [*dask, "scheduler", *at])
            self._until_it_listens(host, DASK_PORT)
        options = ["--nthreads", "1", "--no-dashboard", "--memory-limit", "0"]
        # Workers are found by this name: `workers=["h3"]`.
        options += ["--name", host.name, "--local-directory", str(host.root / "tmp")]
        where = ["worker", f"tcp://{self.address}", "--host", host.address]
        self._start(host, "worker", [*dask, *where, *options])

    def _begin_ray(self, host: Host, head: bool) -> None:
        role = f"--address={self.address}"
        place = {"place": 1} if head else {"place": 1, "away": 1}
        if head:
            role = f"--head --port={RAY_PORT} --include-dashboard=false"
        # Beside it stands a store of ours, which then has the arrays.
        memory = 128 * MIB if self.system == "ray+ours" else self.memory
        words = (
            f"{python()} -m ray.scripts.scripts start {role} --node-ip-address={host.address} "
            f"--num-cpus=1 --resources='{json.dumps(place)}' "
            f"--object-store-memory={memory} --disable-usage-stats --block"
        )
        own = host.root / "tmp" / "ray"
        private = f"rm -rf {own} && mkdir -p {own} /tmp/ray && mount --bind {own} /tmp/ray"
        self._start(host, "ray", ["sh", "-c", f"{private} && exec {words}"])
        if head:
            self._until_it_listens(host, RAY_PORT)

    def _start(self, host: Host, name: str, command: Sequence[str]) -> None:
        with self._log(host, name) as log:
            self._began[host.number] = host.popen(
                command, env=self.env, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT
            )

    def _log(self, host: Host, name: str) -> Any:
        return open(self.logs / f"{host.name}-{name}", "ab")

    def _until_it_listens(self, host: Host, port: int) -> None:
        deadline = time.monotonic() + PATIENCE_S
        wanted = f":{port:04X} "
        while True:
            tables = (Path(f"/proc/{host.pid}/net/{name}") for name in ("tcp", "tcp6"))
            lines = [line for table in tables for line in table.read_text().splitlines()[1:]]
            if any(line.split()[3] == "0A" and wanted in line for line in lines):
                return
            process = self._began[host.number]
            if process.poll() is not None or time.monotonic() > deadline:
                raise TimeoutError(
                    f"{self.system} does not listen on {host.name}:{port}\n{self.said()}"
                )
            time.sleep(0.05)
