"""The leading node of a Group: collects what members give to a call, decides it, tells all.

The node of the lowest living rank decides each call once, for all nodes. After a change of the
members it first learns from each node what was decided before; then it waits for the parts of all
living ranks, makes a plan for those that are large, and commits when all bytes have moved. Every
node has this component, because each may have to lead.
"""

from __future__ import annotations

import dataclasses
import logging
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from hoplite_mp._node.groups.group_decisions import (
    ATTEMPT_BITS,
    MADE_ATTEMPTS,
    Decision,
    UndecidedCall,
    decide,
    is_repeated,
)
from hoplite_mp._node.groups.group_state import InProgress
from hoplite_mp._node.groups.repeated_plans import PART_BYTES_MAX, named_by_all, repeat
from hoplite_mp._planner.repair import (
    FRESH_S,
    SLOW_GATHER_S,
    SlowLinks,
    owners_without,
    slow_one,
    stays_slow,
)
from hoplite_mp._planner.topology import BYTES_PER_S_DEFAULT, HostRates
from hoplite_mp._protocol.fields import NO_OBJECT, shorten
from hoplite_mp._protocol.group_calls import (
    GroupGo,
    GroupPart,
    GroupSkip,
    GroupStart,
    Piece,
    error_kind,
    too_large,
)
from hoplite_mp._protocol.messages import ExecuteReduce, GroupAdmitted

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping

    from hoplite_mp._node.groups.engine_commit import EngineCallsOwner
    from hoplite_mp._node.groups.group_state import GroupState
    from hoplite_mp._node.objects.context import HostContext
    from hoplite_mp._protocol.group_calls import (
        GroupCommit,
        GroupDone,
        GroupMessage,
        GroupPart,
        GroupSlow,
        GroupSync,
        Plan,
    )

__all__ = [
    "WAIT_SHARE",
    "GroupLeader",
    "decide_speculatively",
    "fill_in",
    "is_other",
    "lacks",
    "transfer_s",
]


# How old a report may be to count for the stripes of the next call. More than FRESH_S, because a
# host may have sent all its bytes, and report no more, before it has received all.
BELIEVED_S = 1.2
# Calls that saturate every node's links in both directions, so that rates can be measured.
FILLING = ("allreduce", "reduce_scatter", "allgather", "alltoall")
_log = logging.getLogger("hoplite_mp")


