"""What clients ask of the node, one method for each kind of question.

Why it exists: the loop reads packets; this file answers them. A question that cannot be answered
now (no room) is answered "full" after a short while, so that no client's line is blocked for long.
It must never know: sockets, how a client waits.
"""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING, Any

from hoplite_mp.node.foreign_holds import ForeignHolds
from hoplite_mp.node.pools import Pool
from hoplite_mp.node.retries import Retries
from hoplite_mp.protocol.actors import (
    ActorBegins,
    ActorFailed,
    ActorMayEnd,
    ActorRestarts,
    ActorStateAsked,
    BindActor,
    EndActor,
    FailActorCalls,
    FindActor,
    KeepActorState,
    OpenActor,
)
from hoplite_mp.protocol.foreign import HoldForeign, UsersOfNode
from hoplite_mp.protocol.local import (
    ON_ITS_WAY,
    RESTORED,
    SPILLED_PIECE_BYTES,
    AddWorkers,
    BindPool,
    ClosePool,
    Collective,
    DrainNode,
    DropForeign,
    Dump,
    DumpRead,
    GiveSpans,
    GoneNodes,
    GroupAdmit,
    GroupCall,
    GroupInbox,
    GroupJoin,
    GroupLeave,
    GroupReceived,
    GroupRefusal,
    GroupSend,
    GroupWritten,
    Import,
    Imported,
    Interrupt,
    Lease,
    LeaseSpan,
    LeavingNodes,
    Locate,
    Members,
    OpenPool,
    ReadSpilled,
    Reply,
    Request,
    Restore,
    SetUp,
    SetupFailed,
    Standing,
    Stats,
    TraceBegin,
    TraceDrop,
    TraceEnd,
    TracePiece,
)
from hoplite_mp.protocol.output import MarkLines
from hoplite_mp.protocol.resources import (
    AssignedAsked,
    GiveBack,
    KeepForStream,
    ResourcePlaces,
    TakeResources,
)
from hoplite_mp.protocol.retries import TryAgain
from hoplite_mp.protocol.rounds import BeginRound, EndRound, OpenRound, TakeRound

if TYPE_CHECKING:
    from hoplite_mp.node.main import Node

__all__ = ["Requests"]

PATIENCE_S = 0.2  # a full store answers after this
RETRY_S = 0.01


