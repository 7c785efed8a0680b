"""Collector threads of simulated processes.

A process that ships has a second thread, which processes completions while nobody waits for them
(_client/collector.py). Without it a program that waits for something else never learns that a call
has ended: dependencies do not advance, and the lock of a dead process is never free again. In a run
that thread is a process of its own with the same pid, which gets the baton as any other.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hoplite_mp._client.collector import Collector

if TYPE_CHECKING:
    from collections.abc import Callable

    from hoplite_mp._client.submitter import Submitter
    from hoplite_mp._simulation.virtual.processes import VirtualProcess, VirtualProcesses

__all__ = ["VirtualCollector"]


class VirtualCollector(Collector):
    """The collector of one simulated process."""

    def __init__(
        self,
        submitter: Submitter,
        processes: VirtualProcesses,
        begin: Callable[..., VirtualProcess],
    ) -> None:
        """begin: starts a process on the same host."""
        super().__init__(submitter)
        self._processes = processes
        self._begin = begin
        self._main = processes.running
        self._process: VirtualProcess | None = None

    def start(self) -> None:
        if self._process is None and not self._closed and self._main is not None:
            self._process = self._begin(f"collector of {self._main.name}", self._turns)
            self._main.has_thread(self._process)

    def notice(self) -> None:
        self._woken.put(None)
        self._processes.wake_all(self)

    @property
    def _serves(self) -> bool:
        return self._process is not None and not self._closed

    @property
    def _is_here(self) -> bool:
        return self._process is self._processes.running

    def stop(self) -> None:
        self._closed = True
        if self._process is not None and self._process is not self._processes.running:
            self._process.kill()

    def _sleep(self, seconds: float | None) -> None:
        running = self._processes.running
        if self._woken.empty() and running is not None:
            running.wait(self, seconds)
        while not self._woken.empty():
            self._woken.get()
