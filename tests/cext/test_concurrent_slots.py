"""Async tasks beside one another, and links of streams, in shared memory."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

import pytest

from hoplite_mp import _tasks
from tests.support.shm_host import (
    KIND_TASK,
    OFF_POOLS,
    POOL,
    POOL_BYTES,
    SECOND,
    STATE,
    Party,
    ShmHost,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

OFF_BESIDE = OFF_POOLS + POOL_BYTES * POOL + 32
NEVER = 30 * SECOND


@pytest.fixture(name="host")
def fixture_host() -> Iterator[ShmHost]:
    made = ShmHost()
    yield made
    made.close()


def submit(party: Party, concurrency: int, output_owner: int = 0) -> int:
    """A task of that concurrency; 0: a plain one."""
    oid = party.client.new(KIND_TASK, STATE["WAITING"], 0, POOL)
    flags = _tasks.ASYNC_FLAG | concurrency << 16 if concurrency else 0
    party.tasks.submit(oid, 0, b"", 0, 0, 0, flags, b"t", party.queue, True, output_owner)
    assert party.tasks.task(oid)[3] == flags
    return oid


def test_it_takes_what_may_run_beside_so_many(host: ShmHost) -> None:
    sender, worker = Party(host), Party(host)
    slots = _tasks.ConcurrentSlots(worker.tasks)
    first, second, plain, third = (submit(sender, n) for n in (3, 2, 0, 3))

    def take(running: int, output_owner: int = 0, any_task: bool = False) -> int:
        return slots.next(POOL, running, output_owner, any_task, slots.word(), 0)

    assert take(1, output_owner=5) == 0
    assert take(1) == first
    assert take(2) == 0  # the second one wants fewer beside it, and is left where it is
    assert take(1) == second
    assert take(1) == 0  # a plain one, for a worker of its own
    assert worker.tasks.next(POOL, 0) == plain
    assert take(2) == third
    more = submit(sender, 0)
    assert take(200, any_task=True) == more


def test_a_cancelled_one_is_no_obstacle(host: ShmHost) -> None:
    sender, worker = Party(host), Party(host)
    slots = _tasks.ConcurrentSlots(worker.tasks)
    plain, wanted = submit(sender, 0), submit(sender, 4)
    assert sender.tasks.cancel(plain) == 1
    assert slots.next(POOL, 1, 0, False, slots.word(), 0) == wanted


def test_who_waits_is_woken_by_a_post_and_by_an_end(host: ShmHost) -> None:
    sender, worker = Party(host), Party(host)
    slots = _tasks.ConcurrentSlots(worker.tasks)
    found: list[int] = []

    def wait() -> None:
        found.append(slots.next(POOL, 1, 0, False, slots.word(), NEVER))

    def waits() -> bool:
        return bool(host.word(OFF_BESIDE + 8 * (worker.slot // 64)) >> (worker.slot % 64) & 1)

    for number in range(2):
        begun = time.monotonic()
        thread = threading.Thread(target=wait)
        thread.start()
        while not waits():
            assert time.monotonic() < begun + 30
        wanted = submit(sender, 4) if number else slots.wake() or 0
        thread.join()
        assert found.pop() == wanted
        assert not waits()
    # An end between the look and the wait is not lost.
    seen = slots.word()
    slots.wake()
    assert slots.next(POOL, 1, 0, False, seen, 0) == 0


def test_an_idle_worker_is_woken_rather_than_one_that_has_room(host: ShmHost) -> None:
    """The hint of a plain task must not be spent on a worker that cannot take it."""
    sender, idle, busy = Party(host), Party(host), Party(host)
    slots = _tasks.ConcurrentSlots(busy.tasks)
    found: list[int] = []
    threads = [
        threading.Thread(target=lambda: found.append(idle.tasks.next(POOL, NEVER))),
        threading.Thread(
            target=lambda: found.append(slots.next(POOL, 1, 0, False, slots.word(), NEVER))
        ),
    ]
    for thread in threads:
        thread.start()
    while not (sender.tasks.idle(POOL) and host.word(OFF_BESIDE)):
        time.sleep(0.001)
    plain = submit(sender, 0)
    threads[0].join()
    assert found == [plain]
    wanted = submit(sender, 9)
    threads[1].join()
    assert found == [plain, wanted]


def test_the_dead_wait_for_nothing(host: ShmHost) -> None:
    worker = Party(host)
    host.write_word(OFF_BESIDE + 8 * (worker.slot // 64), 1 << (worker.slot % 64))
    host.sweep(worker.slot)
    assert not host.word(OFF_BESIDE)


def test_a_link_wakes_its_owner_when_a_hold_goes(host: ShmHost) -> None:
    source, reader = Party(host), Party(host)
    slots = _tasks.ConcurrentSlots(source.tasks)
    oid = source.client.new(_tasks.STREAM_LINK, STATE["CLAIMED"], source.slot, 0)
    own = source.client.hold(oid, False)
    slots.link(oid, b"count", 2, 0, 0)
    assert slots.alone(oid)
    assert source.tasks.running(source.slot) == oid
    hold = reader.client.hold(oid)
    assert not slots.alone(oid)
    seen = source.tasks.event()
    del hold
    assert source.tasks.event() != seen
    assert slots.alone(oid)
    del own


def test_what_ends_in_the_middle_leaves_the_others_on_the_stack(host: ShmHost) -> None:
    sender, worker = Party(host), Party(host)
    slots, trace = _tasks.ConcurrentSlots(worker.tasks), _tasks.Trace(host.node_tasks)
    tasks = [submit(sender, 9) for _ in range(3)]
    for oid in tasks:
        slots.begin(oid)

    def open_ids() -> list[int]:
        data = trace.open(worker.slot)
        size = _tasks.EVENT_BYTES
        return [int.from_bytes(data[i : i + 8], "little") for i in range(0, len(data), size)]

    assert open_ids() == tasks
    slots.end(tasks[1], False, tasks[0])
    assert open_ids() == [tasks[0], tasks[2]]
    assert worker.tasks.running(worker.slot) == tasks[0]
    slots.end(tasks[0], True, tasks[2])
    slots.end(tasks[2], False, 0)
    assert open_ids() == []
    info = host.node.client_info(worker.slot)
    assert (info["tasks_done"], info["tasks_failed"], info["running"]) == (2, 1, 0)
