"""The error of a task when the store has no room for the error itself.

Why it exists: whoever waits for a task must learn that it failed, and a short text always fits into
the task's record.
It must never know: tasks, the store.
"""

from __future__ import annotations

from hoplite_mp import _serialize
from hoplite_mp.errors import HopliteError

__all__ = ["last_resort"]

ERROR_CHARS_MAX = 40  # so that it fits into a record
NO_ROOM_EVEN_FOR_WORDS = "no room, even for details; raise memory="


def last_resort(error: BaseException) -> _serialize.Encoded:
    """Describes an error that found no room in a text that fits into the record. An error of this
    library keeps its type, because `except` clauses look for that."""
    kind = type(error)
    if isinstance(error, HopliteError) and kind.__module__ == HopliteError.__module__:
        return _serialize.encode_error(kind(NO_ROOM_EVEN_FOR_WORDS), "")
    brief = f"its error found no room: {kind.__name__}"[:ERROR_CHARS_MAX]
    return _serialize.encode_error(HopliteError(brief), "")
