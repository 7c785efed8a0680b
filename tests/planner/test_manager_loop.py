"""The loop around the planner, over real socket pairs and under a clock of the test."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
from typing import TYPE_CHECKING

import msgspec
import pytest

from hoplite_mp._manager.loop import JOIN_WAIT_S, ManagerLoop
from hoplite_mp._manager.main import main
from hoplite_mp._planner.manager_recovery import OWN_S
from hoplite_mp._planner.planner_core import Planner
from hoplite_mp._protocol import messages as m
from hoplite_mp._protocol.codec import encode, node_decoder
from hoplite_mp._protocol.membership import NodeReturned, ReportComplete
from hoplite_mp._transport.stream import TcpStream
from tests.support.messages import MEMBER

if TYPE_CHECKING:
    from collections.abc import Iterator

ID = bytes(16)


class Node:
    """The other end of a manager's connection."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.sock.settimeout(10)
        self.decoder = node_decoder()

    def say(self, *messages: m.AnyMessage) -> None:
        self.sock.sendall(b"".join(map(encode, messages)))

    def hear(self) -> list[m.ManagerToNode]:
        """What is said next, but for who is there."""
        heard: list[m.ManagerToNode] = []
        while not heard:
            said = self.decoder.feed(self.sock.recv(1 << 20))
            heard = [one for one in said if type(one) not in (m.NodeAdmitted, m.MembersChanged)]
        return heard


class Stage:
    """A loop whose clock stands still until the test moves it."""

    def __init__(self, outgoing_bytes_max: int = 1 << 20) -> None:
        self.now = 0.0
        self.loop = ManagerLoop(Planner(), lambda: self.now, outgoing_bytes_max)
        self.nodes: list[Node] = []

    def connect(self) -> Node:
        ours, theirs = socket.socketpair()
        self.loop.add(theirs)
        self.nodes.append(Node(ours))
        return self.nodes[-1]

    def call(self) -> Node:
        """A node of another host."""
        ours, theirs = socket.socketpair()
        self.loop.serve(TcpStream(theirs, 1 << 20), is_local=False)
        self.nodes.append(Node(ours))
        return self.nodes[-1]

    def close(self) -> None:
        for node in self.nodes:
            node.sock.close()
        self.loop.run()


@pytest.fixture
def stage() -> Iterator[Stage]:
    stage = Stage()
    yield stage
    stage.close()


def test_plan_is_sent_to_its_nodes(stage: Stage) -> None:
    node = stage.connect()
    node.say(m.NodeJoined(70, 1, 2), m.ReduceRequested(7, 0, 1, (ID,), "sum", 1, ready=(0,)))
    stage.loop.turn()
    (plan,) = node.hear()
    assert isinstance(plan, m.ExecuteReduce)
    node.say(m.StripesComplete(7, 1, 0))
    stage.loop.turn()
    assert node.hear() == [m.Commit(7, 1, (0,), (0,))]


def test_node_of_the_managers_host_gets_the_first_number(stage: Stage) -> None:
    """Whoever may decide is counted by its number: a host that calls while `up` is still beginning
    must not get it."""
    own = stage.connect()
    other = stage.call()
    other.say(m.NodeJoined(71, 1, 2))
    stage.loop.turn()
    own.say(m.NodeJoined(70, 1, 2))
    stage.loop.turn()
    told = [node.decoder.feed(node.sock.recv(1 << 20)) for node in (own, other)]
    numbers = [one.node for said in told for one in said if isinstance(one, m.NodeAdmitted)]
    assert numbers == [0, 1]


