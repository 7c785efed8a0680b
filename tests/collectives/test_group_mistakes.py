"""What one member of a Group does in an unusual way, on one host and as of a cluster of several:
its calls in the background, its `out`, what it raises. No other member may suffer from it."""

from __future__ import annotations

import gc
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import hoplite_mp
from hoplite_mp import ClosedError, PeerLostError, TaskError
from hoplite_mp._group.single_host import Combiner
from hoplite_mp._protocol.local import GroupCall, GroupJoin
from tests.support.group_members import in_threads, until_all_take_part
from tests.support.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from hoplite_mp import Cluster, Group

MIB = 1 << 20
PATIENCE_S = 30


@pytest.fixture(scope="module", params=["one host", "as several"])
def both(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    listen = {} if request.param == "one host" else {"listen": "127.0.0.1:0"}
    with hoplite_mp.Cluster(workers=2, memory="192MiB", **listen) as made:
        yield made


@pytest.mark.parametrize("root", [np.int64(1), np.uint8(1)])
def test_a_root_of_numpy(both: Cluster, root: Any) -> None:
    got = in_threads(both, f"root {root!r}", 2, lambda g: g.broadcast(g.rank, root=root))
    assert got == [1, 1]


@pytest.mark.parametrize("root", [True, 0.0, None, "0"])
def test_a_root_that_is_no_integer(both: Cluster, root: Any) -> None:
    for error in in_threads(both, f"root {root!r}", 2, lambda g: g.reduce(np.ones(3), root=root)):
        assert isinstance(error, TypeError)
        assert "root=" in str(error)


def test_a_size_that_is_none(both: Cluster) -> None:
    with pytest.raises(TypeError, match="size=None"):
        both.group("no size", None)  # type: ignore[arg-type]


def test_a_call_in_the_background_cannot_be_cancelled(both: Cluster) -> None:
    """A rank that left one out would give each later part to another call."""

    def body(group: Group) -> list[Any]:
        futures = [group.allreduce_async(number * 10**group.rank) for number in (1, 2, 3)]
        assert not any(future.cancel() for future in futures)
        return [int(future.result(PATIENCE_S)) for future in futures]

    assert in_threads(both, "cancelled", 2, body) == [[11, 22, 33], [11, 22, 33]]


def test_a_call_of_another_group_in_a_callback(both: Cluster) -> None:
    """It is made in the order of that Group's calls, which another thread is making."""

    def body(a: Group) -> list[int]:
        b = both.group("callback b", 2, a.rank, timeout=20)
        found: list[int] = []
        first = b.allreduce_async(10**a.rank)
        called = threading.Event()

        def call(_: Any) -> None:
            found.append(int(b.allreduce(2 * 10**a.rank)))
            called.set()

        a.barrier_async().add_done_callback(call)
        found.append(int(first.result(PATIENCE_S)))
        assert called.wait(PATIENCE_S)
        b.close()
        return sorted(found)

    assert in_threads(both, "callback a", 2, body) == [[11, 22], [11, 22]]


def background_then_raise(rank: int) -> Any:
    group = hoplite_mp.current().group("raises", 2, rank)
    group.barrier()
    if rank == 0:
        group.allreduce_async(1)
        raise ValueError("the task's own")
    return group.recv(source=0)


def test_a_task_that_raises_with_a_call_in_the_background(both: Cluster) -> None:
    """Its error is reported at once, and the other ranks learn that it is gone."""
    futures = both.spmd(background_then_raise, 2)
    with pytest.raises(ValueError, match="the task's own"):
        futures[0].result(PATIENCE_S)
    with pytest.raises(PeerLostError):
        futures[1].result(PATIENCE_S)


def test_a_block_that_raises_with_a_call_in_the_background(both: Cluster) -> None:
    begun: list[Any] = []

    def block() -> None:
        with both.group("block", 2, 0) as group:
            begun.append(group.allreduce_async(1))
            raise ValueError("the block's own")

    other = both.group("block", 2, 1, timeout=20)
    with pytest.raises(ValueError, match="the block's own"):
        block()
    assert isinstance(begun[0].exception(PATIENCE_S), ClosedError)
    other.close()


def test_after_the_end(both: Cluster) -> None:
    group = both.group("ended", 1)
    group.barrier_async().result(PATIENCE_S)
    group.close()
    for call in (group.barrier, group.barrier_async):
        with pytest.raises(ClosedError, match="has left"):
            call()


def test_a_callback_may_close_its_group(both: Cluster) -> None:
    group = both.group("closed by a callback", 1)
    done = threading.Event()

    def close(_: Any) -> None:
        group.close()
        done.set()

    group.barrier_async().add_done_callback(close)
    assert done.wait(PATIENCE_S)
    eventually(lambda: both.group("closed by a callback", 1).close() is None)


async def split_after_a_background_call(rank: int) -> None:
    group = hoplite_mp.current().group("async split", 2, rank, timeout=20)
    await group.barrier_async()
    half = group.split(0)  # in the Group's own thread
    assert half is not None
    if rank == 1:
        await half.barrier_async()  # rank 0 has left that Group with the end of its task


def test_a_split_in_an_async_task_ends_with_the_task(both: Cluster) -> None:
    both.get(both.spmd(split_after_a_background_call, 2), timeout=2 * PATIENCE_S)


def test_an_out_over_the_own_part(both: Cluster) -> None:
    def gathers(group: Group) -> list[int]:
        buffer = np.arange(3) + 100 * (group.rank + 1)
        rows = list(buffer.reshape(3, 1))
        group.allgather(rows[0], out=rows)
        return [int(one) for one in buffer]

    def exchanges(group: Group) -> list[int]:
        buffer = np.arange(3) + 100 * (group.rank + 1)
        rows = list(buffer.reshape(3, 1))
        group.alltoall(rows, out=rows[::-1])
        return [int(one) for one in buffer]

    assert in_threads(both, "out gathers", 3, gathers) == [[100, 200, 300]] * 3
    got = in_threads(both, "out exchanges", 3, exchanges)
    assert got == [[300 + r, 200 + r, 100 + r] for r in range(3)]


def test_a_result_that_is_not_taken_is_freed(both: Cluster) -> None:
    """And nothing of what other ranks on this host have got is."""
    parts = [np.full(MIB, target, np.uint8) for target in range(3)]

    def body(group: Group) -> None:
        kept = []
        for _ in range(60):  # more than the store holds, if nothing is freed
            if group.rank:
                kept = [*kept[-2:], group.alltoall(parts)]
            else:
                with pytest.raises(ValueError, match="out"):
                    group.alltoall(parts, out=parts[:1])
            for got in kept:
                assert all((one == group.rank).all() for one in got)

    assert in_threads(both, "not taken", 3, body) == [None] * 3
    gc.collect()
    eventually(lambda: both.stats()["bytes_used"] < 32 * MIB)


def test_a_strict_result_that_is_not_taken_is_freed(both: Cluster) -> None:
    parts = [np.full(MIB, target, np.uint8) for target in range(3)]

    def body(group: Group) -> None:
        group.barrier()
        if group.rank == 2:
            return
        for _ in range(60):
            with pytest.raises(PeerLostError):
                group.alltoall(parts)

    assert in_threads(both, "not taken, strict", 3, body, strict=True) == [None] * 3
    gc.collect()
    eventually(lambda: both.stats()["bytes_used"] < 32 * MIB)


def test_a_message_with_very_many_refs(both: Cluster) -> None:
    refs = [both.put(number) for number in range(3_000)] * 30

    def body(group: Group) -> Any:
        if group.rank == 0:
            return group.send(refs, 1)
        return [both.get(ref) for ref in group.recv(0)[-2:]]

    assert in_threads(both, "many refs", 2, body) == [None, [2_998, 2_999]]


def test_a_request_that_is_too_large(both: Cluster) -> None:
    """It is refused, and the process goes on."""
    with pytest.raises(ValueError, match=r"a request .* to the node: a request has at most"):
        both._runtime.channel.call(GroupJoin("x" * (2 * MIB), 1, 0))
    assert both.submit(abs, -1).result(PATIENCE_S) == 1


class Slow:
    def __init__(self) -> None:
        time.sleep(0.2)
        self.seen: list[int] = []

    def add(self, number: int) -> None:
        self.seen.append(number)

    def all(self) -> list[int]:
        return self.seen


@pytest.mark.parametrize("count", [12_000, pytest.param(60_000, marks=pytest.mark.soak)])
def test_an_actor_with_a_long_backlog(both: Cluster, count: int) -> None:
    actor = both.actor(Slow)
    for number in range(count):
        actor.add(number)
    assert actor.all().result(4 * PATIENCE_S) == list(range(count))
    hoplite_mp.Actor.close(actor)


class InterruptedAfter:
    """A channel that Ctrl-C interrupts right after the first message about a call was sent."""

    def __init__(self, channel: Any) -> None:
        self.channel, self.left = channel, 1

    def __getattr__(self, name: str) -> Any:
        return getattr(self.channel, name)

    def tell(self, ask: Any, sent: list[int] | None = None) -> None:
        self.channel.tell(ask, sent)
        if isinstance(ask, GroupCall) and self.left:
            self.left = 0
            raise KeyboardInterrupt


def test_call_interrupted_right_after_it_was_announced_ends_membership(both: Cluster) -> None:
    """The other rank's result has all of its part, which was not written whole, or nothing."""

    def body(group: Group) -> Any:
        group.barrier()
        part = np.full(3 * MIB, group.rank, np.uint8)
        if group.rank:
            results = []

            def has_the_second_part() -> bool:
                """The first call of rank 1 may be late, and meet the second call of rank 0."""
                results[:] = group.allgather(part)
                zero = results[0]
                assert (zero is None) == (group.contributors == (1,))
                assert zero is None or (zero == zero[0]).all()
                return zero is not None and zero[0] == 2

            eventually(has_the_second_part, "the call that rank 0 makes when it is a member again")
            return [int(one[-1]) for one in results]
        if group._calls._hosts is not None:
            group._calls._hosts._channel = InterruptedAfter(group._calls._hosts._channel)
        else:
            group._calls._committed = interrupted  # type: ignore[method-assign]
        with pytest.raises(KeyboardInterrupt):
            group.allgather(part)
        with both.group(group.name, 2, 0, timeout=20) as again:
            return [int(one[-1]) for one in again.allgather(np.full_like(part, 2))]

    assert in_threads(both, "interrupted", 2, body) == [[2, 1], [2, 1]]


def interrupted(*_: Any) -> Any:
    raise KeyboardInterrupt


class ExitsWhenLoaded:
    def __reduce__(self) -> Any:
        return sys.exit, (5,)


class RaisesWhenLoaded:
    def __reduce__(self) -> Any:
        return int, ("no number",)


LOADING_CALLS: dict[str, Callable[[Group, Any], Any]] = {
    "broadcast": lambda g, x: g.broadcast(x, root=1),
    "scatter": lambda g, x: g.scatter([x, x], root=1),
    "allgather": lambda g, x: g.allgather(x if g.rank == 1 else 0),
    "alltoall": lambda g, x: g.alltoall([x, x] if g.rank == 1 else [0, 0]),
    "fold": lambda g, x: g.allreduce(x if g.rank == 1 else 0, op=max),
}


@pytest.mark.parametrize("value", [ExitsWhenLoaded(), RaisesWhenLoaded()], ids=["exit", "error"])
@pytest.mark.parametrize("kind", LOADING_CALLS)
def test_value_that_cannot_be_loaded_is_an_error_that_names_its_rank(
    both: Cluster, kind: str, value: Any
) -> None:
    """The ranks that load a value whose own code exits leave the Group. A function's reduction has
    that error on all ranks, so nobody leaves."""
    error = TaskError if isinstance(value, ExitsWhenLoaded) else ValueError

    def body(g: Group) -> Any:
        with pytest.raises(error, match=r"the value of rank 1 could not be loaded"):
            LOADING_CALLS[kind](g, value)
        if error is ValueError or kind == "fold":
            return g.allgather(g.rank)
        with pytest.raises(ClosedError, match="because a call ended by TaskError"):
            g.barrier()
        with both.group(g.name, 2, g.rank, timeout=20) as again:
            return until_all_take_part(again, lambda: again.allgather(g.rank))

    assert in_threads(both, f"loads {kind} {error}", 2, body) == [[0, 1]] * 2


def test_operator_that_fails_at_the_leader_is_an_error_of_every_rank(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever it raises: no rank leaves, and the next call is good."""

    def fails(*_: Any) -> None:
        raise ZeroDivisionError("of the operator")

    def body(group: Group) -> float:
        with pytest.raises(ValueError, match="of the operator"):
            group.allreduce(np.ones(2), op=np.hypot)
        return float(group.allreduce(np.ones(1))[0])

    monkeypatch.setattr(Combiner, "_reduced", fails)
    assert in_threads(cluster, "operator fails", 2, body) == [2.0, 2.0]
