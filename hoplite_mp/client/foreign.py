"""Refs that another engine carries as bytes: who pickles one has its node hold the object.

Why it exists: acquire before release. The engine may keep the bytes for long and load them late,
often or never, and who has pickled the ref may drop it at once, or end. So before the bytes are
handed out the node of this host holds the object, for Config.foreign_hold_s (the leases of Gray and
Cheriton: what may be forgotten has a term). Only processes that take part for an engine do that.
It must never know: which engine that is, how long the node holds it.
"""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING, Any

from hoplite_mp.errors import HopliteError, ObjectLostError
from hoplite_mp.protocol.foreign import HoldForeign

if TYPE_CHECKING:
    from collections.abc import Callable

    from hoplite_mp.client.memory import Memory
    from hoplite_mp.ref import ObjectRef

__all__ = ["ForeignRefs", "held_too_short"]

# Objects whose last pickling is remembered. Higher: fewer round trips of processes that pickle the
# same many refs again and again. Lower: less memory, some 200 bytes each.
REMEMBERED_MAX = 10_000


class ForeignRefs:
    """What one process has told its node of refs that it has pickled."""

    def __init__(
        self,
        memory: Memory,
        node: Callable[[], int],
        passes_on: bool = False,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """node: the number of the node of this host. passes_on: what this process loads is for
        others; that an object is gone is for them to learn."""
        self.passes_on = passes_on
        self._memory = memory
        self._node = node
        self._now = now
        self._held: dict[int, tuple[float, float]] = {}  # object -> (told when, for how long)

    def hold_for(self, ref: ObjectRef[Any]) -> tuple[int, float] | None:
        """(number of the node that holds it from now on, for so many seconds); None: nobody does,
        as the object, or this process's cluster, is gone. Who loads it then learns that."""
        memory = self._memory
        # A cluster that has ended holds nothing: to pickle the ref is no error, to load it is one.
        with contextlib.suppress(HopliteError):
            oid = memory.local_id(ref)
            begun = self._now()
            told, seconds = self._held.get(oid, (begun, 0.0))
            if begun - told < seconds / 2:
                # The node still holds it, and reads this before the time is over, so it need not
                # be waited for.
                memory.channel.tell(HoldForeign(oid))
            else:
                seconds = float(memory.channel.call(HoldForeign(oid)).value)
            if seconds:
                self._remember(oid, begun, seconds)
                return self._node(), seconds
        return None

    def _remember(self, oid: int, told: float, seconds: float) -> None:
        held = self._held
        held.pop(oid, None)  # the order is that of telling
        while len(held) >= REMEMBERED_MAX:
            with contextlib.suppress(KeyError):  # another thread was quicker
                del held[next(iter(held))]
        held[oid] = told, seconds


def held_too_short(ref: ObjectRef[Any], node: int, seconds: float) -> ObjectLostError:
    """What who loads a ref too late is told."""
    return ObjectLostError(
        f"{ref} is gone: node h{node} held it for {seconds:g} s after it was pickled "
        "(Config.foreign_hold_s), unless that node has left before, and nobody else held it when "
        "it was loaded. Keep a ref to it until it has been loaded, or raise foreign_hold_s"
    )
