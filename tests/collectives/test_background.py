"""Calls of a Group in the background: they keep their places, whatever waits for them, or ends."""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
import threading
import weakref
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import hoplite_mp
from hoplite_mp import ClosedError, HopliteTimeoutError, PeerLostError
from tests.support.group_members import impatient_and_patient
from tests.support.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import Callable

    from hoplite_mp import Cluster, Group


def _by_result(futures: list[Any]) -> list[Any]:
    found: list[Any] = []
    for future in futures:
        try:
            found.append(future.result())
        except HopliteTimeoutError as error:
            found.append(error)
    return found


def _by_exception(futures: list[Any]) -> list[Any]:
    found: list[Any] = []
    for future in futures:
        try:
            found.append(future.exception() or future.result())
        except HopliteTimeoutError as error:
            found.append(error)
    return found


def _by_await(futures: list[Any]) -> list[Any]:
    async def all_of_them() -> list[Any]:
        return await asyncio.gather(*futures, return_exceptions=True)

    return asyncio.run(all_of_them())


def _patiently(call: Callable[[], Any]) -> Any:
    """What a plain call returns, which is made again until it is over."""
    found: list[Any] = []

    def is_over() -> bool:
        try:
            found.append(call())
        except HopliteTimeoutError:
            return False
        return True

    eventually(is_over, "a call is over")
    return found[0]


def _begun_in_thread(group: Group, parts: list[int]) -> tuple[threading.Thread, list[int]]:
    """A thread that makes these plain calls, and their totals."""
    totals: list[int] = []

    def make() -> None:
        totals.extend(int(group.allreduce(np.array([part]))[0]) for part in parts)

    thread = threading.Thread(target=make)
    thread.start()
    return thread, totals


@pytest.mark.parametrize("read", [_by_result, _by_exception, _by_await])
def test_calls_in_the_background_keep_their_places_however_late_they_are(
    cluster: Cluster, read: Callable[[list[Any]], list[Any]]
) -> None:
    """Only a wait for them times out, and a plain call behind them is not made."""
    first, second = impatient_and_patient(cluster, f"in order {read.__name__}")
    futures = [first.allreduce_async(np.array([10**k])) for k in range(3)]
    for error in read(futures):
        assert isinstance(error, HopliteTimeoutError)
        assert re.search(
            r"call 1 still misses ranks \[1\], after 0.1 s. The call goes on", str(error)
        )
    with pytest.raises(HopliteTimeoutError, match="this call was not made"):
        first.allreduce(np.array([5]))
    thread, totals = _begun_in_thread(second, [1, 10, 100, 1000])
    assert int(_patiently(lambda: first.allreduce(np.array([1000])))[0]) == 2000
    thread.join(20)
    assert [int(found[0]) for found in read(futures)] == [2, 20, 200]
    assert totals == [2, 20, 200, 2000]
    assert (first.calls, second.calls) == (5, 5)
    first.close()
    second.close()


def test_a_program_that_has_dropped_a_late_future_makes_its_next_call_in_the_right_place(
    cluster: Cluster,
) -> None:
    """Also if it was read by somebody else: a callback, or a task of an event loop that is gone."""
    first, second = impatient_and_patient(cluster, "dropped")
    heard: list[Any] = []

    async def awaited_for_a_moment() -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.ensure_future(first.allreduce_async(np.array([1]))), 0.3)

    asyncio.run(awaited_for_a_moment())
    first.allreduce_async(np.array([10])).add_done_callback(
        lambda done: heard.append(done.result())
    )
    with pytest.raises(HopliteTimeoutError, match="The call goes on"):
        first.allreduce_async(np.array([100])).result()
    thread, totals = _begun_in_thread(second, [1, 10, 100, 1000, 10000])
    last = first.allreduce_async(np.array([1000]))
    assert _patiently(last.result).tolist() == [2000]
    assert _patiently(lambda: first.allreduce(np.array([10000]))).tolist() == [20000]
    thread.join(20)
    assert [int(one[0]) for one in heard] == [20]
    assert totals == [2, 20, 200, 2000, 20000]
    first.close()
    second.close()


