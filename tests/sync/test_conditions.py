"""Recursive locks, bounded semaphores, conditions and barriers on one host."""

from __future__ import annotations

import asyncio
import os
import pickle
import signal
import threading
import time
from threading import BrokenBarrierError
from typing import TYPE_CHECKING, Any

import pytest

import hoplite_mp
from hoplite_mp import ActorLostError
from hoplite_mp._api.actor import Actor
from tests.support.functions import Member
from tests.support.waiting import PATIENCE_S, eventually, waiters_are

if TYPE_CHECKING:
    from hoplite_mp import Barrier, Cluster, Condition, Queue, RLock


def _in_thread(fn: Any, *args: Any) -> Any:
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(fn(*args)))
    thread.start()
    thread.join(PATIENCE_S)
    return found[0]


# -- RLock and BoundedSemaphore --------------------------------------------------------------------


def test_rlock_is_acquired_again_by_its_thread_alone(c: Cluster) -> None:
    lock = hoplite_mp.RLock()
    with lock, lock:
        assert lock.acquire(block=False)
        assert lock.locked()
        assert not _in_thread(lock.acquire, False)
        assert not c.submit(lock.acquire, timeout=0.01).result(PATIENCE_S)
        assert isinstance(c.submit(lock.release).exception(PATIENCE_S), AssertionError)
        lock.release()
    assert not lock.locked()
    with pytest.raises(AssertionError, match="does not own"):
        lock.release()
    waiting = [c.submit(_acquire_twice, lock) for _ in range(3)]
    assert [one.result(PATIENCE_S) for one in waiting] == [True] * 3


def _acquire_twice(lock: RLock) -> bool:
    with lock:
        return lock.acquire() and lock.release() is None


def test_rlock_belongs_to_an_asyncio_task(c: Cluster) -> None:
    lock = hoplite_mp.RLock()

    async def other() -> bool:
        return await lock.acquire_async(block=False)

    async def main() -> None:
        async with lock:
            assert await lock.acquire_async()
            assert not await asyncio.create_task(other())
            with pytest.raises(asyncio.TimeoutError):
                await asyncio.wait_for(asyncio.create_task(lock.acquire_async()), 0.05)
            await lock.release_async()
        assert not lock.locked()

    asyncio.run(main())


def test_the_rlock_of_a_dead_owner_is_released(c: Cluster) -> None:
    lock = hoplite_mp.RLock()
    member = c.actor(Member, lock)
    pid = member.pid().result()
    for _ in range(2):
        assert member.call("acquire").result(PATIENCE_S)
    waiting = c.submit(lock.acquire)
    waiters_are(lock, 1)
    os.kill(pid, signal.SIGKILL)
    assert waiting.result(PATIENCE_S)


def test_bounded_semaphore_refuses_further_releases(c: Cluster) -> None:
    semaphore = hoplite_mp.BoundedSemaphore(2)
    with semaphore:
        assert semaphore.get_value() == 1
        assert semaphore.acquire()
        assert not semaphore.acquire(timeout=0.01)
        c.submit(semaphore.release).result(PATIENCE_S)
    assert semaphore.get_value() == 2
    with pytest.raises(ValueError, match="too many times"):
        semaphore.release()
    assert semaphore.get_value() == 2
    assert pickle.loads(pickle.dumps(semaphore)) == semaphore


# -- Condition -------------------------------------------------------------------------------------


def wait_in(condition: Condition, order: Queue[int], number: int) -> bool:
    with condition:
        found = condition.wait(PATIENCE_S)
        order.put(number)
        return found


@pytest.mark.parametrize("kind", [None, hoplite_mp.Lock, hoplite_mp.RLock])
def test_condition_notifies_in_the_order_of_waiting(c: Cluster, kind: Any) -> None:
    condition = hoplite_mp.Condition(kind and kind())
    order: Queue[int] = hoplite_mp.Queue()
    with condition:
        condition.notify()  # nobody waits, so it is lost
    waiting = []
    for number in range(4):
        waiting.append(c.submit(wait_in, condition, order, number))
        waiters_are(condition, number + 1)
    with condition:
        condition.notify(2)
        assert order.empty(), "they need the lock"
    # Which of the two gets the lock first is open.
    assert sorted(order.get(timeout=PATIENCE_S) for _ in range(2)) == [0, 1]
    assert not waiting[2].done()
    with condition:
        condition.notify_all()
    assert [one.result(PATIENCE_S) for one in waiting] == [True] * 4
    assert sorted(order.get(timeout=PATIENCE_S) for _ in range(2)) == [2, 3]


def test_condition_waits_with_a_timeout_and_for_a_predicate(c: Cluster) -> None:
    condition = hoplite_mp.Condition()
    with condition, condition:
        begun = time.monotonic()
        assert condition.wait(0.05) is False
        assert time.monotonic() - begun >= 0.05
        assert condition.wait_for(lambda: [], timeout=0.02) == []
        assert condition.wait_for(lambda: "at once") == "at once"
        assert not _in_thread(condition.acquire, False), "acquired again, twice"
    assert _in_thread(condition.acquire, False)