class Requests:
    """Answers the clients of one node."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self.client = node.client
        self.store = node.store
        self.last_lease: dict[int, tuple[int, int]] = {}  # slot -> (number of the reply, payload)
        self.last_pool: dict[int, tuple[int, int]] = {}  # the same, of pools
        self.last_span: dict[int, tuple[int, int]] = {}  # the same, of spans
        self.waiting_standing: list[tuple[int, int]] = []
        self.granted: dict[int, dict[int, Any]] = {}  # slot -> number -> holds not yet taken over
        self.given: list[int] = []  # descriptors that came with the request that is served
        self.latest: dict[int, int] = {}  # slot -> number of its last question
        self.foreign_holds = ForeignHolds(
            node.client.hold, node.config.foreign_hold_s, node.loop, node.reply
        )
        self._answers: dict[type, Any] = {
            Lease: self.lease,
            LeaseSpan: self.lease_span,
            Restore: self.restore,
            ReadSpilled: self.read_spilled,
            GiveSpans: self.give_spans,
            Import: self.import_,
            Imported: self.imported,
            HoldForeign: self.foreign_holds.asked,
            UsersOfNode: self.users,
            DropForeign: lambda slot, request: node.imports.drop(request.ask.oid),
            Interrupt: self.interrupt,
            Collective: lambda slot, request: node.operations.asked(request.ask, slot),
            OpenPool: self.open_pool,
            AddWorkers: self.add_workers,
            BindPool: self.bind_pool,
            DrainNode: self.drain_node,
            ClosePool: lambda slot, request: node.workers.close(request.ask.pool, request.ask.kill),
            GroupCall: self.group_call,
            GroupWritten: self.group_written,
            GroupSend: node.messages.send,
            GroupInbox: node.messages.inbox,
            GroupReceived: node.messages.received,
            GroupJoin: lambda slot, request: node.groups.join(
                request.ask, slot, request.number, node.config.group_members_max
            ),
            GroupLeave: lambda slot, request: node.groups.leave(request.ask, slot, request.number),
            GroupAdmit: lambda slot, request: node.groups.admitted(
                request.ask.name, request.ask.generation, request.ask.rank
            ),
            Locate: self.locate,
            Members: self.members,
            GoneNodes: self.gone_nodes,
            LeavingNodes: self.leaving_nodes,
            Standing: self.standing,
            GroupRefusal: lambda slot, request: node.reply(
                slot, Reply(request.number, node.groups.why(slot, request.ask))
            ),
            SetUp: lambda slot, request: node.workers.set_up(slot),
            SetupFailed: self.setup_failed,
            Stats: lambda slot, request: node.counters.ask(slot, request.number),
            TraceBegin: node.tracing.begin,
            TraceEnd: node.tracing.end,
            TracePiece: node.tracing.piece,
            TraceDrop: node.tracing.drop,
            Dump: node.waits.ask,
            DumpRead: node.waits.piece,
            OpenActor: node.actors.open,
            FindActor: node.actors.find,
            EndActor: node.actors.end,
            ActorRestarts: node.actors.restarts,
            FailActorCalls: node.actors.fail_calls,
            ActorFailed: node.actors.constructor_raised,
            ActorBegins: node.actors.begins,
            ActorMayEnd: node.actors.may_end,
            ActorStateAsked: node.actors.state_asked,
            KeepActorState: node.actors.keep_state,
            TryAgain: Retries(node.host, node.sweeper, node.workers).ask,
            OpenRound: node.rounds.open,
            BeginRound: node.rounds.begin,
            EndRound: node.rounds.end,
            TakeRound: node.rounds.take,
            BindActor: node.actors.bind,
            TakeResources: node.resources.take,
            GiveBack: node.resources.give_back,
            KeepForStream: node.resources.keep_for_stream,
            ResourcePlaces: node.resources.places,
            AssignedAsked: node.resources.assigned,
            MarkLines: lambda slot, request: node.output.mark_lines(
                request.ask.number, node.driver_name(slot)
            ),
        }

    def take(self, slot: int, request: Request, given: list[int]) -> None:
        """given: descriptors that came with it; who needs them empties the list."""
        self.given = given
        self.latest[slot] = request.number or self.latest.get(slot, 0)
        lost = self.last_lease.pop(slot, None)
        if lost is not None and request.seen < lost[0]:
            self.store.free_unused(lost[1], slot)  # that reply was never read: Ctrl-C in the middle
        lost = self.last_span.pop(slot, None)
        if lost is not None and request.seen < lost[0]:
            self.store.give_span(lost[1], slot)
        lost = self.last_pool.pop(slot, None)
        if lost is not None and request.seen < lost[0]:
            self.node.workers.close(lost[1], True)
        self._answers[type(request.ask)](slot, request)

    # -- memory --------------------------------------------------------------------------------

    def lease(self, slot: int, request: Request) -> None:
        ask: Any = request.ask
        nbytes = ask.nbytes
        if ask.error:  # answered at once: who waits for the task is to learn that it has failed
            found = self.store.lease_error(nbytes, slot)
            if found is not None:
                self.last_lease[slot] = (request.number, found)
            why = "" if found is not None else self.store.full_message()
            self.node.reply(slot, Reply(request.number, found, why, found is None))
            return
        if self.store.impossible(nbytes):
            self.node.reply(slot, Reply(request.number, "never", self.store.never_message(), True))
            return

        if self.node.lan is not None:
            self.node.lan.recovering.leases(slot)

        def attempt() -> int | None:
            payload = self.store.lease(nbytes, slot)
            if payload is not None:
                self.last_lease[slot] = (request.number, payload)
            return payload

        self.patiently(slot, request, attempt)

    def lease_span(self, slot: int, request: Request) -> None:
        def attempt() -> int | None:
            start = self.store.lease_span(slot)
            if start is not None:
                self.last_span[slot] = (request.number, start)
            return start

        self.patiently(slot, request, attempt)

    def restore(self, slot: int, request: Request) -> None:
        oid = request.ask.oid  # type: ignore[union-attr]

        def attempt() -> int | None:
            places = self.node.places
            if oid in places:
                return ON_ITS_WAY if places.want(oid, _nothing) else None
            return None if self.store.restore(oid, slot) is None else RESTORED

        self.patiently(slot, request, attempt)

    def read_spilled(self, slot: int, request: Request) -> None:
        ask: Any = request.ask
        nbytes = min(ask.nbytes, SPILLED_PIECE_BYTES)
        piece = self.store.read_spilled(ask.oid, ask.offset, nbytes)
        self.node.reply(slot, Reply(request.number, piece))

    def patiently(self, slot: int, request: Request, attempt: Any) -> None:
        """Answers at once if it can; else tries again for a while as things come back."""
        deadline = self.node.loop.now() + PATIENCE_S
        line = self.node.clients.get(slot)

        def again() -> None:
            if line is None or self.node.clients.get(slot) is not line:
                return  # it has died; the slot may be another's by now
            if self.latest.get(slot) != request.number:
                return  # Ctrl-C: it has asked something else since
            value = attempt()
            if value is not None:
                self.client.set_hungry(False)
                self.node.pages.watch_idle()
                self.node.reply(slot, Reply(request.number, value))
            elif self.store.returned_to == slot:  # there is room in its own spans now
                self.client.set_hungry(False)
                message = f"{self.store.room_message()}. Free arrays, or raise memory="
                self.node.reply(slot, Reply(request.number, None, message, True))
            elif self.node.loop.now() >= deadline:
                self.client.set_hungry(False)
                message = self.store.full_message()
                self.node.reply(slot, Reply(request.number, None, message, True))
            else:
                self.client.set_hungry(True)
                self.node.loop.call_later(RETRY_S, again)

        again()

    # -- objects of other hosts ----------------------------------------------------------------

    def import_(self, slot: int, request: Request) -> None:
        """The holds in `granted` keep what the caller has not taken a hold on yet."""
        line = self.node.clients.get(slot)
        objects = request.ask.objects  # type: ignore[union-attr]

        def done(holds: list[Any]) -> None:
            if line is None or self.node.clients.get(slot) is not line:
                return  # it has died
            self.granted.setdefault(slot, {})[request.number] = holds
            oids = [0 if hold is None else hold.oid for hold in holds]
            self.node.reply(slot, Reply(request.number, oids))

        self.node.imports.ask(objects, done)

    def imported(self, slot: int, request: Request) -> None:
        number = request.ask.number  # type: ignore[union-attr]
        granted = self.granted.get(slot, {})
        for old in [old for old in granted if old <= number]:  # Ctrl-C: some were never confirmed
            del granted[old]

    def forget_client(self, slot: int) -> None:
        """Its process has ended; the next one in its slot counts from the beginning."""
        self.granted.pop(slot, None)
        self.latest.pop(slot, None)
        self.last_lease.pop(slot, None)
        self.last_span.pop(slot, None)
        self.last_pool.pop(slot, None)
        self.node.tracing.forget_client(slot)
        self.node.waits.forget_client(slot)
        self.waiting_standing = [one for one in self.waiting_standing if one[0] != slot]

    def give_spans(self, slot: int, request: Request) -> None:
        for offset in request.ask.offsets:  # type: ignore[union-attr]
            self.store.give_span(offset, slot)

    def interrupt(self, slot: int, request: Request) -> None:
        ask: Any = request.ask
        if not self.node.delegation.cancel(ask.oid):
            self.node.workers.interrupt(ask.oid, ask.slot)

    # -- pools ---------------------------------------------------------------------------------

    def open_pool(self, slot: int, request: Request) -> None:
        ask: Any = request.ask
        workers = self.node.workers
        audience = self.node.audience_of(slot)
        if ask.workers:
            about = audience, ask.env, ask.demand
            pool = Pool(0, ask.workers, slot, ask.max_tasks, ask.setup, False, *about)
            number = pool.number if workers.open(pool, self.given) else None
        else:
            number = workers.open_bound(slot, audience)
        if number is None or not ask.far or self.node.lan is None:
            error = "" if number is not None else workers.why_none
            if number is not None:
                self.last_pool[slot] = request.number, number
            self.node.reply(slot, Reply(request.number, number, error))
            return

        line, reply = self.node.clients.get(slot), self.node.replier(slot)

        def done(error: str, lost: bool) -> None:
            if not error and self.node.clients.get(slot) is line:
                if self.latest.get(slot) != request.number:  # Ctrl-C: nobody waits for it
                    workers.close(number, True)
                    return
                self.last_pool[slot] = request.number, number
            if lost:
                reply(Reply(request.number, error))
            else:
                reply(Reply(request.number, None if error else number, error))

        self.node.lan.far_pools.open(number, ask, done)

    def add_workers(self, slot: int, request: Request) -> None:
        ask: Any = request.ask
        node, lan = self.node, self.node.lan
        error, gone = "", False
        if ask.node == node.number:
            now = node.workers.grow(ask.count)
            error = node.workers.why_none if node.workers.pauses() else ""
            if lan is not None:
                lan.tell_workers(now)
        elif lan is None or not lan.grow_far(ask.node, ask.count):
            error, gone = f"node h{ask.node} is gone", True
        node.reply(slot, Reply(request.number, None, error, gone=gone))

    def bind_pool(self, slot: int, request: Request) -> None:
        wanted = request.ask.node  # type: ignore[union-attr]
        workers = self.node.workers
        number = workers.open_bound(slot, 0)
        if number is None:
            self.node.reply(slot, Reply(request.number, None, workers.why_none))
        elif not self.node.delegation.bind(number, wanted):
            workers.close(number, False)
            why = f"node h{wanted} is gone"
            self.node.reply(slot, Reply(request.number, None, why, gone=True))
        else:
            self.node.reply(slot, Reply(request.number, number))

    def drain_node(self, slot: int, request: Request) -> None:
        lan, number = self.node.lan, request.ask.node  # type: ignore[union-attr]
        gone = lan is not None and number not in lan.members
        why = "this is the only node" if lan is None else lan.drain(number)
        self.node.reply(slot, Reply(request.number, None, why, gone=gone))

    def standing(self, slot: int, request: Request) -> None:
        self.waiting_standing.append((slot, request.number))
        self.answer_standing()

    def answer_standing(self) -> None:
        """As soon as it is known whether this node is in a cluster, and as which."""
        node = self.node
        if not node.standing and node.management.join_error is None:
            return
        cluster = node.lan.cluster if node.lan is not None else b""
        managed = node.management.wire is not None
        stands = (node.number, cluster, *node.management.standby, managed)
        waiting, self.waiting_standing = self.waiting_standing, []
        for slot, number in waiting:
            node.reply(slot, Reply(number, node.management.join_error or stands))

    def members(self, slot: int, request: Request) -> None:
        node = self.node
        used = self.store.used_bytes()
        mine = len(node.workers.pools[0].workers)
        resources, free = node.resources.totals, node.resources.ledger.free()
        if node.lan is None:
            own = (
                *(0, "127.0.0.1", socket.gethostname(), mine, used, self.store.limit),
                *(resources, free),
            )
            node.reply(slot, Reply(request.number, [own]))
            return
        found = [
            (
                member.node,
                member.addresses[0].rpartition(":")[0].strip("[]") if member.addresses else "",
                member.host,
                mine if member.node == node.number else member.workers,
                used if member.node == node.number else 0,
                member.memory_total,
                member.resources,
                free if member.node == node.number else member.resources,
            )
            for member in node.lan.members.values()
        ]
        node.reply(slot, Reply(request.number, found))

    def users(self, slot: int, request: Request) -> None:
        lan = self.node.lan
        there = 0 if lan is None else sum(not one.left for one in lan.drivers.by_slot.values())
        self.node.reply(slot, Reply(request.number, there))

    def gone_nodes(self, slot: int, request: Request) -> None:
        lan, now = self.node.lan, self.node.loop.now()
        gone = [] if lan is None else [(one, host, now - at) for one, host, at in lan.gone]
        self.node.reply(slot, Reply(request.number, gone))

    def leaving_nodes(self, slot: int, request: Request) -> None:
        leaving = [] if self.node.lan is None else self.node.lan.draining.numbers
        self.node.reply(slot, Reply(request.number, leaving))

    def group_call(self, slot: int, request: Request) -> None:
        if self.node.groups.hosts is not None:
            self.node.groups.hosts.said(slot, request.ask)  # type: ignore[arg-type]

    def group_written(self, slot: int, request: Request) -> None:
        ask: Any = request.ask
        if self.node.lan is not None:
            self.node.lan.given.write(slot, ask.payload, ask.ranges)

    def locate(self, slot: int, request: Request) -> None:
        oid = request.ask.oid  # type: ignore[union-attr]
        if self.node.lan is None:
            self.node.reply(slot, Reply(request.number, [self.node.number]))
        else:
            self.node.lan.locations.ask(slot, request.number, oid)

    def setup_failed(self, slot: int, request: Request) -> None:
        ask: Any = request.ask
        self.node.workers.setup_failed(slot, ask.summary, ask.text)
        self.node.reply(slot, Reply(request.number))


def _nothing() -> None:
    """Who waits for an object that arrives is woken by the header itself."""
