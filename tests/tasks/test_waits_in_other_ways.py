"""A task waits for its own tasks in ways that are not ours, counts as blocked, and never hangs."""

from __future__ import annotations

import concurrent.futures
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest

import hoplite_mp
from hoplite_mp._client.collector import Collector
from tests.support.functions import add
from tests.support.waiting import PATIENCE_S

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hoplite_mp import Cluster


@pytest.fixture(scope="module")
def one() -> Iterator[Cluster]:
    with hoplite_mp.Cluster(workers=1, memory="64MiB") as made:
        yield made


def standard_wait() -> int:
    future = hoplite_mp.current().submit(add, 1, 2)
    done, _ = concurrent.futures.wait([future], PATIENCE_S)
    return len(done) and future.result(PATIENCE_S)


def standard_as_completed() -> int:
    futures = [hoplite_mp.current().submit(add, 1, i) for i in range(2)]
    return sum(one.result() for one in concurrent.futures.as_completed(futures, PATIENCE_S))


def with_the_standard_librarys() -> int:
    """as_completed of Futures of two kinds."""
    with concurrent.futures.ThreadPoolExecutor(1) as threads:
        futures = [hoplite_mp.current().submit(add, 1, 2), threads.submit(add, 0, 0)]
        got = hoplite_mp.as_completed(futures, PATIENCE_S)  # type: ignore[type-var]
        return sum(future.result() for future in got)


def send(name: str) -> None:
    group = hoplite_mp.current().group(name, 2, 1, timeout=PATIENCE_S)
    group.send(3, to=0)
    group.barrier()


def received_later() -> int:
    cluster = hoplite_mp.current()
    group = cluster.group("received later", 2, 0, timeout=PATIENCE_S)
    future = group.recv_async(source=1)
    sender = cluster.submit(send, "received later")
    value = future.result(PATIENCE_S)
    group.barrier()
    sender.result(PATIENCE_S)
    return int(value)


@pytest.mark.parametrize(
    "task",
    [standard_wait, standard_as_completed, with_the_standard_librarys, received_later],
)
def test_the_only_worker_waits_for_a_task_of_its_own(one: Cluster, task: Any) -> None:
    assert one.submit(task).result(2 * PATIENCE_S) == 3


class Own:
    def add(self, a: int, b: int) -> int:
        return a + b

    def waits(self) -> str:
        ref = hoplite_mp.current().get_actor("own").add(1, 2).ref
        try:
            list(hoplite_mp.as_completed([ref], PATIENCE_S))
        except RuntimeError as error:
            return str(error)
        return "none"


def test_as_completed_of_a_ref_of_an_own_later_call(one: Cluster) -> None:
    actor = one.options(name="own").actor(Own)
    assert "is a later call to this actor" in actor.waits().result(2 * PATIENCE_S)
    hoplite_mp.Actor.kill(actor)


def cancelled_while_waited_for() -> str:
    group = hoplite_mp.current().group("cancelled while waited for", 1)
    future = group.recv_async(tag=9)
    timer = threading.Timer(0.2, future.cancel)
    timer.start()
    try:
        future.result(PATIENCE_S)
    except concurrent.futures.CancelledError:
        return "cancelled"
    return "none"


def test_a_receive_that_another_thread_cancels(one: Cluster) -> None:
    assert one.submit(cancelled_while_waited_for).result(2 * PATIENCE_S) == "cancelled"


def computes_with_a_callback() -> int:
    future = hoplite_mp.current().submit(add, 2, 3)
    future.add_done_callback(lambda done: None)
    until = time.monotonic() + 1.5
    while time.monotonic() < until:
        pass
    return int(future.result())  # runs it in place


def test_a_callback_alone_is_no_wait() -> None:
    """The task computes meanwhile. If it counted as blocked, its own task would be failed, because
    no worker could ever run it."""
    config = hoplite_mp.Config(blocked_workers_max=0)
    with hoplite_mp.Cluster(workers=1, memory="64MiB", config=config) as cluster:
        assert cluster.submit(computes_with_a_callback).result(PATIENCE_S) == 5


class EndedRuntime:
    """The runtime of a cluster that has ended, with its client, tasks and memory."""

    slot, usable, lost = 0, False, None

    def __init__(self) -> None:
        self.client = self.tasks = self.memory = self

    def wake(self, slot: int) -> None: ...


def test_what_was_stopped_is_stopped_again_at_once() -> None:
    """Both by the code that looks for completions itself and after the thread's end."""
    idle: Any = EndedRuntime()
    for begin in (Collector.stay_away, Collector.start):
        collector = Collector(idle)
        begin(collector)
        collector._closed = True
        collector.wake()
        collector._ended.put(collector._ended.get(timeout=PATIENCE_S))  # however long it takes
        for _ in range(2):
            collector.stop()
            assert not collector._ended.empty()  # what a further call waits for, or gives up on
