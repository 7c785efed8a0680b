"""A program in which eight threads are first to send everything, all at the same instant.

Run as a script with a seed; with a second number n it forks n programs, with this seed and those
after it, before it has sent anything. Each thread makes executors, actors, peers of Groups, tasks
and maps of the same functions and checks each value: what an initializer, a constructor or a peer
sets in its own process stays there, since the program never changes that global; what the program
changes is seen as it was at the call. The last line is `end` and the number of values that were
checked.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import threading
import traceback
from typing import Any

import numpy as np

import hoplite_mp

THREADS = 8
PROGRAM_S = 300  # for one program on a busy machine
LARGE = 1 << 17  # an array of 1 MiB, which travels as an object of its own

mark: Any = None
marks: list[int] = []
helper: Any = abs
large = np.zeros(LARGE)
slots = [0] * THREADS
flag = False
checked = [0] * THREADS


class Kind:
    """A class by value, whose attribute a worker sets."""

    value = -1


def set_mark(v: int) -> None:
    global mark, helper
    mark, helper = v, v.__add__
    marks.append(v)
    Kind.value = v


def set_large(v: int) -> None:
    global large
    set_mark(v)
    large = large + v


def look(i: int) -> tuple[Any, ...]:
    return mark, list(marks), helper(0), Kind.value, i


def look_large(i: int) -> tuple[Any, ...]:
    return *look(i), float(large[-1])


def expected(v: int, i: int) -> tuple[Any, ...]:
    return v, [v], v, v, i


def slot(t: int) -> int:
    return slots[t]


def flagged() -> bool:
    return flag


def call(fn: Any, *args: Any) -> Any:
    return fn(*args)


class Holder:
    """An actor whose constructor sets globals."""

    def __init__(self, v: int, sets: Any) -> None:
        sets(v)

    def look(self, i: int) -> tuple[Any, ...]:
        return look(i)

    def call(self, fn: Any, i: int) -> Any:
        return fn(i)


def peer(rank: int, v: int) -> tuple[Any, ...]:
    g = hoplite_mp.current().group(f"peers of {v}", 2, rank)
    set_mark(v)
    told = g.broadcast(look if rank == 0 else None)
    return told(rank), look(rank), int(g.allreduce(np.array([v]))[0])


class Thread:
    """What one of the threads does."""

    def __init__(self, cluster: Any, t: int, seed: int) -> None:
        self.cluster = cluster
        self.t = t
        self.random = random.Random(f"{seed} {t}")
        self.number = 0

    def check(self, what: str, found: Any, wanted: Any) -> None:
        checked[self.t] += 1
        if found != wanted:
            print("WRONG", self.t, what, found, "instead of", wanted, flush=True)

    def value(self) -> int:
        """One that no other call sets."""
        self.number += 1
        return 1000 * (self.t + 1) + self.number

    def executor(self) -> None:
        v, size = self.value(), self.random.choice((1, 1, 2))
        many = self.random.random() < 0.3
        sets, looks = (set_large, look_large) if many else (set_mark, look)
        with self.cluster.executor(size, initializer=sets, initargs=(v,)) as ex:
            futures = [ex.submit(looks, i) for i in range(3)]
            found = list(ex.map(look, range(4), chunksize=self.random.choice((1, 2))))
            futures.append(ex.submit(call, looks, 3))
        for i, future in enumerate(futures):
            wanted = (*expected(v, i), float(v)) if many else expected(v, i)
            self.check("a task of an executor", future.result(), wanted)
        self.check("a map of an executor", found, [expected(v, i) for i in range(4)])

    def actor(self) -> None:
        v = self.value()
        holder = self.cluster.actor(Holder, v, self.random.choice((set_mark, set_large)))
        calls = [holder.look(0), holder.call(look, 1), holder.look(2)]
        for i, future in enumerate(calls):
            self.check("an actor's call", future.result(), expected(v, i))

    def peers(self) -> None:
        v = self.value()
        for rank, future in enumerate(self.cluster.spmd(peer, 2, v)):
            wanted = expected(v, rank)
            self.check("a peer", future.result(), (wanted, wanted, 2 * v))

    def tasks(self) -> None:
        t, futures = self.t, []
        for _ in range(4):
            slots[t] = v = self.value()
            futures.append((self.cluster.submit(slot, t), v))
            futures.append((self.cluster.submit(call, slot, t), v))
        for future, v in futures:
            self.check("a task", future.result(), v)
        slots[t] = v = self.value()
        self.check("a map", list(self.cluster.map(slot, [t] * 3)), [v] * 3)

    def toggle(self) -> None:
        """Only this thread binds the global; the others send functions beside."""
        global flag
        futures = []
        for on in (True, False, True, False):
            flag = on
            futures.append((self.cluster.submit(flagged), on))
        for future, on in futures:
            self.check("a toggled global", future.result(), on)

    def everywhere(self) -> None:
        slots[self.t] = v = self.value()
        self.check("a run", set(self.cluster.run(slot, self.t).values()), {v})

    def run(self, barrier: threading.Barrier) -> None:
        does = [self.executor, self.executor, self.actor, self.peers, self.tasks, self.tasks]
        plan = self.random.choices(does, k=2)
        if self.t == 0:
            plan.append(self.toggle)
        if self.t == 1:
            plan.append(self.everywhere)
        self.random.shuffle(plan)
        barrier.wait()
        try:
            for do in plan:
                do()
        except BaseException:
            print("FAILED", self.t, traceback.format_exc(), flush=True)


def main(seed: int) -> None:
    sys.setswitchinterval(random.Random(seed).choice((1e-6, 1e-5, 5e-3)))
    config = hoplite_mp.Config(start_timeout_s=PROGRAM_S / 2)
    with hoplite_mp.Cluster(workers=2, config=config) as cluster:
        barrier = threading.Barrier(THREADS)
        threads = [
            threading.Thread(target=Thread(cluster, t, seed).run, args=(barrier,))
            for t in range(THREADS)
        ]
        for one in threads:
            one.start()
        for one in threads:
            one.join()
    print("end", sum(checked), flush=True)


def forks(first: int, count: int) -> None:
    """Runs that many programs, one after another, each in a child of its own."""
    for seed in range(first, first + count):
        child = os.fork()
        if child == 0:
            signal.alarm(PROGRAM_S)  # a program that hangs is killed, and counts as wrong
            try:
                main(seed)
            finally:
                os._exit(0)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        print("program", seed, "ended" if code == 0 else f"FAILED: exit code {code}", flush=True)


if __name__ == "__main__":
    if len(sys.argv) > 2:
        forks(*map(int, sys.argv[1:3]))
    else:
        main(int(sys.argv[1]))
