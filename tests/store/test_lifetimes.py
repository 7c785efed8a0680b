"""delete, timeouts, wait, locations, and refs of clusters that are gone."""

from __future__ import annotations

import gc
import pickle
import threading
import time
from concurrent.futures import CancelledError
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import hoplite_mp
from hoplite_mp import HopliteTimeoutError, ObjectLostError
from tests.support.functions import checksum, echo
from tests.support.store import client, header
from tests.support.values import MIB, mib
from tests.support.waiting import eventually, falls_to, settles

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hoplite_mp import Cluster


def when(path: str, value: Any = None) -> Any:
    """A task's body: the value, once the file is there."""
    Path(path + ".here").touch()
    eventually(Path(path).exists, path)
    return value


def fail(text: str) -> Any:
    raise KeyError(text)


class Gate:
    def __init__(self, folder: Path) -> None:
        self.path = str(folder / "gate")

    def open(self) -> None:
        Path(self.path).touch()

    def await_task(self) -> None:
        eventually(Path(self.path + ".here").exists, "the task's start")


@pytest.fixture
def gate(tmp_path: Path) -> Gate:
    return Gate(tmp_path)


@pytest.fixture
def quiet() -> Iterator[Cluster]:
    """Nobody else's objects come or go in it."""
    with hoplite_mp.Cluster(workers=0, memory="128MiB") as made:
        yield made


# -- delete --------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [3, 1000, MIB])
def test_deleted_is_lost_for_all_gets_to_come(cluster: Cluster, size: int) -> None:
    ref = cluster.put(np.arange(size))
    array = cluster.get(ref)
    cluster.delete(ref)
    for _ in range(2):
        with pytest.raises(ObjectLostError, match="deleted"):
            cluster.get(ref)
    with pytest.raises(ObjectLostError):
        cluster.submit(echo, ref).result()
    with pytest.raises(ObjectLostError):
        cluster.submit(lambda inside: hoplite_mp.current().get(inside.value), by(ref)).result()
    assert cluster.locations(ref) == []
    assert cluster.wait(ref, timeout=0) == ([ref], [])
    cluster.delete(ref)  # once more changes nothing
    assert (array == np.arange(size)).all()


class Carrier:
    """Refs in objects of other types stay refs."""

    def __init__(self, value: Any) -> None:
        self.value = value


def by(ref: Any) -> Carrier:
    return Carrier(ref)


def test_arrays_in_use_keep_their_memory(quiet: Cluster) -> None:
    cluster = quiet
    before = cluster.stats()["bytes_used"]
    ref = cluster.put(mib(8))
    array = cluster.get(ref)
    cluster.delete(ref)
    others = [cluster.put(mib(8, seed)) for seed in range(1, 8)]
    assert (array == mib(8)).all()
    del others, ref
    settles(lambda: cluster.stats()["bytes_used"], before + 8 * MIB + 4096)
    assert (array == mib(8)).all()
    del array
    settles(lambda: cluster.stats()["bytes_used"], before)


def test_delete_gives_the_bytes_back_while_refs_live(quiet: Cluster) -> None:
    cluster = quiet
    before = cluster.stats()["bytes_used"]
    refs = [cluster.put(mib(1)) for _ in range(10)]
    cluster.delete(refs)
    settles(lambda: cluster.stats()["bytes_used"], before)
    assert len(refs) == 10


def test_queued_tasks_see_a_failed_source(cluster: Cluster, gate: Gate) -> None:
    source = cluster.submit(when, gate.path, 1)
    gate.await_task()
    other = cluster.put(5)
    waiting = [cluster.submit(lambda a, b: a, source, other) for _ in range(3)]
    cluster.delete(other)
    gate.open()
    for future in waiting:
        with pytest.raises(ObjectLostError, match="deleted"):
            future.result()
    assert source.result() == 1


def test_a_pending_result_may_be_deleted(cluster: Cluster, gate: Gate) -> None:
    running = cluster.submit(when, gate.path, mib(1))
    gate.await_task()
    dependent = cluster.submit(checksum, running)
    cluster.delete(running)
    for call in (lambda: cluster.get(running), dependent.result, running.result):
        with pytest.raises((ObjectLostError, CancelledError)):
            call()
    gate.open()
    eventually(lambda: header(cluster, running.ref)["state"] == "DELETED", "its end")
    before = cluster.stats()["bytes_used"]
    running = dependent = None
    falls_to(lambda: cluster.stats()["bytes_used"], before)


