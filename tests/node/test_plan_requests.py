"""A process asks its node for the plans of an object, and the node asks the manager."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hoplite_mp._node.questions import PATIENCE_S
from hoplite_mp._protocol.local import Explain
from hoplite_mp._protocol.messages import PlansReported, PlansRequested
from tests.support.messages import PLAN

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.support.node_harness import NodeHarness


def test_manager_replies_reach_the_requesting_processes(
    make_node: Callable[..., NodeHarness],
) -> None:
    node = make_node()
    process = node.process()
    hold = process.put(b"x")
    numbers = [node.ask(process.slot, Explain(hold.oid)) for _ in range(2)]
    asked = [one for one in node.reports if isinstance(one, PlansRequested)]
    assert [one.object for one in asked] == [node.parts.imports.public(hold.oid)] * 2
    assert node.replies() == []
    for one, plans in ((asked[1], (PLAN,)), (asked[0], ()), (asked[0], (PLAN,))):
        node.from_manager(PlansReported(one.request, plans))
    found = [(reply.number, len(reply.value)) for _, reply in node.replies()]
    assert found == [(numbers[1], 1), (numbers[0], 0)]
    node.loop.pass_time(2 * PATIENCE_S)
    assert node.replies() == []


def test_request_without_a_manager_reply_returns_none(
    make_node: Callable[..., NodeHarness],
) -> None:
    node = make_node()
    process = node.process()
    number = node.ask(process.slot, Explain(process.put(b"x").oid))
    node.loop.pass_time(PATIENCE_S)
    ((slot, reply),) = node.replies()
    assert (slot, reply.number, reply.value) == (process.slot, number, None)
    assert not node.parts.plan_requests.open
