"""How a cluster ends: by shutdown, by leaving `with`, at interpreter exit, or as nobody holds it.

Why it exists: what ends a cluster must outlive the Cluster that its user has dropped, as pending
work finishes first. So everything that ends one works on attributes that a second object, the
keeper, shares with the Cluster; the keepers are what interpreter exit knows.
It must never know: how work is submitted, what a user may ask of a cluster.
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
from typing import TYPE_CHECKING, Any

from hoplite_mp.client.losing import UnlessEnded
from hoplite_mp.client.memory import FOREVER_NS
from hoplite_mp.errors import HopliteTimeoutError

if TYPE_CHECKING:
    from collections.abc import Callable

    from hoplite_mp.client.far_hosts import FarHosts
    from hoplite_mp.client.launch import Host
    from hoplite_mp.client.runtime import Runtime

__all__ = ["Ending"]

_open: set[_Keeper] = set()
_log = logging.getLogger("hoplite_mp")


class Ending:
    """The end of a Cluster."""

    _runtime: Runtime
    _host: Host | None
    _far: FarHosts | None
    _shutting: threading.Lock
    _pid: int
    _closed: bool = False
    _finisher: Callable[[], Any] | None = None  # waits until it has ended behind the user's back
    _ended: threading.Event

    def _keep(self) -> None:
        """What ends this cluster: a second object over the same attributes, so that it can outlive
        the Cluster that its user holds, and end it when nobody does any more."""
        keeper = _Keeper.__new__(_Keeper)
        keeper.__dict__ = self.__dict__
        _open.add(keeper)
        weakref.finalize(self, _drop, keeper).atexit = False  # then _close_all ends it

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Takes no new tasks, waits for those submitted, and ends the cluster that was made here.

        A cluster that was reached by `address=` lives on. Afterwards calls raise ClosedError.

        Parameters
        ----------
        wait : bool, optional
            True returns when all tasks are done and all processes are gone. False returns at once,
            and the same happens in the background. Default: True.
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
        if ending:  # already, behind the caller's back
            if wait and self._finisher is not None:
                self._finisher()
        elif wait:
            self._finish()
        else:
            finisher = threading.Thread(target=self._finish, name="hoplite_mp shutdown")
            self._finisher = finisher.join
            finisher.start()

    def _finish(self) -> None:
        runtime, host = self._runtime, self._host
        if host is None or not runtime.client.usable:
            return
        try:
            with UnlessEnded():  # meanwhile: nothing is left to wait for
                if not host.lost:
                    runtime.submitter.waiting.wait_idle(FOREVER_NS)
        except BaseException:
            self._abort()
            raise
        self._end()

    def _abort(self) -> None:
        """Cancels what waits, interrupts what runs; what does not end in time is killed."""
        self._closed = True
        submitter = self._runtime.submitter
        if self._runtime.client.usable and self._host is not None and not self._host.lost:
            for force in (False, True):  # a worker that was interrupted would begin what waits
                for oid in list(submitter.pending):
                    with contextlib.suppress(Exception):
                        submitter.cancel(oid, force)
            self._runtime.actors.kill_unheld()
        self._end()

    def _end(self) -> None:
        host = self._host
        if host is not None and not host.runtime.client.usable and os.getpid() != self._pid:
            return  # a forked child leaves its parent's `with` block: nothing here is its own
        with self._shutting:
            host, self._host = self._host, None
            far, self._far = self._far, None
            _open.difference_update([one for one in _open if one.__dict__ is self.__dict__])
            with contextlib.ExitStack() as stack:  # a Ctrl-C ends what comes before, not these
                if far is not None:
                    stack.callback(far.end)
                if host is not None:
                    stack.callback(host.end)
                    host.runtime.submitter.keep_results(host.limit)

    def __exit__(self, kind: Any, value: Any, traceback: Any) -> bool | None:
        if self._host is not None:
            if kind is None:
                self.shutdown(wait=True)
            else:
                self._abort()
        return None


class _Keeper(Ending):
    """Shares its attributes with a Cluster; see `Ending._keep`."""

    def _finish_dropped(self) -> None:
        try:
            self._finish()
        except BaseException:  # also while the interpreter ends: there is nobody to raise it to
            _log.debug("while a cluster that nobody holds was ended", exc_info=True)
        finally:
            self._ended.set()


def _drop(keeper: _Keeper) -> None:
    """Nobody holds that Cluster any more. The garbage collector may call this in any thread, and
    whatever that has locked, so it waits for nothing."""
    if os.getpid() != keeper._pid or keeper._host is None or keeper._closed:
        return
    keeper._runtime.dropped = keeper._closed = True
    keeper._ended = threading.Event()
    keeper._finisher = keeper._ended.wait
    try:
        _thread.start_new_thread(keeper._finish_dropped, ())
    except RuntimeError:  # the interpreter ends, which ends it in order, or there are no threads
        keeper._closed = False


@atexit.register
def _close_all() -> None:
    """At interpreter exit, as on leaving `with`: what an exception ends does not wait for tasks."""
    failed = getattr(sys, "last_value", None) is not None and not hasattr(sys, "ps1")
    for cluster in list(_open):
        with contextlib.suppress(HopliteTimeoutError):
            if not cluster._runtime.client.usable:
                continue
            if failed:
                cluster._abort()
            else:
                cluster.shutdown(wait=True)
