"""Executors with dedicated worker processes: `c.executor()` and `c.spmd()`.

Such an executor is like any other (executor.py), but its owner opens and closes the pool, and the
pool's workers may have their own environment and resources.
"""

from __future__ import annotations

import _thread
import contextlib
import dataclasses
import logging
import os
import threading
import weakref
from typing import TYPE_CHECKING, Any, TypeVar

from hoplite_mp import errors
from hoplite_mp._api.executor import TaskExecutor
from hoplite_mp._api.nodes import named_places, working_places
from hoplite_mp._client.closing import Completion, suppress_closed
from hoplite_mp._client.demands import WORKERS_MAX, refusal, refuse_demands, spread
from hoplite_mp._client.functions import FrozenFunction
from hoplite_mp._client.inherited_context import Inheritance, put_setup
from hoplite_mp._client.memory import whole
from hoplite_mp._client.option_checks import refuse_unused
from hoplite_mp._common import locks
from hoplite_mp._common.clock import FOREVER_NS
from hoplite_mp._common.locks import starting_thread
from hoplite_mp._common.machine_limits import cpu_count
from hoplite_mp._protocol.local import ClosePool, OpenPool

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from hoplite_mp._api.executor import Options
    from hoplite_mp._client.futures import Future
    from hoplite_mp._client.runtime import Runtime
    from hoplite_mp._planner.resources import Demand
    from hoplite_mp._protocol.spawning import Environment

__all__ = ["PoolCalls", "PoolExecutor", "open_pool", "spmd"]

T = TypeVar("T")
SPMD_SIZE_MAX = 200
MAX_TASKS_MAX = 1 << 62
_log = logging.getLogger("hoplite_mp")


class PoolExecutor(TaskExecutor):
    """The result of `c.executor()`: an executor with dedicated workers."""

    _finisher: Callable[[], object] | None = None  # waits until another thread has closed the pool
    _cluster: Any = None  # kept alive as long as this executor
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
        self._setup = setup  # keeps alive the stored initializer, which new workers need

    def options(self, **changes: Any) -> TaskExecutor:
        """The same workers with other defaults; see `Cluster.options`."""
        refuse_demands(changes)
        return self._view(self._options.override(self._resolved(changes)))

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """As in the standard library."""
        if not self._runtime.client.usable:
            return
        ending, self._closed = self._closed, True
        self._dropped.detach()
        if cancel_futures:
            with suppress_closed():
                self._cancel_pending(False)
        if ending:  # the pool is already closing, in the background
            if wait and self._finisher is not None:
                self._finisher()
        elif wait:
            underway = Completion()
            self._finisher = underway.wait
            try:
                _close_pool(self._runtime, self._pool)
            except BaseException:  # the processes must exit, as after an exception in `with`
                with suppress_closed():
                    self._cancel_pending(True)
                    self._close(False)
                raise
            finally:
                underway.over()
        else:
            finisher = threading.Thread(
                target=_close_quietly, args=(self._runtime, self._pool, self._setup), daemon=True
            )
            self._finisher = finisher.join
            with starting_thread("ends the executor"):
                finisher.start()

    def __exit__(self, kind: Any, value: Any, traceback: Any) -> bool | None:
        if kind is None:
            self.shutdown(wait=True)
        else:
            self._closed = True
            self._dropped.detach()
            with suppress_closed():
                self._cancel_pending(True)
                self._close(False)
        return None

    def _hand_over(self) -> int:
        """Returns the pool's number, and makes the cluster the owner of the pool: the pool is then
        closed only with the cluster, which keeps the stored initializer alive."""
        self._dropped.detach()
        self._runtime.setups.append(self._setup)
        return self._pool

    def _close(self, kill: bool) -> None:
        _end_pool(self._runtime, self._pool, kill)


def _end_pool(runtime: Runtime, pool: int, kill: bool = False) -> None:
    """Closes a pool. First closes this process's queue to the pool, because after the node has
    received ClosePool, it may give the same number to a new pool, to which this process may then
    open a queue."""
    if runtime.client.usable:
        runtime.submitter.close_queue(pool)
        runtime.channel.tell(ClosePool(pool, kill))


def _close_pool(runtime: Runtime, pool: int) -> None:
    """Waits until this process's tasks in the pool are done, and closes the pool."""
    submitter = runtime.submitter
    with suppress_closed():  # the cluster may shut down meanwhile
        queues = submitter.queues.all_to(pool)
        while oids := [
            oid for oid, task in submitter.pending.copy().items() if task.queue in queues
        ]:
            submitter.waiting.wait_many(oids, len(oids), FOREVER_NS)
            submitter.drain()
        submitter.call_back()
        _end_pool(runtime, pool)


def _close_quietly(runtime: Runtime, pool: int, setup: Any) -> None:
    """The main function of a thread that closes a pool, possibly while the interpreter is exiting.
    `setup`: kept alive until the pool is closed, because new workers need the initializer."""
    try:
        _close_pool(runtime, pool)
    except Exception:
        if runtime.client.usable:
            _log.exception("cannot close an executor")


