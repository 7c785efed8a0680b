"""A program of examples/applications/ on a bed, from its start to its result.

Every run has a deadline, and saves its results together with its parameters. A program prints lines
of JSON: {"event": "begun"} at the start of the measured part, {"event": "ended"} at its end, and
{"event": "result", ...} last. Times are from time.monotonic(): emulated hosts share its clock.
"""

from __future__ import annotations

import json
import queue
import subprocess
import threading
import time
from typing import TYPE_CHECKING, Any

from benchmarks.applications.usage import cpu_s, link_bytes, memory_bytes

if TYPE_CHECKING:
    from collections.abc import Callable

    from benchmarks.applications.beds import Bed
    from benchmarks.applications.usage import Links

__all__ = ["Failed", "run"]

MEMORY_EVERY_S = 2.0
END_S_MAX = 60.0


class Failed(RuntimeError):
    """A program that has not come to its result."""


def run(
    bed: Bed,
    module: str,
    arguments: dict[str, Any],
    patience_s: float,
    incidents: Callable[[Bed, float], dict[str, float]] | None = None,
    everywhere: bool = False,
) -> dict[str, Any]:
    """Runs `python -m module ARGUMENTS` on the bed's first host; what its result line holds, and
    under "usage" what all hosts have used between `begun` and `ended`.

    incidents: called in a thread with the time of `begun`; it kills and revives hosts, and returns
    when it did what, which is then in the result as "incidents".
    everywhere: the program is started on all hosts, and told its rank; the first one's result
    counts."""
    given = {"address": bed.address, "hosts": bed.lan.size} | arguments
    if everywhere:
        for rank in range(1, bed.lan.size):  # they end with the bed
            told = json.dumps(given | {"rank": rank})
            bed.popen(rank + 1, module, told, stdout=subprocess.DEVNULL)
        given["rank"] = 0
    process = bed.popen(1, module, json.dumps(given), stdout=subprocess.PIPE)
    lines: queue.Queue[dict[str, Any] | None] = queue.Queue()
    threading.Thread(target=_read, args=(process, lines), daemon=True).start()
    try:
        return _Watch(bed, module, time.monotonic() + patience_s, incidents).follow(process, lines)
    finally:
        if process.poll() is None:  # with all that it has started: hosts end with the bed
            process.kill()
        process.wait(END_S_MAX)


def _read(process: subprocess.Popen[str], lines: queue.Queue[dict[str, Any] | None]) -> None:
    """What is no JSON is an engine's own, and not looked at."""
    assert process.stdout is not None
    with process.stdout as said:
        for line in said:
            if line.startswith("{"):
                try:
                    lines.put(json.loads(line))
                except ValueError:
                    continue
    lines.put(None)


class _Watch:
    """Looks at the hosts while the program runs."""

    def __init__(
        self,
        bed: Bed,
        module: str,
        deadline: float,
        incidents: Callable[[Bed, float], dict[str, float]] | None,
    ) -> None:
        self.bed = bed
        self.module = module
        self.deadline = deadline
        self.incidents = incidents
        self.found: dict[str, float] = {}
        self.thread: threading.Thread | None = None
        self.peak = 0
        self.before: tuple[float, float, Links] | None = None
        self.usage: dict[str, Any] = {}

    def follow(
        self, process: subprocess.Popen[str], lines: queue.Queue[dict[str, Any] | None]
    ) -> dict[str, Any]:
        """The result."""
        while True:
            left = self.deadline - time.monotonic()
            if left <= 0:
                raise Failed(f"{self.module} has no result within its time\n{self.bed.said()}")
            try:
                line = lines.get(timeout=min(left, MEMORY_EVERY_S))
            except queue.Empty:
                if self.before is not None and not self.usage:
                    self.peak = max(self.peak, memory_bytes(self.bed.lan))
                continue
            if line is None:
                raise Failed(f"{self.module} ended without a result\n{self.bed.said()}")
            if line["event"] == "begun":
                self._begun(line)
            elif line["event"] == "ended":
                self._ended()
            elif line["event"] == "result":
                if self.thread is not None:
                    self.thread.join(END_S_MAX)
                return line | {"usage": self.usage, "incidents": self.found}

    def _begun(self, line: dict[str, Any]) -> None:
        lan = self.bed.lan
        self.before = (time.monotonic(), cpu_s(lan), link_bytes(lan))
        if self.incidents is not None:
            self.thread = threading.Thread(target=self._happen, args=(line["at"],), daemon=True)
            self.thread.start()

    def _happen(self, begun: float) -> None:
        assert self.incidents is not None
        self.found = self.incidents(self.bed, begun)

    def _ended(self) -> None:
        lan = self.bed.lan
        if self.before is None:
            raise Failed(f"{self.module} has said `ended` before `begun`")
        at, cpu, links = self.before
        moved = link_bytes(lan).since(links)
        self.usage = {
            "seconds": time.monotonic() - at,
            "cpu_s": cpu_s(lan) - cpu,
            "memory_peak_bytes": max(self.peak, memory_bytes(lan)),
            "busiest_link_bytes": moved.busiest(),
            "bytes_sent": sum(moved.up.values()),
        }
