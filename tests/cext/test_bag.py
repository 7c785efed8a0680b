"""Ranked hints in shared memory: who is taken first, what is left, what is stale."""

from __future__ import annotations

import os
from functools import partial
from typing import TYPE_CHECKING

import pytest

from hoplite_mp import _tasks
from tests.support.processes import exit_code_of, fork_child
from tests.support.shm_host import CLIENT_BYTES, KIND_TASK, OFF_CLIENTS, POOL, STATE, Party, ShmHost

if TYPE_CHECKING:
    from collections.abc import Iterator

NO = _tasks.NO_FLOOR
ROUNDS = 10
OFF_WAITING = 160  # as in shm_layout.h: waiting_id of a client slot


@pytest.fixture(name="host")
def fixture_host() -> Iterator[ShmHost]:
    made = ShmHost()
    yield made
    made.close()


class Sender(Party):
    """No worker, with a bag."""

    def __init__(self, host: ShmHost, here: bool = False) -> None:
        super().__init__(host, host.node.register(0, 1, POOL))
        self.ranked = _tasks.Ranked(self.tasks)
        self.bag = self.ranked.open_bag(POOL, here)

    def send(self, priority: int, floor: int = NO, flags: int = 0, posts: bool = True) -> int:
        oid = self.client.new(KIND_TASK, STATE["WAITING"], 0, POOL)
        flags |= _tasks.RANKED_FLAG
        self.tasks.submit(oid, 0, b"", 0, 0, 0, flags, b"t", self.bag, False)
        self.ranked.rank(oid, priority, floor)
        assert self.ranked.ranks(oid) == (priority, floor)
        assert self.ranked.post(oid, self.bag) or not posts
        return oid


def taken(worker: Party, count: int) -> list[int]:
    return [worker.tasks.next(POOL, 0) for _ in range(count)]


def test_the_highest_first_and_equals_in_order(host: ShmHost) -> None:
    sender, worker = Sender(host), Party(host)
    low, first, plain, high, second = (
        sender.send(-1), sender.send(5), sender.task(), sender.send(7), sender.send(5),
    )  # fmt: skip
    assert sender.ranked.ranks(plain) == (0, NO)
    assert taken(worker, 6) == [high, first, second, plain, low, 0]


def test_of_several_senders(host: ShmHost) -> None:
    one, two, worker = Sender(host), Sender(host), Party(host)
    oids = [one.send(1), two.send(3), one.send(2), two.send(-1), one.send(-2), two.task()]
    assert taken(worker, 7) == [oids[1], oids[2], oids[0], oids[5], oids[3], oids[4], 0]


def test_what_a_task_has_sent_counts_as_much_as_it(host: ShmHost) -> None:
    """So a task that waits for what it has sent is not overtaken by others of its level for ever;
    and of those that it has sent the higher ones go first."""
    sender, worker = Sender(host), Party(host)
    outer, child, favourite = sender.send(5), sender.send(0, 5), sender.send(3, 5)
    negative, plain = sender.send(-4, 0), sender.task()
    holds = sender.send(0, NO, _tasks.RESOURCES_FLAG)
    assert taken(worker, 6) == [favourite, child, outer, negative, holds, plain]
    nested, negative, plain = worker.task(), sender.send(-4, 0), sender.task()
    assert taken(worker, 4) == [nested, negative, plain, 0]


def test_stale_hints_are_passed_over(host: ShmHost) -> None:
    sender, worker = Sender(host), Party(host)
    gone, claimed, left = sender.send(9), sender.send(8), sender.send(1)
    assert sender.tasks.cancel(gone) == 1
    assert worker.tasks.claim(claimed)
    sender.ranked.post(left, sender.bag)  # a double
    assert taken(worker, 2) == [left, 0]