def test_a_plain_call_that_times_out_behind_the_thread_is_made_again(cluster: Cluster) -> None:
    """Also with a timeout of 0, which looks once; and a call inside a callback waits."""
    first, second = impatient_and_patient(cluster, "plain")
    first._timeout = 0.0
    with pytest.raises(HopliteTimeoutError, match=r"call 1 still misses ranks \[1\]"):
        first.allreduce(np.array([1]))
    inside: list[Any] = []
    future = first.allreduce_async(np.array([1]))  # the same call again
    future.add_done_callback(lambda _: inside.append(first.allreduce(np.array([10]))))
    with pytest.raises(HopliteTimeoutError, match="The call goes on"):
        future.result()
    thread, totals = _begun_in_thread(second, [1])
    thread.join(20)
    assert totals == [2]
    assert _patiently(future.result).tolist() == [2]
    with pytest.raises(HopliteTimeoutError):
        first.allreduce(np.array([100]))  # while the callback waits
    thread, totals = _begun_in_thread(second, [10, 100])
    assert _patiently(lambda: first.allreduce(np.array([100]))).tolist() == [200]
    thread.join(20)
    assert totals == [20, 200]
    assert [int(one[0]) for one in inside] == [20]
    first.close()
    second.close()


class Interrupted(Exception):
    """As a signal handler may raise."""


@pytest.mark.parametrize("late", [False, True])
def test_a_plain_call_whose_wait_is_interrupted_goes_on(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, late: bool
) -> None:
    """Also if it was withdrawn just before, because its time was over: its caller does not make it
    again."""
    first, second = impatient_and_patient(cluster, f"goes on {late}")
    with pytest.raises(HopliteTimeoutError):
        first.allreduce_async(np.array([1])).result()
    background = first._background
    assert background is not None

    def interrupted(future: Any) -> None:
        if late:
            type(background)._withdraw(background, future)
            with pytest.raises(HopliteTimeoutError):
                future.result(60)
        raise Interrupted

    if late:
        thread, totals = _begun_in_thread(second, [1])
        thread.join(20)  # so that the next call is under way when its time is over
        assert totals == [2]
    with monkeypatch.context() as patch:
        patch.setattr(background, "_withdraw", interrupted)
        with pytest.raises(Interrupted):
            first.allreduce(np.array([10]))
    last = first.allreduce_async(np.array([100]))
    thread, totals = _begun_in_thread(second, [10, 100] if late else [1, 10, 100])
    assert _patiently(last.result).tolist() == [200]
    thread.join(20)
    assert totals[-2:] == [20, 200]
    first.close()
    second.close()


def test_a_program_that_ends_by_an_error_does_not_wait_for_calls_in_the_background() -> None:
    program = """
import time
import hoplite_mp
def peer():
    g = hoplite_mp.current().group("left", 2, 1)
    g.barrier()
    time.sleep(600)
c = hoplite_mp.Cluster(workers=1)
c.submit(peer)
g = c.group("left", 2, 0)
g.barrier_async().result(60)
late = g.barrier_async()
raise SystemError("of the program")
"""
    done = subprocess.run(
        [sys.executable, "-c", program], stderr=subprocess.PIPE, text=True, timeout=100
    )
    assert done.returncode == 1
    assert "SystemError: of the program" in done.stderr


def test_what_a_callback_raises_ends_no_later_call(cluster: Cluster) -> None:
    def raises(_: Any) -> None:
        raise SystemExit(3)

    first, second = impatient_and_patient(cluster, "callback raises")
    first.allreduce_async(np.array([1])).add_done_callback(raises)  # before that call is over
    later = first.allreduce_async(np.array([10]))
    thread, totals = _begun_in_thread(second, [1, 10])
    assert later.result(60).tolist() == [20]
    thread.join(20)
    assert totals == [2, 20]
    first.close()
    second.close()


def test_a_callback_that_waits_for_a_later_call_is_told_so(cluster: Cluster) -> None:
    first, second = impatient_and_patient(cluster, "callback waits")
    heard: list[Any] = []

    def waits(_: Any) -> None:
        with pytest.raises(RuntimeError, match="cannot wait for one that is not over"):
            first.allreduce_async(np.array([10])).result()
        heard.append(first.allreduce(np.array([1])))

    future = first.allreduce_async(np.array([1]))
    future.add_done_callback(waits)
    thread, totals = _begun_in_thread(second, [1, 1, 10])
    thread.join(60)
    assert totals == [2, 2, 20]
    eventually(lambda: bool(heard), "the callback has ended")
    first.close()
    second.close()


