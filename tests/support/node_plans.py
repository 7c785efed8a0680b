"""A node that runs plans over cells whose watermarks the test sets."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hoplite_mp._common import ids
from hoplite_mp._common.object_states import NODE_SLOT
from hoplite_mp._engine import CLOSED, FILLED, PULL_FAILED
from hoplite_mp._protocol import messages as m
from tests.support.node_harness import NodeHarness, member
from tests.support.transport import tcp_pair

if TYPE_CHECKING:
    from hoplite_mp._node.execution.plan_state import CarriedCopy, Carryover, PlanState
    from hoplite_mp._node.store.growing_block import Ranges
    from hoplite_mp._protocol.group_calls import Plan

OTHERS = (0, 2, 3)
OWNER = member(0)  # of OBJECT
OBJECT = ids.pack_id(OWNER.host_id, 7)
NBYTES = 100_000


class PlanNode(NodeHarness):
    """Node 1 of four. It has a data connection to each of the others, and that link has the number
    of its node."""

    def __init__(self, **config: Any) -> None:
        super().__init__(map(member, OTHERS), number=1, host_id=1001, **config)
        self.plan_runner, self.replicas = self.cluster.plan_runner, self.cluster.replicas
        self.cells = self.plan_runner.cells
        self.remote_objects = self.parts.remote_objects
        for number in OTHERS:
            ours, theirs = tcp_pair()
            theirs.close()
            self.connections.accept(1000 + number, ours)

    def called(self, name: str) -> list[tuple[Any, ...]]:
        """The arguments of each call of the engine by that name."""
        return [about for one, *about in map(tuple, self.engine.calls) if one == name]

    @property
    def made(self) -> list[tuple[Any, ...]]:
        """Key, begin, bytes and what is filled, of each cell."""
        return [(key, *rest) for _, key, _, *rest in self.called("cell")]

    @property
    def pulled(self) -> list[tuple[Any, ...]]:
        """Cell, node and key of each pull."""
        return [tuple(about) for about in self.called("pull")]

    @property
    def closed(self) -> list[int]:
        return [cell for (cell,) in self.called("close")]

    def engine_reports(self, *events: tuple[Any, ...]) -> None:
        self.engine.found += events
        self.loop.watched[self.engine.fileno()]()

    def fill(self, cell: int, nbytes: int) -> None:
        """All bytes of that cell have arrived."""
        self.engine.come[cell] = nbytes
        self.engine_reports((FILLED, cell))

    def fail(self, cell: int, reason: str) -> None:
        """The pull of that cell has failed."""
        self.engine_reports((PULL_FAILED, cell, reason))

    def release_closed(self) -> None:
        """The engine writes no closed cell any more."""
        self.engine_reports(*((CLOSED, cell) for cell in self.cluster.links.closing))

    def lease(self, nbytes: int) -> int:
        payload = self.store.lease(nbytes, NODE_SLOT)
        assert payload is not None
        return payload

    def set_space(self, has_space: bool) -> None:
        """Whether the store has space for another object."""
        for owner, name in ((self.store, "lease"), (self.parts.results, "pin")):
            if has_space:
                delattr(owner, name)
            else:
                setattr(owner, name, lambda *about: None)
        self.store.full_message = lambda *about: "it is full"  # type: ignore[method-assign]


class RecordedOwner:
    """See `PlanOwner`. `begun`: what an earlier plan has left of OBJECT."""

    def __init__(self, node: PlanNode, begun: CarriedCopy | None = None) -> None:
        self.node = node
        self.begun = begun
        self.failures: list[tuple[int, str]] = []
        self.left: list[Any] = []  # the ranges of OBJECT that were here when the execution ended

    def submit(self, plan: Plan) -> PlanState:
        self.node.plan_runner.submit(plan, self)  # type: ignore[arg-type]
        (execution,) = self.node.plan_runner.executions.values()
        return execution

    def prepare(self, execution: PlanState) -> bool:
        if self.begun is not None:
            execution.carryover.copies[OBJECT] = self.begun
        return True

    def arrived(self, execution: PlanState) -> Ranges | None:
        watermark = self.node.engine.watermark
        return execution.arrived(OBJECT, watermark) if execution.missing else None

    def parent_failed(self, execution: PlanState, node: int, reason: str) -> None:
        self.failures.append((node, reason))

    def completed(self, execution: PlanState) -> None: ...

    def failed(self, *about: Any) -> None:
        raise AssertionError(about)

    def ended(self, execution: PlanState, carryover: Carryover) -> None:
        self.left += [copy.arrived.found for copy in carryover.copies.values()]


def copy_plan(operation: int, rule: str = "stripes") -> m.Distribute:
    stripes = (m.Stripe(0, 0, m.SHARES),)
    receivers = (1,) if rule == "stripes" else (1, 2)
    return m.Distribute(operation, OBJECT, 5, NBYTES, (0,), receivers, stripes, rule)


def gather_plan(*objects: bytes, **about: Any) -> m.ExecuteReduce:
    """Node 1 is to have these objects of 8 bytes of node 0."""
    members = tuple(range(len(objects)))
    fields: dict[str, Any] = {
        "operation": 9, "epoch": 1, "members": members, "order": members, "stripes": (),
        "rule": "any", "kind": "gather", "op": "sum", "requester": 0, "objects": objects,
        "holders": (0,) * len(objects), "destinations": (1,), "sizes": (8,) * len(objects), **about,
    }  # fmt: skip
    return m.ExecuteReduce(**fields)
