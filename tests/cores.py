"""Processes that stay on one core each.

Why it exists: what plays a simulated cluster hands one baton among its threads. Where these stand
on one core that takes a quarter less time.
It must never know: what is played.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import queue
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator
    from multiprocessing.pool import Pool

PATIENCE_S = 10.0
_cores: Any = None  # numbers of those that nobody uses, in a process of a pool


def pool(processes: int, tasks_max: int | None = None) -> Pool:
    """Of processes that are made anew, each for so many tasks; see on_one_core."""
    context = multiprocessing.get_context("spawn")
    cores = context.Queue()
    known = sorted(os.sched_getaffinity(0))
    for number in range(processes):
        cores.put(known[number % len(known)])
    return context.Pool(processes, _begin, (cores,), maxtasksperchild=tasks_max)


def _begin(cores: Any) -> None:
    global _cores
    _cores = cores


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
