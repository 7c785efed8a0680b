"""Two or more hosts in one process: their nodes' tables, and lines that deliver when pumped.

Every message goes through the control channel's encoder and decoder, so an illegal one fails the
test.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from hoplite_mp import _serialize, _tasks
from hoplite_mp._common import ids
from hoplite_mp._node.objects.exports import Exports
from hoplite_mp._node.objects.imports import Imports
from hoplite_mp._node.objects.remote_objects import RemoteObject, RemoteObjects
from hoplite_mp._node.roster import Roster
from hoplite_mp._node.tasks.inbound_tasks import InboundTasks
from hoplite_mp._node.tasks.outbound_tasks import OutboundTasks
from hoplite_mp._protocol.peers import (
    Acquire,
    CancelTask,
    Described,
    Drop,
    PeerMessage,
    RecallTasks,
    Release,
    RunTask,
    TaskEnded,
)
from tests.support.lost_peers import gone
from tests.support.node_ports import UnhandledEvents
from tests.support.shm_host import KIND_TASK, POOL, STATE, ShmHost

if TYPE_CHECKING:
    from hoplite_mp import _shm


COMMON = 0  # the pool of every host's own workers


class SideUpward(UnhandledEvents):
    """With the queues of one side."""

    def __init__(self, side: Side) -> None:
        self.post = side.post_again
        self.queue_of = side.queue_to
        self.interrupt = side.interrupted_at
        self.post_inbound = lambda oid: side.node_tasks.post(
            oid, self.queue_of(side.node_tasks.pool_of(oid))
        )
        self.near = lambda object_id, oid: side.imports.near(object_id, oid)  # type: ignore[method-assign]
        self.freed = lambda oid: side.imports.freed(oid)  # type: ignore[method-assign]
        self.restore_elsewhere = lambda oid: side.remote_objects.restore(oid)  # type: ignore[method-assign]


class Side(ShmHost):
    """One host, with what its node keeps for others."""

    def __init__(self, network: Network, number: int) -> None:
        super().__init__(host_id=1000 + number)
        self.node_events = self.store.events = self.sweeper.events = self.trace_events.events = (
            SideUpward(self)
        )
        self.network, self.number = network, number
        self.common_queue: int | None = None
        self.again_queue: int | None = None
        self.host_id = 1000 + number
        self.remote_objects = RemoteObjects(self.results, self.loop, self.node_events)
        self.remote_objects.fetcher = self
        self.imports = Imports(self.results, self.remote_objects, self.send, self.node_events)
        self.roster = Roster()
        self.exports = Exports(
            self.results,
            self.remote_objects,
            self.send,
            lambda: number,
            self.loop,
            self.roster,
            self.node_events,
        )
        self.outbound_tasks = OutboundTasks(
            self.results, self.imports, self.remote_objects, self.send, self.node_events
        )
        self.inbound_tasks = InboundTasks(
            self.results, self.imports, self.send, self.trace_events, self.node_events
        )
        self.interrupted: list[tuple[int, int]] = []
        self.node.open_pool(COMMON, 1)
        self.party = self.client()
        self.tasks = _tasks.Tasks(self.party)
        self.give_span(self.party)
        self.fetching: dict[int, RemoteObject] = {}
        self.sent: dict[int, Any] = {}  # tasks of this host's process -> what it holds for them

    def send(self, host_id: int, message: PeerMessage) -> bool:
        return self.network.send(self.host_id, host_id, message)

    def queue_to(self, pool: int) -> int:
        if self.common_queue is None:
            self.common_queue = self.node_tasks.open_queue(pool, here=True)
        return self.common_queue

    def post_again(self, oid: int) -> None:
        if self.again_queue is None:
            self.again_queue = self.node_tasks.open_queue(COMMON)
        self.node_tasks.post(oid, self.again_queue)

    def interrupted_at(self, oid: int, slot: int) -> None:
        self.interrupted.append((oid, slot))

    def take(self, peer: int, message: Any) -> None:
        match message:
            case Acquire():
                self.exports.acquire(peer, message)
            case Release():
                if not self.inbound_tasks.release(peer, message):
                    self.exports.release(peer, message)
            case RunTask():
                self.inbound_tasks.run(peer, message)
            case TaskEnded():
                self.outbound_tasks.ended(peer, message)
            case CancelTask():
                self.inbound_tasks.cancel(message.task)
            case RecallTasks():
                self.inbound_tasks.recall(peer, message.tasks)
            case Drop():
                self.exports.drop(message.object)
            case Described():
                self.imports.described(message)

    def poll(self) -> None:
        done = self.node_tasks.drain()
        self.sweeper.completed(done)
        self.inbound_tasks.completed(done)
        self.outbound_tasks.hand_out()
        self.results.poll()
        self.exports.poll()
        for oid in self.node.collect():
            self.sweeper.inner.pop(oid, None)
            self.imports.freed(oid)
        self.remote_objects.purge()

    # -- the fetcher ---------------------------------------------------------------------------

    def fetch(self, oid: int, remote: RemoteObject) -> None:
        self.fetching[oid] = remote

    def forget(self, oid: int, remote: RemoteObject) -> None:
        self.fetching.pop(oid, None)

    def bring(self) -> None:
        """Copies what is being fetched from its first holder."""
        for oid, remote in list(self.fetching.items()):
            source = self.network.sides[remote.holders[0]]
            mem = memoryview(source.node.view(ids.unpack_id(remote.object)[1]))  # type: ignore[arg-type]
            self.node.memory(remote.payload, remote.nbytes)[:] = mem
            del self.fetching[oid]
            self.remote_objects.arrived(oid)

    # -- a process of this host ----------------------------------------------------------------

    def small(self, nbytes: int) -> int:
        """A block of a span; 0 for what is too large for one."""
        at = self.party.allocate(nbytes)
        if not at and nbytes <= 4096:
            self.give_span(self.party)
            at = self.party.allocate(nbytes)
        return at

    def put(self, value: Any) -> tuple[bytes, Any]:
        """(public id, hold of the process)."""
        encoded = _serialize.encode(value)
        at = self.small(encoded.nbytes)
        if not at:
            got = self.store.lease(encoded.nbytes, self.party.slot)
            assert got is not None
            at = got
        self.party.write(at, encoded.head, encoded.buffers, encoded.offsets)
        oid = self.party.publish(at, encoded.nbytes, bool(encoded.refs))
        return ids.pack_id(self.host_id, oid), self.party.hold(oid, False)

    def pending(self) -> tuple[bytes, Any]:
        """A task that this host's process has sent and that runs."""
        oid = self.party.new(KIND_TASK, STATE["CLAIMED"], self.party.slot, POOL)
        return ids.pack_id(self.host_id, oid), self.party.hold(oid, False)

    def finish(self, object_id: bytes, value: Any) -> None:
        oid = ids.unpack_id(object_id)[1]
        failed = isinstance(value, Exception)
        encoded = _serialize.encode_error(value, "") if failed else _serialize.encode(value)
        at = self._place(encoded.nbytes)
        self.party.write(at, encoded.head, encoded.buffers, encoded.offsets)
        self.party.bind(oid, at, encoded.nbytes, False)
        assert self.tasks.finish(oid, failed)

    # -- tasks ---------------------------------------------------------------------------------

    def submit(
        self,
        args: tuple[Any, ...] = (),
        *,
        holds: Any = (),
        retries: int = 3,
        pool: int = COMMON,
        output_owner: int = 0,
        flags: int = 0,
    ) -> int:
        """A task of this host's process. Its function is an object as any other here."""
        if not self.sent:
            self.queue_of_party = {COMMON: self.tasks.open_queue(COMMON)}
        if pool not in self.queue_of_party:
            self.queue_of_party[pool] = self.tasks.open_queue(pool)
        function_id, function = self.put("the function")
        call = _serialize.encode_call(args, {})
        oid = self.party.new(KIND_TASK, STATE["WAITING"], 0, pool)
        self.sent[oid] = [self.party.hold(oid, False), function, holds]
        function_oid = ids.unpack_id(function_id)[1]
        self.tasks.submit(
            oid,
            function_oid,
            call.tobytes(),
            0,
            retries,
            0,
            flags,
            b"f",
            self.queue_of_party[pool],
            True,
            output_owner,
        )
        return oid

    def take_task(self) -> int:
        """A worker of this host claims a task; 0: there is none."""
        return self.tasks.next(COMMON, 0)

    def answer(self, oid: int, value: Any) -> None:
        """That worker's result."""
        failed = isinstance(value, Exception)
        encoded = _serialize.encode_error(value, "") if failed else _serialize.encode(value)
        refs = bool(encoded.refs)
        at = self._place(encoded.nbytes)
        self.party.write(at, encoded.head, encoded.buffers, encoded.offsets)
        self.party.bind(oid, at, encoded.nbytes, refs)
        if not self.tasks.finish(oid, failed):
            self.party.give_back(at, oid)
            self.tasks.settle(oid)

    def _place(self, nbytes: int) -> int:
        """A block of a span, or one of its own."""
        if nbytes <= 4096:
            return self.small(nbytes)
        got = self.store.lease(nbytes, self.party.slot)
        assert got is not None
        return got

    def hold(self, object_id: bytes) -> list[Any]:
        """Asks the node for a foreign object; the holds of the process are in the list when the
        answer has come."""
        found: list[Any] = []

        def done(holds: list[Any]) -> None:
            found.extend(None if hold is None else self.party.hold(hold.oid) for hold in holds)

        self.imports.ask([object_id], done)
        return found

    def value(self, hold: Any) -> Any:
        """What a process reads; an int is the header's state."""
        got = self.party.view(hold.oid)
        if isinstance(got, int):
            return STATES[got]
        mem = memoryview(got)
        if _serialize.payload_kind(mem) == _serialize.ERROR:
            return _serialize.decode_error(mem, lambda i: None)  # type: ignore[arg-type,return-value]
        value = _serialize.decode(mem, make_ref=lambda i: None, writable=True)  # type: ignore[arg-type,return-value]
        return value.copy() if isinstance(value, np.ndarray) else value