class GroupLeader:
    """The calls of all groups that this node leads."""

    def __init__(
        self,
        host: HostContext,
        small: EngineCallsOwner,
        states: Mapping[int, GroupState],
        send: Callable[[GroupState, int, GroupMessage], None],
        run: Callable[..., None],
    ) -> None:
        self.loop = host.loop
        self.client = host.client
        self.send_manager = host.send_manager
        self.small = small
        self.states = states  # by generation
        self.send = send
        self.run = run  # a step

    def sync(self, state: GroupState, node: int, message: GroupSync) -> None:
        """A node has said what it knows, after a change of the members."""
        before = state.syncs.get(node)
        if message.last is None and before is not None and before.committed == message.committed:
            message = msgspec.structs.replace(message, last=before.last)  # it is sent once
        state.syncs[node] = message
        if message.version != state.members.version or state.leader != self.client.number:
            return  # that node, or this one, does not have the latest members yet
        state.unsettled = True
        if message.committed > state.calls:  # decided by a leader that is gone
            self._hand_on(state, state.nodes, message.committed, message.last)
        elif message.committed < state.calls and node in state.nodes:
            self._hand_on(state, [node], state.calls, state.last)
        if node != self.client.number:
            for rank, call in message.starts:
                state.start(rank, call)
        self.lead(state)

    def _settle(self, state: GroupState) -> None:
        """Begins the next call again, once this node knows all that was decided before it."""
        if not state.synced >= state.knowing:
            return
        state.unsettled = False
        in_progress, state.in_progress = state.in_progress, None
        if in_progress is not None:
            _log.info("group %s: call %d begins again", state.members.name, in_progress.call)
        if self._start_new(state):
            return
        self._decide(state)
        if state.in_progress is None and state.deciding != state.calls:
            self._withdraw(state)

    def _hand_on(
        self, state: GroupState, nodes: Iterable[int], calls: int, last: GroupCommit | None
    ) -> None:
        """Tells these nodes how many calls are over, and passes on the last known commit."""
        for node in nodes:
            if last is not None:
                self.send(state, node, last)
            if last is None or last.call + 1 < calls:
                self.send(state, node, GroupSkip(state.members.generation, calls))

    def _withdraw(self, state: GroupState) -> None:
        """Makes all nodes give up attempts for other members. Otherwise they would read what a
        member that has left gave until all others have called."""
        if not self._leads(state) or not state.members.formed:
            return
        attempt = state.members.version << ATTEMPT_BITS | state.attempts + 1
        state.attempts = (state.attempts + 1) % MADE_ATTEMPTS
        go = GroupGo(state.members.generation, state.calls, attempt, (), ())
        for node in state.nodes:
            self.send(state, node, go)

    def _start_new(self, state: GroupState) -> bool:
        """New members start with the call after the next one, because the living may have begun
        the next one. True: a call that no living member could make is skipped."""
        members = state.members
        if not members.formed:
            return False
        for rank in state.unstarted:
            state.start(rank, state.calls + 1)
            node = members.nodes[rank]
            assert node is not None
            start = GroupStart(members.generation, members.version, rank, state.calls + 1)
            self.send(state, node, start)
        if state.starts and not state.expected():
            self._hand_on(state, state.nodes, min(state.starts.values()), None)
            return True
        return False

    def _leads(self, state: GroupState) -> bool:
        return not state.owned and state.leader == self.client.number

    def lead(self, state: GroupState) -> None:
        """Decides the next call if all parts are here."""
        if not self._leads(state) or state.deciding == state.calls:
            return
        if state.unsettled:
            self._settle(state)
        else:
            self._decide(state)

    def _decide(self, state: GroupState, late: bool = False) -> None:
        """late: the last host was waited for long enough, so the call may begin without it."""
        moving = state.in_progress
        if moving is not None and not is_other(state, moving):
            return
        if state.owed is not None or not state.members.formed:
            return
        expected, given = state.expected(), state.given()
        if not expected or not given:
            return
        # Must differ from every attempt that an earlier leader made for other members, because
        # cells of those may still be served.
        attempt = state.members.version << ATTEMPT_BITS | state.attempts + 1
        complete = all(rank in given for rank in expected)
        if not complete and not late:
            self._wait(state, given)
            return
        undecided = UndecidedCall(state.members, state.calls, attempt, expected, given, state.rates)
        missing: set[int] = set()
        if complete:
            begun = _begun_by_all(state, given)
            if begun is not None and repeat(outcome := _decided(undecided), begun):
                self._await_repeated(state, outcome)
                return
            outcome = _decided(undecided, before=state.attempted if moving is None else None)
        else:
            early = None if state.not_early == state.calls else decide_speculatively(undecided)
            if early is None:
                return
            outcome, missing = early
        if outcome.waits:
            self._ask_to_move(state, attempt, outcome, missing)
        else:
            self._tell(state, outcome)

    def _ask_to_move(
        self,
        state: GroupState,
        attempt: int,
        outcome: Decision,
        missing: Collection[int] = (),
        slow: InProgress | None = None,
    ) -> None:
        """Sends the plans to all nodes that take part in them. missing: ranks that have not called.
        slow: the attempt that this one replaces because a link is slow."""
        state.attempts = (state.attempts + 1) % MADE_ATTEMPTS
        # While a member is late, the others' links are idle for a time.
        fills = outcome.kind in FILLING and not missing
        moving = state.in_progress = InProgress(
            state.calls,
            attempt,
            outcome,
            set(outcome.waits),
            set(missing),
            fills=fills,
            narrowed=slow is not None,
            early=bool(missing),
        )
        if slow is not None:
            moving.links = SlowLinks(slow.links.slow, heard_at=slow.links.heard_at)
        go = GroupGo(
            state.members.generation,
            state.calls,
            attempt,
            outcome.plans,
            tuple(sorted(outcome.waits)),
        )
        for node in outcome.nodes:
            self.send(state, node, go)

    def _await_repeated(self, state: GroupState, outcome: Decision) -> None:
        """Waits for the bytes of a plan by which all nodes have begun; some may have reported."""
        waiting = set(outcome.waits)
        fills = outcome.kind in FILLING
        state.in_progress = InProgress(state.calls, outcome.attempt, outcome, waiting, fills=fills)
        for node, report in state.early.items():
            if state.in_progress is not None:
                self.done(state, node, report)

    def _wait(self, state: GroupState, given: Mapping[int, GroupPart]) -> None:
        """Waits for the last host of a call that may begin without it, for WAIT_SHARE of the time
        that one transfer takes."""
        call, one_s = state.calls, transfer_s(next(iter(given.values())), state.rates)
        late = {state.members.nodes[rank] for rank in state.expected() if rank not in given}
        if state.late_timer == call or one_s is None or len(late) != 1:
            return

        def over() -> None:
            if state.calls == call and self.states.get(state.members.generation) is state:
                state.late_timer = -1  # the next part that arrives may begin another wait
                if self._leads(state) and not state.unsettled and state.deciding != call:
                    self._decide(state, late=True)

        state.late_timer = call
        self.loop.call_later(WAIT_SHARE * one_s, partial(self.run, over))

    def done(self, state: GroupState, node: int, message: GroupDone) -> None:
        """A node has its part of an attempt's results, or cannot have it."""
        moving = state.in_progress
        if is_repeated(message.attempt) and (moving is None or message.failure):
            # Not all have called yet, or a node has given up what it began long before the others.
            state.early[node] = message
        if moving is None or (message.call, message.attempt) != (moving.call, moving.attempt):
            return
        if message.up and message.down and moving.fills:
            links = moving.links
            links.forget_old(BELIEVED_S, self.loop.now())
            up, report = message.up, links.reports.get(node, links.slow.get(node))
            slow = node == slow_one(links.slow) or stays_slow(report, state.rates.get(node), up)
            if report is not None and slow:  # it was faster before
                up = min(up, report.up)
            state.rates[node] = HostRates(up, message.down)
        if message.failure and is_repeated(message.attempt):
            state.in_progress = None
            self.lead(state)  # makes a plan
            return
        if message.failure and message.error == "full" and moving.early:
            self._end_early(state, moving)
            return
        if message.failure:
            moving.outcome.fail(message.error, message.failure)
            moving.waiting.clear()
        moving.waiting.discard(node)
        if not moving.waiting:
            state.in_progress = None
            self._tell(state, moving.outcome)

    def _end_early(self, state: GroupState, moving: InProgress) -> None:
        """A node has no room yet. Gives the attempt up, and what it needs on all nodes; the call is
        decided when all have called."""
        state.in_progress, state.not_early = None, state.calls
        if moving.missing:
            attempt = state.members.version << ATTEMPT_BITS | state.attempts + 1
            self._ask_to_move(state, attempt, moving.outcome.without_plans())
            state.in_progress = None
        self.lead(state)

    def slow(self, state: GroupState, node: int, message: GroupSlow) -> None:
        """A node's link has become slow while the bytes of an attempt move."""
        moving = state.in_progress
        if moving is None or (message.call, message.attempt) != (moving.call, moving.attempt):
            return
        plan = moving.outcome.plans[0] if moving.outcome.plans else None
        if moving.links.hear(node, message, plan, state.rates, self.loop.now()):
            self.loop.call_later(SLOW_GATHER_S, partial(self.run, self._narrow, state, moving))

    def _narrow(self, state: GroupState, moving: InProgress) -> None:
        """Gives the stripe of a slow node to the others, if that is worthwhile: the same call in
        another attempt, for which bytes that have arrived are kept."""
        moving.links.looks = False
        moving.links.forget_old(FRESH_S, self.loop.now())
        if state.in_progress is not moving or moving.narrowed or moving.missing:
            return
        known = self.states.get(state.members.generation) is state
        if not known or not self._leads(state) or state.unsettled or state.owed is not None:
            return  # the Group has ended, or the call begins again in any case
        plan = moving.outcome.plans[0] if moving.outcome.plans else None
        owners = owners_without(moving.links.slow, plan)
        if not owners:
            return
        given: dict[int, GroupPart] = {}
        for part in state.parts.values():
            given.update(dict.fromkeys(part.ranks, part))
        ranks = moving.outcome.ranks
        if any(rank not in given for rank in ranks):
            return  # one has died, and only its node knows so
        moving.narrowed = True
        name, node = state.members.name, slow_one(moving.links.slow)
        _log.info("group %s: h%s has become slow, the others take its stripe", name, node)
        attempt = state.members.version << ATTEMPT_BITS | state.attempts + 1
        undecided = UndecidedCall(state.members, state.calls, attempt, ranks, given, state.rates)
        outcome = _decided(undecided, owners=owners, before=plan)
        if outcome.waits and not outcome.error:  # else the attempt goes on as it is
            self._ask_to_move(state, attempt, outcome, slow=moving)

    def _tell(self, state: GroupState, outcome: Decision) -> None:
        """Sends the decision to all nodes."""
        members = state.members
        admitted = [r for r in outcome.ranks if members.joining >> r & 1]
        state.parts = {n: part for n, part in state.parts.items() if part.call > state.calls}
        opens = outcome.opens(members, state.last) if self.small.possible else 0
        leader = self.client.number
        nodes = state.nodes
        state.deciding = state.calls
        commits = [outcome.commit(members, state.calls, node, leader, opens) for node in nodes]
        large = next(filter(None, (too_large(one.kind, one.pieces) for one in commits)), "")
        if large:
            outcome.fail("value", f"group {members.name!r}: {large}")
            commits = [outcome.commit(members, state.calls, node, leader, opens) for node in nodes]
        for node, commit in zip(nodes, commits, strict=True):
            self.send(state, node, commit)
        for rank in admitted:
            self.send_manager(GroupAdmitted(members.name, members.generation, rank))


