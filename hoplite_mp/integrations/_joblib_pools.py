"""Provides the workers for calls to joblib's Parallel, in pools that are kept open and reused.

Programs make thousands of Parallel calls, and most of them are alike. Like loky's reusable
executor, this module keeps the workers of the last call for the next call that needs the same
number of workers, environment and initializer. Unlike loky, it does not close a pool that another
call is using.
"""

from __future__ import annotations

import contextlib
import os
import weakref
from typing import TYPE_CHECKING, Any

from hoplite_mp._api.cluster import Cluster, HiddenCluster, current
from hoplite_mp._api.nodes import WORKERS_MAX, list_nodes, node_id
from hoplite_mp._common import locks
from hoplite_mp._common.machine_limits import cpu_count
from hoplite_mp._protocol.local import POOL_BROKEN
from hoplite_mp._supervisor.environment import BLAS_VARIABLES, TBB_SHARES, set_blas_threads
from hoplite_mp.errors import ClosedError

if TYPE_CHECKING:
    from collections.abc import Callable

    from hoplite_mp._api.executor import TaskExecutor
    from hoplite_mp._client.runtime import Runtime

__all__ = ["PoolLease", "WantedPool", "lease", "shutdown", "worker_count"]

BLAS_SETTING = "HOPLITE_MP_BLAS_THREADS"


class WantedPool:
    """The workers that a call requests."""

    def __init__(
        self,
        count: int,
        environment: dict[str, str],
        limited: bool,
        initializer: Callable[..., Any] | None,
        initargs: tuple[Any, ...],
    ) -> None:
        self.count = min(count, WORKERS_MAX)
        self.environment = environment
        self.limited = limited  # whether the user has limited each worker's threads
        self.initializer = initializer
        self.initargs = initargs

    @property
    def plain(self) -> bool:
        """Whether the call can use any workers, because it has no initializer and does not limit
        threads."""
        return not self.limited and self.initializer is None

    def same(self, other: WantedPool) -> bool:
        """Whether the workers for one request can serve the other."""
        try:
            return bool(
                (self.count, self.environment) == (other.count, other.environment)
                and self.initializer is other.initializer
                and (self.initargs is other.initargs or self.initargs == other.initargs)
            )
        except Exception:  # for example, the == of arrays among the arguments has no truth value
            return False


class _Pool:
    """A pool of workers, and the number of calls that use it."""

    def __init__(
        self, wanted: WantedPool, executor: TaskExecutor, common: bool, here: bool
    ) -> None:
        self.wanted = wanted
        self.executor = executor
        self.common = common  # whether these are the cluster's own workers
        self.here = here  # whether all workers run on this host
        self.users = 0
        self.last = True  # whether the cluster's latest call leased this pool

    @property
    def usable(self) -> bool:
        runtime = self.executor._runtime
        if not _takes_part(runtime):
            return False
        return self.common or runtime.tasks.pool_state(self.executor._pool) != POOL_BROKEN


def _takes_part(runtime: Runtime) -> bool:
    """Whether this process still takes part in the cluster."""
    memory = runtime.memory
    return runtime.client.usable and memory.lost is None and memory.channel.is_open


class PoolLease:
    """The right of one call to use a pool, until `end()`."""

    def __init__(self, pools: _Pools, pool: _Pool) -> None:
        self._pools: _Pools | None = pools
        self._pool = pool
        self.executor = pool.executor
        self.here = pool.here

    def end(self) -> None:
        """Returns the pool when the call has ended."""
        pools, self._pools = self._pools, None
        if pools is not None:
            pools.give_back(self._pool)


class _Pools:
    """The pools of one cluster."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = weakref.ref(cluster)
        self._lock = locks.lock("joblib.pools")
        self._pools: list[_Pool] = []

    def add_common(self, wanted: WantedPool, cluster: Cluster) -> None:
        """Adds the cluster's own workers as a pool for this request."""
        with self._lock:
            self._pools.append(_Pool(wanted, cluster, True, True))

    def lease(
        self, wanted: WantedPool, nodes: list[str] | None = None, here: bool = True
    ) -> PoolLease:
        """Leases a usable pool that matches the request, or a new one. nodes: the nodes on which
        the workers of a new pool run; None: this host's node. here: whether they run on this
        host."""
        with self._lock:
            found = next((p for p in self._pools if p.usable and p.wanted.same(wanted)), None)
            if found is None:
                found = _Pool(wanted, self._open(wanted, nodes), False, here)
                self._pools.append(found)
            for pool in self._pools:
                pool.last = pool is found
            found.users += 1
            gone = self._unused()
        _close(gone)
        return PoolLease(self, found)

    def give_back(self, pool: _Pool) -> None:
        with self._lock:
            pool.users -= 1
            gone = self._unused()
        _close(gone)

    def _unused(self) -> list[_Pool]:
        """Removes and returns the pools to close: unusable pools, and pools that no call is using
        and that are not kept for the next call."""
        gone = [p for p in self._pools if not (p.users or p.last or p.common) or not p.usable]
        self._pools = [p for p in self._pools if p not in gone]
        return gone

    def _open(self, wanted: WantedPool, nodes: list[str] | None) -> TaskExecutor:
        cluster = self._cluster()
        if cluster is None:
            raise ClosedError("the cluster of this backend is closed")
        made = cluster.executor(
            wanted.count,
            initializer=_prepare,
            initargs=(wanted.environment, wanted.initializer, wanted.initargs),
            node=nodes,
        )
        made._cluster = None  # kept pools must not keep the user's cluster alive
        return made


