"""A driver of a host that has a node of the cluster already attaches to it, as one client more.

Why it exists: a host has one store and one set of workers; a second node on it would copy every
object, and costs four processes to start. Which cluster an address leads to only its manager can
say, so that is asked first; the node is then found by the cluster's id (`transport/rendezvous.py`),
and both sides prove the token once more. There is nothing to start: it takes a few milliseconds.
It must never know: who has started the node, what other drivers do.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import select
import socket
import time
import weakref
from typing import TYPE_CHECKING

import msgspec

from hoplite_mp import errors, ids
from hoplite_mp.client.channel import Channel
from hoplite_mp.client.descriptors import Watched, close_socket, lift, lift_socket
from hoplite_mp.client.launch import Host
from hoplite_mp.client.runtime import Runtime
from hoplite_mp.errors import HopliteError
from hoplite_mp.protocol.greetings import Introduction
from hoplite_mp.protocol.handshake import ClientHandshake
from hoplite_mp.protocol.local import Attached, NotAttached
from hoplite_mp.protocol.versions import software_versions
from hoplite_mp.transport.caller import Caller
from hoplite_mp.transport.conversation import Conversation
from hoplite_mp.transport.rendezvous import anybody, peer_of, reach
from hoplite_mp.transport.stream import TcpStream

if TYPE_CHECKING:
    from hoplite_mp.client.network import Network
    from hoplite_mp.config import Config

__all__ = ["AttachedHost", "attach"]

DESCRIPTORS = 5  # control memory, store, the node's eventfd, rpc, output
TOLD_BYTES_MAX = 4096
GENERATION_SHIFT = 32  # of the slot, in the numbers of questions: above all of one life
_log = logging.getLogger("hoplite_mp")


def attach(network: Network, config: Config) -> AttachedHost | None:
    """The node of that cluster on this host; None if it has none, or none with a place.

    AuthError, ManagerLostError, ProtocolError: as for who joins with a node of its own.
    """
    if not anybody():
        return None
    mine = Introduction(ids.random_host_id(), software_versions())
    caller = Caller(
        network.manager,
        key=network.token.key,
        role="tool",
        mine=mine,
        tls=network.tls,
        now=time.monotonic(),
        timeout_s=config.connect_timeout_s,
        handshake_timeout_s=config.handshake_timeout_s,
    )
    admission = caller.wait()
    admission.stream.close()
    cluster = admission.cluster
    life = reach(cluster, config.handshake_timeout_s)
    if life is None:
        return None
    life = lift_socket(life)
    try:
        _, uid = peer_of(life)
        if uid != os.geteuid():
            raise ConnectionError(f"it is user {uid}'s")
        _prove(life, network.token.key, mine, cluster, config.handshake_timeout_s)
        told, fds = _receive(life)
    except HopliteError:
        life.close()
        raise
    except (OSError, msgspec.MsgspecError) as error:  # it ends just now, say
        life.close()
        _log.info("this host's node does not let this process attach: %s", error)
        return None
    if isinstance(told, NotAttached):
        life.close()
        _log.info("this host's node does not let this process attach: %s", told.reason)
        return None
    try:
        return AttachedHost(told, fds, life, config, network.address)
    except BaseException:  # no address space, say
        life.close()
        raise


def _prove(
    sock: socket.socket, key: bytes, mine: Introduction, cluster: bytes, timeout_s: float
) -> None:
    """The handshake. The socket is blocking afterwards, with that timeout."""
    deadline = time.monotonic() + timeout_s
    stream = TcpStream(sock)
    conversation = Conversation(
        stream, lambda sees: ClientHandshake(key, "driver", mine, cluster=cluster)
    )
    poll = select.poll()
    while conversation.go_on() is None:
        poll.register(sock, select.POLLIN | (select.POLLOUT if stream.wants_write else 0))
        if not poll.poll(max(0.0, deadline - time.monotonic()) * 1e3):
            raise TimeoutError("it does not answer")
    stream.detach()
    sock.settimeout(timeout_s)


def _receive(life: socket.socket) -> tuple[Attached | NotAttached, list[int]]:
    """What this process is given. ConnectionError: nothing."""
    flags = socket.MSG_CMSG_CLOEXEC
    data, fds, _, _ = socket.recv_fds(life, TOLD_BYTES_MAX, DESCRIPTORS, flags)
    try:
        if not data:
            raise ConnectionError("it has closed the connection")
        told = msgspec.msgpack.decode(data, type=Attached | NotAttached)
        if isinstance(told, Attached) and len(fds) != DESCRIPTORS:
            raise ConnectionError(f"{len(fds)} descriptors came in place of {DESCRIPTORS}")
    except BaseException:
        for fd in fds:
            os.close(fd)
        raise
    return told, fds


class AttachedHost(Host):
    """The host as one of its drivers holds it: its processes are not this one's to end."""

    attached = True

    def __init__(
        self, told: Attached, fds: list[int], life: socket.socket, config: Config, address: str
    ) -> None:
        control_fd, store_fd, event_fd, rpc_fd, output_fd = fds
        self.workers = 0  # the host's own are shared, and may change
        self.limit = told.memory_bytes
        self._config = dataclasses.replace(  # what has to be alike in all clients is the node's
            config,
            memory_bytes=told.memory_bytes,
            small_object_bytes_max=told.small_object_bytes_max,
            span_bytes=told.span_bytes,
        )
        self.output = socket.socket(fileno=lift(output_fd))
        event_fd = lift(event_fd)
        channel = Channel(socket.socket(fileno=rpc_fd), told.generation << GENERATION_SHIFT)
        try:
            self.runtime = Runtime(
                control_fd, store_fd, event_fd, told.slot, channel, self._config, "driver"
            )
        finally:
            for fd in (control_fd, store_fd):
                os.close(fd)
        self.runtime.submitter.audience = told.audience
        self._joined = address
        # Arrays are read after the end, too: what is pinned stays so while anything here needs it.
        life.setblocking(False)
        watched = Watched(life.fileno()), Watched(event_fd)
        ends = weakref.finalize(self.runtime.client, _end_life, os.getpid(), life, *watched)
        ends.atexit = False
        self._watch()

    def _why_lost(self) -> HopliteError:
        error = errors.NodeLostError(
            f"the node of this host, through which this process took part in the cluster at "
            f"{self._joined}, has ended"
        )
        _log.info("%s", error)
        return error

    def end(self) -> None:
        """Leaves: what is this process's own ends, the host goes on."""
        self._ending = True
        client = self.runtime.client
        try:
            if client.usable:
                with contextlib.suppress(HopliteError):
                    self.runtime.memory.collect()
                    self.runtime.memory.give_empty_spans()
        finally:
            # The client is closed before the line: when the node hears that this process has left,
            # nothing here changes the shared memory any more.
            self.runtime.close()
        self._join_reader()  # the node sends what there is, and closes its end
        with contextlib.suppress(OSError):  # a forked child has the socket, too: that is no end
            if self._output_line.there():
                self.output.shutdown(socket.SHUT_RDWR)
        self._join_reader()
        close_socket(self.output, self._output_line)


def _end_life(pid: int, life: socket.socket, line: Watched, event: Watched) -> None:
    """Nothing in this process reads the store any more. In a forked child nothing is ended."""
    if os.getpid() == pid:
        close_socket(life, line)
    else:
        life.close()
    event.close()
