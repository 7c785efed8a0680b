"""Constants for object headers (states, kinds, flags), task flags, and client slots.

`cext/shm_layout.h` defines these numbers, and tests/cext/test_headers.py compares them. Every check
of a header, such as whether it has a value, uses a set of states from this file.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hoplite_mp import _shm, _tasks

if TYPE_CHECKING:
    from typing import Final

# Slots of processes, and kinds of processes.
NODE_SLOT: Final = 0
DRIVER_SLOT: Final = 1  # the process that started the host
FIRST_SLOT: Final = 2  # the first worker
SLOTS_MAX: Final = 256  # number of slots on a host: for the node, programs and workers
CLIENT_DRIVER: Final = 1
CLIENT_WORKER: Final = 2

# Kinds of headers, and flags of headers.
KIND_PUT: Final = 1
KIND_TASK: Final = 2
KIND_OPERATION: Final = 3  # the result of a collective on objects, or of a Group call
KIND_FOREIGN: Final = 4  # another host's object
KIND_STREAM: Final = 5  # an element of a stream's linked list
KIND_LENT: Final = 6  # an array that other members may read until the end of a Group call
FLAG_INLINE: Final = 1  # the payload is in the task's record
FLAG_REFS: Final = 2  # the payload lists refs

# Flags of a task. The bits from CONCURRENCY_SHIFT on contain the maximum number of calls that a
# worker runs concurrently (the option concurrency=).
TASK_OWN_STACK: Final = 1  # a waiting worker must not run the task in place
TASK_COPY: Final = 2  # the task gets copies of refs' values
TASK_HERE: Final = 4  # the task stays on this host
TASK_ASYNC: Final[int] = _tasks.ASYNC_FLAG  # the task is a coroutine
TASK_STREAM: Final = 16  # the task's items are a stream
CONCURRENCY_SHIFT: Final = 16
CONCURRENCY_MAX: Final = 0xFFFF

STATE = {name: number for number, name in enumerate(_shm.STATES)}

# -- sets of states: unfinished objects ------------------------------------------------------------
UNCLAIMED = (STATE["WAITING"], STATE["QUEUED"])  # no process is computing the object
PENDING = (*UNCLAIMED, STATE["CLAIMED"])  # the object has no value yet
UNWRITTEN = (STATE["CLAIMED"], STATE["ABORTED"])  # the object's claimant has not finished it
UNFINISHED = (*UNCLAIMED, *UNWRITTEN)  # a waiting or running task

# -- objects with a payload ------------------------------------------------------------------------
AWAY = (STATE["SPILLING"], STATE["SPILLED"])  # a value that is not in memory
VALUED = (STATE["SEALED"], *AWAY)  # a value, wherever it is
STORED = (*VALUED, STATE["FAILED"])  # a value or an error

# -- objects without a payload ---------------------------------------------------------------------
CANCELLED = (STATE["CANCELLED"], STATE["ABORTED"])  # or deleted while running: see is_cancelled
UNWANTED = (*CANCELLED, STATE["DELETED"])  # cancelled or deleted by the program
GONE = (STATE["FREE"], STATE["FREED"])  # no process holds the object
DROPPED = (*UNWANTED, *GONE)  # the object has no payload, and never will
VALUELESS = (*DROPPED, STATE["FAILED"])  # the object has no payload, or only an error


def is_cancelled(client: _shm.Client, oid: int, state: int) -> bool:
    """Whether the task is cancelled. A task that was deleted while it was running is also ABORTED,
    but not cancelled."""
    return state == STATE["CANCELLED"] or (state == STATE["ABORTED"] and not client.flags(oid)[1])