def test_a_full_bag_says_so_and_has_room_again(host: ShmHost) -> None:
    sender, worker = Sender(host), Party(host)
    oids = [sender.send(-i) for i in range(_tasks.RANKED_HINTS_MAX)]
    one_more = sender.send(1, posts=False)
    assert not sender.ranked.post(one_more, sender.bag)
    assert taken(worker, 2) == oids[:2]
    assert sender.ranked.post(one_more, sender.bag)
    assert taken(worker, len(oids)) == [one_more, *oids[2:], 0]


def test_equals_stay_in_order_while_others_are_posted(host: ShmHost) -> None:
    """One core for both: a consumer is stopped in the middle of its look at the bag, the producer
    fills places before and behind that one, and the consumer goes on."""
    sender, cores = Sender(host), os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    try:
        for _ in range(ROUNDS):
            stale = [sender.send(-1) for _ in range(_tasks.RANKED_HINTS_MAX)]
            assert all(sender.tasks.cancel(oid) == 1 for oid in stale)
            oids = [sender.send(0, posts=False) for _ in stale]
            pid = fork_child(partial(consume, host, oids))
            for oid in oids:
                while not sender.ranked.post(oid, sender.bag):
                    os.sched_yield()
            assert exit_code_of(pid) == 0
    finally:
        os.sched_setaffinity(0, cores)


def consume(host: ShmHost, oids: list[int]) -> None:
    worker = Party(host)
    found: list[int] = []
    while len(found) < len(oids):
        if oid := worker.tasks.next(POOL, 0):
            found.append(oid)
        else:
            os.sched_yield()
    assert worker.tasks.next(POOL, 0) == 0
    assert found == oids, [(i, oids.index(oid)) for i, oid in enumerate(found) if oid != oids[i]]


def test_a_queue_that_was_a_bag_is_a_ring_again(host: ShmHost) -> None:
    sender, worker = Sender(host), Party(host)
    left = sender.send(3)
    bag = sender.bag
    sender.tasks.close_queue(bag)
    assert sender.tasks.open_queue(POOL) == bag
    assert taken(worker, 1) == [0]
    assert sender.tasks.post(left, bag)
    assert taken(worker, 2) == [left, 0]
    sender.tasks.close_queue(bag)
    assert sender.ranked.open_bag(POOL) == bag
    assert taken(worker, 1) == [0]
    again = sender.send(1)
    assert taken(worker, 2) == [again, 0]


def test_what_a_blocked_worker_waits_for_goes_first(host: ShmHost) -> None:
    """Whatever its level is: a higher one needs it."""
    sender, blocked, other = Sender(host), Party(host), Party(host)
    wanted, high = sender.send(-3), sender.send(7)
    blocked.tasks.set_blocked(True)
    host.write_word(OFF_CLIENTS + CLIENT_BYTES * blocked.slot + OFF_WAITING, wanted)
    assert taken(other, 3) == [wanted, high, 0]
    holds = sender.send(-3, flags=_tasks.RESOURCES_FLAG)  # in its turn: its node decides
    host.write_word(OFF_CLIENTS + CLIENT_BYTES * blocked.slot + OFF_WAITING, holds)
    higher = sender.send(0, 0)
    assert taken(other, 3) == [higher, holds, 0]


def test_async_tasks_with_a_rank_run_beside_others(host: ShmHost) -> None:
    sender, worker = Sender(host), Party(host)
    slots = _tasks.ConcurrentSlots(worker.tasks)
    flags = _tasks.ASYNC_FLAG | 3 << 16
    plain, first, second = sender.send(9), sender.send(5, flags=flags), sender.send(7, flags=flags)

    def take(running: int) -> int:
        return slots.next(POOL, running, 0, False, slots.word(), 0)

    assert [take(1), take(2), take(2)] == [second, first, 0]
    assert taken(worker, 1) == [plain]


def test_the_node_leaves_what_is_for_this_host(host: ShmHost) -> None:
    sender, here = Sender(host), Sender(host, here=True)
    node = _tasks.Tasks(host.node)
    kept, sent = here.send(9), sender.send(1)
    assert [node.take_queued(POOL), node.take_queued(POOL)] == [sent, 0]
    assert taken(sender, 1) == [kept]
