"""Who sleeps is woken, soon, and nobody else."""

from __future__ import annotations

import os
import time

import pytest

from hoplite_mp import _shm, _tasks
from tests.support.processes import exit_code_of, fork_child
from tests.support.shm_host import (
    POOL,
    SECOND,
    SLICE_S,
    Party,
    ShmHost,
    kept_waiting,
)


def idle(*children: int) -> float:
    """A clock that stands still while this process or one of them waits for a processor."""
    return time.monotonic() - kept_waiting(os.getpid(), *children)


# -- wake-ups -----------------------------------------------------------------------------------


@pytest.mark.parametrize("spin_us", [0, 50])
def test_ping_pong_does_not_wait_for_slices(spin_us: int) -> None:
    """A lost wake-up costs a slice of half a second; none may be lost on the way to and fro."""
    host = ShmHost(spin_us=spin_us)
    party = Party(host)
    slot = host.node.register(0, 2, POOL)

    def child() -> None:
        worker = Party(host, slot)
        while not worker.client.closing:
            oid = worker.tasks.next(POOL, SECOND // 2)
            if oid:
                worker.finish(oid)

    pid = fork_child(child)
    rounds = 800
    slow = 0
    started = idle(pid)
    for _ in range(rounds):
        before = idle(pid)
        oid = party.task()
        deadline = time.monotonic_ns() + 60 * SECOND
        assert party.tasks.wait([oid], 1, deadline, False) == _tasks.DONE
        party.client.release(oid)
        party.client.collect()
        slow += idle(pid) - before > 0.9 * SLICE_S
    assert idle(pid) - started < SLICE_S * rounds / 20
    # The first round waits for the fork, and this machine may have stood still during another one.
    assert slow <= 2
    host.node.set_closing()
    host.node_tasks.wake_pool_all()
    assert exit_code_of(pid) == 0
    host.close()


def test_every_hint_finds_an_idle_worker() -> None:
    """Two submitters, three workers that sleep: nothing lies while somebody is idle."""
    host = ShmHost(spin_us=30, cores=4)
    slots = [host.node.register(0, 2, POOL) for _ in range(3)]

    def child(slot: int) -> None:
        worker = Party(host, slot)
        while not worker.client.closing:
            oid = worker.tasks.next(POOL, SECOND // 2)
            if oid:
                time.sleep(0.001)
                worker.finish(oid)

    pids = [fork_child(lambda slot=slot: child(slot)) for slot in slots]  # type: ignore[misc]
    parties = [Party(host), Party(host)]
    time.sleep(0.1)
    slow = 0
    for _ in range(150):
        before = idle(*pids)
        oids = [(party, party.task()) for party in parties for _ in range(2)]
        for party, oid in oids:
            deadline = time.monotonic_ns() + 60 * SECOND
            assert party.tasks.wait([oid], 1, deadline, False) == _tasks.DONE
            party.client.release(oid)
            party.client.collect()
        slow += idle(*pids) - before > 0.9 * SLICE_S
    assert slow <= 1, "this machine may have stood still once"
    host.node.set_closing()
    host.node_tasks.wake_pool_all()
    assert [exit_code_of(pid) for pid in pids] == [0, 0, 0]
    host.close()


def test_a_worker_that_is_to_retire_does_not_sleep(host: ShmHost) -> None:
    party = Party(host)
    host.node.set_retire(party.slot, 1)
    started = idle()
    assert party.tasks.next(POOL, 60 * SECOND) == 0
    assert party.tasks.retire
    assert idle() - started < SLICE_S / 2


def test_blocked_and_pids_are_seen_by_the_node(host: ShmHost) -> None:
    party = Party(host)
    party.tasks.set_pid(party.slot, 4711)
    party.tasks.set_blocked(True)
    info = host.node.client_info(party.slot)
    assert (info["pid"], info["blocked"], party.tasks.pid(party.slot)) == (4711, 1, 4711)
    assert _shm.STATES[party.client.state(party.task(ready=False))] == "WAITING"
