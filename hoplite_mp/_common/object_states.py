"""Constants of object headers (states, kinds, flags), flags of tasks, and client slots.

`cext/shm_layout.h` defines these numbers; tests/cext/test_headers.py compares them. Every test of a
header, such as whether it has a value, uses a set of states from this file.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hoplite_mp import _shm, _tasks

if TYPE_CHECKING:
    from typing import Final

# Slots of processes, and kinds of processes.
NODE_SLOT: Final = 0
DRIVER_SLOT: Final = 1  # the process that started the host
FIRST_SLOT: Final = 2  # of the first worker
SLOTS_MAX: Final = 256  # of a host: node, programs and workers
CLIENT_DRIVER: Final = 1
CLIENT_WORKER: Final = 2

# Kinds of headers, and flags of headers.
KIND_PUT: Final = 1
KIND_TASK: Final = 2
KIND_OPERATION: Final = 3  # the result of a collective on objects, or of a call of a Group
KIND_FOREIGN: Final = 4  # an object of another host
KIND_STREAM: Final = 5  # a link of a stream
KIND_LENT: Final = 6  # an array that other members may read until the end of a Group call
FLAG_INLINE: Final = 1  # the payload is in the task's record
FLAG_REFS: Final = 2  # the payload lists refs

# Flags of a task. Bits from CONCURRENCY_SHIFT up: most such tasks that a worker runs concurrently.
TASK_OWN_STACK: Final = 1  # no waiting worker runs it in place
TASK_COPY: Final = 2  # it gets copies of refs' values
TASK_HERE: Final = 4  # it stays on this host
TASK_ASYNC: Final[int] = _tasks.ASYNC_FLAG  # it is a coroutine
TASK_STREAM: Final = 16  # its items are a stream
CONCURRENCY_SHIFT: Final = 16
CONCURRENCY_MAX: Final = 0xFFFF

STATE = {name: number for number, name in enumerate(_shm.STATES)}

# -- sets of states: unfinished objects ------------------------------------------------------------
UNCLAIMED = (STATE["WAITING"], STATE["QUEUED"])  # no process computes it yet
PENDING = (*UNCLAIMED, STATE["CLAIMED"])  # has no value yet
UNWRITTEN = (STATE["CLAIMED"], STATE["ABORTED"])  # its claimant has not finished it
UNFINISHED = (*UNCLAIMED, *UNWRITTEN)  # a waiting or running task

# -- objects with a payload ------------------------------------------------------------------------
AWAY = (STATE["SPILLING"], STATE["SPILLED"])  # a value that is not in memory
VALUED = (STATE["SEALED"], *AWAY)  # a value, wherever it is
STORED = (*VALUED, STATE["FAILED"])  # a value or an error

# -- objects without a payload ---------------------------------------------------------------------
CANCELLED = (STATE["CANCELLED"], STATE["ABORTED"])  # or deleted while it ran: see is_cancelled
UNWANTED = (*CANCELLED, STATE["DELETED"])  # cancelled or deleted by the program
GONE = (STATE["FREE"], STATE["FREED"])  # no process holds it
DROPPED = (*UNWANTED, *GONE)  # has no payload, and never will
VALUELESS = (*DROPPED, STATE["FAILED"])  # at most an error


def is_cancelled(client: _shm.Client, oid: int, state: int) -> bool:
    """Whether the task is cancelled. A task that was deleted while it ran is also ABORTED, but not
    cancelled."""
    return state == STATE["CANCELLED"] or (state == STATE["ABORTED"] and not client.flags(oid)[1])
