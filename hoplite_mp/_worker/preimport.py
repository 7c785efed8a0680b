"""Does one-time work before a worker's first task, in the template or in the worker."""

from __future__ import annotations

import faulthandler
import fcntl
import gc
import os
from typing import TYPE_CHECKING, Any

import numpy as np

from hoplite_mp import _serialize
from hoplite_mp._client.descriptors import lift
from hoplite_mp._protocol.local import STACKS_FILE, STACKS_SIGNAL

if TYPE_CHECKING:
    from hoplite_mp._client.runtime import Runtime
    from hoplite_mp._common.ref import ObjectRef

__all__ = ["collect_again", "offer_stacks", "put_off_collections", "warm_up", "warm_up_worker"]

# The garbage collector's threshold while collection is postponed. No program would choose this
# number, so a threshold that an imported module has set meanwhile is recognised.
OBJECTS_MAX = 1 << 30


def _no_refs(object_id: bytes) -> ObjectRef[Any]:
    raise LookupError("a warm-up has no refs")


def warm_up() -> None:
    """Does the one-time work for a first `get`. Called in the template, so that all workers inherit
    the result."""
    for kind in ("f4", "f8", "i8", "u1"):
        data = _serialize.encode(np.zeros(2, kind)).tobytes()
        for writable in (False, True):
            _serialize.decode(memoryview(data), make_ref=_no_refs, writable=writable)
    call = _serialize.encode_call((np.zeros(2), 1), {})
    _serialize.decode_call(memoryview(call.tobytes()), _no_refs, lambda ref: None)


def put_off_collections() -> None:
    """Postpones garbage collection until `collect_again`. The first task's imports create many
    objects and hardly any garbage. Collections would take an eighth of the imports' time."""
    global _thresholds
    _thresholds = gc.get_threshold()
    gc.set_threshold(OBJECTS_MAX, *_thresholds[1:])


def collect_again() -> None:
    """Restores the collector's threshold, unless it was changed meanwhile."""
    if gc.get_threshold()[0] == OBJECTS_MAX:
        gc.set_threshold(*_thresholds)


_thresholds: tuple[int, int, int] = gc.get_threshold()


def offer_stacks() -> None:
    """Lets the node read the stacks of this process's threads (_node/io/processes.py). The signal
    handler is written in C, and interrupted system calls are restarted."""
    fd = lift(os.memfd_create(STACKS_FILE, os.MFD_CLOEXEC))
    fcntl.fcntl(fd, fcntl.F_SETFL, os.O_APPEND)  # the reader truncates the file each time
    faulthandler.register(STACKS_SIGNAL, file=fd, all_threads=True)


def warm_up_worker(runtime: Runtime) -> None:
    """Reads an array once. A forked process copies each page of the interpreter when it first
    writes to the page. Without this warm-up, the copies would take 0.1 ms of the first task's
    time."""
    payload = _serialize.encode(np.zeros(1)).tobytes()
    _serialize.decode(memoryview(payload), make_ref=runtime.memory.make_ref, writable=False)
