"""Who may be a member, what every rank is told, and when a call gives up."""

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
from hoplite_mp import ClosedError, HopliteTimeoutError, PeerLostError, StoreFullError
from tests.collectives.helpers import Gate, eventually
from tests.collectives.test_group_calls import in_threads

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from hoplite_mp import Cluster, Group

DIFFERENT: dict[str, Callable[[Group], Any]] = {
    "kind": lambda g: g.barrier() if g.rank else g.allreduce(np.ones(2)),
    "op": lambda g: g.allreduce(np.ones(2), op="max" if g.rank == 2 else "sum"),
    "ufunc": lambda g: g.allreduce(np.ones(2), op=np.hypot if g.rank == 1 else np.add),
    "shape": lambda g: g.allreduce(np.ones(2 + (g.rank == 1))),
    "dimensions": lambda g: g.reduce(np.ones((1,) * (1 + (g.rank == 2)))),
    "dtype": lambda g: g.reduce_scatter(np.ones(3, "f4" if g.rank else "f8")),
    "root": lambda g: g.broadcast(np.ones(2), root=g.rank // 2),
    "reduce root": lambda g: g.reduce(np.ones(2), root=g.rank),
    "gather root": lambda g: g.gather(np.ones(2), root=g.rank % 2),
    "no such operation": lambda g: g.allreduce(np.ones(2), op="xor"),
    "no dimension": lambda g: g.reduce_scatter(1.0),
}


@pytest.mark.parametrize("what", DIFFERENT)
def test_a_call_that_differs_is_a_value_error_on_every_rank(cluster: Cluster, what: str) -> None:
    def body(group: Group) -> Any:
        with pytest.raises(ValueError, match=r".") as caught:
            DIFFERENT[what](group)
        again = group.allreduce(np.ones(1))
        return str(caught.value), again.tolist(), group.contributors, group.calls

    found = in_threads(cluster, f"different {what}", 3, body)
    assert {str(one) for one in found} == {str(found[0])}
    assert found[0][1:] == ([3.0], (0, 1, 2), 2)


def test_what_differs_is_named(cluster: Cluster) -> None:
    def body(group: Group) -> str:
        with pytest.raises(ValueError, match="rank") as caught:
            group.allreduce(np.ones(2 + group.rank, f"f{4 * (group.rank + 1)}"))
        return str(caught.value)

    text = in_threads(cluster, "named", 2, body)[0]
    for part in ("rank 0", "rank 1", "(2,)", "(3,)", "float32", "float64"):
        assert part in text


OWN: dict[str, Callable[[Group], Any]] = {
    "op": lambda g: g.allreduce(np.ones(1), op=np.subtract),
    "root": lambda g: g.broadcast(np.ones(1), root=2),
    "parts": lambda g: g.alltoall([1]),
}


@pytest.mark.parametrize("wrong", OWN)
def test_a_mistake_of_one_thread_uses_up_the_call_of_all(cluster: Cluster, wrong: str) -> None:
    def body(group: Group) -> Any:
        call = (lambda g: g.allreduce(np.ones(1))) if group.rank else OWN[wrong]
        with pytest.raises(ValueError, match=f"{wrong}|reduce"):
            call(group)
        return group.allreduce(np.ones(1)).tolist(), group.calls

    assert in_threads(cluster, f"own {wrong}", 2, body) == [([2.0], 2)] * 2


def test_who_is_refused(cluster: Cluster) -> None:
    with cluster.group("taken", 2, 0), cluster.group("taken", 2) as last:
        assert last.rank == 1
        with pytest.raises(ValueError, match="one too many"):
            cluster.group("taken", 2)
        with pytest.raises(ValueError, match=r"rank 1 .* taken"):
            cluster.group("taken", 2, 1)
        with pytest.raises(ValueError, match=r"has size 2.*size 3"):
            cluster.group("taken", 3, 2)
        for rank in (2, -1):
            with pytest.raises(ValueError, match="ranks 0 to 1"):
                cluster.group("taken", 2, rank)
        with pytest.raises(ValueError, match="taken"):
            cluster.submit(lambda: hoplite_mp.current().group("taken", 2, 1)).result(timeout=20)
    for size in (0, -1, 65):
        with pytest.raises(ValueError, match="size"):
            cluster.group("none", size)
    with pytest.raises(ValueError, match="name"):
        cluster.group("", 1)
    for size, rank in ((1.5, 0), (2, "0"), (True, 0), (2, 0.0)):
        with pytest.raises(TypeError, match="integer"):
            cluster.group("none", size, rank)  # type: ignore[arg-type]


def test_without_a_rank_the_lowest_free_one_is_taken(cluster: Cluster) -> None:
    members = [cluster.group("free", 4, 1)] + [cluster.group("free", 4) for _ in range(3)]
    assert [member.rank for member in members] == [1, 0, 2, 3]
    for member in members:
        member.close()
    found = in_threads(cluster, "free", 3, lambda g: g.allreduce(np.array(g.rank)).tolist())
    assert found == [3, 3, 3]


@pytest.mark.parametrize("came", [1, 2])
def test_a_group_that_does_not_fill_says_how_many_came(came: int) -> None:
    config = hoplite_mp.Config(group_wait_s=0.1)
    with hoplite_mp.Cluster(workers=0, config=config) as cluster:
        members = [cluster.group("few", 3) for _ in range(came)]
        missing = "ranks 1, 2" if came == 1 else "rank 2"
        words = f"{came} of 3 members came within group_wait_s=0.1 s; missing: {missing}, which"
        for _ in range(2):
            with pytest.raises(HopliteTimeoutError, match=words):
                members[0].barrier()


def _impatient_and_patient(cluster: Cluster, name: str) -> tuple[Group, Group]:
    """The two members of a Group after call 0; those that follow soon time out for the first."""
    first = cluster.group(name, 2, 0, timeout=0.1)
    second = cluster.group(name, 2, 1, timeout=60)
    thread = threading.Thread(target=second.barrier)
    thread.start()

    def is_over() -> bool:
        try:
            first.barrier()
        except HopliteTimeoutError:  # the thread has not called yet
            return False
        return True

    eventually(is_over, "the first call")
    thread.join(20)
    return first, second


def test_a_timeout_names_who_is_missing_and_the_call_can_be_made_again(cluster: Cluster) -> None:
    first, second = _impatient_and_patient(cluster, "slow")
    with pytest.raises(HopliteTimeoutError, match=r"call 1 .* ranks \[1\]"):
        first.allreduce(np.ones(1))
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(second.allreduce(np.ones(1))))
    thread.start()
    eventually(lambda: _again(first, results), "the second try")
    thread.join(20)
    assert [r.tolist() for r in results] == [[2.0], [2.0]]
    first.close()
    second.close()