def _close(pools: list[_Pool]) -> None:
    for pool in pools:
        if not pool.common:
            with contextlib.suppress(ClosedError):
                pool.executor.shutdown(wait=False)


def _prepare(
    environment: dict[str, str], initializer: Callable[..., Any] | None, initargs: tuple[Any, ...]
) -> None:
    """Runs in each worker of a pool, before its first task."""
    os.environ.update(environment)
    threads = environment.get("OPENBLAS_NUM_THREADS", "")
    if threads.isdecimal():
        set_blas_threads(int(threads))
    if initializer is not None:
        initializer(*initargs)


# -- pools of a cluster that the user has opened -------------------------------------------------

_given: weakref.WeakKeyDictionary[Cluster, _Pools] = weakref.WeakKeyDictionary()
_lock = locks.rlock("joblib.process")


def worker_count(cluster: Cluster | None) -> int:
    """The number of workers in the given cluster, or else in the cluster of the current task; 0 if
    there is neither."""
    cluster = cluster or _inside()
    return 0 if cluster is None else sum(workers for _, workers in _places(cluster))


def _places(cluster: Cluster) -> list[tuple[str, int]]:
    """(id, number of workers) of each node on which the cluster's tasks run."""
    bound = {node_id(number) for number in cluster._options.node or ()}
    nodes = list_nodes(cluster._runtime)
    return [(n.id, n.workers) for n in nodes if n.workers and (not bound or n.id in bound)]


def _inside() -> Cluster | None:
    """The cluster of the current task; None outside of tasks."""
    try:
        cluster = current()
    except ClosedError:
        return None
    return cluster if cluster._runtime.submitter.waiting.run_in_place is not None else None


def lease(cluster: Cluster | None, wanted: WantedPool) -> PoolLease:
    """Leases workers for one call: from `cluster`, from the current task's cluster, or from a
    cluster that this process keeps for joblib."""
    cluster = cluster or _inside()
    if cluster is None:
        return _lease_own(wanted)
    cluster._runtime.memory.check_lost()
    own = node_id(cluster._runtime.tasks.node_number)
    places = _places(cluster)
    inside = cluster._runtime.submitter.waiting.run_in_place is not None
    if wanted.plain and (inside or wanted.count == sum(workers for _, workers in places)):
        pool = _Pool(wanted, cluster, True, [node for node, _ in places] in ([], [own]))
        pool.users = 1
        return PoolLease(_Pools(cluster), pool)
    nodes = [node for node, _ in places] or [own]  # nodes may join or leave later
    with _lock:
        pools = _given.get(cluster)
        if pools is None:
            pools = _given[cluster] = _Pools(cluster)
    return pools.lease(wanted, nodes, nodes == [own])


# -- the cluster of this process -----------------------------------------------------------------


class _Own:
    """The cluster that this process has opened for its Parallel calls."""

    def __init__(self, wanted: WantedPool) -> None:
        self.pid = os.getpid()
        common = wanted.plain and wanted.environment == _of_common_workers(wanted.count)
        self.cluster = HiddenCluster(workers=wanted.count if common else 0)
        self.pools = _Pools(self.cluster)
        if common:
            self.pools.add_common(wanted, self.cluster)

    @property
    def usable(self) -> bool:
        runtime = self.cluster._runtime
        return self.pid == os.getpid() and not self.cluster._closed and _takes_part(runtime)


def _of_common_workers(count: int) -> dict[str, str] | None:
    """The thread-count variables in a cluster's own workers; None if the user has set some."""
    if any(name in os.environ for name in (*BLAS_VARIABLES, TBB_SHARES, BLAS_SETTING)):
        return None
    threads = str(max(1, cpu_count() // count))
    return {**dict.fromkeys(BLAS_VARIABLES, threads), TBB_SHARES: "1"}


_own: _Own | None = None


def _forked() -> None:
    """In a forked child, drops the parent's cluster, and replaces the lock, which another thread of
    the parent may have held."""
    global _lock, _own
    _lock = locks.rlock("joblib.process")
    _own = None
    _given.clear()


os.register_at_fork(after_in_child=_forked)


def _lease_own(wanted: WantedPool) -> PoolLease:
    global _own
    with _lock:
        if _own is None or not _own.usable:
            if _own is not None:
                _own.cluster.shutdown(wait=False)
            _own = _Own(wanted)
        return _own.pools.lease(wanted)


def shutdown(wait: bool = True) -> None:
    """Stops the workers that were started by joblib calls without `cluster=`.

    They exit when their tasks are done. The next call starts new workers. At interpreter exit the
    workers stop automatically.

    Parameters
    ----------
    wait : bool, optional
        True: return when they have exited. Default: True.

    Examples
    --------
    >>> import hoplite_mp.integrations.joblib
    >>> hoplite_mp.integrations.joblib.shutdown()
    """
    global _own
    with _lock:
        own, _own = _own, None
    if own is not None and own.pid == os.getpid():
        own.cluster.shutdown(wait)