def test_newcomers_wait_for_the_managers_node_with_a_timeout(stage: Stage) -> None:
    """It stood still when the manager was started again, and says nothing. Newcomers hear beats
    meanwhile, so they take nobody for dead."""
    assert JOIN_WAIT_S > OWN_S  # a node that is only late is waited for
    own, early, late = stage.connect(), stage.call(), stage.call()
    for node, host_id in (early, 71), (late, 72):
        node.say(m.NodeJoined(host_id, 1, 2))
        stage.loop.turn()
        stage.now += JOIN_WAIT_S / 2
    assert stage.loop._timeout() == 0
    stage.loop.turn()
    assert early.sock.recv(1) == b""
    assert stage.loop._timeout() == JOIN_WAIT_S / 2
    own.say(m.NodeJoined(70, 1, 2))
    stage.loop.turn()
    admitted = late.decoder.feed(late.sock.recv(1 << 20))
    assert [type(one) for one in admitted] == [m.NodeAdmitted]
    assert stage.loop._timeout() is None


def test_deadline_ends_the_poll(stage: Stage) -> None:
    node = stage.connect()
    request = m.ReduceRequested(7, 0, 1, (ID, ID[:15] + b"1"), "sum", 2, 5.0, ready=(1,))
    node.say(m.NodeJoined(70, 1, 2), request)
    stage.loop.turn()
    stage.now = 5.0  # the wait for sockets is now one of 0 seconds
    stage.loop.turn()
    (plan,) = node.hear()
    assert isinstance(plan, m.ExecuteReduce)
    assert plan.members == (1,)


def test_end_of_a_connection_is_announced_to_others(stage: Stage) -> None:
    first, second = stage.connect(), stage.connect()
    first.say(m.NodeJoined(70, 1, 2), m.GroupJoinRequested(1, 0, 1, 1, "g", 2, 0))
    stage.loop.turn()
    second.say(m.NodeJoined(71, 1, 2), m.GroupJoinRequested(1, 1, 1, 1, "g", 2, 1))
    stage.loop.turn()
    assert [type(message) for message in second.hear()] == [m.GroupMembers, m.GroupJoined]
    first.hear()
    second.sock.close()
    stage.loop.turn()
    (members,) = first.hear()
    assert isinstance(members, m.GroupMembers)
    assert members.alive == 0b01


def test_messages_before_a_broken_connection_count(stage: Stage) -> None:
    """It breaks while it is written to, and what has come over it is not read yet."""
    first, second = stage.connect(), stage.connect()
    first.say(m.NodeJoined(70, 1, 2), m.GroupJoinRequested(1, 0, 1, 1, "g", 2, 0))
    stage.loop.turn()
    second.say(m.NodeJoined(71, 1, 2))
    stage.loop.turn()
    second.say(m.GroupJoinRequested(1, 1, 1, 1, "g", 2, 1))
    second.sock.close()
    stage.loop._routes[1].write(b"anything")
    stage.loop._flush()
    assert m.GroupJoined in map(type, first.hear())
    assert stage.loop._planner.membership.nodes == (0,)


def test_peer_lost_report_never_excludes_the_managers_host() -> None:
    """A standby that leads may have any number."""
    planner = Planner(own=2)
    for host_id in (70, 71, 72):
        planner.step(m.NodeJoined(host_id, 1, 2), 0.0)
    sends = planner.step(m.PeerLost(1, 2), 0.0).sends
    assert [node for node, one in sends if isinstance(one, m.DeclaredDead)] == [1]


def test_peer_lost_report_excludes_the_later_node(stage: Stage) -> None:
    """The later one hears so, and its connection ends; who reports is not asked."""
    nodes = []
    for host_id in (70, 71, 72):
        nodes.append(stage.connect())
        nodes[-1].say(m.NodeJoined(host_id, 1, 2))
        stage.loop.turn()
    nodes[1].say(m.PeerLost(1, 2))
    stage.loop.turn()
    assert nodes[2].hear() == [m.DeclaredDead(0.0)]
    assert nodes[2].sock.recv(1) == b""
    nodes[2].sock.close()
    for node in nodes[:2]:
        said = node.decoder.feed(node.sock.recv(1 << 20))
        assert said[-1] == m.MembersChanged((), (2,))
    nodes[1].say(m.PeerLost(1, 2), m.ReduceRequested(7, 1, 1, (ID,), "sum", 1, ready=(0,)))
    stage.loop.turn()
    assert isinstance(nodes[1].hear()[0], m.ExecuteReduce)


