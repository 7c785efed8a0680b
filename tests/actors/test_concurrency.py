"""Calls of an actor beside one another: async methods, threads, generators, cancelling, deaths."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import hoplite_mp
from hoplite_mp import Actor, errors
from tests.support.functions import read_into
from tests.support.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    from hoplite_mp import Cluster


class Busy:
    """Says how many of its calls run at a time."""

    def __init__(self) -> None:
        self.now = self.most = 0
        self.seen: list[Any] = []
        self.event = asyncio.Event()
        self.lock = threading.Lock()

    def __enter__(self) -> None:
        with self.lock:
            self.now += 1
            self.most = max(self.most, self.now)

    def __exit__(self, *_: Any) -> None:
        with self.lock:
            self.now -= 1

    async def nap(self, seconds: float = 0.01) -> int:
        with self:
            await asyncio.sleep(seconds)
        return self.most

    def sleep(self, seconds: float = 0.01) -> tuple[int, int]:
        with self:
            time.sleep(seconds)
        return self.most, threading.get_ident()

    async def meet(self, count: int) -> int:
        """Returns when so many calls have run at a time; if more may run, they do."""
        with self:
            while self.most < count:
                await asyncio.sleep(0.001)
            await asyncio.sleep(0.01)
        return self.most

    def meet_in_threads(self, count: int) -> int:
        with self:
            eventually(lambda: self.most >= count)
            time.sleep(0.01)
        return self.most

    async def wait_for_it(self) -> str:
        await self.event.wait()
        return "it came"

    async def set(self) -> None:
        self.event.set()

    async def note(self, what: Any) -> None:
        self.seen.append(what)
        await asyncio.sleep(0)

    async def notes(self) -> list[Any]:
        return self.seen

    async def announce(self, path: str) -> None:
        try:
            Path(path).touch()
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            self.seen.append("cancelled")
            raise

    def announce_plainly(self, path: str, seconds: float) -> str:
        Path(path).touch()
        time.sleep(seconds)
        return "slept"

    def count(self, n: int, ended: str = "") -> Iterator[int]:
        try:
            yield from range(n)
        finally:
            if ended:
                Path(ended).touch()

    async def count_async(self, n: int, ended: str = "") -> AsyncIterator[int]:
        try:
            for i in range(n):
                await asyncio.sleep(0)
                yield i
        finally:
            if ended:
                Path(ended).touch()

    def count_and_die(self, n: int, path: str) -> Iterator[int]:
        for i in range(n):
            if i == 3 and not Path(path).exists():
                Path(path).touch()
                os.kill(os.getpid(), signal.SIGKILL)
            yield i

    def pid(self) -> int:
        return os.getpid()

    def waits_for(self, me: Any, method: str) -> Any:
        return getattr(me, method)().result(30)

    async def awaits(self, me: Any, method: str) -> Any:
        return await getattr(me, method)()

    async def blocks_on(self, me: Any, method: str) -> Any:
        return getattr(me, method)().result(30)

    async def fail(self) -> None:
        raise KeyError("its own")


def test_async_methods_run_one_after_the_other(c: Cluster) -> None:
    actor = c.actor(Busy)
    assert {f.result(30) for f in [actor.nap() for _ in range(8)]} == {1}
    for i in range(20):
        actor.note(i)
    assert actor.notes().result(30) == list(range(20))
    with pytest.raises(KeyError, match="its own"):
        actor.fail().result(30)


def test_up_to_so_many_in_one_event_loop(c: Cluster) -> None:
    actor = c.options(concurrency=4).actor(Busy)
    assert max(f.result(30) for f in [actor.meet(4) for _ in range(20)]) == 4
    came = actor.wait_for_it()
    actor.set()
    assert came.result(30) == "it came"
    for i in range(20):
        actor.note(i)
    assert actor.notes().result(30) == list(range(20))


def test_up_to_so_many_in_threads(c: Cluster) -> None:
    actor = c.options(concurrency=3).actor(Busy)
    assert max(f.result(30) for f in [actor.meet_in_threads(3) for _ in range(12)]) == 3
    mixed = [actor.sleep(0.02) if i % 2 else actor.nap(0.02) for i in range(8)]
    assert all(f.result(30) for f in mixed)


def test_a_call_of_many_fails_alone(c: Cluster) -> None:
    actor = c.options(concurrency=8).actor(Busy)
    naps = [actor.nap(0.02) for _ in range(5)]
    assert isinstance(actor.fail().exception(30), KeyError)
    assert all(f.result(30) for f in naps)


@pytest.mark.parametrize("concurrency", [1, 3])
def test_cancelled_at_an_await(c: Cluster, tmp_path: Path, concurrency: int) -> None:
    actor = c.options(concurrency=concurrency).actor(Busy)
    path = tmp_path / "begun"
    call = actor.announce(str(path))
    eventually(path.exists)
    assert not call.cancel()
    assert call.cancel(force=True)
    assert call.cancelled()
    eventually(lambda: actor.notes().result(30) == ["cancelled"])
    assert Actor.restarts(actor) == 0


@pytest.mark.parametrize("concurrency", [1, 3])
def test_plain_methods_are_not(c: Cluster, tmp_path: Path, concurrency: int) -> None:
    actor = c.options(concurrency=concurrency).actor(Busy)
    path = tmp_path / "begun"
    call = actor.announce_plainly(str(path), 0.1)
    eventually(path.exists)
    assert not call.cancel(force=True)
    assert call.result(30) == "slept"


def test_what_has_not_begun_is_cancelled(c: Cluster, tmp_path: Path) -> None:
    actor = c.options(concurrency=2).actor(Busy)
    paths = [tmp_path / str(i) for i in range(2)]
    running = [actor.announce(str(path)) for path in paths]
    for path in paths:
        eventually(path.exists)
    later = actor.nap()
    assert later.cancel()
    for call in running:
        assert call.cancel(force=True)
    eventually(lambda: actor.notes().result(30) == ["cancelled"] * 2)


def test_waiting_for_a_later_call_to_itself(c: Cluster) -> None:
    one = c.actor(Busy)
    for method in ("waits_for", "awaits", "blocks_on"):
        for target in ("pid", "nap"):
            with pytest.raises(RuntimeError, match="later call to this actor"):
                getattr(one, method)(one, target).result(30)
    two = c.options(concurrency=2).actor(Busy)
    pid = two.pid().result(30)
    assert two.waits_for(two, "pid").result(30) == pid
    assert two.waits_for(two, "nap").result(30) >= 1
    assert two.awaits(two, "nap").result(30) >= 1
    assert two.blocks_on(two, "pid").result(30) == pid
    with pytest.raises(RuntimeError, match="would never end"):  # it would stop its own loop
        two.blocks_on(two, "nap").result(30)


def test_all_places_wait_for_later_calls(c: Cluster) -> None:
    """One of them is told so, and with that the others go on."""
    actor = c.options(concurrency=3).actor(Busy)
    calls = [actor.awaits(actor, "nap") for _ in range(6)]
    found = [call.exception(30) for call in calls]
    assert all(one is None or isinstance(one, RuntimeError) for one in found)
    assert None in found


@pytest.mark.parametrize("concurrency", [1, 3])
@pytest.mark.parametrize("method", ["count", "count_async"])
def test_generator_methods_are_streams(
    c: Cluster, tmp_path: Path, concurrency: int, method: str
) -> None:
    actor = c.options(concurrency=concurrency).actor(Busy)
    assert [c.get(ref) for ref in getattr(actor, method)(10)] == list(range(10))

    async def main() -> list[Any]:
        return [c.get(ref) async for ref in getattr(actor, method)(5)]

    assert asyncio.run(main()) == list(range(5))
    stream = getattr(actor, method).options(buffersize=1)(1 << 40, str(tmp_path / "ended"))
    assert c.get(next(stream)) == 0
    if concurrency > 1:
        assert actor.nap().result(30)  # in another of its places
    stream.close()
    eventually((tmp_path / "ended").exists)
    assert actor.nap().result(30)


def test_a_stream_of_an_actor_is_lost_with_it(c: Cluster, tmp_path: Path) -> None:
    actor = c.options(restarts=1).actor(Busy)
    found: list[Any] = []
    with pytest.raises(errors.ActorLostError, match="SIGKILL"):
        read_into(c, found, actor.count_and_die(6, str(tmp_path / "a")))
    assert found == [0, 1, 2]
    actor = c.options(restarts=1, retries=1).actor(Busy)
    assert [c.get(r) for r in actor.count_and_die(6, str(tmp_path / "b"))] == list(range(6))


def test_its_process_dies_with_many_calls(c: Cluster) -> None:
    actor = c.options(concurrency=4, restarts=1).actor(Busy)
    pid = actor.pid().result(30)
    running = [actor.nap(60) for _ in range(4)]
    waiting = [actor.nap(0.01) for _ in range(3)]
    eventually(lambda: all(f.running() for f in running))
    os.kill(pid, signal.SIGKILL)
    for call in running:
        lost = call.exception(30)
        assert isinstance(lost, errors.ActorLostError)
        assert "SIGKILL" in str(lost)
    assert all(call.result(30) for call in waiting)
    assert Actor.restarts(actor) == 1


def test_a_timeout_kills_it(c: Cluster) -> None:
    actor = c.options(concurrency=4).actor(Busy)
    other = actor.nap(60)
    with pytest.raises(hoplite_mp.HopliteTimeoutError, match=r"Busy.nap\(\).*0.2 s"):
        actor.nap.options(timeout=0.2)(60).result(30)
    with pytest.raises(errors.ActorLostError):
        other.result(30)


def test_it_ends_after_the_calls_made_so_far(c: Cluster) -> None:
    actor = c.options(concurrency=2).actor(Busy)
    calls = [actor.nap(0.05) for _ in range(6)]
    del actor
    assert all(call.result(30) for call in calls)
    other = c.options(concurrency=2).actor(Busy)
    calls = [other.sleep(0.05) for _ in range(6)]
    Actor.close(other)
    assert all(call.result(30) for call in calls)
    with pytest.raises(errors.ActorLostError):
        other.sleep().result(30)


def test_handles_know_it_elsewhere(c: Cluster) -> None:
    def asks(handle: Any) -> list[Any]:
        c = hoplite_mp.current()
        most = max(f.result(30) for f in [handle.meet(3) for _ in range(9)])
        return [most, *[c.get(ref) for ref in handle.count(3)]]

    actor = c.options(concurrency=3, name="busy").actor(Busy)
    assert c.submit(asks, actor).result(30) == [3, 0, 1, 2]
    assert c.submit(asks, c.get_actor("busy")).result(30) == [3, 0, 1, 2]
