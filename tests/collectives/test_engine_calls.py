"""Calls whose parts lie on the Group's board: the same results and errors as those of objects."""

from __future__ import annotations

import ctypes
import os
import random
import signal
import threading
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import hoplite_mp
from hoplite_mp import PeerLostError, _reduce, _tasks
from tests.support.group_members import (
    DTYPES,
    OPS,
    SIZE,
    Trio,
    board_of,
    in_threads,
    pid_in,
    random_parts,
    time_out_and_join_again,
)
from tests.support.shm_host import CLIENT_BYTES, OFF_CLIENTS, OFF_SPINNERS, ShmHost
from tests.support.values import same_array
from tests.support.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from hoplite_mp import Cluster, Group

MAX = _tasks.BOARD_BYTES_MAX


@pytest.fixture(scope="module")
def trio(cluster: Cluster) -> Iterator[Trio]:
    made = Trio(cluster)
    yield made
    for group in made.groups:
        group.close()


@pytest.mark.filterwarnings("ignore")
@given(
    dtype=st.sampled_from(DTYPES),
    op=st.sampled_from(OPS),
    shape=st.lists(st.integers(0, 5), max_size=7).map(tuple),
    root=st.sampled_from([None, *range(SIZE)]),
    objects=st.sets(st.integers(0, SIZE - 1)).map(tuple),
    seed=st.integers(0, 99),
)
@settings(deadline=None, max_examples=70, suppress_health_check=list(HealthCheck))
def test_where_parts_lie_changes_no_bit(
    trio: Trio,
    dtype: str,
    op: str,
    shape: tuple[int, ...],
    root: int | None,
    objects: tuple[int, ...],
    seed: int,
) -> None:
    given_ = random_parts(dtype, shape, seed)

    def body(group: Group) -> Any:
        x = given_[group.rank]
        return group.allreduce(x, op) if root is None else group.reduce(x, op, root=root)

    plain = trio.call(body, tuple(range(SIZE)))
    for one, other in zip(trio.call(body, objects), plain, strict=True):
        if isinstance(other, Exception):
            assert (type(one), str(one)) == (type(other), str(other))
            continue
        assert one[1] == other[1] == (0, 1, 2)
        assert (one[0] is None) == (other[0] is None)
        if one[0] is not None:
            assert one[0].flags.writeable
            assert same_array(one[0], other[0])


