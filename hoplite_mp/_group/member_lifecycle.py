"""One member's membership in a Group.

Calls and messages begin when all ranks have joined (the Group is then complete, or *formed* in the
manager's terms), and wait for changes on the member's board, its memory shared with the node. They
fail after the member has left. A worker that waits for long counts as blocked, and another worker
takes its place.
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

__all__ = ["GroupMembership"]

BLOCKED_AFTER_NS = 2_000_000


class GroupMembership:
    """The state that a member's calls and messages share. place: the node's reply to GroupJoin."""

    def __init__(self, runtime: Runtime, name: str, size: int, place: Any, timeout: Any) -> None:
        self.runtime = runtime
        self.memory = runtime.memory
        self.tasks = runtime.tasks
        self.board_number, self.generation, self.rank, self.has_hosts, self.identity = place
        self.board = _tasks.Board(runtime.tasks, self.board_number)
        self.name = name
        self.size = size
        self.timeout = timeout
        self.calls: int | None = None  # the number of the next call
        self._first = locks.lock("group.first_call")  # guards the change of `calls` from None
        # Replies from other hosts take longer than a spin, and the node may need this core.
        self._spins = not self.has_hosts
        self.closed = False
        self.gave_up = ""  # the reason, if a call has ended the membership
        self.timed_out = ""  # the text of the error, if that call has timed out
        self.ended_with_task = False  # whether the task that made the Group object has ended
        # A weak reference to `Group._leave`, so that the parts of a Group do not keep it alive.
        self.leave_of_group: Callable[[], Callable[..., None] | None] = lambda: None

    def check(self) -> None:
        if self.closed:
            raise ClosedError(f"group {self.name!r}: this member has left{self.why_left}")

    def leave(self, why: str) -> None:
        """Ends the membership because of a call. why: the reason, for the errors of later calls."""
        leave = self.leave_of_group()
        if leave is not None:
            leave(True, why=why)

    @property
    def why_left(self) -> str:
        if self.gave_up:
            return self.gave_up
        if not self.ended_with_task:
            return ""
        return (
            ", because a Group ends with the task or actor call that made it; an actor that needs "
            "the Group in all its calls should make it in its constructor"
        )

    # -- the first call ---------------------------------------------------------------------------

    def begin(self, timeout: float | None = None) -> int:
        """Returns the number of the next call. Before the first call, waits until the group is
        complete or, if it was complete earlier, has admitted this member."""
        if self.calls is not None:
            return self.calls
        wait_ns = self.whole_ns() if timeout is None else int(timeout * 1e9)
        limit = self.whole_limit() if timeout is None else f"timeout={timeout:.3g} s"
        until = clock.monotonic_ns() + wait_ns
        self.wait(self.admitted, until, lambda: self.not_full(limit))
        first = self.admitted() - 1
        with self._first:
            if self.calls is None:  # otherwise another thread has made the first call meanwhile
                self.calls = first
            return self.calls

    def admitted(self) -> int:
        """The number of this member's first call + 1; 0 if the group is not complete, or has not
        admitted the member yet. Raises PeerLostError if this process is no longer a member, because
        it has rejoined a group to which no other member returns, or because its host was declared
        lost."""
        _, start, _, client = self.board.member(self.rank)
        if client != self.identity[1] or self.board.generation() != self.generation:
            _, why = self.why_not()
            raise PeerLostError(why or f"group {self.name!r} has ended")
        return int(start)

    def why_not(self) -> tuple[bool, str]:
        """(True, reason) if this process is no longer a member. Otherwise (False, the reason why
        another process was refused as a member, or "")."""
        ask = GroupRefusal(self.name, self.generation, self.rank)
        over, why = self.runtime.channel.call(ask).value
        return over, why

    def whole_ns(self) -> int:
        """The maximum time to wait for a complete group, in nanoseconds."""
        wait_s = self.runtime.config.group_wait_s if self.timeout is None else self.timeout
        return int(min(wait_s, 1e9) * 1e9)

    def whole_limit(self) -> str:
        """The maximum time to wait for a complete group, for error messages."""
        if self.timeout is None:
            return f"group_wait_s={self.runtime.config.group_wait_s:g} s"
        return f"timeout={self.timeout:g} s"

    def not_full(self, limit: str) -> str:
        _, alive, joining, *_ = self.board.look()
        here = alive | joining
        absent = [str(rank) for rank in range(self.size) if not here >> rank & 1]
        who = f"rank{'s' * (len(absent) > 1)} {', '.join(absent)}"
        over, refusal = self.why_not()
        if over:
            raise PeerLostError(refusal)
        why = f"; one was refused: {refusal}" if refusal else ""
        if not absent:  # all members are waiting until a leader admits them
            return f"all {self.size} members joined, but were not admitted within {limit}{why}"
        return (
            f"{here.bit_count()} of {self.size} members joined within {limit}; missing: {who}, "
            f"which never joined or left again{why}"
        )

    # -- waiting --------------------------------------------------------------------------------

    def wait(
        self,
        condition: Callable[[], Any],
        deadline: int,
        why: Callable[[], str],
        counts: bool = True,
    ) -> None:
        """Waits until the condition is true. A worker that waits for long counts as blocked, unless
        `counts` is False because the task continues in another thread."""
        blocked = False
        in_worker = counts and self.runtime.submitter.waiting.run_in_place is not None
        blocked_at = clock.monotonic_ns() + BLOCKED_AFTER_NS
        try:
            while True:
                seen = self.tasks.event()
                if condition():
                    return
                self.check()  # raises an error if another thread has ended the membership
                self.memory.check()
                now = clock.monotonic_ns()
                if now >= deadline:
                    raise HopliteTimeoutError(f"group {self.name!r}: {why()}")
                if in_worker and not blocked and now >= blocked_at:
                    blocked = True
                    self.runtime.submitter.waiting.count_blocked(1)
                until = min(deadline, blocked_at) if in_worker and not blocked else deadline
                if self.tasks.wait_event(seen, until, self._spins) == _tasks.CLOSING:
                    raise self.memory.node_gone()
        finally:
            if blocked:
                self.runtime.submitter.waiting.count_blocked(-1)