def _again(group: Group, results: list[Any]) -> bool:
    try:
        results.append(group.allreduce(np.ones(1)))
    except HopliteTimeoutError:
        return False
    return True


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
    first, second = _impatient_and_patient(cluster, f"in order {read.__name__}")
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
    first, second = _impatient_and_patient(cluster, "dropped")
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
    first, second = _impatient_and_patient(cluster, "plain")
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
    first, second = _impatient_and_patient(cluster, f"goes on {late}")
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

    with cluster.group("callback raises", 1) as group:
        group.barrier_async().add_done_callback(raises)
        assert group.allreduce_async(np.ones(1)).result(60).tolist() == [1.0]


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
    first, second = _impatient_and_patient(cluster, "many waits")
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
    first, second = _impatient_and_patient(cluster, "given up")
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


def test_what_a_member_can_see(cluster: Cluster) -> None:
    group = cluster.group("look", 2, 1)
    assert (group.rank, group.size, group.alive) == (1, 2, (1,))
    assert (group.contributors, group.calls) == ((), None)
    other = cluster.group("look", 2, 0, timeout=20)
    eventually(lambda: group.alive == (0, 1), "the other one")
    thread = threading.Thread(target=lambda: [other.barrier() for _ in range(3)])
    thread.start()
    for _ in range(3):
        group.barrier()
    thread.join(20)
    assert (group.contributors, group.calls, other.calls) == ((0, 1), 3, 3)
    with pytest.raises(AttributeError):
        group.nothing_async()
    other.close()
    eventually(lambda: group.alive == (1,), "that the other one has left")
    assert group.allreduce(np.ones(2)).tolist() == [1.0, 1.0]
    assert group.contributors == (1,)
    with pytest.raises(PeerLostError, match="rank 0"):
        group.broadcast(None, root=0)
    group.close()
    group.close()
    with pytest.raises(ClosedError):
        group.barrier()


def test_a_strict_member_does_not_go_on_without_the_others(cluster: Cluster) -> None:
    strict = cluster.group("strict", 2, 0, strict=True, timeout=20)
    other = cluster.group("strict", 2, 1)
    other.close()
    for _ in range(2):
        with pytest.raises(PeerLostError, match=r"ranks \[1\]"):
            strict.allreduce(np.ones(1))
    strict.close()


def test_what_goes_wrong_in_the_leader_is_told_to_everybody() -> None:
    """Here it has no room for the result; nobody may be left waiting."""

    def body(group: Group) -> Any:
        with pytest.raises(StoreFullError, match="16 MiB"):
            group.allreduce(np.ones(3 << 18))  # 6 MiB
        return group.allreduce(np.ones(1)).tolist(), group.calls

    config = hoplite_mp.Config(put_wait_s=0.2)
    with hoplite_mp.Cluster(workers=0, memory="16MiB", config=config) as cluster:
        assert in_threads(cluster, "full", 2, body) == [([2.0], 2)] * 2


def test_a_name_is_free_when_all_have_left(cluster: Cluster) -> None:
    """By closing, and by the end of their tasks."""

    def member(rank: int, size: int) -> Any:
        return hoplite_mp.current().group("again", size, rank).allreduce(np.ones(1)).tolist()

    for size in (2, 3, 1, 2):
        tasks = [cluster.submit(member, rank, size) for rank in range(size)]
        assert [task.result(timeout=20) for task in tasks] == [[float(size)]] * size
        found = in_threads(cluster, "again", size, lambda g: g.allreduce(np.ones(1)).tolist())
        assert found == [[float(size)]] * size


