"""Takes over an object that the node holds on behalf of this process.

The node holds an object that it has given to a process until it receives Imported. That
acknowledges all earlier replies, too, because some of them may never be read (Ctrl-C). So a thread
must acquire its hold before another thread of the process can send an Imported; it does so while it
still has the channel's lock.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from hoplite_mp._protocol.local import Imported

if TYPE_CHECKING:
    from collections.abc import Callable

    from hoplite_mp import _shm
    from hoplite_mp._client.channel import Channel
    from hoplite_mp._protocol.local import Ask

__all__ = ["take_over", "take_over_all"]


class Holder(Protocol):
    """A process's connection to its node, and its client."""

    @property
    def client(self) -> _shm.Client: ...
    @property
    def channel(self) -> Channel: ...


def take_over(holder: Holder, ask: Ask, oid_in: Callable[[Any], int]) -> Any:
    """Sends the request and returns a hold on the object that `oid_in` finds in the reply; None if
    there is none."""
    (hold,) = take_over_all(holder, ask, lambda value: [oid_in(value)])
    return hold


def take_over_all(holder: Holder, ask: Ask, oids_in: Callable[[Any], list[int]]) -> list[Any]:
    """Sends the request and returns holds on the objects that `oids_in` finds in the reply; None
    for an id that is 0, and for an object that is gone."""

    def take(value: Any, number: int, seen: list[int]) -> tuple[int, list[Any]]:
        holds = [holder.client.hold(oid) if oid else None for oid in oids_in(value)]
        seen[0] = number
        return number, holds

    taken: tuple[int, list[Any]] = holder.channel.call(ask, take)
    number, holds = taken
    holder.channel.tell(Imported(number))
    return holds