def test_condition_without_its_lock_is_an_assertion_error(c: Cluster) -> None:
    condition = hoplite_mp.Condition(hoplite_mp.Lock())
    for call in (condition.wait, condition.notify, condition.notify_all):
        with pytest.raises(AssertionError, match="needs the lock"):
            call()
    assert condition.acquire(block=False), "nothing was acquired"
    condition.release()
    assert condition.actor.waiters().result(PATIENCE_S) == 0
    with pytest.raises(ValueError, match="n=-1"):
        condition.notify(-1)
    with pytest.raises(TypeError, match=r"Lock or RLock"):
        hoplite_mp.Condition(threading.Lock())  # type: ignore[arg-type]


def test_a_notification_of_a_dead_waiter_goes_to_another(c: Cluster) -> None:
    """Also if it was notified before it was dead, and never had the lock again."""
    condition, order = hoplite_mp.Condition(), hoplite_mp.Queue[int]()
    member = c.actor(Waiter, condition)
    pid = member.pid().result()
    lost = member.wait()
    waiters_are(condition, 1)
    waiting = c.submit(wait_in, condition, order, 1)
    waiters_are(condition, 2)
    os.kill(pid, signal.SIGSTOP)
    with condition:
        condition.notify()
    os.kill(pid, signal.SIGKILL)
    assert waiting.result(PATIENCE_S) is True
    assert isinstance(lost.exception(PATIENCE_S), ActorLostError)


class Waiter(Member):
    def wait(self) -> Any:
        with self.used:
            return self.used.wait()


def test_a_waiter_that_dies_with_the_lock_releases_it(c: Cluster) -> None:
    condition = hoplite_mp.Condition()
    member = c.actor(Member, condition)
    pid = member.pid().result()
    assert member.call("acquire").result(PATIENCE_S)
    os.kill(pid, signal.SIGKILL)
    with condition:
        assert condition.wait(0.01) is False


def test_a_cancelled_wait_has_the_lock_and_passes_its_notification_on(c: Cluster) -> None:
    condition = hoplite_mp.Condition()

    async def wait() -> bool:
        async with condition:
            return await condition.wait_async(PATIENCE_S)

    async def main() -> None:
        first, second = asyncio.create_task(wait()), asyncio.create_task(wait())
        while await condition.actor.waiters() < 2:
            await asyncio.sleep(0.01)
        await condition.acquire_async()
        await condition.notify_async()
        await asyncio.sleep(0.1)  # the first one is notified, and waits for the lock
        first.cancel()
        await asyncio.sleep(0.1)
        assert not first.done(), "it has to have the lock before it raises"
        await condition.release_async()
        await asyncio.wait([first, second], return_when=asyncio.FIRST_COMPLETED)
        with pytest.raises(asyncio.CancelledError):
            await first
        assert await second is True

    asyncio.run(main())
    assert condition.acquire(block=False)
    condition.release()


def test_a_condition_is_found_by_its_name_with_its_lock(c: Cluster) -> None:
    def notify() -> None:
        condition = hoplite_mp.Condition(name="changed")
        with condition:
            condition.notify()

    condition = hoplite_mp.Condition(name="changed")
    with condition:
        done = c.submit(notify)
        assert condition.wait(PATIENCE_S)
    done.result(PATIENCE_S)


# -- Barrier ---------------------------------------------------------------------------------------


def test_barrier_lets_all_go_on_together_again_and_again(c: Cluster) -> None:
    barrier = hoplite_mp.Barrier(3)
    assert (barrier.parties, barrier.n_waiting, barrier.broken) == (3, 0, False)

    def peer(rank: int, barrier: Barrier) -> list[int]:
        return [barrier.wait(PATIENCE_S) for _ in range(5)]

    found = [one.result(PATIENCE_S) for one in c.spmd(peer, 3, barrier)]
    assert [sorted(one) for one in zip(*found, strict=True)] == [[0, 1, 2]] * 5
    waiting = c.submit(barrier.wait)
    eventually(lambda: barrier.n_waiting == 1)
    assert not waiting.done()
    barrier.reset()
    assert isinstance(waiting.exception(PATIENCE_S), BrokenBarrierError)
    assert not barrier.broken


def test_a_timeout_breaks_the_barrier_until_it_is_reset(c: Cluster) -> None:
    barrier = hoplite_mp.Barrier(3, timeout=PATIENCE_S)
    waiting = c.submit(barrier.wait)
    eventually(lambda: barrier.n_waiting == 1)
    with pytest.raises(BrokenBarrierError):
        barrier.wait(0.05)
    assert isinstance(waiting.exception(PATIENCE_S), BrokenBarrierError)
    assert barrier.broken
    with pytest.raises(BrokenBarrierError):
        barrier.wait()
    barrier.reset()
    with pytest.raises(BrokenBarrierError):
        barrier.wait(0)
    barrier.reset()
    others = [c.submit(barrier.wait) for _ in range(2)]
    assert sorted([barrier.wait(), *c.get(others)]) == [0, 1, 2]
    barrier.abort()
    assert barrier.broken


