"""The planner, which makes all decisions for the cluster, without input or output of its own.

`step` handles one message from a node, and `tick` handles the passing of time. Both return a
StepResult (the messages to send) and have no effect outside the planner. The same messages at the
same times lead to the same results in a manager, a simulation and a test. For a late or duplicate
message, or a message from an earlier incarnation of a node, the result is empty. Such a message
never raises an exception, which would stop the manager.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from hoplite_mp._planner.actors import ActorNames
from hoplite_mp._planner.broadcast import Copies
from hoplite_mp._planner.groups import GroupRegistry
from hoplite_mp._planner.link_speeds import LinkSpeeds
from hoplite_mp._planner.manager_recovery import ManagerRecovery
from hoplite_mp._planner.membership import Announcements, ClusterMembership
from hoplite_mp._planner.operation import CopyRefused
from hoplite_mp._planner.owners import OwnerRounds
from hoplite_mp._planner.packing import TreesPacked
from hoplite_mp._planner.plan_log import PlanLog
from hoplite_mp._planner.reduce import Reductions
from hoplite_mp._planner.step_result import StepResult
from hoplite_mp._protocol.messages import (
    ActorNameClaimed,
    ActorNameQuery,
    ActorNameReleased,
    ClientLost,
    CopyDropped,
    DeclaredDead,
    ExecutionFailed,
    FetchComplete,
    FetchFailed,
    FetchRequested,
    GroupAdmitted,
    GroupJoinRequested,
    GroupLeft,
    GroupTasksEnded,
    HostMeasured,
    Leave,
    LinkMeasured,
    MembersChanged,
    NodeAdmitted,
    NodeJoined,
    NodeLeaving,
    NodeLost,
    ObjectDeleted,
    OperationDropped,
    OperationSlow,
    OrphansReported,
    OwnerQuery,
    PeerLost,
    PlansReported,
    PlansRequested,
    ReduceRequested,
    SourceFailed,
    SourceReady,
    StripesComplete,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from hoplite_mp._planner.step_result import Send
    from hoplite_mp._protocol.membership import Report
    from hoplite_mp._protocol.messages import Member, NodeToManager

# Maximum number of simultaneous Groups. Each node's shared memory has the same number of boards.
BOARDS_MAX = 64
# Maximum number of running collectives. Higher: more memory for results that nobody awaits.
OPERATIONS_MAX = 1 << 16


class Planner:
    """The state of the cluster as reported to the manager, and the manager's decisions."""

    def __init__(
        self,
        *,
        boards_max: int = BOARDS_MAX,
        operations_max: int = OPERATIONS_MAX,
        again: bool = False,
        own: int = 0,
    ) -> None:
        """again: whether this planner replaces an earlier one, whose nodes will reconnect and
        report. own: the number of the node on the manager's host, whose death shuts the cluster
        down."""
        self._own = own
        self.restoring = ManagerRecovery(own) if again else None
        self.membership = ClusterMembership()
        self.announcements = Announcements()
        self.speeds = LinkSpeeds()
        log = PlanLog()
        self.copies = Copies(self.membership, self.speeds, log)
        self.reductions = Reductions(operations_max, self.membership, self.speeds, self.copies, log)
        self.groups = GroupRegistry(boards_max, self.speeds, self.membership.node_of)
        self.owners = OwnerRounds(self.membership)
        self.actor_names = ActorNames()
        self.owners.concluded = self.actor_names.moved

    def step(self, message: NodeToManager | Report | TreesPacked, now: float) -> StepResult:
        """Handles one message received at `now`, or an answer to `StepResult.packing`."""
        if self.restoring is not None:
            self.restoring.take(message, now)
            return self._restore(self.restoring, now)
        handler = _HANDLERS.get(type(message))  # None: a report that only recovery uses
        return self._plan([] if handler is None else handler(self, message, now))

    def tick(self, now: float) -> StepResult:
        """Handles all events that are due at `now`."""
        if self.restoring is not None:
            return self._restore(self.restoring, now)
        announced = self.announcements.tick(self.membership.nodes, now)
        return self._plan(announced + self.reductions.tick(now))

    def _restore(self, restoring: ManagerRecovery, now: float) -> StepResult:
        """Takes over the state of the previous planner as soon as its nodes have reported."""
        if not restoring.is_over(now):
            return StepResult((), restoring.until)
        self.restoring = None
        sends: list[Send] = []
        dead: set[int] = set()
        if restoring.returned:
            self.membership.restore(restoring.members, restoring.numbers)
            epochs, copied, generations = restoring.counted
            self.copies.go_on(epochs, copied)
            self.groups.go_on(generations)
            copied_again = self.copies.restore(restoring.held, restoring.copies, now)
            dead = restoring.bury()
            # Including claims by lost nodes, whose actors may be restarted elsewhere.
            for message in filter(_is_restated, restoring.later):
                if not (message.by_backup and message.node in restoring.returned):
                    self.actor_names.claim(message)
            # Exclude nodes that the previous manager had declared dead. They are not members, so
            # their loss would never be reported.
            known = self.membership.is_living
            requests = {
                n: request for n, request in restoring.requests().items() if known(request.node)
            }
            ended = restoring.ended
            ends = {number: report.end for number, report in ended.items()}
            # Ends of operations are sent before plans of copies, because a node may be the source
            # of a result whose commit it has not received yet.
            sends += self.reductions.restore(requests, restoring.folds, ends, now) + copied_again
            self.groups.remember(restoring.group_ends)
            sends += self.groups.restore(
                restoring.groups,
                [join for join in restoring.joins if known(join.node)],
                self.membership.nodes,
                {end.generation: end for end in restoring.group_ends},
            )
            for node in self.membership.nodes:
                if node not in restoring.returned:
                    sends += self._end(node, now)
            # Remove plans that the loss of a node has just ended. Their receivers would wait for
            # bytes from the lost node.
            sends = [send for send in sends if self.reductions.stands(send[1])]
            self.owners.restore(restoring.owners, restoring.inventories)
            self.actor_names.keep_only(
                lambda node: self.membership.is_living(node) or self.owners.is_open(node)
            )
        living = self.membership.is_living
        plan = self._plan(
            [
                *(
                    (node, self._admitted(node, report.incarnation))
                    for node, report in restoring.returned.items()
                ),
                *((node, DeclaredDead(0.0)) for node in sorted(dead)),
                *(send for send in sends if living(send[0])),
            ]
        )
        for message in sorted(restoring.later, key=lambda later: not _is_restated(later)):
            plan = plan.followed_by(self.step(message, now))
        return plan

    def _plan(self, sends: list[Send]) -> StepResult:
        if self.membership.leaving:
            sends = sends + self._release_leaving()
        sends = self.announcements.before(sends)
        notes = (*self.copies.notes, *self.reductions.notes)
        wanted = tuple(self.copies.trees.wanted)
        if notes:
            self.copies.notes.clear()
            self.reductions.notes.clear()
        if wanted:
            self.copies.trees.wanted.clear()
        return StepResult(tuple(sends), self._wake_at, wanted, notes)

    @property
    def _wake_at(self) -> float | None:
        times = (self.reductions.wake_at, self.announcements.wake_at)
        return min((at for at in times if at is not None), default=None)

    # ---- membership

    def _node_joined(self, message: NodeJoined, now: float) -> list[Send]:
        membership = self.membership
        node = membership.number_of(message.host_id)
        if node is None:
            return []
        if not membership.is_joining(node, message.incarnation):
            if membership.is_living(node, message.incarnation):  # a duplicate
                return [(node, self._admitted(node, message.incarnation))]
            return []
        # If a host rejoins before its loss was noticed, handle the loss first.
        removed: tuple[int, ...] = ()
        sends: list[Send] = []
        if membership.is_living(node):
            removed = (node,)
            sends = self._end(node, now)
        member = membership.join(message)
        admitted = self._admitted(node, message.incarnation)
        if removed:
            announced = self._notify_others(node, (member,), removed)
            self.announcements.knows_all(node)
        else:
            others = [other for other in membership.nodes if other != node]
            announced = self.announcements.join(member, others, now)
        return [(node, admitted), *announced, *sends]

    def _admitted(self, node: int, incarnation: int) -> NodeAdmitted:
        membership = self.membership
        return NodeAdmitted(node, incarnation, membership.members, membership.given)

    def _node_lost(self, message: NodeLost, now: float) -> list[Send]:
        if not self.membership.is_living(message.node, message.incarnation):
            return []
        removed = (message.node,)
        left = removed if message.node in self.membership.leaving else ()
        sends = self._end(message.node, now)
        return [*self._notify_others(message.node, (), removed, left), *sends]

    def _peer_lost(self, message: PeerLost, now: float) -> list[Send]:
        """Handles a report that two living nodes cannot reach each other, so that only one can
        remain a member. The node with the higher number is declared dead, but never the node on the
        manager's host."""
        living = self.membership.is_living
        if not (living(message.node) and living(message.peer)):
            return []
        later = max((message.node, message.peer), key=lambda node: (node != self._own, node))
        lost = NodeLost(later, self.membership.incarnation(later))
        return [(later, DeclaredDead(0.0)), *self._node_lost(lost, now)]

    def _notify_others(
        self,
        node: int,
        added: tuple[Member, ...],
        removed: tuple[int, ...],
        left: tuple[int, ...] = (),
    ) -> list[Send]:
        others = [other for other in self.membership.nodes if other != node]
        if not others:
            return []
        changed = MembersChanged(added, removed, left)
        return [(other, changed) for other in others]

    def _end(self, node: int, now: float) -> list[Send]:
        self.membership.lose(node)
        self.announcements.lose(node)
        self.speeds.lose(node)
        self.actor_names.lose_node(node)
        # First end the operations that the node requested. Otherwise their failures would be
        # reported to the dead node.
        sends = self.reductions.lose_requester(node)
        sends += self._with_refusals(self.copies.lose(node, now), now)
        sends += self.reductions.lose_holder(node, now)
        return sends + self.groups.lose_node(node) + self.owners.lose(node)

    def _node_leaving(self, message: NodeLeaving, now: float) -> list[Send]:
        if self.membership.is_living(message.node, message.incarnation):
            self.membership.leaving.add(message.node)
        return []

    def _release_leaving(self) -> list[Send]:
        """Sends Leave once to each leaving node that takes part in no running plan or operation."""
        free = [
            node
            for node in sorted(self.membership.leaving)
            if not self.copies.needs(node) and not self.reductions.needs(node)
        ]
        sends: list[Send] = []
        for node in free:
            if self.membership.say_leave(node):
                sends.append((node, Leave(node, self.membership.incarnation(node))))
        return sends

    def _client_lost(self, message: ClientLost, now: float) -> list[Send]:
        if not self.membership.is_living(message.node):
            return []
        self.membership.lose_client(message.node, message.client, message.generation)
        return self.groups.lose_client(message.node, message.client, message.generation)

    # ---- links

    def _link_measured(self, message: LinkMeasured, now: float) -> list[Send]:
        living = self.membership.is_living
        if living(message.node) and living(message.peer):
            self.speeds.measure_link(
                message.node, message.peer, message.latency_s, message.bytes_per_s, now
            )
        return []

    def _host_measured(self, message: HostMeasured, now: float) -> list[Send]:
        if not self.membership.is_living(message.node):
            return []
        up, down = message.up_bytes_per_s, message.down_bytes_per_s
        self.speeds.measure_host(message.node, up, down)
        return []

    def _trees_packed(self, message: TreesPacked, now: float) -> list[Send]:
        self.copies.trees.take(message)
        return []

    # ---- copies

    def _fetch_requested(self, message: FetchRequested, now: float) -> list[Send]:
        if not self.membership.is_living(message.node):
            return []
        return self._with_refusals(self.copies.fetch(message, now), now)

    def _fetch_complete(self, message: FetchComplete, now: float) -> list[Send]:
        if not self.copies.is_receiving(message.object, message.node, message.epoch):
            return []
        sends = self.copies.complete(message, now)
        return sends + self.reductions.copy_made(message.node, message.object, now)

    def _fetch_failed(self, message: FetchFailed, now: float) -> list[Send]:
        return self._with_refusals(self.copies.failed(message, now), now)

    def _copy_dropped(self, message: CopyDropped, now: float) -> list[Send]:
        if not self.membership.is_living(message.node):
            return []
        sends = self._with_refusals(self.copies.dropped(message, now), now)
        refused = CopyRefused(message.node, "it gave its copy up")
        if message.full:
            refused = CopyRefused(message.node, message.full, "full")
        return sends + self.reductions.about_copy(message.object, refused, now)

    def _object_gone(self, message: ObjectDeleted, now: float) -> list[Send]:
        self.owners.gone(message)
        return self._with_refusals(self.copies.gone(message), now)

    def _holdings_reported(self, message: OrphansReported, now: float) -> list[Send]:
        return self.owners.report(message)

    def _owner_asked(self, message: OwnerQuery, now: float) -> list[Send]:
        return self.owners.asked(message)

    def _with_refusals(self, sends: list[Send], now: float) -> list[Send]:
        """Applies any refusals of copies among the messages to the waiting operations."""
        return sends + self.reductions.hear_refusals(sends, now)

    # ---- collectives

    def _reduce_requested(self, message: ReduceRequested, now: float) -> list[Send]:
        # The calling process may be dead, but other processes may hold the result. The node sends
        # OperationDropped if the result is no longer needed.
        if not self.membership.is_living(message.node):
            return []
        return self.reductions.request(message, now)

    def _source_ready(self, message: SourceReady, now: float) -> list[Send]:
        holders = [
            node for node in (message.node, *message.others) if self.membership.is_living(node)
        ]
        if not holders:
            # The reporting node did not know of the losses, and will not report this source again.
            op = self.reductions.operations.get(message.operation)
            if op is None or message.index in op.ready:
                return []
            gone = op.all_gone(message.index, (message.node, *message.others))
            return self.reductions.step(gone, now)
        sends: list[Send] = []
        for holder in holders:
            single = msgspec.structs.replace(message, node=holder, others=())
            sends += self.reductions.step(single, now)
        return sends

    def _operation(
        self,
        message: SourceFailed | StripesComplete | ExecutionFailed | OperationDropped,
        now: float,
    ) -> list[Send]:
        return self.reductions.step(message, now)

    def _operation_slow(self, message: OperationSlow, now: float) -> list[Send]:
        if not self.membership.is_living(message.node):
            return []
        return self.reductions.slow(message, now)

    # ---- questions

    def _plans_asked(self, message: PlansRequested, now: float) -> list[Send]:
        if not self.membership.is_living(message.node):
            return []
        plans = self.reductions.plans_of(message.object)
        return [(message.node, PlansReported(message.request, plans))]

    # ---- groups

    def _group_join(self, message: GroupJoinRequested, now: float) -> list[Send]:
        if not self.membership.is_living(message.node) or self.membership.is_client_gone(
            message.node, message.client, message.client_generation
        ):
            return []
        return self.groups.join(message)

    def _group_admitted(self, message: GroupAdmitted, now: float) -> list[Send]:
        return self.groups.admit(message)

    def _group_left(self, message: GroupLeft, now: float) -> list[Send]:
        return self.groups.leave(message)

    def _group_tasks(self, message: GroupTasksEnded, now: float) -> list[Send]:
        return self.groups.tasks_over(message)

    # ---- actors

    def _actor_name(
        self, message: ActorNameClaimed | ActorNameQuery | ActorNameReleased, now: float
    ) -> list[Send]:
        if not self.membership.is_living(message.node):
            return []
        names = self.actor_names
        if isinstance(message, ActorNameClaimed):
            return [] if message.by_backup else names.claim(message)
        return names.ask(message) if isinstance(message, ActorNameQuery) else names.release(message)


