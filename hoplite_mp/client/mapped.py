"""Which parts of the store this process has mapped, and which it has written through the file.

Why it exists: a large write through a mapping costs one copy, but the first one pays for the
mapping's pages. So a place is written through the file once, and through a mapping from then on.
It must never know: what is written.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hoplite_mp import _shm

__all__ = ["POPULATE_BYTES_MIN", "Mapped"]

POPULATE_BYTES_MIN = 1 << 20  # smaller payloads are written through a mapping always
UNIT_BYTES = 1 << 20


class Mapped:
    """Of one process, in units of a MiB."""

    def __init__(self, client: _shm.Client) -> None:
        self._client = client
        self.units: set[int] = set()
        self._written: set[int] = set()

    def add(self, payload: int, nbytes: int) -> None:
        """Maps these bytes of the store, unless they are."""
        units = _units(payload, nbytes)
        if not self.units.issuperset(units):
            self._client.populate(payload, nbytes)
            self.units.update(units)

    def serves(self, payload: int, nbytes: int) -> bool:
        """Whether a write there is to go through the mapping, which is made if it pays for itself
        from here on."""
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
