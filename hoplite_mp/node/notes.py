"""What a node writes down of its own doing while somebody traces.

Why it exists: many rooms do things that belong into a timeline. Each asks one flag whether anybody
wants to know, and says what it was; a room never learns who traces, nor what becomes of it.
It must never know: who traces, files, other hosts.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from hoplite_mp.node.ports import Loop

__all__ = ["Note", "Notes"]

Note = tuple[str, str, int, int, dict[str, Any]]


class Above(Protocol):
    """What rooms above this one know, or must hear."""

    def public(self, oid: int) -> bytes:
        """The id under which all know an object of this host's memory."""


class Notes:
    """The latest `most` notes; what is older is dropped and counted."""

    def __init__(self, loop: Loop, above: Above, most: int = 0) -> None:
        self.above = above
        self.loop = loop
        self.most = most
        self.on = False
        self.dropped = 0
        self.kept: deque[Note] = deque(maxlen=most)
        # Tasks of other hosts: their ids here -> those under which all know them.
        self.guests: dict[int, bytes] = {}
        self._guests_now: list[Callable[[], Iterable[tuple[int, bytes]]]] = []

    def start(self) -> None:
        """Everything before is forgotten."""
        self.on, self.dropped = True, 0
        self.kept.clear()
        self.guests.clear()
        for guests_now in self._guests_now:
            for oid, task in guests_now():
                self.guest(oid, task)

    def ask_at_start(self, guests_now: Callable[[], Iterable[tuple[int, bytes]]]) -> None:
        """Tasks of other hosts that are here when it starts come from there, too."""
        self._guests_now.append(guests_now)

    def stop(self) -> None:
        """Nobody wants to know any more; what was written stays until the next start."""
        self.on = False

    def add(self, kind: str, name: str, begin_ns: int, /, **more: Any) -> None:
        """Something that has just ended. `begin_ns`: 0 if it began unnoticed, before the trace."""
        if self.on:
            if isinstance(more.get("object"), int):
                more["object"] = self.above.public(more["object"])
            now = self.loop.now_ns()
            self.dropped += len(self.kept) == self.most
            self.kept.append((kind, name, begin_ns or now, now, more))

    def guest(self, oid: int, task: bytes) -> None:
        """A task of another host."""
        if self.on:
            while len(self.guests) >= self.most:
                del self.guests[next(iter(self.guests))]
            self.guests[oid] = task
