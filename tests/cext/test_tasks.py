"""Queues, claims and waits between real processes and threads."""

from __future__ import annotations

import os
import signal
import struct
import threading
import time
from typing import TYPE_CHECKING

import pytest

from hoplite_mp import _tasks
from tests.support.interruptions import no_collection
from tests.support.processes import exit_code_of, fork_child
from tests.support.shm_host import (
    OFF_QUEUES,
    POOL,
    QUEUE_BYTES,
    QUEUES,
    SECOND,
    SLICE_S,
    STATE,
    Party,
    ShmHost,
    kept_waiting,
)

if TYPE_CHECKING:
    from collections.abc import Callable

# -- queues -------------------------------------------------------------------------------------


def test_a_ring_fills_and_wraps(host: ShmHost) -> None:
    party = Party(host)
    for _ in range(3):
        oids = [party.task() for _ in range(_tasks.QUEUED_HINTS_MAX)]
        more = party.task(ready=False)
        assert not party.tasks.post(more, party.queue), "the ring is full"
        assert party.client.state(more) == STATE["QUEUED"], "claimable by whoever knows the id"
        assert party.tasks.next(POOL, 0) == oids[0]
        assert party.tasks.post(more, party.queue)
        assert [party.tasks.next(POOL, 0) for _ in oids] == [*oids[1:], more]
        assert party.tasks.next(POOL, 0) == 0
        for oid in (*oids, more):
            party.finish(oid)
            party.client.release(oid)
        party.client.collect()


def test_a_hint_may_be_stale_or_doubled(host: ShmHost) -> None:
    party = Party(host)
    oids = [party.task() for _ in range(4)]
    assert party.tasks.post(oids[2], party.queue)
    assert party.tasks.cancel(oids[0]) == 1
    assert party.tasks.claim(oids[1])
    assert not party.tasks.claim(oids[1])
    assert [party.tasks.next(POOL, 0) for _ in range(3)] == [oids[2], oids[3], 0]


def test_only_the_pool_takes_its_hints(host: ShmHost) -> None:
    party, other = Party(host), Party(host)
    oid = party.task()
    assert other.tasks.next(POOL + 1, 0) == 0
    assert other.tasks.next(POOL, 0) == oid


def test_a_queue_that_was_closed_serves_another_pool(host: ShmHost) -> None:
    party, worker = Party(host), Party(host)
    for pool in (3, 4, 3, 5) * 5:
        oids = [party.task(ready=False) for _ in range(7)]
        queue = party.tasks.open_queue(pool)
        for oid in oids:
            assert party.tasks.post(oid, queue)
        assert worker.tasks.next(POOL, 0) == 0
        assert worker.tasks.next(pool, 0) == oids[0]
        assert worker.tasks.next(pool, 0) == oids[1]
        party.tasks.close_queue(queue)
        assert worker.tasks.next(pool, 0) == 0, "what was left is dropped"
        again = party.tasks.open_queue(pool + 10)
        assert again == queue
        assert party.tasks.post(oids[2], again)
        assert worker.tasks.next(pool, 0) == 0
        assert worker.tasks.next(pool + 10, 0) == oids[2]
        party.tasks.close_queue(again)


def test_consumers_at_a_queue_that_closes(host: ShmHost) -> None:
    """The counts of a ring go on when it is closed: no consumer's CAS may spoil the next one's."""
    party = Party(host)
    slot = host.node.register(0, 2, POOL)
    read, write = os.pipe()

    def child() -> None:
        os.close(write)
        worker = Party(host, slot)
        while not worker.client.closing:
            oid = worker.tasks.next(9, 0)
            if oid:
                worker.finish(oid)
        os.read(read, 1)

    pid = fork_child(child)
    os.close(read)
    end = time.monotonic() + 0.7
    while time.monotonic() < end:
        queue = party.tasks.open_queue(9)
        at = OFF_QUEUES + QUEUE_BYTES * queue
        for _ in range(20):
            oid = party.task(ready=False)
            assert party.tasks.post(oid, queue), "a ring that is not full says that it is"
            if party.tasks.cancel(oid) or party.tasks.wait([oid], 1, 1 << 62, False):
                party.client.release(oid)
        party.tasks.close_queue(queue)
        assert host.word(at + 64) == host.word(at + 128)
        party.client.collect()
    host.node.set_closing()
    os.close(write)
    assert exit_code_of(pid) == 0


