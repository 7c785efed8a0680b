"""What can happen to collectives, against `NaiveOperation`."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import invariant, rule

from hoplite_mp.planner.reduce import State
from hoplite_mp.protocol import messages as m
from tests.planner.naive import NaiveOperation
from tests.planner.scenario import letter_id
from tests.planner.walk import INDICES, LATE, NODES, OPERATIONS_MAX, PICKS, RARELY, Walk


class ReduceWalk(Walk):
    """Requests, sources, plans and their ends."""

    @rule(
        node=NODES,
        sources=st.permutations("abcde").map("".join) | st.text("abc", min_size=1, max_size=5),
        num=st.sampled_from([2, 2, 3, 1, 5]),
        deadline_s=st.sampled_from([None, None, 1.0, 2.0, 0.0]),
        gather=RARELY,
        reproducible=st.booleans(),
        ready=st.lists(INDICES, unique=True, max_size=3),
        doubled=RARELY,
    )
    def request(
        self,
        node: int,
        sources: str,
        num: int,
        deadline_s: float | None,
        gather: bool,
        reproducible: bool,
        ready: list[int],
        doubled: bool,
    ) -> None:
        num = min(num, len(sources))
        ready = [index for index in ready if index < len(sources)]
        if doubled and self.operation_ids not in self.operations:
            return
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
            kind="gather" if gather else "reduce",
            ready=tuple(ready),
        )
        if node not in self.living or doubled:
            assert self.step(message) == []
            return
        if len(self.operations) == OPERATIONS_MAX:
            ((_, refused),) = self.step(message)
            assert isinstance(refused, m.OperationFailed)
            assert refused.error == "full"
            return
        at = None if deadline_s is None else self.now + deadline_s
        op = NaiveOperation(node, sources, num, gather, reproducible, at, passed=deadline_s == 0)
        for index in ready:
            op.report("ready", index)
        self.operations[self.operation_ids] = op
        self.check_operation(self.operation_ids, self.step(message))

    @rule(number=PICKS, index=INDICES, times=st.sampled_from([1, 1, 2]))
    def source_ready(self, number: int, index: int, times: int) -> None:
        for _ in range(times):
            self.report(m.SourceReady(self.pick(number), index, 0), "ready")

    @rule(number=PICKS, index=INDICES, times=st.sampled_from([1, 1, 2]))
    def source_failed(self, number: int, index: int, times: int) -> None:
        for _ in range(times):
            self.report(m.SourceFailed(self.pick(number), index, "gone"), "failed")

    def report(self, message: m.SourceReady | m.SourceFailed, what: str) -> None:
        op = self.operations.get(message.operation)
        if op is None:
            assert self.step(message) == []
            return
        op.report(what, message.index)
        self.check_operation(message.operation, self.step(message))

    @rule(number=PICKS, late=LATE)
    def complete(self, number: int, late: int) -> None:
        operation = self.pick(number)
        op = self.operations.get(operation)
        epoch = max(0, (0 if op is None else op.epoch) - late)
        sends = self.step(m.StripesComplete(operation, epoch, 0 if op is None else op.node))
        if op is None or op.members is None or epoch != op.epoch:
            assert sends == []
            return
        assert sends == [(op.node, m.Commit(operation, epoch, tuple(sorted(op.members))))]
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
            assert sends == [(op.node, m.OperationFailed(operation, "value", "why"))]
            del self.operations[operation]
        else:
            for index in sorted(vanished.intersection(op.members)):
                op.report("failed", index)
            op.members = None
            self.check_operation(operation, sends)

    @rule(number=PICKS)
    def drop(self, number: int) -> None:
        operation = self.pick(number)
        op = self.operations.pop(operation, None)
        sends = self.step(m.OperationDropped(operation))
        assert sends == ([] if op is None else [(op.node, m.Forget(operation))])

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
        if decision == "wait":
            assert sends == []
            return
        ((node, message),) = sends
        assert node == op.node
        chosen = op.ready()[: op.num]
        if decision == "fail":
            assert isinstance(message, m.OperationFailed)
            assert message.error == ("source" if op.gather else "reduce")
            assert message.cause_index == op.failed()[0]
            del self.operations[operation]
        elif op.gather:
            assert message == m.Commit(operation, 0, tuple(sorted(chosen)))
            del self.operations[operation]
        else:
            op.members, op.epoch = chosen, op.epoch + 1
            assert isinstance(message, m.ExecuteReduce)
            assert (message.epoch, message.members) == (op.epoch, tuple(sorted(set(chosen))))
            assert list(message.order) == (sorted(chosen) if op.reproducible else chosen)

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
            assert op.state is (State.WAITING if model.members is None else State.EXECUTING)
            assert list(op.ready) == model.ready()
            assert op.failed == set(model.failed())
