"""Queues, locks, semaphores and events in event loops."""

from __future__ import annotations

import asyncio
import queue
from typing import TYPE_CHECKING

import hoplite_mp
from tests.support.waiting import eventually, waiters_are

if TYPE_CHECKING:
    from hoplite_mp import Cluster, Lock, Queue
    from tests.support.waiting import Run


def test_queue(cluster: Cluster, run: Run) -> None:
    async def main() -> None:
        q: Queue[int] = hoplite_mp.Queue(1)
        getting = asyncio.create_task(q.get_async())
        await q.put_async(1)
        assert await getting == 1
        await q.task_done_async()
        await q.join_async()
        await q.put_async(2)
        putting = asyncio.create_task(q.put_async(3))
        for caught in (q.put_async(4, timeout=0.01), q.put_async(4, block=False)):
            try:
                await caught
            except queue.Full:
                continue
            raise AssertionError("it was full")
        assert [await q.get_async(), await q.get_async()] == [2, 3]
        await putting

    run(main())


def test_large_items(cluster: Cluster, run: Run) -> None:
    async def main() -> None:
        q: Queue[bytes] = hoplite_mp.Queue()
        await q.put_async(b"x" * 1_000_000)
        assert len(await q.get_async()) == 1_000_000
        copies: Queue[bytes] = hoplite_mp.Queue(copy=True)
        await copies.put_async(b"y" * 1_000_000)
        assert len(await copies.get_async()) == 1_000_000

    run(main())


def test_a_cancelled_getter_takes_nothing(cluster: Cluster, run: Run) -> None:
    """At whichever of its steps it was: items come out whole and in their order."""

    async def main() -> None:
        q: Queue[int] = hoplite_mp.Queue()
        loop = asyncio.get_running_loop()
        got: list[int] = []
        for number in range(60):
            getting = asyncio.create_task(q.get_async())
            # From before its first call to after its last: the loop makes so many turns first.
            for _ in range(number % 6):
                await asyncio.sleep(0)
            await q.put_async(number)
            loop.call_later(0.00005 * (number % 20), getting.cancel)
            try:
                got.append(await getting)
            except asyncio.CancelledError:
                while len(got) <= number:
                    got.append(await q.get_async(timeout=20))
        assert got == list(range(60))

    run(main())


def test_a_cancelled_acquire_holds_nothing(cluster: Cluster, run: Run) -> None:
    async def main() -> None:
        lock = hoplite_mp.Lock()
        for turn in range(40):
            async with lock:
                waiting = asyncio.create_task(lock.acquire_async())
                for _ in range(turn % 5):
                    await asyncio.sleep(0.0002)
            await asyncio.sleep(0.0001 * (turn % 7))
            waiting.cancel()
            try:
                assert await waiting
            except asyncio.CancelledError:
                continue
            await lock.release_async()
        assert await lock.acquire_async(timeout=20)

    run(main())


def test_locks_and_semaphores(cluster: Cluster, run: Run) -> None:
    async def main() -> None:
        semaphore, inside, most = hoplite_mp.Semaphore(2), 0, 0
        both = asyncio.Event()

        async def enter() -> None:
            nonlocal inside, most
            async with semaphore:
                inside += 1
                most = max(most, inside)
                if inside == 2:
                    both.set()
                await both.wait()
                await asyncio.sleep(0.001)
                inside -= 1

        await asyncio.gather(*(enter() for _ in range(8)))
        assert most == 2
        lock = hoplite_mp.Lock()
        assert await lock.acquire_async()
        assert not await lock.acquire_async(block=False)
        assert not await lock.acquire_async(timeout=0.01)
        await lock.release_async()

    run(main())


def test_event(cluster: Cluster, run: Run) -> None:
    async def main() -> None:
        event = hoplite_mp.Event()
        assert not await event.wait_async(0.01)
        waiting = [asyncio.create_task(event.wait_async()) for _ in range(3)]
        await asyncio.sleep(0)
        await event.set_async()
        assert await asyncio.gather(*waiting) == [True] * 3
        await event.clear_async()
        assert not event.is_set()

    run(main())


async def _hold(lock: Lock, event: hoplite_mp.Event) -> str:
    async with lock:
        await event.wait_async()
    return "held"


def test_async_tasks_wait_beside_one_another(cluster: Cluster, run: Run) -> None:
    async def main() -> None:
        lock, event = hoplite_mp.Lock(), hoplite_mp.Event()
        holding = [cluster.submit(_hold, lock, event) for _ in range(3)]
        await asyncio.to_thread(waiters_are, lock, 2)
        await event.set_async()
        assert [await one for one in holding] == ["held"] * 3
        await asyncio.to_thread(eventually, lambda: not lock.locked())

    run(main())
