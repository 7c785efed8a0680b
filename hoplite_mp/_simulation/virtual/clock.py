"""Virtual time for all code of a run that reads a clock, and pids of simulated processes.

Client code computes deadlines with `hoplite_mp._common.clock`, programs with `time`, and the
compiled modules with the system's monotonic clock. During a run, all of them return the timeline's
time, and `time.sleep` blocks the calling simulated process.
"""

from __future__ import annotations

import contextlib
import os
import time
from typing import TYPE_CHECKING, Any, SupportsIndex

from hoplite_mp import _shm, _tasks
from hoplite_mp._api import collectives
from hoplite_mp._client import runtime as client
from hoplite_mp._common import clock, machine_limits
from hoplite_mp._node.store import budget
from hoplite_mp._node.tasks import sweeper
from hoplite_mp._simulation.virtual.loop import EPOCH_S
from hoplite_mp._worker import actor, checkpoints

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hoplite_mp._client.runtime import Runtime
    from hoplite_mp._simulation.virtual.processes import VirtualProcesses

__all__ = ["virtual_time"]

# Total and free memory of each host. A run must not depend on the memory of this machine.
TOTAL_BYTES = AVAILABLE_BYTES = 1 << 40
CLOCKS: tuple[Any, ...] = (time, clock)
MEMORY_READERS: tuple[Any, ...] = (budget, sweeper)  # errors contain the memory in use


class VirtualStacks:
    """Replaces `_stack` in _client/runtime.py: the open clusters of the running process."""

    def __init__(self, processes: VirtualProcesses) -> None:
        self._processes = processes
        self._of: dict[object, list[Runtime]] = {}

    @property
    def _own(self) -> list[Runtime]:
        running = self._processes.running
        return self._of.setdefault(running and running.main, [])

    def append(self, runtime: Runtime) -> None:
        self._own.append(runtime)

    def remove(self, runtime: Runtime) -> None:
        self._own.remove(runtime)

    def __contains__(self, runtime: Runtime) -> bool:
        return runtime in self._own

    def __iter__(self) -> Iterator[Runtime]:
        return iter(self._own)

    def __reversed__(self) -> Iterator[Runtime]:
        return reversed(self._own)


@contextlib.contextmanager
def virtual_time(processes: VirtualProcesses) -> Iterator[None]:
    """Replaces the clocks for one run. Threads that do not belong to it read the real time."""
    timeline = processes.timeline
    real = [(module.monotonic, module.monotonic_ns, module.sleep) for module in CLOCKS]
    real_monotonic, real_monotonic_ns, real_sleep = real[0]
    real_getpid = os.getpid
    now_ns = 0
    available, total = machine_limits.available_bytes, machine_limits.total_bytes

    def sleep(seconds: float | SupportsIndex) -> None:
        if processes.running is None or not processes.is_ours():
            real_sleep(seconds)
        else:
            processes.running.wait(None, float(seconds))

    def monotonic() -> float:
        return EPOCH_S + timeline.now if processes.is_ours() else real_monotonic()

    def monotonic_ns() -> int:
        """Each call returns a larger value, as in the compiled modules. Otherwise a loop would
        never end whose deadline has passed for their clock only."""
        nonlocal now_ns
        if not processes.is_ours():
            return int(real_monotonic_ns())
        now_ns += 1
        return now_ns

    def getpid() -> int:
        running = processes.running
        return running.pid if running is not None and processes.is_ours() else real_getpid()

    def time_changed() -> None:
        nonlocal now_ns
        now_ns = int((EPOCH_S + timeline.now) * 1e9)
        _shm.play_at(now_ns)
        _tasks.play_at(now_ns)

    stack = client._stack
    processes.install()
    client._stack = VirtualStacks(processes)  # type: ignore[assignment]
    for module in CLOCKS:
        module.monotonic, module.monotonic_ns, module.sleep = monotonic, monotonic_ns, sleep
    os.getpid = getpid
    for module in MEMORY_READERS:
        module.available_bytes = lambda: AVAILABLE_BYTES
        module.total_bytes = lambda: TOTAL_BYTES
    timeline.time_changed = time_changed
    time_changed()
    try:
        yield
    finally:
        processes.finish()
        for module, functions in zip(CLOCKS, real, strict=True):
            module.monotonic, module.monotonic_ns, module.sleep = functions
        os.getpid = real_getpid
        for module in MEMORY_READERS:
            module.available_bytes, module.total_bytes = available, total
        client._stack = stack
        collectives._placing.clear()
        for process in processes.all:  # state of a process, kept by pid, ends with the process
            actor._made.pop(process.pid, None)
            checkpoints._checkpoints.pop(process.pid, None)