def _decided(
    undecided: UndecidedCall, owners: Collection[int] = (), before: Plan | None = None
) -> Decision:
    """The decision. If there is none because of an exception, that is what every rank raises:
    otherwise all members would wait for ever."""
    try:
        return decide(undecided, owners, before)
    except Exception as error:
        name, call, ranks = undecided.members.name, undecided.call, undecided.ranks
        _log.exception("group %s: call %d cannot be decided", name, call)
        first = undecided.given[ranks[0]]
        text = f"group {name!r}: call {call} cannot be decided: {error!r}"
        outcome = Decision(tuple(ranks), first.kind, first.op, first.root)
        return outcome.fail(error_kind(error), shorten(text))


def _begun_by_all(state: GroupState, given: Mapping[int, GroupPart]) -> GroupGo | None:
    """The attempt by which all nodes have begun without being asked to, if none has given it up."""
    begun = state.begun_as_repeated
    if begun is None or not named_by_all(state.members, given.values()):
        return None
    about = begun.call, begun.attempt
    reports = state.early.values()
    if any(one.failure and (one.call, one.attempt) == about for one in reports):
        return None
    return begun


# Begins a large allreduce of a Group before its last host has called.
#
# The other hosts' parts can move while the members of the last host still compute. The last host
# owns no stripe, so it only sends its part and receives the result, which takes about one transfer
# instead of two. A missing part is assumed to be like the others; if it differs, the attempt is
# given up and the call is decided again.


