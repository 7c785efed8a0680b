"""Restores the state of a dead manager from the reports of the nodes.

The manager's process may die while nodes, transfers and Groups continue. The nodes still know what
they had reported to the manager, and which plans they had received from it. A new planner therefore
collects reports until every known node has reconnected, or the wait has lasted too long (`until`);
other messages are kept for later. Then each component of the planner restores its state from the
reports. A node that has not reconnected counts as lost.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from hoplite_mp._protocol.groups import GroupEnd
from hoplite_mp._protocol.membership import (
    NodeReturned,
    OperationEnded,
    ReportComplete,
    ReportedCopy,
    ReportedDistribute,
    ReportedGroup,
    ReportedOwners,
    ReportedReduce,
)
from hoplite_mp._protocol.messages import (
    Forget,
    GroupJoinRequested,
    NodeLost,
    OrphansReported,
    ReduceRequested,
)

if TYPE_CHECKING:
    from hoplite_mp._protocol.messages import Distribute, ExecuteReduce, Member

__all__ = ["RESTORE_S", "ManagerRecovery", "RunningCopy", "RunningFold"]

# How long to wait for further reports, after the first node has reconnected and after each message
# of an incomplete report. Higher: a node with a bad link stays in the cluster. Lower: the other
# nodes wait for less time if a node has died together with the manager.
RESTORE_S = 2.0
# How long to wait for the node on the manager's host. The death of this node is always detected,
# and shuts the cluster down. If its report is late, the node is busy in one iteration of its loop
# (see _node/manager_link/connection.py). All other reports must be complete after this time, too.
OWN_S = 30.0


@dataclass(slots=True)
class RunningCopy:
    """A running plan for copies. `at`: the nodes with the plan. `receiving`: the
    nodes in `at` that do not have the whole object yet."""

    plan: Distribute
    at: set[int] = field(default_factory=set)
    receiving: set[int] = field(default_factory=set)


@dataclass(slots=True)
class RunningFold:
    """The latest plan of an operation. `at`: the nodes with this plan. `reported`: the nodes
    in `at` that have finished. `older`: the nodes with an earlier plan."""

    plan: ExecuteReduce
    at: set[int] = field(default_factory=set)
    reported: set[int] = field(default_factory=set)
    older: set[int] = field(default_factory=set)


class ManagerRecovery:
    """Collects the reports of the nodes."""

    def __init__(self, own: int = 0) -> None:
        """own: the number of the node on the manager's host."""
        self._own = own
        self.returned: dict[int, NodeReturned] = {}  # by node
        self.later: list[Any] = []  # ordinary messages, handled after the reports
        self._members: dict[int, Member] = {}  # all members that any report names, by node
        self._begun: float | None = None  # time of the first message
        self._reported_at = 0.0  # time of the latest message that belongs to a report
        self.held: list[ReportedCopy] = []
        self.groups: list[ReportedGroup] = []
        self.group_ends: list[GroupEnd] = []
        self.owners: list[ReportedOwners] = []
        self.inventories: list[OrphansReported] = []
        self.ended: dict[int, OperationEnded] = {}  # by operation
        self.copies: dict[int, RunningCopy] = {}  # by epoch
        self.folds: dict[int, RunningFold] = {}  # by operation
        self._reported: set[int] = set()  # nodes whose reports are complete
        self._absent: set[int] | None = None

    def leave_out(self, absent: set[int]) -> None:
        """Excludes the nodes on the hosts of earlier managers, which will not reconnect."""
        self._absent = absent

    def take(self, message: Any, now: float) -> None:
        """Records a message from a node."""
        if self._begun is None:
            self._begun = self._reported_at = now
        if getattr(message, "node", None) in self.returned.keys() - self._reported:
            self._reported_at = now
        match message:
            case NodeReturned():
                if message.node in self.returned:  # the node sends its whole report again
                    self._forget(message.node)
                self.returned[message.node] = message
                self._note_members(message)
                self._reported_at = now
            case ReportComplete():
                self._reported.add(message.node)
            case NodeLost():
                known = self.returned.get(message.node)
                if known is not None and known.incarnation == message.incarnation:
                    self._forget(message.node)
            case ReportedCopy():
                self.held.append(message)
            case ReportedGroup():
                self.groups.append(message)
            case GroupEnd():
                self.group_ends.append(message)
            case ReportedOwners():
                self.owners.append(message)
            case OrphansReported():
                self.inventories.append(message)
            case OperationEnded():
                known_end = self.ended.get(message.end.operation)
                if known_end is None or isinstance(known_end.end, Forget):
                    self.ended[message.end.operation] = message
            case ReportedDistribute():
                copy = self.copies.setdefault(message.plan.epoch, RunningCopy(message.plan))
                copy.at.add(message.node)
                if message.receiving:
                    copy.receiving.add(message.node)
            case ReportedReduce():
                self._take_fold(message)
            case _:
                self.later.append(message)

    def _forget(self, node: int) -> None:
        """Drops the node's report, which may be out of date. Keeps the messages in `later`. They
        are not reports, and the `node` of some is not their sender."""
        self._reported.discard(node)
        self.returned.pop(node, None)
        self._members.clear()
        for report in self.returned.values():
            self._note_members(report)
        for collected in (self.held, self.groups, self.owners, self.inventories):
            reports: list[Any] = collected
            reports[:] = [report for report in reports if report.node != node]
        self.ended = {number: end for number, end in self.ended.items() if end.node != node}
        for copy in self.copies.values():
            copy.at.discard(node)
            copy.receiving.discard(node)
        self.copies = {epoch: copy for epoch, copy in self.copies.items() if copy.at}
        for fold in self.folds.values():
            for nodes in (fold.at, fold.reported, fold.older):
                nodes.discard(node)
        self.folds = {number: fold for number, fold in self.folds.items() if fold.at or fold.older}

    def _take_fold(self, message: ReportedReduce) -> None:
        plan = message.plan
        fold = self.folds.setdefault(plan.operation, RunningFold(plan))
        if plan.epoch > fold.plan.epoch:
            older = fold.older | fold.at
            fold = self.folds[plan.operation] = RunningFold(plan, older=older)
        elif plan.epoch < fold.plan.epoch:
            fold.older.add(message.node)
            return
        fold.at.add(message.node)
        if message.reported:
            fold.reported.add(message.node)

    @property
    def members(self) -> list[Member]:
        """All members that any report names, in the order in which they joined."""
        return [self._members[node] for node in sorted(self._members)]

    def _note_members(self, report: NodeReturned) -> None:
        for member in report.members:
            known = self._members.get(member.node)
            if known is None or known.incarnation < member.incarnation:
                self._members[member.node] = member

    def bury(self) -> set[int]:
        """Removes and returns the nodes that have reconnected but are not readmitted. The report of
        such a node is incomplete, or another report shows that the previous manager had declared
        the node dead."""
        known = [
            (report.numbers, {member.node: member.incarnation for member in report.members})
            for report in self.returned.values()
        ]
        gone = {
            node
            for node, own in self.returned.items()
            if node != self._own
            and (
                node not in self._reported
                # A report names all living members whose numbers are below its `numbers`.
                or any(
                    node < numbers and living.get(node, own.incarnation + 1) > own.incarnation
                    for numbers, living in known
                )
            )
        }
        for node in gone:
            del self.returned[node]
        return gone

    @property
    def counted(self) -> tuple[int, int, int]:
        """The previous planner's counters: (epochs of copies, operations for copies, generations of
        Groups)."""
        reports = self.returned.values()
        return (
            max(report.epochs for report in reports),
            max(report.copied for report in reports),
            max(report.generations for report in reports),
        )

    @property
    def numbers(self) -> int:
        """How many node numbers the previous manager had assigned."""
        return max(report.numbers for report in self.returned.values())

    @property
    def until(self) -> float | None:
        """The latest time at which the wait for reports ends."""
        if self._begun is None:
            return None
        if self._own in self._reported:
            return min(self._reported_at + RESTORE_S, self._begun + OWN_S)
        return self._begun + OWN_S

    def is_over(self, now: float) -> bool:
        """Whether all nodes have reconnected, or the wait for missing nodes has ended."""
        until = self.until
        if until is not None and now >= until:
            return True
        # Wait for the node on the manager's host even if it is missing from all reports.
        wanted = (self._members.keys() | {self._own}) - (self._absent or set())
        return wanted <= self._reported

    @property
    def joins(self) -> list[GroupJoinRequested]:
        """The unanswered requests to join Groups, without duplicates."""
        return [*dict.fromkeys(one for one in self.later if isinstance(one, GroupJoinRequested))]

    def requests(self) -> dict[int, ReduceRequested]:
        """Removes the requests for collectives from `later`, and returns them by operation."""
        found = {one.operation: one for one in self.later if isinstance(one, ReduceRequested)}
        self.later = [one for one in self.later if not isinstance(one, ReduceRequested)]
        return found
