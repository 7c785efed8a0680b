"""Attaches a driver to the existing node on its host, as one more client of that node.

A host has one store and one set of workers. A second node on the host would copy every object and
need four more processes. Only the manager knows which cluster an address belongs to, so the driver
first requests the cluster's id from the manager. The driver uses the id to find the node
(`_transport/rendezvous.py`), and both sides prove the token again. No process is started, so
attaching takes a few milliseconds.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import select
import socket
import weakref
from typing import TYPE_CHECKING

import msgspec

from hoplite_mp import errors
from hoplite_mp._client.channel import Channel
from hoplite_mp._client.descriptors import Watched, close_socket, lift, lift_socket
from hoplite_mp._client.launch import HostProcesses, check_room_to_attach
from hoplite_mp._client.runtime import Runtime
from hoplite_mp._common import clock, ids
from hoplite_mp._protocol.greetings import Introduction, software_versions
from hoplite_mp._protocol.handshake import ClientHandshake
from hoplite_mp._protocol.local import Attached, AttachRefused
from hoplite_mp._transport.caller import Dialer
from hoplite_mp._transport.conversation import Conversation
from hoplite_mp._transport.rendezvous import anybody, peer_of, reach
from hoplite_mp._transport.stream import TcpStream
from hoplite_mp.errors import HopliteError

if TYPE_CHECKING:
    from hoplite_mp._client.network import HostNetwork
    from hoplite_mp._protocol.secret import Secret
    from hoplite_mp.config import Config

__all__ = ["AttachedHost", "attach"]

DESCRIPTORS = 5  # control memory, store, the node's eventfd, rpc, output
TOLD_BYTES_MAX = 4096
# Request numbers contain the slot's generation from this bit on, so that they differ from
# the request numbers of earlier clients in the same slot.
GENERATION_SHIFT = 32
_log = logging.getLogger("hoplite_mp")


def attach(network: HostNetwork, config: Config) -> AttachedHost | None:
    """Attaches to this host's node in that cluster. Returns None if there is no such node, or it
    has no free slot.

    Raises AuthError, ManagerLostError and ProtocolError, as when a new node joins.
    """
    if not anybody():
        return None
    introduction = Introduction(ids.random_host_id(), software_versions())
    caller = Dialer(
        network.manager,
        key=network.token.key,
        role="tool",
        mine=introduction,
        tls=network.tls,
        now=clock.monotonic(),
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
            raise ConnectionError(f"it belongs to user {uid}")
        _prove(life, network.token.key, introduction, cluster, config.handshake_timeout_s)
        reply, fds = _receive(life)
    except HopliteError:
        life.close()
        raise
    except (OSError, msgspec.MsgspecError) as error:  # for example, the node is shutting down
        life.close()
        _log.info("this process cannot attach to this host's node: %s", error)
        return None
    if isinstance(reply, AttachRefused):
        life.close()
        _log.info("this process cannot attach to this host's node: %s", reply.reason)
        return None
    try:
        return AttachedHost(reply, fds, life, config, network.address)
    except BaseException:  # for example, no address space is left
        life.close()
        raise


def _prove(
    sock: socket.socket, key: Secret, introduction: Introduction, cluster: bytes, timeout_s: float
) -> None:
    """Performs the handshake. Afterwards the socket is blocking, with the timeout `timeout_s`."""
    deadline = clock.monotonic() + timeout_s
    stream = TcpStream(sock)
    conversation = Conversation(
        stream, lambda sees: ClientHandshake(key, "driver", introduction, cluster=cluster)
    )
    poll = select.poll()
    while conversation.advance() is None:
        poll.register(sock, select.POLLIN | (select.POLLOUT if stream.wants_write else 0))
        if not poll.poll(max(0.0, deadline - clock.monotonic()) * 1e3):
            raise TimeoutError("it does not reply")
    stream.detach()
    sock.settimeout(timeout_s)


def _receive(life: socket.socket) -> tuple[Attached | AttachRefused, list[int]]:
    """Receives the node's reply and its descriptors. Raises ConnectionError if the node has closed
    the connection or sent the wrong number of descriptors."""
    flags = socket.MSG_CMSG_CLOEXEC
    data, fds, _, _ = socket.recv_fds(life, TOLD_BYTES_MAX, DESCRIPTORS, flags)
    try:
        if not data:
            raise ConnectionError("it has closed the connection")
        reply = msgspec.msgpack.decode(data, type=Attached | AttachRefused)
        if isinstance(reply, Attached) and len(fds) != DESCRIPTORS:
            raise ConnectionError(f"{len(fds)} descriptors were received instead of {DESCRIPTORS}")
    except BaseException:
        for fd in fds:
            os.close(fd)
        raise
    return reply, fds


class AttachedHost(HostProcesses):
    """An attached driver's access to its host. The driver does not stop the host's processes."""

    attached = True

    def __init__(
        self, reply: Attached, fds: list[int], life: socket.socket, config: Config, address: str
    ) -> None:
        control_fd, store_fd, event_fd, rpc_fd, output_fd = fds
        try:
            check_room_to_attach(control_fd, store_fd)
        except BaseException:
            for fd in fds:
                os.close(fd)
            raise
        self.workers = 0  # the host's workers are shared, and their number may change
        self.limit = reply.memory_bytes
        # The values of settings that must be equal in all clients of a node come from the node.
        self._config = dataclasses.replace(
            config,
            memory_bytes=reply.memory_bytes,
            small_object_bytes_max=reply.small_object_bytes_max,
            span_bytes=reply.span_bytes,
        )
        self.output = socket.socket(fileno=lift(output_fd))
        event_fd = lift(event_fd)
        channel = Channel(socket.socket(fileno=rpc_fd), reply.generation << GENERATION_SHIFT)
        try:
            self.runtime = Runtime(
                control_fd,
                store_fd,
                event_fd,
                reply.slot,
                channel,
                self._config,
                "driver",
                hidden=True,  # until its Cluster is complete
            )
        finally:
            for fd in (control_fd, store_fd):
                os.close(fd)
        self.runtime.submitter.output_owner = reply.output_owner
        self._joined = address
        # Arrays may be read after the cluster has been closed. The node drops this process's pins
        # when `life` is closed, so `life` stays open as long as this process uses the shared
        # memory.
        life.setblocking(False)
        ends = weakref.finalize(
            self.runtime.client,
            _end_life,
            os.getpid(),
            life,
            Watched(life.fileno()),
            Watched(event_fd),
        )
        ends.atexit = False
        self._watch()

    def _why_lost(self) -> HopliteError:
        if self.removed:
            return self._why_removed()
        error = errors.NodeLostError(
            f"this host's node, through which this process took part in the cluster at "
            f"{self._joined}, has ended"
        )
        _log.info("%s", error)
        return error

    def end(self) -> None:
        """Leaves the cluster. This process's tasks end, and the host keeps running."""
        self._ending = True
        client = self.runtime.client
        try:
            if client.usable:
                with contextlib.suppress(HopliteError):
                    self.runtime.memory.collect()
                    self.runtime.memory.give_empty_spans()
        finally:
            # The client is closed before the connection, because this process must not change the
            # shared memory after the node has found that it has left.
            self.runtime.close()
        self._join_reader()  # the node sends the last lines and closes its end
        # The socket is shut down, because closing it would not end the connection if a forked child
        # has it, too.
        with contextlib.suppress(OSError):
            if self._output_line.there():
                self.output.shutdown(socket.SHUT_RDWR)
        self._join_reader()
        close_socket(self.output, self._output_line)


def _end_life(pid: int, life: socket.socket, line: Watched, event: Watched) -> None:
    """Closes `life` when this process no longer uses the store. A forked child must not end the
    connection, because the parent is still using it."""
    if os.getpid() == pid:
        close_socket(life, line)
    else:
        life.close()
    event.close()
