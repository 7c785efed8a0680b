"""Delays between tries: when a task is announced again, and what ends its delay before."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from hoplite_mp import _tasks
from hoplite_mp._client.option_checks import retry_pause
from hoplite_mp._node.tasks.retry_delays import RetryDelays
from tests.support.shm_host import KIND_TASK, POOL, STATE, Party, ShmHost

if TYPE_CHECKING:
    from collections.abc import Iterator

TRIES = 6


class World:
    """The component, on a host whose pool is open."""

    def __init__(self, host: ShmHost) -> None:
        self.host = host
        self.party = Party(host)
        self.worker = Party(host)
        self.announced: list[int] = []
        self.failed: list[int] = []
        self.pool = SimpleNamespace(closing=False, broken="", setup_text="", host_lost=False)
        workers: Any = SimpleNamespace(
            pools={POOL: self.pool},
            events=SimpleNamespace(may_leave=lambda: False),
            is_bound=lambda oid: False,
            announce=self.announce,
            fail=lambda oid, *_: self.failed.append(oid),
            fail_closed=self.failed.append,
        )
        resources: Any = SimpleNamespace(take_back=lambda oid: ())
        context: Any = SimpleNamespace(loop=host.loop, client=host.node, tasks=host.node_tasks)
        self.delays = RetryDelays(context, workers, set(), resources)  # type: ignore[arg-type]

    def announce(self, oid: int, here: bool) -> None:
        self.announced.append(oid)
        assert self.host.node_tasks.post(oid, self.host.queue)

    def task(self, *delay: float) -> int:
        party = self.party
        oid: int = party.client.new(KIND_TASK, STATE["WAITING"], 0, POOL)
        party.tasks.set_retry_delay(oid, *delay)
        flags = _tasks.DELAYED_FLAG
        party.tasks.submit(oid, 0, b"", 0, TRIES, 0, flags, b"t", party.queue, True)
        return oid

    def try_again(self, oid: int) -> None:
        """A try of the task, and its end; the task has a retry left."""
        assert self.worker.tasks.next(POOL, 0) == oid
        assert self.host.node.requeue(oid, self.worker.slot)
        assert self.host.node.state(oid) == STATE["WAITING"]
        self.delays.begin(oid)


@pytest.fixture(name="world")
def fixture_world(host: ShmHost) -> World:
    return World(host)


@pytest.fixture(name="host")
def fixture_host() -> Iterator[ShmHost]:
    made = ShmHost()
    yield made
    made.close()


@pytest.mark.parametrize("delay", [(1.0, 1.0, 1.0), (0.5, 2.0, 3.0), (2.0, 1e30, 1e6)])
def test_pauses_grow_by_the_factor_up_to_the_longest(
    world: World, delay: tuple[float, float, float]
) -> None:
    oid, loop = world.task(*delay), world.host.loop
    for tries in range(1, TRIES):
        world.try_again(oid)
        pause = world.host.node_tasks.retry_pause(oid)
        assert pause == pytest.approx(min(delay[0] * delay[1] ** (tries - 1), delay[2]), 1e-6)
        assert pause == pytest.approx(retry_pause(delay, tries), 1e-6)
        assert world.delays.waiting() == {oid: pytest.approx(pause)}
        loop.pass_time(pause * 0.999)
        assert world.announced == [oid] * (tries - 1)
        assert not world.worker.tasks.claim(oid), "no worker can begin it before"
        loop.pass_time(pause * 0.002)
        assert world.announced == [oid] * tries
        assert not world.delays.waiting()
        assert world.host.node.objects() == 0, "its result is not there yet"


@pytest.mark.parametrize("event", ["cancelled", "closed", "forgotten", "broken"])
def test_end_of_a_task_or_its_pool_ends_the_delay(world: World, event: str) -> None:
    oid = world.task(5.0, 1.0, 5.0)
    world.try_again(oid)
    if event == "cancelled":
        assert world.party.tasks.cancel(oid) == 1
        assert not world.delays.waiting()
    elif event == "closed":
        world.pool.closing = True
    elif event == "broken":
        world.pool.broken = "its initializer raised"
    else:
        world.delays.workers.pools.clear()
        world.delays.pool_forgotten(POOL)
        assert world.failed == [oid]
    world.host.loop.pass_time(6.0)
    assert not world.announced
    assert world.failed == ([] if event == "cancelled" else [oid])


def test_task_without_a_delay_is_queued_again_at_once(world: World) -> None:
    oid = world.party.task()
    assert world.worker.tasks.next(POOL, 0) == oid
    assert world.host.node.requeue(oid, world.worker.slot)
    assert world.host.node.state(oid) == STATE["QUEUED"]
