"""Trace events of the node itself (transfers, spills, ...), recorded while a trace is running."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from hoplite_mp._node.ports import LoopPort

__all__ = ["Note", "TraceEvents"]

Note = tuple[str, str, int, int, dict[str, Any]]


class ObjectNames(Protocol):
    """Requests from this component to the components above it."""

    def public(self, oid: int) -> bytes:
        """The cluster-wide id of an object that has a header on this host."""


class TraceEvents:
    """The latest `most` events. Older events are dropped and counted. Components add events only
    while `on` is set."""

    def __init__(self, loop: LoopPort, events: ObjectNames, most: int = 0) -> None:
        self.events = events
        self.loop = loop
        self.most = most
        self.on = False
        self.dropped = 0
        self.kept: deque[Note] = deque(maxlen=most)
        # Tasks from other hosts that run here: local id -> cluster-wide id.
        self.inbound_tasks: dict[int, bytes] = {}
        self._inbound_now: list[Callable[[], Iterable[tuple[int, bytes]]]] = []

    def start(self) -> None:
        """Starts recording. Forgets the events and tasks of an earlier trace."""
        self.on, self.dropped = True, 0
        self.kept.clear()
        self.inbound_tasks.clear()
        for inbound_now in self._inbound_now:
            for oid, task in inbound_now():
                self.inbound_task(oid, task)

    def ask_at_start(self, inbound_now: Callable[[], Iterable[tuple[int, bytes]]]) -> None:
        """Registers a function that returns the inbound tasks as (local id, cluster-wide id) when a
        trace starts."""
        self._inbound_now.append(inbound_now)

    def stop(self) -> None:
        """Stops recording. The events remain until the next start."""
        self.on = False

    def add(self, kind: str, name: str, begin_ns: int, /, **more: Any) -> None:
        """Records an event that has just ended. begin_ns: its start time, or 0 if it started before
        the trace."""
        if self.on:
            if isinstance(more.get("object"), int):
                more["object"] = self.events.public(more["object"])
            now = self.loop.now_ns()
            self.dropped += len(self.kept) == self.most
            self.kept.append((kind, name, begin_ns or now, now, more))

    def inbound_task(self, oid: int, task: bytes) -> None:
        """Records an inbound task that has arrived."""
        if self.on:
            while len(self.inbound_tasks) >= self.most:
                del self.inbound_tasks[next(iter(self.inbound_tasks))]
            self.inbound_tasks[oid] = task
