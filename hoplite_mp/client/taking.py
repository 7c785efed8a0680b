"""Takes over an object that the node holds on behalf of this process.

Why it exists: the node keeps what it gives until it receives Imported, which acknowledges all
earlier replies, too, because some may never be read (Ctrl-C). So a thread must acquire its hold
before another thread of the process can send a request: it does so while it still has the line to
itself.
It must never know: what is asked, what becomes of the object.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from hoplite_mp.protocol.local import Imported

if TYPE_CHECKING:
    from collections.abc import Callable

    from hoplite_mp import _shm
    from hoplite_mp.client.channel import Channel
    from hoplite_mp.protocol.local import Ask

__all__ = ["take_over"]


class Holder(Protocol):
    """A process's line to its node, and its client."""

    @property
    def client(self) -> _shm.Client: ...
    @property
    def channel(self) -> Channel: ...


def take_over(holder: Holder, ask: Ask, oid_in: Callable[[Any], int]) -> Any:
    """Sends the request and returns a hold on the object that `oid_in` finds in the reply; None if
    there is none."""

    def take(value: Any, number: int, seen: list[int]) -> tuple[int, Any]:
        oid = oid_in(value)
        hold = holder.client.hold(oid) if oid else None
        seen[0] = number
        return number, hold

    number, hold = holder.channel.call(ask, take)
    holder.channel.tell(Imported(number))
    return hold
