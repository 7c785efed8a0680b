"""Lets programs of this host find its node and attach: a socket named by the cluster's id.

A driver finds the node by the name that `Rendezvous` keeps, and proves that it has the token, as a
node on the network does. It receives a line, both memories and the node's eventfd over a
connection. When that connection or the driver's process ends, the driver no longer reads the
memories.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import select
import socket
from collections import deque
from typing import TYPE_CHECKING

import msgspec

from hoplite_mp._client.channel import dump, seqpacket_pair
from hoplite_mp._node.io.tcp_connections import open_listener
from hoplite_mp._protocol.local import Attached, NotAttached
from hoplite_mp._transport.rendezvous import Rendezvous, peer_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from hoplite_mp._node.ports import AttachedDrivers, LoopPort
    from hoplite_mp._protocol.greetings import Introduction
    from hoplite_mp._protocol.local import LanStart, Start
    from hoplite_mp._transport.conversation import Admission


__all__ = ["DriverListener", "DriverSocket", "OutputLine", "Socket", "frames"]

# The socket to one of this host's drivers: a queue of frames that waits until the driver reads.
#
# A driver reads when it likes, so lines wait here. Each sender is notified of how many of its bytes
# the driver has taken, so that the sender can bound how many of them wait.


Socket = socket.socket  # for components that pass one on to a DriverSocket

LENGTH_BYTES = 4


class OutputLine(msgspec.Struct, frozen=True, array_like=True):
    """One line of a worker: stream 1 (stdout) or 2 (stderr), without the line's end."""

    stream: int
    label: str
    line: bytes


_encode = msgspec.msgpack.Encoder().encode


def frames(stream: int, label: str, lines: list[bytes]) -> bytes:
    """Lines as the driver reads them: each a length followed by an encoded OutputLine."""
    found: list[bytes] = []
    for line in lines:
        data = _encode(OutputLine(stream, label, line))
        found += (len(data).to_bytes(LENGTH_BYTES, "little"), data)
    return b"".join(found)


class DriverSocket:
    """A send queue without a limit of its own; each sender bounds the bytes that it has in it."""

    def __init__(self, sock: socket.socket, loop: LoopPort) -> None:
        sock.setblocking(False)
        self.sock = sock
        self.loop = loop
        # (data, bytes that it counts for its sender, function to call when the data is taken).
        self.backlog: deque[tuple[memoryview, int, Callable[[int], None]]] = deque()
        self.broken = False
        self._sending = False
        self._ends = False  # close as soon as everything has been sent
        loop.watch(sock.fileno(), self.ready, read=False)

    def put(self, data: bytes, nbytes: int, taken: Callable[[int], None]) -> None:
        """Queues data. `taken(nbytes)` is called when the data has been sent or the driver is gone,
        perhaps before this method returns."""
        self.backlog.append((memoryview(data), nbytes, taken))
        self.send()

    def send(self) -> None:
        """Sends as much as the driver takes now; the loop calls again for the rest."""
        if self._sending:
            return  # a `taken` function has queued something
        self._sending = True
        try:
            while told := self._send():
                for taken, nbytes in told.items():
                    taken(nbytes)
        finally:
            self._sending = False
        if not self.broken:
            self.loop.watch(self.sock.fileno(), self.ready, read=False, write=bool(self.backlog))
        if self._ends and not self.backlog:
            self._close()

    def ready(self) -> None:
        """The loop reports that there is room or that the driver has hung up. A hang-up would be
        reported in every turn, so the socket is unwatched then."""
        if not self.backlog and not self.broken:
            look = select.poll()
            look.register(self.sock, 0)
            if look.poll(0):
                self.broken = True
                self.loop.unwatch(self.sock.fileno())
        self.send()

    def end(self) -> None:
        """Closes the socket after the last byte, or when the driver is gone, because no more data
        will be queued."""
        self._ends = True
        if not self.backlog:
            self._close()

    def _close(self) -> None:
        if not self.broken:
            self.broken = True
            self.loop.unwatch(self.sock.fileno())
        self.sock.close()

    def _send(self) -> dict[Callable[[int], None], int]:
        told: dict[Callable[[int], None], int] = {}
        with contextlib.suppress(BlockingIOError):
            while self.backlog:
                data, nbytes, taken = self.backlog[0]
                sent = len(data) if self.broken else self._pass(data)
                if sent < len(data):
                    self.backlog[0] = data[sent:], nbytes, taken
                    continue
                self.backlog.popleft()
                told[taken] = told.get(taken, 0) + nbytes
        return told

    def _pass(self, data: memoryview) -> int:
        try:
            return self.sock.send(data)
        except BlockingIOError:
            raise
        except OSError:  # the driver is gone, and its lines are dropped
            self.broken = True
            self.loop.unwatch(self.sock.fileno())
            return len(data)


