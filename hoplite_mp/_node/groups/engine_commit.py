"""Group calls that engines (compiled threads) commit: small calls, and repeated large calls.

A call that repeats the plan of an earlier call needs no decision. Each node moves the bytes,
prepares the result, and votes when it has received all its bytes. The engines exchange the votes
(two-phase commit without a coordinator; see `cext/engine_coll.h`) and write the result's id to the
boards. Members therefore continue before any node's Python code has run. The leading node is not
involved, and receives the commit like every other node.

Invariant: until the engine reports that it has committed the call (MOVED), the blocks of the result
belong to the plan's execution. So if Python has to take the call back, a new plan starts as if
no result had been prepared.
"""

from __future__ import annotations

import struct
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec

from hoplite_mp import _tasks
from hoplite_mp._common.reduction import OPS
from hoplite_mp._engine import COLL_FIRST, COLL_MOVED, COLL_PART, COLL_SEND, COLL_TAKEN
from hoplite_mp._node.groups.call_state import CallEvent, CallPhase, NodeAttempt, Vote
from hoplite_mp._node.objects.remote_objects import payload_layout
from hoplite_mp._protocol.fields import FOLDING
from hoplite_mp._protocol.group_calls import GroupCommit, GroupEngineFrame, Piece
from hoplite_mp._protocol.local import GroupCall
from hoplite_mp._serialize.contributions import contributors_of

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from hoplite_mp._node.groups.group_results import GroupResults
    from hoplite_mp._node.groups.group_state import GroupCallsEvents, GroupState, Known, MemberCall
    from hoplite_mp._node.objects.context import HostContext
    from hoplite_mp._node.peers.links import Links
    from hoplite_mp._protocol.group_calls import GroupAttempt, GroupPart
    from hoplite_mp._protocol.messages import GroupMembers

__all__ = ["EngineCallsOwner", "EngineCommit"]


