"""The ports of a simulated machine for its node: connections to processes, workers, a disk.

They implement ports of _node/ports.py on the timeline instead of the operating system.
"""

from __future__ import annotations

import os
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from hoplite_mp._protocol.spawning import Exited

if TYPE_CHECKING:
    from collections.abc import Callable

    from hoplite_mp._node.ports import AttachedDrivers
    from hoplite_mp._protocol.greetings import Introduction
    from hoplite_mp._protocol.local import Reply, StartStandby
    from hoplite_mp._protocol.spawning import Spawn
    from hoplite_mp._simulation.timeline import Timeline
    from hoplite_mp._simulation.virtual.processes import VirtualChannel, VirtualProcess
    from hoplite_mp._transport.addresses import Address

__all__ = [
    "LOCAL_DELAY_S",
    "NoDriverListener",
    "NoStacks",
    "VirtualClientSockets",
    "VirtualDisk",
    "VirtualWorkers",
]

LOCAL_DELAY_S = 20e-6  # delay of a message between processes on one host
FORK_S = 0.002  # time to start a worker
KILLED = -9


class VirtualClientSockets:
    """Connections to processes on the host; see _node/ports.py."""

    def __init__(self, timeline: Timeline) -> None:
        self.by_slot: dict[int, VirtualChannel] = {}
        self._timeline = timeline

    def serve(self, events: Any) -> None:
        """Does nothing: the host calls the node directly."""

    def add(self, slot: int, channel: VirtualChannel) -> None:
        self.by_slot[slot] = channel

    def forget(self, slot: int) -> None:
        channel = self.by_slot.pop(slot, None)
        if channel is not None:
            channel.close()

    def reply(self, slot: int, reply: Reply) -> None:
        channel = self.by_slot.get(slot)
        if channel is not None:
            self._timeline.after(LOCAL_DELAY_S, channel.deliver, reply)

    def replier(self, slot: int) -> Callable[[Reply], None]:
        channel = self.by_slot.get(slot)

        def reply(found: Reply) -> None:
            if channel is not None and self.by_slot.get(slot) is channel:
                self.reply(slot, found)

        return reply


class Supervised(Protocol):
    """The host of the workers."""

    def begin_worker(self, request: Spawn) -> VirtualProcess:
        """Starts the worker's process."""

    def worker_ended(self, message: Exited) -> None:
        """Called when the process has ended, or was killed."""

    def worker_started(self, slot: int, pid: int) -> None:
        """Called when the process has started."""

    def request_standby(self, request: StartStandby) -> None:
        """Starts a standby on this host."""


class VirtualWorkers:
    """Worker processes on a host, and the supervisor that starts them; see `ProcessesPort` in
    _node/ports.py."""

    def __init__(self, timeline: Timeline, host: Supervised) -> None:
        self.by_pid: dict[int, tuple[int, VirtualProcess]] = {}
        self._timeline = timeline
        self._host = host
        self._last = 100

    def spawn(self, request: Spawn, descriptors: list[int]) -> str:
        self._last += 1
        self._timeline.after(FORK_S, self._start, request, self._last)
        return ""

    def start(self, request: Spawn) -> None:
        """Starts one of the first workers, as the supervisor itself does."""
        self._last += 1
        self._start(request, self._last)

    def _start(self, request: Spawn, pid: int) -> None:
        process = self._host.begin_worker(request)
        process.ended = partial(self._ended, pid)
        self.by_pid[pid] = request.slot, process
        self._host.worker_started(request.slot, pid)

    def _ended(self, pid: int) -> None:
        slot, process = self.by_pid.pop(pid)
        self._host.worker_ended(Exited(slot, pid, process.code if process.failure is None else 1))

    def kill(self, pid: int) -> None:
        found = self.by_pid.get(pid)
        if found is not None and found[1].alive:
            found[1].kill()
            found[1].code = KILLED
            self._timeline.after(LOCAL_DELAY_S, self._ended, pid)

    def kill_process(self, process: VirtualProcess) -> None:
        """Like `kill`, for a worker given as a process."""
        for pid, (_, one) in list(self.by_pid.items()):
            if one is process:
                self.kill(pid)

    def interrupt(self, pid: int) -> None:
        found = self.by_pid.get(pid)
        if found is not None:
            found[1].interrupt()

    def start_standby(self, request: StartStandby, address: Address) -> None:
        self._timeline.after(FORK_S, self._host.request_standby, request)

    def close(self, descriptors: list[int]) -> None:
        while descriptors:
            os.close(descriptors.pop())


class VirtualDisk:
    """Keeps spilled bytes in memory; see _node/ports.py. `capacity`: its capacity in bytes."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.used = 0
        self._blocks: dict[int, bytes] = {}
        self._next = 1

    def write(self, data: memoryview) -> int | None:
        if self.used + len(data) > self.capacity:
            return None
        position, self._next = self._next, self._next + len(data)
        self._blocks[position] = bytes(data)
        self.used += len(data)
        return position

    def read(self, position: int, into: memoryview) -> None:
        for start, data in self._blocks.items():
            if start <= position < start + len(data):
                into[:] = data[position - start :][: len(into)]
                return
        raise OSError(f"nothing was written at {position}")

    def free(self, position: int) -> None:
        self.used -= len(self._blocks.pop(position))


class NoStacks:
    """See `StacksPort` in _node/ports.py; stacks are never requested."""

    def ask(self, done: Callable[[list[dict[str, Any]]], None]) -> None:
        done([])


class NoDriverListener:
    """See `DriverListenerPort` in _node/ports.py; programs are attached by `VirtualHost.attach`
    instead."""

    def open(self, drivers: AttachedDrivers, cluster: bytes, mine: Introduction) -> None: ...

    def close(self) -> None: ...
