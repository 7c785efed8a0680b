"""Holds objects whose refs another engine, such as Ray, transports as bytes.

A process that loads a ref must acquire the object before the process that pickled the ref releases
it. But the pickling process may drop the ref immediately, or exit, and the engine may load the
bytes late, several times or never. So when a ref is pickled, this host's node takes a lease on the
object for `ref_hold_s` seconds (leases: Gray and Cheriton, SOSP 1989). Only processes that take
part on behalf of an engine use leases.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
from typing import TYPE_CHECKING, Any

from hoplite_mp._common import clock
from hoplite_mp._protocol.local import HoldForeign
from hoplite_mp.errors import HopliteError, ObjectLostError

if TYPE_CHECKING:
    from collections.abc import Callable

    from hoplite_mp._client.memory import Memory
    from hoplite_mp._common.ref import ObjectRef

__all__ = ["ForeignRefs", "enter_by_engine", "held_too_short"]


# Maximum number of objects for which the time of the last lease is kept. A higher value saves round
# trips in processes that repeatedly pickle many refs. Each entry takes about 200 bytes.
REMEMBERED_MAX = 10_000


class ForeignRefs:
    """The leases that one process has requested from its node."""

    def __init__(
        self,
        memory: Memory,
        node: Callable[[], int],
        seconds: float,
        passes_on: bool = False,
        now: Callable[[], float] = clock.monotonic,
    ) -> None:
        """node: returns the number of this host's node. seconds: how long this node holds an object
        after it was pickled. passes_on: whether this process loads refs only to pass them on. If
        so, loading a ref to an object that is gone raises no error here; the receiving processes
        get the error."""
        self.passes_on = passes_on
        self._memory = memory
        self._node = node
        self._seconds = seconds
        self._now = now
        # Object -> (time of its last lease, the lease's duration in seconds).
        self._held: dict[int, tuple[float, float]] = {}

    def hold_for(self, ref: ObjectRef[Any]) -> tuple[int, float] | None:
        """Renews the lease. Returns (number of the node that holds the object, the lease's duration
        in seconds); None if the object or this process's cluster is gone. The process that loads
        the ref then raises the error."""
        memory = self._memory
        # After its cluster has stopped, a ref can still be pickled, but not loaded.
        with contextlib.suppress(HopliteError):
            oid = memory.local_id(ref)
            begun = self._now()
            leased_at, seconds = self._held.get(oid, (begun, 0.0))
            if begun - leased_at < seconds / 2:
                # The node still holds the object, and will read this request before the lease ends,
                # so the reply need not be awaited.
                memory.channel.tell(HoldForeign(oid, self._seconds))
            else:
                seconds = float(memory.channel.call(HoldForeign(oid, self._seconds)).value)
            if seconds:
                self._remember(oid, begun, seconds)
                return self._node(), seconds
        return None

    def _remember(self, oid: int, leased_at: float, seconds: float) -> None:
        held = self._held
        held.pop(oid, None)  # the dict must be ordered by the time of the lease
        while len(held) >= REMEMBERED_MAX:
            with contextlib.suppress(KeyError):  # another thread has removed it
                del held[next(iter(held))]
        held[oid] = leased_at, seconds


def held_too_short(ref: ObjectRef[Any], node: int, seconds: float) -> ObjectLostError:
    """The error for a process that loads a ref too late."""
    return ObjectLostError(
        f"{ref} is gone: node h{node} held it for {seconds:g} s after it was pickled "
        "(ref_hold_s of the front end's init()), unless that node left earlier, and no process "
        "held it when it was loaded. Keep a ref to it until it has been loaded, or raise ref_hold_s"
    )


# Module that an engine's processes have imported -> the engine's front end. The front end's
# `enter()` joins the cluster of the engine's driver; it returns False if there is no such cluster.
FRONT_ENDS = {"ray": "hoplite_mp.integrations.ray._driver"}


def enter_by_engine() -> bool:
    """Joins a cluster in a process that another engine has started, for example for a Ray task.
    There, `current()` and refs among a task's arguments need a cluster.

    Tries the engines that this process has loaded. Returns True if the front end of one of them has
    joined a cluster. Raises the front end's error if joining failed."""
    for engine, front_end in FRONT_ENDS.items():
        if engine in sys.modules and importlib.import_module(front_end).enter():
            return True
    return False
