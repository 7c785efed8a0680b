"""Locks that the threads of a simulated process share.

A thread that finds a lock taken must give the baton back, or its owner could never release it. So
in a run whose processes have several threads, `locks` makes these locks for client code.
"""

from __future__ import annotations

import contextlib
import sys
from typing import TYPE_CHECKING, Any

from hoplite_mp._common import locks

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hoplite_mp._simulation.virtual.processes import VirtualProcesses

__all__ = ["VirtualLock", "virtual_locks"]

# Modules of simulated processes whose locks both threads take.
CLIENT = (
    "hoplite_mp._client.", "hoplite_mp._sync.", "hoplite_mp._worker.",
    "hoplite_mp._group.member_lifecycle", "hoplite_mp._group.inbox", "hoplite_mp._group.messages",
    "hoplite_mp._api.cluster", "hoplite_mp._api.pools",
)  # fmt: skip


class VirtualLock:
    """A lock, reentrant or not. Threads that do not belong to the run must not share one."""

    def __init__(self, processes: VirtualProcesses, reentrant: bool) -> None:
        self._processes = processes
        self._reentrant = reentrant
        self._owner: object = None
        self._depth = 0

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        running = self._processes.running
        mine: object = running if running is not None else self._processes
        while self._depth and not (self._reentrant and self._owner is mine):
            if self._is_left():
                break
            if not blocking:
                return False
            assert running is not None, "a finalizer has found a lock taken"
            if not running.wait(self, None if timeout < 0 else timeout) and timeout >= 0:
                return False
        self._owner = mine
        self._depth += 1
        return True

    def _is_left(self) -> bool:
        """Whether its owner was killed. Then only finalizers of that process's objects come here,
        which nobody would run in a process that is dead."""
        return self._processes.over or not getattr(self._owner, "alive", True)

    def release(self) -> None:
        self._depth -= 1
        if not self._depth:
            self._owner = None
            self._processes.wake_all(self)

    def locked(self) -> bool:
        return self._depth > 0

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


class _Locks:
    """Stands for the module `locks`, and makes locks of the run."""

    def __init__(self, processes: VirtualProcesses) -> None:
        self._processes = processes

    def lock(self, name: str) -> VirtualLock:
        return VirtualLock(self._processes, False)

    def rlock(self, name: str) -> VirtualLock:
        return VirtualLock(self._processes, True)

    def __getattr__(self, name: str) -> Any:
        return getattr(locks, name)


@contextlib.contextmanager
def virtual_locks(processes: VirtualProcesses) -> Iterator[None]:
    """Surrounds a run in which processes have collectors: locks that client code makes with
    `locks` meanwhile are locks of the run."""
    ours = [
        module
        for name, module in list(sys.modules.items())
        if name.startswith(CLIENT) and getattr(module, "locks", None) is locks
    ]
    for module in ours:
        module.locks = _Locks(processes)  # type: ignore[attr-defined]
    try:
        yield
    finally:
        for module in ours:
            module.locks = locks  # type: ignore[attr-defined]
