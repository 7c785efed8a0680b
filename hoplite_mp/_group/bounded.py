"""Bounded allreduces of one member: calls that leave late ranks out after a deadline.

`bounded_calls` contains the state machine. Each member has a thread that takes part in these calls
even while the member's program is late. After a rank has joined or died, the ranks exchange reports
in a round, which is a call to a second Group with the same ranks, the *round Group*. So rounds
continue after deaths like plain calls, and are never matched with the program's calls. Arrays are
sent as messages in the program's Group. Reports and states are sent as messages in the round Group,
so arrays do not delay them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from hoplite_mp import _serialize
from hoplite_mp._client.memory import whole
from hoplite_mp._common import clock
from hoplite_mp._common.clock import FOREVER_NS, deadline_ns
from hoplite_mp._common.locks import starting_thread
from hoplite_mp._common.reduction import is_function, operation_name, prefix, result_dtype
from hoplite_mp._common.slice_operators import SliceOperator
from hoplite_mp._group.bounded_calls import (
    ArrayWork,
    BoundedCalls,
    BoundedRequest,
    Finish,
    Post,
    Report,
    mistake,
)
from hoplite_mp._group.call_protocol import REJOIN
from hoplite_mp._group.messages import Receive
from hoplite_mp._protocol.local import BOUNDED_TAG
from hoplite_mp._serialize.contributions import into, reducible
from hoplite_mp.errors import HopliteError, HopliteTimeoutError, PeerLostError, StoreFullError

if TYPE_CHECKING:
    from collections.abc import Callable

    from hoplite_mp._group.call_protocol import CallProtocol
    from hoplite_mp._group.member_lifecycle import GroupMembership
    from hoplite_mp._group.messages import MemberMessages

__all__ = ["BoundedReductions", "GroupOfRounds"]

Array = np.ndarray[Any, np.dtype[Any]]
ROUND, REPORT = 0, 1  # tags of messages in the round Group
JOIN_S = 0.5  # longest step of the wait for the thread; Ctrl-C is handled between two steps
AGAIN_S = 0.01  # pause before a round is tried again after StoreFullError
FOR_EVER_S = 1e9
TRACED_KIND = "bounded_allreduce"  # the kind of these calls in traces


@dataclasses.dataclass(eq=False)
class _Pending:
    """A call made by the program. `finish` is set to the outcome when the call is over."""

    request: BoundedRequest
    array: Any
    finish: Finish | None = None


class GroupOfRounds(Protocol):
    """The attributes of `Group` that rounds need."""

    rank: int
    _member: GroupMembership
    _messages: MemberMessages

    @property
    def alive(self) -> tuple[int, ...]: ...
    @property
    def contributors(self) -> tuple[int, ...]: ...
    def allgather(self, x: Any) -> list[Any]: ...
    def _leave(self, failed: bool) -> None: ...


class _Rounds:
    """One member's thread and its round Group. This object does not refer to the program's Group,
    which may be garbage-collected."""

    def __init__(
        self, group: GroupOfRounds, messages: MemberMessages, operation: ArrayWork
    ) -> None:
        """group: the round Group. messages: this member's messages in the program's Group."""
        self._group, self._messages = group, messages
        self._member, self._memory = group._member, messages._memory
        late_calls_max = group._member.runtime.config.group_late_calls_max
        self._core = BoundedCalls(group.rank, operation, late_calls_max)
        self._pending: _Pending | None = None
        self._asked: _Pending | None = None  # the pending call that was passed to `_core`
        self._due = -1  # the latest round that another rank has begun
        self._ended: dict[int, tuple[int, ...]] = {}  # call -> `Inbox.ended` when the call began
        self._begun: tuple[int, int] | None = None  # the latest call in `_ended`, and its epoch
        self._arrays = Receive(None, BOUNDED_TAG, FOREVER_NS)
        self._notices = Receive(None, None, FOREVER_NS)
        self.error: BaseException | None = None
        self.thread = threading.Thread(target=self._serve, name="hoplite_mp rounds", daemon=True)

    # -- the program's thread ----------------------------------------------------------------------

    def ask(self, pending: _Pending) -> None:
        """Starts a call for the program."""
        self._pending = pending
        self.wake()

    def wake(self) -> None:
        if self._memory.client.usable:
            self._member.tasks.wake(self._member.runtime.client.slot)

    def end(self) -> None:
        """Stops the thread, and leaves the round Group."""
        self._member.closed = True
        self.wake()
        while self.thread.is_alive() and self.thread is not threading.current_thread():
            self.thread.join(JOIN_S)
        self._group._leave(True)

    # -- the thread ----------------------------------------------------------------------------

    def _serve(self) -> None:
        try:
            self._member.begin(FOR_EVER_S)
            self._messages.inbox.post(self._arrays)
            self._group._messages.inbox.post(self._notices)
            while True:
                self._turn()
        except BaseException as error:  # raised by the program's call
            if not self._member.closed:
                self.error = error
                self.wake()
        finally:
            self._messages.inbox.withdraw(self._arrays)
            if self.error is not None:  # otherwise other ranks would wait for this one
                with contextlib.suppress(HopliteError):  # the node may be gone
                    self._group._leave(True)

    def _turn(self) -> None:
        at = self._core.wakes_at()
        soon = FOREVER_NS if at is None else int(at * 1e9)
        with contextlib.suppress(HopliteTimeoutError):
            self._member.wait(self._has_work, soon, str, counts=False)
        self._read_arrays()
        self._read_notices()
        pending = self._pending
        if pending is not None and pending is not self._asked and self._core.state is not None:
            self._asked = pending
            self._core.ask(pending.request, pending.array, clock.monotonic())
        self._act()
        if self._wants_round():
            self._make_round()

    def _has_work(self) -> bool:
        self._messages.inbox.look()
        self._group._messages.inbox.look()
        asks = self._pending is not self._asked and self._core.state is not None
        arrived = self._arrays.found is not None or self._notices.found is not None
        return arrived or asks or self._wants_round()

    def _wants_round(self) -> bool:
        _, alive, joining, *_ = self._member.board.look()
        if self._due >= (self._member.calls or 0):
            return True
        return self._core.wants_round(alive | joining)

    def _make_round(self) -> None:
        """Takes part in the next round. Every rank announces the round to all other ranks, because
        the rank that began the round may die before all have received its announcement."""
        group, core = self._group, self._core
        number = self._member.calls
        for rank in group.alive:
            if rank != group.rank:
                self._send(group._messages, (number,), rank, ROUND)
        try:
            found: list[Report] = group.allgather(core.report())
        except StoreFullError:  # on every rank
            clock.sleep(AGAIN_S)
            return
        reports = {rank: found[rank] for rank in group.contributors}
        core.decide(reports, clock.monotonic())
        self._act()

    def _departed(self, call: int, rank: int) -> bool:
        """Whether the member that had this rank when the call began has left or died, and all its
        arrays have been read."""
        inbox = self._messages.inbox
        before = self._ended.get(call)
        if self._arrays.found is not None or before is None:
            return False
        return inbox.is_gone(rank) or inbox.ended[rank] > before[rank]

    def _note_begin(self) -> None:
        """Records which members had left or died when the current call began."""
        state = self._core.state
        if state is not None and self._begun != (state.call, state.epoch):
            first = 0 if self._begun is None else self._begun[0]
            self._begun = state.call, state.epoch
            for call in range(first, state.call):  # a late rank may skip several calls at once
                self._ended.setdefault(call, self._messages.inbox.ended)
            self._ended[state.call] = self._messages.inbox.ended
            for call in [one for one in self._ended if one < self._core.next]:
                del self._ended[call]

    # -- messages ------------------------------------------------------------------------------

    def _read_arrays(self) -> None:
        inbox = self._messages.inbox
        while self._arrays.found is not None:
            receive = self._arrays
            source = receive.found.source if receive.found is not None else -1
            self._arrays = Receive(None, BOUNDED_TAG, FOREVER_NS)
            try:
                self._core.receive(source, *inbox.take(receive))
            except PeerLostError:
                pass  # the sender has died, which the next round detects
            finally:
                inbox.post(self._arrays)

    def _read_notices(self) -> None:
        inbox = self._group._messages.inbox
        while (found := self._notices.found) is not None:
            receive, self._notices = self._notices, Receive(None, None, FOREVER_NS)
            try:
                report = inbox.take(receive)
            except PeerLostError:
                continue  # the sender has died, which the next round detects
            finally:
                inbox.post(self._notices)
            if found.tag == ROUND:
                self._due = max(self._due, *report)
            else:
                self._core.receive_report(found.source, report, clock.monotonic())

    def _send(self, messages: MemberMessages, value: Any, to: int, tag: int) -> None:
        """Sends a message; does nothing if the rank is dead."""
        encoded = _serialize.encode(value)
        messages.send_encoded(encoded, self._memory.put_encoded(encoded), to, tag)

    def _act(self) -> None:
        """Advances the state, and carries out its actions."""
        self._note_begin()
        for _ in range(2):  # at the leading rank, `turn` and `lead` may enable each other
            self._core.turn(self._departed)
            self._core.lead(clock.monotonic())
        self._core.turn(self._departed)
        for action in self._core.take():
            if isinstance(action, Post):
                self._send(self._messages, tuple(action[1:]), action.to, BOUNDED_TAG)
            elif isinstance(action, Finish):
                pending = self._asked
                assert pending is not None
                pending.finish, pending.array = action, None
                self.wake()
            else:
                self._send(self._group._messages, action.report, action.to, REPORT)


class BoundedReductions:
    """The bounded allreduces of a member."""

    def __init__(
        self,
        member: GroupMembership,
        calls: CallProtocol,
        messages: MemberMessages,
        make_group: Callable[[], GroupOfRounds],
    ) -> None:
        """make_group: a function that joins the round Group."""
        self._member, self._calls, self._messages = member, calls, messages
        self._make_group = make_group
        self._rounds: _Rounds | None = None
        self._calls_made = 0
        self.name, self.rank, self.size = member.name, member.rank, member.size
        self._threads = member.runtime.config.reduce_threads or member.tasks.cores

    def end(self) -> None:
        """Called when the member leaves."""
        if self._rounds is not None:
            self._rounds.end()
            self._rounds = None  # last, because Ctrl-C may interrupt the wait for the thread

    def allreduce(
        self, x: Any, op: Any, out: Array | None, finite: bool, num: Any, deadline: Any
    ) -> Any:
        """See `Group.allreduce`."""
        array: Any = None
        try:
            if finite:
                raise ValueError("finite=True cannot be used with num= or deadline=")
            num, deadline = self._checked(num, deadline)
            array, name = self._input(x, op)
            text = f"op={name}, {array.dtype.str} {array.shape}, num={num}, deadline={deadline}"
            request = BoundedRequest(text, name, num, deadline)
        except (ValueError, TypeError) as error:
            request = mistake(error)
        flat = None if array is None else np.ascontiguousarray(array).reshape(-1)
        found = self._make(request, flat).value.reshape(array.shape)
        return found if out is None else into(found, out)

    def gather(
        self, text: str, payload: Any, num: Any, deadline: Any, error: Exception | None
    ) -> tuple[tuple[int, ...], list[Any]]:
        """The ranks that are in time, and their payloads. text: the arguments that must be equal on
        all ranks. error: the error that prevents this rank's part; every rank raises it."""
        try:
            if error is not None:
                raise error
            num, deadline = self._checked(num, deadline)
            text = f"{text}, num={num}, deadline={deadline}"
            request = BoundedRequest(text, "", num, deadline, gathers=True)
        except (ValueError, TypeError) as wrong:
            request = mistake(wrong)
        payloads = self._make(request, payload).value
        return self._calls.contributors, payloads

    def _checked(self, num: Any, deadline: Any) -> tuple[int, float]:
        if deadline is None:
            raise TypeError(f"deadline=None: num={num!r} needs a deadline in seconds")
        if isinstance(deadline, bool) or not isinstance(deadline, (int, float)):
            raise TypeError(f"deadline={deadline!r}: it must be a number of seconds")
        if not 0 < deadline <= FOR_EVER_S:
            raise ValueError(f"deadline={deadline!r}: it must be more than 0 seconds, and finite")
        number = 1 if num is None else whole(num)
        if number is None:
            raise TypeError(f"num={num!r}: it must be an integer")
        if not 1 <= number <= self.size:
            raise ValueError(f"num={num!r}: it must be from 1 to {self.size}, the Group's size")
        return number, float(deadline)

    def _input(self, x: Any, op: Any) -> tuple[Array, str]:
        if isinstance(op, SliceOperator) or is_function(op):
            raise ValueError(f"op={op!r}: with deadline= it must be a name or a numpy ufunc")
        name = operation_name(op)
        array = reducible("allreduce", x)
        dtype = _serialize.dtype_name(array.dtype)
        assert dtype is not None
        try:
            result_dtype(name, dtype)
        except TypeError as error:
            raise ValueError(str(error)) from error
        return array, name

    def _make(self, request: BoundedRequest, array: Any) -> Finish:
        """Makes a call, waits until it is over, and records it if a trace is running."""
        begun, number, failed = clock.monotonic_ns(), self._calls_made, True
        self._calls_made += 1
        try:
            finish = self._wait_for(request, array)
            number, failed = finish.call, False
            return finish
        finally:
            name = f"{TRACED_KIND} {self.name}".encode(errors="replace")
            nbytes = 0 if array is None else array.nbytes
            self._member.tasks.note_group_call(name, number, self.rank, begun, failed, nbytes)

    def _wait_for(self, request: BoundedRequest, array: Any) -> Finish:
        """Makes a call, and waits until it is over."""
        self._member.check()
        self._calls.is_open = True
        try:
            deadline = deadline_ns(self._member.timeout)
            if self._member.calls is None:
                self._member.begin()
            rounds = self._rounds or self._start()
            pending = _Pending(request, array)
            rounds.ask(pending)

            def over() -> bool:
                return pending.finish is not None or rounds.error is not None

            self._member.wait(over, deadline, self._late)
            finish = pending.finish
            if finish is None:
                assert rounds.error is not None
                if isinstance(rounds.error, PeerLostError):  # `end_after` ignores this error
                    self._member.leave(f", because its bounded allreduces have failed. {REJOIN}")
                raise rounds.error
            self._calls.is_open = False
            pending.finish = None  # the thread keeps `pending` alive
            return self._checked_end(finish)
        except BaseException as error:
            self._calls.end_after(error)
            raise

    def _checked_end(self, finish: Finish) -> Finish:
        plan = None if finish.ended is None else finish.ended.plan
        self._calls.set_contributors(() if plan is None else plan.members)
        if finish.error is not None:
            raise finish.error
        assert plan is not None
        if self._calls.strict and len(plan.owners) < self.size:
            lost = sorted(set(range(self.size)) - set(plan.owners))
            raise PeerLostError(f"group {self.name!r}: ranks {lost} are lost")
        return finish

    def _late(self) -> str:
        return (
            f"a bounded allreduce was not decided within {self._member.timeout:g} s: too few ranks "
            f"are in time. This rank has left the Group. {REJOIN}"
        )

    def _start(self) -> _Rounds:
        operation = ArrayWork(
            lambda array, begin, end: array[begin:end], len, self._fold, np.concatenate
        )
        rounds = _Rounds(self._make_group(), self._messages, operation)
        self._rounds = rounds
        with starting_thread("takes part in the bounded allreduces of a Group"):
            rounds.thread.start()
        return rounds

    def _fold(self, op: str, arrays: list[Array]) -> Array:
        return prefix(op, arrays, self._threads)