class EngineCommit:
    """The commit backend while the engines commit the calls. This node votes for calls that repeat
    a plan, and prepares their results. It takes other calls back from the engine, so that the
    leading node decides them."""

    def __init__(
        self, host: HostContext, results: GroupResults, engine_calls: EngineCallsOwner
    ) -> None:
        self.client = host.client
        self.clients = host.clients
        self.results = results
        self.engine_calls = engine_calls

    def called(self, state: GroupState, called: MemberCall) -> None:
        frozen = state.phase.now is CallPhase.FROZEN
        if frozen or not self._begin(state, called):
            state.deferred_calls.append(called)
            self.engine_calls.give_way(
                state, called.ask.call, partial(self._given_way, state, called)
            )

    def changed(self, state: GroupState, members: GroupMembers) -> None:
        # The engine must not commit a call after this node has reported how many calls are decided.
        calls = self.engine_calls.calls
        self.engine_calls.close(state, lambda: calls.backend(state).changed(state, members))

    def received(self, state: GroupState, node: int, message: GroupAttempt | GroupCommit) -> None:
        # The message shows that the leading node has taken its calls back.
        again = partial(self.engine_calls.calls.take, node, message)
        self.engine_calls.give_way(state, message.call, again)

    def moved(self, state: GroupState, go: GroupAttempt, failure: str, error: str) -> None:
        if failure:
            # After that, every node sends its contributions to the leader.
            self.engine_calls.give_back(state, go.call)
            return
        self.engine_calls.engine.coll_vote(go.generation, go.call, go.attempt)
        self.prepare(state)

    def _begin(self, state: GroupState, called: MemberCall) -> bool:
        """Begins to move the contribution of this host's only member by a repeated plan, and passes
        the call to the engine. Returns False if there is no such plan, so that the leading node has
        to decide."""
        ask = called.ask
        self.engine_calls.look_at_board(state)
        if ask.mistake or not state.is_one_each:
            return False
        if ask.call > state.calls:  # the engine has committed the earlier calls
            state.end_call(ask.call)
        part = self.results.part(state.members, ask.call, [ask])
        found = state.plans.next(state.members, part) if ask.call == state.calls else None
        if found is None or state.plans.is_led:
            return False
        first, go, before = found
        if before.kind in FOLDING and before.pieces:
            return False
        vote = Vote(first, _commit_of(before, go, part, self.client.number))
        attempt = state.begin(go, vote)
        self.engine_calls.engine.coll_begin(go.generation, go.call, go.attempt)
        state.member_calls[ask.rank] = called
        state.phase.take(CallEvent.ATTEMPT)
        self.engine_calls.calls.move(state, attempt)
        self.prepare(state)
        return True

    def _given_way(self, state: GroupState, called: MemberCall) -> None:
        """Handles a member's call after the engine has given the calls back."""
        state.deferred_calls.remove(called)
        if state.known.here.get(called.ask.rank, (-1,))[0] == called.slot:
            self.engine_calls.calls.backend(state).called(state, called)
        else:  # the member has left or died
            self.results.unpin(called.holds)

    def vote_of(self, state: GroupState, attempt: NodeAttempt) -> tuple[int, int, int] | None:
        """The vote that the engine sends as soon as all bytes have arrived. None if Python must
        first wait for members to write their contributions, or look for refs in the received
        values."""
        assert attempt.vote is not None
        commit, go = attempt.vote.commit, attempt.go
        holds = [hold for one in state.member_calls.values() for hold in one.holds]
        arrays = commit.kind in FOLDING or all(piece.layout for piece in commit.pieces)
        if not arrays or not self.results.is_written(holds):
            return None
        return go.generation, go.call, go.attempt

    def end(self, vote: Vote, failure: str, error: str) -> None:
        """Records that this node has received all its bytes of the call, or why that failed."""
        vote.ended = failure, error
        if failure:  # the blocks are gone
            self._take_back(vote)

    def prepare(self, state: GroupState) -> None:
        """Creates the result as soon as its blocks are known, while their bytes are still
        arriving."""
        attempt, vote = state.attempt, state.vote
        if attempt is None or vote is None or vote.prepared is not None:
            return
        go = attempt.go
        if not self.results.is_begun(go) or (vote.ended is not None and vote.ended[0]):
            return
        here = state.member_calls
        slots = {rank: here[rank].slot for rank in here if here[rank].slot in self.clients}
        ranks = state.here(self.client.number, vote.commit)
        mine = {rank: slots.get(rank, 0) for rank in ranks}
        vote.prepared = self.results.prepare(vote.commit, go, mine)
        vote.members = {rank: one for rank, one in state.known.here.items() if rank in mine}
        holds = [hold for one in here.values() for hold in one.holds]
        awaited = self.results.has_lent(holds)
        self.engine_calls.engine.coll_result(go.generation, go.call, vote.prepared.oid, awaited)

    def settle(self, attempt: NodeAttempt) -> tuple[int, list[Any]]:
        """Settles the result of a committed call. Returns (object that members read, holds on its
        contents)."""
        vote = attempt.vote
        assert vote is not None
        assert vote.prepared is not None
        slots = {
            rank: slot
            for rank, (slot, generation) in vote.members.items()
            if slot in self.clients and self.client.client_info(slot)["generation"] == generation
        }
        return self.results.settle(vote.prepared, attempt.go, slots)

    def give_up(self, state: GroupState) -> None:
        """Withdraws the vote, because another attempt replaces the present one."""
        if state.attempt is not None and state.attempt.vote is not None:
            self._take_back(state.attempt.vote)
            state.attempt.vote = None

    def _take_back(self, vote: Vote) -> None:
        prepared, vote.prepared = vote.prepared, None
        if prepared is not None:
            self.results.take_back(prepared)


def _commit_of(before: GroupCommit, go: GroupAttempt, part: GroupPart, number: int) -> GroupCommit:
    """The commit of a call that repeats the plan of an earlier call. before: the earlier call's
    commit. Pieces from other nodes keep their old ids, because their blocks are found by rank."""
    own = {(piece.source, piece.target): piece for piece in part.pieces}
    pieces = tuple(own.get((piece.source, piece.target), piece) for piece in before.pieces)
    return msgspec.structs.replace(
        before, call=go.call, attempt=go.attempt, pieces=pieces, leader=number, to=number, opens=0
    )


