"""Collectives on refs: watches the sources, executes the planner's plans, seals the results.

The planner decides which sources take part. This file reports ready sources, runs plans that
involve only this node in a thread without the GIL, and seals the results at the commit. A cluster
of one host uses the same protocol (epoch, stripes complete, commit) as a larger one; its reduction
tree is a single vertex.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from hoplite_mp import _serialize
from hoplite_mp._common import ids
from hoplite_mp._common.object_states import CANCELLED, STATE, UNWANTED, VALUED
from hoplite_mp._node.collectives.chunked_reduce import ChunkedReduce, NotInChunks
from hoplite_mp._node.execution.folding import result_head
from hoplite_mp._node.execution.local_reduce import LocalReduce, PlanError, SourcesGone, prepare
from hoplite_mp._node.objects.remote_objects import MEMORY_POLL_S, can_fold, layout_of
from hoplite_mp._planner.program import participants, waits_for
from hoplite_mp._protocol.fields import FOLDING
from hoplite_mp._protocol.membership import ReportedReduce
from hoplite_mp._protocol.messages import (
    Commit,
    ExecuteReduce,
    ExecutionFailed,
    Forget,
    NodeToManager,
    OperationDropped,
    OperationFailed,
    ReduceRequested,
    SourceFailed,
    SourceReady,
    StripesComplete,
)
from hoplite_mp._protocol.peers import ReplicaStored
from hoplite_mp.errors import ObjectLostError, ReduceError, StoreFullError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from hoplite_mp._node.dispatch import ManagerHandler
    from hoplite_mp._node.execution.plan_runner import PlanRunner
    from hoplite_mp._node.objects.context import HostContext
    from hoplite_mp._protocol.local import Collective
    from hoplite_mp._protocol.membership import Report

__all__ = ["Operations", "finish", "placed"]


# Kinds of errors that report too few available sources. Lost sources may be reconstructed.
_SOURCE_ERRORS = ("reduce", "source", "lost")
# The number of bits for an operation's counter. The bits above it are the requesting node's number.
NUMBER_BITS = 40


@dataclass(slots=True)
class RunningOperation:
    """One collective in progress."""

    number: int
    ask: Collective
    holds: list[Any]
    waiting: dict[int, list[int]]  # source id -> its indices, for sources that are not done yet
    parked: list[int]
    # A finished execution. Until an execution has finished, only its thread refers to it.
    execution: LocalReduce | None = None
    chunked_reduce: ChunkedReduce | None = None  # used if the sources do not fit in memory together
    epoch: int = 0
    space_deadline: float = 0.0
    try_again_at: float = 0.0  # time of the next attempt to allocate (see `_no_memory`)
    plan: ExecuteReduce | None = None
    executed: ExecuteReduce | None = None  # the latest plan that only this node executes
    layout: bytes = b""  # dtype and shape of a source; all sources must agree
    slot: int = 0  # the caller's client slot
    asked_ns: int = 0
    planned_ns: int = 0  # time at which the latest plan arrived; 0: no plan has arrived
    waits_for: tuple[int, ...] = ()  # nodes whose reports the plan requires


class Operations:
    """The collectives that this node has requested, and its share of other nodes' collectives."""

    def __init__(self, host: HostContext, threads: int) -> None:
        self.config = host.config
        self.results = host.results
        self.store = host.store
        self.remote_objects = host.remote_objects
        self.imports = host.imports
        self.client = host.client
        self.tasks = host.tasks
        self.send = host.send_manager
        self.loop = host.loop
        self.threads = threads
        self.plan_runner: PlanRunner | None = None  # None in a cluster of one host
        self.trace_events = host.trace_events
        self.operations: dict[int, RunningOperation] = {}
        self._next = 1

    # -- the request ---------------------------------------------------------------------------

    def asked(self, ask: Collective, slot: int) -> None:
        """Handles a client's request, which makes this node responsible for the results."""
        # If no result can be taken, the caller was interrupted and has cancelled them.
        if any([self.tasks.take(oid) for oid in ask.results]):
            self.begin(ask, slot)

    def begin(self, ask: Collective, slot: int) -> None:
        """Begins an operation whose results the node has claimed. Holds sources and results until
        the end of the operation."""
        number, self._next = self.client.number << NUMBER_BITS | self._next, self._next + 1
        holds = [self.client.hold(oid) for oid in dict.fromkeys((*ask.sources, *ask.results))]
        waiting: dict[int, list[int]] = {}
        for index, oid in enumerate(ask.sources):
            if not self.tasks.done(oid) or self.remote_objects.needs_making(oid):
                waiting.setdefault(oid, []).append(index)
        operation = RunningOperation(number, ask, holds, waiting, self.tasks.park(list(waiting)))
        operation.slot, operation.asked_ns = slot, self.loop.now_ns()
        self.operations[number] = operation
        for message in self._request(operation):
            self.send(message)
        self.poll()

    def report(self) -> Iterator[NodeToManager | Report]:
        """Yields this node's operations for a new manager."""
        for operation in self.operations.values():
            yield from self._request(operation)
            if operation.executed is not None:
                reported = operation.execution is not None
                yield ReportedReduce(self.client.number, operation.executed, reported)

    def _request(self, operation: RunningOperation) -> Iterator[NodeToManager]:
        """Yields the messages that request the operation and report the state of its sources."""
        ask = operation.ask
        ready: list[int] = []
        failed: list[int] = []
        lost = {
            oid
            for oid in ask.sources
            if oid not in operation.waiting and self.remote_objects.needs_making(oid)
        }
        for index, oid in enumerate(ask.sources):
            if oid in lost:
                operation.waiting.setdefault(oid, []).append(index)
            elif oid not in operation.waiting:
                (ready if self.client.state(oid) in VALUED else failed).append(index)
        details = [self._about(operation, oid) for oid in (ask.sources[index] for index in ready)]
        in_lan = self.plan_runner is not None
        host_id = self.client.host_id
        yield ReduceRequested(
            operation.number,
            self.client.number,
            operation.slot,
            tuple(self.imports.public(oid) for oid in ask.sources),
            ask.op,
            ask.num,
            self._deadline_s(operation),
            ask.reproducible,
            tuple(ids.pack_id(host_id, oid) for oid in ask.results),
            ask.kind,
            tuple(ready),
            tuple(ask.to),
            tuple(nbytes for nbytes, _, _ in details) if in_lan else (),
            tuple(layout for _, layout, _ in details) if in_lan else (),
            tuple(holders for _, _, holders in details) if in_lan else (),
            tuple(map(tuple, ask.one_of)),
        )
        for index in failed:
            yield SourceFailed(operation.number, index, self._reason(ask.sources[index]))

    def _deadline_s(self, operation: RunningOperation) -> float | None:
        """The number of seconds until the operation's deadline, or None if it has none."""
        whole_s = operation.ask.deadline_s
        if whole_s is None:
            return None
        return max(0.0, whole_s - (self.loop.now_ns() - operation.asked_ns) / 1e9)

    def _about(self, operation: RunningOperation, oid: int) -> tuple[int, bytes, tuple[int, ...]]:
        """Returns (bytes, layout, numbers of the holders) of a ready source. In a cluster of one
        host the first two are placeholders."""
        if self.plan_runner is None:
            return 0, b"", (self.client.number,)
        remote = self.remote_objects.by_oid.get(oid)
        nbytes = self.client.inspect(oid)["size"] if remote is None else remote.nbytes
        holders = (self.client.number,) if remote is None else remote.holders
        layout = layout_of(self.results, self.remote_objects, oid)
        ask = operation.ask
        operation.layout = operation.layout or layout
        if ask.kind in FOLDING and not can_fold(ask.op, layout):
            # The source is fetched to this node, where NumPy can fold it.
            holders = (self.client.number,)
        return nbytes, layout, holders

    def _reason(self, oid: int) -> str:
        state = self.client.state(oid)
        if state == STATE["FAILED"]:
            return "its task failed"
        if state in CANCELLED:
            return "it was cancelled"
        return "it was deleted" if state == STATE["DELETED"] else "it is gone"

    def poll(self) -> None:
        """Reports sources that are done, and operations whose results have no holder left."""
        for operation in list(self.operations.values()):
            waiting = operation.waiting
            done = [
                oid
                for oid in waiting
                if self.tasks.done(oid) and not self.remote_objects.needs_making(oid)
            ]
            for oid in done:
                ready = self.client.state(oid) in VALUED
                for index in operation.waiting.pop(oid):
                    if ready:
                        nbytes, layout, holders = self._about(operation, oid)
                        node, others = holders[0], tuple(holders[1:])
                        self.send(
                            SourceReady(operation.number, index, node, nbytes, layout, others)
                        )
                    else:
                        self.send(SourceFailed(operation.number, index, self._reason(oid)))
            if all(self.client.state(oid) in UNWANTED for oid in operation.ask.results):
                # The results were deleted during the operation.
                self.send(OperationDropped(operation.number))

    def refuse(self, results: list[int], why: str) -> None:
        """Fails the results of an invalid request."""
        for oid in results:
            self.tasks.take(oid)
            if self.client.state(oid) == STATE["CLAIMED"]:
                self.results.store_error(oid, ValueError(f"the node refused the request: {why}"))

    # -- the plan ------------------------------------------------------------------------------

    @property
    def manager_handlers(self) -> dict[type, ManagerHandler]:
        """Handlers of messages from the manager about operations."""
        return {
            ExecuteReduce: self._planned,
            Commit: self.commit,
            OperationFailed: self._failed_there,
            Forget: self._forgotten,
        }

    def _failed_there(self, message: OperationFailed) -> None:
        if self.plan_runner is not None:
            self.plan_runner.drop(message.operation)
        self.fail(message)

    def _forgotten(self, message: Forget) -> None:
        if self.plan_runner is not None:
            self.plan_runner.drop(message.operation)
        operation = self.operations.get(message.operation)
        if operation is not None:
            for oid in operation.ask.results:
                self.tasks.settle(oid)
            self._note(operation, "dropped")
            self.end(operation)

    def _planned(self, plan: ExecuteReduce) -> None:
        operation = self.operations.get(plan.operation)
        if operation is not None:
            if operation.plan is not None:
                self._drop_chunked(operation)
            else:  # a thread may still be folding a chunk; `_ran` will drop its result
                operation.chunked_reduce = None
            operation.plan = operation.executed = None
            self._note(operation, "planned again" if operation.planned_ns else "planned")
            operation.planned_ns = self.loop.now_ns()
            operation.waits_for = tuple(sorted(waits_for(plan)))
            operation.epoch = plan.epoch
            if operation.execution is not None:  # the result of an earlier epoch's plan
                operation.execution.drop()
                operation.execution = None
        if self.plan_runner is not None:
            if operation is None or set(participants(plan)) != {self.client.number}:
                self.plan_runner.execute(plan)  # reuses the bytes that earlier plans have received
                return
            self.plan_runner.drop(plan.operation)
        if operation is not None:
            operation.plan = operation.executed = plan
            operation.space_deadline = self.loop.now() + self.config.put_wait_s
            self.execute(operation)

    def execute(self, operation: RunningOperation) -> None:
        """Pins the participating sources and folds them in a thread. If memory is short,
        `execute_again` retries later."""
        plan = operation.plan
        assert plan is not None
        execution: LocalReduce | None = None
        try:
            if operation.chunked_reduce is None:
                execution = prepare(self.results, operation.ask, plan)
            if execution is None:
                execution = self._chunk(operation, plan)
        except SourcesGone as gone:
            self._failed(operation, str(gone), gone.indices)
            return
        except PlanError as error:
            self._failed(operation, str(error), ())
            return
        except NotInChunks as error:
            self._no_memory(operation, str(error))
            return
        if execution is None:
            self._no_memory(
                operation, "it and one source do not fit in the store beside the objects in use"
            )
            return
        operation.plan = None
        self.loop.run_in_thread(
            functools.partial(self._run, execution),
            functools.partial(self._ran, operation.number, plan.epoch, execution),
        )

    def _chunk(self, operation: RunningOperation, plan: ExecuteReduce) -> LocalReduce | None:
        """Pins as many of the next participating sources as fit. Returns None if none fits now."""
        chunked_reduce = operation.chunked_reduce
        if chunked_reduce is None:
            chunked_reduce = ChunkedReduce(self.results, operation.ask, plan)
        try:
            if not chunked_reduce.pin():
                return None
        except (PlanError, SourcesGone):
            chunked_reduce.drop()  # it may already have leased blocks for its first chunk
            operation.chunked_reduce = None
            raise
        operation.chunked_reduce = chunked_reduce
        operation.space_deadline = self.loop.now() + self.config.put_wait_s
        return chunked_reduce

    def _no_memory(self, operation: RunningOperation, why: str) -> None:
        """Delays the next attempt, or fails the operation after its deadline. The delay prevents a
        busy loop, because a failed attempt may spill and restore objects, which wakes processes
        that in turn wake this node."""
        now = self.loop.now()
        operation.try_again_at = now + MEMORY_POLL_S
        if now > operation.space_deadline:
            why = f"{why}; {self.store.full_message()}"
            self._failed(operation, why, (), "full")

    def _drop_chunked(self, operation: RunningOperation) -> None:
        if operation.chunked_reduce is not None:
            operation.chunked_reduce.drop()
            operation.chunked_reduce = None

    def _failed(
        self,
        operation: RunningOperation,
        reason: str,
        sources: tuple[int, ...],
        error: str = "value",
    ) -> None:
        operation.plan = None
        self._drop_chunked(operation)
        self.send(
            ExecutionFailed(
                operation.number, operation.epoch, self.client.number, reason, sources, error
            )
        )

    def _run(self, execution: LocalReduce) -> BaseException | None:
        """Runs in a thread, mostly without the GIL. Returns the exception that was raised, or
        None."""
        try:
            execution.run(self.threads)
        except BaseException as error:
            return error
        return None

    def _ran(
        self, number: int, epoch: int, execution: LocalReduce, failure: BaseException | None
    ) -> None:
        """Handles the end of an execution, or of one of its chunks, in the loop's thread."""
        operation = self.operations.get(number)
        if operation is None or operation.epoch != epoch:
            execution.drop()  # the operation was dropped or planned again in the meantime
        elif failure is None and isinstance(execution, ChunkedReduce) and not execution.done:
            execution.let_go()
            operation.plan = execution.plan  # `execute_again` starts the next chunk
            operation.try_again_at = 0.0
        elif failure is None:
            operation.chunked_reduce = None
            operation.execution = execution
            self.send(StripesComplete(number, epoch, self.client.number))
        else:
            execution.drop()
            self._failed(operation, f"{type(failure).__name__}: {failure}", ())

    def execute_again(self) -> float | None:
        """Retries plans that are waiting for memory. Returns the time of the next retry, or None if
        no plan is waiting."""
        for operation in list(self.operations.values()):
            if operation.plan is not None and self.loop.now() >= operation.try_again_at:
                self.execute(operation)
        waiting = (
            operation.try_again_at
            for operation in self.operations.values()
            if operation.plan is not None
        )
        return min(waiting, default=None)

    # -- the end -------------------------------------------------------------------------------

    def _note(
        self, operation: RunningOperation, outcome: str, members: tuple[int, ...] = ()
    ) -> None:
        """Adds an event to the trace. The first event is the wait for sources. Each plan then has
        one event, which lasts until the next plan or the end of the operation."""
        if self.trace_events.on:
            ask = operation.ask
            self.trace_events.add(
                "collective",
                f"{ask.kind} waits for sources" if outcome == "planned" else ask.kind,
                operation.planned_ns or operation.asked_ns,
                operation=operation.number,
                kind=ask.kind,
                op=ask.op,
                sources=len(ask.sources),
                members=members,
                epoch=operation.epoch,
                outcome=outcome,
            )

    def commit(self, message: Commit) -> None:
        blocks = {} if self.plan_runner is None else self.plan_runner.commit(message)
        operation = self.operations.get(message.operation)
        if operation is None:
            return
        execution = operation.execution
        if execution is not None:
            for oid, (payload, nbytes) in zip(operation.ask.results, execution.take(), strict=True):
                self.results.store_block(oid, payload, nbytes)
        elif operation.ask.kind not in FOLDING:  # the kind only copies, and all copies are complete
            if self.plan_runner is not None:
                placed(self.plan_runner, operation.ask, message)
            for oid in operation.ask.results:
                self.results.store_value(oid, _serialize.encode(None), False)
        else:
            assert self.plan_runner is not None
            finish(self.plan_runner, operation.ask, operation.layout, blocks, message)
        self._note(operation, "committed", message.contributors)
        self.end(operation)

    def fail(self, message: OperationFailed) -> None:
        operation = self.operations.get(message.operation)
        if operation is None:
            return
        if message.error in _SOURCE_ERRORS:
            gone = [operation.ask.sources[index] for index in message.gone[::2]]
            for oid, node in zip(gone, message.gone[1::2], strict=True):
                self.remote_objects.lose_holder(oid, node)
            if self._begin_again(operation, gone):
                return
        for oid in operation.ask.results:
            self.results.store_value(oid, self._error(operation, message), True)
        self._note(operation, "failed")
        self.end(operation)

    def _begin_again(self, operation: RunningOperation, gone: list[int]) -> bool:
        """Requests the operation again if lost sources can be reconstructed or the gone sources
        have other holders. Returns False if neither is the case."""
        ask = operation.ask
        lost = any([self.remote_objects.needs_making(oid) for oid in dict.fromkeys(ask.sources)])
        moved = bool(gone) and all(self.client.state(oid) in VALUED for oid in gone)
        if not lost and not moved:
            return False
        ask = msgspec.structs.replace(ask, deadline_s=self._deadline_s(operation))
        self._note(operation, "begun again")
        self.begin(ask, operation.slot)  # `begin` holds all objects before `end` releases them
        self.end(operation)
        return True

    def _error(self, operation: RunningOperation, message: OperationFailed) -> _serialize.Encoded:
        index = message.cause_index
        source = None
        if index is not None:
            source = self.results.ref(operation.ask.sources[index])
        error: BaseException
        if message.error == "value":
            error = ValueError(message.message)
        elif message.error == "lost":
            error = ObjectLostError(message.message)
        elif message.error == "full":
            error = StoreFullError(f"result of a collective: {message.message}")
        elif message.error == "source" and index is not None:
            raw = self.results.raw_error(operation.ask.sources[index])
            if raw is not None:
                return raw
            error = ObjectLostError(f"source {index}: {message.message}")
        else:
            error = ReduceError(message.message)
            error.source = source  # type: ignore[attr-defined]  # the reader fetches the cause
        return _serialize.encode_error(error, "")

    def end(self, operation: RunningOperation) -> None:
        self.operations.pop(operation.number, None)
        self.tasks.unpark(operation.parked)
        if operation.execution is not None:
            operation.execution.drop()
        if operation.plan is not None:  # no thread is using the pinned sources now
            self._drop_chunked(operation)
        operation.holds.clear()


