"""Processes that stay on one core each.

What plays a simulated cluster hands one baton among its threads. Where these stand on one core that
takes a quarter less time.
"""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
import queue
import signal
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

T = TypeVar("T")
R = TypeVar("R")
PATIENCE_S = 10.0
PR_SET_PDEATHSIG = 1
_cores: Any = None  # numbers of those that nobody uses, in a process of a pool


def play_all(
    play: Callable[[T], R], parts: Iterable[T], processes: int, tasks_max: int | None = None
) -> Iterator[R]:
    """What `play` returns of each part, as soon as it does, from processes each of which plays so
    many parts; see on_one_core. RuntimeError: one of them has died, as after a mistake in C."""
    context = multiprocessing.get_context("spawn")
    cores = context.Queue()
    known = sorted(os.sched_getaffinity(0))
    for number in range(processes):
        cores.put(known[number % len(known)])
    about = {"initializer": _begin, "initargs": (cores,), "max_tasks_per_child": tasks_max}
    with ProcessPoolExecutor(processes, context, **about) as pool:  # type: ignore[arg-type]
        asked = {pool.submit(play, part): part for part in parts}
        try:
            for future in as_completed(asked):
                yield future.result()
                del asked[future]
        except BrokenProcessPool as error:
            running = [part for future, part in asked.items()][: 2 * processes]
            raise RuntimeError(f"a process died while it played one of {running}") from error
        except BaseException:  # Ctrl-C, or nobody wants more
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _begin(cores: Any) -> None:
    """In a new process of the pool, which ends with its parent, also if that is killed."""
    global _cores
    _cores = cores
    parent = os.getppid()
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


@contextlib.contextmanager
def on_one_core() -> Iterator[None]:
    """For a task in such a pool: no other one is there, as far as there are enough."""
    if _cores is None:  # this process is of no such pool
        yield
        return
    try:
        core = _cores.get(timeout=PATIENCE_S)
    except queue.Empty:  # a process that had one was killed
        yield
        return
    os.sched_setaffinity(0, {core})
    try:
        yield
    finally:
        _cores.put(core)
