"""Joins that come together are announced together, soon, and before anything else."""

from __future__ import annotations

import selectors
import socket
from typing import TYPE_CHECKING, Any

import pytest

from hoplite_mp._manager.loop import ManagerLoop
from hoplite_mp._planner.membership import ANNOUNCE_S, AT_ONCE_MAX
from hoplite_mp._planner.planner_core import Planner
from hoplite_mp._protocol import messages as m
from hoplite_mp._protocol.codec import encode
from hoplite_mp._transport.stream import TcpStream

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

MANY = 1_000
FIRST_HOST = 1_000
AT_ONCE = 11  # joins: the first eleven cost 55 messages


class Nodes:
    """A planner, and what each node knows by its messages."""

    def __init__(self) -> None:
        self.planner = Planner()
        self.knows: dict[int, set[int]] = {}
        self.messages = 0
        self.wake_at: float | None = None

    def take(self, plan: Any) -> list[tuple[int, Any]]:
        self.wake_at = plan.wake_at
        for node, message in plan.sends:
            self.messages += 1
            if isinstance(message, m.NodeAdmitted):
                self.knows[node] = {member.node for member in message.members}
            elif isinstance(message, m.MembersChanged):
                self.knows[node] -= set(message.removed)
                self.knows[node] |= {member.node for member in message.added}
        return list(plan.sends)

    def join(self, count: int, now: float = 0.0, life: int = 1) -> None:
        first = FIRST_HOST + len(self.knows)
        for host_id in range(first, first + count):
            self.take(self.planner.step(m.NodeJoined(host_id, life, 1), now))

    def all_known(self) -> bool:
        return all(known == set(self.planner.membership.nodes) for known in self.knows.values())


def test_many_joins_at_once_cost_few_messages() -> None:
    nodes = Nodes()
    nodes.join(MANY)
    assert not nodes.all_known()
    assert nodes.wake_at == ANNOUNCE_S
    nodes.take(nodes.planner.tick(ANNOUNCE_S))
    assert nodes.all_known()
    assert nodes.wake_at is None
    assert nodes.messages <= 2 * MANY + AT_ONCE_MAX


def test_joins_over_seconds_are_each_announced_in_time() -> None:
    nodes = Nodes()
    for n in range(MANY):
        now = n * 0.004
        if nodes.wake_at is not None and nodes.wake_at <= now:
            nodes.take(nodes.planner.tick(now))
        assert nodes.wake_at is None or nodes.wake_at <= now + ANNOUNCE_S
        nodes.join(1, now)
    nodes.take(nodes.planner.tick(now + ANNOUNCE_S))
    assert nodes.all_known()
    assert nodes.messages <= 20 * MANY


def test_few_joins_at_once_are_announced_without_delay() -> None:
    nodes = Nodes()
    for _ in range(AT_ONCE):
        nodes.join(1)
        assert nodes.all_known()
        assert nodes.wake_at is None


def test_join_after_a_quiet_time_is_announced_at_once_in_a_large_cluster() -> None:
    nodes = Nodes()
    nodes.join(MANY)
    nodes.take(nodes.planner.tick(ANNOUNCE_S))
    nodes.join(1, now=3 * ANNOUNCE_S)
    assert nodes.all_known()


def test_joins_are_announced_before_any_other_message() -> None:
    nodes = Nodes()
    nodes.join(3 * AT_ONCE)
    assert not nodes.all_known()
    request = m.GroupJoinRequested(0, 0, 1, 1, "g", 1, 0)
    sends = nodes.take(nodes.planner.step(request, 0.0))
    assert nodes.knows[0] == set(nodes.planner.membership.nodes)
    about_joins, *others = [type(message) for node, message in sends if node == 0]
    assert about_joins is m.MembersChanged
    assert others
    assert m.MembersChanged not in others
    nodes.take(nodes.planner.tick(ANNOUNCE_S))
    assert nodes.all_known()


def test_node_lost_before_its_announcement_is_never_announced() -> None:
    nodes = Nodes()
    nodes.join(3 * AT_ONCE)
    nodes.knows.pop(3 * AT_ONCE - 1)
    nodes.take(nodes.planner.step(m.NodeLost(3 * AT_ONCE - 1, 1), 0.0))
    nodes.take(nodes.planner.tick(ANNOUNCE_S))
    assert nodes.all_known()
    assert nodes.wake_at is None


def test_host_returning_during_a_delay_is_announced_to_all() -> None:
    nodes = Nodes()
    nodes.join(3 * AT_ONCE)
    nodes.take(nodes.planner.step(m.NodeJoined(FIRST_HOST + 1, 2, 1), 0.0))
    nodes.take(nodes.planner.tick(ANNOUNCE_S))
    assert nodes.all_known()
    assert nodes.planner.membership.incarnation(1) == 2


class CountedStream(TcpStream):
    """Counts the visits of the loop."""

    visits = 0

    def flush(self) -> bool:
        CountedStream.visits += 1
        return super().flush()


@pytest.fixture
def pairs() -> Iterator[list[tuple[socket.socket, socket.socket]]]:
    made = [socket.socketpair() for _ in range(100)]
    yield made
    for one in made:
        for end in one:
            end.close()


def test_turn_visits_only_links_with_something_to_do(
    pairs: Iterable[tuple[socket.socket, socket.socket]],
) -> None:
    loop = ManagerLoop(Planner(), lambda: 0.0, selector=selectors.DefaultSelector())
    links = [loop.serve(CountedStream(near)) for near, _ in pairs]
    CountedStream.visits = 0
    far = [end for _, end in pairs]
    far[7].sendall(encode(m.NodeJoined(FIRST_HOST, 1, 1)))
    loop.turn()
    assert CountedStream.visits == 1
    assert far[7].recv(1 << 16)
    CountedStream.visits = 0
    for end in far[:3]:
        end.close()
    links[50].write(b"x")
    links[51].break_off()
    loop.turn()
    assert CountedStream.visits == 2, "the others' ends were read"
    assert len(loop._links) == len(links) - 4


def test_duplicate_join_during_a_delay_is_answered_by_node_admitted_first() -> None:
    nodes = Nodes()
    nodes.join(AT_ONCE + 3)
    node = AT_ONCE  # two others joined after it, and it was not told
    plan = nodes.planner.step(m.NodeJoined(FIRST_HOST + node, 1, 1), 0.0)
    kinds = [type(message) for to, message in nodes.take(plan) if to == node]
    assert kinds == [m.NodeAdmitted]
    assert nodes.knows[node] == set(nodes.planner.membership.nodes)
    nodes.take(nodes.planner.tick(ANNOUNCE_S))
    assert nodes.all_known()


def test_node_declared_dead_during_a_delay_gets_no_joins() -> None:
    nodes = Nodes()
    nodes.join(AT_ONCE + 3)
    node = AT_ONCE + 1
    sends = nodes.take(nodes.planner.step(m.PeerLost(0, node), 0.0))
    assert [type(message) for to, message in sends if to == node] == [m.DeclaredDead]
