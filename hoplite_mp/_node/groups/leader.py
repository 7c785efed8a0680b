"""The leader of a Group: collects the contributions to a call, decides it, and sends the decision.

The node of the lowest living rank decides each call (determines its result or error) once, for all
nodes. After a change of the members, each node first reports its last decision to the leader. Then
the leader waits for the contributions of all living ranks, obtains a plan for the transfer of large
ones (`plan_sources.py`), and commits the call when all bytes have moved. Every node has this
component, because every node may become the leader.

The component does no I/O: each event is a method, and `take` returns instructions for the node.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import msgspec

from hoplite_mp._node.groups.call_state import LEADER, CallEvent, CallPhase, PhaseOfCall
from hoplite_mp._node.groups.group_decisions import (
    ATTEMPT_BITS,
    MADE_ATTEMPTS,
    Decision,
    UndecidedCall,
    is_repeated,
)
from hoplite_mp._node.groups.plan_sources import (
    WAIT_SHARE,
    decide_or_fail,
    fits,
    planned,
    transfer_s,
)
from hoplite_mp._planner.link_speeds import HostRates
from hoplite_mp._planner.repair import (
    FRESH_S,
    SLOW_GATHER_S,
    SlowLinks,
    owners_without,
    slow_one,
    stays_slow,
)
from hoplite_mp._protocol.group_calls import (
    GroupAttempt,
    GroupPart,
    GroupSkip,
    GroupSlow,
    GroupStart,
    too_large,
)
from hoplite_mp._protocol.messages import GroupAdmitted

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping

    from hoplite_mp._node.groups.call_state import CallState
    from hoplite_mp._protocol.group_calls import (
        GroupCommit,
        GroupDone,
        GroupMessage,
        GroupSync,
        Plan,
    )

__all__ = ["Attempt", "GroupLeader", "Instruction", "SendToManager", "SendToNode", "WakeLater"]


# The maximum age of a report that is used for the stripes of the next call. It exceeds FRESH_S,
# because a host that has sent all its bytes sends no more reports, even while it is receiving.
BELIEVED_S = 1.2
# Calls that saturate every node's links in both directions, so that rates can be measured.
FILLING = ("allreduce", "reduce_scatter", "allgather", "alltoall")
_log = logging.getLogger("hoplite_mp")


class SendToNode(NamedTuple):
    """Send a message to a node, which may be this one."""

    node: int
    message: GroupMessage


class SendToManager(NamedTuple):
    """Send a message to the manager."""

    message: GroupAdmitted


class WakeLater(NamedTuple):
    """Call `event` with the current time after this many seconds, unless the Group has ended."""

    seconds: float
    event: Callable[[float], None]


Instruction: TypeAlias = SendToNode | SendToManager | WakeLater


@dataclass(slots=True)
class Attempt:
    """A decided call whose bytes are moving."""

    number: int
    outcome: Decision
    waiting: set[int]  # nodes that have not reported yet
    missing: set[int] = field(default_factory=set)  # ranks that have not called yet
    fills: bool = False  # the call saturates every node's link, so that rates can be measured
    links: SlowLinks[GroupSlow] = field(default_factory=SlowLinks)
    narrowed: bool = False  # stripes have been changed because a link is slow
    early: bool = False  # contributions of some ranks were only assumed in the decision

    @property
    def plan(self) -> Plan | None:
        """The plan by which bytes move, or None if no bytes move."""
        return self.outcome.plans[0] if self.outcome.plans else None


class GroupLeader:
    """The leader's state for the next call of one Group. number: this node's number. engines:
    whether engines may commit calls without the leader."""

    def __init__(self, group: CallState, number: int, *, engines: bool) -> None:
        self.group = group
        self.number = number
        self.engines = engines
        self.phase = PhaseOfCall(LEADER)
        self.parts: dict[int, GroupPart] = {}  # node -> its contributions to an undecided call
        self.syncs: dict[int, GroupSync] = {}  # node -> its latest GroupSync
        self.attempt: Attempt | None = None  # only in the phase PLANNED
        # Node -> its report on a repeated plan, sent before all members had called or because the
        # plan failed.
        self.early: dict[int, GroupDone] = {}
        self.rates: dict[int, HostRates] = {}  # node -> link rates that the node has measured
        self._attempts = 0
        self._awaited = -1  # the call for which a timer is waiting for the last host
        # The call that must not begin early, because an early attempt at it has failed.
        self._not_early = -1
        self._instructions: list[Instruction] = []

    def take(self) -> list[Instruction]:
        """Removes and returns the instructions that result from the latest events."""
        found, self._instructions = self._instructions, []
        return found

    def _send(self, nodes: Iterable[int], message: GroupMessage) -> None:
        self._instructions += [SendToNode(node, message) for node in nodes]

    @property
    def _leads(self) -> bool:
        return not self.group.owned and self.group.leader == self.number

    def given(self) -> dict[int, GroupPart]:
        """The contributions to the next call by rank, in the order of their arrival."""
        found: dict[int, GroupPart] = {}
        for part in self.parts.values():
            if part.call == self.group.calls:
                found.update(dict.fromkeys(part.ranks, part))
        return found

    # -- the end of a call, and changes of the members ------------------------------------------

    def committed(self) -> None:
        """Handles the end of a call on this node, or a skipped call."""
        self.phase.take(CallEvent.COMMITTED)
        self.attempt = None
        # Other nodes may have begun the next call before this node received the commit.
        calls = self.group.calls
        self.early = {n: one for n, one in self.early.items() if one.call >= calls}

    def changed(self) -> None:
        """Handles the manager's announcement of a new version of the members."""
        members, living = self.group.members, self.group.nodes
        self._freeze()
        self.early = {}
        self.syncs.pop(self.number, None)
        self.parts = {
            # A later version of the members may include the sender.
            node: part
            for node, part in self.parts.items()
            if node in living or part.version > members.version
        }

    def _freeze(self) -> None:
        """Pauses decisions until all nodes have sent a GroupSync."""
        self.phase.take(CallEvent.CHANGED)
        attempt, self.attempt = self.attempt, None
        if attempt is not None:
            name, call = self.group.members.name, self.group.calls
            _log.info("group %s: call %d is restarted", name, call)

    def sync(self, node: int, message: GroupSync) -> None:
        """Handles a node's report on its calls after a change of the members."""
        group = self.group
        before = self.syncs.get(node)
        if message.last is None and before is not None and before.committed == message.committed:
            # A large `last` is sent only once.
            message = msgspec.structs.replace(message, last=before.last)
        self.syncs[node] = message
        if message.version != group.members.version or group.leader != self.number:
            return  # one of the two nodes does not have the latest members yet
        self._freeze()
        if message.committed > group.calls:  # a former leader decided these calls
            self._hand_on(group.nodes, message.committed, message.last)
        elif message.committed < group.calls and node in group.nodes:
            self._hand_on([node], group.calls, group.last)
        if node != self.number:
            for rank, call in message.starts:
                group.start(rank, call)
        self.lead()

    def _synced(self) -> set[int]:
        """The nodes that have sent a GroupSync for the present members, excluding nodes that have
        received more decisions than this node."""
        version, calls = self.group.members.version, self.group.calls
        said = self.syncs.items()
        return {n for n, one in said if one.version == version and one.committed <= calls}

    def _settle(self) -> None:
        """Restarts the next call once this node has all earlier decisions."""
        if not self._synced() >= self.group.knowing:
            return
        self.phase.take(CallEvent.THAWED)
        if self._start_new():
            return
        self._decide()
        if self.phase.now not in (CallPhase.PLANNED, CallPhase.COMMITTING):
            self._withdraw()

    def _hand_on(self, nodes: Iterable[int], calls: int, last: GroupCommit | None) -> None:
        """Sends these nodes the number of finished calls, and the last known commit."""
        if last is not None:
            self._send(nodes, last)
        if last is None or last.call + 1 < calls:
            self._send(nodes, GroupSkip(self.group.members.generation, calls))

    def _withdraw(self) -> None:
        """Makes all nodes give up attempts for earlier versions of the members. Otherwise they
        would read the contribution of a member that has left until all other members have
        called."""
        group = self.group
        if group.members.formed:
            number = self._next_attempt()
            self._send(
                group.nodes, GroupAttempt(group.members.generation, group.calls, number, (), ())
            )

    def _next_attempt(self) -> int:
        """Returns a number that no attempt for an earlier version of the members has, because nodes
        may still be serving the bytes of that attempt."""
        number, self._attempts = self._number, (self._attempts + 1) % MADE_ATTEMPTS
        return number

    @property
    def _number(self) -> int:
        """The number of the next attempt."""
        return self.group.members.version << ATTEMPT_BITS | self._attempts + 1

    def _start_new(self) -> bool:
        """Lets new members start with the call after the next one, because living members may have
        begun the next one. Returns True if this skips a call that no living member can make."""
        state, members = self.group, self.group.members
        if not members.formed:
            return False
        for rank in state.unstarted:
            state.start(rank, state.calls + 1)
            node = members.nodes[rank]
            assert node is not None
            start = GroupStart(members.generation, members.version, rank, state.calls + 1)
            self._send([node], start)
        if state.starts and not state.expected():
            self._hand_on(state.nodes, min(state.starts.values()), None)
            return True
        return False

    # -- a decision ------------------------------------------------------------------------------

    def part(self, node: int, message: GroupPart) -> None:
        """Handles the contributions of a node whose members have all made a call."""
        self.parts[node] = message
        self.lead()

    def lead(self) -> None:
        """Decides the next call if all contributions have arrived."""
        if not self._leads:
            return
        if self.phase.now is CallPhase.FROZEN:
            self._settle()
        elif self.phase.now not in (CallPhase.COMMITTING, CallPhase.ENDED):
            self._decide()

    def _decide(self, late: bool = False) -> None:
        """Decides the next call if that is possible. late: the wait for the last host is over, so
        the call may begin without that host."""
        group, before = self.group, self.group.attempted
        if self.attempt is not None:
            if not self._is_other(self.attempt):
                return
            self._give_up()
            before = None
        if group.pending_commit is not None or not group.members.formed:
            return
        expected, given = group.expected(), self.given()
        if not expected or not given:
            return
        self.phase.take(CallEvent.PART)
        undecided = UndecidedCall(
            group.members, group.calls, self._number, expected, given, self.rates, self._begun(),
            before,
        )  # fmt: skip
        if not undecided.is_complete and not late:
            self._wait(given)
            return
        if not undecided.is_complete and self._not_early == group.calls:
            return
        found = planned(undecided)
        if found is None:
            return
        if found.begun:
            self._await_repeated(found.outcome)
        elif found.outcome.waits:
            self._ask_to_move(found.outcome, found.missing)
        else:
            self._send_decision(found.outcome)

    def _begun(self) -> GroupAttempt | None:
        """The attempt that this node has begun with a repeated plan, unless a node has given it
        up."""
        begun = self.group.begun_as_repeated
        if begun is None:
            return None
        about = begun.call, begun.attempt
        failed = (one for one in self.early.values() if one.failure)
        return None if any((one.call, one.attempt) == about for one in failed) else begun

    def _is_other(self, attempt: Attempt) -> bool:
        """Whether the contribution of a late member differs from the assumed one."""
        for part in self.parts.values():
            if part.call == self.group.calls and not attempt.missing.isdisjoint(part.ranks):
                if not fits(part, attempt.outcome.plans[0]):
                    return True
                attempt.missing.difference_update(part.ranks)
        return False

    def _give_up(self) -> None:
        self.phase.take(CallEvent.GIVEN_UP)
        self.attempt = None

    def _wait(self, given: Mapping[int, GroupPart]) -> None:
        """Waits for the last host of a call that may begin without that host. The wait lasts
        WAIT_SHARE times as long as one transfer."""
        group, one_s = self.group, transfer_s(next(iter(given.values())), self.rates)
        late = {group.members.nodes[rank] for rank in group.expected() if rank not in given}
        if self._awaited != group.calls and one_s is not None and len(late) == 1:
            self._awaited = group.calls
            over = partial(self._waited, group.calls)
            self._instructions.append(WakeLater(WAIT_SHARE * one_s, over))

    def _waited(self, call: int, now: float) -> None:
        """Handles the end of the wait for the last host of a call."""
        if self.group.calls != call:
            return
        self._awaited = -1  # the next contribution may begin another wait
        if self._leads and self.phase.now in (CallPhase.COLLECTING, CallPhase.PLANNED):
            self._decide(late=True)

    # -- an attempt ------------------------------------------------------------------------------

    def _ask_to_move(
        self, outcome: Decision, missing: Collection[int] = (), slow: Attempt | None = None
    ) -> None:
        """Sends the plans to all participating nodes. missing: the ranks that have not called.
        slow: the attempt that is replaced because a link is slow."""
        self.phase.take(CallEvent.ATTEMPT)
        # A call that waits for a late member does not saturate the links.
        self.attempt = Attempt(
            self._next_attempt(),
            outcome,
            set(outcome.waits),
            set(missing),
            fills=outcome.kind in FILLING and not missing,
            narrowed=slow is not None,
            early=bool(missing),
        )
        if slow is not None:
            self.attempt.links = SlowLinks(slow.links.slow, heard_at=slow.links.heard_at)
        generation, call = self.group.members.generation, self.group.calls
        waits = tuple(sorted(outcome.waits))
        go = GroupAttempt(generation, call, self.attempt.number, outcome.plans, waits)
        self._send(outcome.nodes, go)

    def _await_repeated(self, outcome: Decision) -> None:
        """Waits for the bytes of a plan that all nodes have begun. Some nodes may already have
        reported the end of their transfers."""
        self.phase.take(CallEvent.ATTEMPT)
        fills = outcome.kind in FILLING
        self.attempt = Attempt(outcome.attempt, outcome, set(outcome.waits), fills=fills)
        for node, report in self.early.items():
            if self.attempt is not None:
                self.done(node, report, 0.0)

    def _current(self, message: GroupDone | GroupSlow) -> Attempt | None:
        """The running attempt, or None if the message is about another one."""
        attempt = self.attempt
        if attempt is None or message.call != self.group.calls:
            return None
        return attempt if message.attempt == attempt.number else None

    def done(self, node: int, message: GroupDone, now: float) -> None:
        """Handles a node's report that it has received its bytes of an attempt, or has failed to
        receive them."""
        repeated = is_repeated(message.attempt)
        if repeated and (self.attempt is None or message.failure):
            # A member has not called yet, or a node has given up an attempt that it began early.
            self.early[node] = message
        attempt = self._current(message)
        if attempt is None:
            return
        if message.up and message.down and attempt.fills:
            links = attempt.links
            links.forget_old(BELIEVED_S, now)
            up, report = message.up, links.reports.get(node, links.slow.get(node))
            slow = node == slow_one(links.slow) or stays_slow(report, self.rates.get(node), up)
            if report is not None and slow:  # `up` was measured before the link became slow
                up = min(up, report.up)
            self.rates[node] = HostRates(up, message.down)
        if message.failure and repeated:
            self._give_up()
            self.lead()  # the leader now makes a new plan
            return
        if message.failure and attempt.early and (message.error == "full" or attempt.missing):
            self._end_early(attempt)
            return
        if message.failure:
            attempt.outcome.fail(message.error, message.failure)
            attempt.waiting.clear()
        attempt.waiting.discard(node)
        if not attempt.waiting:
            self._send_decision(attempt.outcome)

    def _end_early(self, attempt: Attempt) -> None:
        """Gives up an early attempt and its blocks on all nodes, because a node's store is full or
        a node failed before all members had called. The call is decided when all members have
        called."""
        self._give_up()
        self._not_early = self.group.calls
        if attempt.missing:
            self._withdraw()
        self.lead()

    def slow(self, node: int, message: GroupSlow, now: float) -> None:
        """Handles a node's report that its link has become slow during an attempt."""
        attempt = self._current(message)
        if attempt is not None and attempt.links.hear(node, message, attempt.plan, self.rates, now):
            narrow = partial(self._narrow, attempt)
            self._instructions.append(WakeLater(SLOW_GATHER_S, narrow))

    def _narrow(self, attempt: Attempt, now: float) -> None:
        """Reassigns the stripe of a slow node to the other nodes if that saves time. The call
        continues with another attempt, which keeps the bytes that have arrived."""
        group, ranks = self.group, attempt.outcome.ranks
        attempt.links.looks = False
        attempt.links.forget_old(FRESH_S, now)
        if self.attempt is not attempt or attempt.narrowed or attempt.missing:
            return
        if not self._leads or group.pending_commit is not None:
            return  # the call is restarted or already decided
        owners = owners_without(attempt.links.slow, attempt.plan)
        if not owners:
            return
        given: dict[int, GroupPart] = {}
        for part in self.parts.values():
            given.update(dict.fromkeys(part.ranks, part))
        if any(rank not in given for rank in ranks):
            return  # a member has died, which only its own node has detected so far
        attempt.narrowed = True
        name, node = group.members.name, slow_one(attempt.links.slow)
        _log.info("group %s: h%s has become slow; other nodes take over its stripe", name, node)
        about = group.members, group.calls, self._number
        undecided = UndecidedCall(*about, ranks, given, self.rates)
        outcome = decide_or_fail(undecided, owners=owners, before=attempt.plan)
        if outcome.waits and not outcome.error:  # otherwise the attempt continues unchanged
            self._ask_to_move(outcome, slow=attempt)

    def _send_decision(self, outcome: Decision) -> None:
        """Sends the decision to all nodes."""
        self.phase.take(CallEvent.DECIDED)
        self.attempt = None
        state, members, call = self.group, self.group.members, self.group.calls
        self.parts = {n: part for n, part in self.parts.items() if part.call > call}
        opens = outcome.opens(members, state.last) if self.engines else 0
        about = self.number, opens
        commits = {n: outcome.commit(members, call, n, *about) for n in state.nodes}
        large = (too_large(one.kind, one.pieces) for one in commits.values())
        if reason := next(filter(None, large), ""):
            outcome.fail("value", f"group {members.name!r}: {reason}")
            commits = {n: outcome.commit(members, call, n, *about) for n in state.nodes}
        for node, commit in commits.items():
            self._send([node], commit)
        for rank in outcome.ranks:
            if members.joining >> rank & 1:
                admitted = GroupAdmitted(members.name, members.generation, rank)
                self._instructions.append(SendToManager(admitted))
