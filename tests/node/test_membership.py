"""The members as the manager has named them, and what a node says of itself to the others."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from hoplite_mp._common.object_states import DRIVER_SLOT
from hoplite_mp._node.manager_link.membership import GONE_SHOWN_S
from hoplite_mp._protocol.local import DepartedNodes
from hoplite_mp._protocol.peers import PeerLeaving, RemoveNode, WorkersReport
from tests.support.node_harness import member

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.support.node_harness import NodeHarness

FIRST, SECOND = member(1).host_id, member(2).host_id


@pytest.fixture
def node(make_node: Callable[..., NodeHarness]) -> NodeHarness:
    return make_node([member(1), member(2, stays=True)], workers=2)


def gone(node: NodeHarness) -> Any:
    return node.answer(DRIVER_SLOT, DepartedNodes()).value


def test_number_of_workers_is_reported_only_when_it_changes(node: NodeHarness) -> None:
    for count, told in ((2, False), (3, True), (3, False), (2, True), (2, False)):
        node.cluster.membership.workers_are(count)
        assert node.taken() == [(one, WorkersReport(count)) for one in (FIRST, SECOND) if told]


def test_leaving_node_does_not_report_its_workers(node: NodeHarness) -> None:
    node.receive(FIRST, RemoveNode())
    node.taken()
    node.cluster.membership.workers_are(5)
    assert not node.taken()


def test_lost_hosts_are_listed_with_their_age(node: NodeHarness) -> None:
    assert gone(node) == []
    node.lose(2)
    node.loop.pass_time(5.0)
    node.lose(1)
    node.lose(1)  # it was not there any more
    node.loop.pass_time(2.5)
    assert gone(node) == [(2, "host2", 7.5, False), (1, "host1", 2.5, False)]
    node.loop.pass_time(GONE_SHOWN_S - 5.0)
    assert gone(node) == [(1, "host1", GONE_SHOWN_S - 2.5, False)]
    node.loop.pass_time(5.0)
    assert gone(node) == []


def test_hosts_that_announced_their_leave_are_listed_as_left(node: NodeHarness) -> None:
    node.receive(SECOND, PeerLeaving())  # it tells the other nodes
    node.lose(2)
    node.lose(1, left=(1,))  # the manager tells them
    assert gone(node) == [(2, "host2", 0.0, True), (1, "host1", 0.0, True)]


def test_short_lived_program_is_not_listed_as_a_lost_host(node: NodeHarness) -> None:
    for number, stays in ((3, False), (4, True)):
        node.join(member(number, 0, stays=stays))
        node.lose(number)
    assert gone(node) == [(4, "host4", 0.0, False)]


def test_program_with_workers_is_listed_as_left(node: NodeHarness) -> None:
    node.join(member(3, 2))
    node.receive(member(3, 2).host_id, PeerLeaving())
    node.lose(3)
    assert gone(node) == [(3, "host3", 0.0, True)]
