"""Ways over other nodes: who is asked for one, and what is done when that one is of no help."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from hoplite_mp._node.peers.relays import ANSWER_S, ASKED_MAX
from hoplite_mp._protocol.peers import RelayOpened, RelayRequest
from tests.support.node_harness import member

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.support.node_harness import NodeHarness

REMOTE = member(9).host_id  # of the node that cannot be reached


@pytest.fixture
def node(make_node: Callable[..., NodeHarness]) -> NodeHarness:
    """It knows nine others."""
    return make_node([member(number) for number in range(1, 10)])


@pytest.fixture
def found() -> list[list[Any]]:
    """The ways that were found, each a list of endpoints."""
    return []


def find(node: NodeHarness, found: list[list[Any]]) -> None:
    node.cluster.peers.relays.find(member(9), found.append)


def way(node: NodeHarness) -> list[Any]:
    return node.cluster.peers.relays.route(REMOTE)


def answer(node: NodeHarness, port: int) -> int:
    """Of the one that was asked last."""
    host_id, asked = node.sent[-1]
    assert asked == RelayRequest(asked.number, REMOTE)
    node.receive(host_id, RelayOpened(asked.number, port))
    return host_id


def test_second_queried_node_has_a_relay(node: NodeHarness, found: list[list[Any]]) -> None:
    find(node, found)
    find(node, found)  # somebody else waits for the same way
    assert [host_id for host_id, _ in node.sent] == [1001]
    answer(node, 0)
    assert answer(node, 7001) == 1002
    assert found[0] == found[1] == way(node)
    (end,) = way(node)
    assert end.sockaddr[:2] == ("10.0.0.2", 7001)
    node.lose(2)
    assert way(node) == []


def test_search_without_a_relay_returns_nothing(node: NodeHarness, found: list[list[Any]]) -> None:
    find(node, found)
    assert [answer(node, 0) for _ in range(ASKED_MAX)] == [1001, 1002, 1003]
    assert found == [[]]


def test_silent_or_lost_node_is_skipped(node: NodeHarness, found: list[list[Any]]) -> None:
    find(node, found)
    _, late = node.sent[-1]
    node.loop.pass_time(ANSWER_S)
    assert node.sent[-1][0] == 1002
    node.receive(1001, RelayOpened(late.number, 7001))
    assert not found
    node.lose(2)
    assert answer(node, 7003) == 1003
    assert len(found[0]) == 1


def test_search_ends_when_its_target_is_lost(node: NodeHarness, found: list[list[Any]]) -> None:
    find(node, found)
    node.lose(9)
    assert found == [[]]
    answer(node, 7001)
    assert way(node) == []
    assert len(found) == 1


def test_relay_port_is_shared(node: NodeHarness) -> None:
    for asker, number in ((1001, 5), (1002, 6)):
        node.receive(asker, RelayRequest(number, REMOTE))
    node.loop.call_all()
    node.receive(1003, RelayRequest(7, REMOTE))
    assert node.sent == [(1000 + n, RelayOpened(4 + n, 7000)) for n in (1, 2, 3)]
    node.lose(9)
    assert node.connections.lent == []


def test_node_without_a_connection_offers_no_relay(
    node: NodeHarness, found: list[list[Any]]
) -> None:
    node.connections.reaches = False
    node.receive(1002, RelayRequest(5, REMOTE))
    node.loop.call_all()
    assert node.sent == [(1002, RelayOpened(5, 0))]
    find(node, found)
    node.receive(1002, RelayRequest(6, REMOTE))
    assert node.sent[-1] == (1002, RelayOpened(6, 0))
