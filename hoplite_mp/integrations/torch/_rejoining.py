"""Which ranks take part in a step, when ranks die and come back: two Groups for a training run.

A newcomer may enter a Group at any call, but a step makes many calls of different shapes, and it
would enter in the middle of a step. Therefore ranks enter a Group (the *meeting*) that makes only
one call before each step, always the same. The ranks that meet there form a second Group, the
peers, which makes the calls of the steps and which no rank enters later. It goes on without ranks
that die, and is replaced when a newcomer has come to the meeting. A newcomer gets the state from a
rank that has it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hoplite_mp._group.call_protocol import split_name
from hoplite_mp.errors import PeerLostError

if TYPE_CHECKING:
    from collections.abc import Callable

    from hoplite_mp._group.group import Group

__all__ = ["StepMembership"]


class StepMembership:
    """One rank's part in it. `give` returns the state; `take` replaces this rank's own state."""

    def __init__(self, group: Group, give: Callable[[], Any], take: Callable[[Any], None]) -> None:
        if group.strict:
            raise ValueError(
                f"group {group.name!r} was made with strict=True: the calls of its survivors fail"
            )
        self.group = group
        self._give = give
        self._take = take
        self._peers: Group | None = None
        self._ranks: tuple[int, ...] = ()  # of the peers, in `group`
        self._formed_at: int | None = None  # the call of `group` that formed the peers

    @property
    def peers(self) -> Group:
        """The Group of the ranks that take part in the present step."""
        if self._peers is None:
            raise PeerLostError(f"group {self.group.name!r}: no peers have met yet")
        return self._peers

    @property
    def contributors(self) -> tuple[int, ...]:
        """The ranks that took part in the last call of the peers."""
        return tuple(self._ranks[place] for place in self.peers.contributors)

    def meet(self) -> None:
        """Every rank calls this before each step, and a newcomer calls it first of all.

        Afterwards all `peers` have the same state. PeerLostError: the ranks that had a state have
        left or died, and this rank has none.
        """
        while not self._met():
            pass

    def _met(self) -> bool:
        group = self.group
        said = group.allgather((self._formed_at, group._identity))
        assert group.calls is not None, "it has just made one"
        call = group.calls - 1
        here = {rank: one for rank, one in enumerate(said) if one is not None}
        if self._formed_at is not None and all(at == self._formed_at for at, _ in here.values()):
            return True
        givers = [rank for rank, (at, _) in here.items() if at is not None]
        if not givers:
            if call:
                raise PeerLostError(
                    f"group {group.name!r}: the ranks that had a state have left or died"
                )
            givers = list(here)  # the training begins
        self._form(call, {rank: identity for rank, (_, identity) in here.items()})
        return self._hand_over(call, givers)

    def _form(self, call: int, members: dict[int, Any]) -> None:
        old, self._peers = self._peers, None
        peers = list(members.items())
        name = split_name(self.group.name, self.group._generation, call, 0, peers)
        self._peers = self.group._of_peers(name, peers)
        self._ranks = tuple(members)
        if old is not None:
            old.close()

    def _hand_over(self, call: int, givers: list[int]) -> bool:
        """Broadcasts the state of the first giver that lives. Returns whether there was one, which
        is the same on all ranks."""
        peers = self.peers
        for giver in givers:
            gives = giver == self.group.rank
            try:
                state = peers.broadcast(
                    self._give() if gives else None, root=self._ranks.index(giver)
                )
            except PeerLostError:
                continue
            if self._formed_at is None and not gives:
                self._take(state)
            self._formed_at = call
            return True
        return False

    def from_one(self, value: Any) -> Any:
        """Returns the value of the lowest living peer, on all peers."""
        peers = self.peers
        for root in range(peers.size):
            try:
                return peers.broadcast(value, root=root)
            except PeerLostError:
                continue
        raise PeerLostError(f"group {self.group.name!r}: nobody is left")

    def close(self) -> None:
        """Leaves the peers. `group` stays open, because its maker closes it."""
        if self._peers is not None:
            self._peers.close()
