"""Shuts a cluster down: when `shutdown` is called, at the end of `with`, at interpreter exit, or
after the program has dropped the Cluster.

Pending work is finished first, even if the program has dropped its Cluster. The code that shuts a
cluster down therefore needs an object that outlives the Cluster: the keeper, which shares its
attributes. At interpreter exit, the clusters of all keepers are shut down.
"""

from __future__ import annotations

import _thread
import atexit
import contextlib
import logging
import os
import sys
import threading
import weakref
from typing import TYPE_CHECKING, Any, NoReturn

from hoplite_mp._client.closing import Completion, suppress_closed
from hoplite_mp._common.clock import FOREVER_NS
from hoplite_mp._common.locks import starting_thread
from hoplite_mp.errors import HopliteTimeoutError

if TYPE_CHECKING:
    from collections.abc import Callable

    from hoplite_mp._client.launch import HostProcesses
    from hoplite_mp._client.network import RemoteHosts
    from hoplite_mp._client.runtime import Runtime

__all__ = ["ClusterShutdown"]

_open: set[_Keeper] = set()
_log = logging.getLogger("hoplite_mp")


class ClusterShutdown:
    """The `Cluster` methods that shut the cluster down."""

    _runtime: Runtime
    _host: HostProcesses | None
    _far: RemoteHosts | None
    _shutting: threading.Lock
    _pid: int
    _closed: bool = False
    _finisher: Callable[[], Any] | None = None  # waits for a shutdown in another thread
    _ended: threading.Event

    def _keep(self) -> None:
        """Creates the keeper of this cluster: a second object with the same attributes, which shuts
        the cluster down when the program has dropped the Cluster."""
        keeper = _Keeper.__new__(_Keeper)
        # A separate dictionary: if `self` is garbage, Python 3.13.0 collects values that only
        # `self.__dict__` holds, even if another object shares this dictionary.
        keeper.__dict__ = self.__dict__ = dict(vars(self))
        _open.add(keeper)
        weakref.finalize(self, _drop, keeper).atexit = False  # at exit, _close_all does this

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Waits for submitted tasks, and shuts down a cluster that this program has started.

        A cluster that the program has joined with `address=` continues. No new tasks are accepted,
        and later calls raise ClosedError.

        Parameters
        ----------
        wait : bool, optional
            True: waits until all tasks are done and all processes have exited. False: returns
            immediately, and shuts the cluster down in the background. Default: True.
        cancel_futures : bool, optional
            True cancels all tasks that have not begun. Default: False.

        Examples
        --------
        >>> small = hoplite_mp.Cluster(workers=1)
        >>> future = small.submit(pow, 2, 4)
        >>> small.shutdown()
        >>> future.result()
        16
        """
        if self._host is None:
            return
        ending, self._closed = self._closed, True
        if self._runtime.client.usable and cancel_futures:
            for oid in list(self._runtime.submitter.pending):
                self._runtime.submitter.cancel(oid, False)
        if ending:  # the cluster is already shutting down, in the background
            if wait and self._finisher is not None:
                self._finisher()
        elif wait:
            underway = Completion()
            self._finisher = underway.wait
            try:
                self._finish()
            finally:
                underway.over()
        else:
            finisher = threading.Thread(target=self._finish, name="hoplite_mp shutdown")
            self._finisher = finisher.join
            with starting_thread("ends the cluster"):
                finisher.start()

    async def __aenter__(self) -> NoReturn:
        raise TypeError(
            "`async with Cluster(...)` would block the event loop while it opens and closes: "
            "use `async with hoplite_mp.connect(...) as c`, which takes the same arguments"
        )

    async def __aexit__(self, kind: Any, value: Any, traceback: Any) -> None:
        """Never called. `async with` looks this method up before it calls `__aenter__`."""

    def _finish(self) -> None:
        runtime, host = self._runtime, self._host
        if host is None or not runtime.client.usable:
            return
        try:
            with suppress_closed():  # if the cluster has stopped, there is nothing to wait for
                if not host.lost:
                    runtime.submitter.waiting.wait_idle(FOREVER_NS)
        except BaseException:
            self._abort()
            raise
        self._end()

    def _abort(self) -> None:
        """Cancels waiting tasks, interrupts running tasks, and kills tasks that take too long."""
        self._closed = True
        submitter = self._runtime.submitter
        with contextlib.suppress(Exception):
            submitter.drain()
        submitter.failures.closed = True
        try:
            if self._runtime.client.usable and self._host is not None and not self._host.lost:
                # Waiting tasks first: otherwise, an interrupted worker would begin one of them.
                for force in (False, True):
                    for oid in list(submitter.pending):
                        with contextlib.suppress(Exception):
                            submitter.cancel(oid, force)
                self._runtime.actors.kill_unheld()
        finally:  # even after a second Ctrl-C, because no later code could do this
            self._end()

    def _end(self) -> None:
        host = self._host
        if host is not None and not host.runtime.client.usable and os.getpid() != self._pid:
            return  # a forked child leaves its parent's `with` block; the parent owns the cluster
        try:  # each of these steps runs even after a Ctrl-C in an earlier step
            if host is not None:  # failures that callbacks read are not reported as unread
                host.runtime.submitter.collector.stop()
                host.runtime.submitter.call_back_at_end()
        finally:
            try:
                self._end_host()
                if host is not None:  # the lock is not held, because callbacks are users' code
                    host.runtime.submitter.call_back_at_end()
            finally:  # not earlier: the program must not exit before the callbacks have run
                _open.difference_update(
                    [one for one in list(_open) if one.__dict__ is self.__dict__]
                )

    def _end_host(self) -> None:
        with self._shutting:
            host, self._host = self._host, None
            far, self._far = self._far, None
            with contextlib.ExitStack() as stack:  # its callbacks run even after a Ctrl-C
                if far is not None:
                    stack.callback(far.end)
                if host is not None:
                    stack.callback(host.end)
                    host.runtime.submitter.keep_results(host.limit)
                    host.runtime.submitter.failures.report()

    def __exit__(self, kind: Any, value: Any, traceback: Any) -> bool | None:
        if self._host is not None:
            if kind is None:
                self.shutdown(wait=True)
            else:
                self._abort()
        return None


class _Keeper(ClusterShutdown):
    """Shares its attributes with a Cluster; see `ClusterShutdown._keep`."""

    def _finish_dropped(self) -> None:
        try:
            self._finish()
        except BaseException:  # this thread has no caller that could catch the exception
            _log.debug("cannot shut down a dropped cluster", exc_info=True)
        finally:
            self._ended.set()


def _drop(keeper: _Keeper) -> None:
    """Shuts down a cluster that the program has dropped. The garbage collector may call this
    function in any thread, with any locks held, so the function does not wait."""
    if os.getpid() != keeper._pid or keeper._host is None or keeper._closed:
        return
    keeper._runtime.dropped = keeper._closed = True
    keeper._ended = threading.Event()
    keeper._finisher = keeper._ended.wait
    try:
        _thread.start_new_thread(keeper._finish_dropped, ())
    except RuntimeError:  # no thread can be started, so _close_all shuts the cluster down
        keeper._closed = False


@atexit.register
def _close_all() -> None:
    """Shuts all clusters down at interpreter exit. As at the end of `with`, waits for tasks unless
    the program has failed with an exception."""
    failed = getattr(sys, "last_value", None) is not None and not hasattr(sys, "ps1")
    for cluster in list(_open):
        with contextlib.suppress(HopliteTimeoutError):
            if cluster._host is None or not cluster._runtime.client.usable:
                if cluster._finisher is not None and cluster._pid == os.getpid():
                    cluster._finisher()  # waits for the thread that shuts it down or calls back
                continue
            if failed:
                cluster._abort()
            else:
                cluster.shutdown(wait=True)
