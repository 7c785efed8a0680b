"""Attempts at Group calls, on each participating node.

An attempt executes plans that move the contributions to a call. The leading node (the node of the
lowest living rank) sends these plans in a GroupAttempt, or this node repeats the plans of an
earlier call. When the bytes have arrived, the component that commits the Group's calls is notified.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from hoplite_mp import _serialize
from hoplite_mp._node.groups.call_state import CallEvent
from hoplite_mp._node.groups.group_decisions import is_repeated, version_of
from hoplite_mp._node.groups.plan_sources import fill_in, lacks
from hoplite_mp._protocol.fields import FOLDING
from hoplite_mp._protocol.group_calls import GroupDone, GroupSlow
from hoplite_mp._protocol.messages import Distribute

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from hoplite_mp import _shm
    from hoplite_mp._node.groups.call_state import NodeAttempt
    from hoplite_mp._node.groups.engine_commit import EngineCommit
    from hoplite_mp._node.groups.group_results import GroupResults
    from hoplite_mp._node.groups.group_state import GroupCallsEvents, GroupState
    from hoplite_mp._node.objects.context import HostContext
    from hoplite_mp._protocol.group_calls import GroupAttempt, Plan
    from hoplite_mp._protocol.local import GroupCall

__all__ = ["AttemptBytes", "NodeAttempts"]


class AttemptBytes:
    """Moves the bytes of attempts, with the plan runner."""

    def __init__(self, host: HostContext, results: GroupResults) -> None:
        self.client = host.client
        self.imports = host.imports
        self.plan_runner = results.plan_runner
        self.inner = results.inner

    def move(
        self,
        message: GroupAttempt,
        done: Callable[[str, str], None],
        *,
        always: bool = False,
        vote: tuple[int, int, int] | None = None,
    ) -> None:
        """Executes this node's share of an attempt. Calls `done` with the reason for a failure and
        the kind of that error (see GroupCommit), or with "" and "". always: calls `done` even if no
        other node is waiting for this node's report. vote: see `Engine.together`."""
        reports = False
        for plan in message.plans:
            early = is_repeated(message.attempt) or (
                not isinstance(plan, Distribute) and plan.is_early
            )
            # An early attempt does not wait for free memory. If it fails, the leading node makes
            # another plan when all members have called.
            wait_s = 0.0 if early else None
            arrived = partial(self._arrived, plan, done)
            how: Any = {"always": always, "vote": vote if len(message.plans) == 1 else None}
            reports = self.plan_runner.execute_privately(plan, arrived, wait_s, **how) or reports
        if not reports and (always or self.client.number in message.waits):
            done("", "")

    def _arrived(
        self, plan: Plan, done: Callable[[str, str], None], failure: str, error: str
    ) -> None:
        """Acquires the refs inside arrived values, then calls `done`. The members that contributed
        the values hold the refs only until the commit, but members here may read them later."""
        part = self.plan_runner.executions.get(plan.operation)
        copies = isinstance(plan, Distribute) or plan.kind not in FOLDING
        refs: list[bytes] = []
        if copies and part is not None and not failure:
            for payload, nbytes in part.blocks.values():
                refs += _serialize.read_refs(self.client.memory(payload, nbytes))
        if not refs:
            done(failure, error)
            return

        def held(holds: list[Any]) -> None:
            if self.plan_runner.executions.get(plan.operation) is part:
                self.inner[plan.operation] = holds
                done(failure, error)

        self.imports.ask(refs, held)

    def drop(self, message: GroupAttempt, but: Collection[int] = ()) -> None:
        """Ends an attempt, except for the operations in `but`."""
        for plan in message.plans:
            self.inner.pop(plan.operation, None)
            if plan.operation not in but:
                self.plan_runner.drop(plan.operation)


