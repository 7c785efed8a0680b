"""Worker processes of this host: started by the supervisor, killed and interrupted by signals.

It implements ProcessesPort (_node/ports.py). The supervisor forks a worker. The worker's line
to the node and its output pipes are made here, and their other ends are sent to the supervisor.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
from typing import TYPE_CHECKING

import msgspec

from hoplite_mp._client.channel import seqpacket_pair

if TYPE_CHECKING:
    from collections.abc import Callable

    from hoplite_mp._protocol.local import StartStandby
    from hoplite_mp._protocol.spawning import Spawn
    from hoplite_mp._transport.addresses import Address

__all__ = ["SupervisedProcesses", "close", "open_for_reading", "read"]


class SupervisedProcesses:
    """See ProcessesPort in _node/ports.py."""

    def __init__(
        self,
        supervisor: socket.socket,
        connect: Callable[[int, socket.socket, int, int, int], None],
        leave: Callable[[], None],
    ) -> None:
        """connect: takes a new worker's slot, line, the reading ends of its pipes, and the output
        owner of its output. leave: called when the supervisor is gone."""
        self._supervisor = supervisor
        self._connect = connect
        self._leave = leave

    def spawn(self, ask: Spawn, descriptors: list[int]) -> str:
        made: list[int] = []
        try:
            mine, theirs = seqpacket_pair()
            for _ in range(2):
                made += os.pipe2(os.O_CLOEXEC)
        except OSError as error:  # no descriptor is left, so the host has fewer workers
            for fd in made:
                os.close(fd)
            return error.strerror or str(error)
        out, err = made[:2], made[2:]
        self._connect(ask.slot, mine, out[0], err[0], ask.output_owner)
        try:
            fds = [theirs.fileno(), out[1], err[1], *descriptors]
            socket.send_fds(self._supervisor, [msgspec.msgpack.encode(ask)], fds)
        except OSError:
            self._leave()
        theirs.close()
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
    """Makes `read` return at once from now on."""
    os.set_blocking(fd, False)


def read(fd: int, nbytes_max: int) -> bytes | None:
    """What is there, at most so many bytes; b"": nobody can write into the pipe any more; None:
    nothing is there now."""
    try:
        return os.read(fd, nbytes_max)
    except BlockingIOError:
        return None


def close(fd: int) -> None:
    """Closes the read end."""
    os.close(fd)