# Smaller calls are over before a member can be late. Invariant: no call that begins early is one
# whose plan nodes repeat, because these would begin it in another attempt.
BYTES_MIN = PART_BYTES_MAX
# How long the last host is waited for, as a part of the time that one transfer takes. Higher: a
# call with a late member begins later. Lower: calls whose members arrive nearly together begin
# without the last one, and take up to a ninth longer, because one host fewer owns a stripe.
WAIT_SHARE = 0.1


def transfer_s(part: GroupPart, rates: Mapping[int, HostRates]) -> float | None:
    """Seconds that one transfer of such a part takes; None: the call begins when all members have
    called."""
    large = [piece for piece in part.pieces if piece.payload is None]
    if part.kind != "allreduce" or not large or large[0].nbytes < BYTES_MIN:
        return None
    known = [min(host) for host in rates.values()]
    return large[0].nbytes / (max(known) if known else BYTES_PER_S_DEFAULT)


def decide_speculatively(undecided: UndecidedCall) -> tuple[Decision, set[int]] | None:
    """(the decision, the ranks whose parts are assumed); None if it is not worthwhile or not
    possible. The call's parts are in the order in which they have arrived."""
    members, expected, given = undecided.members, undecided.ranks, undecided.given
    missing = [rank for rank in expected if rank not in given]
    there = list(dict.fromkeys(members.nodes[rank] for rank in given if rank in expected))
    nodes = {members.nodes[rank] for rank in expected}
    if not missing or len(there) < 2 or len(there) != len(nodes) - 1:
        return None
    first = next(iter(given.values()))
    if first.kind != "allreduce" or not first.pieces or first.pieces[0].nbytes < BYTES_MIN:
        return None
    if members.joining or any(members.nodes[rank] in there for rank in missing):
        return None
    like = first.pieces[0]
    assumed = {
        rank: msgspec.structs.replace(
            first,
            ranks=(rank,),
            pieces=(Piece(rank, -1, like.nbytes, None, NO_OBJECT, like.layout),),
        )
        for rank in missing
    }
    owners = [node for node in there if node is not None]
    outcome = decide(dataclasses.replace(undecided, given={**given, **assumed}), owners)
    if outcome.error or not outcome.plans or outcome.pieces:
        return None
    (plan,) = outcome.plans
    if not isinstance(plan, ExecuteReduce) or plan.kind != "allreduce":
        return None
    return outcome, set(missing)


