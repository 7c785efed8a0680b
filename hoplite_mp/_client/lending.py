"""Large arrays that a series of calls passes repeatedly are stored once.

A library such as joblib sends the same array with every task, and promises that its tasks only read
it, so one stored copy serves them all. Copies are made as for the globals of functions
(`captured_arrays`): the kernel watches an array's memory, so neither a changed array nor a new one
at an old one's address is mistaken for the stored one. Where the kernel cannot watch, an array is
compared once for each call of the library.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hoplite_mp._client.captured_arrays import StoredCopy, TrackedArray
    from hoplite_mp._client.memory import Memory
    from hoplite_mp._serialize import Array

__all__ = ["Lending"]


class Lending:
    """Stores arrays, and keeps each one stored as long as the array lives or until `end()`."""

    def __init__(self, memory: Memory, nbytes_min: float) -> None:
        self._nbytes_min = nbytes_min
        self._memory = memory
        # Id of an array -> (weak reference to it, its copy, what is known of it). An entry is
        # removed with its array, so an id never stands for another array.
        self._held: dict[int, tuple[weakref.ref[Array], StoredCopy, TrackedArray]] = {}
        self._compared: set[int] = set()  # ids of arrays that were compared during the present call
        self._call: object = None

    def begin(self, call: object) -> None:
        """The library begins another call; arrays may have changed since the one before."""
        if call != self._call:
            self._call = call
            self._compared.clear()

    def end(self) -> None:
        """Releases all copies. Only tasks that still run may hold them from here on."""
        self._held.clear()
        self._compared.clear()

    def takes(self, array: Array) -> bool:
        return array.nbytes >= self._nbytes_min

    def copy_of(self, array: Array) -> tuple[StoredCopy, TrackedArray]:
        key = id(array)
        known = self._held.get(key)
        if known is not None and key in self._compared and not _watched(known[2]):
            return known[1:]
        scan: Any = self._memory.scan
        copy, kept = scan().copy_of(array)
        if known is None:
            held, compared = self._held, self._compared

            def forget(_: object) -> None:  # the garbage collector may call this anywhere
                held.pop(key, None)
                compared.discard(key)

            self._held[key] = weakref.ref(array, forget), copy, kept
        else:
            self._held[key] = known[0], copy, kept
        self._compared.add(key)
        return copy, kept


def _watched(kept: TrackedArray) -> bool:
    """Is checking the array cheap, because the kernel knows which pages were written?"""
    return kept.frozen is not None or (kept.watch is not None and kept.watch.watched)
