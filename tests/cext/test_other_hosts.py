"""What the node does in shared memory for other hosts: objects whose bytes are elsewhere, tasks
that it takes for workers that are elsewhere."""

from __future__ import annotations

import os

import pytest

from tests.support.shm_host import CLIENT_BYTES, NODE, OFF_CLIENTS, POOL, STATE, Party, ShmHost

KIND_FOREIGN = 4
NBYTES = 5000


def imported(host: ShmHost) -> int:
    return host.node.new(KIND_FOREIGN, STATE["CLAIMED"], NODE, 0)


def test_done_elsewhere_then_brought_here(host: ShmHost) -> None:
    oid = imported(host)
    reader = Party(host)
    hold = reader.client.hold(oid)
    assert not reader.tasks.done(oid)
    assert host.node.finish_elsewhere(oid, NBYTES, True)
    assert reader.tasks.done(oid)
    assert reader.client.view(oid) == STATE["SPILLED"]
    assert reader.client.inspect(oid)["size"] == NBYTES
    assert reader.client.flags(oid) == (True, False)
    payload = host.store.lease(NBYTES, NODE)
    assert payload is not None
    host.node.memory(payload, NBYTES)[:] = b"7" * NBYTES
    assert host.node.restore(oid, payload)
    view = memoryview(reader.client.view(oid))  # type: ignore[arg-type]
    assert view.nbytes == NBYTES
    assert bytes(view[:3]) == b"777"
    del hold, view


def test_it_wakes_who_waits(host: ShmHost) -> None:
    oid = imported(host)
    reader = Party(host)
    before = reader.tasks.event()
    buckets = reader.tasks.park([oid])
    host.node.finish_elsewhere(oid, NBYTES, False)
    assert reader.tasks.event() != before
    reader.tasks.unpark(buckets)


def test_deleted_before_it_was_done(host: ShmHost) -> None:
    oid = imported(host)
    reader = Party(host)
    hold = reader.client.hold(oid)
    assert reader.client.delete(oid) == 1
    assert not host.node.finish_elsewhere(oid, NBYTES, False)
    assert host.node_tasks.settle(oid)
    assert reader.client.state(oid) == STATE["DELETED"]
    del hold


def test_without_holders_it_goes(host: ShmHost) -> None:
    oid = imported(host)
    host.node.release(oid)
    assert host.node.finish_elsewhere(oid, NBYTES, False)
    assert host.node.state(oid) == STATE["FREED"]
    assert host.node.collect() == [oid]


def test_the_node_takes_what_no_worker_is_idle_for(host: ShmHost) -> None:
    sender, worker = Party(host), Party(host)
    event_fd = host.fds[2]
    host.node.set_sleeping(True)
    host.node_tasks.offer(POOL, True)
    first = sender.task()
    assert os.read(event_fd, 8)  # nobody else is idle
    assert host.node_tasks.take_queued(POOL) == first
    assert host.node_tasks.take_queued(POOL) == 0
    assert host.node.state(first) == STATE["CLAIMED"]
    # Its bit was used up: without a new offer it is not woken again.
    second = sender.task()
    with pytest.raises(BlockingIOError):
        os.read(event_fd, 8)
    assert worker.tasks.next(POOL, 0) == second
    worker.finish(second)
    assert host.node.give_task_back(first)
    assert host.node.inspect(first)["tries"] == 0
    assert host.node_tasks.post(first, host.queue)
    assert worker.tasks.next(POOL, 0) == first
    assert not host.node.give_task_back(first)  # it is another's now
    worker.finish(first)


def task_word(host: ShmHost, party: Party) -> int:
    """The futex on which an idle worker sleeps."""
    return host.word(OFF_CLIENTS + party.slot * CLIENT_BYTES + 128, 4)


def test_an_idle_worker_is_woken_before_the_node(host: ShmHost) -> None:
    sender, worker = Party(host), Party(host)
    host.node.set_sleeping(True)
    host.node_tasks.offer(POOL, True)
    worker.tasks.offer(POOL, True)  # as a worker does before it sleeps
    before = task_word(host, worker)
    oid = sender.task()
    assert task_word(host, worker) != before
    with pytest.raises(BlockingIOError):
        os.read(host.fds[2], 8)
    host.node_tasks.offer(POOL, False)
    sender.task()  # nobody is idle now
    with pytest.raises(BlockingIOError):
        os.read(host.fds[2], 8)
    assert worker.tasks.next(POOL, 0) == oid
