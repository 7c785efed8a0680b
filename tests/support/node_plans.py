"""A node that runs plans over cells whose watermarks the test sets."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from hoplite_mp._common import ids
from hoplite_mp._node.execution.filling import Filling
from hoplite_mp._node.execution.plan_cells import PlanCells
from hoplite_mp._node.execution.plan_state import PlanState
from hoplite_mp._planner.program import program_of
from hoplite_mp._protocol import messages as m
from tests.support.node_ports import ManualLoop

if TYPE_CHECKING:
    from hoplite_mp._node.store.growing_block import Ranges

OBJECT = ids.pack_id(1000, 7)
NBYTES = 100_000


class Engine:
    """Cells whose watermarks are set by the test."""

    def __init__(self) -> None:
        self.made: list[tuple[Any, ...]] = []
        self.come: dict[int, int] = {}

    def cell(self, key: Any, memory: Any, begin: int, nbytes: int, filled: Any) -> int:
        self.made.append((key, begin, nbytes, filled))
        number = len(self.made)
        self.come[number] = nbytes if filled is True else int(filled)
        return number

    def hold(self) -> None:
        """It has no thread."""

    release = hold

    def together(self, cells: Any, vote: Any = None) -> None:
        """Each cell of the test is filled by itself."""

    def watermark(self, cell: int) -> int:
        return self.come[cell]

    def advance(self, cell: int, come: int) -> None:
        self.come[cell] = come


class PlanNode:
    """Node 1 of several, as far as cells need one; it is told how they fare."""

    def __init__(self) -> None:
        self.loop = ManualLoop()
        self.engine = Engine()
        self.pulled: list[tuple[Any, ...]] = []
        self.closed: list[int] = []
        self.failures: list[tuple[int, str]] = []
        self.host: Any = SimpleNamespace(
            config=None,
            client=SimpleNamespace(
                number=1, memory=lambda payload, nbytes: memoryview(bytearray(nbytes))
            ),
            loop=self.loop,
            remote_objects=SimpleNamespace(remote_objects={}),
            send_manager=None,
            roster=None,
            store=None,
            imports=None,
            results=None,
        )
        self.host.results = SimpleNamespace(client=self.host.client, lease=lambda nbytes: 3)
        links: Any = SimpleNamespace(
            engine=self.engine,
            trace_events=SimpleNamespace(on=False),
            close=lambda cell, engine_buffer, **_: self.closed.append(cell),
            moved=lambda near: (0, 0),
            flows=dict,
            pull=lambda *about: self.pulled.append(about[:3]),
            peers=SimpleNamespace(by_number={0: None, 2: None}),
        )
        self.cells = PlanCells(self.host, links)
        self.cells.when_filled = self.filled
        nobody: Any = None
        self.filling = Filling(self.host, self.cells, nobody, nobody, nobody)

    def execution(self, plan: Any) -> PlanState:
        owner: Any = self
        return PlanState(plan, program_of(plan, 1), owner, 0)

    def filled(self, execution: PlanState, cell: int) -> None:
        raise NotImplementedError

    def parent_failed(self, execution: PlanState, node: int, reason: str) -> None:
        self.failures.append((node, reason))

    def arrived(self, execution: PlanState) -> Ranges | None:
        plan = execution.copied
        return execution.arrived(plan.object, self.engine.watermark) if execution.missing else None


def copy_plan(operation: int, rule: str = "stripes") -> m.Distribute:
    stripes = (m.Stripe(0, 0, m.SHARES),)
    receivers = (1,) if rule == "stripes" else (1, 2)
    return m.Distribute(operation, OBJECT, 5, NBYTES, (0,), receivers, stripes, rule)
