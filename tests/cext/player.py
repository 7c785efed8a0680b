"""A client that does everything at random on the compiled core: the one that is killed, or lives.

Every payload describes itself: the ids inside, a seed, and bytes that follow from the seed with
their checksum. What must hold whatever happens to others is asserted on the way.
"""

from __future__ import annotations

import mmap
import random
import struct
import time
import zlib
from typing import Any

from hoplite_mp import _serialize, _shm, _tasks
from hoplite_mp._common import ids
from tests.support.shm_host import KIND_TASK, POOL, STATE

BODY = struct.Struct("<QII")  # seed, bytes, checksum
SHARED = 64  # ids that players show each other, without any care
BLOCKS = 16  # big blocks that the node has leased to a player in advance
BIG_BYTES = 20_000
WORDS = 1 + 2 * (1 + BLOCKS)  # stop flag; per player: a span's offset, offsets of blocks
STORED = (STATE["SEALED"], STATE["SPILLING"], STATE["SPILLED"])


def payload(host_id: int, seed: int, size: int, inside: list[int]) -> bytes:
    body = (seed.to_bytes(8, "little") * (size // 8 + 1))[:size]
    head = _serialize.HEAD.pack(_serialize.BYTES, 0, 0, len(inside), 0, 0)
    refs = b"".join(ids.pack_id(host_id, oid) for oid in inside)
    return head + refs + BODY.pack(seed, size, zlib.crc32(body)) + body


def check_payload(mem: memoryview) -> tuple[int, list[int]]:
    """(seed, ids inside) of a payload that is whole."""
    kind, _, _, count, _, _ = _serialize.HEAD.unpack_from(mem)
    if kind == _serialize.ERROR:
        return 0, []
    assert kind == _serialize.BYTES, f"a payload of kind {kind}"
    at = _serialize.HEAD.size + _serialize.REF_BYTES * count
    seed, size, checksum = BODY.unpack_from(mem, at)
    body = mem[at + BODY.size : at + BODY.size + size]
    assert len(body) == size, "a payload that is cut off"
    assert zlib.crc32(body) == checksum, f"a payload with other bytes under seed {seed}"
    assert body[:8] == seed.to_bytes(8, "little")[: len(body)]
    return seed, [ids.unpack_id(i)[1] for i in _serialize.read_refs(mem)]


class Board:
    """Memory that all players share beside the host: a stop flag, ids, leases in advance."""

    def __init__(self) -> None:
        self.memory = mmap.mmap(-1, 8 * (WORDS + SHARED))
        self.words = memoryview(self.memory).cast("Q")

    def leases(self, player: int) -> range:
        return range(1 + player * (1 + BLOCKS), 1 + (player + 1) * (1 + BLOCKS))

    def shared(self, index: int) -> int:
        return WORDS + index % SHARED


class Player:
    def __init__(
        self, fds: tuple[int, int, int], slot: int, number: int, board: Board, seed: int
    ) -> None:
        self.random = random.Random(seed)
        self.board = board
        self.number = number
        self.client = _shm.Client(fds[0], fds[1], slot, fds[2])
        self.tasks = _tasks.Tasks(self.client)
        self.queue = self.tasks.open_queue(POOL)
        self.held: list[tuple[int, Any]] = []
        self.views: list[Any] = []
        self.blocks: list[int] = []
        self.lent: list[tuple[Any, Any]] = []  # blocks that others may read, or this one may write
        self.inner: dict[int, list[Any]] = {}
        self.pending: dict[int, tuple[Any, list[Any]]] = {}
        self.untaken: list[tuple[int, list[Any]]] = []
        self.spilled: set[int] = set()  # results with refs inside that were not readable when done
        self.steps = 0
        self.games = [
            (self.put, 20),
            (self.drop, 14),
            (self.share, 8),
            (self.fetch, 14),
            (self.delete, 3),
            (self.submit, 10),
            (self.cancel, 2),
            (self.work, 14),
            (self.drain, 4),
            (self.house, 6),
            (self.array, 3),
            (self.lend, 6),
            (self.wait, 1),
        ]

    def play(self) -> None:
        games, weights = zip(*self.games, strict=True)
        stop, choices = self.board.words, self.random.choices
        while not stop[0]:
            for game in choices(games, weights, k=20):
                game()
                self.steps += 1

    # -- objects -------------------------------------------------------------------------------

    def some_inside(self) -> list[Any]:
        if self.random.random() < 0.6:
            return []
        picked = self.random.sample(self.held, min(len(self.held), 2))
        return [self.hold(oid) for oid, _ in picked]

    def hold(self, oid: int) -> Any:
        hold = self.client.hold(oid)
        assert hold is not None, f"{oid:#x} is held, and gone"
        return hold

    def allocate(self, nbytes: int) -> int:
        """A small block, or 0."""
        at = self.client.allocate(nbytes)
        if not at:
            self.house()
            at = self.client.allocate(nbytes)
        if not at:
            leased = self.board.leases(self.number)[0]
            span = self.board.words[leased]
            if span:
                self.board.words[leased] = 0
                self.client.add_span(span)
                at = self.client.allocate(nbytes)
        return at

    def big(self) -> int:
        for at in self.board.leases(self.number)[1:]:
            if block := self.board.words[at]:
                self.board.words[at] = 0
                self.blocks.append(block)
        return self.blocks.pop() if self.blocks else 0

    def put(self) -> int:
        """The new id, or 0 for want of a block."""
        if len(self.held) > 60:
            self.drop()
        inside = self.some_inside()
        inner = [hold.oid for hold in inside]
        seed = self.random.getrandbits(64)
        size = self.random.choice((8, 40, 40, 300, 900, 2000, BIG_BYTES))
        data = payload(self.client.host_id, seed, size, inner)
        if len(data) <= _shm.INLINE_BYTES_MAX:
            oid = self.client.publish_inline(data, [], [], len(data), bool(inside))
        else:
            at = self.big() if size == BIG_BYTES else self.allocate(len(data))
            if not at:
                return 0
            self.client.write(at, data[:64], [data[64:]], [64])
            oid = self.client.publish(at, len(data), bool(inside))
        if inside:
            self.inner[oid] = inside
        self.held.append((oid, self.client.hold(oid, False)))
        return oid

    def array(self) -> None:
        """A block that is written in place and then becomes an object."""
        data = payload(self.client.host_id, self.random.getrandbits(64), 500, [])
        at = self.allocate(len(data))
        if not at:
            return
        block = self.client.block(at, len(data))
        memoryview(block)[:] = data
        if self.random.random() < 0.7:
            oid = self.client.publish(at, len(data), False)
            block.become(oid)
            self.held.append((oid, self.client.hold(oid, False)))
        self.views = [*self.views[-3:], block]

    def lend(self) -> None:
        """A block that others read for a while, and that is then written again in its place: who
        sees a payload sees all of it."""
        if len(self.lent) < 4:
            size = self.random.choice((500, BIG_BYTES))
            data = payload(self.client.host_id, self.random.getrandbits(64), size, [])
            at = self.big() if size == BIG_BYTES else self.allocate(len(data))
            if at:
                self.lent.append((self.client.block(at, len(data)), None))
            return
        block, hold = self.lent.pop(self.random.randrange(4))
        if hold is None:
            size = len(block) - len(payload(self.client.host_id, 0, 0, []))
            seed = self.random.getrandbits(64)
            memoryview(block)[:] = payload(self.client.host_id, seed, size, [])
            hold = block.lend()
            self.board.words[self.board.shared(self.random.getrandbits(16))] = hold.oid
            self.lent.append((block, hold))
        elif block.recall():
            assert not block.published or self.client.state(hold.oid) == STATE["DELETED"]
            if not block.published:
                self.lent.append((block, None))
        elif self.random.random() < 0.9:  # else it goes while somebody reads it
            self.lent.append((block, hold))

    def drop(self) -> None:
        if self.held:
            self.held.pop(self.random.randrange(len(self.held)))
        if self.views and self.random.random() < 0.3:
            self.views.pop()

    def share(self) -> None:
        if self.held:
            oid, _ = self.random.choice(self.held)
            self.board.words[self.board.shared(self.random.getrandbits(16))] = oid

    def fetch(self) -> None:
        """An id that another has shown, at any time: it may be gone, or used again."""
        oid = self.board.words[self.board.shared(self.random.getrandbits(16))]
        hold = self.client.hold(oid) if oid else None
        if hold is not None:
            self.read(oid)
            self.held.append((oid, hold))

    def read(self, oid: int) -> list[Any] | None:
        """Holds on what is inside an object that this player holds; None: not readable."""
        got = self.client.view(oid)
        if isinstance(got, int):
            return None
        _, inside = check_payload(memoryview(got))
        holds = [self.client.hold(i) for i in inside]
        if None in holds:  # inline bytes are a copy: only a deletion lets go of what is inside
            header = self.client.inspect(oid)
            gone = [self.client.inspect(i) for i in inside]
            assert isinstance(got, bytes), f"pinned, and its inside has gone: {header}, {gone}"
            assert STATE[header["state"]] not in STORED, f"its inside has gone: {header}, {gone}"
            return None
        if self.random.random() < 0.2:
            self.views = [*self.views[-3:], got]
        return holds

    def delete(self) -> None:
        if self.held and self.random.random() < 0.5:
            oid, _ = self.random.choice(self.held)
            self.client.delete(oid)

    def house(self) -> None:
        """Collects what nobody holds, and lets go of what was inside."""
        if self.client.news():
            for oid in self.client.collect():
                self.inner.pop(oid, None)
        self.untaken = [item for item in self.untaken if not self.tasks.taken(item[0])]

    # -- tasks ---------------------------------------------------------------------------------

    def submit(self) -> None:
        if len(self.pending) > 30:
            return
        oid = self.client.new(KIND_TASK, STATE["WAITING"], 0, POOL)
        hold = self.client.hold(oid, False)
        arguments = self.random.sample(self.held, min(len(self.held), 1))
        holds = [self.hold(argument) for argument, _ in arguments]
        self.pending[oid] = (hold, holds)
        packed = b"".join(item.oid.to_bytes(8, "little") for item in holds)
        retries = self.random.randrange(4)
        self.tasks.submit(oid, 0, packed, 0, retries, 0, 0, b"game", self.queue, True)

    def cancel(self) -> None:
        if self.pending:
            oid = self.random.choice(list(self.pending))
            if self.random.random() < 0.3:
                self.client.delete(oid)
            else:
                self.tasks.cancel(oid, self.random.random() < 0.5)

    def drain(self) -> None:
        for oid in [*self.tasks.drain(), *self.spilled]:
            if oid in self.pending and self.tasks.done(oid):
                self.finished(oid)

    def finished(self, oid: int) -> None:
        self.spilled.discard(oid)
        if self.client.flags(oid)[0] and self.client.state(oid) in STORED:
            inside = self.read(oid)
            if inside is None and self.client.state(oid) in STORED:
                self.spilled.add(oid)  # what is inside can be taken over when its bytes are back
                return
            if inside is not None:
                self.inner[oid] = inside
            self.tasks.set_taken(oid)
        hold, _ = self.pending.pop(oid)
        self.held.append((oid, hold))

    def work(self) -> None:
        oid = self.tasks.next(POOL, 0)
        if oid:
            self.run(oid)

    def run(self, oid: int) -> None:
        before = self.tasks.begin(oid)
        _, _, packed, _, _, _ = self.tasks.task(oid)
        inside = []
        for at in range(0, len(packed), 8):
            argument = int.from_bytes(packed[at : at + 8], "little")
            hold = self.client.hold(argument)  # the submitter may be dead, and what it held gone
            if hold is not None:
                self.read(argument)
                inside.append(hold)
        if self.random.random() < 0.2:
            made = self.put()
            if made:
                inside.append(self.hold(made))
        size = self.random.choice((8, 8, 600))
        data = payload(self.client.host_id, oid, size, [hold.oid for hold in inside])
        at, refs = 0, bool(inside)
        if len(data) > _shm.INLINE_BYTES_MAX:
            at = self.allocate(len(data))
        if at:
            self.client.write(at, data, [], [])
            self.client.bind(oid, at, len(data), refs)
        else:
            data = payload(self.client.host_id, oid, 8, [hold.oid for hold in inside])
            self.client.bind_inline(oid, data, [], [], len(data), refs)
        if self.tasks.finish(oid, False):
            if refs:
                self.untaken.append((oid, inside))
        else:
            if at:
                self.client.give_back(at, oid)
            self.tasks.settle(oid)
        self.tasks.end(before, False)

    def wait(self) -> None:
        oid = self.board.words[self.board.shared(self.random.getrandbits(16))]
        if oid:
            self.tasks.wait([oid], 1, time.monotonic_ns() + 20_000, False)

    # -- the end -------------------------------------------------------------------------------

    def drop_all(self) -> None:
        """Everything that this player holds, and its part of what is inside."""
        deadline = time.monotonic() + 20
        while self.pending:
            self.work()
            self.drain()
            assert time.monotonic() < deadline, f"tasks are lost: {self.lost()}"
        self.held.clear()
        self.views.clear()
        self.lent.clear()
        self.house()

    def lost(self) -> str:
        return "; ".join(str(self.client.inspect(oid)) for oid in list(self.pending)[:3])

    def give_spans(self) -> list[int]:
        self.house()
        return self.client.take_empty_spans()