def fits(part: GroupPart, plan: Plan) -> bool:
    """Is this part what the plan assumed?"""
    return (
        isinstance(plan, ExecuteReduce)
        and not part.mistake
        and (part.kind, part.op) == (plan.kind, plan.op)
        and len(part.pieces) == len(part.ranks)
        and all(
            piece.payload is None and piece.layout == plan.layout and piece.nbytes == plan.nbytes
            for piece in part.pieces
        )
    )


def is_other(state: GroupState, in_progress: InProgress) -> bool:
    """Has a late member given something else than was assumed? If so, this gives the attempt up."""
    for part in state.parts.values():
        if part.call == in_progress.call and not in_progress.missing.isdisjoint(part.ranks):
            if not fits(part, in_progress.outcome.plans[0]):
                state.in_progress = None
                return True
            in_progress.missing.difference_update(part.ranks)
    return False


def lacks(message: GroupGo, ranks: Collection[int]) -> bool:
    """Was the part of one of these ranks only assumed when the attempt was decided?"""
    return any(
        rank in ranks and known == NO_OBJECT
        for plan in message.plans
        if isinstance(plan, ExecuteReduce)
        for rank, known in zip(plan.members, plan.objects, strict=True)
    )


def fill_in(message: GroupGo, part: GroupPart) -> GroupGo | None:
    """The attempt with the parts of this node's members filled in; None if they are not as
    assumed."""
    (plan,) = message.plans
    if not isinstance(plan, ExecuteReduce) or not fits(part, plan):
        return None
    given = {piece.source: piece.object for piece in part.pieces}
    objects = tuple(
        given.get(rank, known) for rank, known in zip(plan.members, plan.objects, strict=True)
    )
    return msgspec.structs.replace(message, plans=(msgspec.structs.replace(plan, objects=objects),))
