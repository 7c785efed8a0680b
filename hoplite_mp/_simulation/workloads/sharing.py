"""Programs that share locks and queues by name, and programs that read streams.

These objects belong to processes of actors and generators. Collector threads, which only some runs
have, clean up when a process or host dies. At most one program at a time holds a lock, each item of
a queue is returned at most once, and the items of a stream arrive in order, with the right bytes.
"""

from __future__ import annotations

import contextlib
import queue
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from hoplite_mp._simulation.oracle.oracle import WrongEnd
from hoplite_mp._simulation.oracle.values import WrongBytes
from hoplite_mp._simulation.workloads.programs import HANGS_S
from hoplite_mp._sync.locks import Lock
from hoplite_mp._sync.queues import Queue
from hoplite_mp.errors import HopliteTimeoutError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hoplite_mp._api.cluster import Cluster
    from hoplite_mp._simulation.virtual.host import VirtualHost
    from hoplite_mp._simulation.virtual.processes import VirtualProcess
    from hoplite_mp._simulation.workloads.programs import Programs

__all__ = ["begin_locks", "begin_stream"]

STEPS = "lock", "try", "put", "get", "sleep"
STEPS_MAX, SHARERS_MAX, STREAM_MAX = 12, 5, 20
ITEMS = 1, 100, 9_000  # of 8 bytes each
PUT_S, GETS_S = 5.0, (0.01, 0.3)


@dataclass
class _Shared:
    """The expected state of one lock and one queue."""

    name: str
    size: int  # size of the queue; 0: no limit
    holder: tuple[VirtualHost, VirtualProcess] | None = None
    taken: set[tuple[int, int]] = field(default_factory=set)


def begin_locks(work: Programs) -> None:
    """Starts programs that share a lock and a queue."""
    hosts, rng = work.hosts(), work.rng
    if not hosts:
        return
    shared = _Shared(f"locks {work.salt()}", rng.choice([0, 2]))
    for rank in range(rng.randint(2, SHARERS_MAX)):
        host = rng.choice(hosts)
        steps = [rng.choice(STEPS) for _ in range(rng.randint(1, STEPS_MAX))]
        use = partial(_use, work, shared, rank, host, steps)
        work.program(host, f"{shared.name}: {rank}", use, work.no_errors_on(*hosts, tasks=True))


def _use(
    work: Programs, shared: _Shared, rank: int, host: VirtualHost, steps: list[str], c: Cluster
) -> None:
    import time

    rng = work.rng
    lock = Lock(name=shared.name)
    items: Queue[Any] = Queue(name=f"{shared.name} items", maxsize=shared.size)
    for number, step in enumerate(steps):
        if step == "sleep":
            time.sleep(0.05 * rng.random())
        elif step == "put":
            value = np.full(rng.choice(ITEMS), number)
            with contextlib.suppress(queue.Full):
                items.put((rank, number, value), timeout=PUT_S)
        elif step == "get":
            try:
                sender, sent, value = items.get(timeout=rng.choice(GETS_S))
            except queue.Empty:
                continue
            if (sender, sent) in shared.taken or (value != sent).any():
                raise WrongBytes(f"{shared.name}: item {sent} of {sender} is a duplicate, or wrong")
            shared.taken.add((sender, sent))
            work.oracle.reads += 1
            del value
        elif lock.acquire(step == "lock", HANGS_S if step == "lock" else None):
            _hold_lock(work, shared, host)
            lock.release()
        elif step == "lock":
            raise WrongEnd(f"{shared.name}: {rank} cannot acquire the lock")


def _hold_lock(work: Programs, shared: _Shared, host: VirtualHost) -> None:
    """Holds the lock for some time. No other program may hold it, unless that program's process is
    dead, or a fault may have ended the lock's process, so that there is a new lock."""
    import time

    world, running = work.world, work.world.processes.running
    assert running is not None
    if shared.holder is not None:
        where, process = shared.holder
        disturbed = world.cuts or world.stops or world.resets or world.managers
        if where.alive and process.alive and not (disturbed or world.lost or world.killed):
            raise WrongEnd(f"{shared.name}: two programs hold the lock")
    shared.holder = host, running
    time.sleep(work.rng.choice([0.0, 0.001, 0.05]) * work.rng.random())
    if shared.holder == (host, running):
        shared.holder = None


def _numbers(first: int, count: int, items: int, pause_s: float) -> Iterator[Any]:
    import time

    for at in range(count):
        time.sleep(pause_s)
        yield np.arange(first + at, first + at + items)


def begin_stream(work: Programs) -> None:
    """Starts a program that reads a stream, completely or not, slowly or fast."""
    hosts, rng = work.hosts(), work.rng
    if not hosts:
        return
    first, count = 1000 * work.salt(), rng.randint(0, STREAM_MAX)
    items, pause_s = rng.choice(ITEMS), rng.choice([0.0, 0.001, 0.02]) * rng.random()
    stop, pause_max_s = rng.choice([count, rng.randint(0, count)]), 0.05 * rng.random()
    limit, keeps = rng.choice([None, 1, 2, 5]), rng.random() < 0.3

    def read(c: Cluster) -> None:
        import time

        kept: list[Any] = []
        view = c if limit is None else c.options(buffersize=limit)
        at = -1
        for at, ref in enumerate(view.stream(_numbers, first, count, items, pause_s)):
            if at == stop:
                break
            time.sleep(rng.choice([0.0, pause_max_s]))
            kept.append((at, ref))
            if not keeps:
                check(c, *kept.pop())
        else:
            if at + 1 != count:
                raise WrongEnd(f"a stream of {count} items has ended after {at + 1}")
        for one in kept:
            check(c, *one)

    def check(c: Cluster, at: int, ref: Any) -> None:
        try:
            value = c.get(ref, timeout=HANGS_S)
        except HopliteTimeoutError as error:
            raise WrongEnd(f"item {at} of a stream hangs") from error
        if not np.array_equal(value, np.arange(first + at, first + at + items)):
            raise WrongBytes(f"item {at} of a stream is {value[:3]}")
        work.oracle.reads += 1

    holds = work.no_errors_on(*hosts, tasks=True)
    work.program(rng.choice(hosts), f"stream {first}", read, holds)
