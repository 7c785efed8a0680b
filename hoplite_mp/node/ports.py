"""Ports of the node: everything in it that reaches out of its process, as interfaces.

Why it exists: the same node serves a host, where time passes, descriptors become ready and threads
run, and a simulation, where a schedule decides all of that (FoundationDB and TigerBeetle test their
databases in this way). Rooms are given ports and never the clock or the system calls behind them.
It must never know: any room of the node.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from hoplite_mp.protocol.local import Reply, StartStandby
    from hoplite_mp.protocol.spawning import Spawn

__all__ = ["Disk", "Lines", "Loop", "Processes", "Stacks"]

T = TypeVar("T")


class Loop(Protocol):
    """Time, timers, descriptors and threads. All callbacks run in the loop's thread, one after the
    other."""

    def now(self) -> float:
        """Seconds of a clock that never goes back."""

    def now_ns(self) -> int:
        """The same clock, in nanoseconds."""

    def call_later(self, seconds: float, action: Callable[[], None]) -> None:
        """Calls `action` once, not before so many seconds have passed; 0.0: in the next turn."""

    def watch(
        self, fd: int, ready: Callable[[], None], *, read: bool = True, write: bool = False
    ) -> None:
        """Calls `ready` whenever the descriptor can be read, or written, or has hung up. A second
        call for the same descriptor changes what is watched."""

    def unwatch(self, fd: int) -> None:
        """No more calls for that descriptor, which may have been closed before."""

    def run_in_thread(self, work: Callable[[], T], done: Callable[[T], None]) -> None:
        """Calls `work` in a thread, and in the loop `done` with what it has returned. `work` must
        not raise."""


class Lines(Protocol):
    """What answers to processes of this host go over. A slot is that of a process."""

    @property
    def by_slot(self) -> Mapping[int, Any]:
        """The lines of those that can be told something."""

    def add(self, slot: int, line: Any) -> None:
        """The process in that slot asks over this line."""

    def forget(self, slot: int) -> None:
        """That process is gone, or asks nothing any more."""

    def reply(self, slot: int, reply: Reply) -> None:
        """Answers the process in that slot, if there is one."""

    def replier(self, slot: int) -> Callable[[Reply], None]:
        """For an answer that takes a while: it goes to the process that is there now, or to
        none."""


class Processes(Protocol):
    """Worker processes of this host."""

    def spawn(self, ask: Spawn, descriptors: list[int]) -> str:
        """Has a worker started that inherits these descriptors. Returns "", or why none can be
        started now."""

    def kill(self, pid: int) -> None:
        """Ends the process at once, if it is there."""

    def interrupt(self, pid: int) -> None:
        """Interrupts what the process runs, if it is there."""

    def start_standby(self, ask: StartStandby, listener: int) -> None:
        """Has the standby of a manager started, which listens at this descriptor."""

    def close(self, descriptors: list[int]) -> None:
        """No worker is to inherit these any more; the list is empty then."""


class Disk(Protocol):
    """Where bytes go that do not fit into memory. OSError: the disk did not take them."""

    @property
    def used(self) -> int:
        """Bytes that are there."""

    def write(self, data: memoryview) -> int | None:
        """The position of the bytes; None: there may be no more."""

    def read(self, position: int, into: memoryview) -> None:
        """Fills it with the bytes from there on."""

    def free(self, position: int) -> None:
        """What was written there is not needed any more."""


class Stacks(Protocol):
    """What the threads of this host's workers do."""

    def ask(self, done: Callable[[list[dict[str, Any]]], None]) -> None:
        """`done` gets what they have said, in words, one for each worker."""
