"""Plans whose results find no room: what an earlier plan has left gives way."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from hoplite_mp._common import ids
from hoplite_mp._node.execution.plan_runner import MEMORY_POLL_S, PlanRunner
from hoplite_mp._protocol import messages as m
from tests.support.node_plans import PlanNode

ITEMS = 1000
SLOT = 8 * ITEMS
MORE = 400  # more than the head of a result
SOURCES = (0, 2, 3)  # the node of each source
PUT_WAIT_S = 10.0


class Reduction:
    """Node 1 is to have the sum of arrays of two of the nodes 0, 2 and 3. Its store has room for
    what the first plan needs, and for a little more."""

    def __init__(self) -> None:
        self.node = one = PlanNode()
        self.left = 3 * SLOT + 2 * MORE
        self.leased: dict[int, int] = {}  # payload -> bytes
        self.taken: set[int] = set()  # payloads whose bytes others take as soon as they are free
        self.sent: list[Any] = []
        host = one.host
        host.client.write = lambda payload, head, buffers, refs: None
        host.client.give_back = self.give_back
        host.config = SimpleNamespace(put_wait_s=PUT_WAIT_S, small_object_bytes_max=0)
        host.results = SimpleNamespace(client=host.client, config=host.config, lease=self.lease)
        host.send_manager = self.sent.append
        host.store = SimpleNamespace(full_message=lambda: "it is full")
        one.cells.links.trace_events = SimpleNamespace(on=False)  # type: ignore[assignment]
        one.cells.links.wanting = {}
        one.engine.fold = lambda *about: None  # type: ignore[attr-defined]
        nobody: Any = None
        self.plans = PlanRunner(host, one.cells, nobody, nobody)

    def lease(self, nbytes: int) -> int | None:
        if nbytes > self.left:
            return None
        self.left -= nbytes
        payload = 4096 * (1 + len(self.leased))
        self.leased[payload] = nbytes
        return payload

    def give_back(self, payload: int) -> None:
        if payload not in self.taken:
            self.left += self.leased[payload]

    def execute(self, epoch: int, *nodes: int) -> None:
        members = tuple(SOURCES.index(node) for node in nodes)
        plan = m.ExecuteReduce(
            9, epoch, members, members, (m.Stripe(1, 0, m.SHARES),), "fold", "reduce", "sum", 0,
            tuple(ids.pack_id(1000 + node, 7) for node in nodes), nodes, (1,),
            results=(ids.pack_id(1000, 9),), nbytes=SLOT,
            layout=f"shape ({ITEMS},) and dtype <f8".encode(),
        )  # fmt: skip
        self.plans.execute(plan)

    @property
    def slots(self) -> dict[int, int]:
        """Node whose contribution is pulled -> its cell."""
        (execution,) = self.plans.executions.values()
        return {name.node: slot.cell for name, slot in execution.slots.items()}


def test_what_the_next_plan_cannot_use_gives_way_to_its_result() -> None:
    reduction = Reduction()
    reduction.execute(1, 0, 2)
    before = reduction.slots
    assert before.keys() == {0, 2}
    (execution,) = reduction.plans.executions.values()
    reduction.taken.add(execution.blocks[0][0])
    reduction.execute(2, 0, 3)
    assert not reduction.slots  # it waits for room
    reduction.node.loop.pass_time(2 * MEMORY_POLL_S)
    assert reduction.slots.keys() == {0, 3}
    assert reduction.slots[0] == before[0]  # what it can use has stayed
    reduction.node.loop.pass_time(2 * PUT_WAIT_S)
    assert not reduction.sent
