"""A joblib backend for this library's workers, registered when this module is imported.

    import joblib
    import hoplite_mp.integrations.joblib

    with joblib.parallel_config(backend="hoplite_mp"):
        joblib.Parallel(n_jobs=2)(joblib.delayed(f)(x) for x in data)

Many programs, including scikit-learn, use other processes only through joblib. joblib's loky
backend uses files in /dev/shm; this backend uses objects in the store. Large arrays are stored once
and read in place, results are not sent through a pipe, and workers may be on several hosts.
"""

from __future__ import annotations

import _thread
import concurrent.futures
import contextlib
import copy
import functools
import logging
import math
import multiprocessing
import os
import pickle
import queue
import threading
import warnings
import weakref
from typing import TYPE_CHECKING, Any

from joblib.parallel import (
    TASK_ERROR,
    AutoBatchingMixin,
    FallbackToBackend,
    ParallelBackendBase,
    SequentialBackend,
    cpu_count,
    parallel_config,
    register_parallel_backend,
)

from hoplite_mp._api.cluster import Cluster, current
from hoplite_mp._api.nodes import WORKERS_MAX
from hoplite_mp._client.futures import Future
from hoplite_mp._serialize import Lender, NotPicklable, failure_within
from hoplite_mp.errors import ClosedError
from hoplite_mp.integrations._joblib_pools import (
    PoolLease,
    WantedPool,
    lease,
    shutdown,
    worker_count,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from hoplite_mp._api.executor import TaskExecutor
    from hoplite_mp._client.captured_arrays import StoredCopy, TrackedArray
    from hoplite_mp._client.memory import Memory
    from hoplite_mp._client.waiting import Waiting
    from hoplite_mp._serialize import Array

__all__ = ["HopliteBackend", "shutdown"]

NAME = "hoplite_mp"
OPTIONS = ("node", "retries", "name")  # options of `Cluster.options` for all tasks of a backend
# How tasks receive arrays: shared read-only, as a private copy for each task, or by value.
READ_ONLY, PRIVATE, BY_VALUE = "r", "c", None
# Settings that joblib passes to every backend. They are about files and processes that this backend
# does not use.
IGNORED = ("temp_folder", "verbose", "context", "idle_worker_timeout", "prefer", "require")

# Interval between polls for changes that joblib does not signal. A poll takes microseconds.
JOBLIB_POLL_S = 0.1
GROWTH_MAX = 8  # maximum growth factor from one batch to the next; joblib's own limit is 2

_log = logging.getLogger("hoplite_mp")


class _Call:
    """The resources of one Parallel object, while it is running or its `with` block is open."""

    def __init__(self, workers: PoolLease, nbytes_min: float, mode: str | None) -> None:
        self.workers = workers
        memory = workers.executor._runtime.memory
        self.lending = _Lending(memory, math.inf if mode is BY_VALUE else nbytes_min)
        self.lender = Lender(self.lending, workers.here, mode == PRIVATE)
        self.futures: set[Future[Any]] = set()
        self.over = threading.Event()  # set when the call has no running or queued tasks
        self._views: dict[str, TaskExecutor] = {}

    def executor(self, name: str, options: dict[str, Any]) -> TaskExecutor:
        """The executor for tasks with this name."""
        view = self._views.get(name)
        if view is None:
            executor: Any = self.workers.executor
            view = self._views[name] = executor.options(**{"name": name, **options})
        return view

    def end(self) -> None:
        """Returns the workers, and releases the shared arrays."""
        self.lending.end()
        self.workers.end()


class _Lending:
    """Stores the large arrays that are passed to tasks. Each stored copy is kept until its array
    is freed, or until `end()`.

    joblib sends the same array with every task, and its tasks only read the array, so one stored
    copy serves all tasks. As for the globals of functions, the kernel watches an array's memory, so
    a changed array, or a new array at the same address, is not mistaken for the stored array. If
    the kernel cannot watch the memory, the array is compared with its copy once in each Parallel
    call.
    """

    def __init__(self, memory: Memory, nbytes_min: float) -> None:
        self._nbytes_min = nbytes_min
        self._memory = memory
        # Id of an array -> (weak reference to the array, its copy, its TrackedArray). An entry is
        # removed when its array is freed, so the id never identifies another array.
        self._held: dict[int, tuple[weakref.ref[Array], StoredCopy, TrackedArray]] = {}
        self._compared: set[int] = set()  # ids of arrays compared during the current call
        self._call: object = None

    def begin(self, call: object) -> None:
        """Begins a Parallel call, unless it has already begun. Arrays may have changed since the
        previous call."""
        if call != self._call:
            self._call = call
            self._compared.clear()

    def end(self) -> None:
        """Releases all copies. Running tasks may still hold them."""
        self._held.clear()
        self._compared.clear()

    def takes(self, array: Array) -> bool:
        return array.nbytes >= self._nbytes_min

    def copy_of(self, array: Array) -> tuple[StoredCopy, TrackedArray]:
        key = id(array)
        known = self._held.get(key)
        if known is not None and key in self._compared and not _watched(known[2]):
            return known[1:]
        scan: Any = self._memory.scan
        copy, kept = scan().copy_of(array)
        if known is None:
            held, compared = self._held, self._compared

            def forget(_: object) -> None:  # the garbage collector may call this at any time
                held.pop(key, None)
                compared.discard(key)

            self._held[key] = weakref.ref(array, forget), copy, kept
        else:
            self._held[key] = known[0], copy, kept
        self._compared.add(key)
        return copy, kept


def _watched(kept: TrackedArray) -> bool:
    """Whether checking the array for changes is cheap, because the kernel reports written pages."""
    return kept.frozen is not None or (kept.watch is not None and kept.watch.watched)


class HopliteBackend(AutoBatchingMixin, ParallelBackendBase):  # type: ignore[misc,unused-ignore]
    """The joblib backend "hoplite_mp", registered when this module is imported.

    Parameters
    ----------
    cluster : Cluster, optional
        An open cluster, or a view of one from `options()`. Default: inside a task, the task's own
        cluster; otherwise a cluster on this host, which stays open for later calls until
        `shutdown()`.
    initializer : callable, optional
        Runs in each worker before its first task. Workers with an initializer are shared only by
        calls with the same initializer.
    initargs : tuple, optional
        Arguments of the initializer.
    **options
        `retries`, `node`, `name`, as for `Cluster.options`.

    Raises
    ------
    TypeError
        An unknown option.
    ValueError
        `mmap_mode="r+"`, which is possible only for files.

    Examples
    --------
    >>> import joblib
    >>> import hoplite_mp.integrations.joblib
    >>> with joblib.parallel_config(backend="hoplite_mp", cluster=c, n_jobs=2):
    ...     joblib.Parallel()(joblib.delayed(pow)(n, 2) for n in range(4))
    [0, 1, 4, 9]
    """

    supports_retrieve_callback = True
    supports_inner_max_num_threads = True
    default_n_jobs = -1
    # The overhead of a batch is a tenth of loky's, so shorter batches are worthwhile, and they
    # balance the load better.
    MIN_IDEAL_BATCH_DURATION = 0.05
    MAX_IDEAL_BATCH_DURATION = 0.5

    def __init__(
        self,
        nesting_level: int | None = None,
        inner_max_num_threads: int | None = None,
        *,
        cluster: Cluster | None = None,
        **options: Any,
    ) -> None:
        super().__init__(nesting_level=nesting_level, inner_max_num_threads=inner_max_num_threads)
        if cluster is not None and not isinstance(cluster, Cluster):
            raise TypeError(f"cluster={cluster!r}: it must be a hoplite_mp.Cluster or None")
        self.cluster = cluster
        self.initializer = options.pop("initializer", None)
        self.initargs = tuple(options.pop("initargs", ()))
        _check_options(options)
        self.options = options
        self._calls: weakref.WeakKeyDictionary[Any, _Call] = weakref.WeakKeyDictionary()

    def __reduce__(self) -> Any:
        made = functools.partial(HopliteBackend, cluster=self.cluster, **self.options)
        return made, (self.nesting_level, self.inner_max_num_threads)

    # -- number of tasks -----------------------------------------------------------------------

    def effective_n_jobs(self, n_jobs: int | None) -> int:
        """The number of concurrent tasks."""
        if n_jobs == 0:
            raise ValueError("n_jobs == 0 in Parallel has no meaning")
        if n_jobs is None:
            return 1
        if multiprocessing.current_process().daemon:
            # A daemonic process exits without running its exit functions, and the pool that it
            # belongs to already has one process for each CPU.
            if n_jobs != 1:
                warnings.warn(
                    "hoplite_mp-backed parallel loops cannot be called in a daemonic process of "
                    "multiprocessing, setting n_jobs=1",
                    stacklevel=3,
                )
            return 1
        if n_jobs < 0:
            n_jobs = max((worker_count(self.cluster) or cpu_count()) + 1 + n_jobs, 1)
        return min(n_jobs, WORKERS_MAX)

    def configure(self, n_jobs: int = 1, parallel: Any = None, **settings: Any) -> int:
        """Prepares a Parallel call. joblib calls this method before the call, or at the beginning
        of the `with` block."""
        n_jobs = self.effective_n_jobs(n_jobs)
        if n_jobs == 1:
            raise FallbackToBackend(SequentialBackend(nesting_level=self.nesting_level))
        initializer = settings.pop("initializer", self.initializer)
        initargs = tuple(settings.pop("initargs", self.initargs))
        nbytes_min, mode = settings.pop("max_nbytes", 1 << 20), settings.pop("mmap_mode", READ_ONLY)
        if mode not in (READ_ONLY, PRIVATE, BY_VALUE):
            raise ValueError(
                f"mmap_mode={mode!r}: tasks cannot write to shared arrays; use 'r' "
                "(read-only), 'c' (each task has a copy), or a numpy.memmap that you have opened "
                "for writing"
            )
        for name in IGNORED:
            settings.pop(name, None)
        _check_options(settings)
        wanted = WantedPool(
            n_jobs,
            self._prepare_worker_env(n_jobs),
            self.inner_max_num_threads is not None,
            initializer,
            initargs,
        )
        self.parallel = parallel
        self._forget_ended()
        before = self._calls.pop(parallel, None)
        workers = lease(self.cluster, wanted)
        if before is not None:
            before.end()
        self._calls[parallel] = _Call(workers, math.inf if nbytes_min is None else nbytes_min, mode)
        return n_jobs

    # -- tasks ---------------------------------------------------------------------------------

    def submit(self, func: Any, callback: Callable[[Any], Any] | None = None) -> Any:
        """Submits one batch of calls. An error is stored in the Future and not raised, because
        later batches are submitted by a callback, where a raised error would be lost."""
        parallel = getattr(callback, "parallel", self.parallel)
        call = self._calls[parallel]
        call.lending.begin(getattr(callback, "parallel_call_id", None))
        future: Any
        try:
            future = self._send(call, func)
            future._reports = False  # joblib reads the results itself
            future._writable = True  # like the results of joblib's other backends
        except Exception as error:
            future = concurrent.futures.Future()
            future.set_exception(_unsendable(error) if type(error) is NotPicklable else error)
        call.futures.add(future)
        future.add_done_callback(functools.partial(_hand_over, call, callback))
        return future

    def _send(self, call: _Call, func: Any) -> Future[Any]:
        items = getattr(func, "items", None)
        if items is None:  # not one of joblib's batches
            return call.executor(_name_of(func), self.options).submit(func)
        executor = call.executor(_name_of(items[0][0]), self.options)
        return executor.submit(_run_batch, call.lender, items, func._backend, func._n_jobs)

    def compute_batch_size(self) -> int:
        """Like joblib's method, but batches that are too short grow faster. Otherwise, a Parallel
        call of a few milliseconds would end before the size of its batches had doubled often
        enough."""
        before: int = self._effective_batch_size  # type: ignore[has-type]
        duration: float = self._smoothed_batch_duration
        size = int(super().compute_batch_size())
        if size > before:
            ideal = int(before * self.MIN_IDEAL_BATCH_DURATION / duration)
            size = self._effective_batch_size = max(size, min(GROWTH_MAX * before, ideal))
        return size

    apply_async = submit  # its name before joblib 1.5

    def retrieve_result_callback(self, future: Any) -> Any:
        """Returns the results of a batch, or raises its exception."""
        return future.result()

    def abort_everything(self, ensure_ready: bool = True) -> None:
        """Cancels waiting tasks, and interrupts running tasks; a task that does not stop soon is
        killed. The library replaces killed workers, so `ensure_ready` needs no action."""
        for parallel, call in list(self._calls.items()):
            if getattr(parallel, "_aborting", True):
                # Cancel queued tasks first (without force), because an interrupted worker would
                # begin them.
                for force in (False, True):
                    for future in list(call.futures):
                        if isinstance(future, Future):  # a task that was sent
                            with contextlib.suppress(ClosedError):
                                future.cancel(force=force)

    def terminate(self) -> None:
        """Cleans up after a call or a `with` block. Its workers are kept for the next call."""
        self._forget_ended()
        self.reset_batch_stats()

    def _forget_ended(self) -> None:
        for parallel, call in list(self._calls.items()):
            if not (parallel._running or parallel._managed_backend):
                self._calls.pop(parallel, None)
                call.end()

    # -- calls inside tasks --------------------------------------------------------------------

    def retrieval_context(self) -> _Retrieval:
        """Returns a context manager around joblib's wait for results."""
        return _Retrieval(self._wait_for_all)

    def _wait_for_all(self) -> None:
        """Waits for all batches of the call. joblib itself checks for results only every 10 ms,
        which is longer than many calls take. Calls with a timeout and calls that return a
        generator are left to joblib, because they need results before all batches are done."""
        parallel = self.parallel
        call = self._calls.get(parallel)
        if call is None or parallel.return_generator or parallel.timeout is not None:
            return
        while _under_way(parallel):
            call.over.wait(JOBLIB_POLL_S)  # another thread may abort the call without notice
            call.over.clear()


def _under_way(parallel: Any) -> bool:
    return bool(parallel._wait_retrieval() and not parallel._aborting)


def _check_options(options: dict[str, Any]) -> None:
    if "timeout" in options:
        raise ValueError(
            "timeout= is an argument of joblib.Parallel; for a backend it would limit batches of "
            "tasks, whose size varies"
        )
    if unknown := sorted(set(options) - {*OPTIONS}):
        raise TypeError(
            f"the backend {NAME!r} has no option {', '.join(unknown)}; its options are cluster, "
            f"initializer, initargs, {', '.join(OPTIONS)}"
        )


def _unsendable(error: NotPicklable) -> pickle.PicklingError:
    """The error with the class and text that joblib's users expect."""
    cause = failure_within(error)
    made = pickle.PicklingError(
        f"Could not pickle the task to send to the workers: {type(cause).__name__}: {cause}"
    )
    made.__cause__ = cause
    return made


def _name_of(function: Any) -> str:
    """The name of a task that calls the function, for errors and `hoplite-mp dump`."""
    return getattr(function, "__name__", None) or type(function).__name__


def _run_batch(_: None, items: Any, backend: Any, n_jobs: int | None) -> list[Any]:
    """Runs a batch in a worker, with the same effect as joblib's BatchedCalls."""
    with parallel_config(backend=backend, n_jobs=n_jobs):
        return [function(*args, **kwargs) for function, args, kwargs in items]


# -- callbacks -----------------------------------------------------------------------------------


class _Retrieval:
    """A context manager around joblib's wait for results. While a task waits for its own Parallel
    call, it counts as blocked, so that another worker runs that call's tasks.
    `contextlib.contextmanager` cannot replace this class: it sets an attribute of exceptions that
    pass through, which some exception classes do not allow."""

    def __init__(self, wait: Callable[[], None]) -> None:
        self._wait = wait
        self._waiting: Waiting | None = None

    def __enter__(self) -> None:
        try:
            waiting = current()._runtime.submitter.waiting
        except ClosedError:
            waiting = None
        if waiting is not None and waiting.run_in_place is not None:
            self._waiting = waiting
            waiting.count_blocked(1)
        try:
            self._wait()
        except BaseException:  # Ctrl-C
            self.__exit__()
            raise

    def __exit__(self, *_: object) -> None:
        if self._waiting is not None:
            self._waiting.count_blocked(-1)


class _Callbacks:
    """A thread that runs joblib's callbacks when tasks are done.

    A callback reads results and sends the next batch. For this it pickles values, and may wait for
    memory in a full store. The thread that detects the end of a task must not run callbacks,
    because it may be inside joblib or the user's generator of tasks, and other threads may be
    waiting for it.
    """

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[tuple[_Call, Any, Any]] = queue.SimpleQueue()
        self.put = self._queue.put
        _thread.start_new_thread(self._run, ())

    def _run(self) -> None:
        while True:
            call, callback, future = self._queue.get()
            parallel = getattr(callback, "parallel", None)
            try:
                try:
                    callback(future)
                except BaseException as error:
                    _fail(callback, parallel, future, error)
                if parallel is None or not _under_way(parallel):
                    call.over.set()
            except BaseException:
                _log.exception("in a callback of joblib")
            del call, callback, future, parallel


def _fail(callback: Any, parallel: Any, future: Any, error: BaseException) -> None:
    """Fails the Parallel call whose callback has raised, because its next batch would never be
    sent. If joblib could not store the task's own exception, the call raises that exception."""
    if parallel is None or parallel._aborting:
        raise error
    own = future.exception() if future.done() and not future.cancelled() else None
    with parallel._lock:
        failed = copy.copy(callback)  # the caller may be about to read the results of the original
        failed.status, failed._result, failed.job = TASK_ERROR, error if own is None else own, None
        parallel._jobs.append(failed)
        if not parallel.return_ordered:
            parallel._jobs_set.add(failed)
        parallel._exception = parallel._aborting = True


@functools.cache
def _callbacks() -> _Callbacks:
    return _Callbacks()


# A forked child does not have the thread.
os.register_at_fork(after_in_child=_callbacks.cache_clear)


def _hand_over(call: _Call, callback: Any, future: Any) -> None:
    call.futures.discard(future)
    if callback is not None:
        _callbacks().put((call, callback, future))


register_parallel_backend(NAME, HopliteBackend)
