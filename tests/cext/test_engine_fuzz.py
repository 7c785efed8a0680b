"""Any frames in any order: the link ends or goes on, no byte lands outside a cell, others go on.

Under `make sanitize` the same runs with AddressSanitizer looking on.
"""

from __future__ import annotations

import contextlib
import random
import socket
import struct
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from hoplite_mp import _engine
from tests.support.engine_hosts import (
    CANCEL,
    DATA,
    HEADER,
    REFUSED,
    REQUEST,
    EngineHost,
    Frame,
    Peer,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

EXAMPLES, EXAMPLES_SOAK = 60, 1_200
KEYS = [(1, 0, 0, n) for n in range(4)]
NBYTES, MARGIN = 5000, 256
PATIENCE_S = 30.0
LINK_PULLS_MAX = 1 << 16

EDGES = [0, 1, 63, 64, 100, NBYTES - 1, NBYTES, NBYTES + 1, 1 << 20, (1 << 32) - 1, 1 << 63]
OFFSETS = st.one_of(st.sampled_from([*EDGES, (1 << 64) - 1]), st.integers(0, NBYTES))
LENGTHS = st.one_of(st.none(), st.sampled_from([*EDGES[:-1], (1 << 20) + 1]))
# Mostly the numbers of our own pulls: else nothing but strangers' frames is tried.
PULLS = st.one_of(
    st.integers(0, 3).map(lambda place: (1, place)),
    st.tuples(st.integers(0, 3), st.integers(0, LINK_PULLS_MAX - 1)),
)


@dataclass
class Step:
    """What happens next: a frame comes, is spoiled or cut, or the host does something."""

    kind: str
    type: int = DATA
    key: int = 0
    pull: tuple[int, int] = (1, 0)
    offset: int | None = 0  # None: where the pull stands
    end: int = NBYTES
    reason: int = 0
    length: int | None = None
    block: int = 0
    flip: int = 0


STEPS = st.builds(
    Step,
    st.sampled_from(["frame"] * 6 + ["spoiled", "cut", "noise", "pull", "close", "serve", "half"]),
    st.sampled_from([REQUEST, DATA, DATA, DATA, REFUSED, CANCEL, 0, 9]),
    st.integers(0, 3),
    PULLS,
    st.one_of(st.none(), st.none(), OFFSETS),
    st.one_of(st.just(NBYTES), OFFSETS),
    st.sampled_from([0, 0, 1, 2, 3, 4, 5, 255]),
    LENGTHS,
    st.sampled_from([0, 1, 64, 1000, NBYTES]),
    st.integers(0, 8 * HEADER.size - 1),
)


@dataclass
class Game:
    """One link with four cells that are pulled over it, and what the peer sends."""

    host: EngineHost
    checksum: bool
    cells: dict[int, int] = field(default_factory=dict)
    buffers: list[bytearray] = field(default_factory=list)
    served: set[int] = field(default_factory=set)  # whose cells lie in memory of bytes
    sent: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.peer = Peer(self.host, self.checksum)
        self.peer.socket.settimeout(PATIENCE_S)
        for n in range(len(KEYS)):
            self.pull(n)

    def pull(self, n: int) -> None:
        if n in self.served:
            with pytest.raises((KeyError, ValueError)):  # the link is lost, or read-only
                self.host.engine.pull(self.cells[n], self.peer.link)
            return
        if n in self.cells:
            with contextlib.suppress(KeyError):  # the link is lost
                self.host.engine.pull(self.cells[n], self.peer.link)
            return
        buffer = bytearray(b"\xa5" * (NBYTES + 2 * MARGIN))
        self.buffers.append(buffer)
        self.cells[n] = self.host.engine.cell(KEYS[n], buffer, MARGIN, NBYTES)
        self.pull(n)

    def close(self, n: int) -> None:
        if n in self.cells:
            self.served.discard(n)
            self.host.engine.close(self.cells.pop(n))

    def serve(self, n: int) -> None:
        if n not in self.cells:
            self.cells[n] = self.host.engine.cell(KEYS[n], bytes(NBYTES), filled=True)
            self.served.add(n)

    def play(self, step: Step) -> bool:
        """False: the peer cannot send any more."""
        if step.kind in ("pull", "close", "serve"):
            getattr(self, step.kind)(step.key)
            return True
        count, place = step.pull
        offset = self.sent.get(place, 0) if step.offset is None else step.offset
        frame = Frame(
            step.type,
            KEYS[place] if step.kind == "frame" and place < len(KEYS) else KEYS[step.key],
            (count * (place + 1) & 0xFFFF) << 16
            | place,  # as the engine numbers the first of each place
            offset,
            step.end,
            step.reason,
            b"x" * step.block if step.type == DATA else b"",
            length=step.length,
        )
        self.sent[place] = (offset + len(frame.block)) % (1 << 64)  # the field has 64 bits
        data = bytearray(frame.pack())
        if step.kind == "spoiled":
            data[step.flip // 8] ^= 1 << step.flip % 8
        elif step.kind == "cut":
            del data[step.flip :]
        elif step.kind == "noise":
            data[:] = struct.pack("<Q", step.offset or 7) * 8
        try:
            self.peer.socket.sendall(data)
            if step.kind == "half":
                self.peer.socket.shutdown(socket.SHUT_WR)
        except OSError:
            return False
        return True

    def end(self) -> None:
        """The link ends, every cell can be closed, and nothing was written beside one."""
        with contextlib.suppress(OSError):
            self.peer.socket.shutdown(socket.SHUT_RDWR)
        self.peer.close()
        self.host.wait_for(_engine.LINK_LOST, self.peer.link)
        for n in list(self.cells):
            cell = self.cells[n]
            assert self.host.engine.watermark(cell) <= NBYTES
            self.close(n)
            self.host.wait_for(_engine.CLOSED, cell)
        for buffer in self.buffers:
            assert buffer[:MARGIN] == buffer[-MARGIN:] == b"\xa5" * MARGIN


@pytest.fixture(scope="module")
def host() -> Iterator[EngineHost]:
    made = EngineHost(5, waiting_requests_max=8)
    yield made
    made.engine.stop()


def run(host: EngineHost, examples: int) -> None:
    @settings(
        max_examples=examples,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(st.lists(STEPS, min_size=1, max_size=12), st.booleans())
    @example([Step("close"), Step("serve"), Step("pull")], False)
    def play(steps: list[Step], checksum: bool) -> None:
        host.told.clear()
        game = Game(host, checksum)
        try:
            for step in steps:
                if not game.play(step):
                    break
        finally:
            game.end()

    play()
    still_works(host)


def still_works(host: EngineHost) -> None:
    """Another peer of the same engine gets what it asks for."""
    peer = Peer(host)
    key = (9, 9, 9, 9)
    cell = host.engine.cell(key, b"0123456789", filled=True)
    peer.send(Frame(REQUEST, key, 1, end=10))
    assert peer.receive().block == b"0123456789"
    host.close(cell)
    peer.close()


def test_any_frames(host: EngineHost) -> None:
    run(host, EXAMPLES)


@pytest.mark.soak
@pytest.mark.sanitized
@pytest.mark.timeout(600)
def test_any_frames_for_long(host: EngineHost) -> None:
    run(host, EXAMPLES_SOAK)


@pytest.mark.parametrize("seed", range(8))
def test_a_driven_link(host: EngineHost, seed: int) -> None:
    """The same bytes by the hands of Python threads: the reason is the same kind of reason."""
    chance = random.Random(seed)
    driver: Any = host.engine.drive(3)
    buffer = bytearray(b"\xa5" * (NBYTES + 2 * MARGIN))
    cell = host.engine.cell(KEYS[0], buffer, MARGIN, NBYTES)
    host.engine.pull(cell, driver.link)
    request = driver.next_frame(PATIENCE_S)
    pull = HEADER.unpack(request[0])[8]
    driver.sent()
    del request
    stream = b"".join(
        Frame(DATA, KEYS[0], pull, at, NBYTES, block=b"x" * 1000).pack() for at in (0, 1000, 2000)
    )
    spoiled = bytearray(stream)
    if seed:
        spoiled[chance.randrange(3) * (HEADER.size + 1000) + chance.randrange(HEADER.size)] ^= (
            1 << chance.randrange(8)
        )
    begun = time.monotonic()
    reason = "frame"
    try:
        at = 0
        while at < len(spoiled):
            place = driver.receive_into(PATIENCE_S)
            piece = spoiled[at : at + min(len(place), chance.randrange(1, 700))]
            place[: len(piece)] = piece
            del place
            driver.received(len(piece))
            at += len(piece)
        assert not seed or driver.receive_into(PATIENCE_S) is None, "a spoiled header was taken"
        place = driver.receive_into(PATIENCE_S)
        del place
        driver.received(0)
    except ConnectionError as error:
        assert seed, "nothing was spoiled"
        reason = str(error)
    assert "frame" in reason or "checksum" in reason
    assert time.monotonic() - begun < PATIENCE_S
    del driver
    host.wait(lambda: True)
    host.close(cell)
    assert buffer[:MARGIN] == buffer[-MARGIN:] == b"\xa5" * MARGIN
