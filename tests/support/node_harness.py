"""One node, or several, built by the construction code of the shipped node on ports of the test.

`NodeHarness` is a whole node: its memory, all its components, and their handlers. Only the ports
are stand-ins. Time passes when the test says so, and what the node does to its surroundings is
recorded: replies to processes, requests for processes, messages to the manager and to other nodes.
Every message in either direction is encoded and decoded, so an illegal one fails the test.
`HarnessNetwork` joins several such nodes by lines that deliver when the test says so.
"""

from __future__ import annotations

import itertools
import os
import socket
from collections import deque
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from hoplite_mp import _serialize, _shm, _tasks
from hoplite_mp._common import ids
from hoplite_mp._common.object_states import (
    CLIENT_WORKER,
    DRIVER_SLOT,
    FIRST_SLOT,
    KIND_OPERATION,
    KIND_TASK,
    STATE,
    TASK_COPY,
)
from hoplite_mp._node.io.spill_file import SpillFile
from hoplite_mp._node.output.output import Output
from hoplite_mp._node.ports import NodePorts
from hoplite_mp._node.runtime.cluster_node import ClusterNode
from hoplite_mp._node.runtime.node import HostNode
from hoplite_mp._node.runtime.node_events import ClusterNodeEvents, NodeEvents
from hoplite_mp._protocol.codec import Decoder, encode, manager_decoder
from hoplite_mp._protocol.fields import NO_OBJECT
from hoplite_mp._protocol.greetings import Introduction
from hoplite_mp._protocol.local import Reply, Request, Start
from hoplite_mp._protocol.messages import Member, MembersChanged, NodeAdmitted
from hoplite_mp._protocol.peers import Acquire, ObjectReport, PeerMessage, RunTask
from hoplite_mp._protocol.secret import Secret
from hoplite_mp._protocol.spawning import Exited, InheritedContext, LanStart, Spawn, StartStandby
from hoplite_mp._simulation.virtual.host_ports import NoDriverListener, NoStacks
from hoplite_mp._transport.conversation import Admission
from hoplite_mp._transport.stream import TcpStream
from tests.support.node_ports import ManualLoop
from tests.support.shm_host import HostMemory

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Sequence

    from hoplite_mp._transport.addresses import Address, Endpoint
    from hoplite_mp.config import Config

CLUSTER = b"c" * 16
LAN = LanStart(
    key=Secret(b"k" * 32),
    host_id=0,
    host="h",
    peer_fd=-1,
    addresses=["10.0.0.1:1"],
    ports=(1, 2, 1),
    handshake_timeout_s=5.0,
    pending_handshakes_max=8,
    connect_timeout_s=5.0,
    heartbeat_interval_s=0.2,
    heartbeat_timeout_s=1.5,
    tls=False,
    cluster=CLUSTER,
)
FIRST_PID = 1000  # of the process in slot 0
_descriptors = itertools.count(1 << 20)  # numbers that no real descriptor has


def member(number: int, workers: int = 4, **about: Any) -> Member:
    """A node of another host; its host id and its address contain its number."""
    about = {
        "host_id": 1000 + number, "host": f"host{number}", "addresses": (f"10.0.0.{number}:1",),
        **about,
    }  # fmt: skip
    return Member(number, 1, workers=workers, **about)


def start_message(
    files: Sequence[int],
    config: Config,
    *,
    memory_bytes: int,
    host_id: int = 0,
    workers: int = 0,
    lan: LanStart | None = None,
) -> Start:
    """What a supervisor tells a new node. files: the descriptors of both memories and of the
    event."""
    control, store, event = files
    slots = range(FIRST_SLOT, FIRST_SLOT + workers)
    return Start(
        sys_path=[],
        control_fd=control,
        store_fd=store,
        event_fd=event,
        supervisor_fd=-1,
        rpc_fd=-1,
        output_fd=-1,
        driver_pid=FIRST_PID + DRIVER_SLOT,
        workers=workers,
        cores=2,
        memory_bytes=memory_bytes,
        config=asdict(config),
        host_id=host_id,
        inherited_settings=InheritedContext(
            pid=1, authkey=b"", argv=[], faulthandler=False, start_method=""
        ),
        lan=lan,
        first_workers=[(slot, -1, -1, -1) for slot in slots],
    )


