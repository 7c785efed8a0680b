"""The large arrays that a series of calls passes again and again: each is stored once.

Why it exists: a library that sends the same array with every task (joblib) means one array, and
promises that its tasks only read it. The same store as for the globals of functions is used
(`carried`): it knows an array by its memory, which the kernel watches, so neither a changed array
nor a new one at the address of an old one is taken for what was stored. Where the kernel cannot
watch, an array is compared once for each call of the library.
It must never know: that library, tasks, how a stream names an array.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hoplite_mp.client.carried import Copy, Kept
    from hoplite_mp.client.memory import Memory
    from hoplite_mp.serial import Array

__all__ = ["Lending"]


class Lending:
    """Stores arrays, and keeps each one stored as long as the array lives or until `end()`."""

    def __init__(self, memory: Memory, nbytes_min: float) -> None:
        self.nbytes_min: Any = nbytes_min
        self._memory = memory
        # id of an array -> the array, weakly, and what is known of it. An entry goes with its
        # array, so the id is never that of another one.
        self._held: dict[int, tuple[weakref.ref[Array], Copy, Kept]] = {}
        self._compared: set[int] = set()  # ids, in the call that is under way
        self._call: object = None

    def begin(self, call: object) -> None:
        """Another call of the library begins: arrays may have been changed since the last one."""
        if call != self._call:
            self._call = call
            self._compared.clear()

    def end(self) -> None:
        """Nothing is stored for these calls any longer, except for tasks that still run."""
        self._held.clear()
        self._compared.clear()

    # -- what `serial` asks of who keeps arrays ------------------------------------------------

    def copy_of(self, array: Array) -> tuple[Copy, Kept]:
        key = id(array)
        known = self._held.get(key)
        if known is not None and key in self._compared and not _watched(known[2]):
            return known[1:]
        look: Any = self._memory.keep
        copy, kept = look().copy_of(array)
        if known is None:
            held, compared = self._held, self._compared

            def forget(_: object) -> None:  # the collector of garbage may call this anywhere
                held.pop(key, None)
                compared.discard(key)

            self._held[key] = weakref.ref(array, forget), copy, kept
        else:
            self._held[key] = known[0], copy, kept
        self._compared.add(key)
        return copy, kept

    def used_by(self, fn: Any) -> None:
        """Functions keep nothing: what is stored is held here."""

    def named(self, module: str, name: str, array: Array) -> None:
        """It is an argument, not a global variable."""


def _watched(kept: Kept) -> bool:
    """Is a look at it cheap, because the kernel knows which pages were written?"""
    return kept.frozen is not None or (kept.watch is not None and kept.watch.watched)
