"""Dispatch of messages: a table of handlers for each kind of sender, checked to be complete.

The tables are in `_node/runtime/tables.py`. A node handles every message that a sender may send, so
a missing or duplicate handler is an error when the node is built.

A process sends its node one request at a time. Ctrl-C may interrupt the process while it is
waiting, so that it never reads the reply. Each request with a reply therefore carries the number of
the last reply that the process has read, and grants in later replies (for example, a lease) are
undone. Requests without a reply (number 0) undo nothing. Any thread of the process may send them,
even while another thread is waiting for a reply.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar, get_args

from hoplite_mp._protocol.local import AnyRequest

if TYPE_CHECKING:
    from collections.abc import Mapping

    from hoplite_mp._protocol.local import Request

__all__ = ["Handler", "ManagerHandler", "PeerHandler", "Requests", "complete"]

Handler = Callable[[int, Any], None]  # slot of the process, its `Request`
PeerHandler = Callable[[int, Any], object]  # id of the sending host, its message
ManagerHandler = Callable[[Any], object]
H = TypeVar("H")


def complete(sent: object, *parts: Mapping[type, H]) -> dict[type, H]:
    """Returns one table with a handler for each type of message in the union `sent`. Raises
    TypeError if a type has no handler or several, or if a handler's message is not in `sent`."""
    table: dict[type, H] = {}
    for part in parts:
        twice = [kind.__name__ for kind in part if kind in table]
        if twice:
            raise TypeError(f"two handlers for {', '.join(twice)}")
        table.update(part)
    differ = sorted(kind.__name__ for kind in table.keys() ^ set(get_args(sent)))
    if differ:
        raise TypeError(f"messages without a handler, or handlers without one: {', '.join(differ)}")
    return table


class Requests:
    """The dispatch table of one node."""

    def __init__(self) -> None:
        self.given: list[int] = []  # descriptors that came with the request being handled
        self._handlers: dict[type, Handler] = {}
        self._forget: list[Callable[[int], object]] = []
        self._latest: dict[int, int] = {}  # slot -> number of its last request
        # slot -> (number of the reply, a function that undoes the grant in it)
        self._unread: dict[int, list[tuple[int, Callable[[], None]]]] = {}

    def serve(self, *parts: Mapping[type, Handler]) -> None:
        """Sets the handlers of all requests; see `complete`."""
        self._handlers = complete(AnyRequest, *parts)

    def when_forgotten(self, forget: Callable[[int], object]) -> None:
        """Registers a function that is called with the slot of each process that has ended."""
        self._forget.append(forget)

    def take(self, slot: int, request: Request, given: list[int]) -> None:
        """Handles one request. given: its descriptors. A handler that takes ownership of them
        empties the list."""
        self.given = given
        if request.number:
            self._latest[slot] = request.number
            for number, undo in self._unread.pop(slot, ()):
                if request.seen < number:  # Ctrl-C has kept the process from reading that reply
                    undo()
        self._handlers[type(request.ask)](slot, request)

    def is_latest(self, slot: int, number: int) -> bool:
        """Whether this is the last request from the process. If not, the process was interrupted
        while it was waiting, and has sent another request since."""
        return self._latest.get(slot) == number

    def undo_unread(self, slot: int, number: int, undo: Callable[[], None]) -> None:
        """Calls `undo` if the process never reads the reply with this number."""
        self._unread.setdefault(slot, []).append((number, undo))

    def forget_client(self, slot: int) -> None:
        """Forgets a process that has ended. Its successor in the slot numbers requests from 1
        again."""
        self._latest.pop(slot, None)
        self._unread.pop(slot, None)
        for forget in self._forget:
            forget(slot)
