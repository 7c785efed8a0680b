"""Operations that consist of several Group calls, among ranks that die and are replaced.

All ranks that finish an operation have made it with the same members. If a rank dies during an
operation, the other ranks repeat the operation. The first call of a new rank matches no call in an
operation, so it fails on every rank. Then the new rank receives the common state, and all ranks
repeat the operation. A rank whose part of a call is lost with a host begins the operation again;
its first call does not match the next call of the other ranks either. An operation must not change
the state of its rank before it returns.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

from hoplite_mp._serialize.contributions import LOST_SHARE
from hoplite_mp.errors import PeerLostError

if TYPE_CHECKING:
    from collections.abc import Callable

    from hoplite_mp import Group

__all__ = ["MemberOperations"]

R = TypeVar("R")
JOIN = "join an operation of hoplite_mp.ml"
TRIES = 8  # maximum number of attempts at an operation whose calls fail on every rank


class _Again(Exception):
    """The operation must be repeated. `error`: the Group's error, if there is one."""

    def __init__(self, error: ValueError | None = None) -> None:
        self.error = error


class MemberOperations:
    """The operations of one rank on a Group that is used for nothing else.

    give: returns the common state, for a new rank. take: replaces this rank's state by a state that
    `give` has returned. changed: is called when the members have changed.
    """

    def __init__(
        self,
        group: Group,
        give: Callable[[], Any],
        take: Callable[[Any], None],
        changed: Callable[[], None],
    ) -> None:
        self.group = group
        self.members: tuple[int, ...] = ()
        self.number = 0  # 1 + the number of finished operations; 0: this rank is not a member
        self._give, self._take, self._changed = give, take, changed

    def run(self, operation: Callable[[], R]) -> R:
        """Repeats an operation until all its calls have the same members. Returns its result."""
        if not self.number:
            self.join()
        failures = 0
        while True:
            try:
                result = operation()
            except _Again as again:
                if again.error is None:
                    continue
                failures += 1
                if failures == TRIES:
                    raise again.error from None
                self.join()
                continue
            self.number += 1
            return result

    def call(
        self, collective: Callable[..., R], *args: Any, may_shrink: bool = False, **kwargs: Any
    ) -> R:
        """Makes a Group call within an operation. may_shrink: whether the result is valid without
        the ranks that have died."""
        try:
            result = collective(*args, **kwargs)
        except ValueError as error:  # raised on every rank: there is a new rank, or a mistake
            raise _Again(error) from None
        except PeerLostError as error:
            if self.group.strict or LOST_SHARE not in str(error):
                raise
            raise _Again from None  # the others are in the next call, which matches none of these
        if isinstance(result, list) and any(_is_join(one) for one in result):
            raise _Again(ValueError("a rank joins again and again"))
        if self.group.contributors != self.members:
            self._set_members()
            if not may_shrink:
                raise _Again
        return result

    def join(self, *, take_always: bool = False) -> None:
        """Agrees on the members. New members receive the state. take_always: even if all are new,
        so that all begin with the state of the lowest rank."""
        error: Exception = ValueError("the ranks make different calls")
        for _ in range(TRIES):
            try:
                seen = self.group.allgather((JOIN, self.number))
                present = self.group.contributors
                if not all(_is_join(seen[rank]) for rank in present):
                    continue  # other ranks were in the middle of an operation
                newest = max(seen[rank][1] for rank in present)
                current = [rank for rank in present if seen[rank][1] == newest]
                if len(current) < len(present) or (take_always and not newest):
                    self._share(min(current), newest)
            except ValueError as found:  # another rank has joined in between
                error = found
            except PeerLostError:  # the rank that has to send the state has died
                if self.group.strict:
                    raise
            else:
                self.number = max(newest, 1)
                self._set_members()
                return
        raise error

    def _share(self, giver: int, newest: int) -> None:
        gives = giver == self.group.rank
        state = self.group.broadcast(self._give() if gives else None, root=giver)
        if not gives and self.number < max(newest, 1):
            self._take(state)

    def _set_members(self) -> None:
        if self.group.contributors != self.members:
            self.members = self.group.contributors
            self._changed()


def _is_join(value: Any) -> bool:
    return isinstance(value, tuple) and len(value) == 2 and value[0] == JOIN