def test_a_reduction_of_a_deleted_source_fails(cluster: Cluster, gate: Gate) -> None:
    sources = [cluster.put(np.ones(10)), cluster.submit(when, gate.path, np.ones(10))]
    gate.await_task()
    total = cluster.reduce(sources)
    cluster.delete(sources[0])
    gate.open()
    with pytest.raises(hoplite_mp.ReduceError) as caught:
        cluster.get(total)
    assert isinstance(caught.value.__cause__, ObjectLostError)


# -- get -----------------------------------------------------------------------------------------


def test_get_with_timeouts(cluster: Cluster, gate: Gate) -> None:
    ready, pending = cluster.put(1), cluster.submit(when, gate.path, 2)
    gate.await_task()
    assert cluster.get(ready, timeout=0) == 1
    for timeout in (0, 0.05):
        begun = time.monotonic()
        with pytest.raises(HopliteTimeoutError):
            cluster.get(pending, timeout=timeout)
        with pytest.raises(TimeoutError):
            cluster.get([ready, pending], timeout=timeout)
        assert time.monotonic() - begun >= timeout
    gate.open()
    assert cluster.get([ready, pending], timeout=20) == [1, 2]
    assert cluster.get(pending, timeout=0) == 2


def test_get_of_a_list_raises_the_first_failure_in_order(cluster: Cluster) -> None:
    good, gone = cluster.put(1), cluster.put(2)
    first, second = cluster.submit(fail, "first"), cluster.submit(fail, "second")
    cluster.delete(gone)
    cluster.wait([first, second])
    for refs, error, text in (
        ([good, first, second], KeyError, "first"),
        ([second, first, gone], KeyError, "second"),
        ([good, gone, first], ObjectLostError, "deleted"),
        ((first.ref, good), KeyError, "first"),
    ):
        with pytest.raises(error, match=text):
            cluster.get(refs)
    assert cluster.get([]) == []
    assert cluster.get((good, good)) == (1, 1)
    assert cluster.get(iter([good])) == [1]


@pytest.mark.parametrize("wrong", [5, "ref", [1], None, [None], object()])
def test_get_of_what_is_no_ref(cluster: Cluster, wrong: Any) -> None:
    with pytest.raises(TypeError):
        cluster.get(wrong)


# -- wait and locations --------------------------------------------------------------------------


def test_wait(cluster: Cluster, gate: Gate) -> None:
    pending = cluster.submit(when, gate.path, 1)
    gate.await_task()
    failed, ready = cluster.submit(fail, "x"), cluster.put(1)
    refs = [pending, failed, ready]
    assert cluster.wait(refs, num=2) == ([failed, ready], [pending])
    assert cluster.wait(refs, num=0) == ([], refs)
    assert cluster.wait(refs, num=1) == ([failed], [pending, ready]), "the first one in their order"
    assert cluster.wait(refs, num=3, timeout=0) == ([failed, ready], [pending])
    assert cluster.wait(refs, timeout=0) == ([failed, ready], [pending])
    begun = time.monotonic()
    assert cluster.wait(refs, timeout=0.05) == ([failed, ready], [pending])
    assert time.monotonic() - begun >= 0.05
    opener = threading.Timer(0.05, gate.open)
    opener.start()
    assert cluster.wait(refs) == (refs, [])
    opener.join()
    assert cluster.wait([]) == ([], [])
    assert cluster.wait(ready) == ([ready], [])
    assert cluster.wait([ready, ready], num=2) == ([ready, ready], [])
    for num in (-1, 4):
        with pytest.raises(ValueError, match="num"):
            cluster.wait(refs, num=num)