class PlayedLoop(ManualLoop):
    """A loop whose time is that of the compiled modules, too. What these wake is recorded: the
    offsets of words in the control memory; `sleeps`: what is done in place of a sleep."""

    def __init__(self) -> None:
        self.woken: list[int] = []
        self.sleeps: Callable[[int], object] = lambda word: None
        self.control_addresses: list[int] = []
        _tasks.play(self._sleep, self._wake)
        super().__init__()

    @property
    def time(self) -> float:
        return self._time

    @time.setter
    def time(self, now: float) -> None:
        self._time = now
        _tasks.play_at(round(now * 1e9))

    def _offset(self, word: int) -> int:
        return min(word - at for at in self.control_addresses if word >= at)

    def _sleep(self, word: int, ns: int) -> None:
        self.sleeps(self._offset(word))

    def _wake(self, word: int) -> None:
        self.woken.append(self._offset(word))

    def close(self) -> None:
        _tasks.play(None, None)


class RecordedLines:
    """See `ClientSocketsPort`. A process has a line once the test has added one."""

    def __init__(self) -> None:
        self.by_slot: dict[int, Any] = {}
        self.replies: list[tuple[int, Reply]] = []

    def serve(self, events: Any) -> None: ...

    def add(self, slot: int, line: Any) -> None:
        self.by_slot[slot] = line

    def forget(self, slot: int) -> None:
        self.by_slot.pop(slot, None)

    def reply(self, slot: int, reply: Reply) -> None:
        if slot in self.by_slot:
            msgspec.msgpack.decode(msgspec.msgpack.encode(reply), type=Reply)
            self.replies.append((slot, reply))

    def replier(self, slot: int) -> Callable[[Reply], None]:
        line = self.by_slot.get(slot)

        def reply(found: Reply) -> None:
            if line is not None and self.by_slot.get(slot) is line:
                self.reply(slot, found)

        return reply


class RecordedProcesses:
    """See `ProcessesPort`. `refusal`: why no process can be started."""

    def __init__(self) -> None:
        self.spawned: list[Spawn] = []
        self.killed: list[int] = []
        self.interrupted: list[int] = []
        self.standbys: list[StartStandby] = []
        self.refusal = ""

    def spawn(self, ask: Spawn, descriptors: list[int]) -> str:
        if not self.refusal:
            self.spawned.append(ask)
        return self.refusal

    def kill(self, pid: int) -> None:
        self.killed.append(pid)

    def interrupt(self, pid: int) -> None:
        self.interrupted.append(pid)

    def start_standby(self, ask: StartStandby, address: Address) -> None:
        self.standbys.append(ask)

    def close(self, descriptors: list[int]) -> None:
        while descriptors:
            os.close(descriptors.pop())


