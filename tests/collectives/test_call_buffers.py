"""Calls whose parts lie in call buffers: the same results and errors as those of objects."""

from __future__ import annotations

import contextlib
import os
import random
import re
import signal
import threading
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import hoplite_mp
from hoplite_mp import _reduce, _tasks
from hoplite_mp._group.single_host import BUFFER_BYTES_MIN, SingleHost
from tests.support.group_members import (
    DTYPES,
    OPS,
    SIZE,
    Trio,
    board_of,
    pid_in,
    random_parts,
    time_out_and_join_again,
)
from tests.support.shm_host import ShmHost
from tests.support.values import same_array
from tests.support.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from hoplite_mp import Cluster, Group

KINDS = ["allreduce", "reduce", "reduce_scatter", "broadcast", "gather", "allgather"]
LARGE = 20_000  # elements; as float64 more than the board has room for


@pytest.fixture(scope="module")
def trio(cluster: Cluster) -> Iterator[Trio]:
    made = Trio(cluster)
    yield made
    for group in made.groups:
        group.close()


def call(group: Group, kind: str, x: Any, op: str, root: int, out: Any = None) -> Any:
    if kind == "allreduce":
        return group.allreduce(x, op, out=out)
    if kind == "reduce":
        return group.reduce(x, op, root, out=out)
    if kind == "reduce_scatter":
        return group.reduce_scatter(x, op, out=out)
    if kind == "broadcast":
        return group.broadcast(x, root, out=out)
    if kind == "gather":
        return group.gather(x, root, out=out)
    return group.allgather(x, out=out)


@pytest.mark.filterwarnings("ignore")
@given(
    kind=st.sampled_from(KINDS),
    dtype=st.sampled_from(DTYPES),
    op=st.sampled_from(OPS),
    shape=st.sampled_from([(), (0,), (1,), (5,), (4, 3), (40_003,), (7, 5_001), (2, 3, 9_000)]),
    root=st.integers(0, SIZE - 1),
    objects=st.sets(st.integers(0, SIZE - 1)).map(tuple),
    seed=st.integers(0, 99),
)
@settings(deadline=None, max_examples=70, suppress_health_check=list(HealthCheck))
def test_where_large_parts_lie_changes_no_bit(
    trio: Trio,
    kind: str,
    dtype: str,
    op: str,
    shape: tuple[int, ...],
    root: int,
    objects: tuple[int, ...],
    seed: int,
) -> None:
    given_ = random_parts(dtype, shape, seed)

    def body(group: Group) -> Any:
        return call(group, kind, given_[group.rank], op, root)

    plain = trio.call(body, tuple(range(SIZE)))
    for one, other in zip(trio.call(body, objects), plain, strict=True):
        if isinstance(other, Exception):
            assert (type(one), str(one)) == (type(other), str(other))
            continue
        assert one[1] == other[1] == (0, 1, 2)
        found, wanted = one[0], other[0]
        if isinstance(wanted, list):
            assert len(found) == len(wanted)
        else:
            found, wanted = [found], [wanted]
        for array, model in zip(found, wanted, strict=True):
            assert (array is None) == (model is None)
            if array is not None:
                assert array.flags.writeable or type(array) is not np.ndarray
                assert same_array(array, model)


def test_ranks_that_give_other_shapes_and_values_to_an_allgather_get_all_of_them(
    trio: Trio,
) -> None:
    given_: list[Any] = [np.arange(50_000.0), np.ones((3, 2), "i2"), {"no": "array"}]
    for turn in range(3):

        def body(group: Group, turn: int = turn) -> Any:
            return group.allgather(given_[(group.rank + turn) % SIZE])

        for found, _ in trio.call(body):
            for rank in range(SIZE):
                model = given_[(rank + turn) % SIZE]
                if isinstance(model, dict):
                    assert found[rank] == model
                else:
                    assert same_array(found[rank], model)


