"""Tasks of estimators, on hosts of the current cluster or in the calling process.

Estimators use the cluster of `hoplite_mp.current()`. Without an open cluster they compute in the
calling process, as scikit-learn's estimators do with `n_jobs=None`.
"""

from __future__ import annotations

import functools
from collections import deque
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from hoplite_mp import errors
from hoplite_mp._api.cluster import current
from hoplite_mp._client.completions import as_completed

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["NO_WORKERS", "ClusterTasks", "HostTasks", "InlineTasks", "host_tasks", "is_loss"]

NO_WORKERS = "no host of the cluster has workers: add_workers() adds some"


class HostTasks(Protocol):
    """The interface: stores values on hosts, and runs tasks on them."""

    def hosts(self) -> dict[str, int]:
        """The living hosts that have workers: host id -> number of workers."""

    def put(self, value: Any, hosts: Sequence[str]) -> Any:
        """Stores a value, with copies on these hosts. Returns an argument for `submit`."""

    def submit(self, host: str, function: Callable[..., Any], *args: Any, priority: int = 0) -> Any:
        """Runs `function(*args)` on that host. Returns a Future, which can be an argument of
        another task."""

    def watch(self, future: Any) -> None:
        """Adds a Future to the Futures that `completed` returns."""

    def completed(self) -> Any:
        """Waits until another watched Future is done, and returns it."""

    def cancel(self) -> None:
        """Cancels the watched Futures that are not done."""

    def results(self, futures: Sequence[Any]) -> list[Any]:
        """The results of these Futures, in their order."""

    def sum(self, futures: Sequence[Any]) -> Any:
        """The sum of the arrays that these Futures return. It has the same bits in each call."""


class ClusterTasks:
    """Tasks on the hosts of a cluster."""

    def __init__(self, cluster: Any) -> None:
        self.cluster = cluster
        self._completions: Any = None
        self._watched: set[Any] = set()

    def hosts(self) -> dict[str, int]:
        return {node.id: node.workers for node in self.cluster.nodes if node.workers}

    def put(self, value: Any, hosts: Sequence[str]) -> Any:
        ref = self.cluster.put(value)
        others = [host for host in hosts if host != self.cluster.here.id]
        if others:
            self.cluster.broadcast(ref, to=others)
        return ref

    def submit(self, host: str, function: Callable[..., Any], *args: Any, priority: int = 0) -> Any:
        options = {"priority": priority} if priority else {}
        try:
            return self.cluster.options(node=host, **options).submit(function, *args)
        except errors.NodeLostError as error:  # the host is gone; `submit` must return a Future
            return self.cluster.submit(_fail, error)

    def watch(self, future: Any) -> None:
        self._watched.add(future)
        if self._completions is None:
            self._completions = as_completed([future])
        else:
            self._completions.add(future)

    def completed(self) -> Any:
        while True:
            if not self._watched:
                raise ValueError("no Future is watched")
            try:
                future = next(self._completions)
            except StopIteration:  # a Future was added after the iterator had ended
                self._completions = as_completed(list(self._watched))
                continue
            if future in self._watched:
                self._watched.remove(future)
                return future

    def cancel(self) -> None:
        for future in self._watched:
            future.cancel()
        self._watched.clear()
        self._completions = None

    def results(self, futures: Sequence[Any]) -> list[Any]:
        return list(self.cluster.get(list(futures)))

    def sum(self, futures: Sequence[Any]) -> Any:
        return self.cluster.get(self.cluster.reduce(list(futures), reproducible=True))

    def host_of(self, ref: Any, number: int) -> str:
        """Waits until the object is ready. Returns a host that holds the object and has workers or,
        if there is none, any host with workers, in rotation by `number`."""
        self.cluster.wait([ref])
        hosts = list(self.hosts())
        if not hosts:
            raise errors.NodeLostError(NO_WORKERS)
        holders = [host for host in self.cluster.locations(ref) if host in hosts]
        return holders[0] if holders else hosts[number % len(hosts)]


class InlineTasks:
    """Runs tasks immediately in the calling process. Its hosts are only names."""

    def __init__(self, hosts: int = 1) -> None:
        self._hosts = {f"inline{number}": 1 for number in range(hosts)}
        self._watched: deque[Future[Any]] = deque()

    def hosts(self) -> dict[str, int]:
        return self._hosts

    def put(self, value: Any, hosts: Sequence[str]) -> Any:
        return value

    def submit(self, host: str, function: Callable[..., Any], *args: Any, priority: int = 0) -> Any:
        future: Future[Any] = Future()
        try:
            future.set_result(function(*_resolved(args)))
        except Exception as error:
            future.set_exception(error)
        return future

    def watch(self, future: Any) -> None:
        self._watched.append(future)

    def completed(self) -> Any:
        return self._watched.popleft()

    def cancel(self) -> None:
        self._watched.clear()

    def results(self, futures: Sequence[Any]) -> list[Any]:
        return [future.result() for future in futures]

    def sum(self, futures: Sequence[Any]) -> Any:
        return functools.reduce(np.add, self.results(futures))


def _fail(error: Exception) -> None:
    raise error


def _resolved(value: Any) -> Any:
    """Replaces Futures by their results, as in the arguments of a task."""
    if isinstance(value, Future):
        return value.result()
    if type(value) in (list, tuple):
        return type(value)([_resolved(one) for one in value])
    return value


def host_tasks() -> HostTasks:
    """Tasks on the current cluster or, if no cluster is open, in the calling process."""
    try:
        return ClusterTasks(current())
    except errors.ClosedError:
        return InlineTasks()


def is_loss(error: BaseException) -> bool:
    """Whether a task failed because a host or an object was lost, and may be run again."""
    return isinstance(error, errors.NodeLostError | errors.ObjectLostError)