def test_get_skips_refs_that_have_failed(cluster: Cluster, gate: Gate) -> None:
    ready, failed = cluster.put(1), cluster.submit(fail, "x")
    deleted, cancelled = cluster.put("gone"), cluster.submit(when, gate.path, 1)
    own_timeout = cluster.submit(_raise_timeout)
    cluster.delete(deleted)
    gate.await_task()
    cancelled.cancel(force=True)
    last = cluster.submit(abs, -2)
    refs = [ready, failed, deleted, own_timeout, cancelled, last]
    assert cluster.get(refs, errors="skip") == [1, 2]
    assert cluster.get(iter(refs), errors="skip", timeout=20) == [1, 2]
    assert cluster.get([], errors="skip") == []
    with pytest.raises(KeyError):
        cluster.get(refs, errors="raise")
    for nested in (ready, failed, {"a": ready}, [ready, [ready]], [ready, (failed,)]):
        with pytest.raises(ValueError, match="flat iterable"):
            cluster.get(nested, errors="skip")
    with pytest.raises(ValueError, match=r"errors='ignore'.*skip"):
        cluster.get(refs, errors="ignore")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="a ref or a Future"):
        cluster.get([ready, 3], errors="skip")


def test_get_skips_refs_that_nobody_holds(cluster: Cluster) -> None:
    """Also names of objects of other hosts and clusters, to which this process has no hold."""
    with hoplite_mp.Cluster(1, memory="128MiB") as other:
        foreign = other.put(7)
        assert cluster.get([cluster.put(1), foreign], errors="skip") == [1]
    freed = pickle.loads(pickle.dumps(cluster.put("gone")))
    refs = [foreign, cluster.put(1), freed, cluster.put(2)]
    assert cluster.get(refs, errors="skip", timeout=20) == [1, 2]
    with hoplite_mp.Cluster(1, memory="128MiB") as closed:
        mine = closed.put(1)
    with pytest.raises(hoplite_mp.ClosedError):
        closed.get([foreign, mine], errors="skip")


def test_get_that_skips_failures_raises_its_timeout(cluster: Cluster, gate: Gate) -> None:
    pending = cluster.submit(when, gate.path, 1)
    gate.await_task()
    with pytest.raises(HopliteTimeoutError, match="not ready within"):
        cluster.get([cluster.submit(fail, "x"), pending], errors="skip", timeout=0.05)
    gate.open()
    assert cluster.get([pending], errors="skip") == [1]


def _raise_timeout() -> None:
    raise HopliteTimeoutError("the task's own")


def test_get_that_skips_failures_raises_errors_of_unpickling(cluster: Cluster) -> None:
    with pytest.raises(ZeroDivisionError):
        cluster.get([cluster.put(_Unloadable())], errors="skip")


class _Unloadable:
    def __reduce__(self) -> Any:
        return _divide, (1, 0)


def _divide(a: int, b: int) -> float:
    return a / b


def test_locations(cluster: Cluster, gate: Gate) -> None:
    pending, failed = cluster.submit(when, gate.path, 1), cluster.submit(fail, "x")
    ready = cluster.put(mib(1))
    gate.await_task()
    cluster.wait(failed)
    assert cluster.locations(ready) == [cluster.nodes[0].id]
    assert cluster.locations(pending) == cluster.locations(failed) == []
    gate.open()
    cluster.wait(pending)
    assert cluster.locations(pending) == [cluster.nodes[0].id]


# -- other clusters ------------------------------------------------------------------------------


def test_refs_of_another_cluster(cluster: Cluster) -> None:
    with hoplite_mp.Cluster(workers=0, memory="16MiB") as other:
        foreign = other.put(7)
        lost = other.put(8)
        with pytest.raises(ObjectLostError, match="another cluster"):
            cluster.get(foreign)
        assert other.get(foreign) == 7
    del lost  # after its cluster: drops nothing, touches nothing
    for call in (
        lambda: cluster.get(foreign),
        lambda: cluster.delete(foreign),
        lambda: cluster.submit(echo, foreign).result(),
        lambda: cluster.reduce([foreign]),
    ):
        with pytest.raises(ObjectLostError):
            call()
    assert foreign.contributors is None
    nested = cluster.put([foreign])  # a name may be handed on; it holds nothing
    assert cluster.get(nested) == [foreign]


def test_nothing_of_all_this_stays(cluster: Cluster) -> None:
    """Runs last in this file: the driver holds no more than the functions that it has sent."""
    gc.collect()
    slot = client(cluster).slot

    def left() -> int:
        cluster.stats()
        found = [h for h in client(cluster).scan() if h["state"] not in ("FREE", "FREED")]
        assert not [h for h in found if h["size"] > MIB and not h["pins"] and not h["refs"]]
        return sum(slot in h["refs"] for h in found)

    falls_to(left, len(cluster._runtime.submitter._functions))
