"""What this node records for a trace: the tasks that its processes have run, and its own notes.

Processes write 64 bytes for each task into rings in shared memory. This file copies them into the
node when a ring fills up, when its process has ended, and at the end of the trace. The events stay
packed, because a node that traces a hundred thousand tasks a second cannot afford a Python object
for each.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

import msgspec

from hoplite_mp import _tasks
from hoplite_mp._common.object_states import STATE
from hoplite_mp._node.io.os_info import hostname
from hoplite_mp._protocol.diagnostics import EVENT, OUTCOMES_OF_EVENTS, TraceDocument

if TYPE_CHECKING:
    from collections.abc import Callable

    from hoplite_mp._node.objects.context import HostContext
    from hoplite_mp._node.tasks.pools import WorkerInfo

__all__ = ["Recording"]

RUNNING, DONE, FAILED, CANCELLED, LOST, TIMEOUT = range(len(OUTCOMES_OF_EVENTS))
# The outcome of a task whose process never recorded its end, by the state of its header; any other
# state counts as DONE.
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
    """This node's part of a trace; one at a time."""

    def __init__(
        self, host: HostContext, track_name: Callable[[int, WorkerInfo | None], str]
    ) -> None:
        """track_name: returns the name of the track for the process in that slot, or "" if it has
        no track of its own. It is called with the worker, too, if its process has ended."""
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
        """The tasks that a process runs at present, as EVENTs; maintained even without a trace."""
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
        """Records the tasks that a process was running when it died. Called before the headers that
        it had claimed are settled."""
        if self.on:
            opened = self._trace.open(slot)
            verdict = _VERDICTS.get(worker.verdict if worker is not None else "", LOST)
            said = self._take(slot, worker)
            self._add(slot, self._ended(slot, opened, said, verdict), worker)

    def _ended(self, slot: int, opened: bytes, later: bytes, running: int) -> bytes:
        """Events for tasks on a process's stack (`opened`) whose end is not among its `later`
        events. running: the outcome for a task that has not ended."""
        said = {event[:2] for event in EVENT.iter_unpack(later)}
        now = self.loop.now_ns()
        found = b""
        for oid, begin_ns, _, kind, _, depth, rank, name in EVENT.iter_unpack(opened):
            if (oid, begin_ns) not in said:
                outcome = self._outcome(slot, oid) or running
                found += EVENT.pack(oid, begin_ns, now, kind, outcome, depth, rank, name)
        return found

    def _outcome(self, slot: int, oid: int) -> int:
        """The outcome of a task that is still on its process's stack; its result may be sealed
        already. RUNNING is 0, so that the caller replaces it by its own outcome."""
        header = self.client.inspect(oid)
        if header["id"] != oid:
            return DONE
        state = STATE[header["state"]]
        if state == STATE["CLAIMED"] and header["claimant"] != slot:
            return LOST  # another process runs it again
        return LOST if header["state"] == "QUEUED" else _ENDED.get(state, DONE)

    def stop(self) -> int:
        """Ends the recording; returns the size of the document in bytes."""
        if self.on:
            # Read the stacks before the rings. A task that leaves its stack from now on is in the
            # ring, so it may be seen twice, but is never missed.
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
