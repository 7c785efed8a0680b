"""A program in which eight threads of one driver use every public call of a cluster at once.

Run as a script with a number of seconds and a seed. Each thread draws calls until the time is over
and checks each value; what the threads share (a queue, a lock, a semaphore, an actor, objects) is
checked at the end. The last line is `end` and the number of values that were checked.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import gc
import random
import sys
import threading
import time
import traceback
from typing import TYPE_CHECKING, Any

import numpy as np

import hoplite_mp

if TYPE_CHECKING:
    from collections.abc import Iterator

THREADS = 8
LARGE = 1 << 15  # an array of 256 KiB, which is an object of its own wherever it goes
WAIT_S = 240.0  # for any one value, on a machine that is busy, or under a sanitizer
PERMITS = 2
OBJECTS_LEFT = 60  # functions and classes that were sent, and what the threads share


def double(x: Any) -> Any:
    return x + x


def total(parts: list[Any], extra: int = 0) -> Any:
    return sum(parts) + extra


def fails(i: int) -> None:
    raise LookupError(i)


def nap(i: int) -> int:
    time.sleep(0.002)
    return i


def nested(i: int) -> int:
    return int(hoplite_mp.current().submit(double, i).result(WAIT_S))


def count_up(n: int) -> Iterator[int]:
    yield from range(n)


async def slowly(i: int) -> int:
    await asyncio.sleep(0.001)
    return i


def peer(rank: int, name: str, v: int) -> tuple[int, list[int], float]:
    return calls_of(hoplite_mp.current().group(name, 2, rank), rank, v)


def calls_of(g: Any, rank: int, v: int) -> tuple[int, list[int], float]:
    """Small calls, a large one, and a message each way."""
    small = int(g.allreduce(np.array([v + rank]))[0])
    gathered = g.allgather(v * rank)
    large = float(g.allreduce(np.full(LARGE, float(v)))[-1])
    told = g.sendrecv(v, to=1 - rank)
    g.close()
    return small + told, gathered, large


def expected_of_peers(v: int) -> tuple[int, list[int], float]:
    return 2 * v + 1 + v, [0, v], 2.0 * v


initial = 0


def begin(v: int) -> None:
    global initial
    initial = v


def began(i: int) -> tuple[int, int]:
    return initial, i


class Counter:
    """An actor of all threads: it counts the calls of each."""

    def __init__(self) -> None:
        self.counts = [0] * THREADS

    def add(self, t: int, ref: Any = None) -> int:
        self.counts[t] += 1
        return self.counts[t]

    def all(self) -> list[int]:
        return self.counts


class Shared:
    """What the threads have in common."""

    def __init__(self, cluster: Any) -> None:
        self.cluster = cluster
        self.queue: Any = hoplite_mp.Queue()
        self.lock: Any = hoplite_mp.Lock()
        self.semaphore: Any = hoplite_mp.Semaphore(PERMITS)
        self.rlock: Any = hoplite_mp.RLock()
        self.condition: Any = hoplite_mp.Condition()
        self.event: Any = hoplite_mp.Event()
        self.counter: Any = cluster.options(name="counter").actor(Counter)
        self.large = cluster.put(np.arange(LARGE))
        self.turns = 0  # under `lock`
        self.inside = 0  # under `few`
        self.few = threading.Lock()
        self.wrong: list[str] = []


class Thread:
    """What one of the threads does."""

    def __init__(self, shared: Shared, t: int, seed: int) -> None:
        self.shared, self.cluster, self.t = shared, shared.cluster, t
        self.random = random.Random(f"{seed} {t}")
        self.checked = self.number = self.turns = self.calls = self.sent = 0
        self.received: list[tuple[int, int]] = []

    def check(self, what: str, found: Any, wanted: Any) -> None:
        self.checked += 1
        if found != wanted:
            self.shared.wrong.append(f"{self.t} {what}: {found!r} instead of {wanted!r}")

    def value(self) -> int:
        """One that no other call uses."""
        self.number += 1
        return 100_000 * (self.t + 1) + self.number

    def array(self, v: int, size: int = LARGE) -> np.ndarray[Any, Any]:
        return np.full(size, float(v))

    def objects(self) -> None:
        c, values = self.cluster, [self.value() for _ in range(20)]
        refs = [c.put(v) for v in values]
        mids = [c.put(self.array(v, 500)) for v in values]
        del refs[::3], mids[::2]
        self.check("small objects", c.get(refs), [v for i, v in enumerate(values) if i % 3])
        self.check("arrays", [float(a[-1]) for a in c.get(mids)], [*map(float, values[1::2])])
        copied = c.get(mids[0], copy=True)
        copied += 1
        self.check("a copy", float(c.get(mids[0])[0]), float(values[1]))
        self.check("the array of all", int(c.get(self.shared.large)[-1]), LARGE - 1)

    def blocks(self) -> None:
        c, v = self.cluster, self.value()
        a = c.empty(LARGE)
        a[:] = v
        ref, other = c.put(a), c.put(self.array(v + 1))
        self.check("a block", float(c.get(ref)[-1]), float(v))
        done, rest = c.wait([ref, other], num=1, timeout=WAIT_S)
        self.check("a wait", (done, rest), ([ref], [other]))
        c.delete(other)
        self.check("locations", c.locations(ref), [c.here.id])

    def tasks(self) -> None:
        c, v = self.cluster, self.value()
        first = c.submit(double, v)
        ref = c.put(v)
        both = c.submit(total, [first, ref, v], extra=1)
        failed = c.submit(fails, v)
        large = c.submit(double, self.array(v))
        inner = c.submit(nested, v)
        told: list[Any] = []
        both.add_done_callback(lambda f: told.append(f.result()))
        self.check("a task of tasks", both.result(WAIT_S), 4 * v + 1)
        self.check("an error", failed.exception(WAIT_S).args, (v,))
        self.check("a large result", float(c.get(large)[-1]), 2.0 * v)
        self.check("a task in a task", inner.result(WAIT_S), 2 * v)
        wait_for(lambda: bool(told))
        self.check("a callback", told, [4 * v + 1])

    def many(self) -> None:
        c, v = self.cluster, self.value()
        futures = [c.submit(double, v + i) for i in range(30)]
        wanted = [2 * (v + i) for i in range(30)]
        how = self.random.randrange(4)
        if how == 0:
            found = sorted(f.result() for f in hoplite_mp.as_completed(futures, timeout=WAIT_S))
        elif how == 1:
            done = concurrent.futures.wait(futures, timeout=WAIT_S).done
            found = sorted(f.result() for f in done)
        elif how == 2:
            found = sorted(f.result() for f in concurrent.futures.as_completed(futures))
        else:
            found = c.get(futures, timeout=WAIT_S)
        self.check("many tasks", found, wanted)

    def cancelled(self) -> None:
        c, v = self.cluster, self.value()
        options = c.options(priority=self.random.randrange(-1, 2), retries=1, name="nap")
        futures = [options.submit(nap, v + i) for i in range(12)]
        taken_back = [f.cancel() for f in futures[::-1]][::-1]
        for i, (future, cancelled) in enumerate(zip(futures, taken_back, strict=True)):
            if cancelled:
                self.check("a cancelled task", future.cancelled(), True)
            else:
                self.check("a task that was too late to cancel", future.result(WAIT_S), v + i)

    def maps(self) -> None:
        c, v, n = self.cluster, self.value(), self.random.randrange(1, 60)
        wanted = [2 * (v + i) for i in range(n)]
        items = range(v, v + n)
        self.check("a map", list(c.map(double, items, timeout=WAIT_S)), wanted)
        found = sorted(c.map(double, items, ordered=False, buffersize=5))
        self.check("an unordered map", found, wanted)
        dropped = c.map(nap, items)
        self.check("the first of a map", next(dropped), v)
        dropped.close()

    def streams(self) -> None:
        c, n = self.cluster, self.random.randrange(1, 12)
        stream = c.options(buffersize=3).stream(count_up, n)
        self.check("a stream", [c.get(ref) for ref in stream], [*range(n)])
        future = c.submit(slowly, n)

        async def result() -> int:
            return int(await future)

        self.check("an async task", asyncio.run(result()), n)

    def executor(self) -> None:
        v = self.value()
        with self.cluster.executor(1, initializer=begin, initargs=(v,)) as ex:
            futures = [ex.submit(began, i) for i in range(4)]
            self.check("tasks of an executor", list(ex.map(began, [9])), [(v, 9)])
        self.check("an executor", [f.result() for f in futures], [(v, i) for i in range(4)])

    def actors(self) -> None:
        c = self.cluster
        calls = [self.shared.counter.add(self.t, self.shared.large) for _ in range(5)]
        wanted = [self.calls + i for i in range(1, 6)]
        self.calls += 5
        self.check("calls in their order", [f.result(WAIT_S) for f in calls], wanted)
        same = c.get_actor("counter")
        self.calls += 1
        self.check("the actor by its name", same.add(self.t).result(WAIT_S), self.calls)
        own = c.actor(Counter)
        self.check("an own actor", own.add(self.t).result(WAIT_S), 1)
        self.random.choice((hoplite_mp.Actor.close, hoplite_mp.Actor.kill))(own)

    def groups(self) -> None:
        c, v = self.cluster, self.value()
        name = f"peers {v}"
        if self.random.random() < 0.5:
            found = [f.result(WAIT_S) for f in c.spmd(peer, 2, name, v)]
        else:
            other = c.submit(peer, 1, name, v)
            mine = calls_of(c.group(name, 2, 0), 0, v)
            found = [mine, other.result(WAIT_S)]
        self.check("a Group", found, [expected_of_peers(v)] * 2)

    def queues(self) -> None:
        queue, n = self.shared.queue, self.random.randrange(1, 6)
        for _ in range(n):
            self.sent += 1
            queue.put((self.t, self.sent))
        for _ in range(n):  # no thread takes more than it has put, so there is one
            self.received.append(queue.get(timeout=WAIT_S))

    def locks(self) -> None:
        shared = self.shared
        for _ in range(3):
            with shared.lock:
                seen = shared.turns
                time.sleep(0)
                shared.turns = seen + 1
            self.turns += 1
        with shared.rlock, shared.rlock:
            pass
        with shared.condition:
            shared.condition.notify_all()
        shared.event.set()
        self.check("an event", shared.event.wait(WAIT_S), True)
        with shared.semaphore:
            with shared.few:
                shared.inside += 1
                inside = shared.inside
            self.check("permits", inside <= PERMITS, True)
            with shared.few:
                shared.inside -= 1

    def collectives(self) -> None:
        c, v = self.cluster, self.value()
        refs = [c.put(self.array(v + i, 5000)) for i in range(4)]
        refs[2] = c.submit(double, c.put(self.array(v, 5000)))
        wanted = float(v + v + 1 + 2 * v + v + 3)
        result = c.reduce(refs, reproducible=self.random.random() < 0.5)
        self.check("a reduction", float(c.get(result)[-1]), wanted)
        self.check("contributors", result.contributors, (0, 1, 2, 3))
        self.check("an allreduce", float(c.get(c.allreduce(refs))[0]), wanted)
        here = c.here
        c.broadcast(refs[0]).result(WAIT_S)
        for moved in (c.gather(refs), c.allgather(refs), c.alltoall([refs[:1]], to=[here])):
            moved.result(WAIT_S)
        slices = c.reduce_scatter(refs[:2])
        found = [float(a[0]) for a in c.get(slices)]
        self.check("a reduce_scatter", found, [2.0 * v + 1] * 2)

    def looks(self) -> None:
        c, v = self.cluster, self.value()
        self.check("counts", c.stats()["objects"] > 0, True)
        self.check("nodes", len(c.nodes), 1)
        self.check("a run", set(c.run(double, v, timeout=WAIT_S).values()), {2 * v})

    def run(self, start: threading.Barrier, seconds: float) -> None:
        often = [self.objects, self.blocks, self.tasks, self.many, self.cancelled, self.maps]
        some = [self.streams, self.actors, self.queues, self.locks, self.collectives]
        seldom = [self.executor, self.groups, self.looks]
        plan = [*often, *some, *seldom]  # each at least once
        self.random.shuffle(plan)
        start.wait()
        end = time.monotonic() + seconds
        try:
            for do in plan:
                do()
            while time.monotonic() < end:
                self.random.choice([*often * 3, *some * 2, *seldom])()
        except BaseException:
            self.shared.wrong.append(f"{self.t} failed: {traceback.format_exc()}")


def wait_for(condition: Any) -> None:
    end = time.monotonic() + WAIT_S
    while not condition():
        if time.monotonic() > end:
            raise TimeoutError(f"not within {WAIT_S:.0f} s")
        time.sleep(0.005)


def check_the_end(shared: Shared, threads: list[Thread]) -> None:
    """What all threads have done together."""
    first = threads[0]
    first.check("turns under the lock", shared.turns, sum(one.turns for one in threads))
    counts = shared.counter.all().result(WAIT_S)
    first.check("the actor's counts", counts, [one.calls for one in threads])
    received = [item for one in threads for item in one.received]
    sent = [(one.t, i) for one in threads for i in range(1, one.sent + 1)]
    first.check("the queue's items", sorted(received), sent)
    for one in threads:
        for t in range(THREADS):
            numbers = [n for sender, n in one.received if sender == t]
            one.check("the order of a sender's items", numbers, sorted(numbers))


def main(seconds: float, seed: int) -> int:
    sys.setswitchinterval(random.Random(seed).choice((1e-5, 1e-4, 5e-3)))
    with hoplite_mp.Cluster(workers=2, memory="512MiB") as cluster:
        shared = Shared(cluster)
        start = threading.Barrier(THREADS)
        threads = [Thread(shared, t, seed) for t in range(THREADS)]
        running = [threading.Thread(target=one.run, args=(start, seconds)) for one in threads]
        for each in running:
            each.start()
        for each in running:
            each.join()
        if not shared.wrong:
            check_the_end(shared, threads)
            gc.collect()
            wait_for(lambda: cluster.stats()["objects"] <= OBJECTS_LEFT)
    for line in shared.wrong:
        print("WRONG", line, flush=True)
    print("end", sum(one.checked for one in threads), flush=True)
    return len(shared.wrong)


if __name__ == "__main__":
    sys.exit(main(float(sys.argv[1]), int(sys.argv[2])) != 0)
