"""Connection attempts between simulated hosts, and the listeners at which they arrive.

The module implements the port Connections (_node/ports.py). An attempt takes as long as its packets
need. It is refused at an address where no process listens, and times out across a cut or at a
stopped host. Authentication is not simulated; other tests cover it.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from hoplite_mp._simulation.faults.message_faults import strike_at_messages
from hoplite_mp._simulation.network import VirtualPipe
from hoplite_mp._transport.conversation import Admission
from hoplite_mp._transport.stream import READ_BYTES
from hoplite_mp.errors import ManagerLostError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence
    from types import TracebackType

    from hoplite_mp._protocol.greetings import Introduction
    from hoplite_mp._simulation.network import VirtualNetwork
    from hoplite_mp._simulation.virtual.loop import Descriptors
    from hoplite_mp._transport.addresses import Address, Endpoint


__all__ = [
    "Switchboard",
    "VirtualConnections",
    "VirtualListener",
    "VirtualSocket",
    "VirtualStream",
    "connect",
]


# As in _transport/caller.py.
ARRIVE_S = 2.0
ROUND_PAUSE_S = 0.2
HANDSHAKE_S = 5.0
ACCEPT_S = 0.005  # interval between retries of an attempt that waits to be accepted


@dataclass(frozen=True)
class VirtualListener:
    """A listening process. admit: called with each connection, in a turn of that process."""

    host: int
    loop: Any
    host_id: int
    cluster: bytes
    introduction: Introduction
    admit: Callable[[Admission], None]
    refuses: Callable[[str], bool] = lambda role: False  # whether a role is currently refused


class Switchboard:
    """All listeners and all connections of a run."""

    def __init__(self, network: VirtualNetwork, descriptors: Descriptors) -> None:
        self.network = network
        self.descriptors = descriptors
        self.listeners: dict[tuple[str, int], VirtualListener] = {}
        self.streams: dict[VirtualStream, None] = {}  # one end of each connection
        # Addresses whose listening socket a supervisor keeps open while it starts another manager.
        # Connection attempts wait there.
        self.kept_open: set[tuple[str, int]] = set()

    def connect(
        self, loop: Any, host: int, to: VirtualListener
    ) -> tuple[VirtualStream, VirtualStream]:
        """Creates a connection from the process to a listener."""
        ends = connect(self.network, self.descriptors, (loop, host), (to.loop, to.host))
        self.streams[ends[0]] = None
        return ends

    def close_all(self, loop: Any) -> list[VirtualStream]:
        """Closes the connections of a process that has ended. Returns the ends at other hosts,
        which the caller must reset."""
        found = []
        for stream in list(self.streams):
            for end in (stream, stream.peer):
                if end.loop is loop and end.host == end.peer.host:
                    end.close()  # no reset, because all data sent within a host arrives
                    self.streams.pop(stream, None)
                elif end.loop is loop:
                    end.is_closed = True
                    end.out.close()
                    end.peer.out.close()
                    found.append(end.peer)
                    self.streams.pop(stream, None)
        self.listeners = {at: one for at, one in self.listeners.items() if one.loop is not loop}
        return found

    def between(self, one: int, other: int) -> list[VirtualStream]:
        """Returns one end of each living connection between these hosts."""
        alive = [s for s in self.streams if not (s.is_closed or s.peer.is_closed or s.failure)]
        return [stream for stream in alive if {stream.host, stream.peer.host} == {one, other}]


class VirtualConnectionAttempt:
    """One connection attempt; see `OutgoingConnection` in _node/ports.py."""

    starved = False

    def __init__(
        self,
        board: Switchboard,
        loop: Any,
        host: int,
        endpoints: Sequence[Endpoint],
        role: str,
        mine: Introduction,
        timeout_s: float,
        host_id: int | None,
        rounds_max: int,
    ) -> None:
        self._board = board
        self._loop = loop
        self._host = host
        self._endpoints = [(str(end.sockaddr[0]), int(end.sockaddr[1])) for end in endpoints]
        self._role = role
        self._mine = mine
        now: float = loop.now()
        self._ends = now + timeout_s
        self._host_id = host_id
        self._rounds_max = rounds_max
        self._rounds_lost = 0
        self._arrived = False  # whether any address has answered in this round
        self._next = 0
        self._attempt = 0
        self._attempt_ends = now
        self._again_at: float | None = now
        self._outcome: Admission | str | None = None
        self._fd = board.descriptors.add(self)

    @property
    def is_ready(self) -> bool:
        return self._outcome is not None

    @property
    def deadline(self) -> float:
        return min(self._attempt_ends if self._again_at is None else self._again_at, self._ends)

    def fileno(self) -> int:
        return self._fd

    def wait(self) -> Admission:
        """Connects immediately, because a simulated process cannot block here."""
        for at in self._endpoints:
            listener = self._board.listeners.get(at)
            blocked = self._board.network.is_blocked
            if listener is None or listener.refuses(self._role):
                continue
            if not blocked(self._host, listener.host):
                return self._make(listener)
        raise ManagerLostError("no manager is listening")

    def turn(self, now: float) -> Admission | None:
        while True:
            found, self._outcome = self._outcome, None
            if isinstance(found, Admission):
                return found
            if now >= self._ends:
                self._attempt += 1
                raise self._lost("timed out")
            if found is None and self._again_at is None:
                if now < self._attempt_ends:
                    return None
                found = "no answer"
            if found is not None:
                self._next_endpoint(found, now)
            if self._again_at is not None and now < self._again_at:
                return None
            self._begin(now)

    def _begin(self, now: float) -> None:
        self._again_at = None
        self._attempt_ends = now + ARRIVE_S
        self._attempt += 1
        listener = self._board.listeners.get(self._endpoints[self._next])
        network = self._board.network
        there = self._host_at(self._endpoints[self._next]) if listener is None else listener.host
        network.timeline.after(network.delay(self._host, there), self._arrive, self._attempt, there)

    def _host_at(self, at: tuple[str, int]) -> int:
        """Returns the host at an address where no process listens."""
        return int(at[0].rpartition(".")[2]) - 1

    def _arrive(self, attempt: int, there: int) -> None:
        """Called when the first packet has reached the other host."""
        network = self._board.network
        if attempt != self._attempt or network.is_blocked(self._host, there):
            return  # the packet or its answer is lost
        at = self._endpoints[self._next]
        listener = self._board.listeners.get(at)
        if listener is None and at in self._board.kept_open:
            if not self._arrived:
                self._arrived = True
                self._attempt_ends = self._loop.now() + HANDSHAKE_S
            network.timeline.after(ACCEPT_S, self._arrive, attempt, there)
        elif listener is None:
            network.timeline.after(network.delay(there, self._host), self._end, attempt, "refused")
        elif self._host_id is not None and listener.host_id != self._host_id:
            why = "another host has this address"
            network.timeline.after(network.delay(there, self._host), self._end, attempt, why)
        elif listener.refuses(self._role):
            why = "this role is currently refused"
            network.timeline.after(network.delay(there, self._host), self._end, attempt, why)
        else:
            seconds = 2 * network.delay(there, self._host)  # for the handshake
            network.timeline.after(seconds, self._accept, attempt, listener)

    def _accept(self, attempt: int, listener: VirtualListener) -> None:
        network = self._board.network
        current = self._board.listeners.get(self._endpoints[self._next])
        if attempt != self._attempt or network.is_blocked(self._host, listener.host):
            return
        outcome: Admission | str = "the accepting process has died"
        if current is listener:
            outcome = self._make(listener)
        network.timeline.after(
            network.delay(listener.host, self._host), self._end, attempt, outcome
        )

    def _make(self, listener: VirtualListener) -> Admission:
        ours, theirs = self._board.connect(self._loop, self._host, listener)
        theirs_is: Any = theirs
        ours_is: Any = ours
        admission = Admission(theirs_is, self._role, listener.cluster, self._mine, "")
        listener.loop.run_soon(lambda: listener.admit(admission))
        return Admission(ours_is, self._role, listener.cluster, listener.introduction, "")

    def _end(self, attempt: int, outcome: Admission | str) -> None:
        if attempt == self._attempt and not self._loop.ended:
            self._arrived = self._arrived or not isinstance(outcome, str) or outcome != "refused"
            self._outcome = outcome
            self._loop.notify(self._fd)
        elif isinstance(outcome, Admission):
            outcome.stream.close()

    def _next_endpoint(self, why: str, now: float) -> None:
        self._next = (self._next + 1) % len(self._endpoints)
        if self._next:
            self._again_at = now
            return
        self._rounds_lost = 0 if self._arrived else self._rounds_lost + 1
        self._arrived = False
        if self._rounds_max and self._rounds_lost == self._rounds_max:
            raise self._lost(why)
        self._again_at = now + ROUND_PAUSE_S

    def _lost(self, why: str) -> ConnectionError:
        if self._role == "node":
            return ManagerLostError(why)
        return ConnectionError(why)


class VirtualPort:
    """A relay port, whose connections are forwarded to a node."""

    def __init__(self, board: Switchboard, at: tuple[str, int]) -> None:
        self._board = board
        self._at = at

    @property
    def port(self) -> int:
        return self._at[1]

    def close(self) -> None:
        self._board.listeners.pop(self._at, None)


class VirtualConnections:
    """The connections of one node; see Connections in _node/ports.py."""

    def __init__(self, board: Switchboard, loop: Any, host: int, host_id: int, at: Address) -> None:
        self._board = board
        self._loop = loop
        self._host = host
        self._host_id = host_id
        self._at = at

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
    ) -> VirtualConnectionAttempt:
        return VirtualConnectionAttempt(
            self._board,
            self._loop,
            self._host,
            endpoints,
            role,
            mine,
            timeout_s,
            host_id,
            rounds_max,
        )

    def listen(
        self,
        cluster: bytes,
        certificate: bytes,
        mine: Introduction,
        roles: Mapping[str, Callable[[Admission], None]],
    ) -> str:
        def admit(admission: Admission) -> None:
            roles[admission.role](admission)

        self._board.listeners[self._at.host, self._at.port] = VirtualListener(
            self._host, self._loop, self._host_id, cluster, mine, admit
        )
        return self._at.host

    def is_reached(self, endpoints: Sequence[Endpoint]) -> bool:
        for end in endpoints:
            found = self._board.listeners.get((str(end.sockaddr[0]), int(end.sockaddr[1])))
            if found is not None and not self._board.network.is_blocked(self._host, found.host):
                return True
        return False

    def lend(self, endpoints: Sequence[Endpoint], may: Callable[[str], bool]) -> VirtualPort:
        raise OSError("relays are not simulated")

    def own_addresses(self) -> Collection[str]:
        return [self._at.host]


# Connections between simulated hosts: ordered bytes, close, reset, and frames of engines.
#
# The streams between nodes and managers implement the interface of _transport/stream.py on the
# simulated network.


RESET = "Connection reset by peer"


class NotifiedLoop(Protocol):
    """The loop of a process."""

    def notify(self, fd: int) -> None:
        """Called when there is data to read at this descriptor."""


class BulkReceiver(Protocol):
    """An engine's end of a connection."""

    def take(self, data: bytes) -> None:
        """Receives bytes."""

    def ended(self) -> None:
        """Called when no more bytes will arrive."""


