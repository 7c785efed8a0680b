"""Collective calls of a Group that the engines of several nodes make, stepped in any order."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from hoplite_mp import _engine, _serialize, _tasks
from hoplite_mp._common.reduction import DTYPES, OPS
from hoplite_mp._group.multi_host import NONE
from tests.support.shm_host import ShmHost

if TYPE_CHECKING:
    import random

GROUP, BOARD = 7, 3
TAKEN, PART, FIRST, SEND = (
    _engine.COLL_TAKEN, _engine.COLL_PART, _engine.COLL_FIRST, _engine.COLL_SEND,
)  # fmt: skip
BARRIER, ALLREDUCE, REDUCE, REDUCE_SCATTER, BROADCAST, GATHER, ALLGATHER, SPLIT = range(8)


class EngineNode:
    """One node: its engine, its board, and what it was told."""

    def __init__(self, number: int, size: int) -> None:
        self.number, self.size = number, size
        self.host = ShmHost(host_id=100 + number)
        self.engine = _engine.Engine(1 + number, threaded=False)
        board = _tasks.Board(self.host.node_tasks, BOARD)
        board.reset(size, GROUP)
        self.board = _tasks.CollectiveBoard(self.host.node_tasks, BOARD)
        self.engine.coll_add(GROUP, size, number, self.host.node, BOARD)
        self.out: list[tuple[int, int, int, int, int, int, bytes]] = []  # frames not carried yet
        self.told: list[tuple[Any, ...]] = []

    def step(self) -> None:
        self.engine.step()
        for event in self.engine.events():
            if event[0] == SEND:
                self.out.append((self.number, *event[2:]))
            else:
                self.told.append(event)

    def give(self, rank: int, call: int, kind: int, array: Any = None, op: str = "sum",
             root: int = 0) -> None:  # fmt: skip
        head, offset, elements, about = b"", 0, None, (kind, NONE, NONE, root)
        if array is not None:
            encoded = _serialize.encode(array)
            head = encoded.head
            if encoded.buffers:
                offset, elements = encoded.offsets[0], encoded.buffers[0]
            if kind in (ALLREDUCE, REDUCE, REDUCE_SCATTER):
                about = kind, OPS.index(op), DTYPES.index(array.dtype.name), root
        assert self.board.give(rank, self.size, call, about, head, offset, elements)
        self.engine.coll_look()
        self.step()

    def close(self) -> None:
        self.engine.stop()
        self.host.close()


class EngineWorld:
    """Nodes with one rank each, unless `places` says where ranks are."""

    def __init__(self, count: int, places: list[int] | None = None) -> None:
        self.places = list(range(count)) if places is None else places
        self.nodes = [EngineNode(number, len(self.places)) for number in range(count)]

    def open(self, version: int, call: int, gone: set[int] = frozenset()) -> None:  # type: ignore[assignment]
        for node in self.nodes:
            if node.number not in gone:
                places = [None if at in gone else at for at in self.places]
                node.engine.coll_open(GROUP, version, call, places)
                node.step()

    def carry(self, frame: tuple[int, int, int, int, int, int, bytes]) -> None:
        sender, to, *about = frame
        self.nodes[to].engine.coll_frame(GROUP, sender, *about)
        self.nodes[to].step()

    def carry_all(self) -> None:
        while any(node.out for node in self.nodes):
            for node in self.nodes:
                frames, node.out = node.out, []
                for frame in frames:
                    self.carry(frame)

    def close(self) -> None:
        for node in self.nodes:
            node.close()


def record_of(node: EngineNode) -> tuple[Any, ...]:
    return _tasks.read_record(node.board.record())


class EngineRun:
    """All that can happen between nodes, any of it next: members call, frames arrive, are lost with
    a link and sent again, nodes die, Python hears of it, freezes and decides."""

    def __init__(self, count: int, calls: int, chance: random.Random) -> None:
        self.world = EngineWorld(count)
        self.chance, self.calls = chance, calls
        self.alive = set(range(count))  # nodes
        self.members = set(range(count))  # those whose member lives, and has not left
        self.version, self.shown = 1, dict.fromkeys(range(count), 1)  # that each node has heard of
        self.frozen: set[int] = set()  # for the version that they have heard of
        self.decided = dict.fromkeys(range(count), 0)  # calls over at each node, by its Python
        self.owned = dict.fromkeys(range(count), True)
        self.asked: dict[int, int] = {}  # node -> call that its member has given to Python
        self.seen: dict[int, dict[int, tuple[int, ...]]] = {}  # call -> rank -> contributors
        self.next = dict.fromkeys(range(count), 0)  # each member's next call
        self.given = dict.fromkeys(range(count), -1)
        self.world.open(1, 0)

    def hear(self, node: EngineNode) -> None:
        """What the engine has told the node's Python."""
        for event in node.told:
            if event[0] == TAKEN and self.owned[node.number]:
                self.owned[node.number] = False
                assert event[2] >= self.decided[node.number]
                self.decided[node.number] = event[2]
            elif event[0] == PART and not self.owned[node.number]:
                self.asked[node.number] = max(event[2], self.asked.get(node.number, 0))
        node.told = []

    def read(self, number: int) -> None:
        """A member that waits sees the commit."""
        node, call = self.world.nodes[number], self.next[number]
        if node.board.done() == call + 1:
            _, ranks, *_, found = record_of(node)
            contributors = tuple(rank for rank in range(64) if ranks >> rank & 1)
            total = _serialize.decode(memoryview(next(iter(found.values()))), make_ref=lambda i: i)
            assert total[0] == sum(10 ** (rank % 10) for rank in contributors) + call * len(
                contributors
            )
            self.over(number, call, contributors)

    def over(self, number: int, call: int, contributors: tuple[int, ...]) -> None:
        self.seen.setdefault(call, {})[number] = contributors
        assert len(set(self.seen[call].values())) == 1, f"call {call}: {self.seen[call]}"
        self.next[number] = call + 1

    def choices(self) -> list[Any]:
        found: list[Any] = []
        for number in sorted(self.alive):
            node, call = self.world.nodes[number], self.next[number]
            if number in self.members and self.given[number] < call < self.calls:
                found.append(("call", number))
            found += [("frame", number, i) for i in range(len(node.out))]
            if node.out:
                found.append(("twice", number))
            if self.shown[number] != self.version:
                found.append(("hear", number))
        if len(self.members) > 1 and self.chance.random() < 0.05:
            found.append(("die", self.chance.choice(sorted(self.members))))
            found.append(("leave", self.chance.choice(sorted(self.members))))
        if all(self.shown[n] == self.version and not self.owned[n] for n in self.alive):
            found.append(("decide",))
        return found

    def do(self, what: tuple[Any, ...]) -> None:
        kind, *about = what
        nodes = self.world.nodes
        if kind == "call":
            (number,) = about
            call = self.next[number]
            self.given[number] = call
            if self.chance.random() < 0.1:  # what no small call carries
                if self.owned[number]:
                    nodes[number].engine.coll_yield(GROUP, call)
                    nodes[number].step()
                self.asked[number] = call
            else:
                value = np.array([10 ** (number % 10) + call])
                nodes[number].give(number, call, ALLREDUCE, value)
        elif kind == "frame":
            number, i = about
            frame = nodes[number].out.pop(i)
            if frame[1] in self.alive:
                self.world.carry(frame)
        elif kind == "twice":  # a frame overtakes all others, or comes twice
            (number,) = about
            frame = self.chance.choice(nodes[number].out)
            if frame[1] in self.alive:
                self.world.carry(frame)
        elif kind == "hear":
            (number,) = about
            self.shown[number] = self.version
            nodes[number].engine.coll_close(GROUP)
            nodes[number].step()
        elif kind == "die":
            (number,) = about
            self.alive.discard(number)
            self.members.discard(number)
            self.version += 1
            for seen in self.seen.values():  # what it alone has seen nobody can know
                seen.pop(number, None)
            kept = [frame for frame in nodes[number].out if self.chance.random() < 0.5]
            nodes[number].out = []
            for frame in kept:  # these were on their way
                if frame[1] in self.alive:
                    nodes[frame[1]].out.append(frame)
        elif kind == "leave":  # its node lives, and must be heard
            (number,) = about
            self.members.discard(number)
            self.version += 1
        elif kind == "decide":
            self.decide()
        for number in sorted(self.alive):
            self.hear(nodes[number])
            if number in self.members:
                self.read(number)

    def decide(self) -> None:
        """The leading node knows what all know. A call that one has seen is passed on; else it is
        decided when all living members have called, and the next version opens."""
        most = max(self.decided[n] for n in self.alive)
        behind = [n for n in sorted(self.members) if self.decided[n] < most]
        if behind:
            assert all(self.decided[n] == most - 1 for n in behind), self.decided
            (contributors,) = (
                set(self.seen[most - 1].values())
                if self.seen.get(most - 1)
                else {self.known(most - 1)}
            )
            for number in behind:
                self.decided[number] = most
                if number in self.members and self.next[number] == most - 1:
                    self.over(number, most - 1, contributors)
        call, ranks = most, sorted(self.members)
        if call == self.calls or any(self.asked.get(n, -1) != call for n in ranks):
            return
        for number in ranks:
            self.over(number, call, tuple(ranks))
        for number in sorted(self.alive):
            self.decided[number] = call + 1
        places = [n if n in self.members else None for n in range(len(self.world.nodes))]
        for number in ranks:
            self.owned[number] = True
            node = self.world.nodes[number]
            node.engine.coll_open(GROUP, self.version, call + 1, places)
            node.step()

    def known(self, call: int) -> tuple[int, ...]:
        for number in self.alive:
            if not self.world.nodes[number].board.done():
                continue
            done, ranks, *_ = record_of(self.world.nodes[number])
            if done == call:
                return tuple(rank for rank in range(64) if ranks >> rank & 1)
        raise AssertionError(f"nobody knows call {call}")

    def play(self) -> None:
        for _ in range(4000):
            if all(self.next[n] == self.calls for n in self.members):
                return
            choices = self.choices()
            assert choices, f"nobody can go on: {self.next} {self.decided} {self.owned}"
            self.do(self.chance.choice(choices))
        raise AssertionError(f"no end: {self.next} {self.decided} {self.owned}")
