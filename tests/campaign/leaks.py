"""What a cluster has, before and after: objects, bytes, processes, their descriptors and threads.

After a campaign everything must be as it was before, once what ends has had its moment. Workers are
others by then, so processes are compared by what they are.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import time
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from tests.campaign.watching import Failed

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Census", "census", "settled", "steady"]

SETTLED_S = 20.0
STEADY_S = 1.5  # longer than a surplus of workers lasts
WORKER = "hoplite worker"
WORKER_FDS = 3
FUNCTIONS = 10
"""That a worker may have sent: those of tasks.py, and the library's own."""
SPANS = 2
"""Spans that some small object may still keep, beyond those at the beginning, in MiB."""


@dataclasses.dataclass
class Census:
    """By the name of a process: how many there are, the most descriptors and threads of one."""

    counted: dict[str, Any]
    processes: dict[str, tuple[int, int, int]]
    files: dict[str, list[str]] = dataclasses.field(default_factory=dict, compare=False)
    """Those of the process with the most."""

    def with_workers(self, more: int) -> Census:
        """The same with more of them; who leads them has a line and two pipes to each."""
        processes = {
            name: (some + more, fds, threads)
            if name == WORKER
            else (some, fds + WORKER_FDS * more, threads)
            for name, (some, fds, threads) in self.processes.items()
        }
        return Census(self.counted, processes, self.files)

    def with_imports(self) -> Census:
        """The same with a descriptor of the driver in a worker: a worker has one as soon as a task
        in it has imported multiprocessing, for example because the task meets BrokenProcessPool. A
        worker that has just begun may have it too, if it runs a task that is tried again."""
        some, fds, threads = self.processes[WORKER]
        processes = {**self.processes, WORKER: (some, fds + 1, threads)}
        return Census(self.counted, processes, self.files)

    def with_caches(self, workers: int) -> Census:
        """The same with what workers may keep for later: functions that they have sent, a thread
        that collects, an import."""
        counted = {**self.counted, "objects": self.counted["objects"] + workers * FUNCTIONS}
        some, fds, threads = self.with_imports().processes[WORKER]
        processes = {**self.processes, WORKER: (some, fds, threads + 1)}
        return Census(counted, processes, self.files)

    def more_than(self, before: Census) -> list[str]:
        """What there is too much of, or too little, in words."""
        wrong = []
        for name in ("objects", "bytes_spilled"):
            if self.counted[name] > before.counted[name]:
                wrong.append(f"{self.counted[name]} {name}, not {before.counted[name]}")
        if wrong:
            wrong += sorted(self.counted["headers"])
        room = before.counted["bytes_used"] + (SPANS << 20)
        if self.counted["bytes_used"] > room:
            wrong.append(f"{self.counted['bytes_used']} bytes are used, {room} were before")
        for name in sorted(self.processes.keys() | before.processes.keys()):
            now, then = self.processes.get(name), before.processes.get(name)
            if now is None or then is None or now[0] != then[0]:
                wrong.append(f"{name}: {now} processes, not {then}")
            elif now[1] > then[1] or now[2] > then[2]:
                wrong.append(f"{name}: (processes, descriptors, threads) {now}, not {then}")
                wrong += [f"files {self.files.get(name)}", f"before {before.files.get(name)}"]
        return wrong


def census(parents: list[psutil.Process], counted: dict[str, Any]) -> Census:
    """Of those processes and all below them."""
    found: dict[str, list[tuple[list[str], int]]] = defaultdict(list)
    family = [*parents, *(one for parent in parents for one in parent.children(recursive=True))]
    for one in family:
        with contextlib.suppress(psutil.NoSuchProcess, OSError):
            if one.status() != psutil.STATUS_ZOMBIE:
                found[one.name()].append((files_of(one.pid), one.num_threads()))
    files = {name: max((files for files, _ in some), key=len) for name, some in found.items()}
    processes = {
        name: (len(some), len(files[name]), max(threads for _, threads in some))
        for name, some in found.items()
    }
    return Census(counted, processes, files)


def files_of(pid: int) -> list[str]:
    """Its descriptors, each with what it is of."""
    folder = Path(f"/proc/{pid}/fd")
    numbers = sorted(map(int, os.listdir(folder)))
    found = []
    for number in numbers:
        try:
            found.append(f"{number} {os.readlink(folder / str(number))}")
        except FileNotFoundError:  # closed meanwhile
            found.append(f"{number} ?")
    return found


def steady(look: Callable[[], Census]) -> Census:
    """The first that has not changed for a while."""
    deadline = time.monotonic() + SETTLED_S
    found, since = look(), time.monotonic()
    while time.monotonic() - since < STEADY_S:
        time.sleep(0.1)
        now = look()
        if now != found:
            found, since = now, time.monotonic()
        if time.monotonic() > deadline:
            raise Failed(f"it does not come to rest: {found}")
    return found


def settled(look: Callable[[], Census], before: Census) -> Census:
    """The first that is as before; Failed if none is in time."""
    deadline = time.monotonic() + SETTLED_S
    while True:
        now = look()
        wrong = now.more_than(before)
        if not wrong:
            return now
        if time.monotonic() > deadline:
            raise Failed("left behind: " + "; ".join(wrong))
        time.sleep(0.1)
