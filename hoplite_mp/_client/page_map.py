"""Tracks which parts of the store this process has mapped, and which it wrote through the file.

Why it exists: a large write through a mapping costs one copy, but the first write to a place also
pays for page faults. So the first write to a place goes through the file, and a second one through
a mapping.
It must never know: what is written.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hoplite_mp import _shm

__all__ = ["POPULATE_BYTES_MIN", "Mapped"]

POPULATE_BYTES_MIN = 1 << 20  # smaller payloads are always written through a mapping
UNIT_BYTES = 1 << 20


class Mapped:
    """One process's mappings, in units of 1 MiB."""

    def __init__(self, client: _shm.Client) -> None:
        self._client = client
        self.units: set[int] = set()
        self._written: set[int] = set()

    def add(self, payload: int, nbytes: int) -> None:
        """Maps these bytes of the store, unless they are mapped already."""
        units = _units(payload, nbytes)
        if not self.units.issuperset(units):
            self._client.populate(payload, nbytes)
            self.units.update(units)

    def serves(self, payload: int, nbytes: int) -> bool:
        """Should a write there go through the mapping? The mapping is made when it begins to pay
        off."""
        if nbytes < POPULATE_BYTES_MIN:
            return True
        units = _units(payload, nbytes)
        if self.units.issuperset(units):
            return True
        if self._written.issuperset(units):
            self.add(payload, nbytes)
            return True
        self._written.update(units)
        return False


def _units(payload: int, nbytes: int) -> range:
    return range(payload // UNIT_BYTES, (payload + nbytes - 1) // UNIT_BYTES + 1)
