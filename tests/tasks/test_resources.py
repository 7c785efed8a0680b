"""options(resources=) on one host: who gets what, for how long, and never more than there is."""

from __future__ import annotations

import contextlib
import fcntl
import os
import random
import subprocess
import sys
import tempfile
import time
from concurrent.futures import CancelledError
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import hoplite_mp
from hoplite_mp import _tasks, errors
from tests.support.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hoplite_mp import Cluster

PATIENCE_S = 60.0
HAS = {"gpu": 2, "disk": 0.5, "bytes": 1e9}


@pytest.fixture(scope="module")
def c() -> Iterator[Cluster]:
    with hoplite_mp.Cluster(workers=3, memory="256MiB", resources=HAS) as made:
        yield made


def what() -> tuple[dict[str, list[int]], str | None]:
    return hoplite_mp.current().assigned, os.environ.get("CUDA_VISIBLE_DEVICES")


def all_free(c: Cluster) -> bool:
    return c.nodes[0].resources_free == HAS


class Box:
    def look(self) -> Any:
        return what()

    def die(self) -> None:
        os.kill(os.getpid(), 9)


def test_what_is_given(c: Cluster) -> None:
    gpu = c.options(resources={"gpu": 1})
    assert gpu.submit(what).result(PATIENCE_S) == ({"gpu": [0]}, None)
    both = c.options(resources={"gpu": 2, "disk": 0.25, "bytes": 10})
    given = both.submit(what).result(PATIENCE_S)[0]
    assert given == {"gpu": [0, 1], "disk": [], "bytes": []}
    assert c.assigned == {}
    assert c.submit(what).result(PATIENCE_S) == ({}, None)
    assert c.options(resources={"gpu": 0}).submit(what).result(PATIENCE_S) == ({}, None)
    assert gpu.options(resources=None).submit(what).result(PATIENCE_S) == ({}, None)
    found = [one["gpu"] for one, _ in gpu.map(lambda _: what(), range(9), chunksize=3)]
    assert all(one in ([0], [1]) for one in found)
    assert found[0:3] == [found[0]] * 3  # a chunk counts once
    eventually(lambda: all_free(c))
    assert c.stats()["resources"] == HAS == c.stats()["nodes"]["h0"]["resources_free"]
    assert "gpu 2 of 2 free" in repr(c.nodes[0])


def test_workers_and_actors_keep_theirs(c: Cluster) -> None:
    view = c.options(resources={"gpu": 1})
    with view.executor(1) as pool:
        assert pool.submit(what).result(PATIENCE_S) == ({"gpu": [0]}, "0")
        box = c.options(resources={"gpu": 0.5}, restarts=1).actor(Box)
        assert box.look().result(PATIENCE_S) == ({"gpu": [1]}, "1")
        half = c.options(resources={"gpu": 0.5}).submit(what)
        assert half.result(PATIENCE_S) == ({"gpu": [1]}, None)
        waits = view.submit(what)
        with pytest.raises(errors.ActorLostError):
            box.die().result(PATIENCE_S)
        assert box.look().result(PATIENCE_S)[0] in ({"gpu": [1]}, {"gpu": [0]})
        with pytest.raises(errors.WorkerLostError):
            pool.options(retries=0).submit(os._exit, 3).result(PATIENCE_S)
        assert len(pool.submit(what).result(PATIENCE_S)[0]["gpu"]) == 1  # its replacement's
        with pytest.raises(ValueError, match="as long as they exist"):
            pool.options(resources={"gpu": 1})
    assert waits.result(PATIENCE_S)[0] in ({"gpu": [0]}, {"gpu": [1]})
    hoplite_mp.Actor.kill(box)
    del box

    def peer(rank: int) -> Any:
        hoplite_mp.current().group("peers with a gpu", 2, rank).barrier()  # each has a process
        return what()

    peers = view.spmd(peer, 2)
    assert sorted(one.result(PATIENCE_S)[1] or "" for one in peers) == ["0", "1"]
    eventually(lambda: all_free(c))


def test_an_environment_of_its_own_says_which_devices(c: Cluster) -> None:
    both = c.options(resources={"gpu": 2}, env={"WORD": "there"})
    look = "import os; print(os.environ['CUDA_VISIBLE_DEVICES'], os.environ['WORD'])"

    def begun() -> str:
        return subprocess.run([sys.executable, "-c", look], capture_output=True, text=True).stdout

    with both.executor(1) as pool:
        assert pool.submit(what).result(PATIENCE_S) == ({"gpu": [0, 1]}, "0,1")
        assert pool.submit(begun).result(PATIENCE_S) == "0,1 there\n"
    said = both.options(env={"CUDA_VISIBLE_DEVICES": "7"}).actor(Box)
    assert said.look().result(PATIENCE_S) == ({"gpu": [0, 1]}, "7")
    hoplite_mp.Actor.kill(said)
    del said
    eventually(lambda: all_free(c))


