"""Worker processes on this host: starting and stopping them, and reading their stacks.

The supervisor forks workers, and signals stop them. The node creates a worker's connection and
output pipes, and sends the worker's ends to the supervisor.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
from typing import TYPE_CHECKING, Any

import msgspec

from hoplite_mp._client.channel import seqpacket_pair
from hoplite_mp._protocol.local import STACKS_FILE, STACKS_SIGNAL

if TYPE_CHECKING:
    from collections.abc import Callable

    from hoplite_mp import _tasks
    from hoplite_mp._node.ports import HasWorkers, LoopPort
    from hoplite_mp._protocol.local import StartStandby
    from hoplite_mp._protocol.spawning import Spawn
    from hoplite_mp._transport.addresses import Address

__all__ = [
    "SupervisedProcesses",
    "WorkerStacks",
    "close",
    "file_bytes",
    "hostname",
    "open_for_reading",
    "read",
    "resident_bytes",
    "signal_name",
    "yield_core",
]


class SupervisedProcesses:
    """See ProcessesPort in _node/ports.py."""

    def __init__(
        self,
        supervisor: socket.socket,
        connect: Callable[[int, socket.socket, int, int, int], None],
        leave: Callable[[], None],
    ) -> None:
        """connect: called with a new worker's slot, connection, read ends of its pipes, and output
        owner. leave: called when the supervisor has exited."""
        self._supervisor = supervisor
        self._connect = connect
        self._leave = leave

    def spawn(self, ask: Spawn, descriptors: list[int]) -> str:
        made: list[int] = []
        try:
            node_end, worker_end = seqpacket_pair()
            for _ in range(2):
                made += os.pipe2(os.O_CLOEXEC)
        except OSError as error:  # no free descriptor, so the worker cannot be started
            for fd in made:
                os.close(fd)
            return error.strerror or str(error)
        out, err = made[:2], made[2:]
        self._connect(ask.slot, node_end, out[0], err[0], ask.output_owner)
        try:
            fds = [worker_end.fileno(), out[1], err[1], *descriptors]
            socket.send_fds(self._supervisor, [msgspec.msgpack.encode(ask)], fds)
        except OSError:
            self._leave()
        worker_end.close()
        os.close(out[1])
        os.close(err[1])
        return ""

    def kill(self, pid: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)

    def interrupt(self, pid: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGUSR1)

    def start_standby(self, ask: StartStandby, address: Address) -> None:
        from hoplite_mp._transport.sockets import listen

        with listen(address.host, [address.port]) as sock:
            socket.send_fds(self._supervisor, [msgspec.msgpack.encode(ask)], [sock.fileno()])

    def close(self, descriptors: list[int]) -> None:
        while descriptors:
            os.close(descriptors.pop())


def open_for_reading(fd: int) -> None:
    """Makes `read` non-blocking from now on."""
    os.set_blocking(fd, False)


def read(fd: int, nbytes_max: int) -> bytes | None:
    """Returns up to `nbytes_max` available bytes, b"" if the pipe has no writer left, or None if no
    bytes are available now."""
    try:
        return os.read(fd, nbytes_max)
    except BlockingIOError:
        return None


def close(fd: int) -> None:
    """Closes the read end."""
    os.close(fd)


# The stacks of this host's workers, which are requested by a signal and read from files.
#
# Only a task's own process can tell where the task hangs, and its interpreter may never get to run
# a signal handler written in Python. Each worker therefore registers the C handler of
# `faulthandler`, which writes to an unnamed file (memfd). The node finds that file among the
# worker's descriptors. If user code has removed the handler, the node sends no signal, because the
# signal would kill the worker.


# Timeout for workers to write their stacks. Higher: workers on a loaded host are included. Lower: a
# stopped worker delays the answer less.
STACKS_PATIENCE_S = 1.0
POLL_S = 0.02
STACK_CHARS_MAX = 8000  # for each worker; the stacks of a deep recursion are longer


class WorkerStacks:
    """Requests the stacks of all workers of one node."""

    def __init__(self, loop: LoopPort, tasks: _tasks.Tasks, workers: HasWorkers) -> None:
        self.loop = loop
        self.tasks = tasks
        self.workers = workers

    def ask(self, done: Callable[[list[dict[str, Any]]], None]) -> None:
        """Requests all stacks. Calls `done` with each worker's stacks as text."""
        workers = [(slot, worker.pid) for slot, worker in self.workers.all.items()]
        idle = {slot for slot, pid in workers if pid and not self.tasks.running(slot)}
        files: dict[int, str] = {}
        for slot, pid in workers:
            path = _file_of(pid) if pid else ""
            if path and _handled(pid):
                with contextlib.suppress(OSError):
                    os.truncate(path, 0)
                    os.kill(pid, STACKS_SIGNAL)
                    files[slot] = path
        sizes: dict[int, int] = {}
        left = round(STACKS_PATIENCE_S / POLL_S)

        def poll() -> None:
            nonlocal left, sizes
            left -= 1
            now = {slot: _size(path) for slot, path in files.items()}
            if left and not (all(now.values()) and now == sizes):
                sizes = now
                self.loop.call_later(POLL_S, poll)
                return
            done(
                [
                    {
                        "worker": slot,
                        "pid": pid,
                        "idle": slot in idle,
                        "text": _read(files.get(slot, "")),
                    }
                    for slot, pid in workers
                ]
            )

        poll()


def _file_of(pid: int) -> str:
    """The path to a worker's stacks file, or "" if this process cannot open such a file."""
    with contextlib.suppress(OSError), os.scandir(f"/proc/{pid}/fd") as entries:
        for entry in entries:
            with contextlib.suppress(OSError):
                if os.readlink(entry.path).startswith(f"/memfd:{STACKS_FILE}"):
                    return entry.path
    return ""


def _handled(pid: int) -> bool:
    """Whether the process has a handler for the signal."""
    with contextlib.suppress(OSError, ValueError), open(f"/proc/{pid}/status") as status:
        for line in status:
            if line.startswith("SigCgt:"):
                return bool(int(line.split()[1], 16) >> (STACKS_SIGNAL - 1) & 1)
    return False


def _size(path: str) -> int:
    with contextlib.suppress(OSError):
        return os.stat(path).st_size
    return 0


def _read(path: str) -> str:
    if not path:
        return "its stacks cannot be read"
    with contextlib.suppress(OSError), open(path, "rb") as file:
        text = file.read(STACK_CHARS_MAX).decode(errors="replace")
        return text or "it does not answer"
    return "it has ended"


# Non-blocking queries of the operating system.


BLOCKS_UNIT = 512  # bytes in a unit of st_blocks, whatever the block size of the file system


def hostname() -> str:
    """The name of this host, as shown to users."""
    return socket.gethostname()


def file_bytes(fd: int) -> int:
    """The length of an open file."""
    return os.fstat(fd).st_size


def resident_bytes(fd: int) -> int:
    """The number of bytes in an open memory file for which the kernel has pages."""
    return os.fstat(fd).st_blocks * BLOCKS_UNIT


def yield_core() -> None:
    """Lets another thread on this host run first."""
    os.sched_yield()


def signal_name(number: int) -> str:
    """The name of a signal, or "signal" and its number if it has no name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