@pytest.mark.parametrize("nbytes", [MAX - 4, MAX, MAX + 4])
@pytest.mark.parametrize("mean", [False, True])
def test_the_largest_part_that_lies_on_the_board(trio: Trio, nbytes: int, mean: bool) -> None:
    given_ = random_parts("i4", (nbytes // 4,), nbytes)
    wanted = sum(given_[1:], given_[0])
    wanted = sum(x.astype(float) for x in given_) / SIZE if mean else wanted
    for total, _ in trio.call(lambda g: g.allreduce(given_[g.rank], "mean" if mean else "sum")):
        assert same_array(total, wanted)


@pytest.mark.parametrize("out", ["fits", "the part", "strided", "other dtype", "other shape"])
def test_out(trio: Trio, out: str) -> None:
    def body(group: Group) -> Any:
        x = np.arange(6.0) + group.rank
        target = {
            "fits": np.zeros(6),
            "the part": x,
            "strided": np.zeros(12)[::2],
            "other dtype": np.zeros(6, np.float32),
            "other shape": np.zeros((6, 1)),
        }[out]
        assert group.allreduce(x, out=target) is target
        return target.tolist()

    for found in trio.call(body):
        if out.startswith("other"):
            assert isinstance(found, ValueError)
            assert "out has shape" in str(found)
        else:
            assert found[0] == [3.0, 6.0, 9.0, 12.0, 15.0, 18.0]
    assert all(total == SIZE for total, _ in trio.call(lambda g: int(g.allreduce(1))))


def test_calls_that_differ_are_every_ranks_error(trio: Trio) -> None:
    bodies: list[Callable[[Group], Any]] = [
        lambda g: g.allreduce(np.ones(2 + (g.rank == 1))),
        lambda g: g.allreduce(np.ones(2), "sum" if g.rank else "max"),
        lambda g: g.reduce(np.ones(2), root=g.rank),
        lambda g: g.allreduce(np.ones(2, "f4" if g.rank == 2 else "f8")),
        lambda g: g.barrier() if g.rank else g.allreduce(1),
        lambda g: g.allreduce("text" if g.rank == 1 else 1),
    ]
    for body in bodies:
        found = trio.call(body)
        assert all(isinstance(one, (ValueError, TypeError)) for one in found), found
        assert len({str(one) for one in found}) == 1
        assert all(one == (3, (0, 1, 2)) for one in trio.call(lambda g: int(g.allreduce(1))))


def test_part_of_a_call_that_timed_out_is_not_taken_for_one_of_a_later_call(
    cluster: Cluster,
) -> None:
    """It lies on the board, and the rank joins again at once, and gives another part."""
    time_out_and_join_again(cluster, "anew", 4)


def fast(rank: int, name: str, size: int, folder: Path) -> list[Any]:
    """Small calls without anything between them, until `last` exists; what each one found."""
    group = hoplite_mp.current().group(name, size, rank)
    found: list[Any] = []
    over = 0
    while not over:
        done = (folder / f"{name}-last").exists() if len(found) % 64 == 0 else 0
        if len(found) == 64:
            (folder / f"{name}-{rank}.pid").write_text(str(os.getpid()))
        part = np.full(8, 10.0**rank)
        part[1], part[7] = rank * len(found), done
        total = group.allreduce(part)
        over = int(total[7])
        mask = sum(10.0**one for one in group.contributors)
        assert total[[0, 2, 3, 4, 5, 6]].tolist() == [mask] * 6, (total, group.contributors)
        assert total[1] == sum(group.contributors) * len(found)
        found.append(group.contributors)
    return found


@pytest.mark.parametrize("seed", [0, *(pytest.param(n, marks=pytest.mark.soak) for n in (1, 2, 3))])
def test_members_are_killed_in_the_middle(tmp_path: Path, seed: int) -> None:
    """Thousands of calls a second, and deaths at any instant: survivors agree on each call."""
    random_ = random.Random(seed)
    with hoplite_mp.Cluster(workers=4, memory="64MiB") as cluster:
        run = cluster.options(retries=0)
        for number in range(3):
            name, size = f"fast-{number}", random_.choice([2, 3, 4])
            tasks = [run.submit(fast, rank, name, size, tmp_path) for rank in range(size)]
            victims = random_.sample(range(size), random_.randint(1, size - 1))
            paths = [tmp_path / f"{name}-{rank}.pid" for rank in victims]
            pids = [pid_in(path) for path in paths]
            for pid in pids:
                end = time.monotonic() + random_.random() * 0.002  # the instant is what is tried
                while time.monotonic() < end:
                    pass
                os.kill(pid, signal.SIGKILL)
            (tmp_path / f"{name}-last").touch()
            found = [tasks[r].result(timeout=30) for r in range(size) if r not in victims]
            assert all(one == found[0] for one in found)
            assert set(found[0][0]) == set(range(size))
            for before, after in zip(found[0], found[0][1:], strict=False):
                assert set(after) <= set(before), "a dead member came back"
            for rank in victims:
                assert isinstance(tasks[rank].exception(timeout=30), hoplite_mp.WorkerLostError)


@pytest.fixture
def host() -> Iterator[ShmHost]:
    made = ShmHost()
    yield made
    made.close()


def publish(board: _tasks.Board, rank: int, call: int, value: float, wait_ns: int = 0) -> int:
    sums = _tasks.CALL_KINDS.index("allreduce"), _reduce.OPS.index("sum")
    number = _reduce.DTYPES.index("float64")
    until = time.monotonic_ns() + wait_ns
    return board.make(rank, call, *sums, 0, number, np.full(2, value), 0, wait_ns, until)


def test_a_dead_members_part_counts_until_the_masks_change(host: ShmHost) -> None:
    """The members change before the leader has decided: it decides for those of now."""
    node, members = board_of(host, 3)
    assert publish(members[1], 1, 0, 1.0) == 0
    assert publish(members[2], 2, 0, 2.0) == 0
    assert not members[1].lead(1, 0)  # the lowest rank leads
    node.set_masks(0b110, 0, True)
    assert members[1].lead(1, 0)
    found = members[2].part(_tasks.MEMBERS_MAX)
    assert found is not None
    assert np.frombuffer(found[5]).tolist() == [3.0, 3.0]
    assert found[6] == 0b110
    assert members[2].look()[4:] == (1, 0)


def test_a_rank_that_joins_is_let_in_by_the_ordinary_way(host: ShmHost) -> None:
    node, members = board_of(host, 2)
    node.set_masks(0b01, 0b10, True)
    assert publish(members[1], 1, 0, 1.0) == 0
    assert publish(members[0], 0, 0, 1.0) == 0  # its leader tells the node, too
    assert not members[0].lead(0, 0)
    assert members[0].look()[4] == 0


def test_only_a_leader_is_woken_by_a_part(host: ShmHost) -> None:
    node, members = board_of(host, 3)
    tasks = [_tasks.Tasks(host.client(node.member(rank)[3])) for rank in range(3)]
    before = [one.event() for one in tasks]
    publish(members[2], 2, 0, 1.0)
    after = [one.event() for one in tasks]
    assert [b != a for b, a in zip(before, after, strict=True)] == [True, False, False]


@pytest.mark.parametrize(("cores", "size", "spins"), [(2, 2, True), (2, 3, False), (1, 2, False)])
def test_it_spins_only_if_there_is_a_core_for_each_that_it_waits_for(
    cores: int, size: int, spins: bool
) -> None:
    host = ShmHost(cores=cores, spin_us=100_000_000)
    try:
        node, members = board_of(host, size)
        slot = node.member(0)[3]
        first = threading.Thread(target=publish, args=(members[0], 0, 0, 1.0, 10**11))
        first.start()
        if spins:
            eventually(lambda: host.word(OFF_SPINNERS) >> slot & 1)
            assert not host.word(OFF_CLIENTS + slot * CLIENT_BYTES + 68, 4)
            for rank in range(1, size):
                publish(members[rank], rank, 0, 1.0)
        else:
            eventually(lambda: host.word(OFF_CLIENTS + slot * CLIENT_BYTES + 68, 4))
            assert not host.word(OFF_SPINNERS)
        first.join(60)  # it waits in slices
        assert not first.is_alive()
        assert not spins or members[0].look()[4] == 1 or members[0].lead(0, 0)
        assert not host.word(OFF_SPINNERS)
    finally:
        host.close()


@pytest.mark.parametrize("elements", [1, 40_000])
def test_member_given_up_while_it_reads_a_result_gets_an_error(
    cluster: Cluster, elements: int
) -> None:
    given_up, made = threading.Event(), threading.Event()

    def body(g: Group) -> Any:
        g.barrier()
        if g.rank == 0:
            while not given_up.is_set():  # a call that is slow may be made with objects
                g.allreduce(np.ones(elements))
            second = g.allreduce(np.full(elements, 5.0))
            made.set()
            return second[0]
        take = g._calls._single_host.take

        def late(*args: Any) -> Any:
            g._calls._board.set_masks(0b01, 0, True)
            given_up.set()
            assert made.wait(20)
            return take(*args)

        g._calls._single_host.take = late  # type: ignore[method-assign]
        try:
            while True:
                g.allreduce(np.ones(elements))
        except PeerLostError as error:
            return "given up" in str(error)

    assert in_threads(cluster, f"given up late {elements}", 2, body) == [5.0, True]


def test_member_is_held_until_the_masks_or_the_client_change(host: ShmHost) -> None:
    node, members = board_of(host, 2)
    client = members[1].member(1)[3]
    assert members[1].holds(1, client, 1) == 1
    assert members[1].holds(1, client, 2) == 0
    node.set_masks(0b01, 0b10, True)
    assert members[1].holds(1, client, 1) == 1
    node.set_client(1, client + 1)
    assert members[1].holds(1, client, 1) == 0
    node.set_client(1, client)
    node.set_masks(0b01, 0, True)
    assert members[1].holds(1, client, 1) == 0


STORE_AT = 4096  # where a call buffer lies in the store


def broadcast(host: ShmHost, dtype: int) -> _tasks.Board:
    """The board of a Group of one member, which has made a broadcast."""
    _, (board,) = board_of(host, 1)
    board.set_store(host.node.store_address, host.node)
    kind = _tasks.CALL_KINDS.index("broadcast")
    assert board.make(0, 0, kind, 0, 0, dtype, np.zeros(2), STORE_AT, 0, 0) == 1
    return board


def test_fold_without_a_kernel_is_refused(host: ShmHost) -> None:
    board = broadcast(host, 200)
    with pytest.raises(ValueError, match="cannot be folded"):
        board.fold(0, 0, np.zeros(2))


def test_buffer_whose_memory_has_another_owner_is_refused(host: ShmHost) -> None:
    board = broadcast(host, _reduce.DTYPES.index("float64"))
    assert board.buffered(0, 0)[1] == (2,)
    ctypes.memset(host.node.store_address + STORE_AT + 3, 255, 1)  # the number of dimensions
    with pytest.raises(ValueError, match="255 dimensions"):
        board.buffered(0, 0)
