"""Handles calls of Groups over several hosts, on each node with members.

Members pass their contributions to their node. When all members on a node have called, the node
sends the contributions to the leading node. The leading node is the node of the lowest living rank,
and decides the call (`leader.py`). Plans move large contributions (`attempts.py`). Each node
writes the commit to its host's board, so members wait in the same way as on one host. The manager
takes no part in calls; it only decides which processes are members.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec

from hoplite_mp._node.groups.attempts import NodeAttempts
from hoplite_mp._node.groups.call_state import CallEvent, CallPhase
from hoplite_mp._node.groups.engine_commit import EngineCommit
from hoplite_mp._node.groups.group_decisions import lost
from hoplite_mp._node.groups.group_state import GroupState, MemberCall, PendingMessages, Steps
from hoplite_mp._node.groups.leader import GroupLeader, SendToManager, SendToNode, WakeLater
from hoplite_mp._protocol.group_calls import (
    GroupAttempt,
    GroupCommit,
    GroupDone,
    GroupEngineFrame,
    GroupPart,
    GroupSkip,
    GroupSlow,
    GroupStart,
    GroupSync,
    error_kind,
)
from hoplite_mp.errors import StoreFullError

if TYPE_CHECKING:
    from collections.abc import Callable

    from hoplite_mp._node.groups.attempts import AttemptBytes
    from hoplite_mp._node.groups.call_state import NodeAttempt
    from hoplite_mp._node.groups.engine_commit import EngineCallsOwner
    from hoplite_mp._node.groups.group_results import GroupResults
    from hoplite_mp._node.groups.group_state import CommitBackend, Known
    from hoplite_mp._node.objects.context import HostContext
    from hoplite_mp._protocol.group_calls import GroupMessage
    from hoplite_mp._protocol.local import GroupCall, GroupLeave
    from hoplite_mp._protocol.messages import GroupMembers, Member

__all__ = ["MultiHostCalls"]

# The number of messages kept for a Group that has not been announced to this node. Two from each
# node suffice.
PENDING_MESSAGES_MAX = 1024


class LeaderCommit:
    """The commit backend while the leading node commits the calls. This node sends the leading node
    the contributions of members here."""

    def __init__(self, calls: MultiHostCalls) -> None:
        self.calls = calls

    def called(self, state: GroupState, called: MemberCall) -> None:
        ask, before = called.ask, state.member_calls.get(called.ask.rank)
        if ask.call < state.calls or (before and before.ask.call == ask.call):
            self.calls.results.unpin(called.holds)
            return
        if before is not None:
            self.calls.results.unpin(before.holds)
        state.member_calls[ask.rank] = called
        self.calls.tell(state)

    def changed(self, state: GroupState, members: GroupMembers) -> None:
        self.calls.change(state, members)

    def received(self, state: GroupState, node: int, message: GroupAttempt | GroupCommit) -> None:
        if isinstance(message, GroupAttempt):
            self.calls.attempts.begin(state, message)
        elif node in state.knowing:  # ignored if the sender is gone
            self.calls.commit(state, message)

    def moved(self, state: GroupState, go: GroupAttempt, failure: str, error: str) -> None:
        self.calls.attempts.report(state, go, failure, error)


class MultiHostCalls:
    """All Groups over several hosts that have or had members on this host."""

    def __init__(
        self,
        host: HostContext,
        results: GroupResults,
        attempt_bytes: AttemptBytes,
        engine_calls: EngineCallsOwner,
    ) -> None:
        self.loop = host.loop
        self.client = host.client
        self.roster = host.roster
        self.send_manager = host.send_manager
        self.send_peer = host.send_peer
        self.clients = host.clients
        self.results = results
        self.engine_calls = engine_calls
        self.states: dict[int, GroupState] = {}  # by generation
        self.steps = Steps(lambda message: self.take(self.client.number, message))
        self.by_leader = LeaderCommit(self)
        self.by_engine = EngineCommit(host, results, engine_calls)
        self.attempt_bytes = attempt_bytes
        self.attempts = NodeAttempts(host.client, self, results, attempt_bytes, self.by_engine)
        engine_calls.serve(self)
        self._handlers: dict[type, Callable[[GroupState, int, Any], None]] = {
            GroupPart: self._part,
            GroupAttempt: lambda state, *about: self.backend(state).received(state, *about),
            GroupDone: self._done,
            GroupSlow: self._slow,
            GroupCommit: lambda state, *about: self.backend(state).received(state, *about),
            GroupStart: self._started,
            GroupSkip: self._skipped,
            GroupEngineFrame: lambda state, node, message: engine_calls.receive(node, message),
            GroupSync: lambda state, *about: self._lead(state, state.leading.sync, *about),
        }
        self.pending_messages = PendingMessages(PENDING_MESSAGES_MAX)

    # -- membership, from the manager -----------------------------------------------------------

    def changed(self, members: GroupMembers, known: Known) -> None:
        """Handles the manager's announcement of a new version of the members."""
        state = self.states.get(members.generation)
        if state is None:
            state = self.states[members.generation] = GroupState(members, known=known)
            possible = self.engine_calls.possible
            state.leading = GroupLeader(state, self.client.number, engines=possible)
            self.engine_calls.add(known)
        self.steps.run(self.backend(state).changed, state, members)

    def backend(self, state: GroupState) -> CommitBackend:
        """The present commit backend of the Group."""
        return self.by_engine if state.owned else self.by_leader

    def change(self, state: GroupState, members: GroupMembers) -> None:
        """Continues with the new members."""
        state.plans.clear()
        state.members = members
        self._change(state)
        for node, message in self.pending_messages.take(members.generation):
            self.take(node, message)

    def _change(self, state: GroupState) -> None:
        members, known = state.members, state.known
        state.phase.take(CallEvent.CHANGED)
        state.part_sent, attempt = False, state.attempt
        if attempt is not None:
            attempt.awaiting_local = False  # the attempt is for an earlier version of the members
            if attempt.version >= members.version:
                # The attempt is for the new members, and arrived before the manager's message.
                state.phase.take(CallEvent.ATTEMPT)
        for rank in range(members.size):
            if not (members.alive | members.joining) >> rank & 1:
                called = state.member_calls.pop(rank, None)
                if called is not None and called.ask.call == state.calls and attempt is not None:
                    state.left += called.holds  # the attempt may include them
                elif called is not None:
                    self.results.unpin(called.holds)
        # Each node knows the first calls of its own ranks; the leading node receives the others.
        here = {rank for rank, node in enumerate(members.nodes) if node == self.client.number}
        state.starts = {rank: call for rank, call in state.starts.items() if rank in here}
        if members.first:
            for rank in here.difference(state.starts):
                if members.alive >> rank & 1:
                    state.start(rank, 0)
                    known.board.set_start(rank, 0)
        state.leading.changed()
        if self.client.number not in state.nodes:  # no member remains here to read a result
            self._let_go(state)
            state.result, state.pending_commit = [], None
        if state.pending_commit is not None:
            self.commit(state, state.pending_commit)
        if state.leader is not None:
            sync = GroupSync(
                members.generation,
                members.version,
                state.calls,
                state.last_for(state.leader),
                tuple(state.starts.items()),
            )
            self.send(state, state.leader, sync)
        self.tell(state)
        for node, pending in list(state.leading.syncs.items()):
            if node in state.knowing:  # `sync` ignores a GroupSync for another version
                self._lead(state, state.leading.sync, node, pending)

    def closed(self, generation: int) -> None:
        """Removes a Group whose members have all left or died."""
        state = self.states.pop(generation, None)
        if state is None:
            return
        for role in (state.phase, state.leading.phase):
            role.take(CallEvent.CLOSED)
        state.ahead = None
        self.engine_calls.forget(generation)
        state.plans.clear()
        self.steps.run(self.engine_calls.look_at_board, state)
        self._let_go(state)
        state.result = []
        state.deferred.clear()  # the engine sends no more events of this Group
        for called in (*state.member_calls.values(), *state.deferred_calls):
            self.results.unpin(called.holds)

    def member_left(self, ask: GroupLeave, slot: int) -> None:
        """Handles a member that is leaving and receives no further result."""
        state = self.states.get(ask.generation)
        if state is None:
            return
        self.steps.run(self.engine_calls.look_at_board, state)
        for called in (*state.member_calls.values(), *state.deferred_calls):
            if called.ask.rank == ask.rank and called.slot == slot:
                called.slot = -1
                self.results.abandon(called.holds)
        if state.vote is not None:
            state.vote.members.pop(ask.rank, None)
        blocks = state.given_blocks.pop(ask.rank, ())
        if ask.calls < state.calls:
            self.results.take_untaken(blocks, slot)

    def peer_lost(self, member: Member) -> None:
        """Handles the loss of a host."""
        self.pending_messages.lose_node(member.node)

    def _let_go(self, state: GroupState) -> None:
        """Drops the present attempt and the contributions of members that have left or died."""
        self.by_engine.give_up(state)
        attempt, state.attempt = state.attempt, None
        if attempt is not None:
            self.attempt_bytes.drop(attempt.go)
        self.results.unpin(state.left)

    # -- from members ---------------------------------------------------------------------------

    def member_called(self, slot: int, ask: GroupCall) -> None:
        """Handles the next call by a member on this host. Pins its contributions immediately, even
        if the member is still writing them or the engine has to give the calls back first."""
        state = self.states.get(ask.generation)
        if state is None:
            self.results.refuse(slot, ask)
        else:
            self.steps.run(self._called, state, slot, ask)

    def _called(self, state: GroupState, slot: int, ask: GroupCall) -> None:
        # The last call is concluded first, because the contribution may be a block of its result.
        self.engine_calls.look_at_board(state)
        holds = []
        try:
            holds = self.results.pin(slot, ask)
        except (ValueError, StoreFullError) as error:
            ask = msgspec.structs.replace(ask, mistake=str(error), error=error_kind(error))
        self.backend(state).called(state, MemberCall(ask, slot, holds))

    def tell(self, state: GroupState) -> None:
        """Sends this node's contributions to the leading node if all members here have called."""
        if state.owned or state.part_sent or not state.members.formed or state.leader is None:
            return
        asks = state.asks(self.client.number)
        if asks is None or state.phase.now is CallPhase.ENDED:
            return
        state.phase.take(CallEvent.PART)
        state.part_sent = True
        part = self.results.part(state.members, state.calls, asks)
        attempt, repeated = state.attempt, state.plans.next(state.members, part)
        vote = None
        if attempt is not None and attempt.version == state.members.version:
            vote = attempt.vote if attempt.go.call == state.calls else None
        if vote is not None:
            part = msgspec.structs.replace(part, repeats=vote.made_for + 1)
        elif repeated is not None and attempt is None:
            part = msgspec.structs.replace(part, repeats=repeated[0] + 1)
            state.phase.take(CallEvent.ATTEMPT)
            self.move(state, state.begin(repeated[1]))
        self.send(state, state.leader, part)
        if attempt is not None and vote is not None and vote.ended is not None:
            failure, error = vote.ended
            self.attempts.report(state, attempt.go, failure, error)
        if attempt is not None and attempt.awaiting_local:
            attempt.awaiting_local = False
            self.attempts.fill_in(state, attempt, asks)

    def send(self, state: GroupState, node: int, message: GroupMessage) -> None:
        """Sends a message to a node, which may be this one."""
        if node == self.client.number:
            self.steps.send(message)
        elif node in self.roster.by_number:
            self.send_peer(self.roster.by_number[node].host_id, message)

    # -- from nodes -----------------------------------------------------------------------------

    def receive(self, node: int, message: GroupMessage) -> None:
        """Handles a message from another node."""
        self.steps.run(self.take, node, message)

    def take(self, node: int, message: GroupMessage) -> None:
        """Handles a message from a node, which may be this one, in the present step."""
        state = self.states.get(message.generation)
        if state is None:
            self.pending_messages.add(node, message)
        else:
            self._handlers[type(message)](state, node, message)

    def _part(self, state: GroupState, node: int, message: GroupPart) -> None:
        if message.call >= state.calls:
            self._lead(state, state.leading.part, node, message)
        elif state.last is not None:
            self.send(state, node, state.last)  # the sender has missed the commit

    def _lead(self, state: GroupState, event: Callable[..., None], *about: Any) -> None:
        """Passes an event to the leader's component, and executes its instructions."""
        event(*about)
        for one in state.leading.take():
            match one:
                case SendToNode():
                    self.send(state, one.node, one.message)
                case SendToManager():
                    self.send_manager(one.message)
                case WakeLater():
                    wake = partial(self._wake, state, one.event)
                    self.loop.call_later(one.seconds, partial(self.steps.run, wake))

    def _wake(self, state: GroupState, event: Callable[[float], None]) -> None:
        if state.phase.now is not CallPhase.ENDED:
            self._lead(state, event, self.loop.now())

    def _done(self, state: GroupState, node: int, message: GroupDone) -> None:
        self._lead(state, state.leading.done, node, message, self.loop.now())

    def _slow(self, state: GroupState, node: int, message: GroupSlow) -> None:
        self._lead(state, state.leading.slow, node, message, self.loop.now())

    def _started(self, state: GroupState, node: int, message: GroupStart) -> None:
        if message.version == state.members.version:
            state.start(message.rank, message.call)
            state.known.board.set_start(message.rank, message.call)
            self.tell(state)

    def _skipped(self, state: GroupState, node: int, message: GroupSkip) -> None:
        # While the engine owns the calls, a skip is older than the commit that gave it the calls.
        later = message.call > state.calls and state.pending_commit is None
        if later and node in state.knowing and not state.owned:
            self._let_go(state)
            state.end_call(message.call)
            self.attempts.catch_up(state)
            self.resume(state)

    # -- executing decisions --------------------------------------------------------------------

    def move(self, state: GroupState, attempt: NodeAttempt) -> None:
        """Moves the bytes of an attempt."""
        self.attempts.move(state, attempt)

    def commit(self, state: GroupState, message: GroupCommit) -> None:
        """Handles a node's message with the decision on a call."""
        if message.call < state.calls:
            return  # the decision was sent again after a change of the members
        given, attempt = message, state.attempt
        if attempt is not None and (
            message.error or not attempt.is_for(message.call, message.attempt)
        ):
            self.by_engine.give_up(state)
        vote = state.vote
        if vote is not None and message.to != self.client.number:  # a commit for another node
            given = msgspec.structs.replace(vote.commit, leader=message.leader, keeps=message.keeps)
        elif vote is None and state.lacks(self.client.number, message):
            if message.leader in state.knowing:
                state.pending_commit = message  # the deciding node has sent this node's share
                return
            given = lost(message, state.members)  # this node's share is lost
        # If this skips calls, no member here took part in them.
        self.conclude(state, given, message.opens)

    def conclude(
        self, state: GroupState, given: GroupCommit, opens: int = 0, *, on_board: bool = False
    ) -> None:
        """Ends a call. on_board: the engine has written the commit to the board."""
        message, state.pending_commit = given, None
        vote, attempt, state.attempt = state.vote, state.attempt, None
        go = None if attempt is None else attempt.go
        taken = message.call, message.attempt
        if go is not None and ((go.call, go.attempt) != taken or given.error):
            self.attempt_bytes.drop(go)
            go = None
        # A process that has exited receives no block, even before the manager announces its exit.
        slots = {r: one.slot for r, one in state.member_calls.items() if one.slot in self.clients}
        here = state.here(self.client.number, message)
        mine = {rank: slots.get(rank, 0) for rank in here}
        before = state.result
        prepared = None if vote is None else vote.prepared
        if attempt is not None and prepared is not None:
            oid, state.result = self.by_engine.settle(attempt)
        else:
            oid, state.result = self.results.commit(given, go, mine)
        state.given_blocks, self.results.given = self.results.given, {}
        state.end_call(message.call + 1)
        state.last = message
        for rank in list(state.member_calls):
            if state.member_calls[rank].ask.call < state.calls:
                self.results.unpin(state.member_calls.pop(rank).holds)
        if opens == state.members.version and state.nodes:
            self.engine_calls.open(state, state.calls)
        if not on_board:
            state.known.board.commit(message.call, oid)
        if go is not None:
            self.attempt_bytes.drop(go)  # only now: members wait for the commit
        if prepared is not None:
            self.results.let_go(prepared)
        if not given.error:
            keeps = message.keeps or go is None
            state.plans.committed(state.members, message, go, keeps, by_engines=on_board)
        self.results.unpin(state.left)
        del before  # every member has read the previous result, so its holds are released
        self.attempts.catch_up(state)
        self.resume(state)

    def resume(self, state: GroupState) -> None:
        """Continues with the next call."""
        self.tell(state)
        self._lead(state, state.leading.lead)
