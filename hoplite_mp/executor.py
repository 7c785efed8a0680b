"""Executors: submit and map over a pool of workers, with options.

Why it exists: `Cluster`, `c.options(...)`, `c.executor(...)` and `hoplite_mp.Executor` are the same
thing over different pools: a `concurrent.futures.Executor` whose arguments may be refs.
It must never know: how a host is started, collectives.
"""

from __future__ import annotations

import _thread
import concurrent.futures
import contextlib
import dataclasses
import itertools
import logging
import os
import threading
import time
import weakref
from typing import TYPE_CHECKING, Any, TypeVar

from hoplite_mp import errors, serial
from hoplite_mp.client.demands import check_demands, refuse_demands, spread
from hoplite_mp.client.functions import Fixed
from hoplite_mp.client.inheriting import Inheritance, put_setup
from hoplite_mp.client.kinds import CONCURRENCY_SHIFT, check_counts, flags_of
from hoplite_mp.client.losing import UnlessEnded
from hoplite_mp.client.mapping import Results, Run, chunks_of
from hoplite_mp.client.memory import FOREVER_NS, check_timeout, whole
from hoplite_mp.client.progress import length_of, open_bar
from hoplite_mp.errors import ClosedError
from hoplite_mp.nodes import WORKERS_MAX, node_numbers, refusal
from hoplite_mp.protocol.local import POOL_BROKEN, ClosePool, OpenPool

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from hoplite_mp.client.futures import Future
    from hoplite_mp.client.runtime import Runtime
    from hoplite_mp.planner.resources import Demand

__all__ = ["Options", "PoolExecutor", "TaskExecutor", "open_pool", "spmd"]

T = TypeVar("T")
CHUNKS_PER_WORKER = 16  # of map(chunksize=None): enough to balance, few enough to be cheap
CHUNK_ITEMS_MAX = 256
RETRIES_MAX = 127
COMMON_POOL = 0
_turns = itertools.count()
SHUT_DOWN = "cannot schedule new futures after shutdown: this executor takes no new tasks"
MAX_TASKS_MAX = 1 << 62
_log = logging.getLogger("hoplite_mp")
TIMEOUT_S_MAX = 1e9  # 31 years; more is none


@dataclasses.dataclass(frozen=True, slots=True)
class Options:
    """Defaults of submit, map and executor; see `Cluster.options`."""

    node: Any = None
    retries: int | None = None  # None: Config.retries
    timeout: float | None = None
    copy: bool = False
    name: str | None = None
    restarts: int = 0
    checkpoint: int = 0
    detached: bool = False
    get_if_exists: bool = False
    concurrency: int = 1
    buffersize: int | None = None
    priority: int = 0
    resources: Demand | None = None

    def override(self, changes: dict[str, Any]) -> Options:
        """The same with some changed; TypeError for names that do not exist."""
        known = {field.name for field in dataclasses.fields(self)}
        unknown = sorted(set(changes) - known)
        if unknown:
            raise TypeError(
                f"unknown option{'s' if len(unknown) > 1 else ''} {', '.join(unknown)}; "
                f"there are {', '.join(sorted(known))}"
            )
        retries, timeout = changes.get("retries"), changes.get("timeout")
        if retries is not None:
            changes["retries"] = whole(retries)
            if changes["retries"] is None or not 0 <= changes["retries"] <= RETRIES_MAX:
                raise ValueError(f"retries={retries!r}: it must be from 0 to {RETRIES_MAX}")
        if timeout is not None:
            check_timeout(timeout)
            if not timeout > 0:
                raise ValueError(f"timeout={timeout!r}: it must be seconds above 0, or None")
            changes["timeout"] = None if timeout > TIMEOUT_S_MAX else float(timeout)
        restarts = changes.get("restarts")
        if restarts is not None:
            changes["restarts"] = whole(restarts)
            if changes["restarts"] is None or changes["restarts"] < 0:
                raise ValueError(f"restarts={restarts!r}: it must be 0 or more")
        check_counts(changes)
        check_demands(changes)
        if "checkpoint" in changes:
            checkpoint = changes["checkpoint"]
            changes["checkpoint"] = 0 if checkpoint is None else whole(checkpoint)
            if changes["checkpoint"] is None or changes["checkpoint"] < (checkpoint is not None):
                raise ValueError(f"checkpoint={checkpoint!r}: it must be 1 or more calls, or None")
        name = changes.get("name")
        if name is not None and not isinstance(name, str):
            raise TypeError(f"name={name!r}: it must be a text, or None")
        return dataclasses.replace(self, **changes)