def test_a_member_leaves_when_its_task_fails(cluster: Cluster) -> None:
    def member(rank: int) -> Any:
        group = hoplite_mp.current().group("raises", 2, rank)
        group.barrier()
        if rank:
            raise KeyError("left")
        while True:
            group.allreduce(np.ones(1))
            if group.contributors == (0,):
                return group.alive

    tasks = [cluster.submit(member, rank) for rank in range(2)]
    assert tasks[0].result(timeout=20) == (0,)
    with pytest.raises(KeyError, match="left"):
        tasks[1].result(timeout=20)


def test_groups_leave_nothing_in_the_store(cluster: Cluster) -> None:
    def body(group: Group) -> None:
        for _ in range(3):
            group.allreduce(np.ones(100_000))
            group.allgather(np.ones(1000))

    in_threads(cluster, "warm", 2, body)
    (before,) = eventually(lambda: _settled(cluster))
    for number in range(5):
        in_threads(cluster, f"leak {number}", 2, body)
    eventually(lambda: cluster.stats()["objects"] <= before, "that all is given back")


def _settled(cluster: Cluster) -> tuple[int, ...]:
    """The number of objects, which may be 0, if it stays the same."""
    first = cluster.stats()["objects"]
    return (first,) if first == cluster.stats()["objects"] else ()


def test_why_an_operation_does_not_fit_is_told_whole_by_processes_that_have_stored_nothing(
    cluster: Cluster,
) -> None:
    """The text is longer than what lies beside a header, and they have no room of their own yet."""

    def peer(rank: int, size: int) -> list[str]:
        group = hoplite_mp.current().group("does not fit", size, rank)
        seen = []
        for x, op in ((np.ones(4), "xor"), (np.ones(4) * 1j, "or")):
            with pytest.raises(ValueError, match="not supported") as caught:
                group.allreduce(x, op)
            seen.append(str(caught.value))
        return seen

    for future in cluster.spmd(peer, 2, 2):
        for text, ufunc in zip(future.result(30), ("bitwise_xor", "bitwise_or"), strict=True):
            assert text.startswith(f"ufunc '{ufunc}' not supported for the input types")
            assert text.endswith("casting rule ''safe''")


@pytest.mark.parametrize("length", [4, 300_000])
def test_an_out_that_may_not_be_written_is_refused(cluster: Cluster, length: int) -> None:
    with cluster.group("read-only", 1) as group:
        out = np.zeros(length)
        out.flags.writeable = False
        with pytest.raises(ValueError, match="out is read-only"):
            group.allreduce(np.ones(length), out=out)
        assert group.allreduce(1.0) == 1.0


def test_without_any_room_such_a_text_is_cut(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any, **__: Any) -> Any:
        raise StoreFullError("the reserve for errors is in use")

    with cluster.group("full", 1) as group:
        group.barrier()
        monkeypatch.setattr(cluster._runtime.memory, "allocate_error", full)
        with pytest.raises(ValueError, match="ufunc 'bitwise_xor' not supp"):
            group.allreduce(np.ones(4), "xor")
        assert group.allreduce(1.0) == 1.0


@pytest.mark.parametrize("mistake", ["op", "parts", "root", "pickle"])
def test_a_mistake_of_one_rank_is_everybodys(cluster: Cluster, mistake: str) -> None:
    def peer(rank: int, size: int, mistake: str) -> list[str]:
        group = hoplite_mp.current().group(f"mistake {mistake}", size, rank)
        wrong = rank == 1
        seen = []
        for _ in range(2):
            try:
                if mistake == "op":
                    group.allreduce(1.0, "plus" if wrong else "sum")
                elif mistake == "parts":
                    group.alltoall([1.0] * (size - wrong))
                elif mistake == "root":
                    group.broadcast(root=1)
                else:
                    group.allgather((lambda: (yield))() if wrong else 1.0)
            except (ValueError, TypeError) as error:
                seen.append(type(error).__name__)
        seen.append(str(float(group.allreduce(1.0))))
        return seen

    futures = cluster.spmd(peer, 3, 3, mistake)
    for future in futures:
        first, second, total = future.result(30)
        assert total == "3.0"
        assert first == second == ("TypeError" if mistake == "pickle" else "ValueError")


def test_a_member_whose_call_timed_out_does_not_stop_the_others(
    cluster: Cluster, tmp_path: Path
) -> None:
    late, over = Gate(tmp_path, "late"), Gate(tmp_path, "over")

    def run(rank: int) -> str:
        group = hoplite_mp.current().group("timed out", 3, rank)
        group.barrier()
        group._timeout = 0.3 if rank == 1 else None
        if rank == 2:
            late.wait()
        try:
            total = float(group.allreduce(1.0))
        except TimeoutError:
            late.open()
            over.wait()  # goes on living, and does not call again
            return "late"
        if rank == 0:
            over.open()
        return str(total)

    assert [f.result(30) for f in cluster.spmd(run, 3)] == ["3.0", "late", "3.0"]
