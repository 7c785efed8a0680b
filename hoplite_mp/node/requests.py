"""Requests of processes of this host: who answers each, and what becomes of those nobody waits for.

Why it exists: a process asks its node one question after the other. Ctrl-C may end its waiting at
any moment, so a grant in a reply that was never read is taken back with the next request, which
tells up to where the process has read. Which room answers what is in `client_table`.
It must never know: sockets, how a client waits, what is asked.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

    from hoplite_mp.protocol.local import Request

__all__ = ["Handler", "Requests"]

Handler = Callable[[int, Any], None]  # slot of the process, its `Request`


class Requests:
    """Of one node."""

    def __init__(self) -> None:
        self.given: list[int] = []  # descriptors that came with the request that is served
        self._handlers: dict[type, Handler] = {}
        self._forget: list[Callable[[int], object]] = []
        self._latest: dict[int, int] = {}  # slot -> number of its last question
        # slot -> (number of the reply, what takes the grant in it back)
        self._unread: dict[int, list[tuple[int, Callable[[], None]]]] = {}

    def add(self, handlers: Mapping[type, Handler]) -> None:
        """What answers these kinds of questions."""
        self._handlers.update(handlers)

    def when_forgotten(self, forget: Callable[[int], object]) -> None:
        """Calls it with the slot of each process that has ended."""
        self._forget.append(forget)

    def take(self, slot: int, request: Request, given: list[int]) -> None:
        """given: descriptors that came with it; who needs them empties the list."""
        self.given = given
        self._latest[slot] = request.number or self._latest.get(slot, 0)
        for number, undo in self._unread.pop(slot, ()):
            if request.seen < number:  # that reply was never read: Ctrl-C in the middle
                undo()
        self._handlers[type(request.ask)](slot, request)

    def is_latest(self, slot: int, number: int) -> bool:
        """False: the process has been interrupted, and has asked something else since."""
        return self._latest.get(slot) == number

    def undo_unread(self, slot: int, number: int, undo: Callable[[], None]) -> None:
        """Calls `undo` if the process never reads the reply of this number."""
        self._unread.setdefault(slot, []).append((number, undo))

    def forget_client(self, slot: int) -> None:
        """Its process has ended; the next one in its slot counts from the beginning."""
        self._latest.pop(slot, None)
        self._unread.pop(slot, None)
        for forget in self._forget:
            forget(slot)
