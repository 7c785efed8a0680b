"""The error of a task in a store that has no room for it.

Why it exists: whoever waits for a task must learn that it has failed; a few words always fit.
It must never know: tasks, the store.
"""

from __future__ import annotations

from hoplite_mp import serial
from hoplite_mp.errors import HopliteError

__all__ = ["last_resort"]

ERROR_CHARS_MAX = 40  # which must fit into a record
NO_ROOM_EVEN_FOR_WORDS = "no room, even for details; raise memory="


def last_resort(error: BaseException) -> serial.Encoded:
    """An error for which there was no room, in a few words, which fit into the record. One of this
    library keeps its type: its name is what `except` clauses look for."""
    kind = type(error)
    if isinstance(error, HopliteError) and kind.__module__ == HopliteError.__module__:
        return serial.encode_error(kind(NO_ROOM_EVEN_FOR_WORDS), "")
    brief = f"its error found no room: {kind.__name__}"[:ERROR_CHARS_MAX]
    return serial.encode_error(HopliteError(brief), "")