def test_queues_are_limited(host: ShmHost) -> None:
    party = Party(host)
    opened = [party.tasks.open_queue(POOL) for _ in range(QUEUES - 2)]
    with pytest.raises(MemoryError, match="queues of this host are taken"):
        party.tasks.open_queue(POOL)
    party.tasks.close_queue(opened[5])
    assert party.tasks.open_queue(POOL) == opened[5]
    host.sweep(party.slot)
    assert Party(host).tasks.open_queue(POOL)
    with pytest.raises(ValueError, match="pool 256"):
        party.tasks.open_queue(256)


def test_no_task_is_claimed_twice(host: ShmHost) -> None:
    """20 000 tasks, three worker processes and this one."""
    count, workers = 20_000, 3
    party = Party(host)
    slots = [host.node.register(0, 2, POOL) for _ in range(workers)]
    read, write = os.pipe()

    def work(slot: int) -> None:
        worker = Party(host, slot)
        taken = []
        while not worker.client.closing:
            oid = worker.tasks.next(POOL, SECOND // 100)
            if oid:
                taken.append(oid)
                worker.finish(oid)
        os.write(write, struct.pack("Q", len(taken)))

    pids = [fork_child(lambda slot=slot: work(slot)) for slot in slots]  # type: ignore[misc]
    mine = done = 0
    pending: set[int] = set()
    while done < count:
        while len(pending) < 2000 and done + len(pending) < count:
            pending.add(party.task())
        oid = party.tasks.next(POOL, 0)
        if oid:
            mine += 1
            party.finish(oid)
        for oid in party.tasks.drain():
            pending.remove(oid)  # a KeyError if it were done twice
            assert party.client.inspect(oid)["attempt"] == 1
            party.client.release(oid)
            done += 1
        party.client.collect()
    host.node.set_closing()
    host.node_tasks.wake_pool_all()
    assert [exit_code_of(pid) for pid in pids] == [0] * workers
    others = [struct.unpack("Q", os.read(read, 8))[0] for _ in pids]
    os.close(read)
    os.close(write)
    assert mine + sum(others) == count


# -- retries, deadlines -------------------------------------------------------------------------


@pytest.mark.parametrize(("asked", "kept"), [(-1, 0), (3, 3), (70_000, 65_535)])
def test_retries_are_not_cut(host: ShmHost, asked: int, kept: int) -> None:
    party = Party(host)
    assert party.client.inspect(party.task(retries=asked))["retries_left"] == kept


def test_a_deadline_outlives_a_task_that_runs_inside(host: ShmHost) -> None:
    party = Party(host)
    outer, inner = party.task(timeout=SECOND), party.task()
    assert party.tasks.next(POOL, 0) == outer
    assert party.tasks.begin(outer) == 0
    deadline = host.node.client_info(party.slot)["deadline_ns"]
    assert deadline > time.monotonic_ns()
    assert party.tasks.claim(inner)
    assert party.tasks.begin(inner) == outer
    info = host.node.client_info(party.slot)
    assert (info["deadline_ns"], info["deadline_id"], info["running"]) == (deadline, outer, inner)
    party.tasks.end(outer, False)
    assert host.node.client_info(party.slot)["deadline_ns"] == deadline
    party.tasks.end(0, False)
    info = host.node.client_info(party.slot)
    assert (info["deadline_ns"], info["running"], info["tasks_done"]) == (0, 0, 2)


def test_the_node_leaves_a_living_claimant_alone(host: ShmHost) -> None:
    """A dead submitter's task that a worker has just claimed, and has written already."""
    submitter, worker = Party(host), Party(host)
    host.give_span(worker.client)
    oid = submitter.task()
    assert worker.tasks.claim(oid)
    at = worker.client.allocate(500)
    worker.client.bind(oid, at, 500, True)
    assert not host.node.take_over(oid, submitter.slot)
    assert not host.node.requeue(oid, submitter.slot)
    assert not host.node.settle(oid, submitter.slot)
    header = worker.client.inspect(oid)
    assert (header["block"], header["size"], header["flags"]) == (at, 500, 2)
    assert worker.tasks.finish(oid, False)


def test_drain_says_nothing_of_what_is_not_done(host: ShmHost) -> None:
    party = Party(host)
    oid = party.task()
    host.node.announce(oid)  # a bit of an earlier life
    assert party.tasks.drain() == []
    assert party.tasks.claim(oid)
    party.finish(oid)
    assert party.tasks.drain() == [oid]
    assert party.tasks.drain() == []


# -- waiting ------------------------------------------------------------------------------------


def one_is_below(most: float, seconds: Callable[[], float]) -> bool:
    """Of some measurements: in one of them this machine may have stood still."""
    return any(seconds() < most for _ in range(3))


def test_a_wait_ends_at_its_time(host: ShmHost) -> None:
    party = Party(host)
    oid = party.task(ready=False)
    assert party.tasks.wait([oid], 1, 0, False) == _tasks.TIMEOUT

    def late(pause: float) -> float:
        started, waited = time.monotonic(), kept_waiting()
        deadline = time.monotonic_ns() + int(pause * SECOND)
        assert party.tasks.wait([oid], 1, deadline, False) == _tasks.TIMEOUT
        seconds = time.monotonic() - started
        assert seconds >= pause
        return seconds - pause - (kept_waiting() - waited)

    def late_without_a_task() -> float:
        started, waited = time.monotonic(), kept_waiting()
        assert party.tasks.next(POOL, SECOND // 50) == 0
        seconds = time.monotonic() - started
        assert seconds >= 0.02
        return seconds - 0.02 - (kept_waiting() - waited)

    for pause in (0.01, 0.7):
        assert one_is_below(0.3, lambda pause=pause: late(pause))
    assert one_is_below(0.28, late_without_a_task)


def test_a_wait_for_some_of_many(host: ShmHost) -> None:
    party = Party(host)
    oids = [party.task(ready=False) for _ in range(50)]
    for oid in oids[::2]:
        assert party.tasks.take(oid)
        party.finish(oid)
    assert party.tasks.wait(oids, 25, 0, False) == _tasks.DONE
    assert party.tasks.wait(oids, 26, 0, False) == _tasks.TIMEOUT
    assert party.tasks.wait(oids, 26, 0, True) == _tasks.NEWS
    assert len(party.tasks.drain()) == 25
    assert party.tasks.wait(oids, 26, 0, True) == _tasks.TIMEOUT
    assert party.tasks.wait([], 0, 0, False) == _tasks.DONE


def test_waiters_are_woken_whoever_they_are(host: ShmHost) -> None:
    """Several threads of the owner, and of a client that is parked on another's id."""
    owner, other = Party(host), Party(host)
    oids = [owner.task(ready=False) for _ in range(5)]
    woken: list[tuple[int, float]] = []
    over = threading.Event()
    latencies: list[float] = []

    def wait(party: Party, oid: int) -> None:
        deadline = time.monotonic_ns() + 60 * SECOND
        result = party.tasks.wait([oid], 1, deadline, False)
        woken.append((result, time.monotonic()))
        over.wait()  # what it waited for a processor is counted while it lives

    for oid in oids:
        woken.clear()
        over.clear()
        threads = [
            threading.Thread(target=wait, args=(party, oid))
            for party in (owner, other)
            for _ in range(3)
        ]
        for thread in threads:
            thread.start()
        time.sleep(0.05)
        assert not woken
        assert owner.tasks.take(oid)
        owner.client.bind_inline(oid, b"", [], [], 0, False)
        before, waited = time.monotonic(), kept_waiting()
        owner.tasks.finish(oid, False)
        while len(woken) < len(threads):
            time.sleep(0.001)
        waited = kept_waiting() - waited
        over.set()
        for thread in threads:
            thread.join()
        assert [result for result, _ in woken] == [_tasks.DONE] * 6
        latencies.append(max(at for _, at in woken) - before - waited)
    # During one of them this machine may have stood still.
    assert sum(one < SLICE_S / 2 for one in latencies) >= len(oids) - 1, latencies
    assert not host.masks_with(other.slot), "parked no more"


def test_events_wake(host: ShmHost) -> None:
    party, other = Party(host), Party(host)
    seen = party.tasks.event()
    other.tasks.wake(party.slot)
    deadline = time.monotonic_ns() + 60 * SECOND
    assert party.tasks.wait_event(seen, deadline, False) == _tasks.DONE

    def latency() -> float:
        seen, at = party.tasks.event(), []

        def wake() -> None:
            at.append(time.monotonic())
            other.tasks.wake(party.slot)

        timer = threading.Timer(0.05, wake)
        timer.start()
        waited = kept_waiting()
        assert party.tasks.wait_event(seen, deadline, False) == _tasks.DONE
        seconds = time.monotonic() - at[0] - (kept_waiting() - waited)
        timer.join()
        return seconds

    assert one_is_below(SLICE_S / 2, latency)


def test_closing_ends_every_wait(host: ShmHost) -> None:
    party = Party(host)
    oid = party.task(ready=False)
    results: list[int] = []
    thread = threading.Thread(
        target=lambda: results.append(party.tasks.wait([oid], 1, 1 << 62, False))
    )
    thread.start()
    time.sleep(0.05)
    party.tasks.lose()
    thread.join()
    assert results == [_tasks.CLOSING]


class Interrupted(Exception):
    pass


@pytest.mark.parametrize("raises", [False, True])
def test_a_signal_reaches_a_waiter(host: ShmHost, raises: bool) -> None:
    party = Party(host)
    oid = party.task(ready=False)
    assert one_is_below(0.3, lambda: seconds_to_handle(party, oid, raises)), "at the end of a slice"
    assert not host.masks_with(party.slot)


def seconds_to_handle(party: Party, oid: int, raises: bool) -> float:
    """From a signal to a thread that waits until its handler runs."""
    handled: list[float] = []
    sent: list[float] = []

    def send(thread: int) -> None:
        sent.append(time.monotonic())
        signal.pthread_kill(thread, signal.SIGUSR1)

    def handler(number: int, frame: object) -> None:
        handled.append(time.monotonic())
        if raises:
            raise Interrupted

    before = signal.signal(signal.SIGUSR1, handler)
    timer = threading.Timer(0.1, send, (threading.get_ident(),))
    try:
        started, waited = time.monotonic(), kept_waiting()
        timer.start()
        deadline = time.monotonic_ns() + (60 * SECOND if raises else SECOND)
        if raises:
            with no_collection(), pytest.raises(Interrupted):
                party.tasks.wait([oid], 1, deadline, False)
        else:
            assert party.tasks.wait([oid], 1, deadline, False) == _tasks.TIMEOUT
            assert time.monotonic() - started >= 1.0, "a signal alone ends no wait"
        assert handled
        return handled[0] - sent[0] - (kept_waiting() - waited)
    finally:
        timer.join()
        signal.signal(signal.SIGUSR1, before)


def test_an_interrupt_ends_the_wait_for_a_task(host: ShmHost) -> None:
    party = Party(host)
    ready, here = os.pipe()

    def child() -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        worker = Party(host, slot)
        try:
            os.write(here, b"r")
            worker.tasks.next(POOL, 20 * SECOND)
        except KeyboardInterrupt:
            return
        raise AssertionError("not interrupted")

    slot = host.node.register(0, 2, POOL)
    started = time.monotonic()
    pid = fork_child(child)
    assert os.read(ready, 1) == b"r"
    time.sleep(0.2)  # it sleeps by then; if not, it is interrupted before
    os.kill(pid, signal.SIGINT)
    assert exit_code_of(pid) == 0
    assert time.monotonic() - started < 10
    os.close(ready)
    os.close(here)
    assert party.client.usable
