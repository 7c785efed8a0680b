"""`python -m benchmarks.lan [-n 4] [--rate 1gbit] [-k KINDS]`: Group calls over emulated hosts.

Needs root. The bound of each row is that of a star of equal links (Blink, MLSys 2020; the table in
docs/architecture.md); the links' rate is measured in the same run with plain sockets. Everything
found is left in benchmarks/results/lan.json.
"""

from __future__ import annotations

import argparse
import json
import signal
import statistics
import subprocess
import sys
from typing import TYPE_CHECKING

from benchmarks.common import MIB, ROOT, Row
from benchmarks.report import table as drawn
from tests.lan import UNLIMITED, Lan, why_not

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.lan import Host

TOKEN = "a token for the benchmarks only"
PORT = 7000
KINDS = ("broadcast", "reduce", "allreduce", "gather", "allgather", "reduce_scatter")
SMALL = ("broadcast", "allreduce")
PATIENCE_S = 600.0

SENDER = """
import socket, sys, time
data = memoryview(bytearray(64 << 20))
s = socket.create_server(("", 7999)); print("up", flush=True)
for _ in range(5):
    c, _ = s.accept(); c.sendall(data); c.recv(1); c.close()
"""
RECEIVER = """
import socket, sys, time
buffer, found = memoryview(bytearray(64 << 20)), []
for _ in range(5):
    s = socket.create_connection((sys.argv[1], 7999))
    at, begun = 0, time.perf_counter()
    while at < len(buffer):
        at += s.recv_into(buffer[at:])
    found.append(len(buffer) / (time.perf_counter() - begun)); s.send(b"x"); s.close()
print(max(found))
"""


def link_rate(sender: Host, receiver: Host) -> float:
    """Bytes per second of a plain socket: the best of five, so that no bound is too easy."""
    process = sender.popen([sys.executable, "-c", SENDER], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    process.stdout.readline()
    done = receiver.run(
        [sys.executable, "-c", RECEIVER, sender.address], stdout=subprocess.PIPE, text=True
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


def measure(lan: Lan, tls: bool, rows: Sequence[str]) -> dict[str, float]:
    """Seconds of each row: the median over rounds of the slowest rank."""
    env = {"HOPLITE_MP_TOKEN": TOKEN, "PYTHONPATH": str(ROOT)}
    first, size = lan[0], len(list(lan))
    plain = [] if tls else ["--no-tls"]
    up = first.popen(
        [sys.executable, "-m", "hoplite_mp", "up", "--listen", f"{first.address}:{PORT}",
         "--workers", "0", "--memory", "64MiB", *plain],
        env=env, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert up.stdout is not None
    up.stdout.readline()
    command = [sys.executable, "-m", "benchmarks.lan.member", f"{first.address}:{PORT}", str(size)]
    ranks = [
        host.popen([*command, str(rank), str(int(tls)), *rows], env=env, cwd=ROOT,
                   stdout=subprocess.PIPE, text=True)
        for rank, host in enumerate(lan)
    ]  # fmt: skip
    found = [json.loads(process.communicate(timeout=PATIENCE_S)[0]) for process in ranks]
    first.signal(up, signal.SIGTERM)
    up.stdout.close()
    up.wait(PATIENCE_S)
    return {
        row: statistics.median(max(turn) for turn in zip(*(one[row] for one in found), strict=True))
        for row in rows
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code 0, whether targets are met or not."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.lan", description=__doc__)
    parser.add_argument("-n", type=int, default=4, help="hosts (%(default)s)")
    parser.add_argument("--rate", default="1gbit", help="of each link, as tc has it; 'unlimited'")
    parser.add_argument("--tls", action="store_true", help="with TLS")
    parser.add_argument("--kinds", nargs="*", default=KINDS)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args(arguments)
    why = why_not()
    if why is not None:
        print(why, file=sys.stderr)
        return 1
    large, medium = options.rounds, 3 * options.rounds
    rows = [f"{kind}:{64 * MIB}:{large}" for kind in options.kinds]
    rows += [f"{kind}:{MIB}:{medium}" for kind in options.kinds if kind in KINDS[:3]]
    rows += [f"{kind}:1024:{20 * options.rounds}" for kind in options.kinds if kind in SMALL]
    rate = UNLIMITED if options.rate == "unlimited" else options.rate
    with Lan(options.n, rate) as lan:
        link = link_rate(lan[0], lan[1])
        found = measure(lan, options.tls, rows)
    limit = 1.05 if options.n <= 4 else 1.08
    table = []
    for row, seconds in found.items():
        kind, nbytes, _ = row.split(":")
        bound = bound_s(kind, int(nbytes), options.n, link)
        title = f"{kind} of {int(nbytes) // 1024} KiB, {options.n} hosts"
        if int(nbytes) == 1024:
            most = {"allreduce": 1e-3, "broadcast": 0.35e-3}
            if options.n > 4:
                most = {"allreduce": 4e-3, "broadcast": 2e-3}
            table.append(Row(title, seconds, "s", wanted=most[kind]))
            continue
        wanted = limit if int(nbytes) > MIB else (1.6 if options.n <= 4 else 2.0)
        table.append(Row(title, seconds, "s", "bound", bound, ratio=seconds / bound, wanted=wanted))
    print(f"links: {link / 1e6:.1f} MB/s each way, {'TLS' if options.tls else 'no TLS'}")
    print(drawn([row.as_dict() for row in table]))
    results = ROOT / "benchmarks" / "results"
    results.mkdir(exist_ok=True)
    name = f"lan-{options.n}{'-tls' if options.tls else ''}.json"
    (results / name).write_text(json.dumps([row.as_dict() for row in table], indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
