"""The same training on concurrent.futures.ProcessPoolExecutor, for comparison.

It is as fast as this pool allows: the initialiser sends the examples to each worker once, workers
use one BLAS thread, and only parameters and gradients are sent with the tasks.
"""

from __future__ import annotations

import contextlib
import functools
import multiprocessing
import os
import pickle
import signal
import threading
import time
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from typing import TYPE_CHECKING, Any

import numpy as np

from hoplite_mp._cli.demo.training import (
    Digits,
    Momentum,
    Record,
    TrainingPlan,
    TrainingRun,
    loss_and_gradient,
    minibatch,
    report_pid,
    roster,
    start_parameters,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from hoplite_mp._cli.demo.training import Floats

NAME = "ProcessPoolExecutor"

HUNG_SECONDS = 8.0
"""If no gradient arrives for this long, the pool counts as hung: when a worker is killed while it
writes a result, the pool's thread waits indefinitely for the rest, and no future completes."""

_BLAS_THREADS = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS")

# set by the initialiser in each worker
_plan: TrainingPlan
_digits: Digits


def _initialise(plan: TrainingPlan, digits: Digits) -> None:
    global _plan, _digits
    _plan, _digits = plan, digits


def gradient(params: Floats, number: int) -> Floats:
    """The task. The parameters and the gradient are sent through pipes."""
    out = np.empty_like(params)
    loss_and_gradient(params, *minibatch(_plan, number, _digits.train_x, _digits.train_y), out)
    return out


@contextlib.contextmanager
def _quiet_start() -> Iterator[None]:
    """A context manager. Child processes that are started inside it use one BLAS thread, and ignore
    Ctrl-C."""
    saved = {name: os.environ.get(name) for name in _BLAS_THREADS}
    os.environ.update(dict.fromkeys(_BLAS_THREADS, "1"))
    main_thread = threading.current_thread() is threading.main_thread()
    handler = signal.signal(signal.SIGINT, signal.SIG_IGN) if main_thread else None
    try:
        yield
    finally:
        if main_thread:
            signal.signal(signal.SIGINT, handler)
        for name, value in saved.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


class _Pool:
    """A pool that can be replaced, and the futures of the gradients in flight."""

    def __init__(self, plan: TrainingPlan, digits: Digits) -> None:
        self._plan = plan
        self._digits = digits
        self._executor: ProcessPoolExecutor | None = None
        self._pids: list[int] = []
        self._flight: list[Future[Floats]] = []
        self._born: list[int] = []
        self.submitted = 0
        self.received = 0

    def open(self) -> list[int]:
        """Starts the processes; returns their pids, as reported by tasks."""
        executor = self._executor = ProcessPoolExecutor(
            self._plan.workers,
            mp_context=multiprocessing.get_context("spawn"),
            initializer=_initialise,
            initargs=(self._plan, self._digits),
        )
        with _quiet_start():  # the first submits start the processes
            executor.submit(report_pid, 0.0)
            self._pids = roster(
                lambda pause, count: executor.map(report_pid, [pause] * count), self._plan.workers
            )
        return self._pids

    def close(self) -> None:
        """Cancels waiting tasks; returns without waiting for running tasks."""
        if self._executor is not None:
            self._executor.shutdown(wait=False, cancel_futures=True)

    def fill(self, params: Floats) -> None:
        """Submits one gradient for each worker."""
        self._flight = [self._submit(params) for _ in range(self._plan.workers)]
        self._born = [0] * self._plan.workers

    def first(self, count: int) -> list[int]:
        """Waits for the first `count` gradients. Returns their slots. Raises TimeoutError if the
        pool hangs."""
        waiting = set(self._flight)
        while len(self._flight) - len(waiting) < count:
            done, waiting = wait(waiting, HUNG_SECONDS, return_when=FIRST_COMPLETED)
            if not done:
                raise TimeoutError
        ready = [slot for slot, future in enumerate(self._flight) if future not in waiting]
        return ready[:count]

    def mean(self, slots: list[int]) -> Floats:
        """The mean of these gradients. Raises BrokenProcessPool if one of them is lost."""
        gradients = [self._flight[slot].result() for slot in slots]
        self.received += len(slots)
        total: Floats = functools.reduce(np.add, gradients)
        total *= np.float32(1 / len(gradients))
        return total

    def ages(self, slots: list[int], step: int) -> list[int]:
        """For the gradient in each slot, the age of its parameters in steps."""
        return [step - self._born[slot] for slot in slots]

    def resubmit(self, slots: list[int], params: Floats, step: int) -> None:
        """Submits new tasks in these slots, with the parameters of this step."""
        for slot in slots:
            self._flight[slot] = self._submit(params)
            self._born[slot] = step

    def reopen(self, params: Floats, step: int) -> int:
        """Replaces a broken pool and resubmits lost tasks; returns their number."""
        # All futures of a broken pool complete, most of them with BrokenProcessPool, unless the
        # pool hung or tasks were submitted while it broke.
        wait(self._flight, HUNG_SECONDS)
        self.close()
        self.open()
        lost = [
            slot
            for slot, future in enumerate(self._flight)
            if not future.done() or future.exception() is not None
        ]
        self.resubmit(lost, params, step)
        return len(lost)

    def tear(self) -> None:
        """Breaks a hanging pool. There is no public function for this."""
        for pid in self._pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        # The pool's reader reaches the end of file only if this process's write end is also closed.
        results: Any = getattr(self._executor, "_result_queue")  # noqa: B009
        results._writer.close()

    def _submit(self, params: Floats) -> Future[Floats]:
        assert self._executor is not None
        future = self._executor.submit(gradient, params, self.submitted)
        self.submitted += 1
        return future


def train(plan: TrainingPlan, digits: Digits, progress: Callable[[int], None]) -> TrainingRun:
    """Starts a pool, trains on it, kills one of its workers halfway, and continues with a new
    pool."""
    params = start_parameters(plan)
    optimiser = Momentum(params, plan.rate, plan.momentum)
    record = Record(plan, digits)
    pool = _Pool(plan, digits)
    killed_pid, lost_tasks, breaks, hangs = None, 0, 0, 0
    try:
        began = time.perf_counter()
        pids = pool.open()
        startup_seconds = time.perf_counter() - began

        record.start(params)
        pool.fill(params.copy())
        for step in range(plan.steps):
            if step == plan.kill_step:
                killed_pid = pids[0]
                os.kill(killed_pid, signal.SIGKILL)
            mean = None
            while mean is None:
                try:
                    slots = pool.first(plan.taken)
                    mean = pool.mean(slots)
                except BrokenProcessPool:
                    lost_tasks += pool.reopen(params.copy(), step)
                    breaks += 1
                except TimeoutError:
                    pool.tear()
                    hangs += 1
            optimiser.apply(mean)
            ages = pool.ages(slots, step)
            # A copy, because the executor pickles it later, in another thread, while the optimiser
            # changes the parameters in place.
            shared = params.copy()
            try:
                pool.resubmit(slots, shared, step + 1)
            except BrokenProcessPool:
                lost_tasks += pool.reopen(shared, step + 1)
                breaks += 1
            record.step(params, slots, ages)
            progress(step + 1)
    finally:
        pool.close()

    pickled = len(pickle.dumps(params, pickle.HIGHEST_PROTOCOL))
    examples = len(pickle.dumps(digits, pickle.HIGHEST_PROTOCOL))
    run = record.finish(
        NAME,
        startup_seconds,
        {
            "pickled": pickled * (pool.submitted + pool.received)
            + examples * plan.workers * (1 + breaks)
        },
    )
    run.killed_pid = killed_pid
    if killed_pid is not None:
        run.kill_step = plan.kill_step
        run.lost_tasks = lost_tasks
        tasks = f"{lost_tasks} task{'s' * (lost_tasks != 1)}"
        run.happened = (
            f"BrokenProcessPool: {tasks} lost, a new pool started"
            if breaks
            else "the pool has not detected the death"
        )
        if hangs:
            run.happened = f"the pool hung, killed after {HUNG_SECONDS:g} s; {run.happened}"
    return run