# The end of a committed collective that this host requested.
#
# The results are blocks in this host's store, or replicas that other nodes keep for later readers.
# The owner of each object is notified immediately of the nodes that have replicas.


def finish(
    plan_runner: PlanRunner,
    ask: Collective,
    layout: bytes,
    blocks: dict[int, tuple[int, int]],
    message: Commit,
) -> None:
    """Completes the results of a fold. blocks: the results on this host, as index -> (payload,
    bytes)."""
    for index, oid in enumerate(ask.results):
        if index in blocks:
            plan_runner.results.store_block(oid, *blocks[index])
            # Each destination of a reduce_scatter has only its own result.
            if ask.kind != "reduce_scatter":
                _report_replicas(plan_runner, plan_runner.imports.public(oid), message.destinations)
            continue
        holders = message.destinations
        if ask.kind == "reduce_scatter":
            holders = (holders[index],)
        _, own, nbytes = result_head(ask.op, layout, len(ask.results), index, message.contributors)
        plan_runner.remote_objects.complete(
            oid, plan_runner.imports.public(oid), nbytes, holders, own
        )


def placed(plan_runner: PlanRunner, ask: Collective, message: Commit) -> None:
    """Reports to the sources' owners which nodes have replicas, after a collective that only
    copied."""
    peers = plan_runner.links.peers.by_number
    others = dict.fromkeys(node for node in message.destinations if node in peers)
    if not others:
        return
    for index in message.contributors:
        at = [*others]
        if ask.kind == "alltoall":
            place = message.destinations[index % len(message.destinations)]
            at = [place] if place in others else []
        _report_replicas(plan_runner, plan_runner.imports.public(ask.sources[index]), at)


def _report_replicas(plan_runner: PlanRunner, object_id: bytes, nodes: Iterable[int]) -> None:
    """Reports to the object's owner that these nodes, excluding this one, keep a replica."""
    peers = plan_runner.links.peers.by_number
    hosts = tuple(peers[node].member.host_id for node in nodes if node in peers)
    if hosts:
        plan_runner.replicas.report(ReplicaStored(object_id, 0, hosts))