def _is_restated(message: Any) -> bool:
    """Whether the message restates an existing actor's name. Such claims precede new claims."""
    return isinstance(message, ActorNameClaimed) and not message.request


# The messages are typed as Any because each handler accepts only the message type of its key.
_HANDLERS: dict[type, Callable[[Planner, Any, float], list[Send]]] = {
    NodeJoined: Planner._node_joined,
    NodeLost: Planner._node_lost,
    ClientLost: Planner._client_lost,
    NodeLeaving: Planner._node_leaving,
    PeerLost: Planner._peer_lost,
    LinkMeasured: Planner._link_measured,
    HostMeasured: Planner._host_measured,
    TreesPacked: Planner._trees_packed,
    FetchRequested: Planner._fetch_requested,
    FetchComplete: Planner._fetch_complete,
    FetchFailed: Planner._fetch_failed,
    CopyDropped: Planner._copy_dropped,
    ObjectDeleted: Planner._object_gone,
    OrphansReported: Planner._holdings_reported,
    OwnerQuery: Planner._owner_asked,
    ReduceRequested: Planner._reduce_requested,
    SourceReady: Planner._source_ready,
    SourceFailed: Planner._operation,
    StripesComplete: Planner._operation,
    OperationSlow: Planner._operation_slow,
    ExecutionFailed: Planner._operation,
    OperationDropped: Planner._operation,
    GroupJoinRequested: Planner._group_join,
    GroupAdmitted: Planner._group_admitted,
    GroupLeft: Planner._group_left,
    GroupTasksEnded: Planner._group_tasks,
    ActorNameClaimed: Planner._actor_name,
    ActorNameQuery: Planner._actor_name,
    ActorNameReleased: Planner._actor_name,
    PlansRequested: Planner._plans_asked,
}
