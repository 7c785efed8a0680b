"""The planner, which makes all decisions of the cluster: messages and time in, step results out.

`step` takes one message from a node, and `tick` the present time. Both return a StepResult and have
no other effect. The same messages at the same times give the same results, in a manager, in a
simulation and in a test. A late or duplicate message, or a message from an earlier incarnation,
gives an empty result and never an exception, so no node can stop the cluster with a message at the
wrong time.
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

# Maximum number of simultaneous Groups. A node's shared memory has as many boards.
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
        """again: there was an earlier planner, whose nodes will reconnect and report. own: the node
        of the manager's host, whose death shuts the cluster down."""
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
        """The result of one message received at `now`, or of an answer to StepResult.packing."""
        if self.restoring is not None:
            self.restoring.take(message, now)
            return self._restore(self.restoring, now)
        handler = _HANDLERS.get(type(message))  # None: a report that no planner is waiting for
        return self._plan([] if handler is None else handler(self, message, now))

    def tick(self, now: float) -> StepResult:
        """The result of the passing of time up to `now`."""
        if self.restoring is not None:
            return self._restore(self.restoring, now)
        announced = self.announcements.tick(self.membership.nodes, now)
        return self._plan(announced + self.reductions.tick(now))

    def _restore(self, restoring: ManagerRecovery, now: float) -> StepResult:
        """Continues the work of the previous planner as soon as its nodes have reported."""
        if not restoring.is_over(now):
            return StepResult((), restoring.until)
        self.restoring = None
        sends: list[Send] = []
        buried: set[int] = set()
        if restoring.returned:
            self.membership.restore(restoring.members, restoring.numbers)
            epochs, copied, generations = restoring.counted
            self.copies.go_on(epochs, copied)
            self.groups.go_on(generations)
            copied_again = self.copies.restore(restoring.held, restoring.copies, now)
            buried = restoring.bury()
            for message in filter(_is_restated, restoring.later):  # also those of lost nodes
                if not (message.by_backup and message.node in restoring.returned):
                    self.actor_names.claim(message)
            # A node that the former manager had declared dead may have reported again. It is not a
            # member, so its loss will not be reported.
            known = self.membership.is_living
            requests = {n: one for n, one in restoring.requests().items() if known(one.node)}
            ended = restoring.ended
            ends = {number: one.end for number, one in ended.items()}
            # Ends come first: a node may have sent a copy of a result before it has received the
            # commit of this result.
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
            # If the loss of a node has ended a plan, nodes that receive the plan only now would
            # wait for bytes from the lost node, while the operation waits for their reports.
            sends = [one for one in sends if self.reductions.stands(one[1])]
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
                *((node, DeclaredDead(0.0)) for node in sorted(buried)),
                *(send for send in sends if living(send[0])),
            ]
        )
        for message in sorted(restoring.later, key=lambda said: not _is_restated(said)):
            plan = plan.followed_by(self.step(message, now))
        return plan

    def _plan(self, sends: list[Send]) -> StepResult:
        if self.membership.leaving:
            sends = sends + self._let_go()
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
        # If a host comes back before its loss is noticed, the loss is handled first.
        removed: tuple[int, ...] = ()
        sends: list[Send] = []
        if membership.is_living(node):
            removed = (node,)
            sends = self._end(node, now)
        member = membership.join(message)
        admitted = self._admitted(node, message.incarnation)
        if removed:
            told = self._tell_others(node, (member,), removed)
            self.announcements.knows_all(node)
        else:
            others = [other for other in membership.nodes if other != node]
            told = self.announcements.join(member, others, now)
        return [(node, admitted), *told, *sends]

    def _admitted(self, node: int, incarnation: int) -> NodeAdmitted:
        membership = self.membership
        return NodeAdmitted(node, incarnation, membership.members, membership.given)

    def _node_lost(self, message: NodeLost, now: float) -> list[Send]:
        if not self.membership.is_living(message.node, message.incarnation):
            return []
        removed = (message.node,)
        left = removed if message.node in self.membership.leaving else ()
        sends = self._end(message.node, now)
        return [*self._tell_others(message.node, (), removed, left), *sends]

    def _peer_lost(self, message: PeerLost, now: float) -> list[Send]:
        """These two living nodes cannot reach each other, so they cannot both stay members. The
        node with the higher number is declared dead, except for the manager's own node."""
        living = self.membership.is_living
        if not (living(message.node) and living(message.peer)):
            return []
        later = max((message.node, message.peer), key=lambda node: (node != self._own, node))
        lost = NodeLost(later, self.membership.incarnation(later))
        return [(later, DeclaredDead(0.0)), *self._node_lost(lost, now)]

    def _tell_others(
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
        # The node's own operations end first, so that it is not sent the refusals that its death
        # causes.
        sends = self.reductions.lose_requester(node)
        sends += self._heard(self.copies.lose(node, now), now)
        sends += self.reductions.lose_holder(node, now)
        return sends + self.groups.lose_node(node) + self.owners.lose(node)

    def _node_leaving(self, message: NodeLeaving, now: float) -> list[Send]:
        if self.membership.is_living(message.node, message.incarnation):
            self.membership.leaving.add(message.node)
        return []

    def _let_go(self) -> list[Send]:
        """Sends Leave, once, to every leaving node that no running plan or operation names."""
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
        return self._heard(self.copies.fetch(message, now), now)

    def _fetch_complete(self, message: FetchComplete, now: float) -> list[Send]:
        if not self.copies.is_receiving(message.object, message.node, message.epoch):
            return []
        sends = self.copies.complete(message, now)
        return sends + self.reductions.copy_made(message.node, message.object, now)

    def _fetch_failed(self, message: FetchFailed, now: float) -> list[Send]:
        return self._heard(self.copies.failed(message, now), now)

    def _copy_dropped(self, message: CopyDropped, now: float) -> list[Send]:
        if not self.membership.is_living(message.node):
            return []
        sends = self._heard(self.copies.dropped(message, now), now)
        refused = CopyRefused(message.node, "it gave its copy up")
        if message.full:
            refused = CopyRefused(message.node, message.full, "full")
        return sends + self.reductions.about_copy(message.object, refused, now)

    def _object_gone(self, message: ObjectDeleted, now: float) -> list[Send]:
        self.owners.gone(message)
        return self._heard(self.copies.gone(message), now)

    def _holdings_reported(self, message: OrphansReported, now: float) -> list[Send]:
        return self.owners.report(message)

    def _owner_asked(self, message: OwnerQuery, now: float) -> list[Send]:
        return self.owners.asked(message)

    def _heard(self, sends: list[Send], now: float) -> list[Send]:
        return sends + self.reductions.hear_refusals(sends, now)

    # ---- collectives

    def _reduce_requested(self, message: ReduceRequested, now: float) -> list[Send]:
        # The calling process may die at any time, but its result may have other holders. The node
        # therefore decides whether the result is still needed, and otherwise sends
        # OperationDropped.
        if not self.membership.is_living(message.node):
            return []
        return self.reductions.request(message, now)

    def _source_ready(self, message: SourceReady, now: float) -> list[Send]:
        holders = [
            node for node in (message.node, *message.others) if self.membership.is_living(node)
        ]
        if not holders:
            # The reporting node did not know of the loss, and will not report this source again.
            op = self.reductions.operations.get(message.operation)
            if op is None or message.index in op.ready:
                return []
            gone = op.all_gone(message.index, (message.node, *message.others))
            return self.reductions.step(gone, now)
        sends: list[Send] = []
        for holder in holders:
            one = msgspec.structs.replace(message, node=holder, others=())
            sends += self.reductions.step(one, now)
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
    """Whether this restates the name of a node's actor. Such claims are handled before all open
    claims."""
    return isinstance(message, ActorNameClaimed) and not message.request


# Typed loosely because each row takes only the message type of its key.
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
