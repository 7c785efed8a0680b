"""Delays between tries: when a task is announced again, and what ends its delay before."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from hoplite_mp._client.option_checks import retry_pause
from hoplite_mp._common.object_states import DRIVER_SLOT, STATE
from hoplite_mp._protocol.local import (
    SETUP_FAILED,
    ClosePool,
    InitializerFailed,
    OpenPool,
    RetryTask,
)
from hoplite_mp.errors import WorkerLostError

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.support.node_harness import HarnessProcess, NodeHarness

TRIES = 6


@pytest.fixture
def node(make_node: Callable[..., NodeHarness]) -> NodeHarness:
    return make_node(alone=True)


@pytest.fixture
def driver(node: NodeHarness) -> HarnessProcess:
    return node.process(DRIVER_SLOT)


@pytest.fixture
def pool(node: NodeHarness, driver: HarnessProcess) -> int:
    """Its number; it has two workers and an initializer."""
    setup = driver.put("the initializer")
    return int(node.answer(DRIVER_SLOT, OpenPool(2, 0, setup.oid)).value)


@pytest.fixture
def worker(node: NodeHarness, pool: int) -> HarnessProcess:
    slot, _ = (ask.slot for ask in node.processes.spawned)
    node.worker_started(slot)
    return node.process(slot)


def try_in_vain(node: NodeHarness, worker: HarnessProcess, pool: int, oid: int) -> None:
    """The worker runs the task, which fails and has a retry left."""
    assert worker.next(pool) == oid
    assert node.answer(worker.slot, RetryTask(oid)).value


@pytest.mark.parametrize("delay", [(1.0, 1.0, 1.0), (0.5, 2.0, 3.0), (2.0, 1e30, 1e6)])
def test_retry_delay_grows_up_to_its_maximum(
    node: NodeHarness,
    driver: HarnessProcess,
    worker: HarnessProcess,
    pool: int,
    delay: tuple[float, float, float],
) -> None:
    oid = driver.submit(pool, retries=TRIES, delay=delay).oid
    for tries in range(1, TRIES):
        try_in_vain(node, worker, pool, oid)
        assert node.node.state(oid) == STATE["WAITING"]
        pause = node.node_tasks.retry_pause(oid)
        assert pause == pytest.approx(min(delay[0] * delay[1] ** (tries - 1), delay[2]), 1e-6)
        assert pause == pytest.approx(retry_pause(delay, tries), 1e-6)
        assert node.parts.delays.waiting() == {oid: pytest.approx(pause)}
        node.loop.pass_time(pause * 0.999)
        assert worker.next(pool) == 0
        assert not worker.tasks.claim(oid), "no worker can begin it before"
        node.loop.pass_time(pause * 0.002)
        assert node.node.state(oid) == STATE["QUEUED"]
        assert not node.parts.delays.waiting()
        assert node.node.objects() == 1, "besides the initializer: its result is not there yet"


@pytest.mark.parametrize("event", ["cancelled", "closed", "forgotten", "broken"])
def test_end_of_a_task_or_pool_ends_the_retry_delay(
    node: NodeHarness, driver: HarnessProcess, worker: HarnessProcess, pool: int, event: str
) -> None:
    hold = driver.submit(pool, retries=TRIES, delay=(5.0, 1.0, 5.0))
    try_in_vain(node, worker, pool, hold.oid)
    if event == "cancelled":
        assert driver.tasks.cancel(hold.oid) == 1
        assert not node.parts.delays.waiting()
    elif event == "broken":
        other = node.processes.spawned[1].slot
        node.ask(other, InitializerFailed("it raised", ""))
        node.worker_exited(other, SETUP_FAILED)
    else:
        node.ask(DRIVER_SLOT, ClosePool(pool, kill=False), 0)
        if event == "forgotten":
            for ask in node.processes.spawned:
                node.worker_exited(ask.slot, 0)
            assert isinstance(driver.value(hold.oid), WorkerLostError)
    node.loop.pass_time(6.0)
    assert node.node.state(hold.oid) != STATE["QUEUED"]
    if event != "cancelled":
        assert isinstance(driver.value(hold.oid), WorkerLostError)


def test_task_without_a_delay_is_queued_again_at_once(
    node: NodeHarness, driver: HarnessProcess, worker: HarnessProcess, pool: int
) -> None:
    hold = driver.submit(pool, retries=1)
    try_in_vain(node, worker, pool, hold.oid)
    assert worker.next(pool) == hold.oid
