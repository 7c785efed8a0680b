"""What is done once before a worker's first task, in the template or in the worker.

It must never know: tasks.
"""

from __future__ import annotations

import faulthandler
import fcntl
import os
from typing import TYPE_CHECKING, Any

import numpy as np

from hoplite_mp import serial
from hoplite_mp.client.descriptors import lift
from hoplite_mp.protocol.local import STACKS_FILE, STACKS_SIGNAL

if TYPE_CHECKING:
    from hoplite_mp.client.runtime import Runtime
    from hoplite_mp.ref import ObjectRef

__all__ = ["offer_stacks", "warm_up", "warm_up_worker"]


def _no_refs(object_id: bytes) -> ObjectRef[Any]:
    raise LookupError("a warm-up has no refs")


def warm_up() -> None:
    """Runs in the template: what a first get would do for the first time, every worker inherits."""
    for kind in ("f4", "f8", "i8", "u1"):
        data = serial.encode(np.zeros(2, kind)).tobytes()
        for writable in (False, True):
            serial.decode(memoryview(data), make_ref=_no_refs, writable=writable)
    call = serial.encode_call((np.zeros(2), 1), {})
    serial.decode_call(memoryview(call.tobytes()), _no_refs, lambda ref: None)


def offer_stacks() -> None:
    """Who asks what hangs may see where this process's threads stand (node/stacks.py). The handler
    is C, and system calls that it interrupts go on."""
    fd = lift(os.memfd_create(STACKS_FILE, os.MFD_CLOEXEC))
    fcntl.fcntl(fd, fcntl.F_SETFL, os.O_APPEND)  # its reader empties it each time
    faulthandler.register(STACKS_SIGNAL, file=fd, all_threads=True)


def warm_up_worker(runtime: Runtime) -> None:
    """Reads an array once. A forked process copies each page of the interpreter that it uses for
    the first time: 0.1 ms here, which the first task's arguments would pay otherwise."""
    payload = serial.encode(np.zeros(1)).tobytes()
    serial.decode(memoryview(payload), make_ref=runtime.memory.make_ref, writable=False)
