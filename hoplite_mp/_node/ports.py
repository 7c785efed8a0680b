"""Ports of the node: interfaces for all its interactions with the outside world.

The same node runs on a real host, with a clock, descriptors and threads, and in a simulation, where
a schedule replaces all of these (as in the tests of FoundationDB and TigerBeetle). Components use
only ports, never the clock or the operating system directly.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from hoplite_mp._protocol.greetings import Introduction
    from hoplite_mp._protocol.local import Reply, StartStandby
    from hoplite_mp._protocol.spawning import Spawn
    from hoplite_mp._transport.addresses import Address, Endpoint
    from hoplite_mp._transport.conversation import Admission
    from hoplite_mp._transport.stream import ByteStream

__all__ = [
    "AttachedDrivers",
    "ClientSocketsPort",
    "Connections",
    "Disk",
    "DriverListenerPort",
    "EnginePort",
    "HasWorkers",
    "Key",
    "LentPort",
    "LoopPort",
    "NodePorts",
    "OutgoingConnection",
    "ProcessesPort",
    "StacksPort",
]

# Identifies a cell that other hosts may pull: operation (64 bits), epoch, stripe, part (32 bits
# each).
Key = tuple[int, int, int, int]

T = TypeVar("T")


class LoopPort(Protocol):
    """Time, timers, descriptors and threads. All callbacks run in the loop's thread, one at a
    time."""

    def now(self) -> float:
        """The time of a monotonic clock, in seconds."""

    def now_ns(self) -> int:
        """The same clock, in nanoseconds."""

    def call_later(self, seconds: float, action: Callable[[], None]) -> None:
        """Calls `action` once, after at least `seconds`. If that is 0.0, calls it in the next
        turn."""

    def watch(
        self, fd: int, ready: Callable[[], None], *, read: bool = True, write: bool = False
    ) -> None:
        """Calls `ready` whenever the descriptor is readable or writable, as requested, or is hung
        up. A second call for the same descriptor replaces the first."""

    def unwatch(self, fd: int) -> None:
        """Stops watching a descriptor, which may already be closed."""

    def run_in_thread(self, work: Callable[[], T], done: Callable[[T], None]) -> None:
        """Calls `work` in a thread, then `done` with its result in the loop. `work` must not
        raise."""

    def repeat_in_thread(
        self, interval_s: float, work: Callable[[], None], name: str
    ) -> Callable[[], None]:
        """Calls `work` at this interval in a separate thread, even while the loop is busy. Returns
        a function that stops the thread. name: the thread's name."""


class ClientSocketsPort(Protocol):
    """The connections to the processes on this host, by client slot."""

    @property
    def by_slot(self) -> Mapping[int, Any]:
        """The open connections."""

    def serve(self, events: Any) -> None:
        """Sets the handler of the requests; see `ClientSocketsEvents`."""

    def add(self, slot: int, line: Any) -> None:
        """Starts to read requests from the process in the slot over this connection."""

    def forget(self, slot: int) -> None:
        """Closes the connection to a process that has ended or sends no more requests."""

    def reply(self, slot: int, reply: Reply) -> None:
        """Replies to the process in the slot, if there is one."""

    def replier(self, slot: int) -> Callable[[Reply], None]:
        """Returns a function that later sends a reply to the slot's present process, or drops the
        reply if that process has ended."""


class ProcessesPort(Protocol):
    """Starts and stops worker processes on this host."""

    def spawn(self, ask: Spawn, descriptors: list[int]) -> str:
        """Asks the supervisor for a worker that inherits these descriptors. Returns "", or the
        reason why no worker can start now."""

    def kill(self, pid: int) -> None:
        """Kills the process, if it still exists."""

    def interrupt(self, pid: int) -> None:
        """Interrupts the task of the process, if the process still exists."""

    def start_standby(self, ask: StartStandby, address: Address) -> None:
        """Asks the supervisor for a standby manager that listens at `address`. Raises ConfigError
        if the standby cannot be started on this host."""

    def close(self, descriptors: list[int]) -> None:
        """Closes descriptors that no further worker will inherit, and empties the list."""


class Disk(Protocol):
    """The spill file, for objects that do not fit in memory. Its methods raise OSError when the
    disk fails."""

    @property
    def used(self) -> int:
        """Bytes in the file."""

    def write(self, data: memoryview) -> int | None:
        """Writes the bytes and returns their position, or None if the file's size limit is
        reached."""

    def read(self, position: int, into: memoryview) -> None:
        """Fills `into` with the bytes that start at the position."""

    def free(self, position: int) -> None:
        """Frees the bytes written at the position."""


class HasWorker(Protocol):
    """One worker process."""

    pid: int


class HasWorkers(Protocol):
    """The component that knows all workers on this host."""

    @property
    def all(self) -> Mapping[int, HasWorker]:
        """The workers, by slot."""


class StacksPort(Protocol):
    """Stack traces of this host's workers."""

    def ask(self, done: Callable[[list[dict[str, Any]]], None]) -> None:
        """Collects the stacks of all threads as text. Calls `done` with one entry for each
        worker."""