class RecordedEngine:
    """See `EnginePort`. Cells and links are numbers, nothing moves, and calls are recorded. `come`:
    the watermark of each cell, which a test may raise; `found`: the events that the node reads
    next."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.found: list[tuple[Any, ...]] = []
        self.come: dict[int, int] = {}
        self._descriptor = next(_descriptors)
        self._cells = itertools.count(1)

    def fileno(self) -> int:
        return self._descriptor

    def connect(self, fd: int, peer: int) -> int:
        self.calls.append(("connect", peer))
        return peer

    def counters(self, link: int) -> tuple[int, int, int, int]:
        return 0, 0, 0, 0

    def cell(self, key: Any, memory: Any, begin: int, nbytes: int, filled: bool | int = 0) -> int:
        cell = next(self._cells)
        self.calls.append(("cell", cell, key, memory, begin, nbytes, filled))
        self.come[cell] = nbytes if filled is True else int(filled)
        return cell

    def watermark(self, cell: int) -> int:
        return self.come[cell]

    def advance(self, cell: int, come: int) -> None:
        self.come[cell] = come

    def events(self) -> list[tuple[Any, ...]]:
        found, self.found = self.found, []
        return found

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *about: self.calls.append((name, *about))


class HarnessStream:
    """See `ByteStream`: what the node writes is decoded and passed on, message by message."""

    bytes_received = bytes_sent = 0
    certificate_sha256 = failure = None
    buffered = wants_read = wants_write = False

    def __init__(self, decoder: Decoder[Any], sent: Callable[[Any], object]) -> None:
        self.closed = False
        self.incoming: bytes | None = b""
        self._decoder = decoder
        self._sent = sent
        self._descriptor = next(_descriptors)

    def fileno(self) -> int:
        return self._descriptor

    def read(self, nbytes_max: int = 0) -> bytes | None:
        data = self.incoming
        if data is not None:
            self.incoming = b""
        return data

    def write(self, data: bytes) -> None:
        for message in self._decoder.feed(data):
            self._sent(message)

    def flush(self) -> bool:
        return True

    def close(self) -> None:
        self.closed = True


class HarnessCall:
    """See `OutgoingConnection`. It is established at once, or when the test ends it."""

    deadline = 1e9
    starved = False

    def __init__(self, loop: ManualLoop, found: Admission | Exception | None = None) -> None:
        self._loop = loop
        self._found = found
        self._descriptor = next(_descriptors)

    def end(self, found: Admission | Exception) -> None:
        """The connection is established, or why it cannot be."""
        self._found = found
        self._loop.watched[self._descriptor]()

    def fileno(self) -> int:
        return self._descriptor

    def turn(self, now: float) -> Admission | None:
        if isinstance(self._found, Exception):
            raise self._found
        return self._found

    def wait(self) -> Admission:
        found = self.turn(0.0)
        assert found is not None
        return found


class HarnessConnections:
    """See `Connections`. Calls of role "peer" reach every member at once; those of role "data" are
    in `data_calls`, and wait for the test. `reaches`: whether an address of another host answers;
    `lent`: the ports that are lent now."""

    def __init__(self, node: NodeHarness) -> None:
        self.node = node
        self.data_calls: list[HarnessCall] = []
        self.reaches = True
        self._roles: Any = {}
        self.lent: list[HarnessPort] = []

    def call(
        self, endpoints: Sequence[Endpoint], *, role: str, host_id: int | None = None, **about: Any
    ) -> HarnessCall:
        assert host_id is not None
        if role == "data":
            self.data_calls.append(HarnessCall(self.node.loop))
            return self.data_calls[-1]
        stream: Any = HarnessStream(
            Decoder(PeerMessage), lambda message: self.node.network_send(host_id, message)
        )
        return HarnessCall(self.node.loop, self.admission(host_id, stream, role))

    def admission(self, host_id: int, stream: Any, role: str = "data") -> Admission:
        """A connection with that host."""
        return Admission(stream, role, CLUSTER, Introduction(host_id, {}), "10.0.0.9")

    def listen(self, cluster: bytes, certificate: bytes, mine: Introduction, roles: Any) -> str:
        self._roles = roles
        return "10.0.0.1"

    def accept(self, host_id: int, sock: socket.socket) -> None:
        """Another host has made a data connection."""
        self._roles["data"](self.admission(host_id, TcpStream(sock)))

    def is_reached(self, endpoints: Sequence[Endpoint]) -> bool:
        return self.reaches

    def lend(self, endpoints: Sequence[Endpoint], may: Callable[[str], bool]) -> HarnessPort:
        self.lent.append(HarnessPort(self, 7000 + len(self.lent)))
        return self.lent[-1]

    def own_addresses(self) -> Collection[str]:
        return ["10.0.0.1"]


class HarnessPort:
    """See `LentPort`."""

    def __init__(self, connections: HarnessConnections, port: int) -> None:
        self.port = port
        self._lent = connections.lent

    def close(self) -> None:
        self._lent.remove(self)


class HarnessProcess:
    """A process of the host: a client slot with a line to the node. It does what a test says."""

    def __init__(self, node: NodeHarness, slot: int = 0, pool: int = 0) -> None:
        self.node = node
        self.slot = slot or node.node.register(0, CLIENT_WORKER, pool)
        node.connect(self.slot)
        self.client = node.client(self.slot)
        if isinstance(node.loop, PlayedLoop):
            node.loop.control_addresses.append(self.client.control_address)
        self.tasks = _tasks.Tasks(self.client)
        self._queues: dict[int, int] = {}

    def put(self, value: Any) -> Any:
        """A hold on a new object."""
        encoded = _serialize.encode(value)
        at = self._write(encoded)
        oid = self.client.publish(at, encoded.nbytes, bool(encoded.refs))
        return self.client.hold(oid, False)

    def draft(self) -> Any:
        """A hold on the header of a result of a collective, which the node will claim."""
        hold = self.client.draft(KIND_OPERATION)
        hold.keep()
        return hold

    def finish(self, oid: int, value: Any, *, settles: bool = False) -> None:
        """The result of a task that this process has claimed, or the exception that it raised.
        settles: the task may have been cancelled."""
        failed = isinstance(value, Exception)
        encoded = _serialize.encode_error(value, "") if failed else _serialize.encode(value)
        at = self._write(encoded)
        self.client.bind(oid, at, encoded.nbytes, bool(encoded.refs))
        if not self.tasks.finish(oid, failed):
            assert settles
            self.client.give_back(at, oid)
            self.tasks.settle(oid)

    def _write(self, encoded: Any) -> int:
        """A block with these bytes: of a span, if they are few."""
        at = self.client.allocate(encoded.nbytes)
        if not at and encoded.nbytes <= self.node.config.small_object_bytes_max:
            self.node.give_span(self.client)
            at = self.client.allocate(encoded.nbytes)
        at = at or self.node.store.lease(encoded.nbytes, self.slot)
        assert at is not None
        self.client.write(at, encoded.head, encoded.buffers, encoded.offsets)
        return at

    def value(self, oid: int) -> Any:
        """What the process reads: a value, an exception, or the name of the header's state."""
        got = self.client.view(oid)
        if isinstance(got, int):
            return _shm.STATES[got]
        mem = memoryview(got)
        if _serialize.payload_kind(mem) == _serialize.ERROR:
            return _serialize.decode_error(mem, lambda i: None)  # type: ignore[arg-type,return-value]
        value = _serialize.decode(mem, make_ref=lambda i: None, writable=True)  # type: ignore[arg-type,return-value]
        return value.copy() if isinstance(value, np.ndarray) else value

    def submit(
        self,
        pool: int = 0,
        *,
        function: int = 0,
        args: bytes | None = None,
        ready: bool = True,
        retries: int = 0,
        timeout_ns: int = 0,
        flags: int = 0,
        output_owner: int = 0,
        delay: tuple[float, float, float] | None = None,
    ) -> Any:
        """A hold on a task; without `ready` it waits for its arguments."""
        if pool not in self._queues:
            self._queues[pool] = self.tasks.open_queue(pool)
        oid = self.client.new(KIND_TASK, STATE["WAITING"], 0, pool)
        hold = self.client.hold(oid, False)
        if delay is not None:
            self.tasks.set_retry_delay(oid, *delay)
            flags |= _tasks.DELAYED_FLAG
        queue = self._queues[pool]
        args = _serialize.encode_call((), {}).tobytes() if args is None else args
        about = args, 0, retries, timeout_ns, flags, b"f", queue, ready, output_owner
        self.tasks.submit(oid, function, *about)
        return hold

    def next(self, pool: int = 0) -> int:
        """Claims a task; 0: there is none."""
        return self.tasks.next(pool, 0)


