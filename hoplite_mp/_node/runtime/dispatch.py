"""Dispatch of requests of this host's processes, and undoing of grants whose reply was not read.

A process sends its node one request after the other. Ctrl-C may interrupt the process while it
waits, so that it never reads the reply. Each request that has a reply therefore carries the number
of the last reply that the process has read, and what a later reply has granted (a lease, for
example) is undone. Messages without a reply (number 0) come from any thread of the process, also
while another one waits for a reply, and undo nothing. Which component handles which request is in
`_node/runtime/tables.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

    from hoplite_mp._protocol.local import Request

__all__ = ["Handler", "Requests"]

Handler = Callable[[int, Any], None]  # slot of the process, its `Request`


class Requests:
    """The dispatch table of one node."""

    def __init__(self) -> None:
        self.given: list[int] = []  # descriptors that came with the request being handled
        self._handlers: dict[type, Handler] = {}
        self._forget: list[Callable[[int], object]] = []
        self._latest: dict[int, int] = {}  # slot -> number of its last request
        # slot -> (number of the reply, a function that undoes the grant in it)
        self._unread: dict[int, list[tuple[int, Callable[[], None]]]] = {}

    def add(self, handlers: Mapping[type, Handler]) -> None:
        """Registers handlers by type of request."""
        self._handlers.update(handlers)

    def when_forgotten(self, forget: Callable[[int], object]) -> None:
        """Registers a function that is called with the slot of each process that has ended."""
        self._forget.append(forget)

    def take(self, slot: int, request: Request, given: list[int]) -> None:
        """Handles one request. given: descriptors that came with it; a handler that takes them over
        empties the list."""
        self.given = given
        if request.number:
            self._latest[slot] = request.number
            for number, undo in self._unread.pop(slot, ()):
                if request.seen < number:  # Ctrl-C has kept the process from reading that reply
                    undo()
        self._handlers[type(request.ask)](slot, request)

    def is_latest(self, slot: int, number: int) -> bool:
        """Whether this is the last request of the process. If not, the process was interrupted
        while it waited, and has sent another one since."""
        return self._latest.get(slot) == number

    def undo_unread(self, slot: int, number: int, undo: Callable[[], None]) -> None:
        """Calls `undo` if the process never reads the reply of this number."""
        self._unread.setdefault(slot, []).append((number, undo))

    def forget_client(self, slot: int) -> None:
        """Forgets a process that has ended; the next one in its slot numbers its requests anew."""
        self._latest.pop(slot, None)
        self._unread.pop(slot, None)
        for forget in self._forget:
            forget(slot)
