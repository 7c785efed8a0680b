"""What is done once before a worker's first task, in the template or in the worker.

It must never know: tasks.
"""

from __future__ import annotations

import faulthandler
import fcntl
import gc
import os
from typing import TYPE_CHECKING, Any

import numpy as np

from hoplite_mp import serial
from hoplite_mp.client.descriptors import lift
from hoplite_mp.protocol.local import STACKS_FILE, STACKS_SIGNAL

if TYPE_CHECKING:
    from hoplite_mp.client.runtime import Runtime
    from hoplite_mp.ref import ObjectRef

__all__ = ["collect_again", "offer_stacks", "put_off_collections", "warm_up", "warm_up_worker"]

# Objects after which garbage would be looked for. No program would choose it, so what a module that
# is imported meanwhile has chosen is told apart from it.
OBJECTS_MAX = 1 << 30


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


def put_off_collections() -> None:
    """Until collect_again(). The first task imports what its function and arguments name: that
    makes many objects, next to none of them garbage, and to look for it takes an eighth of the
    time."""
    global _thresholds
    _thresholds = gc.get_threshold()
    gc.set_threshold(OBJECTS_MAX, *_thresholds[1:])


def collect_again() -> None:
    """The garbage collector works as it did, or as was chosen meanwhile."""
    if gc.get_threshold()[0] == OBJECTS_MAX:
        gc.set_threshold(*_thresholds)


_thresholds: tuple[int, int, int] = gc.get_threshold()


def offer_stacks() -> None:
    """Who asks what hangs may see where this process's threads stand (node/shell/stacks.py). The
    handler is C, and system calls that it interrupts go on."""
    fd = lift(os.memfd_create(STACKS_FILE, os.MFD_CLOEXEC))
    fcntl.fcntl(fd, fcntl.F_SETFL, os.O_APPEND)  # its reader empties it each time
    faulthandler.register(STACKS_SIGNAL, file=fd, all_threads=True)


def warm_up_worker(runtime: Runtime) -> None:
    """Reads an array once. A forked process copies each page of the interpreter that it uses for
    the first time: 0.1 ms here, which the first task's arguments would pay otherwise."""
    payload = serial.encode(np.zeros(1)).tobytes()
    serial.decode(memoryview(payload), make_ref=runtime.memory.make_ref, writable=False)
