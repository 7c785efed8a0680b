"""The leading node of a Group: collects what members give to a call, decides it, tells all.

The node of the lowest living rank decides each call once, for all nodes. After a change of the
members it first learns from each node what was decided before; then it waits for the parts of all
living ranks, makes a plan for those that are large, and commits when all bytes have moved. Every
node has this component, because each may have to lead.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from hoplite_mp._node.groups.group_decisions import (
    ATTEMPT_BITS,
    MADE_ATTEMPTS,
    Decision,
    decide,
    is_repeated,
)
from hoplite_mp._node.groups.group_state import InProgress
from hoplite_mp._node.groups.repeated_plans import named_by_all, repeat
from hoplite_mp._node.groups.speculative_start import (
    FEW_WAIT_SHARE,
    WAIT_SHARE,
    Early,
    decide_speculatively,
    is_better_anew,
    is_other,
    transfer_s,
)
from hoplite_mp._planner.slow_owners import (
    FRESH_S,
    SLOW_GATHER_S,
    SlowLinks,
    owners_without,
    slow_one,
    stays_slow,
)
from hoplite_mp._planner.topology import HostRates
from hoplite_mp._protocol.fields import shorten
from hoplite_mp._protocol.group_calls import (
    GroupGo,
    GroupSkip,
    GroupStart,
    error_kind,
    too_large,
)
from hoplite_mp._protocol.messages import GroupAdmitted

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

    from hoplite_mp._node.groups.group_state import GroupState
    from hoplite_mp._node.groups.small_calls import EngineCallsOwner
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
    from hoplite_mp._protocol.messages import GroupMembers

__all__ = ["GroupLeader"]

# How old a report may be to count for the stripes of the next call. More than FRESH_S, because a
# host may have sent all its bytes, and report no more, before it has received all.
BELIEVED_S = 1.2
# How often the stripes of one call pass to others before the last member is known. Higher: many
# messages, if members are many and call in another order than the last time. Lower: one of the last
# owns as much as those who have more time.
PASSED_ON_MAX = 16
# Calls that saturate every node's links in both directions, so that rates can be measured.
FILLING = ("allreduce", "reduce_scatter", "allgather", "alltoall")
_log = logging.getLogger("hoplite_mp")


class _About(NamedTuple):
    """What a decision rests on; the first arguments of `decide` and `decide_speculatively`."""

    members: GroupMembers
    call: int
    attempt: int
    ranks: Sequence[int]
    given: dict[int, GroupPart]  # by rank, in the order in which the parts have come
    rates: Mapping[int, HostRates]


class GroupLeader:
    """The calls of all groups that this node leads."""

    def __init__(
        self,
        host: HostContext,
        small: EngineCallsOwner,
        states: Mapping[int, GroupState],
        send: Callable[[GroupState, int, GroupMessage], None],
    ) -> None:
        self.loop = host.loop
        self.client = host.client
        self.send_manager = host.send_manager
        self.small = small
        self.states = states  # by generation
        self.send = send

    def sync(self, state: GroupState, node: int, message: GroupSync) -> None:
        """A node has said what it knows, after a change of the members."""
        before = state.syncs.get(node)
        if message.last is None and before is not None and before.committed == message.committed:
            message = msgspec.structs.replace(message, last=before.last)  # it is sent once
        state.syncs[node] = message
        if message.version != state.members.version or state.leader != self.client.number:
            return  # that node, or this one, does not have the latest members yet
        if message.committed > state.calls:  # decided by a leader that is gone
            self._hand_on(state, state.nodes, message.committed, message.last)
        elif message.committed < state.calls and node in state.nodes:
            self._hand_on(state, [node], state.calls, state.last)
        if node != self.client.number:
            for rank, call in message.starts:
                state.start(rank, call)
        state.synced.add(node)
        if state.synced >= state.knowing:
            self._start_new(state)
            in_progress, state.in_progress = state.in_progress, None
            if in_progress is not None:
                _log.info("group %s: call %d begins again", state.members.name, in_progress.call)
            self.lead(state)

    def _hand_on(
        self, state: GroupState, nodes: Iterable[int], calls: int, last: GroupCommit | None
    ) -> None:
        """Tells these nodes how many calls are over, and passes on the last known commit."""
        for node in state.this_last(nodes, self.client.number):
            if last is not None:
                self.send(state, node, last)
            if last is None or last.call + 1 < calls:
                self.send(state, node, GroupSkip(state.members.generation, calls))

    def _start_new(self, state: GroupState) -> None:
        """New members start with the call after the next one, because the living may have begun
        the next one. A call that no living member could make is skipped."""
        members = state.members
        if not members.formed:
            return
        for rank in state.unstarted:
            state.start(rank, state.calls + 1)
            node = members.nodes[rank]
            assert node is not None
            start = GroupStart(members.generation, members.version, rank, state.calls + 1)
            self.send(state, node, start)
        if state.starts and not state.expected():
            self._hand_on(state, state.nodes, min(state.starts.values()), None)

    def _is_settled(self, state: GroupState) -> bool:
        """Does this node know all that was decided before the next call?"""
        return state.synced >= state.knowing and state.owed is None

    def _leads(self, state: GroupState) -> bool:
        return not state.owned and state.leader == self.client.number

    def lead(self, state: GroupState, late: float = 0.0) -> None:
        """Decides the next call if all parts are here. late: how long others have been waited for,
        in parts of the time of one transfer; if that is enough, it may begin without them."""
        if not self._leads(state):
            return
        moving = state.in_progress
        if moving is not None and is_other(state, moving):
            moving = None
        if moving is not None and moving.early_since is None:
            return
        if not self._is_settled(state) or not state.members.formed:
            return
        expected, given = state.expected(), state.given()
        if not expected or not given:
            return
        # Must differ from every attempt that an earlier leader made for other members, because
        # cells of those may still be served.
        attempt = state.members.version << ATTEMPT_BITS | state.attempts + 1
        about = _About(state.members, state.calls, attempt, expected, given, state.rates)
        if moving is not None and moving.missing:
            self._pass_on(state, moving, about)
            return
        if moving is not None and not self._begins_anew(state, moving, about):
            return
        early = None
        if all(rank in given for rank in expected):
            begun = _begun_by_all(state, given)
            if begun is not None and repeat(outcome := _decided(*about), begun):
                self._await_repeated(state, outcome)
                return
            outcome = _decided(*about, before=state.attempted if moving is None else None)
        elif late < WAIT_SHARE:
            self._wait(state, about, WAIT_SHARE, late)
            return
        elif (early := self._begun_early(state, about, late)) is not None:
            outcome = early.outcome
        else:
            return
        if outcome.waits:
            self._ask_to_move(state, attempt, outcome, early)
        else:
            self._tell(state, outcome)

    def _begun_early(self, state: GroupState, about: _About, late: float) -> Early | None:
        """The decision before all have called; None: not yet."""
        if state.not_early == state.calls:
            return None
        few = late >= FEW_WAIT_SHARE
        early = decide_speculatively(*about, few=few, likely=state.came)
        if early is None and not few and len(about.given) > 1:
            self._wait(state, about, FEW_WAIT_SHARE, late)
        return early

    def _pass_on(self, state: GroupState, moving: InProgress, about: _About) -> None:
        """Nodes that have called meanwhile take over stripes of those that have not."""
        before, moving.last_came = moving.outcome.plans[0].stripes, self.loop.now()
        again = decide_speculatively(*about, likely=state.came, before=before)
        if again is None or again.outcome.plans[0].stripes == before:
            return
        nodes = {state.members.nodes[rank] for rank in again.missing}
        if moving.passed_on < PASSED_ON_MAX or len(nodes) == 1:  # the last one must own none
            self._ask_to_move(state, about.attempt, again.outcome, again, before=moving)

    def _begins_anew(self, state: GroupState, moving: InProgress, about: _About) -> bool:
        """All have called. Does it take less time if they own as much as each other from now on?"""
        since, moving.early_since = moving.early_since, None
        one_s = transfer_s(next(iter(about.given.values())), about.rates)
        if since is None or one_s is None:
            return False
        now = self.loop.now()
        plan, moved, lag = moving.outcome.plans[0], now - since, now - moving.last_came
        if not is_better_anew(plan.stripes, moved / one_s, lag / one_s):
            return False
        state.in_progress = None
        return True

    def _ask_to_move(
        self,
        state: GroupState,
        attempt: int,
        outcome: Decision,
        early: Early | None = None,
        before: InProgress | None = None,
        *,
        narrowed: bool = False,
    ) -> None:
        """Sends the plans to all nodes that take part in them. early: the decision, if not all have
        called. before: the attempt at this call that is replaced, because stripes have passed to
        others. narrowed: they have because a link is slow."""
        state.attempts = (state.attempts + 1) % MADE_ATTEMPTS
        missing = early.missing if early is not None else set()
        # While a member is late, the others' links are idle for a time.
        fills = outcome.kind in FILLING and not missing
        about = state.calls, attempt, outcome, set(outcome.waits), missing, fills
        moving = state.in_progress = InProgress(*about, narrowed=narrowed)
        if before is not None and narrowed:
            moving.links = SlowLinks(before.links.slow, heard_at=before.links.heard_at)
        if early is not None:
            moving.early, moving.last_came = True, self.loop.now()
            moving.early_since = moving.last_came if early.in_order else None
        if early is not None and before is not None:
            moving.early_since, moving.passed_on = before.early_since, before.passed_on + 1
        go = GroupGo(
            state.members.generation,
            state.calls,
            attempt,
            outcome.plans,
            tuple(sorted(outcome.waits)),
        )
        for node in state.this_last(outcome.nodes, self.client.number):
            self.send(state, node, go)

    def _await_repeated(self, state: GroupState, outcome: Decision) -> None:
        """Waits for the bytes of a plan by which all nodes have begun; some may have reported."""
        waiting = set(outcome.waits)
        fills = outcome.kind in FILLING
        state.in_progress = InProgress(state.calls, outcome.attempt, outcome, waiting, fills=fills)
        for node, report in state.early.items():
            if state.in_progress is not None:
                self.done(state, node, report)

    def _wait(self, state: GroupState, about: _About, share: float, late: float) -> None:
        """Waits for the missing members of a call that may begin without them, until it has done
        so for that part of the time of one transfer. late: for which part it has done so."""
        call = about.call
        one_s = transfer_s(next(iter(about.given.values())), about.rates)
        if state.timers.get(share) == call or one_s is None:
            return

        def over() -> None:
            if state.calls == call and self.states.get(state.members.generation) is state:
                state.timers.pop(share, None)  # the next part that arrives may begin another wait
                self.lead(state, late=share)

        state.timers[share] = call
        self.loop.call_later((share - late) * one_s, over)

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
            self.loop.call_later(SLOW_GATHER_S, lambda: self._narrow(state, moving))

    def _narrow(self, state: GroupState, moving: InProgress) -> None:
        """Gives the stripe of a slow node to the others, if that is worthwhile: the same call in
        another attempt, for which bytes that have arrived are kept."""
        moving.links.looks = False
        moving.links.forget_old(FRESH_S, self.loop.now())
        if state.in_progress is not moving or moving.narrowed or moving.missing:
            return
        known = self.states.get(state.members.generation) is state
        if not known or not self._leads(state) or not self._is_settled(state):
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
        about = state.members, state.calls, attempt, ranks, given, state.rates
        outcome = _decided(*about, owners=owners, before=plan)
        if outcome.waits and not outcome.error:  # else the attempt goes on as it is
            self._ask_to_move(state, attempt, outcome, before=moving, narrowed=True)

    def _tell(self, state: GroupState, outcome: Decision) -> None:
        """Sends the decision to all nodes."""
        members = state.members
        state.came = list(dict.fromkeys(members.nodes[rank] for rank in state.given()))
        admitted = [r for r in outcome.ranks if members.joining >> r & 1]
        state.parts = {n: part for n, part in state.parts.items() if part.call > state.calls}
        opens = outcome.opens(members, state.last) if self.small.possible else 0
        about = self.client.number, opens
        nodes = state.this_last(state.nodes, self.client.number)
        commits = [outcome.commit(members, state.calls, node, *about) for node in nodes]
        large = next(filter(None, (too_large(one.kind, one.pieces) for one in commits)), "")
        if large:
            outcome.fail("value", f"group {members.name!r}: {large}")
            commits = [outcome.commit(members, state.calls, node, *about) for node in nodes]
        for node, commit in zip(nodes, commits, strict=True):
            self.send(state, node, commit)
        for rank in admitted:
            self.send_manager(GroupAdmitted(members.name, members.generation, rank))


def _decided(
    members: GroupMembers,
    call: int,
    attempt: int,
    ranks: Sequence[int],
    given: dict[int, GroupPart],
    rates: Mapping[int, HostRates],
    owners: Collection[int] = (),
    before: Plan | None = None,
) -> Decision:
    """The decision. If there is none because of an exception, that is what every rank raises:
    otherwise all members would wait for ever."""
    try:
        return decide(members, call, attempt, ranks, given, rates, owners, before)
    except Exception as error:
        _log.exception("group %s: call %d cannot be decided", members.name, call)
        first = given[ranks[0]]
        text = f"group {members.name!r}: call {call} cannot be decided: {error!r}"
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
