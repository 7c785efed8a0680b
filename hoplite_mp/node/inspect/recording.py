"""What this node writes down for a trace: what its processes have run, and its own notes.

Why it exists: processes write into memory of their own, 64 bytes for each task, and this file moves
that into the node when there is much of it, when its process has ended, and at the end. The events
stay packed as they are: a node that traces a hundred thousand tasks a second must not make a Python
object of each.
It must never know: who traces, other hosts, files.
"""

from __future__ import annotations

import socket
from collections import deque
from typing import TYPE_CHECKING

import msgspec

from hoplite_mp import _tasks
from hoplite_mp.headers import STATE
from hoplite_mp.protocol.looking import EVENT, OUTCOMES_OF_EVENTS, TraceDocument

if TYPE_CHECKING:
    from collections.abc import Callable

    from hoplite_mp.node.objects.context import HostContext
    from hoplite_mp.node.tasks.pools import WorkerInfo

__all__ = ["Recording"]

RUNNING, DONE, FAILED, CANCELLED, LOST, TIMEOUT = range(len(OUTCOMES_OF_EVENTS))
# What became of a task whose process has not said that it ended; others are done, or still run.
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
    """One trace at a time, as far as this node is concerned."""

    def __init__(
        self, host: HostContext, track_name: Callable[[int, WorkerInfo | None], str]
    ) -> None:
        """track_name: of the process in that slot, where it has a track of its own; "": none. If
        the process has ended, what is known of the worker that it was."""
        self.loop = host.loop
        self.notes = host.notes
        self.client = host.client
        self.tasks = host.tasks
        self.clients = host.clients
        self.track_name = track_name
        self.on = False
        self.document = b""  # of the latest one
        self._trace = _tasks.Trace(host.tasks)
        self._begin_ns = 0
        self._dropped = 0
        self._events: deque[tuple[int, int, bytes]] = deque()
        self._count = 0  # of events in there
        self._actors: dict[int, str] = {}  # pid -> the name of its track

    def start(self) -> None:
        """Processes and rooms write down what they do, from now on."""
        self._begin_ns = self.loop.now_ns()
        self.notes.start()
        self._forget()
        self._trace.start()
        self.on = True

    def running(self, slot: int) -> bytes:
        """What that process runs at present, as EVENTs, whether somebody traces or not."""
        return self._trace.open(slot)

    def look(self) -> None:
        """Takes what has come, where it is much."""
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
        while (over := self._count - self.notes.most) > 0:
            oldest, pid, events = self._events.popleft()
            gone = min(over, len(events) // EVENT.size)
            if gone * EVENT.size < len(events):
                self._events.appendleft((oldest, pid, events[gone * EVENT.size :]))
            self._count -= gone
            self._dropped += gone

    def exited(self, slot: int, worker: WorkerInfo | None) -> None:
        """A process has died: what it ran is lost. Before anybody settles what it had claimed."""
        if self.on:
            opened = self._trace.open(slot)
            verdict = _VERDICTS.get(worker.verdict if worker is not None else "", LOST)
            said = self._take(slot, worker)
            self._add(slot, self._ended(slot, opened, said, verdict), worker)

    def _ended(self, slot: int, opened: bytes, later: bytes, running: int) -> bytes:
        """What stood on a process's stack, without what it has said since; `running`: the outcome
        of what has not ended."""
        said = {event[:2] for event in EVENT.iter_unpack(later)}
        now = self.loop.now_ns()
        found = b""
        for oid, begin_ns, _, kind, _, depth, rank, name in EVENT.iter_unpack(opened):
            if (oid, begin_ns) not in said:
                outcome = self._outcome(slot, oid) or running
                found += EVENT.pack(oid, begin_ns, now, kind, outcome, depth, rank, name)
        return found

    def _outcome(self, slot: int, oid: int) -> int:
        """Of a task that its process has not left: its result may be there already."""
        header = self.client.inspect(oid)
        if header["id"] != oid:
            return DONE
        state = STATE[header["state"]]
        if state == STATE["CLAIMED"] and header["claimant"] != slot:
            return LOST  # it was run again
        return LOST if header["state"] == "QUEUED" else _ENDED.get(state, DONE)

    def stop(self) -> int:
        """The end; returns the bytes of the document."""
        if self.on:
            # First the stacks: what leaves one from here on is in the ring, and seen twice.
            opened = {slot: self._trace.open(slot) for slot in self.clients}
            self._trace.stop()
            self.on = False
            self.notes.stop()
            for slot, events in opened.items():
                self._add(slot, self._ended(slot, events, self._take(slot), RUNNING))
            document = TraceDocument(
                host=socket.gethostname(),
                home=self.client.home,
                begin_ns=self._begin_ns,
                end_ns=self.loop.now_ns(),
                events=list(self._events),
                guests=self.notes.guests,
                notes=list(self.notes.kept),
                dropped=self._dropped + self.notes.dropped,
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
            self.notes.guests.clear()

    def drop(self) -> None:
        """Nobody needs it."""
        self._trace.stop()
        self.on = False
        self.notes.stop()
        self._forget()
        self.notes.kept.clear()
        self.document = b""
