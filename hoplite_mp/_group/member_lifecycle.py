"""What a member of a Group is before its first call: its place, and how it waits.

Calls and messages both begin when the Group is whole (the manager calls this *formed*), both wait
until something has changed on the member's board, and both end when the member has left. A worker
that waits here for long counts as blocked, and another one stands in for it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hoplite_mp import _tasks
from hoplite_mp._common import clock, locks
from hoplite_mp._protocol.local import GroupRefusal
from hoplite_mp.errors import ClosedError, HopliteTimeoutError, PeerLostError

if TYPE_CHECKING:
    from collections.abc import Callable

    from hoplite_mp._client.runtime import Runtime

__all__ = ["MemberLifecycle"]

BLOCKED_AFTER_NS = 2_000_000


class MemberLifecycle:
    """One member's place in its Group. `place`: the node's reply to GroupJoin."""

    rank: int
    size: int
    calls: int | None

    def __init__(self, runtime: Runtime, name: str, size: int, place: Any, timeout: Any) -> None:
        self._runtime = runtime
        self._memory = runtime.memory
        self._tasks = runtime.tasks
        board, self._generation, self.rank, hosts, self._identity = place
        self._board = _tasks.Board(runtime.tasks, board)
        self.name = name
        self.size = size
        self._timeout = timeout
        self.calls = None
        self._first = locks.lock("group.first_call")  # guards the change of `calls` from None
        # Other hosts take longer than a spin lasts, and the node needs this core to serve them.
        self._spins = not hosts
        self._closed = False
        self._gave_up = ""  # why this member has left, if a call has ended its membership
        self._timed_out = ""  # the text of the error, if that call has timed out
        self._ended_with_task = False  # the task that has made it has ended

    def _check_member(self) -> None:
        if self._closed:
            raise ClosedError(f"group {self.name!r}: this member has left{self._why_left}")

    @property
    def _why_left(self) -> str:
        if self._gave_up:
            return self._gave_up
        if not self._ended_with_task:
            return ""
        return (
            ", because a Group ends with the task, or the call of an actor, that has made it; an "
            "actor that needs it for all its calls makes it in its constructor"
        )

    def _leave(self, failed: bool, with_task: bool = False, why: str = "") -> None:
        """Ends the membership; see `Group`."""
        raise NotImplementedError

    # -- the first call ---------------------------------------------------------------------------

    def _begin(self, timeout: float | None = None) -> int:
        """The number of the next call. The first call waits until the group is whole, or has
        admitted this member."""
        if self.calls is not None:
            return self.calls
        wait_ns = self._whole_ns() if timeout is None else int(timeout * 1e9)
        limit = self._whole_limit() if timeout is None else f"timeout={timeout:.3g} s"
        until = clock.monotonic_ns() + wait_ns
        self._wait(self._admitted, until, lambda: self._not_full(limit))
        first = self._admitted() - 1
        with self._first:
            if self.calls is None:  # else another thread has made the first call meanwhile
                self.calls = first
            return self.calls

    def _admitted(self) -> int:
        """The number of this member's first call + 1; 0 if the group is not whole, or has not
        admitted it yet. PeerLostError: this is no longer a member, because it has come back to a
        group to which no other member comes back, or because its host was given up."""
        _, start, _, client = self._board.member(self.rank)
        if client != self._identity[1] or self._board.generation() != self._generation:
            _, why = self._why_not()
            raise PeerLostError(why or f"group {self.name!r} has ended")
        return int(start)

    def _why_not(self) -> tuple[bool, str]:
        """(True, why) if this is no longer a member; otherwise (False, why another process was
        refused as a member, if one was)."""
        ask = GroupRefusal(self.name, self._generation, self.rank)
        over, why = self._runtime.channel.call(ask).value
        return over, why

    def _whole_ns(self) -> int:
        """How long the group may take to become whole, in nanoseconds."""
        wait_s = self._runtime.config.group_wait_s if self._timeout is None else self._timeout
        return int(min(wait_s, 1e9) * 1e9)

    def _whole_limit(self) -> str:
        """The same limit, as errors name it."""
        if self._timeout is None:
            return f"group_wait_s={self._runtime.config.group_wait_s:g} s"
        return f"timeout={self._timeout:g} s"

    def _not_full(self, limit: str) -> str:
        _, alive, joining, *_ = self._board.look()
        here = alive | joining
        absent = [str(rank) for rank in range(self.size) if not here >> rank & 1]
        who = f"rank{'s' * (len(absent) > 1)} {', '.join(absent)}"
        over, refusal = self._why_not()
        if over:
            raise PeerLostError(refusal)
        why = f"; one was refused: {refusal}" if refusal else ""
        if not absent:  # they wait until a leader admits them
            return f"all {self.size} members came, but were not let in within {limit}{why}"
        return (
            f"{here.bit_count()} of {self.size} members came within {limit}; missing: {who}, which "
            f"never came or left again{why}"
        )

    # -- waiting --------------------------------------------------------------------------------

    def _wait(
        self,
        condition: Callable[[], Any],
        deadline: int,
        why: Callable[[], str],
        counts: bool = True,
    ) -> None:
        """Waits until the condition holds. A worker that waits long counts as blocked, unless
        `counts` is False because its task goes on in another thread."""
        blocked = False
        in_worker = counts and self._runtime.submitter.waiting.run_in_place is not None
        blocked_at = clock.monotonic_ns() + BLOCKED_AFTER_NS
        try:
            while True:
                seen = self._tasks.event()
                if condition():
                    return
                self._check_member()  # it has left, while this call is made in a thread
                self._memory.check()
                now = clock.monotonic_ns()
                if now >= deadline:
                    raise HopliteTimeoutError(f"group {self.name!r}: {why()}")
                if in_worker and not blocked and now >= blocked_at:
                    blocked = True
                    self._runtime.submitter.waiting.count_blocked(1)
                until = min(deadline, blocked_at) if in_worker and not blocked else deadline
                if self._tasks.wait_event(seen, until, self._spins) == _tasks.CLOSING:
                    raise self._memory.node_gone()
        finally:
            if blocked:
                self._runtime.submitter.waiting.count_blocked(-1)
