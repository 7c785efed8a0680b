"""Group: peers that call together, and send each other messages.

Why it exists: in synchronous training nobody should ask a manager at each step. This is what a user
sees of it: how a member joins and leaves, and how a Group is split. The calls themselves are in
`peer_calls`, the messages in `messaging`.
It must never know: how a call is made (`calling`), how a message arrives (`inbox`), who starts
peers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from hoplite_mp.client.memory import check_timeout
from hoplite_mp.errors import PeerLostError
from hoplite_mp.peer_calls import PeerCalls
from hoplite_mp.protocol.local import GroupJoin, GroupLeave
from hoplite_mp.splitting import peers_of, split_name

if TYPE_CHECKING:
    from hoplite_mp.client.runtime import Runtime

__all__ = ["Group", "join"]

NAME_CHARS_MAX = 1024
PLACE_MAX = 1 << 31


class Group(PeerCalls):
    """One member of a Group; belongs to one thread at a time.

    Arrays in, writable arrays out. Reductions take arrays, numbers and bools, the same shape and
    dtype on every rank; the other calls carry any picklable object as itself, each rank its own.
    `out=`: a writable array of the result's shape and dtype that takes the result. Each call has an
    `..._async` form that returns a Future. What a call raises, it raises on every rank: a different
    kind, op, root, shape or dtype is a ValueError, what cannot be reduced or pickled a TypeError, a
    rank without room in its store a StoreFullError; a dead root or, with strict=True, any dead peer
    is a PeerLostError.
    """

    rank: int
    """This member's place, from 0; it never changes."""
    size: int
    """How many members the group has when it is whole; it never changes."""
    calls: int | None
    """The number of the next call; None until the first one begins."""
    contributors: tuple[int, ...]
    """The ranks whose parts are in the result of the last finished call, sorted."""

    _cluster: Any = None  # held as long as this is

    def __init__(
        self, runtime: Runtime, name: str, size: int, place: Any, strict: bool, timeout: Any
    ) -> None:
        super().__init__(runtime, name, size, place, strict, timeout)
        runtime.task_leaves.append(self.close)

    def split(self, color: int | None, key: int = 0) -> Group | None:
        """A Group of the ranks that give the same color, ordered by key, then by rank here; with
        color None the call is made, but no Group is joined, and None is returned.

        Every living rank makes the call. The new Group has this one's `strict` and `timeout`, is
        independent of it, and is closed like any other. Who dies before it has joined is a dead
        rank of the new Group. TypeError: color or key is no integer.
        """
        return self._here(self._split, color, key)  # type: ignore[no-any-return]

    def _split(self, color: Any, key: Any) -> Group | None:
        call = self._begin()
        given = self._call("split", "", 0, (color, key, self._identity), None)
        if color is None:
            return None
        peers = peers_of(given, color)
        ranks = [rank for rank, _ in peers]
        name = split_name(self.name, self._generation, call, color)
        ask = GroupJoin(
            name,
            len(peers),
            ranks.index(self.rank),
            self._generation,
            [(rank, *identity) for rank, identity in peers],
        )
        place = self._runtime.channel.call(ask).value
        made = Group(self._runtime, name, len(peers), place, self.strict, self._timeout)
        made._cluster = self._cluster
        return made

    def close(self) -> None:
        """Leaves the group; happens by itself at the end of the task."""
        if self._closed:
            return
        if self._thread is not None:
            self._thread.shutdown()
        self._closed = True
        self._end_messages()
        leaves = self._runtime.task_leaves  # a new list: the old one may be on its way through
        self._runtime.task_leaves = [leave for leave in leaves if leave != self.close]
        if self._memory.client.usable:
            self._runtime.channel.call(GroupLeave(self.name, self._generation, self.rank))
        self._result = self._part = None

    def __enter__(self) -> Group:
        return self

    def __exit__(self, kind: Any, value: Any, traceback: Any) -> None:
        self.close()


def join(
    runtime: Runtime, name: str, size: int, rank: int | None, strict: bool, timeout: float | None
) -> Group:
    """Becomes a member; ValueError for a wrong size, a taken rank, one too many."""
    runtime.memory.check()
    if not isinstance(name, str) or not name:
        raise ValueError(f"name={name!r}: a group needs a name")
    if len(name) > NAME_CHARS_MAX:
        raise ValueError(f"a group's name of {len(name)} characters: at most {NAME_CHARS_MAX}")
    for what, value in (("size", size), ("rank", rank)):
        if isinstance(value, bool) or not isinstance(value, (int, np.integer, type(None))):
            raise TypeError(f"{what}={value!r}: it must be an integer")
        if value is not None and abs(int(value)) > PLACE_MAX:
            raise ValueError(f"{what}={value!r}: no group is as large")
    check_timeout(timeout)
    ask = GroupJoin(name, int(size), None if rank is None else int(rank))
    place = runtime.channel.call(ask).value
    if isinstance(place, str):
        raise PeerLostError(place)
    return Group(runtime, name, int(size), place, strict, timeout)