# How often to retry taking the cluster's name while another node of this host has it. Lower: more
# system calls. Higher: after that node has ended, drivers find no node for longer.
NAME_AGAIN_S = 2.0
_log = logging.getLogger("hoplite_mp")


class DriverListener:
    """The listener of one node; see DriverListenerPort in _node/ports.py."""

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
            _log.log(level, "drivers of this host cannot attach to its node: %s", error)
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
        except OSError as error:  # the driver has gone again, or no descriptor is left
            _log.info("a driver could not be attached: %s", error)
            sock.close()

    def _attach(self, drivers: AttachedDrivers, life: socket.socket) -> None:
        """Gives a slot, a line, a socket for output and both memories to a driver that has proved
        that it has the token; or sends it the reason why it is not attached."""
        pid, uid = peer_of(life)
        slot, generation, name, reason = -1, 0, 0, ""
        if uid != os.geteuid():
            reason = f"it is user {uid}'s, and this node is user {os.geteuid()}'s"
        elif not pid:
            reason = "the node does not see its process: it is in another container"
        else:
            slot, generation, name, reason = drivers.register()
        if slot < 0:
            _log.info("a driver is not attached: %s", reason)
            with contextlib.suppress(OSError):
                life.send(dump(NotAttached(reason)))
            life.close()
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
                told = Attached(
                    slot,
                    generation,
                    start.memory_bytes,
                    start.config["small_object_bytes_max"],
                    start.config["span_bytes"],
                    name,
                )
                given = [start.control_fd, start.store_fd, start.event_fd]
                given += [its_line.fileno(), its_output.fileno()]
                socket.send_fds(life, [dump(told)], given)
            stack.pop_all()
        close = functools.partial(self._close, life, process, output)
        drivers.came(slot, name, pid, line, output, close)
        self.loop.watch(life.fileno(), functools.partial(self._life, drivers, slot, life))
        self.loop.watch(process, functools.partial(self._ended, drivers, slot, process))

    def _life(self, drivers: AttachedDrivers, slot: int, life: socket.socket) -> None:
        """The connection has ended; the driver never sends anything else over it."""
        try:
            said = life.recv(1)
        except BlockingIOError:
            return
        except OSError:
            said = b""
        if said:
            _log.error("driver %d says what it must not say: it is sent away", slot)
        drivers.gone(slot)

    def _ended(self, drivers: AttachedDrivers, slot: int, process: int) -> None:
        """The driver's process has ended, although a child of it may keep its sockets open."""
        poll = select.poll()
        poll.register(process, select.POLLIN)
        if poll.poll(0):  # else the event was for an earlier descriptor of the same number
            drivers.gone(slot)

    def _close(self, life: socket.socket, process: int, output: socket.socket) -> None:
        with contextlib.suppress(OSError):  # ends the output even if a child has the other end
            output.shutdown(socket.SHUT_RDWR)
        for fd in (life.fileno(), process):
            self.loop.unwatch(fd)
        life.close()
        os.close(process)