class TaskExecutor(concurrent.futures.Executor):
    """Submits to one pool of a cluster."""

    _runtime: Runtime
    _options: Options
    _pool: int
    _closed: bool = False
    _parent: TaskExecutor | None = None  # of a view
    _places: Sequence[tuple[int, int]] = ()  # of workers of its own: (node, how many)
    _pickles_later = False  # as in the standard library: what does not pickle fails the Future

    def __reduce__(self) -> Any:
        raise TypeError(
            "an executor belongs to the process that opened it and cannot travel to another one; "
            "a task finds the cluster in hoplite_mp.current(), to submit to or to open an "
            "executor of its own"
        )

    def _was_closed(self) -> bool:
        return self._closed or (self._parent is not None and self._parent._was_closed())

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """As in the standard library; of a view: of what it is a view of."""
        if self._parent is not None:
            self._parent.shutdown(wait, cancel_futures=cancel_futures)

    def __exit__(self, kind: Any, value: Any, traceback: Any) -> bool | None:
        if self._parent is not None:
            return self._parent.__exit__(kind, value, traceback)
        return super().__exit__(kind, value, traceback)

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        """Runs `fn(*args, **kwargs)` in a worker.

        A ref or Future among the arguments (or inside list, tuple, dict, set) is replaced by its
        value, for which the task waits; arrays passed by value are the task's own. The Future has
        `.ref`, valid at once. A task whose worker dies runs again, `retries` times.
        """
        if self._was_closed():
            raise ClosedError(SHUT_DOWN)
        options = self._options
        flags = fn.flags if isinstance(fn, Fixed) else flags_of(fn)
        if flags:
            flags |= options.concurrency << CONCURRENCY_SHIFT
        retries = options.retries
        runtime = self._runtime
        pool, demand, nodes = self._pool, options.resources, options.node
        if demand is not None:
            nodes = runtime.demands.nodes_for_task(demand, nodes)
        if nodes is not None:
            pool = self._bound(nodes)
        floor = runtime.submitter.floor
        ranked = floor > 0 or options.priority or demand is not None
        if runtime.pool_sizes.get(max(pool, 0)) == 0:
            raise RuntimeError(
                "this cluster was made with workers=0, so no task can ever run: make it with "
                "workers, or use c.executor(), which has workers of its own"
            )
        if pool > COMMON_POOL and runtime.tasks.pool_state(pool) == POOL_BROKEN:
            raise self._why_broken(pool, fn)
        try:
            future: Future[T] = runtime.submitter.submit(
                fn,
                args,
                kwargs,
                pool,
                runtime.config.retries if retries is None else retries,
                options.timeout,
                options.copy,
                options.name,
                more_flags=flags,
                rank=(options.priority, floor) if ranked else None,
                demand=demand,
            )
        except serial.NotPicklable as error:
            if not self._pickles_later:
                raise
            return runtime.submitter.fail_at_once(error.reason, options.copy)
        if self._was_closed() and future.cancel():  # by another thread, which did not see this one
            raise ClosedError(SHUT_DOWN)
        return future

    def _why_broken(self, pool: int, fn: Any) -> BaseException:
        """What its tasks fail with, from the node, which fails this one too."""
        name = self._options.name or getattr(fn, "__name__", type(fn).__name__)
        probe = self._runtime.submitter.submit(abs, (0,), {}, pool, 0, None, False, name)
        return probe.exception() or errors.WorkerLostError("the initializer of its workers raised")

    def _resolved(self, changes: dict[str, Any]) -> dict[str, Any]:
        """Options with the numbers of their nodes. ValueError: one is not there, or runs nothing
        of this executor."""
        if changes.get("node") is None:
            return changes
        common = self._pool == COMMON_POOL
        numbers = tuple(node_numbers(self._runtime, changes["node"], workers=common))
        if not common and not set(numbers) >= {number for number, _ in self._places}:
            raise ValueError(
                f"node={changes['node']!r}: this executor has workers elsewhere, too; make one "
                "there with c.executor(node=...)"
            )
        return {**changes, "node": numbers}

    def _bound(self, numbers: tuple[int, ...]) -> int:
        """The pool of one of these nodes, each in turn."""
        if self._pool != COMMON_POOL:
            return self._pool
        return self._runtime.bound_pool(numbers[next(_turns) % len(numbers)])

    def map(
        self,
        fn: Callable[..., T],
        *iterables: Iterable[Any],
        timeout: float | None = None,
        chunksize: int | None = None,
        buffersize: int | None = None,
        ordered: bool = True,
        progress: bool | str = False,
    ) -> Results[T]:
        """As `concurrent.futures.Executor.map` of Python 3.14, with two differences: what it
        returns is for `for` and for `async for`, and there are more arguments.

        chunksize=None chooses; ordered=False yields results as they come. `timeout`: seconds from
        this call, then HopliteTimeoutError. buffersize: how many results may be under way before
        the iterables are read further; None reads them at once. progress: True, or a text before
        it: a bar of tqdm on stderr, or in the notebook, that counts items that are done, drawn
        whenever a result is asked for or waited for; it needs the extra `progress`.
        """
        if chunksize is not None and chunksize < 1:
            raise ValueError(f"chunksize={chunksize!r}: it must be 1 or more")
        if buffersize is not None and not isinstance(buffersize, int):
            raise TypeError("buffersize must be an integer or None")
        if buffersize is not None and buffersize < 1:
            raise ValueError(f"buffersize={buffersize!r}: it must be 1 or more, or None")
        check_timeout(timeout)
        deadline = None if timeout is None else time.monotonic() + timeout
        items: Iterable[tuple[Any, ...]] = zip(*iterables, strict=False)
        if buffersize is None:
            items = list(items)
            if chunksize is None and not flags_of(fn):  # what awaits is to run beside others
                chunksize = self._chunksize(len(items))
        total = length_of(iterables if buffersize else [items])
        chunksize = chunksize or 1
        chunked = chunksize > 1
        # What the function carries along is what it is now, for all items.
        fixed: Any = Fixed(fn, chunked)
        if chunked:
            name = self._options.name or getattr(fn, "__name__", "map")
            view = self._view(self._options.override({"name": name}))
            chunks = chunks_of(items, chunksize)
            futures = ((view.submit(fixed, chunk), len(chunk)) for chunk in chunks)
            limit = None if buffersize is None else max(1, buffersize // chunksize)
        else:
            futures = ((self.submit(fixed, *args), 1) for args in items)
            limit = buffersize
        bar = open_bar(progress, total)
        return Results(Run(futures, limit, deadline, ordered, self, bar), chunked)

    def _chunksize(self, count: int) -> int:
        workers = self._runtime.pool_sizes.get(self._pool, self._runtime.pool_sizes.get(0, 1))
        return max(1, min(count // (CHUNKS_PER_WORKER * max(1, workers)), CHUNK_ITEMS_MAX))

    def _view(self, options: Options) -> TaskExecutor:
        view = TaskExecutor()
        view._runtime, view._pool, view._options = self._runtime, self._pool, options
        view._parent, view._pickles_later = self, self._pickles_later
        return view

    def _pending(self) -> list[int]:
        """Ids of this process's unfinished tasks in this pool."""
        submitter = self._runtime.submitter
        queues = submitter.queues.all_to(self._pool)
        if self._pool == COMMON_POOL:
            for pool in self._runtime.bound.values():
                queues |= submitter.queues.all_to(pool)
        return [oid for oid, task in list(submitter.pending.items()) if task.queue in queues]

    def _cancel_pending(self, force: bool) -> None:
        """What waits first: a worker that was interrupted would begin with it."""
        for forced in (False, True)[: 1 + force]:
            for oid in self._pending():
                self._runtime.submitter.cancel(oid, forced)


class PoolExecutor(TaskExecutor):
    """`c.executor()`: workers of its own on a cluster."""

    _finisher: threading.Thread | None = None
    _cluster: Any = None  # held as long as this is
    _dropped: weakref.finalize[Any, Any]

    def __init__(
        self,
        runtime: Runtime,
        pool: int,
        options: Options,
        setup: Any,
        places: Sequence[tuple[int, int]],
    ) -> None:
        self._runtime, self._pool, self._options, self._places = runtime, pool, options, places
        self._setup = setup  # the initializer's object is held as long as workers may start

    def options(self, **changes: Any) -> TaskExecutor:
        """The same workers with other defaults."""
        refuse_demands(changes)
        return self._view(self._options.override(self._resolved(changes)))

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """As in the standard library."""
        if not self._runtime.client.usable:
            return
        ending, self._closed = self._closed, True
        self._dropped.detach()
        if cancel_futures:
            with UnlessEnded():
                self._cancel_pending(False)
        if ending:  # already, behind the caller's back
            if wait and self._finisher is not None:
                self._finisher.join()
        elif wait:
            _close_pool(self._runtime, self._pool)
        else:
            self._finisher = threading.Thread(
                target=_close_quietly, args=(self._runtime, self._pool, self._setup), daemon=True
            )
            self._finisher.start()

    def __exit__(self, kind: Any, value: Any, traceback: Any) -> bool | None:
        if kind is None:
            self.shutdown(wait=True)
        else:
            self._closed = True
            self._dropped.detach()
            with UnlessEnded():
                self._cancel_pending(True)
                self._close(False)
        return None

    def _hand_over(self) -> int:
        """The pool's number, for an owner that ends the whole cluster; the setup stays held."""
        self._dropped.detach()
        self._runtime.setups.append(self._setup)
        return self._pool

    def _close(self, kill: bool) -> None:
        _end_pool(self._runtime, self._pool, kill)


def _end_pool(runtime: Runtime, pool: int, kill: bool = False) -> None:
    """First this process's queue to it: as soon as the node hears of the end, the number of that
    pool may be another one's, with tasks in a queue of its own."""
    if runtime.client.usable:
        runtime.submitter.close_queue(pool)
        runtime.channel.tell(ClosePool(pool, kill))


def _close_pool(runtime: Runtime, pool: int) -> None:
    """Ends a pool when this process's tasks in it are done."""
    submitter = runtime.submitter
    with UnlessEnded():  # the cluster has ended meanwhile
        queues = submitter.queues.all_to(pool)
        while oids := [
            oid for oid, task in list(submitter.pending.items()) if task.queue in queues
        ]:
            submitter.waiting.wait_many(oids, len(oids), FOREVER_NS)
            submitter.drain()
        _end_pool(runtime, pool)


def _close_quietly(runtime: Runtime, pool: int, setup: Any) -> None:
    """In a thread of its own, at any time, also while the interpreter ends. `setup`: the
    initializer's object, which workers that still start need."""
    try:
        _close_pool(runtime, pool)
    except Exception:
        if runtime.client.usable:
            _log.exception("while an executor was closed")


def _drop_pool(pid: int, runtime: Runtime, pool: int, setup: Any) -> None:
    """Nobody holds that executor any more. The garbage collector may call this anywhere, so it
    waits for nothing, and takes no lock."""
    if os.getpid() == pid and runtime.client.usable:
        with contextlib.suppress(
            RuntimeError
        ):  # no thread can be started: it goes with its cluster
            _thread.start_new_thread(_close_quietly, (runtime, pool, setup))


def open_pool(
    runtime: Runtime,
    workers: int,
    initializer: Callable[..., Any] | None,
    initargs: tuple[Any, ...],
    max_tasks_per_child: int | None,
    options: Options,
    numbers: Sequence[int] = (),
) -> PoolExecutor:
    """Starts a pool of its own, on these nodes or else on this host; if each worker has resources,
    where these are."""
    count = whole(workers)
    if count is None or not 1 <= count <= WORKERS_MAX:
        raise ValueError(refusal(workers))
    if initializer is not None and not callable(initializer):
        raise TypeError(f"initializer={initializer!r}: it must be callable")
    max_tasks = 0 if max_tasks_per_child is None else whole(max_tasks_per_child)
    if max_tasks is None or max_tasks < (max_tasks_per_child is not None):
        raise ValueError(f"max_tasks_per_child={max_tasks_per_child!r}: it must be 1 or more")
    max_tasks = min(max_tasks, MAX_TASKS_MAX)
    setup: Any = None
    oid, inheritance = 0, Inheritance()
    own = runtime.tasks.node_number
    demand = options.resources
    if demand is None:
        places = spread(count, [(number, 1) for number in numbers or [own]])
    else:
        places = runtime.demands.places_for_workers(demand, count, numbers)
        options = dataclasses.replace(options, resources=None)
    if initializer is not None:
        alone = all(number == own for number, _ in places)
        ref = put_setup(runtime, initializer, tuple(initargs), inheritance if alone else None)
        oid = runtime.memory.local_id(ref)
        setup = ref, initargs  # locks and queues go with the object that was passed
    pool = _start(runtime, places, max_tasks, oid, False, demand, inheritance.descriptors)
    runtime.pool_sizes[pool] = count
    made = PoolExecutor(runtime, pool, options, setup, places)
    made._dropped = weakref.finalize(made, _drop_pool, os.getpid(), runtime, pool, setup)
    made._dropped.atexit = False
    return made


def _start(
    runtime: Runtime,
    places: Sequence[tuple[int, int]],
    max_tasks: int,
    setup: int,
    exact: bool,
    demand: Demand | None,
    descriptors: Sequence[int] = (),
) -> int:
    own = runtime.tasks.node_number
    here = sum(workers for number, workers in places if number == own)
    far = [place for place in places if place[0] != own]
    ask = OpenPool(here, max_tasks, setup, far, exact, demand or ())
    opened = runtime.channel.call(ask, descriptors=descriptors).value
    if isinstance(opened, str):
        raise errors.NodeLostError(opened)
    runtime.submitter.queues.opened(int(opened))
    return int(opened)


def spmd(
    runtime: Runtime,
    options: Options,
    fn: Callable[..., T],
    size: int,
    args: tuple[Any, ...],
    weights: Sequence[tuple[int, int]],
) -> list[Future[T]]:
    """Peers in a pool of their own, which closes with the last of them, over (node, weight)."""
    demand, options = options.resources, dataclasses.replace(options, resources=None)
    if demand is None:
        places = spread(size, weights)
    else:
        places = runtime.demands.places_for_workers(demand, size, [n for n, _ in weights])
    pool = _start(runtime, places, 0, 0, True, demand)
    peers = PoolExecutor(runtime, pool, options, None, places)
    futures: list[Future[T]] = []
    fixed: Any = Fixed(fn)
    try:
        for rank in range(size):
            futures.append(peers.submit(fixed, rank, *args))
    except BaseException:  # it does not pickle, say: no peer is left waiting for the others
        for future in futures:
            future.cancel(force=True)
        peers._close(True)
        raise
    left = [size]
    lock = threading.Lock()

    def done(future: Any) -> None:
        with lock:
            left[0] -= 1
            if left[0]:
                return
        with UnlessEnded():  # else it has gone with its cluster
            _end_pool(runtime, pool)

    for future in futures:
        future.add_done_callback(done)
    return futures
