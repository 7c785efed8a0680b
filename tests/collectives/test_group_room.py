"""A rank that has no room for its contribution is a StoreFullError on every rank, and no more."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import hoplite_mp
from hoplite_mp import StoreFullError
from tests.support.group_members import in_threads
from tests.support.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from hoplite_mp import Cluster, Group

CALLS: dict[str, Callable[[Group, Any], Any]] = {
    "allreduce": lambda g, x: g.allreduce(x),
    "broadcast": lambda g, x: g.broadcast(x, root=1),
    "gather": lambda g, x: g.gather({"x": x}),
    "alltoall": lambda g, x: g.alltoall([x] * g.size),
}


@pytest.fixture(scope="module")
def small() -> Iterator[Cluster]:
    config = hoplite_mp.Config(put_wait_s=0.1)
    with hoplite_mp.Cluster(workers=0, memory="16MiB", config=config) as made:
        yield made


def failed(group: Group, call: Callable[[Group, Any], Any], x: Any) -> str:
    with pytest.raises(StoreFullError) as caught:
        call(group, x)
    return str(caught.value)


@pytest.mark.parametrize("kind", CALLS)
def test_one_rank_gives_more_than_the_store_holds(small: Cluster, kind: str) -> None:
    def body(group: Group) -> Any:
        x = np.zeros(24 << 20 if group.rank == 1 else 8, np.uint8)
        return failed(group, CALLS[kind], x), group.allgather(group.rank), group.calls

    found = in_threads(small, f"one {kind}", 3, body)
    assert found == [(found[0][0], [0, 1, 2], 2)] * 3
    for part in ("rank 1: put of ", "store of h0", "16 MiB", "memory="):
        assert part in found[0][0]


def fill(cluster: Cluster) -> list[Any]:
    """Until there is not even room for a few words; what is pinned is not spilled."""
    held: list[Any] = []
    for nbytes in (1 << 20, 1 << 16, 1 << 12, 256):
        with contextlib.suppress(StoreFullError):
            while True:
                held.append(cluster.get(cluster.put(np.ones(nbytes, np.uint8))))
    return held


def has_room(cluster: Cluster) -> None:
    """Returns when the memory of what was held is free."""
    eventually(lambda: cluster.stats()["bytes_used"] < 8 << 20, "there is space again")


def test_a_store_without_room_for_a_word(small: Cluster) -> None:
    """Neither what ranks give nor what is wrong with it nor the result may need room."""

    def body(group: Group) -> Any:
        small_ = group.allgather(None)
        if group.rank == 0:
            held = fill(small)
        group.barrier()
        texts = [failed(group, call, np.ones(50_000)) for call in CALLS.values()]
        assert group.allgather(None) == small_
        group.barrier()
        if group.rank == 0:
            held.clear()
            has_room(small)
        group.barrier()
        return texts, group.allreduce(np.ones(50_000)).max(), group.allgather({"a": group.rank})

    found = in_threads(small, "full", 3, body)
    assert found == [(found[0][0], 3.0, [{"a": 0}, {"a": 1}, {"a": 2}])] * 3
    ranks = [text.split(":")[0] for text in found[0][0]]
    assert ranks == ["rank 0", "rank 1", "rank 0", "rank 0"]


def grow(a: bytes, b: bytes) -> bytes:
    """More than the store holds."""
    return bytes(24 << 20)


def test_fold_without_room_for_the_result_fails_on_every_rank(small: Cluster) -> None:
    def body(group: Group) -> Any:
        text = failed(group, lambda g, x: g.allreduce(x, grow), b"x")
        return text, group.allgather(group.rank)

    found = in_threads(small, "fold grows", 3, body)
    assert [ranks for _, ranks in found] == [[0, 1, 2]] * 3
    assert all("16 MiB" in text for text, _ in found)


@pytest.mark.parametrize("reserve", [True, False])
def test_fold_that_fails_in_a_full_store_fails_on_every_rank(
    small: Cluster, monkeypatch: pytest.MonkeyPatch, reserve: bool
) -> None:
    held = []

    def fail(a: bytes, b: bytes) -> bytes:
        held.extend(fill(small))  # only rank 0 folds
        raise KeyError("x" * 1000)

    def full(*_: Any, **__: Any) -> Any:
        raise StoreFullError("the reserve for errors is in use")

    def body(group: Group) -> Any:
        with pytest.raises((KeyError, StoreFullError)) as caught:
            group.allreduce(b"x", fail)
        group.barrier()
        held.clear()
        has_room(small)
        group.barrier()
        return repr(caught.value), group.allreduce(1.0)

    if not reserve:
        monkeypatch.setattr(small._runtime.memory, "allocate_error", full)
    found = in_threads(small, f"fold full {reserve}", 3, body)
    assert [total for _, total in found] == [3.0] * 3
    assert found[0][0].startswith("KeyError('xxx")
    for text, _ in found[1:]:
        if reserve:
            assert text == found[0][0]
        else:
            assert "failed at rank 0 with KeyError, and its store has no space" in text
