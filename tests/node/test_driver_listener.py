"""Drivers that have proved themselves at the listener: each gets a slot and what belongs to it, or
why there is none."""

from __future__ import annotations

import os
import socket
from typing import TYPE_CHECKING, Any, cast

import msgspec
import pytest

from hoplite_mp._node.io.driver_listener import DriverListener
from hoplite_mp._protocol.greetings import Introduction
from hoplite_mp._protocol.local import Attached, AttachRefused
from hoplite_mp._transport.conversation import Admission
from hoplite_mp._transport.stream import TcpStream
from hoplite_mp.config import Config
from tests.support.node_harness import start_message
from tests.support.node_ports import ManualLoop

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from hoplite_mp._node.ports import AttachedDrivers

FULL = "every process slot of the host is in use"


class Drivers:
    """Has places, or a reason."""

    def __init__(self, reason: str = "") -> None:
        self.reason = reason
        self.by_slot: dict[int, Callable[[], None]] = {}
        self.left: list[int] = []

    def register(self) -> tuple[int, int, int, str]:
        return (-1, 0, 0, self.reason) if self.reason else (7, 3, 11, "")

    def unregister(self, slot: int) -> None:
        raise AssertionError("it was told of its slot")

    def attached(self, slot: int, name: int, pid: int, line: Any, output: Any, close: Any) -> None:
        assert (name, pid) == (11, os.getpid())
        self.line, self.output = line, output
        self.by_slot[slot] = close

    def detached(self, slot: int) -> None:
        self.left.append(slot)
        self.by_slot[slot]()
        self.line.close()
        self.output.close()


class Meeting:
    """A listener that a driver has just come to."""

    def __init__(self) -> None:
        self.loop = ManualLoop()
        self.files = [os.memfd_create(name) for name in ("control", "store", "event")]
        config = Config(small_object_bytes_max=4096, span_bytes=1 << 20)
        start = start_message(self.files, config, memory_bytes=1 << 30)
        self.listener = DriverListener(self.loop, start, cast("Any", None))
        self.life, self.theirs = socket.socketpair()
        self.life.setblocking(False)

    def let_in(self, drivers: Drivers) -> None:
        admission = Admission(TcpStream(self.life), "driver", b"", Introduction(1, {}), "10.0.0.9")
        self.listener._admit(cast("AttachedDrivers", drivers), admission)

    def told(self) -> tuple[Attached | AttachRefused, list[int]]:
        data, given, _, _ = socket.recv_fds(self.theirs, 1 << 12, 8)
        return msgspec.msgpack.decode(data, type=Attached | AttachRefused), given


@pytest.fixture
def meeting() -> Iterator[Meeting]:
    made = Meeting()
    yield made
    made.theirs.close()
    for fd in made.files:
        os.close(fd)


def test_attached_driver_gets_a_slot_and_five_descriptors(meeting: Meeting) -> None:
    drivers = Drivers()
    meeting.let_in(drivers)
    told, given = meeting.told()
    assert told == Attached(7, 3, 1 << 30, 4096, 1 << 20, 11)
    assert [os.fstat(fd).st_ino for fd in given[:3]] == [
        os.fstat(fd).st_ino for fd in meeting.files
    ]
    os.write(given[3], b"ask")
    os.write(given[4], b"nothing")
    assert drivers.line.recv(10) == b"ask"
    for fd in given:
        os.close(fd)
    assert drivers.line.recv(10) == b""
    life, _ = meeting.loop.watched
    meeting.loop.watched[life]()
    assert not drivers.left  # nothing has come: it still reads
    meeting.theirs.close()
    meeting.loop.watched[life]()
    assert drivers.left == [7]
    assert not meeting.loop.watched
    assert meeting.life.fileno() == -1


def test_driver_without_a_free_slot_gets_the_reason(meeting: Meeting) -> None:
    drivers = Drivers(FULL)
    meeting.let_in(drivers)
    assert meeting.told() == (AttachRefused(FULL), [])
    assert meeting.theirs.recv(1) == b""
    assert not drivers.by_slot
    assert not meeting.loop.watched
