"""Ports of the node: everything in it that reaches out of its process, as interfaces.

Why it exists: the same node serves a host, where time passes, descriptors become ready and threads
run, and a simulation, where a schedule decides all of that (FoundationDB and TigerBeetle test their
databases in this way). Rooms are given ports and never the clock or the system calls behind them.
It must never know: any room of the node.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from hoplite_mp.protocol.greetings import Introduction
    from hoplite_mp.protocol.local import Reply, StartStandby
    from hoplite_mp.protocol.spawning import Spawn
    from hoplite_mp.transport.addresses import Address, Endpoint
    from hoplite_mp.transport.conversation import Admission
    from hoplite_mp.transport.stream import Stream

__all__ = [
    "AttachedDrivers",
    "Calling",
    "Connections",
    "Disk",
    "DriverDoor",
    "Engine",
    "HasWorkers",
    "Key",
    "LentPort",
    "Lines",
    "Loop",
    "NodePorts",
    "Processes",
    "Stacks",
]

# Of a cell that other hosts may pull: operation (64 bits), epoch, stripe, part (32 bits each).
Key = tuple[int, int, int, int]

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

    def repeat_in_thread(
        self, interval_s: float, work: Callable[[], None], name: str
    ) -> Callable[[], None]:
        """Calls `work` at these intervals in a thread of its own, also while the loop is busy.
        Returns what ends that. `name`: of the thread."""


class Lines(Protocol):
    """What answers to processes of this host go over. A slot is that of a process."""

    @property
    def by_slot(self) -> Mapping[int, Any]:
        """The lines of those that can be told something."""

    def serve(self, above: Any) -> None:
        """Who takes what is asked over these lines; see `Above` in node/shell/client_lines.py."""

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

    def start_standby(self, ask: StartStandby, address: Address) -> None:
        """Has the standby of a manager started, which listens there. ConfigError: nobody can."""

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


class HasWorker(Protocol):
    """One worker process."""

    pid: int


class HasWorkers(Protocol):
    """Who knows all workers."""

    @property
    def all(self) -> Mapping[int, HasWorker]:
        """By slot."""


class Stacks(Protocol):
    """What the threads of this host's workers do."""

    def ask(self, done: Callable[[list[dict[str, Any]]], None]) -> None:
        """`done` gets what they have said, in words, one for each worker."""


class Calling(Protocol):
    """A call to another host while it is made."""

    @property
    def deadline(self) -> float:
        """When `turn` has something to do even if nothing comes."""

    @property
    def starved(self) -> bool:
        """Nobody could be called because this process has no descriptor or memory left."""

    def fileno(self) -> int:
        """The descriptor for the loop."""

    def turn(self, now: float) -> Admission | None:
        """Does what can be done now; the connection once there is one. HopliteError: nobody can be
        reached, or it is somebody else. OSError: this process has no resources for it."""

    def wait(self) -> Admission:
        """Blocks until there is a connection; errors as `turn`."""


class LentPort(Protocol):
    """A port of this host that leads to another one."""

    @property
    def port(self) -> int:
        """Its number."""

    def close(self) -> None:
        """Ends it, and all connections over it."""


class Connections(Protocol):
    """Connections with processes of other hosts, after both sides have proved who they are."""

    def call(
        self,
        endpoints: Sequence[Endpoint],
        *,
        role: str,
        mine: Introduction,
        timeout_s: float,
        cluster: bytes = b"",
        host: int | None = None,
        rounds_max: int = 0,
    ) -> Calling:
        """Begins a call; the arguments are those of transport/caller.py. OSError: this process has
        no descriptor left."""

    def listen(
        self,
        cluster: bytes,
        certificate: bytes,
        mine: Introduction,
        roles: Mapping[str, Callable[[Admission], None]],
    ) -> str:
        """Lets other nodes in; returns the address, without a port. `roles`: what takes a
        connection that is made for that."""

    def is_reached(self, endpoints: Sequence[Endpoint]) -> bool:
        """Does one of these answer? Blocks: to be called in a thread."""

    def lend(self, endpoints: Sequence[Endpoint], may: Callable[[str], bool]) -> LentPort:
        """A port of this host that leads to one of these. `may`: whether callers of that address
        are let through; asked in threads. ConfigError, OSError, RuntimeError: none can be lent."""

    def own_addresses(self) -> Collection[str]:
        """All addresses of this host, without ports."""


class AttachedDrivers(Protocol):
    """Programs of this host that use its node: who lets them in tells these."""

    def register(self) -> tuple[int, int, int, str]:
        """(slot, its generation, the driver's name, ""), or (-1, 0, 0, why there is none)."""

    def unregister(self, slot: int) -> None:
        """It could not be told of its slot."""

    def came(
        self,
        slot: int,
        name: int,
        pid: int,
        line: Any,
        output: Any,
        close: Callable[[], None],
    ) -> None:
        """It has its slot. line: over which it asks. output: a socket for the lines of its tasks.
        close: ends what it was reached by."""

    def gone(self, slot: int) -> None:
        """It reads nothing any more."""


class DriverDoor(Protocol):
    """How programs of this host find its node."""

    def open(self, drivers: AttachedDrivers, cluster: bytes, mine: Introduction) -> None:
        """Lets drivers find this node, as soon as the name of its cluster is free here."""

    def close(self) -> None:
        """The node ends: nobody is to find it any more."""


class Engine(Protocol):
    """What moves bulk bytes and reduces them on the way: see hoplite_mp/_engine.pyi."""

    def fileno(self) -> int: ...
    def connect(self, fd: int, peer: int) -> int: ...
    def drive(self, peer: int) -> Any: ...
    def disconnect(self, link: int) -> None: ...
    def counters(self, link: int) -> tuple[int, int, int, int]: ...
    def cell(
        self,
        key: Key | None,
        buffer: Any,
        offset: int = 0,
        nbytes: int | None = None,
        filled: bool | int = False,
    ) -> int: ...
    def watermark(self, cell: int) -> int: ...
    def advance(self, cell: int, watermark: int) -> None: ...
    def pull(self, cell: int, link: int, key: Key | None = None) -> None: ...
    def fold(
        self,
        cell: int,
        sources: Sequence[int],
        op: str,
        dtype: str,
        divisor: int = 0,
        accumulated: Collection[int] = (),
        final: bool = True,
    ) -> None: ...
    def close(self, cell: int) -> None: ...
    def events(self) -> list[tuple[Any, ...]]: ...
    def stop(self) -> None: ...


@dataclass(frozen=True)
class NodePorts:
    """All of one node together. `manager`: the connection to a manager of this host; None: it is on
    another one. The last three are needed on a LAN alone."""

    loop: Loop
    lines: Lines
    processes: Processes
    stacks: Callable[[HasWorkers], Stacks]
    disk: Disk
    hostname: str
    manager: Stream | None = None
    connections: Connections | None = None
    engine: Engine | None = None
    driver_door: DriverDoor | None = None
