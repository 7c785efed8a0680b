"""Members of Groups in threads of the driver or in tasks, and what their calls return."""

from __future__ import annotations

import contextlib
import hashlib
import os
import threading
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import hoplite_mp
from hoplite_mp import _tasks
from tests.support.shm_host import POOL, ShmHost
from tests.support.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from hoplite_mp import Cluster, Group
    from hoplite_mp._group.single_host import SingleHost


def in_threads(
    cluster: Cluster, name: str, size: int, body: Callable[[Group], Any], **kwargs: Any
) -> list[Any]:
    """What every rank's body returns or raises; the ranks are threads of the driver."""
    found: list[Any] = [None] * size

    def run(rank: int) -> None:
        try:
            with cluster.group(name, size, rank, timeout=20, **kwargs) as group:
                found[rank] = body(group)
        except Exception as error:
            found[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    return found


def pair_after_a_call(cluster: Cluster, name: str) -> tuple[Group, Group]:
    """The two members of a Group after call 0."""
    first, second = (cluster.group(name, 2, rank, timeout=60) for rank in range(2))
    thread = threading.Thread(target=second.barrier)
    thread.start()
    first.barrier()
    thread.join(20)
    return first, second


def impatient_and_patient(cluster: Cluster, name: str) -> tuple[Group, Group]:
    """The same; the calls that follow soon time out for the first one."""
    first, second = pair_after_a_call(cluster, name)
    first._member.timeout = 0.1
    return first, second


@contextlib.contextmanager
def calls_held(group: Group) -> Iterator[None]:
    """Background calls that are begun in the block are made after it, one after the other."""
    begun = threading.Event()
    group._begin_in_background(begun.wait)
    try:
        yield
    finally:
        begun.set()


def part_of_call(rank: int, call: int, length: int) -> Any:
    """What a rank gives to a call; the sum tells who went in and is not the same in any order."""
    return np.random.default_rng([rank, call]).normal(size=length).astype(np.float32) * 10.0**rank


def make_calls(
    rank: int, name: str, size: int, count: int, length: int, folder: Path, wait_for: int = 0
) -> dict[int, Any]:
    """A member that says where it is and calls; (contributors, hash) by the number of the call."""
    group = hoplite_mp.current().group(name, size, rank)
    (folder / f"{name}-{rank}.pid").write_text(str(os.getpid()))
    found: dict[int, Any] = {}
    while group.calls is None or group.calls < count:
        call = group.calls
        given = part_of_call(rank, call or 0, length)
        total = group.allreduce(given)
        assert group.calls is not None
        digest = hashlib.sha256(total.tobytes()).hexdigest()
        found[group.calls - 1] = (group.contributors, digest)
        (folder / f"{name}-{rank}.at").write_text(str(group.calls))
    return found


def pid_of_rank(folder: Path, name: str, rank: int) -> int:
    path = folder / f"{name}-{rank}.pid"
    return int(eventually(lambda: path.exists() and path.read_text(), f"rank {rank}"))


def wait_for_call(folder: Path, name: str, rank: int, call: int) -> None:
    path = folder / f"{name}-{rank}.at"
    eventually(lambda: path.exists() and int(path.read_text() or 0) >= call, f"call {call}")


def check_survivors(
    found: dict[int, dict[int, Any]], killed: set[int], size: int, length: int
) -> None:
    """Every call: the same for all who came back with it, and right for who went in."""
    calls = sorted(set().union(*found.values()))
    alive = set(range(size))
    for call in calls:
        said = {steps[call] for steps in found.values() if call in steps}
        assert len(said) == 1, (call, said)
        contributors, digest = said.pop()
        assert set(contributors) >= set(range(size)) - killed
        assert set(contributors) <= alive, "a dead member came back"
        alive = set(contributors)
        total = part_of_call(contributors[0], call, length)
        for rank in contributors[1:]:
            total = total + part_of_call(rank, call, length)
        assert digest == hashlib.sha256(total.tobytes()).hexdigest(), (call, contributors)


SIZE = 3
DTYPES = ["?", "i1", "u1", "i2", "u2", "i4", "u4", "i8", "u8", "f2", "f4", "f8", "c8", "c16", ">f4"]
OPS = ["sum", "prod", "min", "max", "mean", "and", "or", "xor"]


class Trio:
    """Three members in threads of the driver; those in `objects` put no part on the board."""

    def __init__(self, cluster: Cluster) -> None:
        self.groups = [cluster.group("trio", SIZE, rank, timeout=20) for rank in range(SIZE)]

    def call(self, body: Callable[[Group], Any], objects: tuple[int, ...] = ()) -> list[Any]:
        found: list[Any] = [None] * SIZE

        def run(rank: int) -> None:
            group = self.groups[rank]
            if rank in objects:
                group._calls._single_host = NoBoard(group._calls._single_host)  # type: ignore[assignment]
            try:
                found[rank] = body(group), group.contributors
            except Exception as error:
                found[rank] = error
            if rank in objects:
                group._calls._single_host = group._calls._single_host.small  # type: ignore[attr-defined]

        threads = [threading.Thread(target=run, args=(rank,)) for rank in range(SIZE)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
            assert not thread.is_alive()
        return found


class NoBoard:
    """A member that makes every call with objects."""

    def __init__(self, small: SingleHost) -> None:
        self.small = small

    def __getattr__(self, name: str) -> Any:
        return getattr(self.small, name)

    def make(self, *args: Any) -> None:
        return None


def random_parts(dtype: str, shape: tuple[int, ...], seed: int) -> list[Any]:
    rng = np.random.default_rng(seed)
    return [(rng.normal(size=shape) * 50).astype(dtype) for _ in range(SIZE)]


def part_of(group: Group, rank: int) -> list[float] | None:
    found = group._calls._single_host.part(rank)
    return None if found is None or not found[3] else list(found[3][0])


def pid_in(path: Path) -> int:
    return int(eventually(lambda: path.exists() and path.read_text()))


def board_of(host: ShmHost, size: int) -> tuple[_tasks.Board, list[_tasks.Board]]:
    """The node's board of a Group that is whole, and those of its members."""
    node = _tasks.Board(host.node_tasks, 3)
    node.reset(size, 1)
    members = []
    for rank in range(size):
        slot = host.node.register(0, 2, POOL)
        node.set_client(rank, slot)
        members.append(_tasks.Board(_tasks.Tasks(host.client(slot)), 3))
    node.set_masks((1 << size) - 1, 0, True)
    return node, members


def until_all_take_part(group: Group, call: Callable[[], Any]) -> Any:
    """Makes the call until every rank contributes to it; the result of the last one."""
    found: list[Any] = []

    def has_all() -> bool:
        found[:] = [call()]
        return len(group.contributors) == group.size

    eventually(has_all, "a call of all ranks")
    return found[0]


def time_out_and_join_again(cluster: Cluster, name: str, elements: int) -> None:
    first, second = (cluster.group(name, 2, rank, timeout=20) for rank in range(2))
    both = first.barrier_async()
    second.barrier()
    both.result(20)
    second._member.timeout = 0.05
    with pytest.raises(hoplite_mp.HopliteTimeoutError):
        second.allreduce(np.full(elements, 100.0))
    seen = []

    def takes_part() -> bool:
        seen.append(set(first.allreduce(np.full(elements, 10.0)).tolist()))
        return seen[-1] == {11.0}

    with cluster.group(name, 2, 1, timeout=20) as again:
        waits = again.allreduce_async(np.full(elements, 1.0))
        eventually(takes_part, "the part of the rank that has joined again")
        assert set(waits.result(20).tolist()) == {11.0}
    assert seen[0] in ({10.0}, {11.0}, {110.0}), "the late part counts for all or for none"
    assert all(one == {10.0} for one in seen[1:-1])
    first.close()
