"""A wire that can be spoiled: each TCP connection between two emulated hosts passes this process.

A host that dies, stops or is cut off does so as a whole; a wire can also lose the end of a stream,
hold one connection, or change what it carries. `Wires` turns the routes of two hosts so that each
finds, at the other's address, a listener of this process.

    host A ──► "host B" (a host of the LAN that has B's address, and is no other) ─┐
                   sockets of this process, made in those hosts' namespaces        │ Proxy
    host B ◄── the same connection, made anew from host B itself ◄─────────────────┘

A fault strikes once: at a byte of what passes in one direction after it was armed, on whichever
connection carries that byte.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
import struct
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.lan import Host

__all__ = ["KINDS", "Fault", "Proxy", "Wires"]

# cut: an orderly end of both directions. reset: both ends are told that it broke. truncate: the
# direction ends there, the other one goes on. flip: one bit is another one. delay, late: the
# direction stands still for a while, which is less, or far more, than what counts as silence; then
# all of it arrives.
DELAYS_S = {"delay": 0.3, "late": 4.0}
KINDS = ("cut", "reset", "truncate", "flip", *DELAYS_S)
PIECE_BYTES = 1 << 16
CLONE_NEWNET = 0x40000000
RESET = struct.pack("ii", 1, 0)  # SO_LINGER: close sends a reset

_libc = ctypes.CDLL(None, use_errno=True)


@dataclass
class Fault:
    """`forward`: in the direction of the one who called. `at`: bytes until it strikes."""

    kind: str
    forward: bool
    at: int
    bit: int = 0


def within(host: Host, make: Callable[[], Any]) -> Any:
    """What `make` returns in the network of that host: a socket stays where it was made."""
    found: list[Any] = []

    def work() -> None:
        fd = os.open(f"/proc/{host.pid}/ns/net", os.O_RDONLY | os.O_CLOEXEC)
        try:
            if _libc.setns(fd, CLONE_NEWNET):  # of this thread alone
                raise OSError(ctypes.get_errno(), "setns")
            found.append(make())
        finally:
            os.close(fd)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    return found[0]


class Passing:
    """One connection: as the caller made it, and its continuation."""

    def __init__(self, proxy: Proxy, near: socket.socket, far: socket.socket) -> None:
        self.proxy, self.near, self.far = proxy, near, far
        self.over = threading.Event()
        self.threads = [
            threading.Thread(target=self._pump, args=ends, daemon=True)
            for ends in ((True, near, far), (False, far, near))
        ]

    def _pump(self, forward: bool, source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(PIECE_BYTES):
                before, fault, rest = self.proxy.judge(forward, data)
                target.sendall(before)
                if fault is not None:
                    self._strike(fault, source, target)
                target.sendall(rest)
        with contextlib.suppress(OSError):
            target.shutdown(socket.SHUT_WR)

    def _strike(self, fault: Fault, source: socket.socket, target: socket.socket) -> None:
        match fault.kind:
            case "cut" | "reset":
                self.end(fault.kind == "reset")
                raise ConnectionAbortedError
            case "truncate":
                target.shutdown(socket.SHUT_WR)
                while source.recv(PIECE_BYTES):  # the sender sees nothing of it
                    pass
                raise ConnectionAbortedError
            case "delay" | "late":
                self.over.wait(DELAYS_S[fault.kind])

    def end(self, reset: bool = False) -> None:
        self.over.set()
        for end in (self.near, self.far):
            if reset:
                end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RD if reset else socket.SHUT_RDWR)
            if reset:
                end.close()

    def close(self) -> None:
        self.end()
        for thread in self.threads:
            thread.join()
        self.near.close()
        self.far.close()


class Proxy:
    """All connections to the given ports of `server`, for whoever reaches `stand_in`."""

    def __init__(self, stand_in: Host, server: Host, ports: range) -> None:
        self.server = server
        self.passing: list[Passing] = []
        self.struck: list[Fault] = []
        self._armed: Fault | None = None
        self._lock = threading.Lock()
        self._listeners = {
            port: within(stand_in, lambda port=port: socket.create_server((server.address, port)))
            for port in ports
        }
        for port, listener in self._listeners.items():
            threading.Thread(target=self._accept, args=(port, listener), daemon=True).start()

    def _accept(self, port: int, listener: socket.socket) -> None:
        while True:
            try:
                near, _ = listener.accept()
            except OSError:
                return
            far = within(self.server, lambda: socket.socket(socket.AF_INET, socket.SOCK_STREAM))
            try:
                far.connect((self.server.address, port))
            except OSError:  # nobody is there: the caller sees that, too
                near.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
                near.close()
                far.close()
                continue
            for end in (near, far):
                end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            one = Passing(self, near, far)
            with self._lock:
                self.passing.append(one)
            for thread in one.threads:
                thread.start()

    def arm(self, fault: Fault | None) -> None:
        """It strikes once; None: nothing does any more."""
        with self._lock:
            self._armed = fault

    def judge(self, forward: bool, data: bytes) -> tuple[bytes, Fault | None, bytes]:
        """What passes before the fault that strikes here, that fault, and what is left."""
        with self._lock:
            fault = self._armed
            if fault is None or fault.forward != forward:
                return data, None, b""
            if fault.at >= len(data):
                fault.at -= len(data)
                return data, None, b""
            self._armed = None
            self.struck.append(fault)
        rest = bytearray(data[fault.at :])
        if fault.kind == "flip":
            rest[0] ^= 1 << fault.bit
        return data[: fault.at], fault, bytes(rest)

    def close(self) -> None:
        self.arm(None)
        for listener in self._listeners.values():
            with contextlib.suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)
            listener.close()
        for one in self.passing:
            one.close()


class Wires:
    """Both ways between two hosts, by two other hosts of their LAN that do nothing else."""

    def __init__(self, one: Host, other: Host, stand_ins: tuple[Host, Host], ports: range) -> None:
        self.to_one = self._turn(other, one, stand_ins[0], ports)
        self.to_other = self._turn(one, other, stand_ins[1], ports)

    def _turn(self, caller: Host, server: Host, stand_in: Host, ports: range) -> Proxy:
        """What `caller` sends to the server's address goes to the stand-in, which has it too."""
        for name, value in (("arp_ignore", 1), ("arp_announce", 2)):  # and never says so
            setting = f"net.ipv4.conf.all.{name}={value}"
            _done(stand_in, "sysctl", "-qw", setting)
        _done(stand_in, "ip", "address", "add", f"{server.address}/32", "dev", "lo")
        _done(caller, "ip", "route", "add", f"{server.address}/32", "via", stand_in.address)
        _done(caller, "ip", "-6", "route", "add", "unreachable", f"{server.address6}/128")
        return Proxy(stand_in, server, ports)

    def close(self) -> None:
        self.to_one.close()
        self.to_other.close()


def _done(host: Host, *command: str) -> None:
    assert host.run(command).returncode == 0, command
