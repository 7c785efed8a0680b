"""Taking over what the node holds for this process until it has a hold of its own.

Why it exists: the node keeps what it gives until Imported comes, and Imported ends that for all
earlier answers too, since some were never read (Ctrl-C). So a thread must have its hold before
another one of its process can ask anything: it takes it while it still has the line to itself.
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
    """A process's way to its node, and to the holds that it has."""

    @property
    def client(self) -> _shm.Client: ...
    @property
    def channel(self) -> Channel: ...


def take_over(holder: Holder, ask: Ask, oid_in: Callable[[Any], int]) -> Any:
    """A hold on the object that the answer names, found there by `oid_in`; None: there is none."""

    def take(value: Any, number: int, seen: list[int]) -> tuple[int, Any]:
        oid = oid_in(value)
        hold = holder.client.hold(oid) if oid else None
        seen[0] = number
        return number, hold

    number, hold = holder.channel.call(ask, take)
    holder.channel.tell(Imported(number))
    return hold
