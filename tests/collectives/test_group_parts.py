"""scatter, scan, exscan, split of a Group on one host: among survivors, strictly, with mistakes."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import hoplite_mp
from hoplite_mp import PeerLostError
from hoplite_mp._group.call_protocol import split_name
from hoplite_mp._protocol.fields import NAME_CHARS_MAX
from tests.support.group_members import in_threads
from tests.support.values import bits
from tests.support.waiting import Gate, eventually

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from hoplite_mp import Cluster, Group


@pytest.fixture(scope="module")
def workers() -> Iterator[Cluster]:
    with hoplite_mp.Cluster(workers=3, memory="256MiB") as made:
        yield made


def after_a_death(rank: int, name: str, victim: int, folder: Path, body: Any, strict: bool) -> Any:
    """A member of three: one is killed, then the others call."""
    group = hoplite_mp.current().group(name, 3, rank, strict=strict)
    group.barrier()
    if rank == victim:
        (folder / "pid").write_text(str(os.getpid()))
        Gate(folder, "never").wait()
    eventually(lambda: victim not in group.alive, "the death")
    return body(group)


def survivors(
    cluster: Cluster, folder: Path, name: str, victim: int, body: Any, strict: bool = False
) -> list[Any]:
    run = cluster.options(retries=0)
    tasks = [
        run.submit(after_a_death, rank, name, victim, folder, body, strict) for rank in range(3)
    ]
    path = folder / "pid"
    os.kill(int(eventually(lambda: path.exists() and path.read_text())), signal.SIGKILL)
    return [tasks[rank].result(30) for rank in range(3) if rank != victim]


def part(rank: int) -> Any:
    return np.random.default_rng(rank).normal(size=1000).astype(np.float32) * 10.0**rank


@pytest.mark.parametrize("victim", [0, 1])
def test_survivors_scan(workers: Cluster, tmp_path: Path, victim: int) -> None:
    """As if the dead rank had never been there; exscan is None on the lowest living rank."""

    def body(group: Group) -> Any:
        x = part(group.rank)
        return group.scan(x), group.exscan(x), group.contributors

    (a, none, whos), (b, before, same) = survivors(
        workers, tmp_path, f"scan {victim}", victim, body
    )
    low, high = (rank for rank in range(3) if rank != victim)
    assert whos == same == (low, high)
    assert none is None
    assert bits(a) == bits(before) == bits(part(low))
    assert bits(b) == bits(part(low) + part(high))


def test_survivors_scatter(workers: Cluster, tmp_path: Path) -> None:
    def body(group: Group) -> Any:
        got = group.scatter(["a", "b", "c"] if group.rank == 0 else None)
        with pytest.raises(PeerLostError, match="the root, rank 1, is lost"):
            group.scatter(None, root=1)
        return got

    assert survivors(workers, tmp_path, "scatter", 1, body) == ["a", "c"]


def test_strict_members_learn_of_it(workers: Cluster, tmp_path: Path) -> None:
    def body(group: Group) -> Any:
        texts = []
        for call in (lambda: group.scan(1), lambda: group.exscan(1), lambda: group.split(0)):
            with pytest.raises(PeerLostError, match=r"ranks \[2\] are lost") as caught:
                call()
            texts.append(str(caught.value))
        return texts

    first, second = survivors(workers, tmp_path, "strict", 2, body, strict=True)
    assert first == second


def test_mistakes_are_everybodys(cluster: Cluster) -> None:
    def body(group: Group) -> Any:
        one = group.rank == 1
        wrong = [
            (ValueError, lambda: group.scatter([1, 2] if group.rank == 0 else None)),
            (ValueError, lambda: group.scatter(root=3)),
            (ValueError, lambda: group.scatter()),
            (TypeError, lambda: group.scatter(5 if group.rank == 0 else None)),
            (TypeError, lambda: group.scan("text" if one else 1)),
            (ValueError, lambda: group.scan(np.ones(2 + one))),
            (ValueError, lambda: group.scan(np.ones(2), "max" if one else "sum")),
            (ValueError, lambda: group.scan(1) if one else group.exscan(1)),
            (ValueError, lambda: group.scan(1, "nonsense")),
            (TypeError, lambda: group.split("red" if one else 1)),
            (TypeError, lambda: group.split(1, key=1.5 if one else 1)),  # type: ignore[arg-type]
            (ValueError, lambda: group.split(1 << 80 if one else 1)),
        ]
        texts = []
        for error, call in wrong:
            with pytest.raises(error) as caught:
                call()
            texts.append(str(caught.value))
        return texts, group.scan(group.rank).tolist()

    found = in_threads(cluster, "mistakes", 3, body)
    assert [total for _, total in found] == [0, 1, 3]
    assert found[0][0] == found[1][0] == found[2][0]
    assert "rank 0: scatter needs 3 parts, one for each rank: 2" in found[0][0]


def test_what_is_scattered_is_the_receivers_own(cluster: Cluster) -> None:
    def body(group: Group) -> Any:
        given = [np.zeros(50_000) for _ in range(2)]
        got = group.scatter(given if group.rank == 0 else None)
        got[:] = group.rank + 1
        group.barrier()
        return got.max(), given[0].max()

    assert in_threads(cluster, "own", 2, body) == [(1, 0), (2, 0)]


# -- split ----------------------------------------------------------------------------------------


def test_split_by_color_and_key(cluster: Cluster) -> None:
    def body(group: Group) -> Any:
        rank = group.rank
        with group.split(rank % 2, key=-rank) or group as made:
            got = made.rank, made.size, made.allgather(rank)
            made.send(rank, (made.rank + 1) % made.size)
            got = (*got, made.recv())
            inner = made.split(None if made.rank == 0 else 7)
            got = (*got, inner and (inner.rank, inner.size))
        none = group.split(None)
        alone = group.split(rank)
        assert alone is not None
        return *got, none, alone.size, group.allreduce(1).tolist(), group.calls

    found = in_threads(cluster, "split", 5, body)
    assert found == [
        (2, 3, [4, 2, 0], 2, (1, 2), None, 1, 5, 4),
        (1, 2, [3, 1], 3, (0, 1), None, 1, 5, 4),
        (1, 3, [4, 2, 0], 4, (0, 2), None, 1, 5, 4),
        (0, 2, [3, 1], 1, None, None, 1, 5, 4),
        (0, 3, [4, 2, 0], 0, None, None, 1, 5, 4),
    ]


def test_parts_outlive_the_whole(cluster: Cluster) -> None:
    def body(group: Group) -> Any:
        made = group.split(0)
        assert made is not None
        group.close()
        return made.allreduce(made.rank).tolist()

    assert in_threads(cluster, "outlives", 3, body) == [3, 3, 3]


def test_who_leaves_the_part_before_others_have_joined(cluster: Cluster) -> None:
    """It counts as one who was there."""

    def body(group: Group) -> Any:
        for _ in range(20):
            made = group.split(0)
            assert made is not None
            if group.rank == 0:
                made.close()
            else:
                assert made.allreduce(1) in (1, 2)
                made.close()
        return group.calls

    assert in_threads(cluster, "at once", 3, body) == [20] * 3


def test_who_dies_before_it_has_joined_is_a_dead_rank(workers: Cluster, tmp_path: Path) -> None:
    """Its call is made, and counts; nobody waits for it to join."""

    def member(rank: int, folder: Path) -> Any:
        group = hoplite_mp.current().group("dies in split", 3, rank, timeout=20)
        if rank == 1:
            group._calls.call("split", "", 0, (0, 0, group._member.identity), None)
            (folder / "pid").write_text(str(os.getpid()))
            Gate(folder, "never").wait()
        made = group.split(0)
        if rank == 0:
            path = folder / "pid"
            os.kill(int(eventually(lambda: path.exists() and path.read_text())), signal.SIGKILL)
        assert made is not None
        return made.size, made.rank, made.allgather(rank), made.contributors

    run = workers.options(retries=0)
    tasks = [run.submit(member, rank, tmp_path) for rank in range(3)]
    found = [tasks[rank].result(30) for rank in (0, 2)]
    assert found == [(3, rank, [0, None, 2], (0, 2)) for rank in (0, 2)]


def test_other_members_other_name() -> None:
    """A call may be decided again without a host that has read the first decision, and left."""
    first, again = [(1, "a"), (3, "b"), (5, "c")], [(1, "a"), (3, "b")]
    names = {split_name("g" * 200, 9, 8, 1, peers) for peers in (first, again, first)}
    assert len(names) == 2
    most = split_name("g" * 200, 1 << 60, 1 << 60, -(1 << 62), [(63, "x"), (0, "y")])
    assert len(most) <= NAME_CHARS_MAX
