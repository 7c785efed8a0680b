"""Connections between hosts that live end: the manager chooses who is out, and so does the next."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.lan import Lan
from tests.support.clusters import Driver, UpCluster, kill_manager

# Ends the connections of this host's node to those addresses, behind its back.
BREAK = """
import ctypes, os, socket, sys
PIDFD_OPEN, PIDFD_GETFD = 434, 438
libc = ctypes.CDLL(None, use_errno=True)
ended = 0
for pid in filter(str.isdigit, os.listdir("/proc")):
    if open(f"/proc/{pid}/comm").read().strip() != "hoplite node":
        continue
    process = libc.syscall(PIDFD_OPEN, int(pid), 0)
    for fd in os.listdir(f"/proc/{pid}/fd"):
        copy = libc.syscall(PIDFD_GETFD, process, int(fd), 0)
        if copy < 0:
            continue
        try:
            with socket.socket(fileno=copy) as sock:
                if sock.family == socket.AF_INET and sock.getpeername()[0] in sys.argv[1:]:
                    sock.shutdown(socket.SHUT_RDWR)
                    ended += 1
        except OSError:
            pass
print(ended)
"""

PROGRAM = """
deadline = time.monotonic() + 30
while sum(n.workers for n in c.nodes) < 4 and time.monotonic() < deadline:
    time.sleep(0.02)
ids = {n.id: n.host for n in c.nodes if n.workers}
made = {node: c.options(node=node).submit(np.ones, 200_000) for node in ids}
for ref in made.values():
    for node in ids:
        assert c.options(node=node).submit(np.sum, ref).result(30) == 200_000
print(*[ids[node] for node in sorted(ids)], flush=True)
input()
deadline = time.monotonic() + 20
youngest = max(ids)
while youngest in [n.id for n in c.nodes] and time.monotonic() < deadline:
    time.sleep(0.02)
time.sleep(1)  # were others to follow
print(*sorted(ids.keys() - {n.id for n in c.nodes}), flush=True)
"""


@pytest.mark.soak
@pytest.mark.usefixtures("usual_heartbeats")
@pytest.mark.parametrize("manager", ["lives", "dies"])
def test_the_youngest_has_lost_all_but_the_first(lan_permitted: None, manager: str) -> None:
    with Lan(4) as lan:
        cluster = UpCluster(lan, tls=False)
        with Driver(cluster, lan[0], PROGRAM) as driver:
            hosts = {host.name: host for host in lan}
            _, *others, youngest = (hosts[name] for name in driver.hear().split())
            addresses = [host.address for host in others]
            done = youngest.run(
                [sys.executable, "-c", BREAK, *addresses], stdout=subprocess.PIPE, text=True
            )
            assert int(done.stdout) >= len(others)
            if manager == "dies":
                kill_manager(lan[0])
            driver.say()
            assert driver.hear() == "h3"
        assert cluster.end() == [0] * 4
