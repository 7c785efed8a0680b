"""Plans collectives on refs.

The first sources to become ready, or the first of each group of alternatives, are the members of a
collective; later sources do not change the selection. `operation` records the messages about one
collective. After each message, this module applies the same rule to the recorded state. It sends a
plan, sends the end of the operation, or waits for further messages.

Kinds that fold get a stripe plan from the cost model. Gather, allgather and alltoall are sets of
copies, whose senders and receivers follow from holders and destinations alone. The module
`broadcast` plans the copies of a broadcast, so other receivers may join while it is running. A
finished operation leaves no state.

Plans of reproducible reductions have the rule "fold": owners receive every member separately, and
fold from left to right. No node reduces its members beforehand, so a node with k members sends k
times the bytes.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter
from itertools import chain
from typing import TYPE_CHECKING, TypeAlias

import msgspec

from hoplite_mp._planner.operation import (
    TRANSITIONS,
    CopyMade,
    CopyRefused,
    DeadlinePassed,
    HolderLost,
    Operation,
    OperationState,
    SourceGroups,
    find_twins,
    note_failed,
    note_ready,
)
from hoplite_mp._planner.plan_cache import PlanCache
from hoplite_mp._planner.plan_log import PlanLog, PlanRecord
from hoplite_mp._planner.program import participants, too_many_parts, waits_for
from hoplite_mp._planner.repair import SLOW_GATHER_S, SlowLinks, kept_cut, relieved
from hoplite_mp._protocol.fields import FOLDING
from hoplite_mp._protocol.messages import (
    Commit,
    ExecuteReduce,
    FetchRefused,
    Forget,
    OperationFailed,
    ReduceRequested,
    SourceReady,
    Stripe,
)
from hoplite_mp._protocol.plans import NODES_REPORTED_MAX, PlanSummary

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from hoplite_mp._planner.broadcast import Copies
    from hoplite_mp._planner.link_speeds import LinkSpeeds
    from hoplite_mp._planner.manager_recovery import RunningFold
    from hoplite_mp._planner.membership import ClusterMembership
    from hoplite_mp._planner.operation import Report
    from hoplite_mp._planner.step_result import Send
    from hoplite_mp._planner.tree_shapes import StripePlan
    from hoplite_mp._protocol.messages import ManagerToNode, OperationSlow

    Event: TypeAlias = Report | DeadlinePassed | HolderLost | CopyMade | CopyRefused

# The messages that end an operation.
_ENDS = (Commit, OperationFailed, Forget)


class Reductions:
    """All running operations of a cluster."""

    def __init__(
        self,
        operations_max: int,
        membership: ClusterMembership,
        speeds: LinkSpeeds,
        copies: Copies,
        log: PlanLog,
    ) -> None:
        self._operations_max = operations_max
        self._membership = membership
        self._speeds = speeds
        self._plan_cache = PlanCache(speeds)
        self._copies = copies
        self._log = log
        self.operations: dict[int, Operation] = {}
        # Sorted (deadline, operation) of running operations.
        self._deadlines: list[tuple[float, int]] = []
        # Sorted (time at which to evaluate the reports of slow links, operation).
        self._evaluations: list[tuple[float, int]] = []
        self._broadcasts: dict[bytes, set[int]] = {}  # object -> operations waiting for copies
        self.notes: list[str] = []  # reasons for plans; the planner removes them

    @property
    def wake_at(self) -> float | None:
        """The time at which `tick` must be called. None if nothing is scheduled."""
        return min(
            (times[0][0] for times in (self._deadlines, self._evaluations) if times), default=None
        )

    # ---- events

    def request(self, message: ReduceRequested, now: float) -> list[Send]:
        """Starts an operation. A second request for a running operation is ignored."""
        if message.operation in self.operations:
            return []
        refusal = self._refusal(message)
        if refusal is not None:
            return [(message.node, refusal)]
        return self._conclude(self._open(message, now), None, now)

    def _open(self, message: ReduceRequested, now: float) -> Operation:
        groups = SourceGroups(message.one_of) if message.one_of else None
        op = Operation(message, message.num, find_twins(message.sources), groups)
        self.operations[message.operation] = op
        if message.deadline_s is not None and message.deadline_s <= 0:
            # Apply the deadline now, because sources might fail before the next tick.
            op.need = 1
        elif message.deadline_s is not None:
            op.deadline_at = now + message.deadline_s
            insort(self._deadlines, (op.deadline_at, message.operation))
        number, node = message.operation, message.node
        nbytes = message.ready_nbytes or (0,) * len(message.ready)
        layouts = message.ready_layouts or (b"",) * len(message.ready)
        holders = message.ready_holders or ((node,),) * len(message.ready)
        living = self._membership.is_living
        for index, size, layout, at in zip(message.ready, nbytes, layouts, holders, strict=True):
            found = [holder for holder in at if living(holder)]
            for holder in found:
                note_ready(op, SourceReady(number, index, holder, size, layout))
            if not found:
                note_failed(op, op.all_gone(index, at))
        return op

    def restore(
        self,
        requests: dict[int, ReduceRequested],
        running: dict[int, RunningFold],
        ended: dict[int, Commit | OperationFailed | Forget],
        now: float,
    ) -> list[Send]:
        """Takes over the operations of the previous planner. If an operation has ended on one
        node, it ends on all nodes."""
        sends: list[Send] = []
        for number in sorted({*requests, *running}):
            request, fold, end = requests.get(number), running.get(number), ended.get(number)
            if request is not None and isinstance(end, Forget):
                end = None  # Forget was sent to a former participant; the operation continues
            if request is None or end is not None:
                at = set() if fold is None else fold.at | fold.older
                requester = [] if request is None else [request.node]
                sends += self._living(requester, end or Forget(number))
                old = set() if fold is None else fold.older
                for node in sorted(at - {*requester}):
                    commits = isinstance(end, Commit) and node not in old
                    sends += self._living((node,), end if commits and end else Forget(number))
            elif fold is None:
                sends += self.request(request, now)
            else:
                sends += self._resume(self._open(request, now), fold, now)
        return sends

    def _resume(self, op: Operation, fold: RunningFold, now: float) -> list[Send]:
        """Takes over an operation whose plan is being executed."""
        plan = fold.plan
        op.state = OperationState.EXECUTING
        op.epoch, op.members, op.plan = plan.epoch, plan.members, plan
        nodes = participants(plan)
        op.unfinished = waits_for(plan) - fold.reported
        op.told = dict.fromkeys(node for node in nodes if self._membership.is_living(node))
        sends = self._living((node for node in nodes if node not in fold.at), plan)
        forget = Forget(op.request.operation)
        sends += self._living((node for node in fold.older if node not in nodes), forget)
        # Handle the loss of nodes that died before the previous manager, because no message will
        # report it again.
        living = self._membership.is_living
        op.unfinished = {node for node in op.unfinished if living(node)}
        for node in (node for node in nodes if not living(node)):
            if op.plan is plan and op.request.operation in self.operations:
                sends += self._apply(op, HolderLost(node), now)
        if op.plan is plan and op.request.operation in self.operations and not op.unfinished:
            sends += self._end(op, op.commit(), now)
        return sends

    def stands(self, message: ManagerToNode) -> bool:
        """Whether the message is still valid. Only a plan can become invalid, when it is no longer
        being executed."""
        if not isinstance(message, ExecuteReduce):
            return True
        op = self.operations.get(message.operation)
        return op is not None and op.state is OperationState.EXECUTING and op.epoch == message.epoch

    def step(self, message: Report, now: float) -> list[Send]:
        """Handles a message about one operation. Ignores it if the operation is over or unknown."""
        op = self.operations.get(message.operation)
        return [] if op is None else self._apply(op, message, now)

    def tick(self, now: float) -> list[Send]:
        """Handles the deadlines and the evaluations of slow links that are due at `now`."""
        sends: list[Send] = []
        while self._deadlines and self._deadlines[0][0] <= now:
            _, operation = self._deadlines.pop(0)
            op = self.operations[operation]
            op.deadline_at = None
            sends += self._apply(op, DeadlinePassed(), now)
        while self._evaluations and self._evaluations[0][0] <= now:
            _, operation = self._evaluations.pop(0)
            if operation in self.operations:
                sends += self._relieve(self.operations[operation], now)
        return sends

    def slow(self, message: OperationSlow, now: float) -> list[Send]:
        """Handles a report that a node's link became slow during an operation."""
        op = self.operations.get(message.operation)
        if op is None or op.relieved or op.plan is None or op.state is not OperationState.EXECUTING:
            return []
        if message.epoch != op.epoch or op.plan.shape != "stripes":
            return []
        rates = self._speeds.measured(participants(op.plan))
        if op.links.hear(message.node, message, op.plan, rates, now):
            insort(self._evaluations, (now + SLOW_GATHER_S, message.operation))
        return []

    def _relieve(self, op: Operation, now: float) -> list[Send]:
        """Moves the stripes of a node with a slow link to the other owners if this saves time, at
        most once in each operation. The new plan has a new epoch, and nodes keep the contributions
        that have arrived."""
        plan = op.plan
        if plan is None or op.relieved or op.state is not OperationState.EXECUTING:
            return []
        found = relieved(op.links, plan, now)
        if found is None:
            return []
        slow, stripes = found
        why = f"h{slow} has become slow, so its stripes were moved to other owners"
        self.notes.append(f"operation {op.request.operation}: {why}")
        self._replace_record(op, "", now)
        op.relieved = True
        op.epoch += 1
        living = tuple(self._membership.living(plan.destinations))
        op.lost.difference_update(living)  # these have rejoined
        plan = msgspec.structs.replace(plan, epoch=op.epoch, stripes=stripes, destinations=living)
        op.record = self._log.add(op.request.results, PlanRecord(plan, now, why=why))
        return self._announce(op, plan)

    def lose_requester(self, node: int) -> list[Send]:
        """Ends the operations that a lost node requested. Call this before `lose_holder`."""
        sends: list[Send] = []
        for op in [op for op in self.operations.values() if op.request.node == node]:
            self._forget(op)
            sends += self._to_all(op, Forget(op.request.operation))
        return sends

    def lose_holder(self, node: int, now: float) -> list[Send]:
        """Continues operations without a lost node, or ends those that cannot continue without
        it."""
        sends: list[Send] = []
        for op in list(self.operations.values()):
            if op.request.operation in self.operations:  # otherwise it has ended in this loop
                sends += self._apply(op, HolderLost(node), now)
        return sends

    def copy_made(self, node: int, object_id: bytes, now: float) -> list[Send]:
        """Handles a report that a receiver has the complete object."""
        return self.about_copy(object_id, CopyMade(node), now)

    def hear_refusals(self, sends: list[Send], now: float) -> list[Send]:
        """Applies any refusals of copies among these messages to the operations that are waiting
        for the copies."""
        more: list[Send] = []
        for node, message in sends:
            if isinstance(message, FetchRefused):
                error = "full" if message.error == "full" else "lost"
                refused = CopyRefused(node, message.message, error)
                more += self.about_copy(message.object, refused, now)
        return more

    def needs(self, node: int) -> bool:
        """Whether this node takes part in a running operation."""
        return any(
            node == op.request.node or node in op.unfinished or node in op.told
            for op in self.operations.values()
        )

    # ---- conclusions

    def about_copy(self, object_id: bytes, event: CopyMade | CopyRefused, now: float) -> list[Send]:
        """Applies the arrival or refusal of a receiver's copy to all broadcasts of the object."""
        sends: list[Send] = []
        for number in sorted(self._broadcasts.get(object_id, ())):
            sends += self._apply(self.operations[number], event, now)
        return sends

    def _apply(self, op: Operation, event: Event, now: float) -> list[Send]:
        transition = TRANSITIONS.get((op.state, type(event)))
        return [] if transition is None else self._conclude(op, transition(op, event), now)

    def _conclude(self, op: Operation, message: ManagerToNode | None, now: float) -> list[Send]:
        """Returns the messages that the operation's state requires: the end, a plan, or none."""
        if message is None and op.state is OperationState.WAITING:
            if not op.can_be_met():
                message = op.failure()
            elif (chosen := op.choose()) is not None:
                message = op.mismatch(chosen)
                if message is None:
                    return self._begin(op, chosen, now)
        return [] if message is None else self._end(op, message, now)

    def _end(self, op: Operation, message: ManagerToNode, now: float) -> list[Send]:
        assert isinstance(message, _ENDS)
        if op.record is not None and isinstance(message, OperationFailed):
            op.record.end("failed", now, message.message)
        elif op.record is not None:
            op.record.end("done" if isinstance(message, Commit) else "replaced", now)
        self._forget(op)
        if isinstance(message, OperationFailed):
            others = self._to_all(op, Forget(op.request.operation), but=op.request.node)
            return [(op.request.node, message), *others]
        return self._to_all(op, message)

    def _begin(self, op: Operation, chosen: tuple[int, ...], now: float) -> list[Send]:
        """Fixes the members, and announces the plan for the next epoch."""
        destinations = self._destinations(op)
        if not destinations:
            text = "all destinations of its result are lost"
            return self._end(op, OperationFailed(op.request.operation, "lost", text), now)
        op.members = tuple(sorted(chosen))
        op.lost.difference_update(destinations)  # these have rejoined
        if op.request.kind == "broadcast":
            return self._begin_broadcast(op, destinations, now)
        holder_of = self._holders(op, chosen, destinations)
        text = too_many_parts(op.request.kind, holder_of.values(), destinations)
        if text:
            return self._end(op, OperationFailed(op.request.operation, "value", text), now)
        if op.request.kind not in FOLDING and not op.moves(holder_of, destinations):
            if op.plan is not None:  # all remaining sources are already at their destinations
                op.plan, op.destinations = None, destinations
            return self._end(op, op.commit(), now)
        op.state = OperationState.EXECUTING
        op.epoch += 1
        return self._announce(op, self._plan(op, chosen, holder_of, destinations, now))

    def _announce(self, op: Operation, plan: ExecuteReduce) -> list[Send]:
        """Sends the plan of the operation's new epoch to all participating nodes."""
        request, before = op.request, op.told
        op.plan, op.links = plan, SlowLinks()
        op.unfinished = waits_for(plan)
        if request.kind == "alltoall":  # its destinations include lost nodes
            op.unfinished = {node for node in op.unfinished if self._membership.is_living(node)}
        sends = self._living(participants(plan), plan)
        op.told = dict.fromkeys([node for node, _ in sends])
        told = {*op.told, op.request.node}
        return sends + self._living(
            [node for node in before if node not in told], Forget(request.operation)
        )

    def _begin_broadcast(
        self, op: Operation, destinations: tuple[int, ...], now: float
    ) -> list[Send]:
        """Lets the module `broadcast` plan the copies. The operation ends when all have arrived."""
        (index,) = op.members
        object_id, source = op.request.sources[index], op.ready[index]
        op.state = OperationState.EXECUTING
        op.destinations = destinations
        sends, lacking = self._copies.spread(
            object_id, source.nbytes, source.holders, destinations, now
        )
        op.unfinished = lacking
        for result in op.request.results if lacking else ():
            self._log.share(result, object_id)
        self._broadcasts.setdefault(object_id, set()).add(op.request.operation)
        if not lacking:
            return sends + self._end(op, op.commit(), now)
        return sends + self.hear_refusals(sends, now)

    def _plan(
        self,
        op: Operation,
        chosen: tuple[int, ...],
        holder_of: dict[int, int],
        destinations: tuple[int, ...],
        now: float,
    ) -> ExecuteReduce:
        request = op.request
        nbytes = max([op.ready[index].nbytes for index in chosen])
        order, rule = op.folding_order(chosen), "fold" if request.reproducible else "any"
        stripes: tuple[Stripe, ...] = ()
        shape = "stripes"
        best, kept = None, None
        if request.kind in FOLDING:
            best = self._stripe_plan(op, chosen, holder_of, destinations, nbytes)
            stripes, shape = best.stripes, best.shape
            if (
                op.plan is not None
                and op.plan.shape == "stripes"
                and request.kind != "reduce_scatter"
            ):  # the operation is planned again, for example after a loss
                able = {*holder_of.values(), *destinations}
                kept = kept_cut(op.plan.stripes, able, stripes)
            if kept is not None:
                stripes, shape = kept, "stripes"
            elif len(set(holder_of.values()) | set(destinations)) > 1:
                self.notes.append(f"operation {request.operation}: {best.why}")
        plan = ExecuteReduce(
            request.operation,
            op.epoch,
            op.members,
            order,
            stripes,
            rule,
            request.kind,
            request.op,
            request.node,
            tuple(map(request.sources.__getitem__, op.members)),
            tuple(map(holder_of.__getitem__, op.members)),
            destinations,
            request.results,
            nbytes,
            next((op.ready[i].layout for i in chosen if op.ready[i].layout), b""),
            shape,
            () if stripes else tuple(op.ready[index].nbytes for index in op.members),
        )
        self._replace_record(op, "a host or a source was lost", now)
        record = PlanRecord(plan, now)
        if best is not None:
            record = PlanRecord(plan, now, best.seconds or None, best.estimates, best.rates)
        if kept is not None:
            record.estimates, record.expected_s = (), None
        if op.epoch > 1:
            record.why = "planned again: a host or a source was lost"
        op.record = self._log.add(request.results, record)
        return plan

    def _replace_record(self, op: Operation, why: str, now: float) -> None:
        if op.record is not None:
            op.record.end("replaced", now, why)

    def plans_of(self, object_id: bytes) -> tuple[PlanSummary, ...]:
        """The recorded plans of an object, or of a collective of which it is a result."""
        found = self._log.summaries(object_id)
        if found:
            return found
        waits = (op for op in self.operations.values() if object_id in op.request.results)
        return tuple(_waiting_plan(op) for op in waits if op.state is OperationState.WAITING)

    def _stripe_plan(
        self,
        op: Operation,
        chosen: tuple[int, ...],
        holder_of: dict[int, int],
        destinations: tuple[int, ...],
        nbytes: int,
    ) -> StripePlan:
        sent = Counter([holder_of[index] for index in chosen])
        return self._plan_cache.reduction(
            op.request.kind,
            nbytes,
            sent,
            destinations,
            ordered=op.request.reproducible,
            leaving=self._membership.leaving,
        )

    def _holders(
        self, op: Operation, chosen: Sequence[int], destinations: tuple[int, ...]
    ) -> dict[int, int]:
        """Selects the node that provides each member: a destination if possible, otherwise a node
        that already provides another member."""
        ready = op.ready
        found = [ready[index].holders for index in chosen]
        if sum(map(len, found)) == len(found):  # each source has one holder
            return dict(zip(chosen, chain.from_iterable(found), strict=True))
        wanted_by = set(destinations)
        taken: set[int] = set()
        holder_of: dict[int, int] = {}
        for index in chosen:
            holders = op.ready[index].holders
            if len(holders) == 1:
                (best,) = holders
            else:
                best = next(iter(holders))
                wanted = (node for node in holders if node in wanted_by)
                best = next(wanted, next((node for node in holders if node in taken), best))
            taken.add(best)
            holder_of[index] = best
        return holder_of

    def _destinations(self, op: Operation) -> tuple[int, ...]:
        """The living nodes that receive the result, in order."""
        request = op.request
        living = self._membership.is_living
        if request.kind == "alltoall":
            return request.to if any(map(living, request.to)) else ()
        if request.to:
            return tuple(node for node in request.to if living(node))
        if request.kind == "allreduce":
            return tuple(sorted(set().union(*[source.holders for source in op.ready.values()])))
        if request.kind == "reduce_scatter":
            count = max(1, len(request.results))
            if count == len(request.sources) and len(op.ready) == count:
                return tuple(next(iter(op.ready[index].holders)) for index in range(count))
            return (request.node,) * count
        if request.kind in ("reduce", "gather"):
            return (request.node,)
        leaving = self._membership.leaving
        nodes = self._membership.nodes
        return tuple(node for node in nodes if node not in leaving) or nodes

    def _refusal(self, message: ReduceRequested) -> OperationFailed | None:
        if len(self.operations) >= self._operations_max:
            text = f"{self._operations_max} collectives are running, and no more are allowed"
            return OperationFailed(message.operation, "full", text)
        dead = [node for node in message.to if not self._membership.is_living(node)]
        bound = message.kind in ("reduce", "gather", "reduce_scatter")
        if dead and (bound or len(dead) == len(message.to)):
            text = f"node {dead[0]}, a destination of its result, is lost"
            return OperationFailed(message.operation, "lost", text)
        slices = len(message.results)
        if message.kind == "reduce_scatter" and message.to and len(message.to) != slices:
            text = f"{slices} slices for {len(message.to)} nodes: the numbers must be equal"
            return OperationFailed(message.operation, "value", text)
        return None

    def _to_all(self, op: Operation, message: ManagerToNode, but: int | None = None) -> list[Send]:
        return self._living((node for node in op.everybody() if node != but), message)

    def _living(self, nodes: Iterable[int], message: ManagerToNode) -> list[Send]:
        return [(node, message) for node in self._membership.living(nodes)]

    def _forget(self, op: Operation) -> None:
        number = op.request.operation
        del self.operations[number]
        if op.deadline_at is not None:
            del self._deadlines[bisect_left(self._deadlines, (op.deadline_at, number))]
        if op.request.kind == "broadcast" and op.members:
            object_id = op.request.sources[op.members[0]]
            waiting = self._broadcasts.get(object_id, set())
            waiting.discard(number)
            if not waiting:
                self._broadcasts.pop(object_id, None)


def _waiting_plan(op: Operation) -> PlanSummary:
    """Summarizes a collective that has no plan yet."""
    request = op.request
    noun, count, ready = "sources", len(request.sources), len(op.ready)
    if op.groups is not None:
        noun, count, ready = "groups of sources", len(request.one_of), len(op.groups.ready)
    return PlanSummary(
        kind=request.kind,
        shape="",
        state="waiting",
        nbytes=max((source.nbytes for source in op.ready.values()), default=0),
        sources=(),
        source_count=len(request.sources),
        receivers=request.to[:NODES_REPORTED_MAX],
        receiver_count=len(request.to),
        owners=(),
        owner_count=0,
        estimates=(),
        rates=(),
        expected_s=None,
        finished=0,
        last_node=0,
        last_s=0.0,
        why=f"{ready} of {count} {noun} are ready, {op.need} are needed",
    )