def test_late_returning_node_is_declared_dead(stage: Stage) -> None:
    """Its connection had broken, and the others have gone on without it."""
    first, second = stage.connect(), stage.connect()
    first.say(m.NodeJoined(70, 1, 2))
    stage.loop.turn()
    member = msgspec.structs.replace(MEMBER, node=1, incarnation=0)
    second.say(
        NodeReturned(1, 0, 2, (member,)), m.FetchRequested(1, ID, 64, (0,)), ReportComplete(1)
    )
    stage.loop.turn()
    assert second.hear() == [m.DeclaredDead(0.0)]
    assert second.sock.recv(1) == b""


@pytest.mark.parametrize(
    "data",
    [b"GET / HTTP/1.1\r\n\r\n", encode(m.SourceReady(1, 0, 0)), encode(m.Forget(1))],
    ids=["noise", "before NodeJoined", "wrong direction"],
)
def test_connection_violating_the_protocol_is_closed(stage: Stage, data: bytes) -> None:
    good, bad = stage.connect(), stage.connect()
    good.say(m.NodeJoined(70, 1, 2))
    stage.loop.turn()
    bad.sock.sendall(data)
    stage.loop.turn()
    assert bad.sock.recv(1) == b""
    good.say(m.GroupJoinRequested(1, 0, 1, 1, "g", 1))
    stage.loop.turn()
    assert len(good.hear()) == 2


def test_large_output_is_sent_in_pieces(stage: Stage) -> None:
    node = stage.connect()
    node.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    name = "n" * 1000
    node.say(m.NodeJoined(70, 1, 2), m.GroupJoinRequested(0, 0, 1, 1, name, 1))
    heard: list[m.ManagerToNode] = []
    # The same call again and again has the same answer, of a thousand bytes each.
    for _ in range(10):
        node.say(*[m.GroupJoinRequested(0, 0, 1, 1, name, 1)] * 50)
        stage.loop.turn()
    while len(heard) < 502:
        heard += node.hear()
        if len(heard) < 502:
            stage.loop.turn()
    assert len(heard) == 502


def test_node_that_does_not_read_is_declared_dead() -> None:
    stage = Stage(outgoing_bytes_max=1000)
    node = stage.connect()
    node.say(m.NodeJoined(70, 1, 2))
    ask = m.GroupJoinRequested(0, 0, 1, 1, "n" * 1000, 1)

    def ask_for_ever() -> None:
        for _ in range(10_000):
            node.say(ask)
            stage.loop.turn()

    with pytest.raises((BrokenPipeError, ConnectionResetError)):
        ask_for_ever()
    stage.close()


def test_main_serves_until_the_connection_closes() -> None:
    ours, theirs = socket.socketpair()
    thread = threading.Thread(target=main, args=(theirs.detach(),))
    thread.start()
    node = Node(ours)
    request = m.ReduceRequested(7, 0, 1, (ID, ID[:15] + b"1"), "sum", 2, 0.01)
    node.say(m.NodeJoined(70, 1, 2), request, m.SourceReady(7, 0, 0))
    (plan,) = node.hear()  # comes by the real clock
    assert isinstance(plan, m.ExecuteReduce)
    assert plan.members == (0,)
    ours.close()
    thread.join(10)
    assert not thread.is_alive()


def test_manager_imports_neither_numpy_nor_asyncio() -> None:
    code = (
        "import sys, types; package = types.ModuleType('hoplite_mp');"
        "package.__path__ = ['hoplite_mp']; sys.modules['hoplite_mp'] = package;"
        "import hoplite_mp._manager.main;"
        "sys.exit(bool({'numpy', 'asyncio', 'multiprocessing'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