def _drop_pool(pid: int, runtime: Runtime, pool: int, setup: Any) -> None:
    """Closes the pool of an executor that the program has dropped. The garbage collector may call
    this function at any time, so the function neither waits nor takes a lock."""
    if os.getpid() == pid and runtime.client.usable:
        # If no thread can be started, the pool is closed with its cluster.
        with contextlib.suppress(RuntimeError):
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
    """Starts a pool for one executor, on the nodes in `numbers`, or by default on this host.
    Workers with resources start on nodes that have these resources."""
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
    env, demand = options.env, options.resources
    options = dataclasses.replace(options, env=(), resources=None)
    if demand is None:
        places = spread(count, [(number, 1) for number in numbers or [own]])
    else:
        places = runtime.demands.places_for_workers(demand, count, numbers)
    if initializer is not None:
        alone = all(number == own for number, _ in places)
        ref = put_setup(runtime, initializer, tuple(initargs), inheritance if alone else None)
        oid = runtime.memory.local_id(ref)
        setup = ref, initargs  # keeps alive the locks and queues among the arguments

    def create_owner(pool: int) -> PoolExecutor:
        runtime.pool_sizes[pool] = count
        made = PoolExecutor(runtime, pool, options, setup, places)
        made._dropped = weakref.finalize(made, _drop_pool, os.getpid(), runtime, pool, setup)
        made._dropped.atexit = False
        return made

    return _start(
        runtime,
        places,
        max_tasks=max_tasks,
        setup=oid,
        exact=False,
        owner=create_owner,
        descriptors=inheritance.descriptors,
        env=env,
        demand=demand,
    )


def _start(
    runtime: Runtime,
    places: Sequence[tuple[int, int]],
    max_tasks: int,
    setup: int,
    exact: bool,
    owner: Callable[[int], T],
    descriptors: Sequence[int] = (),
    env: Environment = (),
    demand: Demand | None = None,
    anywhere: bool = False,
) -> T:
    """Starts workers in a new pool. `owner`: a function that receives the pool's number and creates
    the object that will close the pool. `anywhere`: whether tasks from lost nodes may move to nodes
    outside `places`."""
    own = runtime.tasks.node_number
    here = sum(workers for number, workers in places if number == own)
    far = [place for place in places if place[0] != own]

    def take(value: int | str, number: int, seen: list[int]) -> T | str:
        if isinstance(value, str):
            return value
        made = owner(value)
        seen[0] = number
        pools.append(value)
        return made

    pools: list[int] = []
    request = OpenPool(here, max_tasks, setup, far, exact, env, demand or (), anywhere)
    opened: T | str = runtime.channel.call(request, take, descriptors)
    if isinstance(opened, str):
        raise errors.NodeLostError(opened)
    runtime.submitter.queues.opened(pools[0])  # takes a lock, so `take` must not call it
    return opened


def spmd(
    runtime: Runtime,
    options: Options,
    fn: Callable[..., T],
    size: int,
    args: tuple[Any, ...],
    weights: Sequence[tuple[int, int]],
    anywhere: bool,
) -> list[Future[T]]:
    """Starts peers in a new pool, which is closed when the last peer has finished. `weights`:
    (node, weight) pairs; the peers are spread over the nodes in proportion to the weights.
    `anywhere`: as for `_start`."""
    env, demand = options.env, options.resources
    options = dataclasses.replace(options, env=(), resources=None)
    if demand is None:
        places = spread(size, weights)
    else:
        places = runtime.demands.places_for_workers(demand, size, [n for n, _ in weights])
    opened: list[PoolExecutor] = []

    def create_owner(pool: int) -> PoolExecutor:
        opened.append(PoolExecutor(runtime, pool, options, None, places))
        return opened[0]

    futures: list[Future[T]] = []
    fixed: Any = FrozenFunction(fn, again=options.retry_exceptions)
    try:
        peers = _start(
            runtime,
            places,
            max_tasks=0,
            setup=0,
            exact=True,
            owner=create_owner,
            env=env,
            demand=demand,
            anywhere=anywhere,
        )
        for rank in range(size):
            futures.append(peers.submit(fixed, rank, *args))
    except BaseException:  # for example, `fn` cannot be pickled: no peer may wait for missing peers
        for future in futures:
            future.cancel(force=True)
        for one in opened:
            one._close(True)
        raise
    left = [size]
    lock = locks.lock("client.spmd")

    def done(future: Any) -> None:
        with lock:
            left[0] -= 1
            if left[0]:
                return
        with suppress_closed():  # otherwise, the pool was closed with its cluster
            _end_pool(runtime, peers._pool)

    for future in futures:
        future.add_done_callback(done)
    return futures


