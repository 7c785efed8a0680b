"""A port on this host that forwards connections to a port on another host.

Two hosts may be unable to reach each other even if both can reach a third. The third host then
lends a port, and its kernel forwards bytes in both directions (splice). The two ends authenticate
each other with the token. In a cluster with TLS they also use TLS, so the third host need not be
trusted. Each connection costs it two threads and six descriptors.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import socket
import threading
from typing import TYPE_CHECKING

from hoplite_mp._common import clock, locks
from hoplite_mp._transport.sockets import bound_address, prepare

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from hoplite_mp._transport.addresses import Endpoint

__all__ = ["Forward", "reach"]

# Timeout for one address of the target host, as for any call (_transport/caller.py).
ARRIVE_S = 2.0
# Maximum number of concurrent connections over one port. A peer needs three. Higher: unneeded
# connections cost more threads.
CONNECTIONS_MAX = 64
# Size of the kernel buffer between the two sockets in each direction. Higher: fewer wake-ups of the
# threads.
PIPE_BYTES = 1 << 20
# Pause after a failed accept. If descriptors or memory are short, accept would fail again
# immediately.
AGAIN_S = 0.1

_log = logging.getLogger("hoplite_mp")


def reach(endpoints: Sequence[Endpoint]) -> socket.socket | None:
    """Returns a blocking connection to the first address that answers, or None if none does. Waits
    up to ARRIVE_S for each address."""
    for endpoint in endpoints:
        try:
            sock = socket.socket(endpoint.family, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        except OSError:  # no free descriptor
            return None
        try:
            prepare(sock)
            sock.settimeout(ARRIVE_S)
            sock.connect(endpoint.sockaddr)
        except OSError:
            sock.close()
            continue
        sock.settimeout(None)
        return sock
    return None


class Forward:
    """One lent port. The port and its connections stay open until `close`."""

    def __init__(
        self,
        listener: socket.socket,
        endpoints: Sequence[Endpoint],
        welcome: Callable[[str], bool],
    ) -> None:
        """listener: a socket from `listen`, which this object then owns. endpoints: those of the
        target host. welcome: returns whether a caller with the given address may use the port;
        called in a thread."""
        self.port = bound_address(listener).port
        self._listener = listener
        self._endpoints = endpoints
        self._welcome = welcome
        self._lock = locks.lock("node.forward")
        # All callers, including those for which the target has not answered.
        self._callers: set[socket.socket] = set()
        self._carried: set[socket.socket] = set()
        self._closed = False
        listener.setblocking(True)
        self._begin(self._accept)

    def close(self) -> None:
        """Closes the port and every connection over it."""
        with self._lock:
            self._closed = True
            for sock in (self._listener, *self._carried):
                _shut(sock)

    @property
    def connections(self) -> int:
        """The number of open connections."""
        return len(self._callers)

    def _begin(self, work: Callable[..., None], *args: object) -> threading.Thread:
        thread = threading.Thread(
            target=work, args=args, name=f"hoplite_mp forward {self.port}", daemon=True
        )
        thread.start()
        return thread

    def _accept(self) -> None:
        with self._listener as listener:
            while True:
                try:
                    caller, where = listener.accept()
                except OSError as error:
                    if self._closed:
                        return
                    _log.warning("port %d cannot accept now: %s", self.port, error)
                    clock.sleep(AGAIN_S)
                    continue
                host = where[0].removeprefix("::ffff:")
                if len(self._callers) >= CONNECTIONS_MAX or not self._welcome(host):
                    caller.close()
                    continue
                self._callers.add(caller)
                try:
                    self._begin(self._carry, caller)
                except RuntimeError:  # the user has reached the limit of threads
                    self._callers.discard(caller)
                    caller.close()

    def _carry(self, caller: socket.socket) -> None:
        """Forwards one connection until its end."""
        try:
            with caller:
                callee = reach(self._endpoints)
                if callee is not None:
                    with callee:
                        self._join(caller, callee)
        finally:
            self._callers.discard(caller)

    def _join(self, caller: socket.socket, callee: socket.socket) -> None:
        prepare(caller).setblocking(True)
        with self._lock:
            if self._closed:
                return
            self._carried |= {caller, callee}
        try:
            back = self._begin(_pour, callee, caller)
            _pour(caller, callee)
            back.join()
        finally:
            with self._lock:
                self._carried -= {caller, callee}


def _pour(source: socket.socket, sink: socket.socket) -> None:
    """Forwards one direction until it ends. An orderly end is forwarded. An error ends both
    directions."""
    try:
        read_end, write_end = os.pipe2(os.O_CLOEXEC)
    except OSError:  # no free descriptor: also end the other direction, whose thread would hang
        _shut(source)
        _shut(sink)
        return
    try:
        with contextlib.suppress(OSError):  # above the user's limit the pipe keeps its size
            fcntl.fcntl(write_end, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
        while count := os.splice(source.fileno(), write_end, PIPE_BYTES):
            while count:
                count -= os.splice(read_end, sink.fileno(), count)
        sink.shutdown(socket.SHUT_WR)
    except OSError:
        _shut(source)
        _shut(sink)
    finally:
        os.close(read_end)
        os.close(write_end)


def _shut(sock: socket.socket) -> None:
    """Wakes every thread that is blocked in a call on the socket."""
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)
