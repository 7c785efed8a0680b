"""`python -m benchmarks.lan.deaths_beside [-n 8]`: the same death under Gloo and Open MPI.

Needs root and `make peers`. Eight ranks on emulated hosts of 1 Gbit/s call an allreduce of 64 MiB
three times. Half-way through the third call one host is killed; in another run it is cut off
silently. Printed for each peer: the errors of the survivors and the seconds until them, or that
there was no error within PATIENCE_S."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import sys
import time
from typing import TYPE_CHECKING, Any

from benchmarks.common import MIB, ROOT
from benchmarks.peers.gloo import ENV, PYTHON, why_not
from tests.lan import DEVICE, Lan
from tests.lan import why_not as why_no_lan

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

NBYTES = 64 * MIB
RATE = "1gbit"
PATIENCE_S = 60.0
"""How long after the death survivors may stay silent before this says that they hang."""
BEGIN_S_MAX = 120.0
CALLS = 3
PORT = 7997
RANK = [str(PYTHON), "-m", "benchmarks.peers.death_rank"]
MPI_ENV = ENV | {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PRTE_ALLOW_RUN_AS_ROOT": "1",
    "PRTE_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PATH": f"{PYTHON.parent}:{os.environ['PATH']}",
}
# Instead of ssh: leaves the host and the command for the process outside, which can enter hosts.
AGENT = """#!/bin/sh
while [ "${1#-}" != "$1" ]; do shift; done
host=$1; shift
echo "$@" > FOLDER/start.$host.part
mv FOLDER/start.$host.part FOLDER/start.$host
"""


def start_gloo(lan: Lan, folder: Path) -> list[subprocess.Popen[Any]]:
    """Its ranks."""
    hosts = list(lan)
    where = [str(folder), str(NBYTES), f"{hosts[0].address}:{PORT}", str(len(hosts))]
    return [
        host.popen([*RANK, "gloo", *where, str(rank)], env=ENV, cwd=ROOT, start_new_session=True)
        for rank, host in enumerate(hosts)
    ]


def start_mpi(lan: Lan, folder: Path) -> list[subprocess.Popen[Any]]:
    """mpirun on the first host, and its daemons where it wants them."""
    agent = folder / "agent"
    agent.write_text(AGENT.replace("FOLDER", str(folder)))
    agent.chmod(0o755)
    hosts = list(lan)
    options = ["--host", ",".join(f"{host.address}:1" for host in hosts), "-np", str(len(hosts))]
    for kind, name, value in (
        ("--prtemca", "plm_ssh_agent", str(agent)),
        ("--prtemca", "prte_if_include", DEVICE),
        ("--mca", "btl_tcp_if_include", DEVICE),
        ("--mca", "btl", "tcp,self"),
        ("--mca", "pml", "ob1"),
    ):
        options += [kind, name, value]
    command = ["mpirun", *options, *RANK, "mpi", str(folder), str(NBYTES)]
    started = [hosts[0].popen(command, env=MPI_ENV, cwd=ROOT, start_new_session=True)]
    deadline = time.monotonic() + BEGIN_S_MAX
    waiting = {host.address: host for host in hosts[1:]}
    while waiting:
        if time.monotonic() > deadline or started[0].poll() is not None:
            raise TimeoutError("mpirun does not start its daemons")
        for address, host in list(waiting.items()):
            asked = folder / f"start.{address}"
            if asked.exists():
                line = ["sh", "-c", asked.read_text()]
                started.append(host.popen(line, env=MPI_ENV, cwd=ROOT, start_new_session=True))
                del waiting[address]
        time.sleep(0.01)
    return started


def calls(folder: Path, ranks: int) -> dict[int, list[Any]]:
    """What each rank has said so far."""
    found = {}
    for rank in range(ranks):
        with contextlib.suppress(FileNotFoundError):
            found[rank] = [json.loads(line) for line in (folder / str(rank)).open()]
    return found


@contextlib.contextmanager
def running(lan: Lan, start: Callable[[Lan, Path], list[subprocess.Popen[Any]]]) -> Iterator[Path]:
    """The folder of a run whose last call has begun."""
    folder = lan.root / "calls"
    folder.mkdir()
    started = start(lan, folder)
    try:
        deadline = time.monotonic() + BEGIN_S_MAX
        while not (folder / "begun").exists():
            if time.monotonic() > deadline or started[0].poll() is not None:
                raise TimeoutError("the last call does not begin")
            time.sleep(0.0005)
        yield folder
    finally:
        for process in started:
            if process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)


def told(name: str, how: str, count: int) -> str:
    """One run: what the survivors of a death half way hear."""
    start = start_gloo if name == "Gloo" else start_mpi
    with Lan(count, RATE) as lan, running(lan, start) as folder:
        first = calls(folder, count)[0]
        usual = first[CALLS - 2][1] - first[CALLS - 2][0]
        time.sleep(usual / 2)
        died = time.monotonic()
        victim = 2
        if how == "killed":
            lan[victim].kill()
        else:
            lan[victim].cut()
        living = [rank for rank in range(count) if rank != victim]
        while time.monotonic() < died + PATIENCE_S:
            found = calls(folder, count)
            if all(len(found[rank]) == CALLS for rank in living):
                break
            if how == "killed" and not any(
                process.poll() is None for host in lan.hosts for process in host.processes
            ):
                break
            time.sleep(0.05)
        waited = time.monotonic() - died
        last = [found[rank][CALLS - 1] for rank in living if len(found[rank]) == CALLS]
        errors = [one for one in last if one[2]]
        silent = len(living) - len(last)
        said = [f"{name}, a host {how} half way of {usual:.2f} s:"]
        if errors:
            times = sorted(one[1] - died for one in errors)
            said.append(f"{len(errors)} survivors raise after {times[0]:.1f} to {times[-1]:.1f} s")
            said.append(f"({errors[0][2]!r});")
        if len(last) > len(errors):
            said.append(f"{len(last) - len(errors)} survivors return;")
        if silent:
            gone = all(p.poll() is not None for h in lan.hosts for p in h.processes)
            what = "are ended by their launcher" if gone else "still hang"
            said.append(f"{silent} survivors {what} after {waited:.1f} s")
        return " ".join(said)


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code 0 if there was something to tell."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.lan.deaths_beside")
    parser.add_argument("-n", type=int, default=8, help="hosts (%(default)s)")
    options = parser.parse_args(arguments)
    why = why_no_lan() or why_not()
    if why is not None:
        print(why, file=sys.stderr)
        return 1
    for name in ("Gloo", "Open MPI"):
        for how in ("killed", "cut"):
            try:
                print(told(name, how, options.n), flush=True)
            except (TimeoutError, OSError) as error:
                print(f"{name}, {how}: {error}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
