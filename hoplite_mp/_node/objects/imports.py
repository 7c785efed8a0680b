"""Imports: objects of other hosts that processes on this host use.

An object of another host is represented by a header on this host. The node claims the header until
the object's owner has described the object. After that, every process here uses the header like any
other. The owner receives an Acquire message when the first process here holds the object, and a
Release message when the last process has released it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from hoplite_mp import _serialize
from hoplite_mp._common import ids
from hoplite_mp._common.object_states import GONE, KIND_FOREIGN, NODE_SLOT, STATE, UNWRITTEN, VALUED
from hoplite_mp._protocol.peers import Acquire, Drop, Release
from hoplite_mp.errors import ObjectLostError

if TYPE_CHECKING:
    from collections.abc import Callable

    from hoplite_mp._node.objects.remote_objects import RemoteObjects
    from hoplite_mp._node.objects.results import ResultWriter
    from hoplite_mp._protocol.peers import ObjectReport, PeerMessage

__all__ = ["ImportRecord", "Imports"]


@dataclass(slots=True, eq=False)
class ImportRecord:
    """One header here that represents another host's object. `owner`: the id of the owner's host.
    `number`: identifies the import to the owner; 0 if the owner does not count the import."""

    object: bytes
    owner: int
    number: int
    oid: int
    hold: Any  # the node's own hold, until the requesting processes have theirs
    described: bool = False
    asks: bool = False  # the owner's host is unknown here, so this node has asked the manager
    kept: bool = False  # a replica, which the node holds even if no process does
    moved: int = -1  # node number of a dead previous owner; -1: none
    runs_here: bool = False  # the object is the result of the owner's task, which runs here
    waiting: list[Callable[[], None]] = field(default_factory=list)
    # All headers of the same object on this host, in one shared list. The object's id maps to the
    # first one. The others remain while they are held.
    same: list[ImportRecord] = field(default_factory=list, repr=False)


class ImportsEvents(Protocol):
    """Reports and requests from this component to the components above it."""

    def nobody_named(self, oid: int) -> None:
        """Handles an owner's reply without holders, for an object whose known holders have all
        died."""

    def ask_for_owner(self, record: ImportRecord) -> bool:
        """Asks for the new owner of an import whose owner is gone. Returns False if there will be
        no new owner."""

    def result_held(self, oid: int) -> None:
        """Records that the owner now counts this host as a holder of the result of its task. The
        node may also keep this result for the owner."""


class Imports:
    """All objects of other hosts that are used here."""

    def __init__(
        self,
        results: ResultWriter,
        remote_objects: RemoteObjects,
        send: Callable[[int, PeerMessage], bool],
        events: ImportsEvents,
    ) -> None:
        self.results = results
        self.events = events
        self.client = results.client
        self.remote_objects = remote_objects
        self.send = send
        self.by_object: dict[bytes, ImportRecord] = {}
        self.by_oid: dict[int, ImportRecord] = {}
        self._next = 1
        results.local, results.headers = self.local, self.headers

    def ask(self, objects: list[bytes], done: Callable[[list[Any]], None], holder: int = 0) -> None:
        """Calls `done` with a hold on each object's header here (None if the object is gone), once
        all owners have confirmed that they keep the objects while these holds exist. holder: the id
        of a host that keeps its own objects anyway, so that it need not count this host."""
        found = [self._hold(object_id, holder) for object_id in objects]
        open_ = {
            id(record): record for record, _ in found if record is not None and not record.described
        }
        left = len(open_)
        holds = [hold for _, hold in found]

        def one_less() -> None:
            nonlocal left
            left -= 1
            if not left:
                done(holds)

        for record in open_.values():
            record.waiting.append(one_less)
        if not open_:
            done(holds)

    def _hold(self, object_id: bytes, holder: int) -> tuple[ImportRecord | None, Any]:
        host_id, oid = ids.unpack_id(object_id)
        if host_id == self.client.host_id:
            return None, self.client.hold(oid)
        known = self.by_object.get(object_id)
        if known is not None:
            hold = self.client.hold(known.oid)
            if hold is not None:
                # The owner does not count this host yet, because the header is for a replica or for
                # the result of the owner's task.
                if not known.number and known.owner not in (self.client.host_id, holder):
                    self._acquire(known)
                    self.events.result_held(known.oid)
                return known, hold
        record = self._new(object_id)
        hold = self.client.hold(record.oid)
        self._acquire(record)
        return record, hold

    def _new(self, object_id: bytes) -> ImportRecord:
        oid = self.client.new(KIND_FOREIGN, STATE["CLAIMED"], NODE_SLOT, 0)
        hold = self.client.hold(oid, False)
        record = ImportRecord(object_id, ids.unpack_id(object_id)[0], 0, oid, hold)
        self.lead(record)
        return record

    def lead(self, record: ImportRecord) -> None:
        """Maps the object's id to this header."""
        record.same = self.by_object.get(record.object, record).same
        self.by_object[record.object] = self.by_oid[record.oid] = record
        if record in record.same:
            record.same.remove(record)
        record.same.insert(0, record)

    def all_of(self, object_id: bytes) -> list[ImportRecord]:
        """All headers of the object on this host."""
        record = self.by_object.get(object_id)
        return [] if record is None else [*record.same]

    def _acquire(self, record: ImportRecord) -> None:
        """Notifies the owner that the object is held here. The owner replies with a description."""
        if not record.number:
            record.number, self._next = self._next, self._next + 1
        record.described = False
        record.asks = not self.send(record.owner, Acquire(record.object, record.number))
        if record.asks and not self.events.ask_for_owner(record):
            self.fail(record, "its host is not in this cluster, or has left it")

    def keep(self, object_id: bytes) -> Any:
        """Returns a hold on the object's header here, for a replica. The owner does not count
        it."""
        record = self.by_object.get(object_id)
        hold = None if record is None else self.client.hold(record.oid)
        if record is None or hold is None:
            record = self._new(object_id)
            hold, record.hold, record.described = record.hold, None, True
        record.kept = True
        return hold

    def release_kept(self, oid: int, *, keeps: bool) -> bool:
        """Notifies the owner that no process here holds the object, although the node still has a
        header for it. keeps: the node keeps a complete replica. Returns False if the owner did not
        count this import."""
        record = self.by_oid.get(oid)
        if record is None or not record.number or not record.described:
            return False
        self.send(record.owner, Release(record.object, record.number, keeps))
        record.number = 0
        return True

    def adopt(self, object_id: bytes, oid: int) -> None:
        """Maps the id of a task's result to this header, because the inbound task runs here. An
        earlier header of the same result here receives its value from the owner, as on other
        hosts."""
        owner = ids.unpack_id(object_id)[0]
        self.lead(ImportRecord(object_id, owner, 0, oid, None, True, runs_here=True))

    def follow_owner(self, oid: int) -> None:
        """Makes the result of a task an ordinary import, because the task returns to its owner.
        Processes on this host that hold the result receive its value from the owner."""
        record = self.by_oid[oid]
        record.runs_here = False
        # This is necessary even if the owner already counts this host. While the task was here, the
        # owner may have reported that the object is gone, and must now repeat that report.
        self._acquire(record)

    def public(self, oid: int) -> bytes:
        """The cluster-wide id of an object with a header here."""
        record = self.by_oid.get(oid)
        return ids.pack_id(self.client.host_id, oid) if record is None else record.object

    def near(self, object_id: bytes, oid: int) -> memoryview | None:
        """The payload of the object if this host has it under a header other than `oid`, else None.
        A task's result has two headers here if a process here held a ref to it when the task was
        sent here."""
        record = self.by_object.get(object_id)
        if record is None or record.oid == oid:
            return None
        got = self.client.view(record.oid)
        if isinstance(got, int) and self.results.store.restore(record.oid):
            got = self.client.view(record.oid)
        return None if isinstance(got, int) else memoryview(got)

    def own(self, object_id: bytes) -> int:
        """The local id of an object that this host owns because the object was created here or
        taken over. 0 if another host owns it."""
        host_id, oid = ids.unpack_id(object_id)
        if host_id == self.client.host_id:
            return oid
        record = self.by_object.get(object_id)
        return record.oid if record is not None and record.owner == self.client.host_id else 0

    def local(self, object_id: bytes) -> int:
        """The local id of an object of any host; 0 if it has no header here."""
        host_id, oid = ids.unpack_id(object_id)
        if host_id == self.client.host_id:
            return oid
        record = self.by_object.get(object_id)
        return 0 if record is None else record.oid

    def headers(self, object_id: bytes) -> list[int]:
        """The ids of all headers here for an object of any host."""
        own = self.own(object_id)
        others = [record.oid for record in self.all_of(object_id)]
        return [own, *others] if own and own not in others else others

    def is_whole(self, record: ImportRecord) -> bool:
        """Whether the value is on this host, in memory or in the spill file."""
        return self.client.state(record.oid) in VALUED and record.oid not in self.remote_objects

    def owner_of(self, object_id: bytes) -> int:
        """The host id of the object's last known owner."""
        record = self.by_object.get(object_id)
        return ids.unpack_id(object_id)[0] if record is None else record.owner

    # -- messages from the owner ---------------------------------------------------------------

    def described(self, message: ObjectReport) -> None:
        """Handles the owner's description of an object. The owner sends it after an Acquire, and
        again when a pending object is done."""
        headers = self.all_of(message.object)
        record = next((record for record in headers if record.number == message.number), None)
        if record is None:
            return
        if self.client.state(record.oid) not in UNWRITTEN:
            if self.remote_objects.absent(record.oid):
                self._described_again(record, message)
            else:
                self.remote_objects.set_holders(record.oid, message.holders)
            self.answer(record)  # the object was described before, or a collective placed it here
            return
        if record.runs_here:
            self.answer(record)
            return
        if message.state == "ready":
            self._ready(record, message)
        elif message.state == "failed":
            assert message.payload is not None
            self.store(record, message.payload, True)
        elif message.state == "gone":
            self.fail(record, "it was deleted, or had no holder left")
        self.answer(record)

    def _described_again(self, record: ImportRecord, message: ObjectReport) -> None:
        """Handles the owner's description of an object whose known holders have died."""
        if message.payload is not None:
            self.remote_objects.replace(record.oid, message.payload)
        elif message.state == "gone":
            why = f"object {record.object.hex()} is lost: it was deleted, or had no holder left"
            self.remote_objects.fail(record.oid, ObjectLostError(why))
        elif message.holders:
            self.remote_objects.found(record.oid, message.holders, message.nbytes, message.layout)
        elif message.state == "ready":
            self.events.nobody_named(record.oid)

    def _ready(self, record: ImportRecord, message: ObjectReport) -> None:
        if message.payload is None or not self.store(record, message.payload, False):
            self.remote_objects.complete(
                record.oid, message.object, message.nbytes, message.holders, message.layout
            )

    def store(self, record: ImportRecord, payload: bytes, failed: bool) -> bool:
        """Writes the value into a CLAIMED header. Returns False if the value does not fit now. An
        error that does not fit is replaced by a short error."""
        encoded = _serialize.Encoded(payload, [], [], len(payload), [])
        if not failed:
            return self.results.store_if_fits(record.oid, encoded, False)
        lost = ObjectLostError("there is no space for its error on this host")
        self.results.store_value(record.oid, encoded, True, lost)
        return True

    def fail(self, record: ImportRecord, why: str) -> None:
        """Makes readers raise ObjectLostError, because the value is permanently lost."""
        if self.client.state(record.oid) == STATE["CLAIMED"] and not record.runs_here:
            error = ObjectLostError(f"object {record.object.hex()} is lost: {why}")
            self.store(record, _serialize.encode_error(error, "").tobytes(), True)
        elif self.client.state(record.oid) == STATE["ABORTED"] and not record.runs_here:
            self.results.tasks.settle(record.oid)  # a process here has deleted it
        self.answer(record)

    def answer(self, record: ImportRecord) -> None:
        """Calls the functions that are waiting for the description."""
        record.described = True
        waiting, record.waiting = record.waiting, []
        for done in waiting:
            done()
        record.hold = None  # the requesting processes have their own holds now

    # -- the end -------------------------------------------------------------------------------

    def freed(self, oid: int) -> None:
        """Handles a freed header in the node's own table. If the header was an import, notifies the
        owner that no process here holds the object."""
        record = self.by_oid.get(oid)
        if record is None or self.client.state(oid) not in GONE:
            return
        del self.by_oid[oid]
        record.same.remove(record)
        if record.same:
            self.by_object[record.object] = record.same[0]
        else:
            del self.by_object[record.object]
        self.remote_objects.drop(oid)
        if record.number or not record.kept:
            keeps = any(map(self.is_whole, record.same))
            self.send(record.owner, Release(record.object, record.number, keeps))

    def drop(self, oid: int) -> None:
        """Notifies the owner that a process here has deleted the object."""
        record = self.by_oid.get(oid)
        if record is not None:
            self.send(record.owner, Drop(record.object))
