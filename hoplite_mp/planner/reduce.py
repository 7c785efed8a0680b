"""Collectives on refs: who goes in, decided once, in order of arrival; then who does what.

`operation` notes what messages say about one collective; here conclusions are drawn from it, the
same way whatever came: a plan, an end, or nothing yet. Folding kinds get a forest by the model;
gather, allgather and alltoall are sets of copies, whose edges follow from holders and destinations
alone; a broadcast is handed to `broadcast`, so that others may join it while it runs. A finished
operation leaves nothing behind.

Reproducible results have rule "fold": owners get every member by itself and fold from left to
right in the order of the refs. That costs what pre-reduction saves: a node with k members sends k
times the bytes; with one member a node it costs nothing.

This module must never know what a source contains, nor how it is added.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from itertools import islice
from typing import TYPE_CHECKING, TypeAlias

from hoplite_mp.planner import forest
from hoplite_mp.planner.operation import (
    TRANSITIONS,
    CopyMade,
    CopyRefused,
    DeadlinePassed,
    HolderLost,
    Operation,
    State,
    note_failed,
    note_ready,
)
from hoplite_mp.planner.program import participants, waits_for
from hoplite_mp.planner.repair import kept_cut
from hoplite_mp.protocol.fields import FOLDING
from hoplite_mp.protocol.messages import (
    Commit,
    ExecuteReduce,
    FetchRefused,
    Forget,
    OperationFailed,
    ReduceRequested,
    SourceFailed,
    SourceReady,
    Stripe,
)

if TYPE_CHECKING:
    from collections.abc import Iterable

    from hoplite_mp.planner.broadcast import Copies
    from hoplite_mp.planner.membership import Membership
    from hoplite_mp.planner.operation import Report
    from hoplite_mp.planner.plan import Send
    from hoplite_mp.planner.restoring import RunningFold
    from hoplite_mp.planner.topology import Topology
    from hoplite_mp.protocol.messages import ManagerToNode

    Event: TypeAlias = Report | DeadlinePassed | HolderLost | CopyMade | CopyRefused

# The messages after which an operation is over and nothing of it is kept.
_ENDS = (Commit, OperationFailed, Forget)


class Reductions:
    """The operations of a cluster that are not yet over."""

    def __init__(
        self, operations_max: int, membership: Membership, topology: Topology, copies: Copies
    ) -> None:
        self._operations_max = operations_max
        self._membership = membership
        self._topology = topology
        self._copies = copies
        self.operations: dict[int, Operation] = {}
        self._deadlines: list[tuple[float, int]] = []  # sorted; of open operations only
        self._broadcasts: dict[bytes, set[int]] = {}  # object -> operations that wait for copies
        self.notes: list[str] = []  # why plans are as they are; taken by the machine

    @property
    def wake_at(self) -> float | None:
        """When `tick` has something to do."""
        return self._deadlines[0][0] if self._deadlines else None

    # ---- what happens

    def request(self, message: ReduceRequested, now: float) -> list[Send]:
        """A new operation. A double of an open one is ignored."""
        if message.operation in self.operations:
            return []
        refusal = self._refusal(message)
        if refusal is not None:
            return [(message.node, refusal)]
        return self._conclude(self._open(message, now), None, now)

    def _open(self, message: ReduceRequested, now: float) -> Operation:
        op = Operation(message, message.num, _find_twins(message.sources))
        self.operations[message.operation] = op
        if message.deadline_s is not None and message.deadline_s <= 0:
            # Passed at the call, not at the next tick: what else has failed by then is not asked.
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
                reason = f"node {at[0]}, which held it, is gone"
                note_failed(op, SourceFailed(number, index, reason))
        return op

    def restore(
        self,
        requests: dict[int, ReduceRequested],
        running: dict[int, RunningFold],
        ended: dict[int, Commit | OperationFailed | Forget],
        now: float,
    ) -> list[Send]:
        """What is open, and what runs by the plans of a planner before this one. What has ended for
        one node ends for all."""
        sends: list[Send] = []
        for number in sorted({*requests, *running}):
            request, fold, end = requests.get(number), running.get(number), ended.get(number)
            if request is not None and isinstance(end, Forget):
                end = None  # of one who took part no more: who asked still waits
            if request is None or end is not None:
                at = set() if fold is None else fold.at | fold.older
                told = [] if request is None else [request.node]
                sends += self._living(told, end or Forget(number))
                old = set() if fold is None else fold.older
                for node in sorted(at - {*told}):
                    commits = isinstance(end, Commit) and node not in old
                    sends += self._living((node,), end if commits and end else Forget(number))
            elif fold is None:
                sends += self.request(request, now)
            else:
                sends += self._resume(self._open(request, now), fold, now)
        return sends

    def _resume(self, op: Operation, fold: RunningFold, now: float) -> list[Send]:
        """An operation that is being executed."""
        plan = fold.plan
        op.state = State.EXECUTING
        op.epoch, op.members, op.plan = plan.epoch, plan.members, plan
        taking = participants(plan)
        op.unfinished = waits_for(plan) - fold.reported
        op.told = dict.fromkeys(node for node in taking if self._membership.is_living(node))
        sends = self._living((node for node in taking if node not in fold.at), plan)
        forget = Forget(op.request.operation)
        sends += self._living((node for node in fold.older if node not in taking), forget)
        # Who died before the manager may still stand in the plan, and will not be lost again.
        living = self._membership.is_living
        op.unfinished = {node for node in op.unfinished if living(node)}
        for node in (node for node in taking if not living(node)):
            if op.plan is plan and op.request.operation in self.operations:
                sends += self._apply(op, HolderLost(node), now)
        if op.plan is plan and op.request.operation in self.operations and not op.unfinished:
            sends += self._end(op, op.commit())
        return sends

    def step(self, message: Report, now: float) -> list[Send]:
        """One message about one operation; ignored if that is over or unknown."""
        op = self.operations.get(message.operation)
        return [] if op is None else self._apply(op, message, now)

    def tick(self, now: float) -> list[Send]:
        """Every deadline up to `now` passes."""
        sends: list[Send] = []
        while self._deadlines and self._deadlines[0][0] <= now:
            _, operation = self._deadlines.pop(0)
            op = self.operations[operation]
            op.deadline_at = None
            sends += self._apply(op, DeadlinePassed(), now)
        return sends

    def lose_requester(self, node: int) -> list[Send]:
        """What it asked for ends, and only those who took part are told. Before `lose_holder`."""
        sends: list[Send] = []
        for op in [op for op in self.operations.values() if op.request.node == node]:
            self._forget(op)
            sends += self._to_all(op, Forget(op.request.operation))
        return sends

    def lose_holder(self, node: int, now: float) -> list[Send]:
        """What others asked for goes on without the node, if it can."""
        sends: list[Send] = []
        for op in list(self.operations.values()):
            if op.request.operation in self.operations:  # not ended by an earlier one's spread
                sends += self._apply(op, HolderLost(node), now)
        return sends

    def copy_made(self, node: int, object_id: bytes, now: float) -> list[Send]:
        """A receiver has the object whole: broadcasts of it have waited for that."""
        return self.about_copy(object_id, CopyMade(node), now)

    def hear_refusals(self, sends: list[Send], now: float) -> list[Send]:
        """What `broadcast` has just refused is news to who waits for these copies."""
        more: list[Send] = []
        for node, message in sends:
            if isinstance(message, FetchRefused):
                error = "full" if message.error == "full" else "lost"
                refused = CopyRefused(node, message.message, error)
                more += self.about_copy(message.object, refused, now)
        return more

    def needs(self, node: int) -> bool:
        """Does an operation that is open name this node?"""
        return any(
            node == op.request.node or node in op.unfinished or node in op.told
            for op in self.operations.values()
        )

    # ---- conclusions

    def about_copy(self, object_id: bytes, event: CopyMade | CopyRefused, now: float) -> list[Send]:
        """What has become of a receiver's copy."""
        sends: list[Send] = []
        for number in sorted(self._broadcasts.get(object_id, ())):
            sends += self._apply(self.operations[number], event, now)
        return sends

    def _apply(self, op: Operation, event: Event, now: float) -> list[Send]:
        transition = TRANSITIONS.get((op.state, type(event)))
        return [] if transition is None else self._conclude(op, transition(op, event), now)

    def _conclude(self, op: Operation, message: ManagerToNode | None, now: float) -> list[Send]:
        """What follows from what is known: an end, a plan, or nothing yet."""
        if message is None and op.state is State.WAITING:
            if not op.can_be_met():
                message = _failure(op)
            elif len(op.ready) >= op.need:
                chosen = tuple(islice(op.ready, op.request.num))
                message = self._mismatch(op, chosen)
                if message is None:
                    return self._begin(op, chosen, now)
        return [] if message is None else self._end(op, message)

    def _end(self, op: Operation, message: ManagerToNode) -> list[Send]:
        assert isinstance(message, _ENDS)
        self._forget(op)
        if isinstance(message, OperationFailed):
            others = self._to_all(op, Forget(op.request.operation), but=op.request.node)
            return [(op.request.node, message), *others]
        return self._to_all(op, message)

    def _begin(self, op: Operation, chosen: tuple[int, ...], now: float) -> list[Send]:
        """Fix the members and announce them as the next epoch."""
        destinations = self._destinations(op)
        if not destinations:
            text = "no node, where its result was to be, is left"
            return self._end(op, OperationFailed(op.request.operation, "lost", text))
        op.members = tuple(sorted(chosen))
        op.lost.difference_update(destinations)  # those that live again
        if op.request.kind == "broadcast":
            return self._begin_broadcast(op, destinations, now)
        holder_of = self._holders(op, chosen, destinations)
        if op.request.kind not in FOLDING and not _moves(op, holder_of, destinations):
            if op.plan is not None:  # what was to move is where it should be by now
                op.plan, op.destinations = None, destinations
            return self._end(op, op.commit())
        request = op.request
        before = op.told
        op.state = State.EXECUTING
        op.epoch += 1
        op.plan = plan = self._plan(op, chosen, holder_of, destinations)
        op.unfinished = waits_for(plan)
        if request.kind == "alltoall":  # whose destinations keep their places, dead or alive
            op.unfinished = {node for node in op.unfinished if self._membership.is_living(node)}
        sends = self._living(participants(plan), plan)
        op.told = {node: None for node, _ in sends}
        told = {node for node, _ in sends} | {op.request.node}
        return sends + self._living(
            (node for node in before if node not in told), Forget(op.request.operation)
        )

    def _begin_broadcast(
        self, op: Operation, destinations: tuple[int, ...], now: float
    ) -> list[Send]:
        """`broadcast` brings the copies; the requester hears of it when all have come."""
        (index,) = op.members
        object_id, source = op.request.sources[index], op.ready[index]
        op.state = State.EXECUTING
        op.destinations = destinations
        sends, lacking = self._copies.spread(
            object_id, source.nbytes, source.holders, destinations, now
        )
        op.unfinished = lacking
        self._broadcasts.setdefault(object_id, set()).add(op.request.operation)
        if not lacking:
            return sends + self._end(op, op.commit())
        return sends + self.hear_refusals(sends, now)

    def _plan(
        self,
        op: Operation,
        chosen: tuple[int, ...],
        holder_of: dict[int, int],
        destinations: tuple[int, ...],
    ) -> ExecuteReduce:
        request = op.request
        nbytes = max(op.ready[index].nbytes for index in chosen)
        order, rule = (op.members, "fold") if request.reproducible else (chosen, "any")
        stripes: tuple[Stripe, ...] = ()
        shape = "stripes"
        if request.kind in FOLDING:
            best = self._forest(op, chosen, holder_of, destinations, nbytes)
            stripes, shape = best.stripes, best.shape
            kept = None
            if (
                op.plan is not None
                and op.plan.shape == "stripes"
                and request.kind != "reduce_scatter"
            ):  # after a loss
                able = {*holder_of.values(), *destinations}
                kept = kept_cut(op.plan.stripes, able, stripes)
            if kept is not None:
                stripes, shape = kept, "stripes"
            elif len(set(holder_of.values()) | set(destinations)) > 1:
                self.notes.append(f"operation {request.operation}: {best.why}")
        return ExecuteReduce(
            request.operation,
            op.epoch,
            op.members,
            order,
            stripes,
            rule,
            request.kind,
            request.op,
            request.node,
            tuple(request.sources[index] for index in op.members),
            tuple(holder_of[index] for index in op.members),
            destinations,
            request.results,
            nbytes,
            next((op.ready[i].layout for i in chosen if op.ready[i].layout), b""),
            shape,
            () if stripes else tuple(op.ready[index].nbytes for index in op.members),
        )

    def _forest(
        self,
        op: Operation,
        chosen: tuple[int, ...],
        holder_of: dict[int, int],
        destinations: tuple[int, ...],
        nbytes: int,
    ) -> forest.Forest:
        sent: dict[int, int] = {}
        for index in chosen:
            sent[holder_of[index]] = sent.get(holder_of[index], 0) + 1
        return forest.reduction(
            op.request.kind,
            nbytes,
            sent,
            destinations,
            self._topology,
            ordered=op.request.reproducible,
            leaving=self._membership.leaving,
        )

    def _holders(
        self, op: Operation, chosen: Iterable[int], destinations: tuple[int, ...]
    ) -> dict[int, int]:
        """Who gives each member: a destination if it can, else who takes part anyway."""
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
        """The living nodes where the result belongs, in order."""
        request = op.request
        living = self._membership.is_living
        if request.kind == "alltoall":
            return request.to if any(map(living, request.to)) else ()
        if request.to:
            return tuple(node for node in request.to if living(node))
        if request.kind == "allreduce":
            holders = (node for source in op.ready.values() for node in source.holders)
            return tuple(sorted(dict.fromkeys(holders)))
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
            text = f"{self._operations_max} collectives are under way, and no more are allowed"
            return OperationFailed(message.operation, "full", text)
        dead = [node for node in message.to if not self._membership.is_living(node)]
        bound = message.kind in ("reduce", "gather", "reduce_scatter")
        if dead and (bound or len(dead) == len(message.to)):
            text = f"node {dead[0]}, where its result was to be, is not there"
            return OperationFailed(message.operation, "lost", text)
        slices = len(message.results)
        if message.kind == "reduce_scatter" and message.to and len(message.to) != slices:
            text = f"{slices} slices for {len(message.to)} nodes: there must be one for each"
            return OperationFailed(message.operation, "value", text)
        return None

    def _mismatch(self, op: Operation, chosen: tuple[int, ...]) -> OperationFailed | None:
        """Members of a fold must look alike: what can be seen here is said before bytes move."""
        if op.request.kind not in FOLDING:
            return None
        known = sorted((index, op.ready[index].layout) for index in chosen)
        known = [(index, layout) for index, layout in known if layout]
        for index, layout in known[1:]:
            first, expected = known[0]
            if layout != expected:
                text = (
                    f"sources differ: {first} ({_named(op, first)}) has "
                    f"{expected.decode(errors='replace')}, {index} ({_named(op, index)}) has "
                    f"{layout.decode(errors='replace')}"
                )
                return OperationFailed(op.request.operation, "value", text)
        return None

    def _to_all(self, op: Operation, message: ManagerToNode, but: int | None = None) -> list[Send]:
        return self._living((node for node in op.everybody() if node != but), message)

    def _living(self, nodes: Iterable[int], message: ManagerToNode) -> list[Send]:
        return [(node, message) for node in nodes if self._membership.is_living(node)]

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