@pytest.mark.parametrize("beside", [False, True])
def test_what_is_tried_again_has_them_again(c: Cluster, beside: bool, tmp_path: Path) -> None:
    def fails(path: Path) -> Any:
        tries = len(list(path.iterdir()))
        (path / str(tries)).touch()
        if tries < 2:
            raise OSError(tries)
        return tries, what()[0]["gpu"]

    async def fails_beside(path: Path) -> Any:
        return fails(path)

    view = c.options(resources={"gpu": 2}, priority=1, retry_exceptions=OSError)
    fn = fails_beside if beside else fails
    assert view.submit(fn, tmp_path).result(PATIENCE_S) == (2, [0, 1])
    eventually(lambda: all_free(c))


def test_a_generator_keeps_them_until_its_end(c: Cluster) -> None:
    def items() -> Iterator[Any]:
        yield what()
        time.sleep(0.1)
        yield what()

    stream = c.options(resources={"gpu": 2}).stream(items)
    found = [c.get(next(stream))]
    after = c.options(resources={"gpu": 1}).submit(time.monotonic_ns)
    found += [c.get(ref) for ref in stream]
    assert found == [({"gpu": [0, 1]}, None)] * 2
    after.result(PATIENCE_S)
    eventually(lambda: all_free(c))


def test_async_tasks_have_their_own(c: Cluster) -> None:
    async def look() -> Any:
        import asyncio

        await asyncio.sleep(0.02)
        return what()[0]["gpu"]

    view = c.options(resources={"gpu": 0.5}, concurrency=8)
    assert all(
        one.result(PATIENCE_S) in ([0], [1]) for one in [view.submit(look) for _ in range(9)]
    )
    eventually(lambda: all_free(c))


def test_a_process_of_its_own_sends_tasks_that_need_some(c: Cluster) -> None:
    """They run in the cluster's workers: those of an executor have none to share out."""

    def send(_: int = 0) -> Any:
        here = hoplite_mp.current()
        gpu = here.options(resources={"gpu": 2})
        refs = gpu.stream(lambda: iter([what()]))
        return [gpu.submit(what).result(PATIENCE_S), *(here.get(ref) for ref in refs)]

    class Sender:
        def send(self) -> Any:
            return send()

    with c.executor(1) as executor:
        for future in (executor.submit(send), *c.spmd(send, 1), c.actor(Sender).send()):
            assert future.result(PATIENCE_S) == [({"gpu": [0, 1]}, None)] * 2


def test_what_is_not_there(c: Cluster) -> None:
    for wrong in ({"gpu": 3}, {"tpu": 1}, {"gpu": 1, "tpu": 1}, {"disk": 0.6}):
        view = c.options(resources=wrong)
        calls: list[tuple[Any, ...]] = [
            (view.submit, what),
            (view.actor, Box),
            (view.executor, 1),
            (view.spmd, abs, 1),
            (view.map, abs, [1]),
        ]
        for call, *args in calls:
            with pytest.raises(ValueError, match="has"):
                call(*args)
    with pytest.raises(ValueError, match="there is enough for 2"):
        c.options(resources={"gpu": 1}).executor(3)
    for bad in ({"gpu": -1}, {"gpu": "1"}, {"": 1}, {"gpu": 1e-9}):
        with pytest.raises(ValueError, match="resources"):
            c.options(resources=bad)
    with pytest.raises(TypeError, match="dictionary"):
        c.options(resources=["gpu"])
    with pytest.raises(ValueError, match="resources"):
        hoplite_mp.Cluster(workers=1, resources={"gpu": -1})


def test_those_who_wait_are_served_by_priority_then_in_order(c: Cluster) -> None:
    gate = os.path.join(tempfile.mkdtemp(), "gate")

    def hold() -> None:
        while not os.path.exists(gate):
            time.sleep(0.002)

    view = c.options(resources={"gpu": 2})
    held = view.submit(hold)
    eventually(held.running)
    priorities = [0, 3, -1, 3, 0, 9]
    futures = [view.options(priority=p).submit(time.monotonic_ns) for p in priorities]
    assert len(c.nodes) == 1  # answered by the node when it knows of all of them
    open(gate, "w").close()
    times = [one.result(PATIENCE_S) for one in futures]
    order = sorted(range(len(times)), key=lambda at: times[at])
    assert order == sorted(range(len(times)), key=lambda at: (-priorities[at], at))


# -- random programs -------------------------------------------------------------------------------

TENTHS = 10  # lock files for each index: a demand of 0.3 takes three of them


@contextlib.contextmanager
def used(folder: str, demand: dict[str, float], assigned: dict[str, list[int]]) -> Iterator[None]:
    """Locks so many tenths as were given; the kernel lets go of them with the process. An
    AssertionError: somebody else has them, so more was given than there is."""
    files: list[int] = []
    try:
        for name, amount in demand.items():
            indices = assigned[name] or [0]  # of what has none, the total is below 1
            left = round(amount * TENTHS)
            for index in indices:
                here = min(left, TENTHS)
                left -= here
                for tenth in range(TENTHS):
                    path = os.path.join(folder, f"{name}-{index}-{tenth}")
                    fd = os.open(path, os.O_RDWR | os.O_CREAT)
                    try:
                        if not here:
                            raise BlockingIOError
                        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    except BlockingIOError:
                        os.close(fd)
                        continue
                    files.append(fd)
                    here -= 1
                assert not here, f"{name} {index} was given twice"
        yield
    finally:
        for fd in files:
            os.close(fd)


