"""Promises: objects that are pending until the process that has made them keeps them, or dies.

Why it exists: one process waits for something that another one will do at a time that nobody knows.
A promise is an object that its maker has claimed. Whoever holds it, on any host, waits for it as
for every object; when its maker dies, or the host of its maker, it fails as every object does that
was being written. So the death of a process is learned by whoever waits for a promise of it: a
process that wants its own death to be known makes one that it never keeps, its *life*.
It must never know: what is promised, who waits.
"""

from __future__ import annotations

import itertools
import os
import threading
from typing import TYPE_CHECKING, Any

from hoplite_mp import serial
from hoplite_mp.headers import KIND_PUT, STATE

if TYPE_CHECKING:
    from hoplite_mp.client.runtime import Runtime
    from hoplite_mp.ref import ObjectRef

__all__ = ["PROCESS_BYTES", "Life", "keep", "life_of", "promise"]

PROCESS_BYTES = 8
_lock = threading.Lock()


def promise(runtime: Runtime) -> ObjectRef[Any]:
    """A new one of this process."""
    client = runtime.client
    oid = client.new(KIND_PUT, STATE["CLAIMED"], client.slot, 0)
    return runtime.memory.own_ref(oid)


def keep(runtime: Runtime, promised: ObjectRef[Any], value: Any) -> None:
    """Whoever waits for that promise of this process goes on, with a small value without refs."""
    oid = runtime.memory.local_id(promised)
    runtime.submitter.store_result(oid, serial.encode(value), False)


class Life:
    """What others need to learn of the death of this process."""

    def __init__(self, runtime: Runtime) -> None:
        self.process = os.urandom(PROCESS_BYTES)
        self.promise = promise(runtime)
        self.turns = itertools.count(1)
        self.lock = threading.RLock()
        self.known_to: set[bytes] = set()  # identities of the actors that have been told


def life_of(runtime: Runtime) -> Life:
    """That of this process."""
    life: Life | None = runtime.life
    if life is None:
        with _lock:
            life = runtime.life
            if life is None:
                life = runtime.life = Life(runtime)
    return life


def _forked() -> None:
    """A child in which user code opens a cluster of its own: the lock may have been held."""
    global _lock
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_forked)
