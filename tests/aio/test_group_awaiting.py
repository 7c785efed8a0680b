"""`await` of a Group's `..._async` forms: in a driver's event loop, in async tasks, in actors."""

from __future__ import annotations

import asyncio
import concurrent.futures
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import hoplite_mp
from hoplite_mp import ClosedError, Cluster, HopliteTimeoutError, PeerLostError
from tests.support.group_members import calls_held

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.support.waiting import Run

REDUCTIONS = ("allreduce", "reduce", "reduce_scatter", "scan", "exscan")


def pair(cluster: Cluster, name: str) -> Any:
    return [cluster.group(name, 2, rank, timeout=20) for rank in range(2)]


def test_every_form_can_be_awaited(cluster: Cluster, run: Run) -> None:
    """Also those that have no array, and in any order of awaiting."""

    async def main() -> None:
        first, second = pair(cluster, "every form")
        with first, second:
            for kind in REDUCTIONS:
                calls = [getattr(g, f"{kind}_async")(np.ones(4)) for g in (first, second)]
                found = await calls[1], await calls[0]
                assert [np.sum(one) for one in found if one is not None]
            awaited: list[Callable[[Any], Any]] = [
                lambda g: g.broadcast_async("x"),
                lambda g: g.gather_async(g.rank),
                lambda g: g.allgather_async(g.rank),
                lambda g: g.alltoall_async([1, 2]),
                lambda g: g.scatter_async([3, 4]),
                lambda g: g.barrier_async(),
            ]
            for call in awaited:
                await asyncio.gather(call(first), call(second))
            late = second.recv_async(0)
            first.send("message", 1)
            assert await late == "message"
            assert await late == "message", "once more"

    run(main())


def test_the_event_loop_goes_on_meanwhile(cluster: Cluster, run: Run) -> None:
    """If the await blocked the loop, the second member would not call before the timeout."""

    async def main() -> None:
        first, second = pair(cluster, "goes on")
        with first, second:
            await asyncio.gather(first.barrier_async(), second.barrier_async())
            waits = asyncio.ensure_future(first.allreduce_async(np.ones(3)))
            for _ in range(10):
                await asyncio.sleep(0.005)
            assert not waits.done(), "the other member has not called"
            assert (await second.allreduce_async(np.ones(3))).tolist() == [2, 2, 2]
            assert (await waits).tolist() == [2, 2, 2]

    run(main())


def test_a_cancelled_await_does_not_cancel_the_call(cluster: Cluster, run: Run) -> None:
    """The other members wait for that call: it must be made, and in its order."""

    async def main() -> None:
        first, second = pair(cluster, "cancelled")
        with first, second:
            call = first.allreduce_async(np.ones(2))
            queued = first.allgather_async("a")
            for future in (call, queued):
                with pytest.raises(TimeoutError):
                    await asyncio.wait_for(future, 0.01)
                assert not future.cancelled()
            assert (await second.allreduce_async(np.ones(2))).tolist() == [2, 2]
            assert await second.allgather_async("b") == ["a", "b"]
            assert (await call).tolist() == [2, 2]
            assert await queued == ["a", "b"]

    run(main())


def test_await_of_a_call_that_fails_raises_its_error(cluster: Cluster, run: Run) -> None:
    async def main() -> None:
        first, second = pair(cluster, "raises")
        with first, second:
            wrong = [g.allreduce_async(np.ones(2 + g.rank)) for g in (first, second)]
            for future in wrong:
                with pytest.raises(ValueError, match="rank 1 has"):
                    await future
            waits = first.recv_async(1)
            assert waits.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waits
            left, closed = first.recv_async(1), second.recv_async(0)
            second.close()
            with pytest.raises(PeerLostError, match="rank 1 has left"):
                await left
            with pytest.raises(ClosedError, match="this member has left"):
                await closed

    run(main())


