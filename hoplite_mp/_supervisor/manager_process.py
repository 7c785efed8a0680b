"""The process of a host's manager or standby, which is restarted when it dies.

A host survives the death of its manager, because nodes report their state to the next manager. If a
restart fails because the system is out of processes or descriptors, the supervisor's loop retries
it, and meanwhile reaps children, starts workers and serves the driver.
"""

from __future__ import annotations

import contextlib
import os
import socket
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from hoplite_mp._common import clock
from hoplite_mp._protocol.local import LanStart, ManagerStarted, Start, StartStandby
from hoplite_mp._supervisor.processes import descriptors, print_error

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["RETRY_MS", "ManagerProcess"]

MANAGER_MAIN = ("hoplite_mp._manager.main", "main")
STANDBY_MAIN = ("hoplite_mp._manager.standby", "main")
# A manager that exits after STARTS_MAX starts within STARTS_S is not restarted.
STARTS_MAX, STARTS_S = 10, 10.0
# How long a failed start is retried. Must be less than the time for which nodes wait for a manager
# (MANAGER_ABSENT_S in _node/manager_link/connection.py). With a higher value, a host survives a
# longer shortage of processes or descriptors. With a lower value, a host with a permanent shortage
# is shut down sooner.
PATIENCE_S = 7.0
RETRY_MS = 50  # maximum time between two attempts


class ManagerHost(Protocol):
    """The part of the supervisor's interface that this module uses."""

    start: Start
    node: socket.socket
    first: list[tuple[int, list[int]]]
    ending: bool

    def fork(
        self, name: bytes, entry: tuple[str, str], args: tuple[Any, ...], close: list[Any]
    ) -> int:
        """Forks a child. Raises OSError if the system cannot create a process."""

    def own_descriptors(self) -> list[Any]:
        """The descriptors and sockets that children must close."""


class ManagerProcess:
    """A host's manager or standby. `pid`: 0 if there is none."""

    def __init__(self, host: ManagerHost) -> None:
        self.host = host
        self.pid = 0
        # If this host has a standby instead of a manager: (the standby's parameters, the number of
        # this host's node).
        self.standby: tuple[LanStart, int] | None = None
        self.due: Callable[[], None] | None = None  # a failed start that is to be retried
        self._due_until = 0.0
        self._starts: list[float] = []  # start times, the latest last

    def begin(self, end: socket.socket, *nodes_end: socket.socket) -> None:
        """Starts a manager with its end of the connection to the node. The listening socket also
        stays open in this process, so that connections wait for a restarted manager. `nodes_end`:
        the node's end, unless this is the first manager."""
        host, s = self.host, self.host.start
        fds = [s.control_fd, s.store_fd, s.event_fd, *self._of_first_workers()]
        if not nodes_end:
            fds += descriptors(s.lan, "peer_fd")
        self.pid = host.fork(
            b"hoplite manager",
            MANAGER_MAIN,
            (end.fileno(), s.lan, bool(nodes_end)),
            [*host.own_descriptors(), *nodes_end, *fds],
        )
        self._starts.append(clock.monotonic())

    def restart(self) -> None:
        """Restarts the manager or standby. Nodes reconnect to it, and report their state."""
        name = "manager" if self.standby is None else "standby"
        self._starts = self._starts[-STARTS_MAX:]
        if len(self._starts) == STARTS_MAX and clock.monotonic() - self._starts[0] < STARTS_S:
            self._give_up(f"the {name} has exited {STARTS_MAX} times and is not restarted")
            return
        print_error(f"the {name} has exited and is restarted")
        self._start(self._begin_again if self.standby is None else self._begin_standby)

    def take_standby(self, request: StartStandby, manager_fd: int) -> None:
        """Starts this host's standby, as requested by the node."""
        assert self.host.start.lan is not None
        lan = msgspec.structs.replace(
            self.host.start.lan,
            manager_fd=manager_fd,
            standby=request.addresses,
            cluster=request.cluster,
            certificate=request.certificate,
        )
        self.standby = lan, request.node
        self._start(self._begin_standby)

    def retry(self) -> None:
        """Retries a pending start. Gives up after PATIENCE_S."""
        if self.due is None:
            return
        try:
            self.due()
        except OSError as error:
            if clock.monotonic() > self._due_until:
                self.due = None
                self._give_up(f"cannot start a manager: {error}")
        else:
            self.due = None

    def _start(self, begin: Callable[[], None]) -> None:
        self.due, self._due_until = begin, clock.monotonic() + PATIENCE_S
        self.retry()

    def _give_up(self, reason: str) -> None:
        print_error(reason)
        if self.standby is None:
            self.host.ending = True
        else:  # the host continues with the manager on another host
            os.close(self.standby[0].manager_fd)
            self.standby = None

    def _begin_again(self) -> None:
        to_manager, manager_end = socket.socketpair()
        with to_manager, manager_end:
            self.begin(manager_end, to_manager)
            with contextlib.suppress(OSError):  # the node is gone
                message = msgspec.msgpack.encode(ManagerStarted())
                socket.send_fds(self.host.node, [message], [to_manager.fileno()])

    def _begin_standby(self) -> None:
        """Starts a standby. The listening socket also stays open in this process. A restarted
        standby waits for votes, even if its predecessor was the manager."""
        host, s = self.host, self.host.start
        fds = [s.control_fd, s.store_fd, s.event_fd, *self._of_first_workers()]
        close = [*host.own_descriptors(), *fds]
        assert self.standby is not None
        self.pid = host.fork(b"hoplite standby", STANDBY_MAIN, self.standby, close)
        self._starts.append(clock.monotonic())

    def _of_first_workers(self) -> list[int]:
        return [fd for _, fds in self.host.first for fd in fds]
