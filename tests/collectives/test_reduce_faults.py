"""What goes wrong while a reduction runs, and that nothing of it stays in the store."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import hoplite_mp
from hoplite_mp import ObjectLostError, ReduceError, StoreFullError, WorkerLostError
from tests.support.functions import after, raise_key_error
from tests.support.waiting import Gate, eventually

if TYPE_CHECKING:
    from pathlib import Path

    from hoplite_mp import Cluster

MIB = 1 << 20
SPANS_BYTES = 3 * MIB  # processes keep a span each for small objects, once they had one


def baseline(cluster: Cluster, folder: Path) -> dict[str, int]:
    """What the store holds while nothing goes on; functions that were called once stay in it."""
    gate = Gate(folder, "open")
    gate.open()
    cluster.wait([cluster.submit(raise_key_error, "warm"), cluster.submit(after, gate, 1)])
    last: list[Any] = []

    def quiet() -> bool:
        last.append({k: cluster.stats()[k] for k in ("objects", "bytes_used")})
        return len(last) > 5 and last[-1] == last[-5]

    eventually(quiet, "a quiet store")
    return dict(last[-1])


def back_to(cluster: Cluster, before: dict[str, int]) -> None:
    """Fails when something is held that was not held before."""
    eventually(
        lambda: (
            cluster.stats()["objects"] <= before["objects"]
            and cluster.stats()["bytes_used"] <= before["bytes_used"] + SPANS_BYTES
        ),
        f"{before} again",
    )


def test_dropping_everything_early_leaks_nothing(cluster: Cluster, tmp_path: Path) -> None:
    before = baseline(cluster, tmp_path)
    gate = Gate(tmp_path)
    late = cluster.submit(after, gate, np.ones(50_000))
    refs = [cluster.put(np.ones(50_000)) for _ in range(4)]
    for _ in range(10):
        cluster.reduce([*refs, late])
        cluster.reduce(refs)
        cluster.reduce(refs, num=2)
        cluster.reduce_scatter(refs)
        cluster.gather(refs)
        cluster.reduce([refs[0], cluster.put(np.ones(3))])  # a ValueError that nobody reads
        cluster.reduce([refs[0], cluster.submit(raise_key_error, "unread")])
    del refs
    gate.open()
    late.result(timeout=20)
    del late
    back_to(cluster, before)


def test_an_error_holds_its_cause_and_no_longer(cluster: Cluster, tmp_path: Path) -> None:
    before = baseline(cluster, tmp_path)
    result = cluster.reduce([cluster.put(1), cluster.submit(raise_key_error, "held")])
    cluster.wait(result)
    with pytest.raises(ReduceError) as caught:
        cluster.get(result)
    assert caught.value.__cause__.args == ("held",)
    del caught, result
    back_to(cluster, before)


@pytest.mark.parametrize("when", ["before", "during"])
def test_the_result_is_deleted_while_it_is_made(
    cluster: Cluster, tmp_path: Path, when: str
) -> None:
    before = baseline(cluster, tmp_path)
    length = MIB if when == "during" else 10
    for number in range(10):
        gate = Gate(tmp_path, str(number))
        refs = [cluster.put(np.ones(length, np.float32)) for _ in range(6)]
        late = cluster.submit(after, gate, np.ones(length, np.float32))
        result = cluster.reduce([*refs, late])
        if when == "during":
            gate.open()
            late.result(timeout=20)
        cluster.delete(result)
        with pytest.raises(ObjectLostError):
            cluster.get(result, timeout=20)
        assert result.contributors is None
        gate.open()
        again = cluster.reduce([*refs, late])
        assert (cluster.get(again, timeout=20) == 7).all()
    del refs, late, result, again
    back_to(cluster, before)


def test_a_source_that_is_deleted_at_any_moment(cluster: Cluster) -> None:
    """It went in before, or the reduction says what is missing, or another takes its place."""
    outcomes = set()
    for number in range(60):
        refs = [cluster.put(np.full(1000 * (number % 7 + 1), 2.0**k)) for k in range(4)]
        every, some = cluster.reduce(refs), cluster.reduce(refs, num=3)
        if number % 3:
            cluster.wait(every, timeout=0.0001 * (number % 5) if number < 59 else 20)
        cluster.delete(refs[1])
        try:
            assert (cluster.get(every, timeout=20) == 15).all()
            assert every.contributors == (0, 1, 2, 3)
            outcomes.add("in")
        except ReduceError as error:
            assert type(error.__cause__) is ObjectLostError  # noqa: PT017
            outcomes.add("lost")
        total = sum(
            2.0**k for k in (some.contributors or (cluster.get(some), some.contributors)[1])
        )
        assert (cluster.get(some, timeout=20) == total).all()
        assert len(some.contributors) == 3
    assert "in" in outcomes


def test_a_source_whose_worker_is_killed_is_made_again(cluster: Cluster, tmp_path: Path) -> None:
    def once_more(folder: Path, gate: Gate) -> Any:
        with (folder / "pids").open("a") as file:
            file.write(f"{os.getpid()}\n")
        return after(gate, np.full(4, 2.0))

    gate = Gate(tmp_path)
    task = cluster.submit(once_more, tmp_path, gate)
    final = cluster.options(retries=0).submit(once_more, tmp_path, gate)
    result = cluster.reduce([task, cluster.put(np.ones(4))])
    lost = cluster.reduce([final, cluster.put(np.ones(4))])
    pids = tmp_path / "pids"
    eventually(lambda: pids.exists() and len(pids.read_text().split()) == 2, "both to run")
    first = pids.read_text().split()
    for pid in first:
        os.kill(int(pid), signal.SIGKILL)
    with pytest.raises(ReduceError) as caught:
        cluster.get(lost, timeout=20)
    assert type(caught.value.__cause__) is WorkerLostError
    gate.open()
    assert cluster.get(result, timeout=20).tolist() == [3.0] * 4
    assert len(pids.read_text().split()) == 3


def test_several_threads(cluster: Cluster) -> None:
    wrong: list[Any] = []

    def calls(number: int) -> None:
        for step in range(40):
            refs = [cluster.put(np.full(100, number + k)) for k in range(step % 5 + 1)]
            result = cluster.reduce(refs, "max")
            if (got := cluster.get(result, timeout=20).max()) != number + step % 5:
                wrong.append((number, step, got))

    threads = [threading.Thread(target=calls, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    assert wrong == []


def test_tasks_reduce_and_hand_the_result_on(cluster: Cluster) -> None:
    def level(depth: int) -> Any:
        here = hoplite_mp.current()
        if depth == 0:
            return np.ones(3)
        parts = [here.submit(level, depth - 1) for _ in range(2)]
        result = here.reduce([here.submit(np.negative, here.reduce(parts)), here.put(np.ones(3))])
        got = here.get(result)
        assert result.contributors == (0, 1)
        return got

    def hand_on() -> Any:
        here = hoplite_mp.current()
        return here.reduce([here.put(np.arange(4)) for _ in range(3)])

    assert cluster.submit(level, 3).result(timeout=30).tolist() == [-5.0] * 3
    ref = cluster.submit(hand_on).result(timeout=20)
    assert cluster.get(ref, timeout=20).tolist() == [0, 3, 6, 9]
    assert ref.contributors == (0, 1, 2)


def test_the_caller_dies_and_the_sources_stay_good(cluster: Cluster, tmp_path: Path) -> None:
    def reduce_and_die(refs: Any, folder: Path) -> None:
        here = hoplite_mp.current()
        here.reduce(refs.value)
        os.kill(os.getpid(), signal.SIGKILL)

    class Box:
        def __init__(self, value: Any) -> None:
            self.value = value

    before = baseline(cluster, tmp_path)
    gate = Gate(tmp_path)
    refs = [cluster.put(np.ones(50_000)), cluster.submit(after, gate, np.ones(50_000)).ref]
    task = cluster.options(retries=0).submit(reduce_and_die, Box(refs), tmp_path)
    assert isinstance(task.exception(timeout=20), WorkerLostError)
    gate.open()
    assert (cluster.get(cluster.reduce(refs), timeout=20) == 2).all()
    del refs, task
    back_to(cluster, before)


def test_spilled_sources_are_read_back(tmp_path: Path) -> None:
    with hoplite_mp.Cluster(workers=0, memory="48MiB", spill_dir=tmp_path) as cluster:
        refs = [cluster.put(np.full(MIB, k, np.float32)) for k in range(16)]  # 4 MiB each
        assert cluster.stats()["bytes_spilled"] > 0
        first, last = cluster.reduce(refs[:4]), cluster.reduce(refs[12:], num=3)
        mixed = cluster.reduce([refs[0], refs[15], refs[0], refs[7]], "max")
        assert (cluster.get(first, timeout=20) == 6).all()
        assert (cluster.get(last, timeout=20) == sum(12 + k for k in last.contributors)).all()
        assert (cluster.get(mixed, timeout=20) == 15).all()
        assert mixed.contributors == (0, 1, 2, 3)


def test_no_room_for_the_result() -> None:
    config = hoplite_mp.Config(put_wait_s=0.3)
    with hoplite_mp.Cluster(workers=0, memory="16MiB", config=config) as cluster:
        refs = [cluster.put(np.ones(MIB, np.float32)) for _ in range(3)]
        arrays = cluster.get(refs)  # in use: they stay
        result = cluster.reduce(refs)
        with pytest.raises(StoreFullError, match=r"store of h0 holds .* of 16 MiB") as caught:
            cluster.get(result, timeout=20)
        assert f"12.0 MiB pinned by arrays in process {os.getpid()}" in str(caught.value)
        del arrays

        def has_room() -> bool:
            with contextlib.suppress(StoreFullError):
                return bool((cluster.get(cluster.reduce(refs), timeout=20) == 3).all())
            return False

        eventually(has_room, "a sum, when nothing is pinned any more")


def test_a_result_waits_for_room() -> None:
    config = hoplite_mp.Config(put_wait_s=60)
    with hoplite_mp.Cluster(workers=0, memory="16MiB", config=config) as cluster:
        refs = [cluster.put(np.ones(MIB, np.float32)) for _ in range(2)]
        # In use: they stay.
        other = [cluster.get(cluster.put(np.ones(MIB, np.float32))), *cluster.get(refs)]
        result = cluster.reduce(refs)
        assert cluster.wait(result, timeout=0.1) == ([], [result])
        other.clear()
        assert (cluster.get(result, timeout=20) == 2).all()
