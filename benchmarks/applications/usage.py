"""Resource usage of emulated hosts: memory, CPU time, bytes over the links.

A system that is faster because it uses more memory or more processors should not look better than
it is. A host is a PID namespace, by which its processes are found."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from tests.lan import Lan

__all__ = ["Links", "cpu_s", "link_bytes", "memory_bytes"]

TICK_S = 1 / os.sysconf("SC_CLK_TCK")


class Links(NamedTuple):
    """Bytes that have gone over each host's link since it was made; by the host's number."""

    up: dict[int, int]
    down: dict[int, int]

    def since(self, earlier: Links) -> Links:
        """Only what came after; a host that is new counts from its beginning."""
        return Links(
            {n: count - earlier.up.get(n, 0) for n, count in self.up.items()},
            {n: count - earlier.down.get(n, 0) for n, count in self.down.items()},
        )

    def busiest(self) -> int:
        """Of the direction of a link that has carried most."""
        return max([0, *self.up.values(), *self.down.values()])


def _processes(lan: Lan) -> list[Path]:
    """Of all hosts, without the two that each host is made of."""
    spaces = {}
    for host in list(lan):
        with contextlib.suppress(OSError):
            spaces[os.readlink(f"/proc/{host.pid}/ns/pid")] = host.pid
    found = []
    for path in Path("/proc").iterdir():
        if path.name.isdigit():
            with contextlib.suppress(OSError):
                first = spaces.get(os.readlink(path / "ns" / "pid"))
                if first is not None and first != int(path.name):
                    found.append(path)
    return found


def memory_bytes(lan: Lan) -> int:
    """Of all hosts together; memory that several processes share counts once (PSS)."""
    total = 0
    for path in _processes(lan):
        with contextlib.suppress(OSError):
            for line in (path / "smaps_rollup").read_text().splitlines():
                if line.startswith("Pss:"):
                    total += int(line.split()[1]) * 1024
    return total


def cpu_s(lan: Lan) -> float:
    """Seconds of processor that the living processes of all hosts, and their children that have
    ended, have used so far."""
    ticks = 0
    for path in _processes(lan):
        with contextlib.suppress(OSError):
            words = (path / "stat").read_text().rpartition(")")[2].split()
            ticks += sum(map(int, words[11:15]))
    return ticks * TICK_S


def link_bytes(lan: Lan) -> Links:
    """As the switch has counted them."""
    done = subprocess.run(
        lan.enter("ip", "-s", "-j", "link", "show"), capture_output=True, text=True, check=True
    )
    up, down = {}, {}
    for device in json.loads(done.stdout):
        number = device["ifname"].removeprefix("port")
        if number.isdigit():
            counts = device.get("stats64") or device["stats"]
            up[int(number)] = int(counts["rx"]["bytes"])
            down[int(number)] = int(counts["tx"]["bytes"])
    return Links(up, down)
