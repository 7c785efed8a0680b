"""An Engine whose events are awaited, and a peer that the test plays frame by frame."""

from __future__ import annotations

import dataclasses
import select
import socket
import struct
import time
from typing import TYPE_CHECKING, Any

import numpy as np

from hoplite_mp import _engine

if TYPE_CHECKING:
    from collections.abc import Callable

WAIT_S = 30.0
REQUEST, DATA, REFUSED, CANCEL = 1, 2, 3, 4
CLOSED, SIZE, FULL, CANCELLED = 1, 2, 3, 4
HEADER = struct.Struct("<HBBIQIIIIQQQII")
"""cext/engine_frames.h, drawn there."""

Key = tuple[int, int, int, int]


class EngineHost:
    """An Engine, and all that it has ever told."""

    def __init__(self, incarnation: int = 1, **options: int) -> None:
        self.engine = _engine.Engine(incarnation, **options)
        self.told: list[tuple[Any, ...]] = []

    def wait(self, until: Callable[[], bool]) -> None:
        """Until that holds; it is asked again after each event."""
        end = time.monotonic() + WAIT_S
        while not until():
            assert time.monotonic() < end, f"not within {WAIT_S} s; told: {self.told[-10:]}"
            select.select([self.engine.fileno()], [], [], 0.02)
            self.told += self.engine.events()

    def wait_for(self, *event: Any) -> tuple[Any, ...]:
        """Until an event that begins like this has come; returns it."""

        def found() -> list[tuple[Any, ...]]:
            return [one for one in self.told if one[: len(event)] == event]

        self.wait(lambda: bool(found()))
        return found()[0]

    def filled(self, cell: int) -> None:
        self.wait_for(_engine.FILLED, cell)

    def close(self, cell: int) -> None:
        self.engine.close(cell)
        self.wait_for(_engine.CLOSED, cell)

    def connect(self, end: socket.socket, peer: int = 0, checksum: bool = True) -> int:
        """Takes the socket over, and closes it here."""
        with end:
            return self.engine.connect(end.fileno(), peer, checksum)


def join(
    one: EngineHost, other: EngineHost, checksum: bool = True, tcp: bool = False
) -> tuple[int, int]:
    """The numbers of a new link between them."""
    if tcp:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            ends = socket.create_connection(listener.getsockname()), listener.accept()[0]
    else:
        ends = socket.socketpair()
    return one.connect(ends[0], checksum=checksum), other.connect(ends[1], checksum=checksum)


@dataclasses.dataclass
class Frame:
    """A header in words; `pack` computes both checksums unless they are given."""

    type: int
    key: Key = (0, 0, 0, 0)
    pull: int = 1
    offset: int = 0
    end: int = 0
    reason: int = 0
    block: bytes = b""
    incarnation: int = 77
    magic: int = 0x4801
    length: int | None = None
    block_crc: int | None = None

    def pack(self) -> bytes:
        operation, epoch, stripe, part = self.key
        length = len(self.block) if self.length is None else self.length
        crc = _engine.crc32c(self.block) if self.block_crc is None else self.block_crc
        words = (self.magic, self.type, self.reason, length, operation, epoch, stripe, part)
        words += (self.pull, self.incarnation, self.offset, self.end, crc)
        header = HEADER.pack(*words, 0)[:-4]
        return header + struct.pack("<I", _engine.crc32c(header)) + self.block


class Peer:
    """The other end of a link, written and read byte by byte."""

    def __init__(self, host: EngineHost, checksum: bool = True) -> None:
        self.socket, theirs = socket.socketpair()
        self.socket.settimeout(WAIT_S)
        self.link = host.connect(theirs, checksum=checksum)

    def send(self, frame: Frame) -> None:
        self.socket.sendall(frame.pack())

    def receive_bytes(self, nbytes: int) -> bytes:
        """So many, or fewer if the host has ended the link."""
        found = bytearray()
        while len(found) < nbytes and (got := self.socket.recv(nbytes - len(found))):
            found += got
        return bytes(found)

    def receive(self) -> Frame:
        """The next frame with its block."""
        words = HEADER.unpack(self.receive_bytes(HEADER.size))
        block = self.receive_bytes(words[3])
        return Frame(
            magic=words[0], type=words[1], reason=words[2], length=words[3], key=words[4:8],
            pull=words[8], incarnation=words[9], offset=words[10], end=words[11],
            block_crc=words[12], block=block,
        )  # fmt: skip

    def close(self) -> None:
        self.socket.close()


def random_bytes(nbytes: int, seed: int = 0) -> bytes:
    return np.random.default_rng(seed).bytes(nbytes)
