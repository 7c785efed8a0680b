"""The emulated hosts are separate hosts: only the network joins them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING

import pytest

from tests.lan import Lan

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.lan import Host

SINK = """
import socket, sys, time
server = socket.create_server(("", 5000))
print("up", flush=True)
link, _ = server.accept()
began, total = time.perf_counter(), 0
link.sendall(b"g")  # nothing comes earlier, however late this process reads
while data := link.recv(1 << 20):
    total += len(data)
print(total, time.perf_counter() - began)
"""
SOURCE = """
import socket, sys
with socket.create_connection((sys.argv[1], 5000), timeout=30) as link:
    link.recv(1)
    for _ in range(int(sys.argv[2])):
        link.sendall(bytes(1 << 20))
"""


def transfer(source: Host, sink: Host, mebibytes: int) -> float:
    """Bytes per second of one connection between two hosts."""
    with sink.popen([sys.executable, "-c", SINK], stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        assert server.stdout.readline() == "up\n"
        source.run([sys.executable, "-c", SOURCE, sink.address, str(mebibytes)])
        total, seconds = server.stdout.readline().split()
    assert int(total) == mebibytes << 20
    return int(total) / float(seconds)


def reachable(source: Host, target: Host) -> bool:
    """Does anything answer there, if only by refusing?"""
    code = (
        "import socket, sys\n"
        "try: socket.create_connection((sys.argv[1], 9), timeout=2.0)\n"
        "except ConnectionRefusedError: sys.exit(0)\n"
        "except OSError: sys.exit(1)\n"
    )
    return source.run([sys.executable, "-c", code, target.address]).returncode == 0


def test_a_link_has_the_rate_it_was_given(lan4: Lan) -> None:
    """A token bucket does not depend on how busy this machine is, unless that is slower still."""
    for host in lan4:
        host.shape("200mbit", "200mbit")
    assert transfer(lan4[0], lan4[1], 6) <= 1.05 * 25e6
    lan4[0].shape(up="80mbit")  # while it is used: the sender's side alone
    assert transfer(lan4[0], lan4[1], 3) <= 1.05 * 10e6


def test_a_path_is_narrower_than_both_links(lan4: Lan) -> None:
    lan4.rate = "200mbit"
    for host in lan4:
        host.shape("200mbit", "200mbit")
    lan4[1].narrow(lan4[0], "40mbit")
    lan4[1].narrow(lan4[2], "80mbit")
    assert transfer(lan4[0], lan4[1], 2) <= 1.05 * 5e6
    assert transfer(lan4[2], lan4[1], 3) <= 1.05 * 10e6
    assert transfer(lan4[3], lan4[1], 6) <= 1.05 * 25e6
    assert lan4[1].came_from(lan4[0]) >= 2 << 20
    assert lan4[1].came_from(lan4[2]) >= 3 << 20


def test_cut_and_mended(lan4: Lan) -> None:
    assert reachable(lan4[0], lan4[1])
    lan4[1].cut()
    assert not reachable(lan4[0], lan4[1])
    assert reachable(lan4[0], lan4[2])
    lan4[1].mend()
    assert reachable(lan4[0], lan4[1])


def test_killing_the_first_process_kills_the_host(lan4: Lan) -> None:
    victim = lan4[1]
    program = victim.popen(["sleep", "1000"])
    os.kill(victim.pid, signal.SIGKILL)
    program.wait(30)
    assert not reachable(lan4[0], victim)
    victim.kill()
    again = lan4.add(2)
    assert again.address == victim.address
    end = time.monotonic() + 30
    while not reachable(lan4[0], again):  # until the others have forgotten the old one's MAC
        assert time.monotonic() < end


@pytest.fixture(scope="module")
def four(lan_permitted: None) -> Iterator[Lan]:
    """Hosts for tests that change nothing on them."""
    with Lan(4) as lan:
        yield lan


@pytest.mark.parametrize("place", ["/dev/shm/x", "/run/x", "\0abstract"])
def test_no_socket_of_one_host_is_found_by_another(four: Lan, place: str) -> None:
    """Not by a path in the places that hosts share on a real machine, nor by an abstract name."""
    listen = (
        f"import socket; s = socket.socket(socket.AF_UNIX); s.bind({place!r}); s.listen()\n"
        "print('up', flush=True); s.accept()"
    )
    connect = f"import socket; socket.socket(socket.AF_UNIX).connect({place!r})"
    server = four[0].popen([sys.executable, "-c", listen], stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    assert server.stdout.readline() == "up\n"
    quiet = {"stderr": subprocess.DEVNULL}
    assert four[1].run([sys.executable, "-c", connect], **quiet).returncode == 1
    assert four[0].run([sys.executable, "-c", connect], **quiet).returncode == 0
    server.wait(30)
    server.stdout.close()


def test_hosts_see_themselves_alone(four: Lan) -> None:
    names = [
        host.run(["hostname"], stdout=subprocess.PIPE, text=True).stdout.strip() for host in four
    ]
    assert names == ["h1", "h2", "h3", "h4"]
    pids = four[0].run(["sh", "-c", "ls /proc"], stdout=subprocess.PIPE, text=True).stdout.split()
    assert sum(pid.isdecimal() for pid in pids) < 10
    places = [host.environment()["XDG_RUNTIME_DIR"] for host in four]
    assert len(set(places)) == 4


def test_neighbours_of_emulated_hosts_are_permanent_entries(four: Lan) -> None:
    """Entries that the kernel has found itself count against a limit of all namespaces."""
    assert reachable(four[0], four[3])
    for family in ("-4", "-6"):
        command = ["ip", family, "neighbour", "show", "dev", "eth0"]
        done = four[0].run(command, stdout=subprocess.PIPE, text=True)
        entries = [line for line in done.stdout.splitlines() if "fe80" not in line]
        assert len(entries) == 3
        assert all("PERMANENT" in line for line in entries)
