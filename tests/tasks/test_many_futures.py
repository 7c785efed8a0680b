"""What a wait for many Futures costs for each of them, in calls and objects instead of seconds."""

from __future__ import annotations

import concurrent.futures
import gc
import time
from typing import TYPE_CHECKING, Any

import pytest

import hoplite_mp
from hoplite_mp import Cluster, ObjectRef
from hoplite_mp._client import futures as futures_module
from hoplite_mp._client.channel import Channel
from hoplite_mp._client.memory import Memory
from tests.support.waiting import eventually, wait_for

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from hoplite_mp._client.futures import Future

MANY = 400
OBJECTS_MAX = 5  # that the garbage collector visits, for each Future that is waited for
NAP_S = 60.0


def second(_: Any, value: int) -> int:
    return value


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    with hoplite_mp.Cluster(workers=1) as cluster:
        yield cluster


@pytest.fixture
def pending(cluster: Cluster) -> Iterator[list[Future[int]]]:
    """Futures that stay pending until the test is over."""
    gate = cluster.submit(time.sleep, NAP_S)
    yield [cluster.submit(second, gate, n) for n in range(MANY)]
    gate.cancel(force=True)


def test_standard_wait_for_done_futures_makes_no_condition(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = [cluster.submit(abs, n) for n in range(MANY)]
    cluster.wait(done)
    made: list[object] = []
    monkeypatch.setattr(futures_module, "_Condition", made.append)
    assert concurrent.futures.wait(done, timeout=0).done == set(done)
    assert set(concurrent.futures.as_completed(done, timeout=0)) == set(done)
    assert not made
    assert cluster._runtime.submitter.collector._armed == 0


def test_callback_of_a_done_future_without_a_condition_runs_at_once(cluster: Cluster) -> None:
    future = cluster.submit(abs, -3)
    cluster.wait(future)
    called: list[Any] = []
    future.add_done_callback(called.append)
    assert called == [future]
    with future._condition:
        assert future._condition.wait(0)
    assert future.result() == 3


def test_cancelled_future_is_cancelled_for_the_standard_library(cluster: Cluster) -> None:
    gate = cluster.submit(time.sleep, NAP_S)
    future = cluster.submit(second, gate, 1)
    assert future.cancel()
    assert concurrent.futures.wait([future], timeout=0).done == {future}
    with pytest.raises(concurrent.futures.CancelledError):
        next(concurrent.futures.as_completed([future], timeout=0)).result()
    gate.cancel(force=True)


def test_standard_wait_for_pending_futures_makes_few_objects(
    pending: list[Future[int]],
) -> None:
    before = objects()
    assert not concurrent.futures.wait(pending, timeout=0).done
    assert objects() - before <= OBJECTS_MAX * len(pending)


def test_as_completed_of_pending_futures_makes_few_objects(pending: list[Future[int]]) -> None:
    before = objects()
    iterator = hoplite_mp.as_completed(pending)
    assert iterator.take() is None
    assert objects() - before <= OBJECTS_MAX * len(pending)


def objects() -> int:
    gc.collect()
    return len(gc.get_objects())


def test_standard_wait_ends_with_the_last_of_many_futures(cluster: Cluster) -> None:
    gate = cluster.submit(time.sleep, 0.2)
    sent = [cluster.submit(second, gate, n) for n in range(MANY)]
    assert concurrent.futures.wait(sent, timeout=60).done == set(sent)
    assert [future.result() for future in sent] == list(range(MANY))


def test_wait_for_one_of_many_reads_no_id_in_python(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    items: list[Any] = [cluster.submit(abs, n) for n in range(MANY)]
    items += [cluster.put(n) for n in range(MANY)]
    cluster.wait(items)
    read: list[ObjectRef[Any]] = []
    monkeypatch.setattr(Memory, "local_id", lambda _, ref: read.append(ref))
    done, left = cluster.wait(items, num=1)
    assert (done, left) == (items[:1], items[1:])
    assert not read


def test_wait_sorts_its_items_in_the_given_order(
    cluster: Cluster, pending: list[Future[int]]
) -> None:
    ref = cluster.put(1)
    items = [ref, *pending[:2], ref, pending[2].ref]
    assert cluster.wait(items, num=2) == ([ref, ref], [*pending[:2], pending[2].ref])
    assert cluster.wait(items, timeout=0) == ([ref, ref], [*pending[:2], pending[2].ref])
    assert cluster.wait(ref) == ([ref], [])
    with pytest.raises(TypeError, match="expected a ref or a Future, not"):
        cluster.wait([ref, [ref]])
    with pytest.raises(TypeError, match="expected a ref or a Future, not"):
        cluster.wait([ref, 3])


def fail() -> None:
    raise ValueError("broken")


def test_tasks_that_need_one_failed_future_read_its_error_once(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    failed = cluster.submit(fail)
    cluster.wait(failed)
    read: list[object] = []
    asked: list[object] = []
    error, call = Memory.error, Channel.call
    monkeypatch.setattr(Memory, "error", lambda *args: (read.append(args[1]), error(*args))[1])
    monkeypatch.setattr(Channel, "call", lambda *args: (asked.append(args[1]), call(*args))[1])
    sent = [cluster.submit(second, failed, n) for n in range(MANY)]
    cluster.wait(sent)
    assert len(read) == 1
    assert len(asked) <= MANY / 20, "one request for many errors"
    monkeypatch.undo()
    for future in sent:
        with pytest.raises(ValueError, match="broken") as found:
            future.result()
        assert "in fail" in str(found.value.__cause__)


def test_interrupt_while_a_condition_is_made_leaves_the_collector_at_rest(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    collector = cluster._runtime.submitter.collector
    gate = cluster.submit(wait_for, tmp_path / "go")

    def interrupted() -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(collector, "arm", interrupted)
        with pytest.raises(KeyboardInterrupt):
            concurrent.futures.wait([gate])
    (tmp_path / "go").touch()
    assert gate.result() == str(tmp_path / "go")
    cluster.submit(abs, -1).result()
    assert collector._armed == 0
    assert concurrent.futures.wait([cluster.submit(abs, -2)], timeout=NAP_S).done
    eventually(lambda: collector._armed == 0)