class NodeHarness(HostMemory):
    """One node that has joined its cluster. Its parts have the names of the shipped ones: `parts`
    are its `Components`, `cluster` its `ClusterNode`."""

    def __init__(
        self,
        others: Iterable[Member] = (),
        *,
        number: int = 0,
        host_id: int = 77,
        workers: int = 0,
        alone: bool = False,
        joined: bool = True,
        played: bool = False,
        tls: bool = False,
        engine: Any = None,
        network: HarnessNetwork | None = None,
        **config: Any,
    ) -> None:
        """others: the other members. workers: of the common pool at the start; they are in the
        slots from FIRST_SLOT on. alone: the node of a cluster of one host. joined: whether the
        manager has let the node in. played: the compiled modules have the loop's time, too. engine:
        in place of a `RecordedEngine`. network: its other nodes take what this one sends; without
        it messages are recorded in `sent`. config: fields of `Config` that differ."""
        super().__init__(host_id=host_id)
        self.config = replace(self.config, **config)
        self.loop = PlayedLoop() if played else ManualLoop()
        if isinstance(self.loop, PlayedLoop):
            self.loop.control_addresses.append(self.node.control_address)
        self.lines = RecordedLines()
        self.processes = RecordedProcesses()
        self.connections = HarnessConnections(self)
        self.engine = RecordedEngine() if engine is None else engine
        self.sent: list[tuple[int, Any]] = []  # messages to other nodes, with their host ids
        self.reports: list[Any] = []  # messages to the manager
        self.network = network
        self._requests = itertools.count(1)
        self._peer_decoder = msgspec.msgpack.Decoder(PeerMessage)
        self.node.set_number(number)
        manager: Any = HarnessStream(manager_decoder(), self.reported)
        self._output_sockets = socket.socketpair()
        self.node_events = NodeEvents() if alone else ClusterNodeEvents()
        output = Output(
            self._output_sockets[1],
            self.config,
            host_id,
            lambda: self.node.number,
            self.loop,
            self.config.output_wait_s,
            self.node_events,
        )
        ports: Any = NodePorts(
            self.loop,
            self.lines,
            self.processes,
            lambda workers: NoStacks(),
            SpillFile(self.config.spill_dir, self.config.spill_bytes_max),
            f"host{number}",
            manager,
            self.connections,  # type: ignore[arg-type]
            self.engine,
            NoDriverListener(),
        )
        lan = None if alone else msgspec.structs.replace(LAN, host_id=host_id, tls=tls)
        self.host_node = HostNode(
            start_message(
                self.fds,
                self.config,
                memory_bytes=self.length // 2,
                host_id=host_id,
                workers=workers,
                lan=lan,
            ),
            self.config,
            ports,
            self.node,
            self.node_tasks,
            output,
            self.node_events,
        )
        self.parts = self.host_node.components
        self.store = self.parts.store
        self.host_node.begin(FIRST_PID, "the driver")
        if joined and not alone:
            self.admit(*others)
        self.reports.clear()

    @property
    def cluster(self) -> ClusterNode:
        assert isinstance(self.host_node.other_hosts, ClusterNode)
        return self.host_node.other_hosts

    @property
    def number(self) -> int:
        return self.node.number

    def poll(self) -> None:
        """One turn of the node, after words in shared memory have changed."""
        self.host_node.poll()

    # -- the manager ---------------------------------------------------------------------------

    def from_manager(self, message: Any) -> None:
        """The manager sends this; the node reads it at once."""
        channel = self.parts.management.channel
        assert channel is not None
        channel.stream.incoming = encode(message)  # type: ignore[attr-defined]
        channel.ready()

    def reported(self, message: Any) -> None:
        """The node has sent this to the manager."""
        self.reports.append(message)

    def admit(self, *others: Member) -> None:
        """The manager lets the node in, beside these others."""
        own = Member(self.number, 1, self.host_id, self.host_node.start.workers)
        self.from_manager(NodeAdmitted(self.number, 0, (own,), self.number + 1))
        self.join(*others)

    def join(self, *members: Member) -> None:
        """The manager announces members; what the node tells them at once is not recorded."""
        if members:
            self.from_manager(MembersChanged(members, ()))
            self.sent.clear()

    def lose(self, *numbers: int, left: tuple[int, ...] = ()) -> None:
        """The manager announces that these nodes are gone."""
        self.from_manager(MembersChanged((), numbers, left))

    # -- other nodes ---------------------------------------------------------------------------

    def network_send(self, host_id: int, message: Any) -> None:
        """The node has sent this to another one."""
        if self.network is None:
            self.sent.append((host_id, message))
        else:
            self.network.send(self.host_id, host_id, message)

    def receive(self, host_id: int, message: Any) -> None:
        """A message of another node arrives. An error of its handler fails the test."""
        message = self._peer_decoder.decode(msgspec.msgpack.encode(message))
        self.cluster._peer_handlers[type(message)](host_id, message)

    def taken(self) -> list[tuple[int, Any]]:
        """(host id, message) of all that was sent since this was asked last."""
        found, self.sent = self.sent, []
        return found

    def describe(self, value: Any) -> None:
        """Owners answer the node's questions about their objects: each has this value."""
        payload = _serialize.encode(value).tobytes()
        questions, self.sent = self.sent, []
        for host_id, one in questions:
            if isinstance(one, Acquire):
                about = ObjectReport(one.object, one.number, "ready", len(payload), payload)
                self.receive(host_id, about)
            else:
                self.sent.append((host_id, one))

    def run_task(self, host_id: int, number: int = 1, **about: Any) -> int:
        """A task of another node arrives with its function; returns its local id."""
        task, function = ids.pack_id(host_id, number << 33), ids.pack_id(host_id, 1 << 33 | 1)
        about = {"retries": 0, "timeout_ns": 0, "flags": TASK_COPY, "name": b"f", **about}
        self.receive(host_id, RunTask(task, function, args=b"", args_object=NO_OBJECT, **about))
        self.describe("the function")
        return self.parts.imports.local(task)

    # -- processes of this host ----------------------------------------------------------------

    def process(self, slot: int = 0, pool: int = 0) -> HarnessProcess:
        """A process that has that slot already, or gets another one."""
        return HarnessProcess(self, slot, pool)

    def connect(self, slot: int) -> None:
        """The process in that slot, perhaps a new one, has a line."""
        self.lines.add(slot, object())

    def ask(self, slot: int, ask: Any, number: int | None = None, seen: int = 0) -> int:
        """A request of the process in that slot arrives; returns its number. number: 0 for a
        request without a reply. seen: the last reply that the process has read."""
        number = next(self._requests) if number is None else number
        packet = msgspec.msgpack.encode(Request(number, seen, ask))
        self.host_node.request(slot, msgspec.msgpack.decode(packet, type=Request), [])
        return number

    def replies(self) -> list[tuple[int, Reply]]:
        """(slot, reply) of all replies since this was asked last."""
        found, self.lines.replies = self.lines.replies, []
        return found

    def answer(self, slot: int, ask: Any) -> Reply:
        """The one reply to a request that is answered at once."""
        number = self.ask(slot, ask)
        ((to, reply),) = self.replies()
        assert (to, reply.number) == (slot, number)
        return reply

    def worker_started(self, slot: int) -> int:
        """The supervisor has started the worker of that slot; returns its pid."""
        self.parts.workers.spawned(slot, FIRST_PID + slot)
        return FIRST_PID + slot

    def worker_exited(self, slot: int, code: int = -9) -> None:
        """The supervisor reports the end of the worker of that slot."""
        self.host_node.worker_exited(Exited(slot, FIRST_PID + slot, code))

    def close(self) -> None:
        if isinstance(self.loop, PlayedLoop):
            self.loop.close()
        for end in self._output_sockets:
            end.close()
        super().close()


