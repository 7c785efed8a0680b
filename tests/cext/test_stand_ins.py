"""Stand-ins in shared memory: who may begin a task, and which word wakes who may not.

A play stands in the place of the kernel's futexes, so no test depends on time: whoever would sleep
runs what another process does at that moment, and each wake-up is written down.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from hoplite_mp import _tasks
from tests.support.shm_host import POOL, Party, ShmHost

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

SECOND = 10**9
RETIRES = 1
POOL_CLOSING = 2


class Play:
    """The words on which processes sleep, and those that are woken."""

    def __init__(self) -> None:
        self.slept: list[int] = []
        self.woken: list[int] = []
        self.meanwhile: Callable[[], object] = lambda: None
        _tasks.play(self.sleep, self.woken.append)

    def sleep(self, word: int, ns: int) -> None:
        self.slept.append(word)
        self.meanwhile()


@pytest.fixture(name="play")
def fixture_play() -> Iterator[Play]:
    yield Play()
    _tasks.play(None, None)


class Pool:
    """Two workers of a pool's own, and two stand-ins."""

    def __init__(self, host: ShmHost) -> None:
        self.host = host
        self.sender = Party(host, host.node.register(0, 1, POOL))
        self.own = [Party(host), Party(host)]
        self.stand_ins = [Party(host), Party(host)]
        for one in self.stand_ins:
            host.node.set_stands_in(one.slot, True)

    def wait(self, worker: int, waits: bool = True) -> None:
        """One of the pool's own begins to wait inside a task, or goes on; the node sees it."""
        self.own[worker].tasks.set_blocked(waits)
        self.release()

    def release(self) -> None:
        self.host.node_tasks.release_stand_ins(POOL)

    def begun(self) -> list[int]:
        """Which stand-ins begin a task, each idle one asked once, the later ones first."""
        found = []
        for number in (1, 0):
            tasks = self.stand_ins[number].tasks
            if not tasks.running(tasks.slot) and (oid := tasks.next(POOL, 0)):
                tasks.begin(oid)
                found.append(number)
        return found


@pytest.fixture(name="pool")
def fixture_pool(host: ShmHost) -> Pool:
    return Pool(host)


@pytest.mark.parametrize("event", ["waits", "promoted", "retires", "called", "closes"])
def test_stand_in_aside_sleeps_on_the_word_that_the_node_wakes(
    host: ShmHost, pool: Pool, play: Play, event: str
) -> None:
    stand_in = pool.stand_ins[0]

    def happens() -> None:
        play.woken.clear()
        if event == "waits":
            pool.wait(0)
        elif event == "promoted":
            host.node.set_stands_in(stand_in.slot, False)
            host.node_tasks.wake_for_task(stand_in.slot)
        elif event == "closes":
            host.node.open_pool(POOL, POOL_CLOSING)
            host.node_tasks.wake_pool(POOL)
        else:
            host.node.set_retire(stand_in.slot, RETIRES if event == "retires" else 2)
            host.node_tasks.wake_for_task(stand_in.slot)

    play.meanwhile = happens
    assert stand_in.tasks.next(POOL, 60 * SECOND) == 0
    (word,) = (at - stand_in.client.control_address for at in play.slept)
    assert word in [at - host.node.control_address for at in play.woken]
    play.meanwhile = lambda: None
    oid = pool.sender.task()
    expected = oid if event in ("waits", "promoted") else 0
    assert stand_in.tasks.next(POOL, 60 * SECOND) == expected
    assert len(play.slept) == 1, "there is something to do, so it does not sleep again"


def test_node_wakes_no_stand_in_twice_for_one_waiting_worker(pool: Pool, play: Play) -> None:
    pool.wait(0)
    assert len(play.woken) == 1
    for _ in range(3):  # turns of the node
        pool.release()
    assert len(play.woken) == 1
    pool.wait(1)
    assert len(play.woken) == 2


def test_stand_ins_that_decide_together_begin_one_task_per_waiting_worker(pool: Pool) -> None:
    for _ in range(4):
        pool.sender.task()
    assert pool.begun() == []
    pool.wait(0)
    assert len(pool.begun()) == 1
    assert pool.begun() == []
    pool.wait(1)
    assert len(pool.begun()) == 1


def test_stand_in_beyond_the_waiting_workers_steps_aside_for_one_that_runs(pool: Pool) -> None:
    pool.wait(0)
    pool.wait(1)
    pool.sender.task()
    assert pool.begun() == [1]
    pool.wait(1, False)
    pool.sender.task()
    assert pool.begun() == []
    pool.wait(1)  # the node lets the other one begin again
    assert pool.begun() == [0]


def test_another_stand_in_begins_when_one_retires_or_ends(host: ShmHost, pool: Pool) -> None:
    pool.sender.task()
    pool.wait(0)
    host.node.set_retire(pool.stand_ins[0].slot, RETIRES)
    pool.release()
    assert pool.begun() == [1]
    pool.sender.task()
    host.node.unregister(pool.stand_ins[1].slot)
    host.node.set_retire(pool.stand_ins[0].slot, 0)
    pool.release()
    assert pool.begun() == [0]


def begins(one: Party) -> bool:
    """Does it begin a task now?"""
    oid = one.tasks.next(POOL, 0)
    if oid:
        one.tasks.begin(oid)
    return bool(oid)


def overfull(pool: Pool) -> Party:
    """Three tasks run, because one that waited goes on beside a stand-in. Returns the stand-in."""
    for _ in range(6):
        pool.sender.task()
    assert begins(pool.own[0])
    assert begins(pool.own[1])
    pool.wait(0)
    (number,) = pool.begun()
    pool.wait(0, False)
    return pool.stand_ins[number]


@pytest.mark.parametrize("event", ["stand-in ends", "other ends", "other waits"])
def test_own_worker_declines_while_enough_others_run_and_is_woken_when_fewer_do(
    pool: Pool, play: Play, event: str
) -> None:
    stand_in, (free, other) = overfull(pool), pool.own
    changes = stand_in if event == "stand-in ends" else other

    def happens() -> None:
        play.woken.clear()
        if event == "other waits":
            changes.tasks.set_blocked(True)
        else:
            changes.tasks.end(0, 0)

    free.tasks.end(0, 0)
    assert not begins(free)
    play.meanwhile = happens
    assert free.tasks.next(POOL, 60 * SECOND) == 0
    (word,) = {at - free.client.control_address for at in play.slept}
    assert word in [at - changes.client.control_address for at in play.woken]
    assert begins(free)


def test_own_worker_does_not_sleep_if_another_task_ends_while_it_declines(
    pool: Pool, play: Play
) -> None:
    """The word has changed since it was read, so the kernel would return at once."""
    stand_in, (free, _) = overfull(pool), pool.own
    free.tasks.end(0, 0)
    stand_in.tasks.end(0, 0)
    assert begins(free)
    assert not play.slept


def test_own_workers_that_are_free_together_begin_one_task_beside_a_stand_in(pool: Pool) -> None:
    stand_in = overfull(pool)
    for one in pool.own:
        one.tasks.end(0, 0)
    assert [begins(one) for one in reversed(pool.own)] == [False, True]
    assert not begins(pool.own[1])
    stand_in.tasks.end(0, 0)
    assert begins(pool.own[1])


def test_own_workers_begin_tasks_as_before_when_the_stand_ins_have_ended(
    host: ShmHost, pool: Pool
) -> None:
    overfull(pool)
    for one in pool.stand_ins:
        host.node.unregister(one.slot)
    for one in pool.own:
        one.tasks.end(0, 0)
    assert [begins(one) for one in reversed(pool.own)] == [True, True]
