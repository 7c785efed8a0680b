"""Holds objects whose refs another engine transports as bytes.

The object must be acquired for the loading process before the pickling process releases it. But the
pickling process may drop the ref immediately, or end, and the engine may load the bytes late, often
or never. Before the bytes are returned, the node of this host therefore takes a lease on the object
for `ref_hold_s` of the front end (leases: Gray and Cheriton, SOSP 1989). Only processes that take
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


# Maximum number of objects whose last pickling is remembered. Higher: fewer round trips for
# processes that repeatedly pickle many refs. Lower: less memory, some 200 bytes each.
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
        """node: returns the number of this host's node. seconds: the time for which this node holds
        an object after a pickling. passes_on: this process loads refs only to pass them on. Loading
        a ref to an object that is gone then raises no error here; the receiving processes get the
        error."""
        self.passes_on = passes_on
        self._memory = memory
        self._node = node
        self._seconds = seconds
        self._now = now
        # Object -> (when it was last held, for how long).
        self._held: dict[int, tuple[float, float]] = {}

    def hold_for(self, ref: ObjectRef[Any]) -> tuple[int, float] | None:
        """Renews the lease. Returns (number of the node that holds the object, for how many
        seconds); None if the object, or this process's cluster, is gone. The process that loads the
        ref then gets the error."""
        memory = self._memory
        # In a cluster that has ended, pickling a ref is no error; loading it is one.
        with contextlib.suppress(HopliteError):
            oid = memory.local_id(ref)
            begun = self._now()
            told, seconds = self._held.get(oid, (begun, 0.0))
            if begun - told < seconds / 2:
                # The node still holds the object, and will read this request before the lease ends,
                # so the reply need not be awaited.
                memory.channel.tell(HoldForeign(oid, self._seconds))
            else:
                seconds = float(memory.channel.call(HoldForeign(oid, self._seconds)).value)
            if seconds:
                self._remember(oid, begun, seconds)
                return self._node(), seconds
        return None

    def _remember(self, oid: int, told: float, seconds: float) -> None:
        held = self._held
        held.pop(oid, None)  # dict order must be the order of holding
        while len(held) >= REMEMBERED_MAX:
            with contextlib.suppress(KeyError):  # another thread has removed it
                del held[next(iter(held))]
        held[oid] = told, seconds


def held_too_short(ref: ObjectRef[Any], node: int, seconds: float) -> ObjectLostError:
    """The error for a process that loads a ref too late."""
    return ObjectLostError(
        f"{ref} is gone: node h{node} held it for {seconds:g} s after it was pickled "
        "(ref_hold_s of the front end's init()), unless that node has left before, and nobody else "
        "held it when it was loaded. Keep a ref to it until it has been loaded, or raise ref_hold_s"
    )


# Module that an engine's processes have imported -> the engine's front end. The front end's
# `enter()` joins the cluster of the engine's driver; it returns False if this process has none.
FRONT_ENDS = {"ray": "hoplite_mp.integrations.ray._driver"}


def enter_by_engine() -> bool:
    """Joins a cluster in a process that another engine has started, for example for a task of Ray.
    There, `current()` and refs among a task's arguments need a cluster.

    Tries the engines that this process has loaded; True if one of them joined a cluster. Raises the
    front end's error if joining failed."""
    for engine, front_end in FRONT_ENDS.items():
        if engine in sys.modules and importlib.import_module(front_end).enter():
            return True
    return False
