"""What happens to queues and locks when processes are killed."""

from __future__ import annotations

import contextlib
import os
import queue
import random
import signal
from typing import TYPE_CHECKING

import pytest

import hoplite_mp
from hoplite_mp import Actor, ActorLostError, WorkerLostError
from tests.support.functions import Member
from tests.support.waiting import PATIENCE_S, eventually, waiters_are

if TYPE_CHECKING:
    from pathlib import Path

    from hoplite_mp import Cluster, Queue


@pytest.mark.parametrize("kind", [hoplite_mp.Lock, hoplite_mp.Semaphore])
def test_the_lock_of_a_dead_holder_is_released(c: Cluster, kind: type) -> None:
    lock = kind()
    member = c.actor(Member, lock)
    pid = member.pid().result()
    assert member.call("acquire").result(PATIENCE_S)
    assert not lock.acquire(timeout=0.01)
    waiting = c.submit(lock.acquire)
    waiters_are(lock, 1)
    os.kill(pid, signal.SIGKILL)
    assert waiting.result(PATIENCE_S)
    assert lock.locked()  # the worker has it now


def test_a_process_that_ends_by_itself_releases(c: Cluster) -> None:
    lock = hoplite_mp.Lock()
    member = c.actor(Member, lock)
    member.call("acquire").result(PATIENCE_S)
    del member
    assert lock.acquire(timeout=PATIENCE_S)


def test_a_dead_waiter_does_not_get_the_lock(c: Cluster) -> None:
    lock = hoplite_mp.Lock()
    lock.acquire()
    member = c.actor(Member, lock)
    pid = member.pid().result()
    lost = member.call("acquire")
    waiters_are(lock, 1)
    os.kill(pid, signal.SIGKILL)
    lock.release()  # perhaps before its death is known
    assert lock.acquire(timeout=PATIENCE_S)
    assert isinstance(lost.exception(PATIENCE_S), ActorLostError)


def test_all_permits_of_a_dead_process(c: Cluster) -> None:
    semaphore = hoplite_mp.Semaphore(3)
    member = c.actor(Member, semaphore)
    pid = member.pid().result()
    for _ in range(2):
        member.call("acquire").result(PATIENCE_S)
    semaphore.acquire()
    os.kill(pid, signal.SIGKILL)
    eventually(lambda: semaphore.get_value() == 2)


def test_a_getter_that_dies_takes_nothing_along(c: Cluster) -> None:
    q: Queue[int] = hoplite_mp.Queue()
    member = c.actor(Member, q)
    pid = member.pid().result()
    lost = member.call("get")
    waiters_are(q, 1)
    os.kill(pid, signal.SIGKILL)
    q.put(1)  # perhaps before its death is known
    assert q.get(timeout=PATIENCE_S) == 1
    assert isinstance(lost.exception(PATIENCE_S), ActorLostError)


def test_a_getter_that_stops_does_not_hold_up_others(c: Cluster) -> None:
    """It was woken, and does not come: the next items are for others, and when it is dead, this
    one is, too."""
    q: Queue[int] = hoplite_mp.Queue()
    member = c.actor(Member, q)
    pid = member.pid().result()
    member.call("get")
    waiters_are(q, 1)
    os.kill(pid, signal.SIGSTOP)
    q.put(1)
    q.put(2)
    assert q.get(timeout=PATIENCE_S) == 1
    with pytest.raises(queue.Empty):
        q.get(timeout=0.01)
    waiting = c.submit(q.get)
    waiters_are(q, 1)
    os.kill(pid, signal.SIGKILL)
    assert waiting.result(PATIENCE_S) == 2


def test_a_putter_that_dies_puts_nothing_more(c: Cluster) -> None:
    q: Queue[int] = hoplite_mp.Queue(1)
    q.put(1)
    member = c.actor(Member, q)
    pid = member.pid().result()
    member.call("put", 2)
    waiters_are(q, 1)
    os.kill(pid, signal.SIGKILL)
    eventually(lambda: q.actor.waiters().result() == 0)
    assert q.get() == 1
    assert q.empty()


def test_what_was_put_stays(c: Cluster) -> None:
    q: Queue[object] = hoplite_mp.Queue()
    member = c.actor(Member, q)
    pid = member.pid().result()
    for item in (1, b"large" * 100_000):
        member.call("put", item).result(PATIENCE_S)
    os.kill(pid, signal.SIGKILL)
    assert isinstance(member.pid().exception(PATIENCE_S), ActorLostError)
    assert [q.get(), q.get()] == [1, b"large" * 100_000]


def test_join_does_not_wait_for_the_dead(c: Cluster) -> None:
    q: Queue[int] = hoplite_mp.Queue()
    q.put(1)
    q.put(2)
    member = c.actor(Member, q)
    pid = member.pid().result()
    assert member.call("get").result(PATIENCE_S) == 1
    assert q.get() == 2
    joining = c.submit(q.join)
    waiters_are(q, 1)
    os.kill(pid, signal.SIGKILL)
    q.task_done()
    with pytest.raises(WorkerLostError, match="1 item of"):
        joining.result(PATIENCE_S)
    q.task_done()  # somebody else has done its work
    q.join()


def test_the_process_of_the_queue_dies(c: Cluster) -> None:
    q: Queue[int] = hoplite_mp.Queue()
    q.put(1)
    waiting = c.submit(q.join)
    waiters_are(q, 1)
    Actor.kill(q.actor)
    for call in (lambda: waiting.result(PATIENCE_S), q.get, lambda: q.put(2), q.qsize):
        with pytest.raises(ActorLostError):
            call()


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(n, marks=pytest.mark.soak) for n in range(1, 9))]
)
def test_kills_at_any_moment(c: Cluster, tmp_path: Path, seed: int) -> None:
    """Getters that write down what they get are killed all the time. No item comes twice, and each
    death loses one at most: that of a getter which had it and had not written it yet."""
    chance = random.Random(seed)
    count, deaths = 80, 3
    q: Queue[int] = hoplite_mp.Queue()
    log = tmp_path / "log"
    log.touch()
    members = []
    for _ in range(2):
        member = c.actor(Writer, q, str(log))
        members.append((member, member.pid().result(), member.write()))
    for number in range(count):
        q.put(number)
        if deaths and chance.random() < 0.05:
            deaths -= 1
            member, pid, _ = members.pop(0)
            os.kill(pid, signal.SIGKILL)
            member = c.actor(Writer, q, str(log))
            members.append((member, member.pid().result(), member.write()))
    for _ in members:
        q.put(-1)
    for _, _, writing in members:
        writing.result(PATIENCE_S)
    written = [int(line) for line in log.read_text().splitlines()]
    assert len(set(written)) == len(written)
    assert len(written) >= count - (3 - deaths)
    with contextlib.suppress(queue.Empty):
        assert q.get_nowait() == -1, "an item stayed behind"


class Writer:
    """Gets, and appends each number to a file in one write."""

    def __init__(self, q: Queue[int], path: str) -> None:
        self.q = q
        self.fd = os.open(path, os.O_WRONLY | os.O_APPEND)

    def pid(self) -> int:
        return os.getpid()

    def write(self) -> None:
        while (number := self.q.get()) >= 0:
            os.write(self.fd, b"%d\n" % number)
