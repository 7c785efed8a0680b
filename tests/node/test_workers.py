"""Workers of one host: when they are looked at, interrupted, killed, and not started."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from hoplite_mp import _tasks
from hoplite_mp._node.tasks.pools import STUCK_PATIENCE_S, SURPLUS_PATIENCE_S, Pool, WorkerInfo
from hoplite_mp._node.tasks.workers import INTERRUPT_AGAIN_S, POLL_AGAIN_S, Workers
from hoplite_mp.config import Config
from tests.support.shm_host import POOL, Party, ShmHost

if TYPE_CHECKING:
    from collections.abc import Iterator

GRACE_S = 2.0
IDLE = {
    "blocked": 0, "tasks_done": 0, "tasks_failed": 0, "running": 0, "deadline_ns": 0,
    "deadline_id": 0,
}  # fmt: skip


class World:
    """The component, on a host whose workers do what a test says."""

    def __init__(self, host: ShmHost) -> None:
        self.loop = host.loop
        self.infos: dict[int, dict[str, int]] = {}
        self.killed: list[int] = []
        self.interrupted: list[int] = []
        context: Any = SimpleNamespace(
            loop=self.loop,
            client=SimpleNamespace(
                client_info=self.info,
                worker_info=self.asked,
                register=lambda slot, kind, pool: -1,
            ),
            tasks=host.node_tasks,
            config=Config(cancel_grace_s=GRACE_S),
            results=None,
        )
        processes: Any = SimpleNamespace(
            kill=self.killed.append, interrupt=self.interrupted.append, spawn=None
        )
        events: Any = SimpleNamespace(workers_are=lambda count: None)
        nobody: Any = None
        self.workers = Workers(context, processes, nobody, nobody, events)
        self.pool = self.workers.pools[POOL] = Pool(POOL, 0, 1)

    def info(self, slot: int) -> dict[str, int]:
        return IDLE | self.infos.get(slot, {})

    def asked(self, slot: int) -> tuple[int, bool, int, int]:
        """As _shm.NodeClient.worker_info."""
        info = self.info(slot)
        worked = bool(info["tasks_done"] or info["tasks_failed"] or info["running"])
        return info["blocked"], worked, info["deadline_ns"], info["deadline_id"]

    def add(self, slot: int) -> WorkerInfo:
        worker = WorkerInfo(slot, POOL, pid=1000 + slot)
        self.pool.workers[slot] = self.workers.all[slot] = worker
        self.pool.target += 1
        return worker

    def timers(self) -> list[float]:
        return sorted(at for at, *_ in self.loop.timers)


@pytest.fixture
def host() -> Iterator[ShmHost]:
    made = ShmHost()
    yield made
    made.close()


def test_each_deadline_is_met(host: ShmHost) -> None:
    """Also a later one that is set when the one before has passed, and an earlier one at once."""
    world = World(host)
    world.add(5)
    begun = world.loop.time
    for due, passes in ((5.0, 0.0), (3.0, 4.0), (9.0, 0.0), (8.0, 8.5)):
        world.infos[5] = {"deadline_ns": round((begun + due) * 1e9)}
        world.workers.poll()
        assert any(abs(at - begun - due) < 0.001 for at in world.timers())
        world.loop.pass_to(max(world.loop.time, begun + passes))
    assert not world.killed
    world.loop.pass_to(begun + 10.0)
    world.workers.poll()
    assert world.killed == [1005]


@pytest.mark.parametrize("blocked", [False, True])
def test_a_surplus_and_a_standstill_are_looked_at_again_soon(host: ShmHost, blocked: bool) -> None:
    """Not at once: that would be again and again."""
    assert min(SURPLUS_PATIENCE_S, STUCK_PATIENCE_S) > POLL_AGAIN_S
    world = World(host)
    world.add(5)
    world.workers.config = Config(blocked_workers_max=0)
    if blocked:
        world.infos[5] = {"blocked": 1}
    else:
        world.pool.target = 0
    world.workers.poll()
    (at,) = world.timers()
    assert at == pytest.approx(world.loop.time + POLL_AGAIN_S, abs=1e-6)


def test_where_no_slot_is_left_no_worker_is_started(host: ShmHost) -> None:
    world = World(host)
    assert world.workers.start_one(world.pool, {}) == -1
    assert not world.pool.workers


@pytest.mark.parametrize("then", ["runs", "ended", "replaced"])
def test_a_worker_is_killed_only_for_a_task_that_goes_on(host: ShmHost, then: str) -> None:
    world = World(host)
    slot, oid = 5, 77
    worker = world.add(slot)
    running = {oid: True}
    world.workers.tasks = SimpleNamespace(  # type: ignore[assignment]
        claimant=lambda oid: slot, aborted=running.__getitem__
    )
    world.workers.interrupt(oid, slot)
    assert world.interrupted == [worker.pid]
    world.loop.pass_time(INTERRUPT_AGAIN_S * 7)
    assert world.interrupted == [worker.pid] * 4  # at once, and after 1, 3 and 7 of these times
    if then == "ended":
        running[oid] = False
    elif then == "replaced":
        world.add(slot)
    told = len(world.interrupted)
    world.loop.pass_time(GRACE_S)
    assert world.killed == ([worker.pid] if then == "runs" else [])
    assert (len(world.interrupted) > told) == (then == "runs")


def test_a_task_whose_worker_has_no_number_yet_is_interrupted_when_it_has(host: ShmHost) -> None:
    world = World(host)
    worker = world.add(5)
    pid, worker.pid = worker.pid, 0
    world.workers.tasks = SimpleNamespace(  # type: ignore[assignment]
        claimant=lambda oid: 5, aborted=lambda oid: True, set_pid=lambda slot, pid: None
    )
    world.workers.interrupt(77, 5)
    assert not world.interrupted
    world.workers.spawned(5, pid)
    world.loop.pass_time(INTERRUPT_AGAIN_S)
    assert world.interrupted == [pid]


@pytest.mark.parametrize("event", ["another waits", "promoted", "replaced", "closed"])
def test_stand_in_that_sleeps_for_tasks_is_woken_at_once(host: ShmHost, event: str) -> None:
    """On the word on which it sleeps: nothing ends its sleep but that wake-up."""
    world, parties = World(host), [Party(host), Party(host)]
    world.workers.client = host.node  # type: ignore[assignment]
    slept, woken = [], []
    own, stand_in = parties
    for one in parties:
        world.add(one.slot)
    worker = world.workers.all[stand_in.slot]
    worker.stands_in, world.pool.target = True, 1
    host.node.set_stands_in(stand_in.slot, True)

    def sleep(word: int, ns: int) -> None:
        slept.append(word - stand_in.client.control_address)
        if event == "another waits":
            own.tasks.set_blocked(True)
            world.workers.poll()
        elif event == "promoted":
            world.workers.all[own.slot].retiring = True
            world.workers.start_missing(world.pool)
        elif event == "closed":
            world.workers.outbound_tasks = SimpleNamespace(close_remote=lambda *_: None)  # type: ignore[assignment]
            world.workers.close(POOL, False)
        else:
            world.workers.replace(worker)

    _tasks.play(sleep, lambda word: woken.append(word - host.node.control_address))
    try:
        stand_in.tasks.next(POOL, 60 * 10**9)
    finally:
        _tasks.play(None, None)
    assert slept[0] in woken
    assert worker.stands_in == (event != "promoted")