class PoolCalls(TaskExecutor):
    """The `Cluster` methods that start executors and peers in dedicated processes."""

    def executor(
        self,
        max_workers: int | None = None,
        *,
        initializer: Callable[..., Any] | None = None,
        initargs: tuple[Any, ...] = (),
        max_tasks_per_child: int | None = None,
        **options: Any,
    ) -> PoolExecutor:
        """Opens an executor on this cluster with dedicated worker processes.

        Its workers exit when it is shut down. The call also accepts the options of `options`.

        Parameters
        ----------
        max_workers : int, optional
            The number of workers, 1 to 200. Default: the number of CPUs of this host or, with
            `node=`, the number of workers on these nodes; with `options(resources=)`, at most as
            many as the resources allow.
        initializer : callable, optional
            Runs in each worker before its first task, and in each worker that replaces a dead one.
        initargs : tuple, optional
            Its arguments.
        max_tasks_per_child : int, optional
            After this number of tasks a worker is replaced by a new one. Default: never.
        **options
            As for `options`. The workers are spread evenly over the nodes in `node`. Default: this
            host; with `resources`, this host as far as its resources suffice, then other nodes.

        Returns
        -------
        concurrent.futures.Executor
            It has `submit`, `map`, `options` and `shutdown`, and is a context manager.

        Raises
        ------
        ValueError
            The number of workers or tasks is out of range, or the `resources` do not suffice for
            this number of workers.
        NodeLostError
            A node was lost before its workers had started.

        Examples
        --------
        >>> def load(scale):
        ...     global factor
        ...     factor = scale
        >>> with c.executor(1, initializer=load, initargs=(3,)) as pool:
        ...     print(pool.submit(lambda x: x * factor, 5).result())
        15
        """
        self._runtime.memory.check()
        places = named_places(self._runtime, options.pop("node", None), self._options.node)
        wanted = self._options.override(options)
        refuse_unused(wanted, "executor")
        if max_workers is None:
            max_workers = min(WORKERS_MAX, sum(n for _, n in places) or cpu_count())
            if wanted.resources is not None:
                numbers = [number for number, _ in places]
                max_workers = self._runtime.demands.most_workers(
                    wanted.resources, max_workers, numbers
                )
        made = open_pool(
            self._runtime,
            max_workers,
            initializer,
            initargs,
            max_tasks_per_child,
            dataclasses.replace(wanted, node=None),
            [number for number, _ in places],
        )
        made._cluster = self
        return made

    def spmd(
        self, fn: Callable[..., T], size: int, *args: Any, node: Any = None
    ) -> list[Future[T]]:
        """Starts `size` peers, each of which runs `fn(rank, *args)` in a dedicated process.

        The peers usually become members of one Group. A peer that dies is retried like any task,
        unless `options(retries=0)` is used, and may rejoin its Group as long as the Group exists.
        If its host is lost, the peer restarts on another host (one of `node`, if given). With
        `options(resources=)`, it restarts as soon as the resources are free on a host.

        Parameters
        ----------
        fn : callable
            Runs in each peer. Its first argument is the rank, 0 to size - 1.
        size : int
            The number of peers, 1 to 200.
        *args
            Further arguments, the same for every peer. Refs are replaced by their values, as for
            `submit`; `by_ref(ref)` passes the ref itself.
        node : Node, str, or a list of them, optional
            The nodes on which the peers run. Default: all nodes with workers, in proportion to
            their numbers of workers; with `options(resources=)`, this host as far as its resources
            suffice, then other nodes.

        Returns
        -------
        list of Future
            The peers' results, by rank.

        Raises
        ------
        ValueError
            `size` is out of range, a node has never been in the cluster, or the `resources` do not
            suffice for this number of peers.

        Examples
        --------
        >>> def peer(rank, scale):
        ...     g = hoplite_mp.current().group("spmd", size=2, rank=rank)
        ...     return float(g.allreduce(scale * rank))
        >>> [future.result() for future in c.spmd(peer, 2, 10.0)]
        [10.0, 10.0]
        """
        number = whole(size)
        if number is None or not 1 <= number <= SPMD_SIZE_MAX:
            raise ValueError(f"size={size!r}: it must be from 1 to {SPMD_SIZE_MAX}")
        size = number
        self._runtime.memory.check()
        refuse_unused(self._options, "spmd")
        places = named_places(self._runtime, node, self._options.node)
        weights = [(number, 1) for number, _ in places]
        if self._options.resources is None:
            weights = weights or working_places(self._runtime)
        options = dataclasses.replace(self._options, node=None)
        return spmd(self._runtime, options, fn, size, args, weights, not places)

    @property
    def assigned(self) -> dict[str, list[int]]:
        """The resource units that are assigned to this task, executor's worker or actor.

        Returns
        -------
        dict
            The indices of the units on this host, by resource name: ``{"gpu": [0, 1]}``. They start
            at 0. For a fraction of a unit, this is the index of the shared unit. For a resource
            without indices (its total is above 1024, or not an integer), the list is empty. The
            dict is empty if nothing is assigned, as in a driver.

        Examples
        --------
        >>> c.assigned
        {}
        """
        return self._runtime.demands.assigned()
