"""Calls of a Group in the background: they keep their places, whatever waits for them, or end the
membership if they are late."""

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
from hoplite_mp import ClosedError, HopliteTimeoutError
from hoplite_mp._common import clock
from tests.support.group_members import calls_held, impatient_and_patient, pair_after_a_call
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


def _begun_in_thread(group: Group, parts: list[int]) -> tuple[threading.Thread, list[int]]:
    """A thread that makes these plain calls, and their totals."""
    totals: list[int] = []

    def make() -> None:
        totals.extend(int(group.allreduce(np.array([part]))[0]) for part in parts)

    thread = threading.Thread(target=make)
    thread.start()
    return thread, totals


@pytest.mark.parametrize("read", [_by_result, _by_exception, _by_await])
def test_background_call_that_is_late_fails_with_all_later_ones_and_ends_membership(
    cluster: Cluster, read: Callable[[list[Any]], list[Any]]
) -> None:
    name = f"late {read.__name__}"
    first, second = impatient_and_patient(cluster, name)
    with calls_held(first):
        futures = [first.allreduce_async(np.array([10**k])) for k in range(3)]
    for error in read(futures):
        assert isinstance(error, HopliteTimeoutError)
        words = (
            r"call 1 is still waiting for ranks \[1\], after 0.1 s. This rank has left the Group"
        )
        assert re.search(words, str(error))
    for call in (first.barrier, first.barrier_async):
        with pytest.raises(ClosedError, match="because a call timed out"):
            call()
    assert int(second.allreduce(np.array([1]))[0]) in (1, 2)  # without its part, or with it
    assert (second.allreduce(np.array([1])).tolist(), second.contributors) == ([1], (1,))
    with cluster.group(name, 2, 0, timeout=60) as again:
        later = again.allreduce_async(np.array([1]))
        eventually(lambda: int(second.allreduce(np.array([1]))[0]) == 2, "it takes part")
        assert later.result(20).tolist() == [2]
    second.close()


def test_background_call_is_late_by_the_time_since_the_one_before_it(cluster: Cluster) -> None:
    """Not since it was begun."""
    first, second = pair_after_a_call(cluster, "in a row")
    wait, deadlines, ends = first._member.wait, [], []

    def noted(look: Any, deadline: int, *about: Any) -> Any:
        deadlines.append(deadline)
        return wait(look, deadline, *about)

    first._member.wait = noted  # type: ignore[method-assign]
    futures = [first.allgather_async(number) for number in range(3)]
    for number, future in enumerate(futures):
        eventually(lambda: len(deadlines) > len(ends), "the call is at the front")
        ends.append(clock.monotonic_ns())
        assert second.allgather(number) == future.result(20) == [number] * 2
    timeout_ns = int((first._member.timeout or 0) * 1e9)
    for end, deadline in zip(ends, deadlines[1:], strict=False):
        assert deadline >= end + timeout_ns
    assert len(deadlines) == len(ends)
    first.close()
    second.close()