# Group calls that the engine *owns*: it commits them without Python.
#
# When the leading node has decided a call with the present members, the commit gives the Group's
# later calls to the engine. The engine gives the calls back when one of them needs a decision (see
# `cext/engine_coll.h`). While this component waits for the engine's answer, it defers events of the
# Group.


_PART = struct.Struct("<IIIBBBB")  # struct coll_part: rank, bytes, offset, kind, op, dtype, root


class EngineCallsOwner:
    """This node's Groups that are registered in the engine."""

    calls: GroupCallsEvents

    def __init__(self, host: HostContext, links: Links) -> None:
        self.client = host.client
        self.tasks = host.tasks
        self.links = links
        self.engine = links.engine
        self.boards: dict[int, _tasks.CollectiveBoard] = {}  # by generation
        self.known: dict[int, Known] = {}
        links.when_coll(self._event)

    def serve(self, calls: GroupCallsEvents) -> None:
        """Sets the component that handles calls that the engine does not own."""
        self.calls = calls

    @property
    def possible(self) -> bool:
        """Whether engines may own calls. With TLS they may not, because Python threads then move
        each frame, so little would be gained."""
        return not self.links.tls

    # -- handing over and taking back ------------------------------------------------------------

    def add(self, known: Known) -> None:
        """Registers a Group with members on this node. At first, Python owns the Group's calls."""
        index = known.board.index
        for other in list(self.known.values()):
            # The other Group has ended, but the last manager died before announcing that.
            if other.board.index == index:
                self.forget(other.generation)
        self.known[known.generation] = known
        self.boards[known.generation] = _tasks.CollectiveBoard(self.tasks, index)
        number = self.client.number
        self.engine.coll_add(known.generation, known.shown.size, number, self.client, index)

    def forget(self, generation: int) -> None:
        """Removes a Group that has ended."""
        if self.known.pop(generation, None) is not None:
            self.boards.pop(generation).set_open(False)
            self.engine.coll_forget(generation)

    def open(self, state: GroupState, call: int) -> None:
        """Gives this call and all later ones to the engine, before any member can make this
        call."""
        members = state.members
        state.owned = True
        self.boards[members.generation].set_open(True)
        self.engine.coll_open(members.generation, members.version, call, members.nodes)
        self.links.prepare(state.nodes)
        # The engine must yield (leave to Python) the calls whose contributions are already here.
        for one in state.member_calls.values():
            self.engine.coll_yield(members.generation, one.ask.call)

    def close(self, state: GroupState, then: Callable[[], None]) -> None:
        """Takes the calls back immediately, and calls `then` when the engine has given them
        back."""
        generation = state.members.generation
        state.phase.take(CallEvent.FROZE)
        self.boards[generation].set_open(False)
        state.deferred.append(then)
        self.engine.coll_close(generation)

    def give_way(self, state: GroupState, call: int, then: Callable[[], None]) -> None:
        """Asks the engine to leave this call to Python. Calls `then` when the engine has given the
        calls back."""
        state.deferred.append(then)
        self.give_back(state, call)

    def give_back(self, state: GroupState, call: int) -> None:
        """Asks the engine to leave this call to Python, because it needs a decision."""
        state.phase.take(CallEvent.FROZE)
        self.engine.coll_yield(state.members.generation, call)

    def receive(self, node: int, message: GroupEngineFrame) -> None:
        """Passes to the engine a frame that arrived as a message because there was no link."""
        self.engine.coll_frame(
            message.generation,
            node,
            message.version,
            message.call,
            message.phase,
            message.plan,
            message.parts,
        )

    def doorbell(self, slot: int, generation: int, rank: int, given: list[int]) -> None:
        """Passes a member's doorbell to the engine: an eventfd, or -1 in simulations."""
        known = self.known.get(generation)
        if known is not None and known.here.get(rank, (-1,))[0] == slot:
            self.engine.coll_doorbell(generation, rank, given.pop() if given else -1)

    # -- events of the engine --------------------------------------------------------------------

    def _event(self, event: tuple[Any, ...]) -> None:
        self.calls.steps.run(self._take, event)

    def _take(self, event: tuple[Any, ...]) -> None:
        kind, generation = event[:2]
        state = self.calls.states.get(generation)
        if state is None:
            return
        if kind == COLL_SEND:
            node, version, call, phase, plan, parts = event[2:]
            self.links.prepare((node,))  # so that the next frame has a link
            frame = GroupEngineFrame(generation, version, call, phase, plan, parts)
            self.calls.send(state, node, frame)
        elif kind == COLL_PART and not state.owned:  # otherwise the engine has the part
            call, data = event[2:]
            self._part(generation, call, data)
        elif kind == COLL_FIRST:
            # All members have made a later call, so they have read the previous large result.
            # `look_at_board` may already have concluded another large call.
            if event[2] >= state.calls:
                state.result = []
        elif kind == COLL_MOVED:
            self._committed(state, event[2])
        elif kind == COLL_TAKEN and state.owned:
            calls, record = event[2:]
            self._taken(state, calls, record)

    def look_at_board(self, state: GroupState) -> None:
        """Concludes a call if the engine has committed it, even if the event has not been read yet,
        because the member may already have continued."""
        if state.attempt is None or state.vote is None:
            return
        call = state.attempt.go.call
        if state.known.board.look()[4] > call:
            self._committed(state, call)

    def _committed(self, state: GroupState, call: int) -> None:
        """Concludes a call that the engines have committed after all nodes voted for it, unless
        `look_at_board` has already done so. Members here may already have read the result."""
        attempt, vote = state.attempt, state.vote
        if attempt is not None and vote is not None and attempt.go.call == call:
            self.calls.conclude(state, vote.commit, on_board=True)

    def _taken(self, state: GroupState, calls: int, record: bytes) -> None:
        """Resumes ownership of the calls from number `calls` on. record: the previous call, if the
        engine has committed it."""
        state.owned = False
        self.look_at_board(state)
        if record:  # otherwise this process has written the last commit, or has received MOVED
            state.last = _engine_commit(state.members.generation, self.client.number, record)
        if calls > state.calls:
            state.end_call(calls)
            state.result = []
        state.phase.take(CallEvent.THAWED)
        attempt, vote = state.attempt, state.vote
        if attempt is not None and attempt.go.call == state.calls:  # the leading node will decide
            state.phase.take(CallEvent.ATTEMPT)
            if vote is not None and vote.ended is not None:
                state.phase.take(CallEvent.MOVED)
        deferred, state.deferred = state.deferred, []
        for action in deferred:
            action()
        self.calls.resume(state)

    def _part(self, generation: int, call: int, data: bytes) -> None:
        known = self.known.get(generation)
        rank, nbytes, _, kind, op, _, root = _PART.unpack_from(data)
        slot = None if known is None else known.here.get(rank)
        if slot is None or kind >= len(_tasks.CALL_KINDS):
            return  # that member has left or died
        parts: list[Any] = [data[_PART.size :]] if nbytes else []
        name = OPS[op] if op < len(OPS) else ""
        ask = GroupCall(generation, rank, call, _tasks.CALL_KINDS[kind], name, root, parts)
        self.calls.member_called(slot[0], ask)


def _engine_commit(generation: int, node: int, record: bytes) -> GroupCommit:
    """The commit of a small call, in the form of a leading node's decision."""
    call, mask, kind, op, _, root, found = _tasks.read_record(record)
    pieces = [
        Piece(source, -1, len(payload), payload, layout=payload_layout(memoryview(payload)))
        for source, payload in found.items()
        if payload
    ]
    name = OPS[op] if op < len(OPS) else ""
    return GroupCommit(
        generation, call, contributors_of(mask), _tasks.CALL_KINDS[kind], name, root, tuple(pieces),
        leader=node, to=node,
    )  # fmt: skip