class VirtualStream:
    """One end of a connection; see `Stream` in _transport/stream.py."""

    certificate_sha256: bytes | None = bytes(32)
    peer: VirtualStream
    out: VirtualPipe

    def __init__(self, descriptors: Descriptors, loop: NotifiedLoop, host: int) -> None:
        self.loop = loop
        self.host = host
        self.failure: str | None = None
        self.bytes_received = self.bytes_sent = 0
        self.bulk: BulkReceiver | None = None  # the engine that uses the stream
        self.is_closed = False
        self._fd = descriptors.add(self)
        self._message_faults = descriptors.message_faults
        self._inbox: deque[bytes] = deque()
        self._queue: list[bytes] = []
        self._ended = False  # closed or reset by the other end
        self._received_early: list[bytes] = []  # frames that arrived before `attach`

    # -- the interface of Stream -----------------------------------------------------------------

    @property
    def is_ready(self) -> bool:
        return not self.is_closed and bool(self._inbox or self._ended or self.failure)

    @property
    def buffered(self) -> bool:
        return False

    @property
    def wants_read(self) -> bool:
        return not self._ended

    @property
    def wants_write(self) -> bool:
        return bool(self._queue) and self.failure is None

    def fileno(self) -> int:
        return self._fd

    def read(self, nbytes_max: int = READ_BYTES) -> bytes | None:
        found: list[bytes] = []
        space = nbytes_max
        while self._inbox and space:
            data = self._inbox.popleft()
            if len(data) > space:
                self._inbox.appendleft(data[space:])
                data = data[:space]
            found.append(data)
            space -= len(data)
        whole = b"".join(found)
        self.bytes_received += len(whole)
        if not whole and (self._ended or self.failure or self.is_closed):
            return None
        return whole

    def write(self, data: bytes) -> None:
        self._queue.append(data)

    def flush(self) -> bool:
        if self.failure is None and self._queue and not self.is_closed:
            data = b"".join(self._queue)
            self._queue.clear()
            self.bytes_sent += len(data)
            if self._message_faults:
                strike_at_messages(self._message_faults, data, (self.host, self.peer.host), False)
            self.out.send(data, len(data))
        return self.failure is None

    def close(self) -> None:
        if not self.is_closed:
            self.is_closed = True
            self._queue.clear()
            if self.failure is None:
                self.out.send(b"", 1)

    def detach(self) -> VirtualSocket:
        """Returns the socket, which an engine takes over."""
        return VirtualSocket(self)

    # -- receiving -------------------------------------------------------------------------------

    def receive(self, data: bytes | None) -> None:
        """Receives data from the other end. b"": the other end was closed. None: the other end was
        closed before it received data, which resets the connection."""
        if data is None:
            self.reset()
        elif self.is_closed:
            if data:
                self.out.send(None, 1)
        elif data:
            self._inbox.append(data)
            self.loop.notify(self._fd)
            if self._message_faults:
                strike_at_messages(self._message_faults, data, (self.peer.host, self.host), True)
        else:
            self._end()

    def receive_bulk(self, data: bytes) -> None:
        """Receives a frame from the other end's engine."""
        if self.bulk is not None:
            self.bulk.take(data)
        elif not self.is_closed:
            self._received_early.append(data)

    def attach(self, bulk: BulkReceiver) -> None:
        """Passes all frames to an engine."""
        self.bulk = bulk
        early, self._received_early = self._received_early, []
        for data in early:
            bulk.take(data)
        if self._ended or self.failure:
            bulk.ended()

    def reset(self) -> None:
        """Resets this end of the connection."""
        if self.failure is None and not self.is_closed:
            self.failure = RESET
            self._end()

    def _end(self) -> None:
        self._ended = True
        if self.bulk is not None:
            self.bulk.ended()
        else:
            self.loop.notify(self._fd)


class VirtualSocket:
    """A stream that an engine takes over; see `TcpStream.detach`."""

    def __init__(self, stream: VirtualStream) -> None:
        self.stream = stream

    def fileno(self) -> int:
        return self.stream.fileno()

    def __enter__(self) -> VirtualSocket:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        """Does nothing: the engine has its own descriptor."""


def connect(
    network: VirtualNetwork,
    descriptors: Descriptors,
    one: tuple[NotifiedLoop, int],
    other: tuple[NotifiedLoop, int],
) -> tuple[VirtualStream, VirtualStream]:
    """Connects two processes, each given as (loop, host). Returns both ends."""
    ours, theirs = (VirtualStream(descriptors, *end) for end in (one, other))
    ours.peer, theirs.peer = theirs, ours
    ours.out = VirtualPipe(network, (ours.host, theirs.host), theirs.receive)
    theirs.out = VirtualPipe(network, (theirs.host, ours.host), ours.receive)
    return ours, theirs