class NodeAttempts:
    """The attempts of all Groups on this node."""

    def __init__(
        self,
        client: _shm.NodeClient,
        calls: GroupCallsEvents,
        results: GroupResults,
        attempt_bytes: AttemptBytes,
        by_engine: EngineCommit,
    ) -> None:
        self.client = client
        self.calls = calls
        self.results = results
        self.attempt_bytes = attempt_bytes
        self.by_engine = by_engine

    def begin(self, state: GroupState, message: GroupAttempt) -> None:
        """Begins an attempt that the leading node has sent, if it is for the next call."""
        if message.call != state.calls:
            state.ahead = message if message.call > state.calls else state.ahead
            return
        version = version_of(message.attempt)
        if version < state.members.version:
            return  # for an earlier version of the members; the leading node begins again
        self.by_engine.give_up(state)
        if state.attempt is not None:  # operations that are also in the new plans continue
            again = {plan.operation for plan in message.plans}
            self.attempt_bytes.drop(state.attempt.go, again)
        if version == state.members.version:  # no member that has left or died takes part
            self.results.unpin(state.left)
        state.phase.take(CallEvent.ATTEMPT)
        attempt = state.begin(message)
        asks = state.asks(self.client.number)
        if asks is not None:
            self.fill_in(state, attempt, asks)
        elif state.ranks_of(self.client.number):
            attempt.awaiting_local = True
        else:
            self.move(state, attempt)

    def catch_up(self, state: GroupState) -> None:
        """Begins an attempt that arrived before the end of the previous call."""
        ahead, state.ahead = state.ahead, None
        if ahead is not None:
            self.begin(state, ahead)

    def fill_in(self, state: GroupState, attempt: NodeAttempt, asks: list[GroupCall]) -> None:
        """Moves the bytes of an attempt, after filling in the contributions of members here that
        the leading node only assumed."""
        if lacks(attempt.go, {ask.rank for ask in asks}):
            part = self.results.part(state.members, state.calls, asks)
            filled = fill_in(attempt.go, part)
            if filled is None:  # the leading node will detect the difference and decide again
                return
            attempt.go = filled
        self.move(state, attempt)

    def move(self, state: GroupState, attempt: NodeAttempt) -> None:
        """Moves the bytes of an attempt."""
        go, attempt.awaiting_local = attempt.go, False
        if attempt.moved is None:
            attempt.moved = self.results.plan_runner.link_estimator.moved()

        def report(failure: str = "", error: str = "") -> None:
            if state.attempt is not attempt:
                return
            if attempt.version >= state.members.version:
                state.phase.take(CallEvent.MOVED)
            if attempt.vote is not None:
                self.by_engine.end(attempt.vote, failure, error)
            self.calls.backend(state).moved(state, go, failure, error)

        def done(failure: str, error: str) -> None:
            if failure:
                self.calls.steps.run(report, failure, error)
            else:  # first wait until contributions that only members here read are written
                written = partial(self.calls.steps.run, report)
                self.results.when_written(
                    (one.holds for one in state.member_calls.values()), written
                )

        votes = attempt.vote is not None
        vote = self.by_engine.vote_of(state, attempt) if votes else None
        self.attempt_bytes.move(go, done, always=votes, vote=vote)

    def report(self, state: GroupState, go: GroupAttempt, failure: str, error: str) -> None:
        """Reports the end of an attempt on this node to the leading node."""
        if state.leader is None:
            return
        up, down = self.results.plan_runner.link_estimator.rates
        done = GroupDone(go.generation, go.call, go.attempt, failure[:1000], up, down, error)
        self.calls.send(state, state.leader, done)

    def slowed(self, up: int, down: int) -> None:
        """Reports to the leading nodes that this host's link has become slow while bytes are
        moving. up, down: the rates of the link in bytes per second."""
        self.calls.steps.run(self._slowed, up, down)

    def _slowed(self, up: int, down: int) -> None:
        for state in self.calls.states.values():
            attempt = state.attempt
            if attempt is None or attempt.moved is None or state.leader is None:
                continue
            go, (sent_before, received_before) = attempt.go, attempt.moved
            if go.call != state.calls:
                continue
            sent, received = self.results.plan_runner.link_estimator.moved()
            slow = GroupSlow(
                generation=go.generation,
                call=go.call,
                attempt=go.attempt,
                up=up,
                down=down,
                sent=max(0, sent - sent_before),
                received=max(0, received - received_before),
            )
            self.calls.send(state, state.leader, slow)