def test_a_future_of_a_group_is_no_argument(cluster: Cluster) -> None:
    with cluster.group("no argument", 1) as group:
        future = group.barrier_async()
        with pytest.raises(TypeError, match=r"send its result\(\)"):
            cluster.submit(str, future)
        future.result(60)


def test_a_future_that_is_kept_keeps_no_group(cluster: Cluster) -> None:
    group = cluster.group("kept future", 1)
    kept = group.barrier_async()
    kept.result(60)
    group.close()
    gone = weakref.ref(group)
    del group
    eventually(lambda: gone() is None, "the Group is freed, without the garbage collector")
    assert kept.done()


def test_waits_that_have_ended_leave_nothing_in_the_future(cluster: Cluster) -> None:
    first, second = impatient_and_patient(cluster, "many waits")
    future = first.allreduce_async(np.array([1]))
    first._background._timeout = 0.001  # type: ignore[union-attr]

    async def wait() -> int:
        late = 0
        for _ in range(20):
            try:
                await future
            except HopliteTimeoutError:
                late += 1
        return late

    assert asyncio.run(wait()) == 20
    assert len(future._done_callbacks) == 1  # type: ignore[attr-defined]  # its own
    assert int(second.allreduce(np.array([1]))[0]) == 2
    assert _patiently(future.result).tolist() == [2]
    first.close()
    second.close()


def test_a_group_that_becomes_whole_at_the_last_moment_loses_no_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Between the end of the wait for the others and the making of its error."""
    config = hoplite_mp.Config(group_wait_s=0.2)
    with hoplite_mp.Cluster(workers=0, config=config) as cluster:
        first = cluster.group("last moment", 2, 0)
        others: list[Group] = []

        def joins_now(limit: str) -> str:
            if not others:
                others.append(cluster.group("last moment", 2, 1))
                eventually(first._admitted, "the Group is whole")
            return f"late within {limit}"

        monkeypatch.setattr(first, "_not_full", joins_now)
        futures = [first.allreduce_async(np.array([part])) for part in (1, 10)]
        eventually(lambda: bool(others), "the other one joins")
        thread, totals = _begun_in_thread(others[0], [1, 10])
        assert [int(future.result(60)[0]) for future in futures] == [2, 20]
        thread.join(20)
        assert totals == [2, 20]
        first.close()
        others[0].close()


def test_the_longest_wait_for_a_group() -> None:
    config = hoplite_mp.Config(group_wait_s=1e300)
    with (
        hoplite_mp.Cluster(workers=0, config=config) as cluster,
        cluster.group("long", 1, timeout=5) as group,
    ):
        assert group.allgather_async("x").result(60) == ["x"]


def test_close_gives_up_calls_in_the_background_that_are_late(cluster: Cluster) -> None:
    first, second = impatient_and_patient(cluster, "given up")
    futures = [first.allreduce_async(np.ones(1)) for _ in range(3)]
    first.close()
    for future in futures:
        with pytest.raises(ClosedError, match="this member has left"):
            future.result()
    assert second.allreduce(np.ones(1)).tolist() in ([1.0], [2.0])  # without it, or with its part
    second.close()


def test_calls_in_the_background_wait_for_a_group_that_is_not_whole_yet(cluster: Cluster) -> None:
    alone = cluster.group("not whole yet", 2, 0, timeout=0.1)
    future = alone.allgather_async(0)
    with pytest.raises(HopliteTimeoutError, match=r"1 of 2 members came .* The call goes on"):
        future.result()
    other = cluster.group("not whole yet", 2, 1, timeout=60)
    assert other.allgather(1) == [0, 1]
    assert _patiently(future.result) == [0, 1]
    alone.close()
    other.close()


def test_calls_in_the_background_of_a_group_that_never_is_whole_fail() -> None:
    """All of them, because one that came later would take the place of an earlier one."""
    config = hoplite_mp.Config(group_wait_s=0.3)
    with hoplite_mp.Cluster(workers=0, config=config) as cluster:
        alone = cluster.group("never whole", 2, 0, timeout=0.1)
        futures = [alone.barrier_async() for _ in range(2)]
        eventually(futures[1].done, "both have failed")
        other = cluster.group("never whole", 2, 1)
        for future in (*futures, alone.barrier_async()):
            words = "came within group_wait_s=0.3 s.* close this Group, and join it again"
            with pytest.raises(PeerLostError, match=words):
                future.result(60)
        alone.close()
        other.close()
