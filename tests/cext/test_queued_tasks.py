"""The node finds the queued tasks of one pool by what tables say of pools, and misses none."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import pytest

from hoplite_mp import _tasks
from tests.support.shm_host import KIND_TASK, STATE, ShmHost

if TYPE_CHECKING:
    from collections.abc import Iterator

POOLS = (3, 5, 67, 69)  # 67 and 69 are 3 and 5 again, modulo the bits of a word
PUT = 1


@pytest.fixture
def host() -> Iterator[ShmHost]:
    made = ShmHost()
    yield made
    made.close()


def looked_at(host: ShmHost, pool: int, waiting_too: bool) -> set[int]:
    """The same by a look at every header."""
    wanted = {"QUEUED", "WAITING"} if waiting_too else {"QUEUED"}
    return {
        one["id"]
        for one in host.node.scan()
        if one["pool"] == pool and one["kind"] == KIND_TASK and one["state"] in wanted
    }


def submitted(tasks: Any, oid: int, queue: int, ready: bool) -> int:
    tasks.submit(oid, 0, b"", 0, 0, 0, 0, b"f", queue, ready, 0, 0)
    return oid


def test_at_random(host: ShmHost) -> None:
    """Tasks that come, wait, are claimed and go, between objects that come and go."""
    dice = random.Random(7)
    parties = [host.client(), host.client()]
    queues = []
    for party in parties:
        tasks = _tasks.Tasks(party)
        queues.append((tasks, {pool: tasks.open_queue(pool) for pool in POOLS}))
    for pool in POOLS:
        host.node.open_pool(pool, 1)
    held: list[tuple[Any, int]] = []
    for _ in range(6000):
        number = dice.randrange(2)
        party, (tasks, by_pool) = parties[number], queues[number]
        what = dice.random()
        if what < 0.35:
            oid = party.new(KIND_TASK, STATE["WAITING"], 0, 0)
            submitted(tasks, oid, by_pool[dice.choice(POOLS)], dice.random() < 0.5)
            held.append((party, oid))
        elif what < 0.6:
            held.append((party, party.new(PUT, STATE["SEALED"], 0, 0)))
        elif held:
            owner, oid = held.pop(dice.randrange(len(held)))
            if host.node.take_over(oid, 0) or owner.state(oid) == STATE["WAITING"]:
                owner.delete(oid)
            owner.release(oid)
            if dice.random() < 0.3:
                owner.collect()
        if dice.random() < 0.02:
            pool, too = dice.choice(POOLS), dice.random() < 0.5
            found = host.node.queued_in(pool, too)
            assert set(found) == looked_at(host, pool, too)
            assert len(found) == len(set(found))
    assert sum(len(host.node.queued_in(pool)) for pool in POOLS) > 100


def test_in_the_order_of_their_submission(host: ShmHost) -> None:
    party = host.client()
    tasks = _tasks.Tasks(party)
    queue = tasks.open_queue(3)
    oids = [party.new(KIND_TASK, STATE["WAITING"], 0, 0) for _ in range(200)]
    random.Random(1).shuffle(oids)
    for oid in oids:
        submitted(tasks, oid, queue, True)
    assert host.node.queued_in(3) == oids
    assert host.node.queued_in(67) == []