def test_wait_that_times_out_or_is_interrupted_leaves_the_background_call_running(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if nobody has the Future any more, and in an event loop that is gone."""
    first, second = pair_after_a_call(cluster, "waits")
    heard: list[Any] = []

    async def awaited_for_a_moment() -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.ensure_future(first.allreduce_async(np.array([1]))), 0.1)

    asyncio.run(awaited_for_a_moment())
    first.allreduce_async(np.array([10])).add_done_callback(
        lambda done: heard.append(done.result())
    )
    late = first.allreduce_async(np.array([100]))
    for _ in range(2):
        with pytest.raises(TimeoutError):
            late.result(0.05)
        with pytest.raises(TimeoutError):
            late.exception(0)
    with monkeypatch.context() as patch:
        patch.setattr(late, "_turnstile", InterruptedTurnstile())
        with pytest.raises(Interrupted):
            late.result()
    thread, totals = _begun_in_thread(second, [1, 10, 100, 1000, 10000])
    last = first.allreduce_async(np.array([1000]))
    assert last.result(20).tolist() == [2000]
    assert late.result(0).tolist() == [200]
    assert first.allreduce(np.array([10000])).tolist() == [20000]
    thread.join(20)
    assert [int(one[0]) for one in heard] == [20]
    assert totals == [2, 20, 200, 2000, 20000]
    first.close()
    second.close()


def test_plain_call_behind_background_calls_that_times_out_ends_membership(
    cluster: Cluster,
) -> None:
    """Its time begins when those before it are over."""
    first, second = pair_after_a_call(cluster, "plain")
    begun = first.allreduce_async(np.array([1]))
    thread, totals = _begun_in_thread(second, [1])
    thread.join(20)
    assert begun.result(20).tolist() == [2]
    first._member.timeout = 0.1
    with pytest.raises(HopliteTimeoutError, match=r"call 2 is still waiting for ranks \[1\]"):
        first.allreduce(np.array([10]))
    with pytest.raises(ClosedError, match="because a call timed out"):
        first.allreduce_async(np.array([10]))
    assert totals == [2]
    assert int(second.allreduce(np.array([10]))[0]) in (10, 20)
    with cluster.group("plain", 2, 0, timeout=60) as again:
        later = again.allreduce_async(np.array([100]))
        eventually(lambda: int(second.allreduce(np.array([100]))[0]) == 200, "it takes part")
        assert later.result(20).tolist() == [200]
    second.close()


class Interrupted(Exception):
    """As a signal handler may raise."""


class InterruptedTurnstile:
    """A lock for which a thread is interrupted while it waits."""

    def acquire(self, *about: Any, **more: Any) -> bool:
        return _interrupted(*about, **more)


def _interrupted(*_: Any, **__: Any) -> Any:
    raise Interrupted


@pytest.mark.parametrize("moment", ["begin", "wait", "result"])
def test_plain_call_behind_background_calls_whose_wait_is_interrupted_ends_membership(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    """Also right after the call was begun, and when it is over."""
    name = f"interrupted {moment}"
    first, second = pair_after_a_call(cluster, name)
    begun = first.allreduce_async(np.array([1]))
    background = first._background
    assert background is not None
    begin = background.begin

    def begins(call: Any, *args: Any) -> Any:
        future = begin(call, *args)
        if moment == "begin":
            raise Interrupted
        monkeypatch.setattr(future, "wait" if moment == "wait" else "outcome", _interrupted)
        return future

    monkeypatch.setattr(background, "begin", begins)
    if moment == "result":  # both calls end
        thread, totals = _begun_in_thread(second, [1, 10])
    with pytest.raises(Interrupted):
        first.allreduce(np.array([10]))
    with pytest.raises(ClosedError, match="because a call ended by Interrupted"):
        first.barrier()
    if moment == "result":
        thread.join(20)
        assert totals == [2, 20]
        assert begun.result(20).tolist() == [2]
    else:
        with pytest.raises(ClosedError, match="this member has left"):
            begun.result(20)
        assert int(second.allreduce(np.array([1]))[0]) in (1, 2)
    with cluster.group(name, 2, 0, timeout=60) as again:
        later = again.allreduce_async(np.array([100]))
        eventually(lambda: int(second.allreduce(np.array([100]))[0]) == 200, "it takes part")
        assert later.result(20).tolist() == [200]
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


def test_callback_that_raises_ends_no_later_call(cluster: Cluster) -> None:
    def raises(_: Any) -> None:
        raise SystemExit(3)

    first, second = pair_after_a_call(cluster, "callback raises")
    first.allreduce_async(np.array([1])).add_done_callback(raises)  # before that call is over
    later = first.allreduce_async(np.array([10]))
    thread, totals = _begun_in_thread(second, [1, 10])
    assert later.result(60).tolist() == [20]
    thread.join(20)
    assert totals == [2, 20]
    first.close()
    second.close()


def test_callback_that_waits_for_a_later_call_gets_an_error(cluster: Cluster) -> None:
    first, second = pair_after_a_call(cluster, "callback waits")
    heard: list[Any] = []

    def waits(_: Any) -> None:
        with pytest.raises(RuntimeError, match="cannot wait for such a call"):
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
    first, second = pair_after_a_call(cluster, "many waits")
    future = first.allreduce_async(np.array([1]))

    async def wait() -> int:
        late = 0
        for _ in range(20):
            try:
                await asyncio.wait_for(asyncio.ensure_future(future), 0.001)
            except TimeoutError:
                late += 1
        return late

    assert asyncio.run(wait()) == 20
    assert len(future._done_callbacks) == 1  # type: ignore[attr-defined]  # its own
    assert int(second.allreduce(np.array([1]))[0]) == 2
    assert future.result(20).tolist() == [2]
    first.close()
    second.close()


def test_group_that_becomes_whole_at_the_last_moment_is_left_by_who_was_late(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Between the end of the wait for the others and the making of its error."""
    config = hoplite_mp.Config(group_wait_s=0.2)
    with hoplite_mp.Cluster(workers=0, config=config) as cluster:
        first = cluster.group("last moment", 2, 0)
        others: list[Group] = []

        def joins_now(limit: str) -> str:
            if not others:
                others.append(cluster.group("last moment", 2, 1, timeout=20))
                eventually(first._member.admitted, "the Group is whole")
            return f"late within {limit}"

        monkeypatch.setattr(first._member, "not_full", joins_now)
        with calls_held(first):
            futures = [first.allreduce_async(np.array([part])) for part in (1, 10)]
        for future in futures:
            with pytest.raises(HopliteTimeoutError, match="late within group_wait_s"):
                future.result(60)
        assert (others[0].allreduce(np.array([5])).tolist(), others[0].contributors) == ([5], (1,))
        with cluster.group("last moment", 2, 0, timeout=20) as again:
            later = again.allreduce_async(np.array([1]))
            eventually(lambda: int(others[0].allreduce(np.array([1]))[0]) == 2, "it takes part")
            assert later.result(20).tolist() == [2]
        others[0].close()


def test_the_longest_wait_for_a_group() -> None:
    config = hoplite_mp.Config(group_wait_s=1e300)
    with (
        hoplite_mp.Cluster(workers=0, config=config) as cluster,
        cluster.group("long", 1, timeout=5) as group,
    ):
        assert group.allgather_async("x").result(60) == ["x"]


def test_close_during_a_late_background_call_returns_when_that_has_timed_out(
    cluster: Cluster,
) -> None:
    """It raises no error of its own, and the rank can join again at once."""
    first, second = impatient_and_patient(cluster, "closed late")
    with calls_held(first):
        futures = [first.allreduce_async(np.ones(1)) for _ in range(3)]
    first.close()
    first.close()
    for future in futures:
        assert future.done()
        with pytest.raises(HopliteTimeoutError, match="This rank has left the Group"):
            future.result()
    with cluster.group("closed late", 2, 0, timeout=60) as again:
        later = again.allreduce_async(np.ones(1))
        eventually(lambda: second.allreduce(np.ones(1)).tolist() == [2.0], "it takes part")
        assert later.result(20).tolist() == [2.0]
    second.close()


def test_block_that_raises_during_a_late_background_call_gives_it_up(cluster: Cluster) -> None:
    first, second = pair_after_a_call(cluster, "block")
    begun: list[Any] = []

    def block() -> None:
        with first:
            begun.append(first.allreduce_async(np.ones(1)))
            raise KeyError("of the block")

    with pytest.raises(KeyError, match="of the block"):
        block()
    with pytest.raises(ClosedError, match="this member has left"):
        begun[0].result(20)
    assert second.allreduce(np.ones(1)).tolist() in ([1.0], [2.0])
    second.close()


@pytest.mark.parametrize("limit", ["timeout", "group_wait_s"])
def test_background_calls_of_a_group_that_does_not_fill_fail_and_a_new_one_begins_at_call_0(
    limit: str,
) -> None:
    config = hoplite_mp.Config(group_wait_s=0.2 if limit == "group_wait_s" else 60)
    with hoplite_mp.Cluster(workers=0, config=config) as cluster:
        for _ in range(3):
            alone = cluster.group("not whole", 2, 0, timeout=0.1 if limit == "timeout" else None)
            with calls_held(alone):
                futures = [alone.allgather_async(0) for _ in range(2)]
            for future in futures:
                with pytest.raises(HopliteTimeoutError, match=f"1 of 2 members joined.* {limit}=0"):
                    future.result(60)
            with pytest.raises(ClosedError, match="because a call timed out"):
                alone.allgather_async(0)
        pair = [cluster.group("not whole", 2, rank, timeout=60) for rank in range(2)]
        later = pair[0].allgather_async(0)
        assert pair[1].allgather(1) == later.result(20) == [0, 1]
        assert [group.calls for group in pair] == [1, 1]
        for group in pair:
            group.close()