class Network:
    """Lines between sides; a message waits in its line until it is delivered."""

    side = Side

    def __init__(self, size: int) -> None:
        self.lines: dict[tuple[int, int], deque[bytes]] = {}
        self.sides = [self.side(self, number) for number in range(size)]
        self.by_host_id = {side.host_id: side for side in self.sides}
        self.dead: set[int] = set()
        self.stopped: set[tuple[int, int]] = set()  # lines that deliver nothing now
        self._decoder = msgspec.msgpack.Decoder(PeerMessage)

    def send(self, source: int, target: int, message: PeerMessage) -> bool:
        if target not in self.by_host_id or target in self.dead:
            return False
        line = self.lines.setdefault((source, target), deque())
        line.append(msgspec.msgpack.encode(message))
        return True

    def deliver(self, source: int, target: int) -> bool:
        """The oldest message of one line; False: it is empty."""
        line = self.lines.get((source, target))
        if not line or (source, target) in self.stopped:
            return False
        message = self._decoder.decode(line.popleft())
        if source not in self.dead and target not in self.dead:
            self.by_host_id[target].take(source, message)
        return True

    def pump(self) -> None:
        """Until nothing is under way and nobody has anything to say."""
        while True:
            for side in self.sides:
                if side.host_id not in self.dead:
                    side.poll()
            if not any([self.deliver(*line) for line in list(self.lines)]):
                return

    def lose(self, side: Side) -> None:
        """That host dies; the others learn of it."""
        self.dead.add(side.host_id)
        for other in self.sides:
            if other.host_id not in self.dead:
                other.outbound_tasks.lose_runner(side.host_id)
                other.inbound_tasks.peer_lost(gone(side.host_id))
                for one in list(other.imports.by_oid.values()):
                    if one.owner == side.host_id and one.number:
                        other.imports.fail(one, "its host is gone")
                other.exports.peer_lost(gone(side.host_id))
                other.remote_objects.peer_lost(gone(node=side.number))
                for oid, remote in list(other.fetching.items()):
                    if not remote.holders:  # as who plans the fetches says
                        other.remote_objects.lost(oid, "refused")

    def close(self) -> None:
        for side in self.sides:
            side.close()


def states_of(client: _shm.Client) -> list[str]:
    """The states of all headers in use."""
    return [header["state"] for header in client.scan()]


STATES = list(STATE)


BIG = np.arange(40_000, dtype=np.float64)


def assert_nothing_kept(network: Network) -> None:
    """Nobody holds anything any more: nothing is kept anywhere."""
    network.pump()
    for side in network.sides:
        if side.host_id in network.dead:
            continue
        side.party.collect()
        network.pump()
        assert states_of(side.node) == []
        assert not side.imports.by_object
        assert not side.imports.by_oid
        assert not side.exports.exports
        assert not any(side.exports._watched.values())
        assert not side.remote_objects.by_oid


def remote_hold(network: Network, side: Side, object_id: bytes) -> list[object]:
    found = side.hold(object_id)
    network.pump()
    assert len(found) == 1
    return found