def test_calls_that_differ_are_every_ranks_error(trio: Trio) -> None:
    bodies = [
        lambda g: g.allreduce(np.ones(LARGE + (g.rank == 1))),
        lambda g: g.reduce_scatter(np.ones(LARGE), "sum" if g.rank else "max"),
        lambda g: g.broadcast(np.ones(LARGE), root=g.rank),
        lambda g: g.gather(np.ones(LARGE)) if g.rank else g.allgather(np.ones(LARGE)),
        lambda g: g.allreduce(np.ones(LARGE, "f4" if g.rank == 2 else "f8")),
        lambda g: g.reduce_scatter(np.float64(1)),
    ]
    for body in bodies:
        found = trio.call(body)
        assert all(isinstance(one, ValueError) for one in found), found
        assert len({str(one) for one in found}) == 1
        assert all(one == (3, (0, 1, 2)) for one in trio.call(lambda g: int(g.allreduce(1))))


@pytest.mark.parametrize("kind", ["allreduce", "reduce_scatter", "broadcast", "allgather"])
@pytest.mark.parametrize("out", ["fits", "the part", "strided", "other shape"])
def test_out(trio: Trio, kind: str, out: str) -> None:
    rows = LARGE // SIZE * SIZE

    def body(group: Group) -> Any:
        x = np.arange(float(rows)) + group.rank
        size = rows // SIZE if kind == "reduce_scatter" else rows
        target: Any = {
            "fits": np.zeros(size),
            "the part": x[:size],
            "strided": np.zeros(2 * size)[::2],
            "other shape": np.zeros((size, 1)),
        }[out]
        if kind == "allgather":
            target = [np.zeros(size), np.zeros(size), np.zeros(size)]
            target[group.rank] = x if out == "the part" else target[group.rank]
            target[0] = np.zeros((size, 1)) if out == "other shape" else target[0]
        found = call(group, kind, x, "sum", 1, target)
        if kind == "allgather":
            assert all(a is b for a, b in zip(found, target, strict=True))
            return [np.array(one) for one in found]
        assert found is target
        return np.array(found)

    base = np.arange(float(rows))
    for rank, found in enumerate(trio.call(body)):
        if out == "other shape":
            assert isinstance(found, ValueError)
            assert "out has shape" in str(found)
        elif kind == "allgather":
            assert all(same_array(one, base + r) for r, one in enumerate(found[0]))
        elif kind == "broadcast":
            assert same_array(found[0], base + 1)
        else:
            total = 3 * base + 3
            section = total[rank * rows // SIZE : (rank + 1) * rows // SIZE]
            assert same_array(found[0], section if kind == "reduce_scatter" else total)
    assert all(total == SIZE for total, _ in trio.call(lambda g: int(g.allreduce(1))))


@pytest.mark.parametrize("kind", ["allreduce", "reduce_scatter", "broadcast", "allgather"])
def test_a_slow_rank_reads_the_parts_of_its_call_while_others_make_the_next_one(
    trio: Trio, kind: str
) -> None:
    """The others publish call k + 1 before the slow rank has read call k."""
    slow = trio.groups[2]
    take, published = slow._calls._single_host.take, threading.Event()

    def late(*args: Any) -> Any:
        assert published.wait(20)
        return take(*args)

    def body(group: Group) -> Any:
        found = []
        for turn in range(3):
            x = np.full(LARGE, 10.0**group.rank * (turn + 1))
            if group is slow:
                group._calls._single_host.take = late if turn == 0 else take  # type: ignore[method-assign]
            found.append(call(group, kind, x, "sum", 1))
        return found

    def watch(first: int) -> None:
        eventually(lambda: min(slow._calls._board.member(rank)[0] for rank in (0, 1)) > first + 1)
        published.set()

    trio.call(lambda group: group.barrier())
    assert slow.calls is not None
    threading.Thread(target=watch, args=(slow.calls,)).start()

    for rank, (found, _) in enumerate(trio.call(body)):
        for turn, one in enumerate(found):
            unit = float(turn + 1)
            if kind == "allgather":
                assert [part[0] for part in one] == [unit, 10 * unit, 100 * unit], (rank, turn)
                assert all((part == part[0]).all() for part in one)
            else:
                assert (one == (10 * unit if kind == "broadcast" else 111 * unit)).all(), turn


def test_large_part_of_a_call_that_timed_out_is_not_taken_for_one_of_a_later_call(
    cluster: Cluster,
) -> None:
    time_out_and_join_again(cluster, "anew, large", LARGE)


@pytest.mark.parametrize("interrupted_rank", [0, 1])
@pytest.mark.parametrize("kind", ["allreduce", "allgather"])
def test_rank_interrupted_after_the_decision_has_left_and_its_part_counts(
    cluster: Cluster, kind: str, interrupted_rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The leader, too. It joins again before the other rank has read the result."""
    name, over = f"interrupted, buffers {kind} {interrupted_rank}", threading.Event()
    pair = [cluster.group(name, 2, rank, timeout=20) for rank in range(2)]
    one, other = pair[interrupted_rank], pair[1 - interrupted_rank]
    take = other._calls._single_host.take

    def late(*args: Any) -> Any:
        assert over.wait(20)
        return take(*args)

    def decided(*args: Any) -> Any:
        mask = SingleHost.make(one._calls._single_host, *args)
        eventually(lambda: mask or one._calls._board.look()[4], "the decision")
        raise KeyboardInterrupt

    monkeypatch.setattr(other._calls._single_host, "take", late)
    waits = getattr(other, f"{kind}_async")(np.full(LARGE, 2.0))
    eventually(lambda: other._calls._board.member(other.rank)[0])
    monkeypatch.setattr(one._calls._single_host, "make", decided)
    with pytest.raises(KeyboardInterrupt):
        getattr(one, kind)(np.full(LARGE, 1.0))
    with pytest.raises(hoplite_mp.ClosedError, match="ended by KeyboardInterrupt"):
        getattr(one, kind)(np.full(LARGE, 1.0))
    with cluster.group(name, 2, interrupted_rank, timeout=20) as again:
        later = again.allreduce_async(np.full(LARGE, 50.0))
        over.set()
        got = waits.result(20)
        arrays = got if kind == "allgather" else [got]
        values = [1.0, 2.0] if interrupted_rank == 0 else [2.0, 1.0]
        wanted = values if kind == "allgather" else [3.0]
        assert [set(array.tolist()) for array in arrays] == [{value} for value in wanted]
        eventually(lambda: other.allreduce(np.full(LARGE, 2.0))[-1] == 52.0, "it takes part")
        assert set(later.result(20).tolist()) == {52.0}
    other.close()


def test_rank_interrupted_after_the_commit_joins_again_and_makes_another_kind_of_call(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its next call is the next one of the others, not the one that was interrupted."""
    first, second = (cluster.group("another call", 2, rank, timeout=20) for rank in range(2))
    waits = first.allgather_async(np.full(LARGE, 1.0))

    def interrupted(*args: Any) -> Any:
        SingleHost.make(second._calls._single_host, *args)
        eventually(lambda: second._calls._board.look()[4])
        raise KeyboardInterrupt

    monkeypatch.setattr(second._calls._single_host, "make", interrupted)
    with pytest.raises(KeyboardInterrupt):
        second.allgather(np.full(LARGE, 2.0))
    assert [one[0] for one in waits.result(20)] == [1.0, 2.0]
    with cluster.group("another call", 2, 1, timeout=20) as again:
        later = again.allreduce_async(np.full(LARGE, 100.0))
        eventually(lambda: first.allreduce(np.full(LARGE, 1.0))[0] == 101.0, "it takes part")
        assert later.result(20)[0] == 101.0
        assert again.calls == first.calls
    first.close()


def test_parts_that_the_leader_cannot_put_into_a_full_store_are_every_ranks_error() -> None:
    """One rank gives an array in a buffer, the other an object: the leader puts the array."""
    config = hoplite_mp.Config(put_wait_s=0.2)
    with hoplite_mp.Cluster(workers=0, memory="64MiB", config=config) as cluster:
        pair = [cluster.group("full", 2, rank, timeout=20) for rank in range(2)]

        def both(values: list[Any]) -> list[Any]:
            later = pair[1].allgather_async(values[1])
            found: list[Any] = []
            for each in (lambda: pair[0].allgather(values[0]), lambda: later.result(20)):
                try:
                    found.append(each())
                except hoplite_mp.StoreFullError as error:
                    found.append(type(error))
            return found

        both([np.ones(60_000), np.ones(60_000)])
        kept = []
        for nbytes in (1 << 20, 150_000):
            with contextlib.suppress(hoplite_mp.StoreFullError):
                while True:
                    kept.append(cluster.empty(nbytes, "u1"))
        mixed = [np.ones(60_000), {"an": "object"}]
        assert both(mixed) == [hoplite_mp.StoreFullError] * 2
        kept.clear()
        eventually(lambda: cluster.stats()["bytes_used"] < 32 << 20, "there is space again")
        for array, other in both(mixed):
            assert array.sum() == 60_000
            assert other == {"an": "object"}


def test_full_store_with_idle_call_buffers_names_their_limit() -> None:
    config = hoplite_mp.Config(put_wait_s=0.2)
    with hoplite_mp.Cluster(workers=0, memory="64MiB", config=config) as cluster:
        alone = cluster.group("idle", 1, 0, timeout=20)
        alone.allreduce(np.ones(50_000))
        kept = []

        def fill() -> None:
            while True:
                kept.append(cluster.empty(1 << 20, "u1"))

        words = "in call buffers of Groups, which Config(group_buffer_bytes_max=) limits"
        with pytest.raises(hoplite_mp.StoreFullError, match=re.escape(words)):
            fill()


@pytest.mark.parametrize("limit", [100_000, 1 << 20, 3_000_001])
def test_the_limit_of_a_buffer_is_the_one_that_was_set(limit: int) -> None:
    config = hoplite_mp.Config(group_buffer_bytes_max=limit)
    with hoplite_mp.Cluster(workers=0, memory="256MiB", config=config) as cluster:
        pair = [cluster.group("limit", 2, rank, timeout=20) for rank in range(2)]
        for nbytes, buffered in ((limit, True), (limit + 1, False)):
            x = np.arange(nbytes, dtype="u1")
            later = pair[1].allgather_async(x)
            assert all(same_array(one, x) for one in pair[0].allgather(x))
            assert all(same_array(one, x) for one in later.result(20))
            assert (pair[0]._calls._board.look()[5] == 0) == buffered


@pytest.fixture
def host() -> Iterator[ShmHost]:
    made = ShmHost()
    yield made
    made.close()


def give(board: _tasks.Board, rank: int, call: int, value: float, buffer: int) -> int:
    sums = _tasks.CALL_KINDS.index("allreduce"), _reduce.OPS.index("sum")
    about = rank, call, *sums, 0, _reduce.DTYPES.index("float64")
    return board.make(*about, np.full(8, value), buffer, 0, time.monotonic_ns())


def test_a_buffer_that_others_may_read_is_not_written(host: ShmHost) -> None:
    """A rank that makes its call again, and one whose call comes after one that is not over."""
    _, members = board_of(host, 2)
    payload = host.store.lease(1 << 16, 0)
    assert payload is not None
    for one in members:
        one.set_store(host.node.store_address, host.node)
    places = [[payload + 4096 * (2 * rank + turn) for turn in range(2)] for rank in range(2)]
    assert give(members[0], 0, 0, 1.0, places[0][0]) == 0
    assert give(members[0], 0, 0, 5.0, places[0][0]) == -1
    assert give(members[1], 1, 1, 7.0, places[1][1]) == -1  # call 0 is not over
    assert give(members[1], 1, 0, 2.0, places[1][0]) == 0
    assert members[0].lead(0, 0)
    total = np.zeros(8)
    members[1].fold(0, 0, total)
    assert total.tolist() == [3.0] * 8
    assert give(members[1], 1, 1, 7.0, places[1][1]) == 0
    members[0].fold(0, 0, total)  # rank 0 reads call 0 while rank 1 has given to call 1
    assert total.tolist() == [3.0] * 8
    with pytest.raises(ValueError, match="exceed the part"):
        members[0].fold(0, 4, total)


def fast(rank: int, name: str, size: int, folder: Path) -> list[Any]:
    """Calls with buffers without anything between them, until `last` exists."""
    group = hoplite_mp.current().group(name, size, rank)
    found: list[Any] = []
    over = 0
    while not over:
        done = (folder / f"{name}-last").exists() if len(found) % 16 == 0 else 0
        if len(found) == 16:
            (folder / f"{name}-{rank}.pid").write_text(str(os.getpid()))
        turn = len(found)
        part = np.full(LARGE, 10.0**rank)
        part[1], part[7] = rank * turn, done
        total = group.allreduce(part)
        over = int(total[7])
        mask = sum(10.0**one for one in group.contributors)
        assert set(total[8:].tolist()) == {mask}, group.contributors
        assert total[1] == sum(group.contributors) * turn
        found.append(group.contributors)
        each = group.allgather(np.full(LARGE + rank, rank * 1000 + turn))
        for other in range(size):
            if other in group.contributors:
                assert each[other].shape == (LARGE + other,)
                assert set(each[other].tolist()) == {other * 1000 + turn}
            else:
                assert each[other] is None
    return found


@pytest.mark.parametrize("seed", [0, *(pytest.param(n, marks=pytest.mark.soak) for n in (1, 2, 3))])
def test_members_are_killed_in_the_middle(tmp_path: Path, seed: int) -> None:
    random_ = random.Random(seed)
    with hoplite_mp.Cluster(workers=4, memory="128MiB") as cluster:
        run, before = cluster.options(retries=0), cluster.stats()["bytes_used"]
        for number in range(2):
            name, size = f"fast-{number}", random_.choice([2, 3, 4])
            tasks = [run.submit(fast, rank, name, size, tmp_path) for rank in range(size)]
            victims = random_.sample(range(size), random_.randint(1, size - 1))
            pids = [pid_in(tmp_path / f"{name}-{rank}.pid") for rank in victims]
            for pid in pids:
                end = time.monotonic() + random_.random() * 0.01  # the instant is what is tried
                while time.monotonic() < end:
                    pass
                os.kill(pid, signal.SIGKILL)
            (tmp_path / f"{name}-last").touch()
            found = [tasks[r].result(timeout=60) for r in range(size) if r not in victims]
            assert all(one == found[0] for one in found)
            for earlier, later in zip(found[0], found[0][1:], strict=False):
                assert set(later) <= set(earlier), "a dead member came back"
            for rank in victims:
                assert isinstance(tasks[rank].exception(timeout=60), hoplite_mp.WorkerLostError)
        freed = "the memory of the buffers"
        eventually(lambda: cluster.stats()["bytes_used"] < before + 2 * BUFFER_BYTES_MIN, freed)


def replaced(rank: int, size: int, folder: Path) -> list[str]:
    """Calls of every kind, in the order of their numbers, so that a member that takes a dead one's
    place makes the call that the others make."""
    group = hoplite_mp.current().group("replaced", size, rank)
    wrong: list[str] = []

    def check(number: int, what: str, array: Any, value: float) -> None:
        if set(array.ravel().tolist()) != {value}:
            wrong.append(f"call {number}: {what}: {set(array.ravel().tolist())}, not {value}")

    (folder / f"{rank}.pid").write_text(str(os.getpid()))
    while True:
        number = group._member.begin()
        try:
            if number % 4 == 0:
                part = np.full(LARGE, 10.0**rank)
                part[0] = (folder / "last").exists()
                total = group.allreduce(part)
                check(number, "sum", total[1:], sum(10.0**one for one in group.contributors))
                if total[0]:
                    return wrong
            elif number % 4 == 1:
                length = LARGE * (1 + (rank + number) % 3) + rank
                each = group.allgather(np.full(length, rank * 1e7 + number))
                for other in group.contributors:
                    check(number, f"part {other}", each[other], other * 1e7 + number)
            elif number % 4 == 2:
                x = np.full(LARGE, float(number)) if rank == 1 else None
                check(number, "broadcast", group.broadcast(x, root=1), float(number))
            else:
                section = group.reduce_scatter(np.full((6, LARGE // 6), 10.0**rank))
                check(number, "section", section, sum(10.0**one for one in group.contributors))
        except hoplite_mp.PeerLostError as error:
            if "root" not in str(error):
                raise


def test_members_that_take_the_place_of_killed_ones_change_no_value(tmp_path: Path) -> None:
    random_, size = random.Random(5), 3
    with hoplite_mp.Cluster(workers=5, memory="256MiB") as cluster:
        run = cluster.options(retries=100)
        tasks = [run.submit(replaced, rank, size, tmp_path) for rank in range(size)]
        kills, until = 0, time.monotonic() + 2
        while not kills or time.monotonic() < until:
            path = tmp_path / f"{random_.randrange(size)}.pid"
            if path.exists() and path.read_text():
                pid = int(path.read_text())
                path.unlink()
                os.kill(pid, signal.SIGKILL)
                kills += 1
            time.sleep(0.05 + random_.random() * 0.2)  # the instant is what is tried
        paths = [tmp_path / f"{rank}.pid" for rank in range(size)]
        eventually(lambda: all(path.exists() for path in paths), "all take part")
        (tmp_path / "last").touch()
        assert [task.result(timeout=60) for task in tasks] == [[], [], []]


def killed_or_kept(rank: int, gate: Path) -> float:
    group = hoplite_mp.current().group("freed", 2, rank)
    total = float(group.allreduce(np.ones(LARGE))[0])
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return total


def test_the_store_gets_the_buffers_back_when_the_group_has_ended(tmp_path: Path) -> None:
    with hoplite_mp.Cluster(workers=2, memory="64MiB") as cluster:

        def used() -> int:
            return int(cluster.stats()["bytes_used"])

        before = used()
        pair = [cluster.group("freed, all leave", 2, rank) for rank in range(2)]
        later = pair[0].allreduce_async(np.ones(LARGE))
        pair[1].allreduce(np.ones(LARGE))
        later.result(20)
        assert used() >= before + 4 * LARGE * 8
        for one in pair:
            one.close()
        eventually(lambda: used() < before + LARGE * 8)
        run = cluster.options(retries=0)
        tasks = [run.submit(killed_or_kept, rank, tmp_path) for rank in range(2)]
        assert tasks[0].result(timeout=30) == 2.0
        assert isinstance(tasks[1].exception(timeout=30), hoplite_mp.WorkerLostError)
        eventually(lambda: used() < before + LARGE * 8)


@pytest.mark.parametrize("limit", ["no buffers", "a small store"])
def test_calls_need_no_buffers(limit: str, monkeypatch: pytest.MonkeyPatch) -> None:
    memory = "64MiB"
    if limit == "no buffers":
        monkeypatch.setenv("HOPLITE_MP_GROUP_BUFFER_BYTES_MAX", "0")
    else:
        memory = "16MiB"
    elements = (1 << 20) // 8
    with hoplite_mp.Cluster(workers=0, memory=memory) as cluster:

        def peer(rank: int) -> list[float]:
            group = hoplite_mp.current().group("without", 2, rank)
            found = []
            for turn in range(4):
                x = np.full(elements if turn % 2 else 100, float(rank + turn))
                found += [float(group.allreduce(x)[0]), float(group.allgather(x)[1][0])]
            assert not group._calls._single_host._buffers.keys() - {BUFFER_BYTES_MIN}
            return found

        wanted = [x for turn in range(4) for x in (2.0 * turn + 1, turn + 1.0)]
        assert [one.result(timeout=60) for one in cluster.spmd(peer, 2)] == [wanted, wanted]


@pytest.mark.filterwarnings("ignore:.*fork")
def test_forked_child_closes_a_group_whose_thread_was_copying(cluster: Cluster) -> None:
    status = None
    x = np.ones(8 << 17)
    with cluster.group("forked while it copies", 1) as g:
        while status in (None, 7):
            later = g.allgather_async(x)
            board = g._calls._single_host._board
            while not (board.giving or later.done()):
                pass
            pid = os.fork()
            if pid == 0:
                if not board.giving:
                    os._exit(7)
                signal.signal(signal.SIGALRM, signal.SIG_DFL)
                signal.alarm(60)
                g.close()
                os._exit(0)
            _, waited = os.waitpid(pid, 0)
            status = os.waitstatus_to_exitcode(waited)
            assert len(later.result(20)) == 1
    assert status == 0
