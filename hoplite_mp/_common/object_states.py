"""The numbers in an object's header (states, kinds, flags), flags of tasks, and the fixed slots.

`cext/shm_layout.h` defines these numbers, and Python code in many packages compares them. Each test
of a header, such as whether it has a value, uses a set of states that is named here and nowhere
else. tests/cext/test_headers.py compares every number with the C header.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hoplite_mp import _shm, _tasks

if TYPE_CHECKING:
    from typing import Final

# Slots of processes, and kinds of processes.
NODE_SLOT: Final = 0
DRIVER_SLOT: Final = 1  # the process that has started the host
FIRST_SLOT: Final = 2  # of its first worker
SLOTS_MAX: Final = 256  # of a host: the node, programs and workers together
CLIENT_DRIVER: Final = 1
CLIENT_WORKER: Final = 2

# Kinds of headers, and flags of headers.
KIND_PUT: Final = 1
KIND_TASK: Final = 2
KIND_OPERATION: Final = 3  # the result of a collective on objects, or of a call of a Group
KIND_FOREIGN: Final = 4  # it stands for an object of another host
KIND_STREAM: Final = 5  # a link of a stream
KIND_LENT: Final = 6  # an array that other members may read until a Group call is over
FLAG_INLINE: Final = 1  # the payload is in the task's record
FLAG_REFS: Final = 2  # the payload lists refs

# Flags of a task. From CONCURRENCY_SHIFT up: how many such tasks one worker may run at a time.
TASK_OWN_STACK: Final = 1  # no waiting worker runs it in place
TASK_COPY: Final = 2  # it gets copies of refs' values
TASK_HERE: Final = 4  # it stays on this host
TASK_ASYNC: Final[int] = _tasks.ASYNC_FLAG  # it is a coroutine
TASK_STREAM: Final = 16  # its items are a stream
CONCURRENCY_SHIFT: Final = 16
CONCURRENCY_MAX: Final = 0xFFFF

STATE = {name: number for number, name in enumerate(_shm.STATES)}

# -- sets of states: unfinished objects ------------------------------------------------------------
UNCLAIMED = (STATE["WAITING"], STATE["QUEUED"])  # no process has begun to compute it
PENDING = (*UNCLAIMED, STATE["CLAIMED"])  # its value is still to come
UNWRITTEN = (STATE["CLAIMED"], STATE["ABORTED"])  # its claimant has not finished it
UNFINISHED = (*UNCLAIMED, *UNWRITTEN)  # a task that waits, or that a process runs

# -- objects with a payload ------------------------------------------------------------------------
AWAY = (STATE["SPILLING"], STATE["SPILLED"])  # a value, but not in memory: it has to be requested
VALUED = (STATE["SEALED"], *AWAY)  # a value, wherever it is
STORED = (*VALUED, STATE["FAILED"])  # a value or an error

# -- objects without a payload ---------------------------------------------------------------------
CANCELLED = (STATE["CANCELLED"], STATE["ABORTED"])  # or deleted while it ran: see is_cancelled
UNWANTED = (*CANCELLED, STATE["DELETED"])  # the program has declared that it is not needed
GONE = (STATE["FREE"], STATE["FREED"])  # no process holds it
DROPPED = (*UNWANTED, *GONE)  # there is no payload, and there will be none
VALUELESS = (*DROPPED, STATE["FAILED"])  # at most an error


def is_cancelled(client: _shm.Client, oid: int, state: int) -> bool:
    """Whether the task is cancelled. A task that was deleted while it ran is ABORTED, too, but not
    cancelled."""
    return state == STATE["CANCELLED"] or (state == STATE["ABORTED"] and not client.flags(oid)[1])
