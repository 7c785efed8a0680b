"""Descriptors that a process has no room for: whoever sent them is told."""

from __future__ import annotations

import contextlib
import os
import resource
import socket
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from hoplite_mp._client.channel import PACKET_BYTES_MAX, seqpacket_pair
from hoplite_mp._node.io.client_sockets import ClientSockets
from hoplite_mp._node.io.epoll_loop import EpollLoop
from hoplite_mp._protocol.local import (
    OpenPool,
    Reply,
    Request,
    Spawn,
    StartStandby,
)
from hoplite_mp._supervisor.main import Supervisor

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextlib.contextmanager
def no_more_files() -> Iterator[None]:
    free = os.dup(0)
    os.close(free)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


class Nobody:
    """Whom no request reaches."""

    def request(self, slot: int, request: Request, given: list[int]) -> None:
        pytest.fail("it was served")

    def line_ended(self, slot: int) -> None: ...
    def refuse_collective(self, ask: object, why: str) -> None: ...


def test_request_without_its_descriptors_is_refused() -> None:
    """Not served without them: a lock that workers are to inherit would be missing there."""
    theirs, ours = seqpacket_pair()
    loop = EpollLoop()
    lines = ClientSockets(loop)
    lines.serve(Nobody())
    lines.add(3, ours)
    with theirs, ours:
        packet = msgspec.msgpack.encode(Request(7, 0, OpenPool(1, 0, 0, [], False)))
        socket.send_fds(theirs, [packet], [0, 1])
        with no_more_files():
            loop.serve(loop.wait(0))
        reply = msgspec.msgpack.decode(theirs.recv(PACKET_BYTES_MAX), type=Reply)
        lines.forget(3)
    assert reply.number == 7
    assert "ulimit -n" in reply.error


class RefusingSupervisor(Supervisor):
    """Has no host, and starts nothing."""

    def __init__(self) -> None:
        self.refused: list[tuple[int, list[int], str]] = []

    def spawn(self, *about: Any) -> None:
        pytest.fail("it was started")

    def not_spawned(self, slot: int, fds: list[int], why: str) -> None:
        self.refused.append((slot, fds, why))


def test_worker_without_its_descriptors_is_not_started() -> None:
    supervisor = RefusingSupervisor()
    supervisor.take(Spawn(5, 0, 0, 0), [11, 12, 13], True)
    assert supervisor.refused == [(5, [11, 12, 13], "Too many open files")]
    supervisor.take(StartStandby(1, [], b"", b""), [], True)
