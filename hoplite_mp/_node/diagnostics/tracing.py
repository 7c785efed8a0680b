"""Traces of the whole cluster: recording on every node, and comparison of the nodes' clocks.

The tracing process sends requests only to its own node. That node notifies the other nodes,
including nodes that join later, and forwards their recorded events in pieces, so that no process
has all events in memory. Clocks are compared at the beginning and at the end of a trace. The answer
to a query contains the other clock's time, with an error of at most half of the round trip, as in
Cristian's algorithm (1989). The answer with the shortest round trip is used.

Only one trace at a time runs in a cluster. Two traces would halve the space for each, and a second
one is usually a mistake. A trace ends when the process that started it exits or that process's host
is lost.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec

from hoplite_mp import _tasks
from hoplite_mp._common.object_states import STATE
from hoplite_mp._node.io.processes import hostname
from hoplite_mp._node.questions import PATIENCE_S
from hoplite_mp._protocol.diagnostics import (
    EVENT,
    OUTCOMES_OF_EVENTS,
    PIECE_BYTES_MAX,
    ClockQuery,
    DiagnosticsResponse,
    TraceDocument,
    TraceReadRequest,
    TraceRequest,
)
from hoplite_mp._protocol.local import Reply, TraceBegin, TraceDrop, TraceEnd, TracePiece

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from hoplite_mp._node.dispatch import Handler
    from hoplite_mp._node.objects.context import HostContext
    from hoplite_mp._node.questions import Answer
    from hoplite_mp._node.tasks.worker_pools import WorkerInfo
    from hoplite_mp._protocol.local import Request
    from hoplite_mp._protocol.messages import Member

__all__ = ["Clock", "Recording", "Tracing", "best_clock"]

# A node's records for a trace: the tasks of its processes, and its own events.
#
# Processes write 80 bytes for each task to rings in shared memory. The node copies a ring when it
# fills up, when its process has exited, and at the end of the trace. The events stay packed,
# because a Python object for each event would be too expensive at a hundred thousand tasks a
# second.


RUNNING, DONE, FAILED, CANCELLED, LOST, TIMEOUT = range(len(OUTCOMES_OF_EVENTS))
# State of a task's header -> outcome of the task, if its process has not recorded the task's end.
# All other states count as DONE.
_ENDED = {
    STATE["FAILED"]: FAILED,
    STATE["ABORTED"]: CANCELLED,
    STATE["CANCELLED"]: CANCELLED,
    STATE["DELETED"]: CANCELLED,
    STATE["CLAIMED"]: RUNNING,
}
_VERDICTS = {"timeout": TIMEOUT, "cancelled": CANCELLED}
assert EVENT.size == _tasks.EVENT_BYTES


class Recording:
    """This node's part of the current trace."""

    def __init__(
        self, host: HostContext, track_name: Callable[[int, WorkerInfo | None], str]
    ) -> None:
        """track_name: returns the name of the track for the process in the slot, or "" if the
        process has no track of its own. The second argument is the worker if it has exited."""
        self.loop = host.loop
        self.trace_events = host.trace_events
        self.client = host.client
        self.tasks = host.tasks
        self.clients = host.clients
        self.track_name = track_name
        self.on = False
        self.document = b""  # the packed document of the latest trace
        self._trace = _tasks.Trace(host.tasks)
        self._begin_ns = 0
        self._dropped = 0
        self._events: deque[tuple[int, int, bytes]] = deque()
        self._count = 0  # number of events in `_events`
        self._actors: dict[int, str] = {}  # pid -> name of the process's track

    def start(self) -> None:
        """Starts recording in all processes and components."""
        self._begin_ns = self.loop.now_ns()
        self.trace_events.start()
        self._forget()
        self._trace.start()
        self.on = True

    def running(self, slot: int) -> bytes:
        """The tasks that a process is running, as EVENTs. Available even without a trace."""
        return self._trace.open(slot)

    def poll(self) -> None:
        """Empties the rings that are filling up."""
        if self.on:
            for slot in self.clients:
                if self._trace.waits(slot):
                    self._take(slot)

    def _take(self, slot: int, ended: WorkerInfo | None = None) -> bytes:
        data, dropped = self._trace.take(slot)
        self._dropped += dropped
        self._add(slot, data, ended)
        return data

    def _add(self, slot: int, data: bytes, ended: WorkerInfo | None = None) -> None:
        if not data:
            return
        pid = self.tasks.pid(slot)
        if pid not in self._actors and (name := self.track_name(slot, ended)):
            self._actors[pid] = name
        self._events.append((slot, pid, data))
        self._count += len(data) // EVENT.size
        while (over := self._count - self.trace_events.most) > 0:
            oldest, pid, events = self._events.popleft()
            gone = min(over, len(events) // EVENT.size)
            if gone * EVENT.size < len(events):
                self._events.appendleft((oldest, pid, events[gone * EVENT.size :]))
            self._count -= gone
            self._dropped += gone

    def exited(self, slot: int, worker: WorkerInfo | None) -> None:
        """Records the tasks that a process was running when it exited. Called before the headers
        that the process had claimed are settled."""
        if self.on:
            opened = self._trace.open(slot)
            verdict = _VERDICTS.get(worker.verdict if worker is not None else "", LOST)
            later = self._take(slot, worker)
            self._add(slot, self._ended(slot, opened, later, verdict), worker)

    def _ended(self, slot: int, opened: bytes, later: bytes, running: int) -> bytes:
        """The events for tasks on a process's stack (`opened`) whose end is not among the process's
        `later` events. running: the outcome of a task that has not ended."""
        recorded = {event[:2] for event in EVENT.iter_unpack(later)}
        now = self.loop.now_ns()
        found = b""
        for oid, begin_ns, _, kind, _, depth, rank, *more in EVENT.iter_unpack(opened):
            if (oid, begin_ns) not in recorded:
                outcome = self._outcome(slot, oid) or running
                found += EVENT.pack(oid, begin_ns, now, kind, outcome, depth, rank, *more)
        return found

    def _outcome(self, slot: int, oid: int) -> int:
        """The outcome of a task that is still on its process's stack. The task's result may already
        be sealed. For RUNNING, which is 0, the caller substitutes its own outcome."""
        header = self.client.inspect(oid)
        if header["id"] != oid:
            return DONE
        state = STATE[header["state"]]
        if state == STATE["CLAIMED"] and header["claimant"] != slot:
            return LOST  # another process is running the task again
        return LOST if header["state"] == "QUEUED" else _ENDED.get(state, DONE)

    def stop(self) -> int:
        """Ends the recording. Returns the size of the document in bytes."""
        if self.on:
            # Read the stacks before the rings. A task that ends after its stack was read is in the
            # ring, so it may be read twice but is never missed.
            opened = {slot: self._trace.open(slot) for slot in self.clients}
            self._trace.stop()
            self.on = False
            self.trace_events.stop()
            for slot, events in opened.items():
                self._add(slot, self._ended(slot, events, self._take(slot), RUNNING))
            document = TraceDocument(
                host=hostname(),
                host_id=self.client.host_id,
                begin_ns=self._begin_ns,
                end_ns=self.loop.now_ns(),
                events=list(self._events),
                inbound_tasks=self.trace_events.inbound_tasks,
                trace_events=list(self.trace_events.kept),
                dropped=self._dropped + self.trace_events.dropped,
                actors=self._actors,
            )
            self.document = msgspec.msgpack.encode(document)
            self._forget()
        return len(self.document)

    def _forget(self) -> None:
        self._events.clear()
        self._actors = {}
        self._count = self._dropped = 0
        if not self.on:
            self.trace_events.inbound_tasks.clear()

    def drop(self) -> None:
        """Discards the trace."""
        self._trace.stop()
        self.on = False
        self.trace_events.stop()
        self._forget()
        self.trace_events.kept.clear()
        self.document = b""


# The number of messages to each node for one comparison of clocks. Higher: closer to the shortest
# possible round trip. Lower: a trace begins and ends sooner (each message takes about 0.3 ms in a
# LAN).
CLOCK_ROUNDS = 8
# How long nodes may take to pack up to trace_events_max events. Higher: slow nodes are included.
# Lower: an unresponsive node delays the end of the trace less.
END_PATIENCE_S = 5.0

Clock = tuple[int, int, int]  # (local time, other clock minus local clock, maximum error), in ns


def best_clock(known: Clock | None, asked_ns: int, came_ns: int, there_ns: int) -> Clock:
    """The more precise of two clock comparisons: `known`, or one computed from a new answer.
    asked_ns, came_ns: the local times of the query and the answer. there_ns: the other clock's
    time."""
    trip = max(0, came_ns - asked_ns)
    middle = asked_ns + trip // 2
    error = (trip + 1) // 2
    if known is not None and known[2] <= error:
        return known
    return middle, there_ns - middle, error


@dataclass(slots=True, eq=False)
class _Owned:
    """A trace that a process on this host has started."""

    trace: int
    slot: int
    host_ids: set[int] = field(default_factory=set)  # hosts of the other recording nodes
    # Number of a node -> its host's id; filled when the trace has ended.
    nodes: dict[int, int] = field(default_factory=dict)
    lost: set[int] = field(default_factory=set)  # numbers of nodes whose recording is lost
    # Like `lost`, but for nodes without workers (programs that have left).
    left: set[int] = field(default_factory=set)
    # Host id -> the comparison of clocks at the beginning of the trace.
    before: dict[int, Clock] = field(default_factory=dict)


class Tracing:
    """This node's part in the current trace, if there is one."""

    def __init__(self, host: HostContext, recording: Recording) -> None:
        self.loop = host.loop
        self.client = host.client
        self.roster = host.roster
        self.send_peer = host.send_peer
        self.replier = host.replier
        self.questions = host.questions
        self.recording = recording
        self.owned: _Owned | None = None  # not None if a process on this host has started the trace
        self.trace = 0  # number of the trace, wherever it was started; 0 if there is none
        self.owner = 0  # id of the host where the trace was started

    # -- requests from a process on this host ---------------------------------------------------

    @property
    def handlers(self) -> dict[type, Handler]:
        """Handlers of requests from processes."""
        return {
            TraceBegin: self.begin,
            TraceEnd: self.end,
            TracePiece: self.piece,
            TraceDrop: self.drop,
        }

    def begin(self, slot: int, request: Request) -> None:
        """Starts a trace. Replies when all nodes are recording."""
        trace = request.ask.trace  # type: ignore[union-attr]
        respond = self._responder(slot, request)
        why = self._start(trace, self.client.host_id)
        if why:
            respond(why)
            return
        owned = self.owned = _Owned(trace, slot, set(self.roster.by_host_id))

        def begun(found: dict[int, Answer]) -> None:
            if self.owned is not owned:
                return
            refusal = next((a.message.error for a in found.values() if a.message.error), "")
            if refusal:
                self._end(owned, lambda: respond(refusal))
                return
            for host_id in owned.host_ids - found.keys():
                self._lose(owned, host_id)
            self._compare_clocks(found, clocks_known)

        def clocks_known(clocks: dict[int, Clock]) -> None:
            owned.before = clocks
            respond("")

        self._ask(owned, owned.host_ids, "begin", begun)

    def end(self, slot: int, request: Request) -> None:
        """Ends a trace. Replies with the size of each node's document, the comparisons of clocks,
        and the missing nodes."""
        owned = self.owned
        respond = self._responder(slot, request)
        if owned is None or owned.trace != request.ask.trace:  # type: ignore[union-attr]
            respond(None)
            return
        size = self.recording.stop()

        def ended(answers: dict[int, Answer]) -> None:
            found = {
                host_id: answer for host_id, answer in answers.items() if not answer.message.error
            }
            for host_id in owned.host_ids - found.keys():
                self._lose(owned, host_id)
            owned.nodes = {answer.node: host_id for host_id, answer in found.items()}
            self._compare_clocks(found, lambda clocks: clocks_known(found, clocks))

        def clocks_known(found: dict[int, Answer], clocks: dict[int, Clock]) -> None:
            rows: list[tuple[int, int, list[Clock]]] = [(self.client.number, size, [])]
            for host_id, answer in found.items():
                known = [owned.before.get(host_id), clocks.get(host_id)]
                at = [clock for clock in known if clock is not None]
                if at:
                    rows.append((answer.node, answer.message.value, at))
                else:
                    owned.lost.add(answer.node)
            respond((sorted(rows), sorted(owned.lost), sorted(owned.left)))

        self._ask(owned, owned.host_ids, "end", ended)

    def piece(self, slot: int, request: Request) -> None:
        """Replies with a piece of a node's document."""
        ask: Any = request.ask
        owned = self.owned
        respond = self._responder(slot, request)
        if owned is None or owned.trace != ask.trace:
            respond(None)
        elif ask.node == self.client.number:
            respond(self._piece(ask.offset))
        elif ask.node not in owned.nodes:
            respond(None)
        else:
            self.questions.ask(
                owned.nodes[ask.node],
                lambda number: TraceReadRequest(number, ask.trace, ask.offset),
                lambda answer: respond(None if answer is None else answer.message.data),
                END_PATIENCE_S,
            )

    def drop(self, slot: int, request: Request) -> None:
        """Discards a trace that has been read or is no longer needed."""
        owned = self.owned
        respond = self._responder(slot, request)
        if owned is None or owned.trace != request.ask.trace:  # type: ignore[union-attr]
            respond(None)
        else:
            self._end(owned, lambda: respond(None))

    def forget_client(self, slot: int) -> None:
        """Ends the trace of a process that has exited."""
        if self.owned is not None and self.owned.slot == slot:
            self._end(self.owned, _nothing)

    # -- requests from other nodes --------------------------------------------------------------

    def asked(self, host_id: int, message: TraceRequest) -> None:
        """Executes a step of another host's trace: "begin", "end" or "drop"."""
        value, error = 0, ""
        if message.step == "begin":
            error = self._start(message.trace, host_id)
        elif message.trace != self.trace or host_id != self.owner:
            error = "that trace is over"
        elif message.step == "end":
            value = self.recording.stop()
        else:
            self._drop()
        self.send_peer(host_id, DiagnosticsResponse(message.number, value, error=error))

    def read(self, host_id: int, message: TraceReadRequest) -> None:
        """Sends another host a piece of this node's document."""
        right = message.trace == self.trace and host_id == self.owner
        data = self._piece(message.offset) if right else b""
        self.send_peer(host_id, DiagnosticsResponse(message.number, data=data))

    def clock(self, host_id: int, message: ClockQuery) -> None:
        """Sends the time of this node's clock to another host."""
        self.send_peer(host_id, DiagnosticsResponse(message.number, self.loop.now_ns()))

    # -- nodes that join and leave -------------------------------------------------------------

    def peer_joined(self, host_id: int) -> None:
        """Starts recording on a node that has joined during a trace that was started on this
        host."""
        owned = self.owned
        if owned is None:
            return

        def begun(found: dict[int, Answer]) -> None:
            if self.owned is owned and host_id in found and not found[host_id].message.error:
                self._compare_clocks(found, owned.before.update)
            else:
                self._lose(owned, host_id)

        owned.host_ids.add(host_id)
        self._ask(owned, [host_id], "begin", begun)

    def peer_lost(self, member: Member) -> None:
        """Handles the loss of a host. If the host owned the trace, discards the trace here. If this
        node owns the trace, records that the other node's part is lost."""
        if member.host_id == self.owner and self.owned is None:
            self._drop()
        if self.owned is not None and member.host_id in self.owned.host_ids:
            self.owned.host_ids.discard(member.host_id)
            (self.owned.lost if member.workers else self.owned.left).add(member.node)
            self.owned.nodes.pop(member.node, None)

    # -- internals ------------------------------------------------------------------------------

    def _start(self, trace: int, owner: int) -> str:
        """Starts recording. Returns the reason if this node cannot take part, else ""."""
        if self.trace:
            known = self.roster.number_of(self.owner)
            number = self.client.number if known is None else known
            return f"this cluster is already being traced by a process at h{number}"
        self.trace, self.owner = trace, owner
        self.recording.start()
        return ""

    def _drop(self) -> None:
        self.trace = self.owner = 0
        self.owned = None
        self.recording.drop()

    def _end(self, owned: _Owned, done: Callable[[], None]) -> None:
        """Discards a trace everywhere, and calls `done` when all living nodes have done so."""
        self._ask(owned, owned.host_ids, "drop", lambda found: done())
        self._drop()

    def _lose(self, owned: _Owned, host_id: int) -> None:
        """Continues without a node that has not answered. Sends it "drop" in case it starts to
        record later."""
        number = self.roster.number_of(host_id)
        if number is not None:
            owned.lost.add(number)
            self.send_peer(host_id, TraceRequest(0, owned.trace, "drop"))
        owned.host_ids.discard(host_id)

    def _piece(self, offset: int) -> bytes:
        return self.recording.document[offset : offset + PIECE_BYTES_MAX]

    def _ask(
        self,
        owned: _Owned,
        host_ids: Iterable[int],
        step: str,
        done: Callable[[dict[int, Answer]], None],
    ) -> None:
        def make(number: int) -> TraceRequest:
            return TraceRequest(number, owned.trace, step)

        self.questions.ask_all(host_ids, make, done, END_PATIENCE_S)

    def _responder(self, slot: int, request: Request) -> Callable[[Any], None]:
        """Returns a function that replies to the request unless its process has died in the
        meantime."""
        reply = self.replier(slot)
        return lambda value: reply(Reply(request.number, value))

    def _compare_clocks(
        self, host_ids: Iterable[int], done: Callable[[dict[int, Clock]], None]
    ) -> None:
        """Compares clocks in several rounds of messages. Calls `done` with the best comparison for
        each host."""
        best: dict[int, Clock] = {}
        left = CLOCK_ROUNDS

        def collect(found: dict[int, Answer]) -> None:
            nonlocal left
            left -= 1
            for host_id, answer in found.items():
                there = answer.message.value
                known = best.get(host_id)
                best[host_id] = best_clock(known, answer.asked_ns, answer.came_ns, there)
            if left and found:
                self.questions.ask_all(found, ClockQuery, collect, PATIENCE_S)
            else:
                done(best)

        self.questions.ask_all(host_ids, ClockQuery, collect, PATIENCE_S)


def _nothing() -> None:
    """Does nothing, because the process that began the trace has exited and expects no reply."""
