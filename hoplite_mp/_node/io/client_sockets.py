"""The sockets between this node and the processes on its host, one for each client slot.

A process sends requests as packets over its socket (its connection), and receives replies over the
same socket. A closed connection means that the process has exited or makes no more requests.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import socket
from typing import TYPE_CHECKING, Protocol

import msgspec

from hoplite_mp._client.channel import PACKET_BYTES_MAX
from hoplite_mp._client.inherited_context import DESCRIPTORS_MAX
from hoplite_mp._protocol.local import Reply, Request

if TYPE_CHECKING:
    from collections.abc import Callable

    from hoplite_mp._node.ports import LoopPort

__all__ = ["ClientSockets"]

# Buffer size for the descriptors that are sent with a request. They are received close-on-exec.
GIVEN_BYTES = socket.CMSG_SPACE(DESCRIPTORS_MAX * 4)
CUT_OFF = "the node has too many open files for the request's descriptors: raise `ulimit -n`"
RECEIVE = socket.MSG_DONTWAIT | socket.MSG_CMSG_CLOEXEC

_log = logging.getLogger("hoplite_mp")


class ClientSocketsEvents(Protocol):
    """The component that serves the requests."""

    def request(self, slot: int, request: Request, given: list[int]) -> None:
        """Serves a request. given: its descriptors. Descriptors that are left in the list are
        closed afterwards."""

    def line_ended(self, slot: int) -> None:
        """Called when the process makes no more requests."""

    def refuse_collective(self, ask: object, why: str) -> None:
        """Fails the results of a collective whose request could not be served, because such a
        request has no reply."""


class ClientSockets:
    """All connections on one host. `by_slot`: the connections over which replies can be sent."""

    _events: ClientSocketsEvents

    def __init__(self, loop: LoopPort) -> None:
        self.by_slot: dict[int, socket.socket] = {}
        self._loop = loop
        self._decoder = msgspec.msgpack.Decoder(Request)
        self._packet = memoryview(bytearray(PACKET_BYTES_MAX))  # buffer for received packets
        self._encode = msgspec.msgpack.Encoder().encode

    def serve(self, events: ClientSocketsEvents) -> None:
        """Sets the component that serves the requests."""
        self._events = events

    def add(self, slot: int, sock: socket.socket) -> None:
        self.by_slot[slot] = sock
        self._loop.watch(sock.fileno(), lambda: self._ready(slot, sock))

    def forget(self, slot: int) -> None:
        """Closes the connection to a client that has exited or makes no more requests."""
        sock = self.by_slot.pop(slot, None)
        if sock is not None:
            self._loop.unwatch(sock.fileno())
            sock.close()

    def reply(self, slot: int, reply: Reply) -> None:
        sock = self.by_slot.get(slot)
        if sock is None:
            return
        packet = self._encode(reply)
        try:
            if len(packet) > PACKET_BYTES_MAX:
                raise OSError(errno.EMSGSIZE, os.strerror(errno.EMSGSIZE))
            sock.send(packet)
        except OSError as error:  # other errors: the process has died, and `_ready` handles that
            if error.errno == errno.EMSGSIZE:
                why = f"the node's reply does not fit in a packet: {len(packet)} bytes"
                with contextlib.suppress(OSError):
                    sock.send(self._encode(Reply(reply.number, None, why)))

    def replier(self, slot: int) -> Callable[[Reply], None]:
        """Returns a function that later sends a reply to the slot's present process, or drops the
        reply if that process has exited."""
        line = self.by_slot.get(slot)

        def reply(found: Reply) -> None:
            if line is not None and self.by_slot.get(slot) is line:
                self.reply(slot, found)

        return reply

    def _ready(self, slot: int, sock: socket.socket) -> None:
        try:
            nbytes, ancillary, flags, _ = sock.recvmsg_into([self._packet], GIVEN_BYTES, RECEIVE)
        except BlockingIOError:
            return
        except OSError:
            nbytes, ancillary, flags = 0, [], 0
        if not nbytes:
            self._loop.unwatch(sock.fileno())
            self._events.line_ended(slot)
            return
        data = self._packet[:nbytes]
        given = [fd for _, _, part in ancillary for fd in memoryview(part).cast("i")]
        try:
            if flags & socket.MSG_CTRUNC:
                raise OSError(errno.EMFILE, CUT_OFF)
            self._events.request(slot, self._decoder.decode(data), given)
        except Exception as error:  # an error of one client must not stop the node
            _log.exception("cannot serve a request from client %d", slot)
            self._refuse(slot, data, f"{type(error).__name__}: {error}")
        for fd in given:  # descriptors that the handler has left in the list
            os.close(fd)

    def _refuse(self, slot: int, data: memoryview, why: str) -> None:
        """Replies that a request could not be served."""
        try:
            number, _, ask = msgspec.msgpack.decode(data)
            if number:
                self.reply(slot, Reply(number, None, f"the node refused the request: {why}"))
            elif ask and ask[0] == "Collective":
                self._events.refuse_collective(ask[1], why)
        except (msgspec.MsgspecError, ValueError, TypeError, LookupError, OverflowError):
            _log.error("client %d cannot be informed", slot)  # the packet is not a request
