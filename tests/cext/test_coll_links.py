"""Small calls over real links and doorbells: engines with threads; and links that others drive."""

from __future__ import annotations

import os
import socket
import time
from typing import TYPE_CHECKING, Any

import pytest

from hoplite_mp import _engine, _tasks
from tests.support.shm_host import ShmHost

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

GROUP, BOARD, WAIT_S = 9, 1, 30.0
ALLGATHER, NONE = 6, 255


class Node:
    """An engine with a thread, a board, and the doorbell of the one member."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.host = ShmHost(host_id=200 + number)
        self.engine = _engine.Engine(1 + number)
        board = _tasks.Board(self.host.node_tasks, BOARD)
        board.reset(2, GROUP)
        self.board = _tasks.CollectiveBoard(self.host.node_tasks, BOARD)
        self.engine.coll_add(GROUP, 2, number, self.host.node, BOARD)
        self.bell = os.eventfd(0, os.EFD_NONBLOCK)
        self.engine.coll_doorbell(GROUP, number, os.dup(self.bell))
        self.told: list[tuple[Any, ...]] = []

    def give(self, call: int, data: bytes) -> None:
        about = ALLGATHER, NONE, NONE, 0
        assert self.board.give(self.number, 2, call, about, data, 0, None)
        os.eventfd_write(self.bell, 1)

    def hears(self) -> None:
        self.told += self.engine.events()

    def close(self) -> None:
        self.engine.stop()
        os.close(self.bell)
        self.host.close()


@pytest.fixture
def nodes() -> Iterator[list[Node]]:
    made = [Node(0), Node(1)]
    yield made
    for node in made:
        node.close()


def until(nodes: list[Node], holds: Callable[[], bool]) -> None:
    """Waits, and carries as a message what has no link."""
    end = time.monotonic() + WAIT_S
    while not holds():
        assert time.monotonic() < end, [node.told for node in nodes]
        for node in nodes:
            node.hears()
            for event in [one for one in node.told if one[0] == _engine.COLL_SEND]:
                node.told.remove(event)
                _, _, to, *frame = event
                nodes[to].engine.coll_frame(GROUP, node.number, *frame)
        time.sleep(0.0005)


def link(nodes: list[Node], checksum: bool = True) -> list[int]:
    ends = socket.socketpair()
    found = [
        node.engine.connect(end.fileno(), 1 - node.number, checksum)
        for node, end in zip(nodes, ends, strict=True)
    ]
    for end in ends:
        end.close()
    return found


def all_have(nodes: list[Node], call: int) -> Callable[[], bool]:
    return lambda: all(node.board.done() == call + 1 for node in nodes)


@pytest.mark.parametrize("checksum", [True, False])
def test_over_a_link(nodes: list[Node], checksum: bool) -> None:
    link(nodes, checksum)
    for node in nodes:
        node.engine.coll_open(GROUP, 1, 0, [0, 1])
    for call in range(200):
        parts = [bytes([call % 256, node.number]) * (1 + call * 37 % 15000) for node in nodes]
        for node, part in zip(nodes, parts, strict=True):
            node.give(call, part)
        until(nodes, all_have(nodes, call))
        for node in nodes:
            assert _tasks.read_record(node.board.record())[-1] == dict(enumerate(parts))
    for node in nodes:
        node.hears()
        # A part that came before the group was open is told besides, and of no use then.
        told = [event[0] for event in node.told if event[0] != _engine.COLL_PART]
        assert told == [_engine.COLL_FIRST]


def test_a_link_that_is_lost_in_the_middle(nodes: list[Node]) -> None:
    for node in nodes:
        node.engine.coll_open(GROUP, 1, 0, [0, 1])
    for call in range(60):
        links = link(nodes) if call % 3 else []
        for node in nodes:
            node.give(call, bytes([node.number]) * 9000)
        if links:
            nodes[call % 2].engine.disconnect(links[call % 2])
        until(nodes, all_have(nodes, call))
        if links:
            until(nodes, lambda: all(_engine.LINK_LOST in kinds(node) for node in nodes))
        for node in nodes:
            node.told = []


def test_a_bell_that_epoll_refuses(nodes: list[Node], tmp_path: Path) -> None:
    """As when the user has as many watches as the system allows: no call waits for ever."""
    link(nodes)
    refused = os.open(tmp_path / "no bell", os.O_RDWR | os.O_CREAT)  # it cannot watch plain files
    nodes[0].engine.coll_doorbell(GROUP, 0, refused)
    for node in nodes:
        node.engine.coll_open(GROUP, 1, 0, [0, 1])
    for call in range(20):
        for node in nodes:
            node.give(call, b"x" * 100)
        until(nodes, all_have(nodes, call))


def kinds(node: Node) -> list[int]:
    return [event[0] for event in node.told]


def test_engine_thread_and_a_driven_link() -> None:
    """As over TLS: frames, with and without parts, go through a Driver."""
    first, second = Node(0), Node(1)
    try:
        drivers = [first.engine.drive(1), second.engine.drive(0)]
        for node in (first, second):
            node.engine.coll_open(GROUP, 1, 0, [0, 1])
        first.give(0, b"x" * 10_000)
        second.engine.coll_yield(GROUP, 0)
        for sender, receiver in (drivers, drivers[::-1]):
            frame = None
            end = time.monotonic() + WAIT_S
            while frame is None and time.monotonic() < end:
                frame = sender.next_frame(0.1)
            assert frame is not None
            left = memoryview(b"".join(frame))
            sender.sent()
            while left:
                place = receiver.receive_into(1.0)
                assert place is not None
                count = min(len(place), len(left))
                place[:count] = left[:count]
                receiver.received(count)
                left = left[count:]

        def taken() -> bool:  # and the part that nobody has folded, which is told after that
            for node in (first, second):
                node.hears()
            return _engine.COLL_PART in kinds(first) and all(
                _engine.COLL_TAKEN in kinds(node) for node in (first, second)
            )

        until([first, second], taken)
        part = next(event for event in first.told if event[0] == _engine.COLL_PART)
        assert part[3][16:] == b"x" * 10_000
    finally:
        first.close()
        second.close()
