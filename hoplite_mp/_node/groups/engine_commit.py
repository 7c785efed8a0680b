"""Large calls of a Group that its engines commit, by the votes of all nodes for one plan.

When a call repeats the plan of an earlier one, there is nothing to decide. Each node moves the
bytes, votes when it has all that it should receive, and prepares the result; the engines exchange
the votes (two-phase commit without a coordinator; `cext/engine_small.h` has the protocol) and write
the result's id to the boards, so no node's Python has to have a turn before the members go on. The
leading node is not asked, and learns of the commit as every other one.

Invariant: until the engine says that it has committed the call (MOVED), what members would read
still belongs to the plan's execution. So if Python has to take the call back, a new plan finds
everything as if nothing had been prepared.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from hoplite_mp._node.groups.group_state import Voting
from hoplite_mp._protocol.fields import FOLDING

if TYPE_CHECKING:
    from typing import Any

    from hoplite_mp._node.groups.group_results import GroupResults
    from hoplite_mp._node.groups.group_state import GroupState
    from hoplite_mp._node.groups.small_calls import EngineCallsOwner
    from hoplite_mp._node.objects.context import HostContext
    from hoplite_mp._protocol.group_calls import GroupCommit, GroupGo, GroupPart

__all__ = ["EngineCommit"]


class EngineCommit:
    """Begins such calls, votes for them, and gives their results to members."""

    def __init__(self, host: HostContext, results: GroupResults, small: EngineCallsOwner) -> None:
        self.client = host.client
        self.clients = host.clients
        self.results = results
        self.small = small

    def begin(self, state: GroupState, part: GroupPart) -> GroupGo | None:
        """The attempt by which this node begins to move `part`, which its one member has given to
        the next call; the engine knows of it. None: the leading node has to be asked."""
        found = state.plans.next(state.members, part)
        if found is None or len(part.ranks) != 1:
            return None
        first, go, before = found
        if state.plans.is_led or (before.kind in FOLDING and before.pieces):
            return None
        commit = _commit_of(before, go, part, self.client.number)
        state.voting = Voting(go, first, commit)
        self.small.begin(state, go)
        return go

    def vote_of(self, state: GroupState) -> tuple[int, int, int] | None:
        """The vote that the engine gives as soon as all bytes are here. None: Python has to look
        first whether a member has written all that it gives, or for refs in what has come."""
        voting = state.voting
        assert voting is not None
        commit, go = voting.commit, voting.go
        holds = [hold for one in state.member_calls.values() for hold in one.holds]
        arrays = commit.kind in FOLDING or all(piece.layout for piece in commit.pieces)
        if not arrays or not self.results.is_written(holds):
            return None
        return go.generation, go.call, go.attempt

    def done(self, state: GroupState, failure: str, error: str) -> None:
        """This node has all bytes of the call that it should receive, or cannot have them."""
        voting = state.voting
        assert voting is not None
        voting.ended = failure, error
        if failure and voting.prepared is not None:  # its blocks are gone
            self.results.take_back(voting.prepared)
            voting.prepared = None
        if not state.owned:
            return
        if failure:
            self.small.give_back(state, voting.go.call)  # every node asks the leading one then
            return
        self.small.vote(state, voting.go)
        self.prepare(state)

    def prepare(self, state: GroupState) -> None:
        """Makes the result as soon as its blocks are known, while their bytes are on their way."""
        voting = state.voting
        if voting is None or voting.prepared is not None or not self.results.is_begun(voting.go):
            return
        if voting.ended is not None and voting.ended[0]:
            return  # it has failed at once
        here = state.member_calls
        slots = {rank: here[rank].slot for rank in here if here[rank].slot in self.clients}
        ranks = state.here(self.client.number, voting.commit)
        mine = {rank: slots.get(rank, 0) for rank in ranks}
        voting.prepared = self.results.prepare(voting.commit, voting.go, mine)
        voting.members = {rank: one for rank, one in state.known.here.items() if rank in mine}
        holds = [hold for one in here.values() for hold in one.holds]
        awaited = self.results.has_lent(holds)
        self.small.give_result(state, voting.go.call, voting.prepared.oid, awaited)

    def settle(self, voting: Voting) -> tuple[int, list[Any]]:
        """The call is committed: (object that members read, holds on what it needs)."""
        assert voting.prepared is not None
        slots = {
            rank: slot
            for rank, (slot, generation) in voting.members.items()
            if slot in self.clients and self.client.client_info(slot)["generation"] == generation
        }
        return self.results.settle(voting.prepared, voting.go, slots)

    def give_up(self, state: GroupState) -> None:
        """Another attempt takes the place of the call that this node has begun."""
        voting, state.voting = state.voting, None
        if voting is not None and voting.prepared is not None:
            self.results.take_back(voting.prepared)


def _commit_of(before: GroupCommit, go: GroupGo, part: GroupPart, number: int) -> GroupCommit:
    """The commit of a call that repeats the plan of an earlier one, whose commit was `before`.
    Pieces of other nodes keep their old names, because their blocks are found by their ranks."""
    own = {(piece.source, piece.target): piece for piece in part.pieces}
    pieces = tuple(own.get((piece.source, piece.target), piece) for piece in before.pieces)
    return msgspec.structs.replace(
        before, call=go.call, attempt=go.attempt, pieces=pieces, leader=number, to=number, opens=0
    )
