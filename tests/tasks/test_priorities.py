"""options(priority=): higher ones begin first, and what they wait for is not kept from them."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import pytest

import hoplite_mp
from hoplite_mp import _tasks
from hoplite_mp._common.object_states import STATE
from tests.support.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hoplite_mp import Cluster

PATIENCE_S = 60.0
MORE_THAN_FIT = _tasks.RANKED_HINTS_MAX + 200


@pytest.fixture(scope="module")
def one() -> Iterator[Cluster]:
    """One worker, so that what begins first has begun first."""
    with hoplite_mp.Cluster(workers=1, memory="256MiB") as made:
        yield made


@pytest.fixture(autouse=True)
def _opens() -> Iterator[None]:
    """No gate stays shut when a test fails."""
    yield
    for path in Gate.made:
        path.touch()


def hold(path: str) -> None:
    while not os.path.exists(path):
        time.sleep(0.002)


def begun(*_: Any) -> int:
    return time.monotonic_ns()


class Gate:
    """Tasks that are sent while it is shut begin when it opens."""

    made: ClassVar[list[Path]] = []

    def __init__(self, c: Any, folder: Path) -> None:
        self.path = folder / "open"
        self.made.append(self.path)
        self.path.unlink(missing_ok=True)
        self.held = c.options(priority=1 << 30).submit(hold, str(self.path))
        while not self.held.running():
            time.sleep(0.002)

    def order(self, futures: list[Any]) -> list[int]:
        """The places of the futures, in the order in which they began."""
        self.path.touch()
        times = [future.result(PATIENCE_S) for future in futures]
        return sorted(range(len(times)), key=lambda at: times[at])


def test_higher_ones_begin_first_and_equals_in_order(one: Cluster, tmp_path: Path) -> None:
    gate = Gate(one, tmp_path)
    priorities = [0, -1, 5, 0, 7, 5, -1, 0, 2_000_000_000, -2_000_000_000]
    futures = [one.options(priority=p).submit(begun) for p in priorities]
    expected = sorted(range(len(priorities)), key=lambda at: (-priorities[at], at))
    assert gate.order(futures) == expected


def test_more_than_there_is_room_for(one: Cluster, tmp_path: Path) -> None:
    gate = Gate(one, tmp_path)
    low = [one.options(priority=-2).submit(begun) for _ in range(MORE_THAN_FIT)]
    high = [one.options(priority=-1).submit(begun) for _ in range(20)]
    order = gate.order([*low, *high])
    assert [at for at in order if at < len(low)] == list(range(len(low)))
    assert [at for at in order if at >= len(low)] == list(range(len(low), len(order)))
    # The bag was full of lower ones: higher ones wait for room there, before all that wait, too.
    assert order.index(len(order) - 1) < order.index(_tasks.RANKED_HINTS_MAX)


def test_those_that_are_cancelled_leave_their_room_to_others(one: Cluster, tmp_path: Path) -> None:
    """As many as there is room for are, with more behind them; then come more again."""
    gate = Gate(one, tmp_path)
    low = [one.options(priority=-2).submit(begun) for _ in range(MORE_THAN_FIT)]
    assert all(future.cancel() for future in low[: _tasks.RANKED_HINTS_MAX])
    later = [one.options(priority=-1).submit(begun) for _ in range(MORE_THAN_FIT)]
    left = low[_tasks.RANKED_HINTS_MAX :]
    order = gate.order([*left, *later])
    assert [at for at in order if at < len(left)] == list(range(len(left)))
    assert [at for at in order if at >= len(left)] == list(range(len(left), len(order)))


def test_it_counts_when_a_task_is_ready(one: Cluster, tmp_path: Path) -> None:
    second = tmp_path / "second"
    second.mkdir()
    with one.executor(1) as pool:
        gate, other = Gate(one, tmp_path), Gate(pool, second)
        waits = [one.options(priority=p).submit(begun, other.held) for p in (0, 5, -1, 9)]
        plain = one.submit(begun)
        other.path.touch()
        queued = one._runtime.client.state
        eventually(lambda: all(queued(f._oid) == STATE["QUEUED"] for f in waits))
        assert gate.order([*waits, plain])[:2] == [3, 1]


def test_of_executors_maps_and_streams(one: Cluster, tmp_path: Path) -> None:
    with one.executor(1) as pool:
        gate = Gate(pool, tmp_path)
        low, high = pool.submit(begun), pool.options(priority=1).submit(begun)
        assert gate.order([low, high]) == [1, 0]
    gate = Gate(one, tmp_path)
    first = one.submit(begun)
    mapped = one.options(priority=3).map(begun, range(4), chunksize=2)

    def items() -> Iterator[int]:
        yield begun()

    stream = one.options(priority=4).stream(items)
    gate.path.touch()
    (item,) = [one.get(ref) for ref in stream]
    times = list(mapped)
    assert item < min(times) < max(times) < first.result(PATIENCE_S)


def test_cancelled_ones_are_passed_over(one: Cluster, tmp_path: Path) -> None:
    gate = Gate(one, tmp_path)
    futures = [one.options(priority=at).submit(begun) for at in range(6)]
    assert futures[5].cancel()
    assert futures[3].cancel()
    left = [futures[at] for at in (0, 1, 2, 4)]
    assert gate.order(left) == [3, 2, 1, 0]


def nested(priority: int, depth: int) -> int:
    """Waits for tasks that cannot run in place, since they have a timeout."""
    if not depth:
        return 1
    view = hoplite_mp.current().options(priority=priority, timeout=PATIENCE_S)
    return sum(view.map(nested, [priority] * 2, [depth - 1] * 2, chunksize=1))


@pytest.mark.parametrize("inner", [0, -3, 9])
def test_nested_tasks_are_not_kept_from_those_who_wait(inner: int) -> None:
    config = hoplite_mp.Config(blocked_workers_max=6)
    with hoplite_mp.Cluster(workers=2, memory="256MiB", config=config) as c:
        high = [c.options(priority=5).submit(nested, inner, 1) for _ in range(40)]
        plain = [c.submit(nested, inner, 1) for _ in range(40)]
        assert [one.result(PATIENCE_S) for one in [*high, *plain]] == [2] * 80


def test_what_a_higher_one_waits_for_is_done_before_it() -> None:
    config = hoplite_mp.Config(blocked_workers_max=2)
    with hoplite_mp.Cluster(workers=1, memory="256MiB", config=config) as c:
        low = c.options(priority=-9, timeout=PATIENCE_S).submit(begun)

        def reads(ref: Any) -> bool:
            return bool(hoplite_mp.current().get(ref) > 0)

        high = [c.options(priority=9).submit(reads, hoplite_mp.by_ref(low)) for _ in range(12)]
        assert all(one.result(PATIENCE_S) for one in high)


def test_one_whose_worker_dies_keeps_its_priority(one: Cluster, tmp_path: Path) -> None:
    def dies_once(path: str) -> int:
        if not os.path.exists(path):
            Path(path).touch()
            os.kill(os.getpid(), 9)
        return begun()

    gate = Gate(one, tmp_path)
    low = one.submit(begun)
    high = one.options(priority=2).submit(dies_once, str(tmp_path / "died"))
    assert gate.order([low, high]) == [1, 0]


@pytest.mark.parametrize("wrong", [1.5, "1", None, True, 1 << 31, -(1 << 31)])
def test_other_priorities_are_refused(one: Cluster, wrong: Any) -> None:
    with pytest.raises(ValueError, match="priority="):
        one.options(priority=wrong)
