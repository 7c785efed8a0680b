"""Lets programs on this host attach to the node, through a socket named after the cluster.

A driver finds the socket by its name (see `Rendezvous`), and proves that it has the token, as other
nodes do. Over the new connection it receives a socket for requests, a socket for output, the
descriptors of the store and the control memory, and the node's eventfd. When the connection is
closed or the driver's process exits, the driver no longer reads the memory.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import select
import socket
from typing import TYPE_CHECKING

from hoplite_mp._client.channel import dump, seqpacket_pair
from hoplite_mp._node.io.tcp_connections import open_listener
from hoplite_mp._protocol.local import Attached, AttachRefused
from hoplite_mp._transport.rendezvous import Rendezvous, peer_of

if TYPE_CHECKING:
    from hoplite_mp._node.ports import AttachedDrivers, LoopPort
    from hoplite_mp._protocol.greetings import Introduction
    from hoplite_mp._protocol.local import LanStart, Start
    from hoplite_mp._transport.conversation import Admission


__all__ = ["DriverListener"]

# Interval of attempts to use the cluster's name while another node on this host uses it. Lower:
# more system calls. Higher: drivers find no node for longer after that node has stopped.
NAME_AGAIN_S = 2.0
_log = logging.getLogger("hoplite_mp")


class DriverListener:
    """The listener of one node (see DriverListenerPort in _node/ports.py)."""

    def __init__(self, loop: LoopPort, start: Start, lan: LanStart) -> None:
        self.loop = loop
        self.start = start
        self.lan = lan
        self.meeting: Rendezvous | None = None
        self._tried = False

    def open(self, drivers: AttachedDrivers, cluster: bytes, mine: Introduction) -> None:
        level = logging.DEBUG if self._tried else logging.WARNING
        self._tried = True
        try:
            self.meeting = Rendezvous.open(cluster, level)
        except OSError as error:
            _log.log(level, "drivers on this host cannot attach to its node: %s", error)
        if self.meeting is None:
            again = functools.partial(self.open, drivers, cluster, mine)
            self.loop.call_later(NAME_AGAIN_S, again)
            return
        roles = {"driver": functools.partial(self._admit, drivers)}
        certificate = None  # no TLS, because no byte leaves this host
        open_listener(self.loop, self.lan, self.meeting.socket, cluster, certificate, mine, roles)

    def close(self) -> None:
        if self.meeting is not None:
            self.meeting.close()

    def _admit(self, drivers: AttachedDrivers, admission: Admission) -> None:
        sock = admission.stream.detach()
        try:
            self._attach(drivers, sock)
        except OSError as error:  # the driver has exited, or the node has no free descriptor
            _log.info("a driver could not be attached: %s", error)
            sock.close()

    def _attach(self, drivers: AttachedDrivers, connection: socket.socket) -> None:
        """Sends an authenticated driver a slot, a connection, a socket for output and the memory,
        or the reason for a refusal."""
        pid, uid = peer_of(connection)
        slot, generation, name, reason = -1, 0, 0, ""
        if uid != os.geteuid():
            reason = f"it belongs to user {uid}, but this node belongs to user {os.geteuid()}"
        elif not pid:
            reason = "its process is not visible to the node; it may be in another container"
        else:
            slot, generation, name, reason = drivers.register()
        if slot < 0:
            _log.info("a driver is not attached: %s", reason)
            with contextlib.suppress(OSError):
                connection.send(dump(AttachRefused(reason)))
            connection.close()
            return
        with contextlib.ExitStack() as stack:
            stack.callback(drivers.unregister, slot)
            process = os.pidfd_open(pid)
            stack.callback(os.close, process)
            (line, its_line), (output, its_output) = seqpacket_pair(), socket.socketpair()
            for sock in (line, output):
                stack.callback(sock.close)
            with its_line, its_output:
                start = self.start
                attached = Attached(
                    slot,
                    generation,
                    start.memory_bytes,
                    start.config["small_object_bytes_max"],
                    start.config["span_bytes"],
                    name,
                )
                given = [start.control_fd, start.store_fd, start.event_fd]
                given += [its_line.fileno(), its_output.fileno()]
                socket.send_fds(connection, [dump(attached)], given)
            stack.pop_all()
        close = functools.partial(self._close, connection, process, output)
        drivers.attached(slot, name, pid, line, output, close)
        self.loop.watch(
            connection.fileno(),
            functools.partial(self._connection_ready, drivers, slot, connection),
        )
        self.loop.watch(process, functools.partial(self._ended, drivers, slot, process))

    def _connection_ready(
        self, drivers: AttachedDrivers, slot: int, connection: socket.socket
    ) -> None:
        """Handles the end of the connection. A driver sends nothing over it after the handshake."""
        try:
            data = connection.recv(1)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if data:
            _log.error("driver %d sent unexpected data: closing its connection", slot)
        drivers.detached(slot)

    def _ended(self, drivers: AttachedDrivers, slot: int, process: int) -> None:
        """Handles the exit of the driver's process, whose children may still have its sockets
        open."""
        poll = select.poll()
        poll.register(process, select.POLLIN)
        if poll.poll(0):  # otherwise the event was for an earlier descriptor of the same number
            drivers.detached(slot)

    def _close(self, connection: socket.socket, process: int, output: socket.socket) -> None:
        with contextlib.suppress(OSError):  # ends the output even if a child holds the other end
            output.shutdown(socket.SHUT_RDWR)
        for fd in (connection.fileno(), process):
            self.loop.unwatch(fd)
        connection.close()
        os.close(process)