def test_one_call_runs_the_action_before_any_returns(c: Cluster) -> None:
    ran: Queue[int] = hoplite_mp.Queue()
    barrier = hoplite_mp.Barrier(2, action=lambda: ran.put(1))

    def peer(rank: int, barrier: Barrier, ran: Queue[int]) -> list[int]:
        found = []
        for _ in range(3):
            barrier.wait(PATIENCE_S)
            found.append(ran.qsize())
            barrier.wait(PATIENCE_S)
        return found

    assert [one.result(PATIENCE_S) for one in c.spmd(peer, 2, barrier, ran)] == [[1, 3, 5]] * 2


def test_an_action_that_raises_breaks_the_barrier(c: Cluster) -> None:
    def fails() -> None:
        raise KeyError("action")

    barrier = hoplite_mp.Barrier(2, fails)
    waiting = c.submit(barrier.wait)
    eventually(lambda: barrier.n_waiting == 1)
    with pytest.raises(KeyError, match="action"):
        barrier.wait(PATIENCE_S)
    assert isinstance(waiting.exception(PATIENCE_S), BrokenBarrierError)
    assert barrier.broken


def test_a_dead_waiter_breaks_the_barrier(c: Cluster) -> None:
    barrier = hoplite_mp.Barrier(3)
    member = c.actor(Member, barrier)
    pid = member.pid().result()
    member.call("wait")
    waiting = c.submit(barrier.wait)
    eventually(lambda: barrier.n_waiting == 2)
    os.kill(pid, signal.SIGKILL)
    assert isinstance(waiting.exception(PATIENCE_S), BrokenBarrierError)
    assert barrier.broken


def test_a_process_that_dies_after_the_barrier_breaks_nothing(c: Cluster) -> None:
    barrier = hoplite_mp.Barrier(2)
    member = c.actor(Member, barrier)
    pid = member.pid().result()
    lost = member.call("wait")
    barrier.wait(PATIENCE_S)
    lost.result(PATIENCE_S)
    os.kill(pid, signal.SIGKILL)
    other = c.submit(barrier.wait, PATIENCE_S)
    assert sorted([barrier.wait(PATIENCE_S), other.result(PATIENCE_S)]) == [0, 1]


def test_a_cancelled_wait_leaves_the_barrier_as_it_was(c: Cluster) -> None:
    barrier = hoplite_mp.Barrier(2)

    async def main() -> None:
        first = asyncio.create_task(barrier.wait_async())
        while not (await barrier.actor.state())[1]:
            await asyncio.sleep(0.01)
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        assert sorted(await asyncio.gather(barrier.wait_async(), barrier.wait_async())) == [0, 1]
        await barrier.abort_async()
        with pytest.raises(BrokenBarrierError):
            await barrier.wait_async()
        await barrier.reset_async()

    asyncio.run(main())
    assert not barrier.broken


def test_barrier_indices_differ_after_a_waiting_call_was_cancelled(c: Cluster) -> None:
    barrier = hoplite_mp.Barrier(3)

    async def main() -> list[int]:
        calls = []
        for count in (1, 2):
            calls.append(asyncio.create_task(barrier.wait_async(PATIENCE_S)))
            while (await barrier.actor.state())[1] < count:
                await asyncio.sleep(0.01)
        calls.pop(0).cancel()
        calls += [asyncio.create_task(barrier.wait_async(PATIENCE_S)) for _ in range(2)]
        return await asyncio.gather(*calls)

    found = asyncio.run(main())
    assert found[0] == 0
    assert sorted(found) == [0, 1, 2]


def test_a_named_barrier_has_one_number_of_parties(c: Cluster) -> None:
    barrier = hoplite_mp.Barrier(2, name="gathering")
    assert hoplite_mp.Barrier(2, name="gathering") == barrier
    with pytest.raises(ValueError, match="has 2 parties, not 3"):
        hoplite_mp.Barrier(3, name="gathering")
    for parties, kind in ((0, ValueError), (1.5, TypeError), (-1, ValueError)):
        with pytest.raises(kind, match="parties"):
            hoplite_mp.Barrier(parties)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="callable"):
        hoplite_mp.Barrier(1, 5)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", [hoplite_mp.RLock, hoplite_mp.Condition, hoplite_mp.Barrier])
def test_calls_of_an_ended_actor_raise(c: Cluster, kind: Any) -> None:
    made = kind(2) if kind is hoplite_mp.Barrier else kind()
    Actor.kill(made.actor)
    with pytest.raises(ActorLostError):
        made.acquire() if kind is hoplite_mp.RLock else made.wait()