class HarnessNetwork:
    """Nodes with numbers from 0 on, and lines between them. A message waits in its line until it is
    delivered."""

    node_class: type[NodeHarness] = NodeHarness

    def __init__(self, size: int) -> None:
        self.lines: dict[tuple[int, int], deque[bytes]] = {}
        self.dead: set[int] = set()  # host ids
        self.stopped: set[tuple[int, int]] = set()  # lines that deliver nothing now
        self.by_host_id: dict[int, Any] = {}
        self.nodes = [self.make(number) for number in range(size)]
        for node in self.nodes:
            self.by_host_id[node.host_id] = node
        for node in self.nodes:
            node.join(*(self.member(one.number) for one in self.nodes if one is not node))
        self.lines.clear()

    def member(self, number: int) -> Member:
        """A node, as the others know it."""
        return member(number, 2)

    def make(self, number: int) -> Any:
        return self.node_class(number=number, host_id=1000 + number, network=self)

    @property
    def living(self) -> list[Any]:
        return [node for node in self.nodes if node.host_id not in self.dead]

    def send(self, source: int, target: int, message: Any) -> None:
        self.lines.setdefault((source, target), deque()).append(msgspec.msgpack.encode(message))

    def deliver(self, source: int, target: int) -> bool:
        """The oldest message of one line arrives; False: the line is empty or stopped."""
        line = self.lines.get((source, target))
        if not line or (source, target) in self.stopped:
            return False
        packet = line.popleft()
        if source not in self.dead and target not in self.dead:
            message = msgspec.msgpack.decode(packet, type=PeerMessage)
            self.by_host_id[target].receive(source, message)
        return True

    def pump(self) -> None:
        """Turns and deliveries until nothing is under way."""
        while True:
            for node in self.living:
                node.poll()
            if not any([self.deliver(*line) for line in list(self.lines)]):
                return

    def close(self) -> None:
        for node in self.nodes:
            node.close()
