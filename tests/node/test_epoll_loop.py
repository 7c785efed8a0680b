"""The node's loop on real descriptors."""

from __future__ import annotations

import os
import socket
import threading
from typing import TYPE_CHECKING

import pytest

from hoplite_mp._node.io.epoll_loop import EpollLoop

if TYPE_CHECKING:
    from collections.abc import Iterator

PATIENCE_S = 30.0


@pytest.fixture
def loop() -> EpollLoop:
    return EpollLoop()


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    one, other = socket.socketpair()
    with one, other:
        yield one, other


def turn(loop: EpollLoop, seconds: float = 0.0) -> None:
    loop.call_due()
    loop.serve(loop.wait(seconds))


def test_watched_events_can_be_changed(
    loop: EpollLoop, pair: tuple[socket.socket, socket.socket]
) -> None:
    one, other = pair
    found: list[str] = []
    loop.watch(one.fileno(), lambda: found.append("read"))
    turn(loop)
    assert found == []
    other.send(b"x")
    turn(loop)
    assert found == ["read"]
    loop.watch(one.fileno(), lambda: found.append("room"), read=False, write=True)
    turn(loop)
    assert found == ["read", "room"]
    loop.watch(one.fileno(), lambda: found.append("end"), read=False)
    turn(loop)
    other.close()
    turn(loop)
    assert found == ["read", "room", "end"]
    loop.unwatch(one.fileno())
    turn(loop)
    assert len(found) == 3


def test_reused_descriptor_can_be_watched_again(loop: EpollLoop) -> None:
    found: list[int] = []
    for number in range(3):
        read, write = os.pipe()
        loop.watch(read, lambda number=number: found.append(number))  # type: ignore[misc]
        os.write(write, b"x")
        turn(loop)
        if number == 1:
            loop.unwatch(read)
        os.close(read)
        os.close(write)
        loop.unwatch(read)  # also after it was closed, also twice
    assert found == [0, 1, 2]


def test_descriptor_unwatched_during_a_turn_is_not_called(loop: EpollLoop) -> None:
    pipes = [os.pipe() for _ in range(2)]
    found: list[int] = []

    def ready(mine: int, others: int) -> None:
        found.append(mine)
        loop.unwatch(others)

    (one, _), (two, _) = pipes
    loop.watch(one, lambda: ready(one, two))
    loop.watch(two, lambda: ready(two, one))
    for _, write in pipes:
        os.write(write, b"x")
    turn(loop)
    assert len(found) == 1
    for read, write in pipes:
        os.close(read)
        os.close(write)


def test_timers_run_in_order_and_not_early(loop: EpollLoop) -> None:
    now = 100.0
    loop.now = lambda: now
    found: list[str] = []
    assert loop.due is None
    loop.call_later(2.0, lambda: found.append("c"))
    loop.call_later(1.0, lambda: found.append("a"))
    loop.call_later(1.0, lambda: found.append("b"))
    loop.call_later(0.0, lambda: loop.call_later(1.0, lambda: found.append("late")))
    assert loop.due == 100.0
    loop.call_due()
    assert (found, loop.due) == ([], 101.0)
    now = 101.0
    loop.call_due()
    assert found == ["a", "b", "late"]
    now = 102.0
    loop.call_due()
    assert found == ["a", "b", "late", "c"]


def test_work_runs_in_threads_and_completes_in_the_loop(loop: EpollLoop) -> None:
    gate, mine = threading.Event(), threading.get_ident()
    told: list[tuple[int, bool, bool]] = []

    def work(number: int) -> tuple[int, int]:
        gate.wait(PATIENCE_S)
        return number, threading.get_ident()

    for number in range(5):
        loop.run_in_thread(
            lambda number=number: work(number),  # type: ignore[misc]
            lambda found: told.append((found[0], found[1] != mine, threading.get_ident() == mine)),
        )
    turn(loop)
    assert told == []
    gate.set()
    while len(told) < 5:
        turn(loop, PATIENCE_S)
    assert sorted(told) == [(number, True, True) for number in range(5)]