def work(folder: str, demand: dict[str, float], end: str, seed: int) -> str:
    with used(folder, demand, hoplite_mp.current().assigned):
        time.sleep(random.Random(seed).random() * 0.02)
        if end == "raises":
            raise KeyError(seed)
        if end == "dies":
            os.kill(os.getpid(), 9)
        if end == "hangs":  # until it is cancelled
            time.sleep(PATIENCE_S)
        if end == "nests":
            view = hoplite_mp.current().options(resources={"disk": 0.1})
            inner = view.submit(work, folder, {"disk": 0.1}, "", seed)
            return inner.result(PATIENCE_S) if "disk" not in demand else "done"
        if end == "once" and not os.path.exists(path := os.path.join(folder, f"died {seed}")):
            open(path, "w").close()
            os.kill(os.getpid(), 9)
    return "done"


DEMANDS: list[dict[str, float]] = [
    {"gpu": 1}, {"gpu": 2}, {"gpu": 0.5}, {"gpu": 0.3}, {"gpu": 0.7}, {"disk": 0.2},
    {"gpu": 1, "disk": 0.5}, {"gpu": 0.1, "disk": 0.1}, {"disk": 0.5},
]  # fmt: skip
ENDS = ["", "", "", "", "raises", "dies", "once", "hangs", "nests"]


def play(c: Cluster, seed: int, count: int) -> None:
    chance, folder = random.Random(seed), tempfile.mkdtemp()
    sent: list[tuple[str, Any]] = []
    held: list[Any] = []
    for number in range(count):
        demand, end = chance.choice(DEMANDS), chance.choice(ENDS)
        view = c.options(
            resources=demand,
            priority=chance.choice([0, 0, 3, -3]),
            retries=chance.choice([0, 1, 3]),
        )
        sent.append((end, view.submit(work, folder, demand, end, seed * 1000 + number)))
        if end == "hangs":
            held.append(sent[-1][1])
        what = chance.random()
        if what < 0.15:
            chance.choice(sent)[1].cancel()
        elif what < 0.3 and held:
            held.pop().cancel(force=True)
        elif what < 0.35:
            while held:  # this program waits for what they have
                held.pop().cancel(force=True)
            with c.options(resources={"gpu": chance.choice([0.5, 1])}).executor(1) as pool:
                pool.submit(abs, 1)
        elif what < 0.4:
            box = c.options(resources={"gpu": 0.3}).actor(Box)
            box.look()
            if chance.random() < 0.5:
                hoplite_mp.Actor.kill(box)
            del box
        elif what < 0.45:
            with contextlib.suppress(errors.ObjectLostError):
                c.delete(chance.choice(sent)[1])
        if len(held) > 1:  # others must go on
            held.pop(0).cancel(force=True)
    for one in held:
        one.cancel(force=True)
    for end, future in sent:
        try:
            assert future.result(PATIENCE_S) == "done"
        except (CancelledError, errors.ObjectLostError):
            pass
        except KeyError:
            assert end == "raises"
        except errors.WorkerLostError:
            assert end in ("dies", "once")
    eventually(lambda: all_free(c))


@pytest.mark.parametrize("seed", range(1))
def test_random_programs_never_use_more_than_there_is(c: Cluster, seed: int) -> None:
    play(c, seed, 40)


@pytest.mark.soak
def test_many_random_programs(c: Cluster) -> None:
    for seed in range(3, 100):
        play(c, seed, 100)


def begun_at() -> int:
    return time.monotonic_ns()


def held_until(path: str) -> None:
    while not os.path.exists(path):
        time.sleep(0.002)


def test_more_that_wait_than_a_queue_has_room_for(tmp_path: Path) -> None:
    """There is enough for all of them, and one worker: none is forgotten, and higher ones begin
    before those that were sent earlier."""
    many, opened = _tasks.RANKED_HINTS_MAX + 300, str(tmp_path / "open")
    with hoplite_mp.Cluster(workers=1, memory="256MiB", resources={"slot": 2 * many}) as c:
        held = c.options(priority=9).submit(held_until, opened)
        eventually(held.running)
        view = c.options(resources={"slot": 1})
        low = [view.submit(begun_at) for _ in range(many)]
        high = [view.options(priority=1).submit(begun_at) for _ in range(20)]
        # The node answers after it has read all that was sent to it before.
        assert 2 * many - 20 < c.nodes[0].resources_free["slot"] < 2 * many
        Path(opened).touch()
        last = max(one.result(PATIENCE_S) for one in high)
        times = [one.result(PATIENCE_S) for one in low]
        assert times == sorted(times)
        assert sum(one > last for one in times) > many - 20, "a few were given theirs before"
        eventually(lambda: c.nodes[0].resources_free == {"slot": 2 * many})