class OutgoingConnection(Protocol):
    """An outgoing connection while it is being established."""

    @property
    def deadline(self) -> float:
        """The latest time of the next `turn`, even if the descriptor is not ready."""

    @property
    def starved(self) -> bool:
        """Whether the connection failed because this process has run out of descriptors or
        memory."""

    def fileno(self) -> int:
        """The descriptor for the loop."""

    def turn(self, now: float) -> Admission | None:
        """Makes all progress possible without blocking. Returns the established connection, or
        None. Raises HopliteError if the host cannot be reached or another host has answered, and
        OSError if this process has run out of resources."""

    def wait(self) -> Admission:
        """Blocks until the connection is established. Raises the same errors as `turn`."""


class LentPort(Protocol):
    """A TCP port on this host that forwards connections to another host."""

    @property
    def port(self) -> int:
        """The port number."""

    def close(self) -> None:
        """Closes the port and all connections over it."""


class Connections(Protocol):
    """Connections to processes on other hosts. The two sides first authenticate each other."""

    def call(
        self,
        endpoints: Sequence[Endpoint],
        *,
        role: str,
        mine: Introduction,
        timeout_s: float,
        cluster: bytes = b"",
        host_id: int | None = None,
        rounds_max: int = 0,
    ) -> OutgoingConnection:
        """Starts to connect. The arguments are those of _transport/caller.py. Raises OSError if
        this process has run out of descriptors."""

    def listen(
        self,
        cluster: bytes,
        certificate: bytes,
        mine: Introduction,
        roles: Mapping[str, Callable[[Admission], None]],
    ) -> str:
        """Accepts connections from other nodes. Returns the address, without a port. roles: the
        handlers of new connections, by the role that the caller requests."""

    def is_reached(self, endpoints: Sequence[Endpoint]) -> bool:
        """Whether any of the endpoints answers. Blocks: call it in a thread."""

    def lend(self, endpoints: Sequence[Endpoint], may: Callable[[str], bool]) -> LentPort:
        """Opens a port on this host that forwards to one of the endpoints. may: returns whether to
        accept a caller from the given address; called in other threads. Raises ConfigError, OSError
        or RuntimeError if no port can be opened."""

    def own_addresses(self) -> Collection[str]:
        """All addresses of this host, without ports."""


class AttachedDrivers(Protocol):
    """Programs that attach to the node of their host. DriverListenerPort admits them and calls
    these methods."""

    def register(self) -> tuple[int, int, int, str]:
        """Reserves a slot. Returns (slot, its generation, the driver's name, ""), or (-1, 0, 0,
        reason)."""

    def unregister(self, slot: int) -> None:
        """Frees the slot of a driver to which the slot could not be sent."""

    def attached(
        self,
        slot: int,
        name: int,
        pid: int,
        line: Any,
        output: Any,
        close: Callable[[], None],
    ) -> None:
        """Adds a driver that has received its slot. line: its request socket. output: a socket for
        the output of its tasks. close: closes the connection over which it was admitted."""

    def detached(self, slot: int) -> None:
        """Removes a driver that has exited or has unmapped the memory."""


class DriverListenerPort(Protocol):
    """Makes the node discoverable for programs on this host (_node/io/driver_listener.py)."""

    def open(self, drivers: AttachedDrivers, cluster: bytes, mine: Introduction) -> None:
        """Lets drivers find this node once no other node on this host uses the cluster's name."""

    def close(self) -> None:
        """Closes the listener when the node stops."""


class EnginePort(Protocol):
    """Moves bulk bytes between hosts and reduces them on the way; see hoplite_mp/_engine.pyi."""

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
    def hold(self) -> None: ...
    def release(self) -> None: ...
    def together(
        self, cells: Collection[int], vote: tuple[int, int, int] | None = None
    ) -> None: ...
    def events(self) -> list[tuple[Any, ...]]: ...
    def coll_add(self, generation: int, size: int, node: int, client: Any, board: int) -> None: ...
    def coll_open(
        self, generation: int, version: int, call: int, nodes: Sequence[int | None]
    ) -> None: ...
    def coll_close(self, generation: int) -> None: ...
    def coll_yield(self, generation: int, call: int) -> None: ...
    def coll_forget(self, generation: int) -> None: ...
    def coll_begin(self, generation: int, call: int, plan: int) -> None: ...
    def coll_vote(self, generation: int, call: int, plan: int) -> None: ...
    def coll_result(
        self, generation: int, call: int, result: int, awaited: bool = False
    ) -> None: ...
    def coll_frame(
        self,
        generation: int,
        node: int,
        version: int,
        call: int,
        phase: int,
        plan: int,
        parts: bytes,
    ) -> None: ...
    def coll_doorbell(self, generation: int, rank: int, fd: int) -> None: ...
    def stop(self) -> None: ...


@dataclass(frozen=True)
class NodePorts:
    """All ports of one node. `manager`: the connection to a manager on this host, or None if the
    manager is on another host. Only clusters of several hosts need the last three ports."""

    loop: LoopPort
    lines: ClientSocketsPort
    processes: ProcessesPort
    stacks: Callable[[HasWorkers], StacksPort]
    disk: Disk
    hostname: str
    manager: ByteStream | None = None
    connections: Connections | None = None
    engine: EnginePort | None = None
    driver_listener: DriverListenerPort | None = None
