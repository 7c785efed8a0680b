"""The emulated hosts of a benchmark: the rates of their links, and a cluster over them.

The rate is measured with plain sockets and warm memory, in the same run as the measurements that
are compared with it."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
from typing import TYPE_CHECKING

from benchmarks.common import ROOT

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.lan import Host, Lan

__all__ = ["ENV", "PATIENCE_S", "bound_s", "cluster", "link_rate"]

TOKEN = "a token for the benchmarks only"
ENV = {"HOPLITE_MP_TOKEN": TOKEN, "PYTHONPATH": str(ROOT)}
PORT = 7000
PATIENCE_S = 600.0

SENDER = """
import socket, sys, time
data = memoryview(bytearray(int(sys.argv[-1])))
s = socket.create_server(("", 7999)); print("up", flush=True)
for _ in range(5):
    c, _ = s.accept(); c.sendall(data); c.recv(1); c.close()
"""
RECEIVER = """
import socket, sys, time
buffer, found = memoryview(bytearray(int(sys.argv[-1]))), []
for _ in range(5):
    s = socket.create_connection((sys.argv[1], 7999))
    at, begun = 0, time.perf_counter()
    while at < len(buffer):
        at += s.recv_into(buffer[at:])
    found.append(len(buffer) / (time.perf_counter() - begun)); s.send(b"x"); s.close()
print(max(found))
"""


def link_rate(sender: Host, receiver: Host, nbytes: int = 64 << 20) -> float:
    """Bytes per second of a plain socket: the best of five, so that no bound is too easy."""
    size = str(nbytes)
    process = sender.popen([sys.executable, "-c", SENDER, size], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    process.stdout.readline()
    done = receiver.run(
        [sys.executable, "-c", RECEIVER, sender.address, size], stdout=subprocess.PIPE, text=True
    )
    process.wait()
    process.stdout.close()
    return float(done.stdout)


def bound_s(kind: str, nbytes: int, size: int, rate: float) -> float:
    """What no algorithm can beat, for equal links and full duplex. `nbytes`: of one rank's
    array."""
    factor = {
        "broadcast": 1.0,
        "reduce": 1.0,
        "allreduce": 2 * (size - 1) / size,
        "gather": size - 1,
        "allgather": size - 1,
        "reduce_scatter": (size - 1) / size,
    }[kind]
    return factor * nbytes / rate


@contextlib.contextmanager
def cluster(
    lan: Lan, tls: bool, workers: int, memory: str, *, tree: Path = ROOT, port: int = PORT
) -> Iterator[str]:
    """`hoplite-mp up` on the first host, and with workers a node on each; its address. `tree`: the
    checkout that is run."""
    env = {**ENV, "PYTHONPATH": str(tree)}
    options = ["--workers", str(workers), "--memory", memory, *([] if tls else ["--no-tls"])]
    command = [sys.executable, "-m", "hoplite_mp"]
    first = lan[0]
    address = f"{first.address}:{port}"
    up = first.popen([*command, "up", "--listen", address, *options],
                     env=env, cwd=tree, stdout=subprocess.PIPE, text=True)  # fmt: skip
    assert up.stdout is not None
    up.stdout.readline()
    others = list(lan)[1:] if workers else []
    joined = [
        host.popen(
            [*command, "join", address, *options], env=env, cwd=tree, stdout=subprocess.DEVNULL
        )
        for host in others
    ]
    yield address
    first.signal(up, signal.SIGTERM)
    up.stdout.close()
    for process in (up, *joined):
        process.wait(PATIENCE_S)
