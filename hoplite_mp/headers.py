"""The words of an object's header: its states, its kinds, its flags, the slots that are fixed.

Why it exists: `cext/shm_layout.h` defines these numbers, and Python code compares them in many
rooms. A question about a header ("has it a value?") has one answer, so the sets of states that
answer such questions have a name each, here and nowhere else. tests/cext/test_headers.py compares
every number with the C header.
It must never know: who asks, what an object is used for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hoplite_mp import _shm

if TYPE_CHECKING:
    from typing import Final

# Slots of processes, and kinds of these.
NODE_SLOT: Final = 0
DRIVER_SLOT: Final = 1  # the process that has started the host
FIRST_SLOT: Final = 2  # of its workers
CLIENT_DRIVER: Final = 1
CLIENT_WORKER: Final = 2

# Kinds of headers, and flags of these.
KIND_PUT: Final = 1
KIND_TASK: Final = 2
KIND_OPERATION: Final = 3  # the result of a collective on objects, or of a call of a Group
KIND_FOREIGN: Final = 4  # it stands for an object of another host
KIND_STREAM: Final = 5  # a link of a stream
FLAG_INLINE: Final = 1  # the payload lies in the task's record
FLAG_REFS: Final = 2  # the payload lists refs

STATE = {name: number for number, name in enumerate(_shm.STATES)}

# -- sets of states: of what is not done -----------------------------------------------------------
UNCLAIMED = (STATE["WAITING"], STATE["QUEUED"])  # nobody has begun to make it
PENDING = (*UNCLAIMED, STATE["CLAIMED"])  # its value is to come
UNWRITTEN = (STATE["CLAIMED"], STATE["ABORTED"])  # its claimant has not finished it
UNFINISHED = (*UNCLAIMED, *UNWRITTEN)  # a task that waits, or that somebody runs

# -- of what has a payload -------------------------------------------------------------------------
AWAY = (STATE["SPILLING"], STATE["SPILLED"])  # a value, but not in memory: to be asked for
VALUED = (STATE["SEALED"], *AWAY)  # a value, wherever it is
STORED = (*VALUED, STATE["FAILED"])  # a value or an error

# -- of what has none ------------------------------------------------------------------------------
CANCELLED = (STATE["CANCELLED"], STATE["ABORTED"])  # or deleted while it ran: see is_cancelled
UNWANTED = (*CANCELLED, STATE["DELETED"])  # somebody has said that nobody needs it
GONE = (STATE["FREE"], STATE["FREED"])  # nobody holds it
DROPPED = (*UNWANTED, *GONE)  # there is no payload, and there will be none
VALUELESS = (*DROPPED, STATE["FAILED"])  # at most an error


def is_cancelled(client: _shm.Client, oid: int, state: int) -> bool:
    """Is it cancelled? What was deleted while it ran is ABORTED, too, but is not."""
    return state == STATE["CANCELLED"] or (state == STATE["ABORTED"] and not client.flags(oid)[1])
