"""What can happen to collectives, against `NaiveOperation`."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import invariant, rule

from hoplite_mp._planner.operation import OperationState
from hoplite_mp._protocol import messages as m
from tests.support.planner_edges import check_edges
from tests.support.planner_naive import NaiveOperation
from tests.support.planner_scenarios import letter_id
from tests.support.planner_walk import INDICES, LATE, NODES, OPERATIONS_MAX, PICKS, RARELY, Walk

FOLDING = ("reduce", "allreduce", "reduce_scatter")
KINDS = (*FOLDING, *FOLDING, "gather", "allgather", "alltoall")
BOUND = ("reduce", "reduce_scatter", "gather")  # lost with any of their destinations


def by_label(labels: list[int]) -> list[list[int]]:
    """The places of each label, the labels by their last places: groups in no sorted order."""
    last = sorted({label: at for at, label in enumerate(labels)}.items(), key=lambda pair: -pair[1])
    return [[at for at, one in enumerate(labels) if one == label] for label, _ in last]


class ReduceWalk(Walk):
    """Requests, sources, plans and their ends."""

    @rule(
        node=NODES,
        sources=st.permutations("abcde").map("".join) | st.text("abc", min_size=1, max_size=5),
        num=st.sampled_from([2, 2, 3, 1, 5]),
        deadline_s=st.sampled_from([None, None, 1.0, 2.0, 0.0]),
        kind=st.sampled_from(KINDS),
        to=st.lists(st.integers(0, 2), unique=True, max_size=3),
        reproducible=st.booleans(),
        ready=st.lists(INDICES, unique=True, max_size=3),
        grouping=st.none() | st.lists(st.integers(0, 2), min_size=5, max_size=5),
        doubled=RARELY,
    )
    def request(
        self,
        node: int,
        sources: str,
        num: int,
        deadline_s: float | None,
        kind: str,
        to: list[int],
        reproducible: bool,
        ready: list[int],
        grouping: list[int] | None,
        doubled: bool,
    ) -> None:
        groups = [[index] for index in range(len(sources))]
        grouped = grouping is not None and kind in ("reduce", "allreduce")
        if grouping is not None and grouped:
            groups = by_label(grouping[: len(sources)])
        num = min(num, len(groups))
        ready = [index for index in ready if index < len(sources)]
        if doubled and self.operation_ids not in self.operations:
            return
        if kind == "alltoall" and not to:
            to = [0]
        if kind in ("reduce", "gather"):
            to = to[:1]
        slices = len(to) or 1
        self.operation_ids += not doubled
        message = m.ReduceRequested(
            operation=self.operation_ids,
            node=node,
            caller=1,
            sources=tuple(letter_id(letter) for letter in sources),
            op="sum",
            num=num,
            deadline_s=deadline_s,
            reproducible=reproducible,
            results=(letter_id("z"),) * slices if kind == "reduce_scatter" else (),
            kind=kind,
            ready=tuple(ready),
            ready_nbytes=(1 << 20,) * len(ready),
            to=tuple(to),
            one_of=tuple(map(tuple, groups)) if grouped else (),
        )
        if node not in self.living or doubled:
            assert self.step(message) == []
            return
        dead = [one for one in to if one not in self.living]
        impossible = dead and (kind in BOUND or dead == to)
        if len(self.operations) == OPERATIONS_MAX or impossible:
            ((_, refused),) = self.step(message)
            assert isinstance(refused, m.OperationFailed)
            full = len(self.operations) == OPERATIONS_MAX
            assert refused.error == ("full" if full else "lost")
            return
        at = None if deadline_s is None else self.now + deadline_s
        passed = deadline_s == 0
        op = NaiveOperation(node, sources, num, kind, tuple(to), reproducible, at, groups, passed)
        for index in ready:
            op.report("ready", index, node)
        self.operations[self.operation_ids] = op
        self.check_operation(self.operation_ids, self.step(message))

    @rule(number=PICKS, index=INDICES, node=st.integers(0, 2), times=st.sampled_from([1, 1, 2]))
    def source_ready(self, number: int, index: int, node: int, times: int) -> None:
        for _ in range(times):
            self.report(m.SourceReady(self.pick(number), index, node, 1 << 20), "ready", node)

    @rule(number=PICKS, index=INDICES, times=st.sampled_from([1, 1, 2]), rarely=RARELY)
    def source_failed(self, number: int, index: int, times: int, rarely: bool) -> None:
        for _ in range(times if rarely else 1):
            self.report(m.SourceFailed(self.pick(number), index, "gone"), "failed", 0)

    def report(self, message: m.SourceReady | m.SourceFailed, what: str, node: int) -> None:
        op = self.operations.get(message.operation)
        if op is None:
            assert self.step(message) == []
            return
        if what == "ready" and node not in self.living:
            if message.index in op.replay()[0]:  # others hold it, too
                assert self.step(message) == []
                return
            what = "failed"
        op.report(what, message.index, node)
        self.check_operation(message.operation, self.step(message))

    @rule(number=PICKS, late=LATE, node=st.integers(0, 2), everybody=st.booleans())
    def complete(self, number: int, late: int, node: int, everybody: bool) -> None:
        operation = self.pick(number)
        op = self.operations.get(operation)
        for one in sorted(op.unfinished) if op is not None and everybody else [node]:
            epoch = max(0, (0 if op is None else op.epoch) - late)
            sends = self.step(m.StripesComplete(operation, epoch, one))
            if op is None or op.members is None or epoch != op.epoch:
                assert sends == []
                return
            op.unfinished.discard(one)
            self.check_commit(operation, sends)

    def check_commit(self, operation: int, sends: list[tuple[int, m.ManagerToNode]]) -> None:
        """Everybody who has the plan and who asked is told, once all have reported."""
        op = self.operations[operation]
        if op.unfinished or op.members is None:
            assert sends == []
            return
        # A next life of a lost host has its number, and nothing of what that one was sent.
        at = tuple(node for node in op.destinations if node not in op.lost or op.kind == "alltoall")
        commit = m.Commit(operation, op.epoch, tuple(sorted(op.members)), at)
        told = (op.told | {op.node}) & set(self.living)
        assert sorted(sends, key=str) == sorted(((n, commit) for n in told), key=str)
        del self.operations[operation]

    @rule(number=PICKS, late=LATE, vanished=st.sets(INDICES, max_size=2))
    def execution_failed(self, number: int, late: int, vanished: set[int]) -> None:
        operation = self.pick(number)
        op = self.operations.get(operation)
        epoch = max(0, (0 if op is None else op.epoch) - late)
        named = tuple(sorted(vanished))
        sends = self.step(m.ExecutionFailed(operation, epoch, 0, "why", named))
        if op is None or op.members is None or epoch != op.epoch:
            assert sends == []
        elif not vanished.intersection(op.members):
            assert sends[0] == (op.node, m.OperationFailed(operation, "value", "why"))
            self.check_forgotten(op, sends[1:])
            del self.operations[operation]
        else:
            for index in sorted(vanished.intersection(op.members)):
                op.report("gone", index)
            op.members = None
            self.check_operation(operation, sends)

    @rule(number=PICKS, rarely=RARELY)
    def drop(self, number: int, rarely: bool) -> None:
        if not rarely:
            return
        operation = self.pick(number)
        op = self.operations.pop(operation, None)
        sends = self.step(m.OperationDropped(operation))
        if op is None:
            assert sends == []
            return
        assert (op.node, m.Forget(operation)) in sends
        self.check_forgotten(op, [send for send in sends if send[0] != op.node])

    def check_forgotten(self, op: NaiveOperation, sends: list[tuple[int, m.ManagerToNode]]) -> None:
        """All others who had a plan are told to let go."""
        assert all(isinstance(message, m.Forget) for _, message in sends)
        others = (op.told - {op.node}) & set(self.living)
        assert sorted(node for node, _ in sends) == sorted(others)

    def end_operations(
        self, node: int, sends: list[tuple[int, m.ManagerToNode]]
    ) -> list[tuple[int, m.ManagerToNode]]:
        for operation, op in list(self.operations.items()):
            mine = [send for send in sends if getattr(send[1], "operation", None) == operation]
            sends = [send for send in sends if send not in mine]
            op.told.discard(node)  # its next life, if it has begun, has been told nothing
            self.lose_from(operation, op, node, mine)
        return sends

    def lose_from(
        self,
        operation: int,
        op: NaiveOperation,
        node: int,
        sends: list[tuple[int, m.ManagerToNode]],
    ) -> None:
        """What the death of a node means to one operation."""
        if op.node == node:
            self.check_forgotten(op, sends)
            del self.operations[operation]
            return
        op.lose(node)
        destinations = op.destinations or op.to
        if node in destinations and (op.kind in BOUND or op.lost.issuperset(destinations)):
            ((to, message),) = sends[:1]
            assert to == op.node
            assert isinstance(message, m.OperationFailed)
            assert message.error == "lost"
            self.check_forgotten(op, sends[1:])
            del self.operations[operation]
        elif op.members is None:
            self.check_operation(operation, sends)
        elif node in op.gives:
            op.members = None
            self.check_operation(operation, sends)
        else:
            op.unfinished.discard(node)
            self.check_commit(operation, sends)

    @rule(seconds=st.sampled_from([0.0, 0.5, 1.0, 5.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        due = [
            (op.deadline_at, i)
            for i, op in self.operations.items()
            if not op.passed and op.deadline_at is not None and op.deadline_at <= self.now
        ]
        assert (self.wake_at is not None and self.wake_at <= self.now) == bool(due)
        sends = self.see(self.planner.tick(self.now))
        for _, operation in sorted(due):
            self.operations[operation].passed = True
            mine = [send for send in sends if getattr(send[1], "operation", None) == operation]
            self.check_operation(operation, mine)
            sends = [send for send in sends if send not in mine]
        assert sends == []

    def check_operation(self, operation: int, sends: list[tuple[int, m.ManagerToNode]]) -> None:
        """The plan is what the model decides; each contributor once, only ready ones."""
        op = self.operations[operation]
        decision = "wait" if op.members is not None else op.decide()
        folds = op.kind in FOLDING
        if decision == "wait":
            assert sends == []
            return
        if decision == "fail":
            (node, message), *others = sends
            assert node == op.node
            assert isinstance(message, m.OperationFailed)
            assert message.error == ("reduce" if folds else "source")
            assert message.cause_index == op.cause()
            self.check_forgotten(op, others)
            del self.operations[operation]
            return
        chosen = op.chosen()
        plans = [send for send in sends if isinstance(send[1], m.ExecuteReduce)]
        if not plans and sends and isinstance(sends[0][1], m.OperationFailed):
            assert op.to  # all of them dead by now
            assert not set(op.to) & set(self.living)
            self.check_forgotten(op, sends[1:])
            del self.operations[operation]
            return
        if not plans:
            # Everybody holds already what they would be sent.
            assert not folds
            op.members, op.unfinished = chosen, set()  # whatever a plan of before had them do
            if op.destinations and op.to:
                all_to_all = op.kind == "alltoall"
                op.plan_for(tuple(n for n in op.to if all_to_all or n in self.living))
            self.check_commit(operation, sends)
            return
        self.check_plan(operation, op, chosen, plans)
        self.check_forgotten_by(op, [send for send in sends if send not in plans])
        plan = plans[0][1]
        assert isinstance(plan, m.ExecuteReduce)
        op.told = {node for node, _ in plans}

    def check_forgotten_by(
        self, op: NaiveOperation, sends: list[tuple[int, m.ManagerToNode]]
    ) -> None:
        """Who is no part of the new plan lets go of the old one; not so who asked."""
        assert all(isinstance(message, m.Forget) for _, message in sends)
        assert op.node not in [node for node, _ in sends]

    def check_plan(
        self,
        operation: int,
        op: NaiveOperation,
        chosen: list[int],
        plans: list[tuple[int, m.ManagerToNode]],
    ) -> None:
        holders, _ = op.replay()
        plan = plans[0][1]
        assert isinstance(plan, m.ExecuteReduce)
        assert all(message == plan for _, message in plans)
        op.members, op.epoch = chosen, op.epoch + 1
        assert (plan.epoch, plan.members) == (op.epoch, tuple(sorted(set(chosen))))
        assert list(plan.order) == (op.in_order(chosen) if op.reproducible else chosen)
        assert plan.rule == ("fold" if op.reproducible else "any")
        # Nobody gives what it does not hold, and everybody named is alive and told.
        for index, holder in zip(plan.members, plan.holders, strict=True):
            assert holder in holders[index]
            assert holder in self.living
        owners = {stripe.owner for stripe in plan.stripes}
        assert {*plan.holders, *owners} <= set(self.living)
        wanted = {*plan.holders, *owners, *plan.destinations} & set(self.living)
        assert sorted(node for node, _ in plans) == sorted(wanted)
        op.plan_for(plan.destinations)
        op.unfinished = {*plan.destinations, *owners} & set(self.living)
        op.gives = {*plan.holders, *owners}
        if plan.shape != "stripes":
            op.gives |= set(plan.destinations)
        check_edges(plan)

    # ---- what always holds

    @invariant()
    def nothing_is_left_of_finished_operations(self) -> None:
        reductions = self.planner.reductions
        assert set(reductions.operations) == set(self.operations)
        waiting = sorted(
            (op.deadline_at, i)
            for i, op in self.operations.items()
            if op.deadline_at is not None and not op.passed
        )
        assert reductions._deadlines == waiting

    @invariant()
    def members_are_ready_and_fixed(self) -> None:
        for operation, op in self.planner.reductions.operations.items():
            model = self.operations[operation]
            assert op.state is (
                OperationState.WAITING if model.members is None else OperationState.EXECUTING
            )
            ready, failed = model.replay()
            assert {index: set(source.holders) for index, source in op.ready.items()} == ready
            assert list(op.ready) == list(ready)
            assert op.failed == set(failed)
            if op.groups is not None:
                whole = [group for group in model.groups if set(group).issubset(failed)]
                found = {place for place, group in enumerate(model.groups) if set(group) & {*ready}}
                assert (set(op.groups.ready), op.groups.failed) == (found, len(whole))
            assert op.unfinished == model.unfinished or model.members is None
