"""Promises: objects that stay pending until the process that made them fulfils them, or dies.

A process may have to wait for an action of another process at an unknown time. A promise is an
object that its maker has claimed. Any process on any host that holds it can wait for it as for
every object; when its maker or its maker's host dies, it fails like every object that was being
written. So a wait for a promise also ends with its maker's death. A process whose death others must
notice makes a promise that it never fulfils, its *life*.
"""

from __future__ import annotations

import itertools
import os
from typing import TYPE_CHECKING, Any

from hoplite_mp import _serialize
from hoplite_mp._common import locks
from hoplite_mp._common.object_states import KIND_PUT, STATE

if TYPE_CHECKING:
    from hoplite_mp._client.runtime import Runtime
    from hoplite_mp._common.ref import ObjectRef

__all__ = ["PROCESS_BYTES", "PromiseLife", "keep", "life_of", "promise"]

PROCESS_BYTES = 8
_lock = locks.lock("sync.first_life")


def promise(runtime: Runtime) -> ObjectRef[Any]:
    """A new promise of this process."""
    client = runtime.client
    oid = client.new(KIND_PUT, STATE["CLAIMED"], client.slot, 0)
    return runtime.memory.own_ref(oid)


def keep(runtime: Runtime, promised: ObjectRef[Any], value: Any) -> None:
    """Fulfils a promise of this process: seals it with a small value without refs."""
    oid = runtime.memory.local_id(promised)
    runtime.submitter.store_result(oid, _serialize.encode(value), False)


class PromiseLife:
    """The promise by which other processes notice the death of this one."""

    def __init__(self, runtime: Runtime) -> None:
        self.process = os.urandom(PROCESS_BYTES)
        self.promise = promise(runtime)
        self.turns = itertools.count(1)
        self.lock = locks.rlock("sync.life")
        self.known_to: set[bytes] = set()  # identities of the actors that have received it


def life_of(runtime: Runtime) -> PromiseLife:
    """The PromiseLife of this process."""
    life: PromiseLife | None = runtime.life
    if life is None:
        with _lock:
            life = runtime.life
            if life is None:
                life = runtime.life = PromiseLife(runtime)
    return life


def _forked() -> None:
    """Replaces the lock in a forked child, where a thread that does not exist may hold it."""
    global _lock
    _lock = locks.lock("sync.first_life")


os.register_at_fork(after_in_child=_forked)
