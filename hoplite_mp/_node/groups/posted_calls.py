"""Calls of a Group that this node expects, and for which it makes all cells before they are made.

Between a member's call and its first byte on the link a node would make a dozen cells, lease the
result's block, and ask other nodes for their parts. A program that makes the same call
again and again, as training does, can have all of that done while the call before is on its way;
MPI programs post their receives before they compute, and call it persistent collectives (MPI-4) if
all of it is kept. Then a call only has to say where what its member gives lies.

Invariant: a posted call has promised nothing. No engine names its plan before the member has made
it, and what others have received of it by then is what any execution of that plan would send.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import msgspec

from hoplite_mp import _serialize
from hoplite_mp._node.groups.group_state import Posted
from hoplite_mp._node.groups.repeated_plans import with_own_objects

if TYPE_CHECKING:
    from collections.abc import Mapping

    from hoplite_mp._node.execution.plan_runner import PlanRunner
    from hoplite_mp._node.groups.group_state import GroupState, Voting
    from hoplite_mp._node.objects.context import HostContext
    from hoplite_mp._protocol.group_calls import GroupGo, GroupPart
    from hoplite_mp._protocol.local import GroupCall

__all__ = ["PostedCalls"]

# How long after a node has heard of the commit of a call it prepares the next one. Higher: it may
# be too late. Lower: it takes processor time when members here need it to read their results.
POST_AFTER_S = 0.001
# For how long a prepared call keeps the blocks that it would fill. Higher: memory lies idle while a
# program computes. Lower: programs that call less often begin later.
POSTED_S = 1.0
POSTED_MAX = 4  # calls that are prepared for one Group. Higher: more memory lies idle


class PostedCalls:
    """Makes the cells of such calls, and gives them up where another call is made."""

    def __init__(
        self, host: HostContext, plan_executor: PlanRunner, states: Mapping[int, GroupState]
    ) -> None:
        self.states = states
        self.client = host.client
        self.loop = host.loop
        self.plan_executor = plan_executor
        self.streaming_sources = plan_executor.streaming_sources

    def note(self, state: GroupState, part: GroupPart) -> None:
        """`part` has begun to move. Notes what the next call like this one would give."""
        voting = state.voting
        if voting is not None and state.plans.is_steady:
            head = self._head_of(part)
            voting.expects = None if head is None else (part, head)

    def post_next(self, state: GroupState, voting: Voting) -> None:
        """That call is committed. If members make such calls at a steady pace, this node prepares
        the next one POST_AFTER_S later, unless it was made by then."""
        if voting.expects is None or state.plans.is_led:
            return
        part, head = voting.expects
        members = state.members

        def post() -> None:
            go = state.plans.upcoming(members, part)
            if go is None or state.members is not members:
                return
            if go.call in state.posted:
                return  # a call of another form is expected to be that one
            if len(state.posted) >= POSTED_MAX:
                return
            for plan in go.plans:
                self.plan_executor.post(plan)
            posted = state.posted[go.call] = Posted(go, part, head)
            self.loop.call_later(POSTED_S, partial(self._too_long, state, posted))

        self.loop.call_later(POST_AFTER_S, post)

    def begin(self, state: GroupState, ask: GroupCall) -> tuple[GroupPart, GroupGo] | None:
        """If the call is one that this node expects, lets its bytes leave before anything else is
        done; returns what the member gives, and the attempt. None: it is another one. Posted calls
        that it shows to have been expected in vain are given up."""
        self.drop(state, ask.call)
        posted = state.posted.get(ask.call)
        part = None if posted is None else self._part_if_expected(posted, ask)
        if posted is None or part is None:
            self.drop(state, ask.call + 1)
            return None
        go = with_own_objects(posted.go, part.pieces)
        for plan in go.plans:
            self.plan_executor.place(plan)
        return part, go

    def drop(self, state: GroupState, before: int | None = None) -> None:
        """Gives up all posted calls, or those before that one."""
        for call in list(state.posted):
            if before is None or call < before:
                self._drop(state.posted.pop(call))

    def make_room(self) -> None:
        """Gives up all that is only expected, because the store is full, or before its use is
        counted."""
        for state in self.states.values():
            self.drop(state)

    def _drop(self, posted: Posted) -> None:
        for plan in posted.go.plans:
            self.plan_executor.drop_posted(plan)

    def _too_long(self, state: GroupState, posted: Posted) -> None:
        if state.posted.get(posted.go.call) is posted:
            del state.posted[posted.go.call]
            self._drop(posted)

    # -- what members give -----------------------------------------------------------------------

    def _head_of(self, part: GroupPart) -> bytes | None:
        """The payload's head (`_serialize`), up to the elements, of the one array that a member
        gives, or b"" if it gives nothing. None: it gives something else."""
        if not part.pieces:
            return b""
        source = self.streaming_sources.get(part.pieces[0].object)
        if len(part.pieces) > 1 or source is None or not part.pieces[0].layout:
            return None
        info = _serialize.describe_array(self.client.memory(source.payload, source.nbytes))
        return None if info is None else bytes(self.client.memory(source.payload, info.offset))

    def _part_if_expected(self, posted: Posted, ask: GroupCall) -> GroupPart | None:
        """What the member gives, if it is what was expected, whatever its elements are; else None.
        It costs less than `GroupResults.part`, which looks at everything."""
        before = posted.part
        same = (ask.kind, ask.op, ask.root) == (before.kind, before.op, before.root)
        if not same or ask.mistake or len(ask.parts) != len(before.pieces):
            return None
        pieces = before.pieces
        if pieces:
            given = ask.parts[0]
            if not isinstance(given, tuple) or given[1] != pieces[0].nbytes:
                return None
            if self.client.memory(given[0], len(posted.head)) != posted.head:
                return None
            own = self.streaming_sources.name(given[0])
            pieces = (msgspec.structs.replace(pieces[0], object=own),)
        return msgspec.structs.replace(before, call=ask.call, pieces=pieces)
