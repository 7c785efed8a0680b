"""Taking over what the node holds for this process until it has a hold of its own.

Why it exists: the node keeps what it gives until Imported comes, and Imported ends that for all
earlier answers too, since some were never read (Ctrl-C). So a thread must have its hold before
another one of its process can ask anything: it takes it while it still has the line to itself.
It must never know: what is asked, what becomes of the object.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hoplite_mp.protocol.local import Imported

if TYPE_CHECKING:
    from collections.abc import Callable

    from hoplite_mp.client.memory import Memory
    from hoplite_mp.protocol.local import Ask

__all__ = ["take_over"]


def take_over(memory: Memory, ask: Ask, oid_in: Callable[[Any], int]) -> Any:
    """A hold on the object that the answer names, found there by `oid_in`; None: there is none."""

    def take(value: Any, number: int, seen: list[int]) -> tuple[int, Any]:
        oid = oid_in(value)
        hold = memory.client.hold(oid) if oid else None
        seen[0] = number
        return number, hold

    number, hold = memory.channel.call(ask, take)
    memory.channel.tell(Imported(number))
    return hold