def test_await_of_a_call_that_is_late_raises_and_ends_membership(
    cluster: Cluster, run: Run
) -> None:
    """A wait that is cancelled before leaves the call running; both calls fail when it is late."""

    async def main() -> None:
        first, second = pair(cluster, "late")
        await asyncio.gather(first.barrier_async(), second.barrier_async())
        with calls_held(first):
            futures = [first.allgather_async("a"), first.allgather_async("b")]
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(futures[0], 0.01)
            assert not futures[0].done()
            first._member.timeout = 0.05
        for future in futures:
            with pytest.raises(HopliteTimeoutError, match="This rank has left the Group"):
                await future
        with pytest.raises(ClosedError, match="because a call timed out"):
            first.allgather_async("c")
        assert await second.allgather_async("d") in (["a", "d"], [None, "d"])
        first = cluster.group("late", 2, 0, timeout=20)
        found = await asyncio.gather(first.allgather_async("e"), second.allgather_async("f"))
        assert found == [["e", "f"]] * 2
        first.close()
        second.close()

    run(main())


def test_a_receive_waits_in_the_background_for_a_group_that_is_not_whole(
    cluster: Cluster, run: Run
) -> None:
    """Also one that was posted first, and one whose own time is over before the others come."""

    async def main() -> None:
        first = cluster.group("not whole", 2, 0, timeout=20)
        early, short = first.recv_async(1), first.recv_async(1, timeout=0.05)
        dropped = first.recv_async(1)
        assert dropped.cancel()
        with pytest.raises(TimeoutError, match="1 of 2 members joined"):
            await short
        second = cluster.group("not whole", 2, 1, timeout=20)
        await asyncio.to_thread(second.send, "value", 0)
        assert await early == "value"
        first.close()
        second.close()
        alone = cluster.group("not whole either", 2, 0, timeout=0.1)
        with pytest.raises(TimeoutError, match="1 of 2 members joined"):
            await alone.recv_async(1)
        alone.close()

    run(main())


def test_several_loops_await_one_call(cluster: Cluster) -> None:
    """And a thread, which blocks, as before."""
    first, second = pair(cluster, "several loops")
    with first, second:
        call = first.allgather_async(1)

        async def waits() -> Any:
            return await call

        with concurrent.futures.ThreadPoolExecutor(3) as threads:
            loops = [threads.submit(asyncio.run, waits()) for _ in range(2)]
            plain = threads.submit(call.result, 20)
            second.allgather(2)
            assert [one.result(20) for one in (*loops, plain)] == [[1, 2]] * 3


async def member(rank: int, size: int, name: str) -> Any:
    """Three calls under way at once, and a message around the ring."""
    with hoplite_mp.current().group(name, size, rank) as g:
        late = g.recv_async((rank - 1) % size)
        sums = [g.allreduce_async(np.full(3, k + rank)) for k in range(3)]
        await sums[0]  # send, like all that is not awaited, blocks until the group is whole
        g.send(rank, (rank + 1) % size)
        found = await asyncio.gather(*sums)
        return [one[0] for one in found], await late


def expected(size: int) -> Any:
    sums = [sum(range(size)) + k * size for k in range(3)]
    return [(sums, (rank - 1) % size) for rank in range(size)]


@pytest.mark.parametrize("concurrency", [1, 4])
def test_in_async_tasks(cluster: Cluster, concurrency: int) -> None:
    """Twice as many members as workers, beside one another in a worker, or in stand-ins."""
    view = cluster.options(concurrency=concurrency, retries=0)
    futures = [view.submit(member, rank, 4, f"tasks {concurrency}") for rank in range(4)]
    assert [future.result(30) for future in futures] == expected(4)


async def receives(rank: int) -> Any:
    """Awaits nothing but a message, which only the next member sends."""
    with hoplite_mp.current().group("receives", 4, rank) as g:
        await g.barrier_async()
        late = g.recv_async((rank + 1) % 4)
        if rank == 3:
            g.send("go", 2)
        value = await late if rank != 3 else "went"
        if rank and rank != 3:
            g.send(value, rank - 1)
        return value


def test_who_awaits_a_message_counts_as_blocked(cluster: Cluster) -> None:
    futures = [cluster.options(retries=0).submit(receives, rank) for rank in range(4)]
    assert [future.result(30) for future in futures] == ["go", "go", "go", "went"]


class Peer:
    """A member whose Group lives for one call of it."""

    async def run(self, rank: int, size: int) -> Any:
        return await member(rank, size, "actors")


def test_in_async_actors(cluster: Cluster) -> None:
    peers = [cluster.actor(Peer) for _ in range(3)]
    futures = [peer.run(rank, 3) for rank, peer in enumerate(peers)]
    assert [future.result(30) for future in futures] == expected(3)