def _moves(op: Operation, holder_of: dict[int, int], destinations: tuple[int, ...]) -> bool:
    """Does any member of a set of copies have to leave the node that holds it?"""
    wanted_by = set(destinations)
    for index, holder in holder_of.items():
        if op.request.kind == "alltoall":
            if destinations[index % len(destinations)] != holder:
                return True
        elif wanted_by != {holder}:
            return True
    return False


def _named(op: Operation, index: int) -> str:
    """A source as its ref is shown to users."""
    return f"ObjectRef({op.request.sources[index].hex()})"


def _failure(op: Operation) -> OperationFailed:
    assert op.cause is not None
    index, reason = op.cause
    total = len(op.request.sources)
    message = (
        f"{len(op.failed)} of {total} sources failed, so {op.need} cannot be ready any more; "
        f"first source {index}: {reason}"
    )
    error = "reduce" if op.request.kind in FOLDING else "source"
    gone = tuple(number for pair in op.gone for number in pair)
    return OperationFailed(op.request.operation, error, message, index, gone)


def _find_twins(sources: tuple[bytes, ...]) -> dict[bytes, list[int]]:
    if len(set(sources)) == len(sources):
        return {}
    indices: dict[bytes, list[int]] = {}
    for index, source in enumerate(sources):
        indices.setdefault(source, []).append(index)
    return {source: same for source, same in indices.items() if len(same) > 1}
