"""The manager's loop in a cluster with a standby: it decides only while it hears half of the hosts.

Real socket pairs, a clock of the test, no network: nodes here are as near or as far as they say.
"""

from __future__ import annotations

import contextlib
import inspect
import socket
import sys
from typing import TYPE_CHECKING, Any

import pytest

from hoplite_mp._manager.heartbeats import Heartbeats
from hoplite_mp._manager.leadership import JOIN_PATIENCE_S, Leadership
from hoplite_mp._manager.loop import JOIN_WAIT_S, Link, ManagerLoop
from hoplite_mp._planner.manager_recovery import RESTORE_S
from hoplite_mp._planner.planner_core import Planner
from hoplite_mp._planner.terms import OUT_S, Candidate, lease_s
from hoplite_mp._protocol import membership as r
from hoplite_mp._protocol import messages as m
from hoplite_mp._protocol import terms as t
from hoplite_mp._protocol.codec import BEAT, Decoder, encode
from hoplite_mp._protocol.local import GIVEN_UP

if TYPE_CHECKING:
    from collections.abc import Iterator

ID = bytes(16)
SILENCE_S, BEAT_S = 1.5, 0.2
LEASE_S = lease_s(SILENCE_S)
LISTS = (t.Hosts(1 << 32 | 1, (0, 1, 2)),)


class Node:
    """The other end of a manager's connection."""

    def __init__(self, stage: Stage, number: int, sock: socket.socket) -> None:
        self.stage, self.number, self.sock = stage, number, sock
        self.sock.settimeout(5)
        self.decoder = Decoder(m.ManagerToNode | t.TermsToNode | t.PromoteResponse)
        self.version = 0

    def say(self, *messages: Any) -> None:
        self.sock.sendall(b"".join(map(encode, messages)))
        self.stage.loop.turn()

    def hear(self, follow: bool = False) -> list[Any]:
        """All that has been said, without who came and went; follow: the manager's words are
        answered."""
        self.sock.setblocking(False)
        said: list[Any] = []
        with contextlib.suppress(BlockingIOError):
            said = list(self.decoder.feed(self.sock.recv(1 << 20)))
        self.sock.settimeout(5)
        for one in said:
            if isinstance(one, t.LeaderHeartbeat) and follow:
                self.version = max([self.version, *(hosts.version for hosts in one.lists)])
                self.say(t.LeaderHeartbeatAck(self.number, one.term, one.sent_us, self.version))
        quiet = (m.NodeAdmitted, m.MembersChanged, t.StandbyAnnounced)
        return [one for one in said if type(one) not in quiet]


class Stage:
    """A loop whose clock stands still until the test moves it."""

    def __init__(self, candidate: Candidate | None = None, again: bool = False) -> None:
        self.now = 10.0
        own = 0 if candidate is None else candidate.own
        self.loop = ManagerLoop(
            Planner(again=again or candidate is not None, own=own), lambda: self.now
        )
        self.leadership: Leadership[Link] = Leadership(
            ("10.0.0.2:7001",),
            own=own,
            lease_s=LEASE_S,
            write=lambda link, message: link.write(encode(message)),
            again=again,
            candidate=candidate,
        )
        self.loop.set_leadership(self.leadership)
        self.loop._heartbeats = Heartbeats(BEAT_S, 100.0)
        self.nodes: list[Node] = []

    def connect(self, near: bool = False, role: str = "node") -> Node:
        ours, theirs = socket.socketpair()
        before = set(self.loop._links)
        self.loop.add(theirs)
        (link,) = self.loop._links.keys() - before
        link.is_local, link.role = near, role
        self.nodes.append(Node(self, len(self.nodes), ours))
        return self.nodes[-1]

    def join(self, near: bool = False) -> Node:
        node = self.connect(near)
        node.say(m.NodeJoined(70 + node.number, 0, 1, stays=True))
        return node

    def beat(self, *answering: Node) -> None:
        """Beats, which these answer."""
        for _ in range(2):
            self.now += BEAT_S
            self.loop.turn()
            for node in answering:
                node.hear(follow=True)

    def wait(self, seconds: float) -> bool:
        """Nobody answers for so long; is it over then?"""
        end = self.now + seconds
        over = False
        while self.now < end:
            self.now += BEAT_S / 2
            self.loop.turn()
            over = self.leadership.must_step_down(self.now)
        return over

    def close(self) -> None:
        for node in self.nodes:
            node.sock.close()
        for link in self.loop._links:
            link.stream.close()
        self.loop._selector.close()


@pytest.fixture
def stage() -> Iterator[Stage]:
    stage = Stage()
    yield stage
    stage.close()


def asks(number: int, node: int) -> m.ReduceRequested:
    return m.ReduceRequested(number, node, 1, (ID,), "sum", 1, ready=(0,))


def plans(said: list[Any]) -> list[int]:
    return [one.operation for one in said if isinstance(one, m.ExecuteReduce)]


def test_messages_during_a_pause_are_processed_later(stage: Stage) -> None:
    first, second, third = stage.join(near=True), stage.join(), stage.join()
    stage.beat(first, second, third)
    first.say(asks(7, 0))
    assert plans(first.hear(follow=True)) == [7]
    stage.wait(LEASE_S + BEAT_S)
    first.say(asks(8, 0))
    assert plans(first.hear()) == []
    stage.beat(second)
    assert plans(first.hear()) == [8]


def test_manager_without_majority_declares_no_death(stage: Stage) -> None:
    first, second, third = stage.join(near=True), stage.join(), stage.join()
    stage.beat(first, second, third)
    stage.wait(LEASE_S + BEAT_S)
    third.sock.close()
    stage.loop.turn()
    second.sock.recv(1 << 20)
    stage.loop.turn()
    assert [*stage.leadership.held] == [m.NodeLost(2, 0)]
    stage.beat(second)
    assert [*stage.leadership.held] == []
    assert not stage.loop._planner.membership.is_living(2)


def test_newcomers_during_a_pause_wait(stage: Stage) -> None:
    stage.join(near=True)
    second, third = stage.join(), stage.join()
    stage.beat(second, third)
    stage.wait(LEASE_S + BEAT_S)
    stage.join()
    assert not stage.loop._planner.membership.is_living(3)
    stage.beat(second)
    assert stage.loop._planner.membership.is_living(3)


def test_waiting_newcomers_get_heartbeats(stage: Stage) -> None:
    """Otherwise they would take the manager for dead, and call another one."""
    stage.join(near=True)
    second, third = stage.join(), stage.join()
    stage.beat(second, third)
    stage.wait(LEASE_S + BEAT_S)
    fourth = stage.join()
    stage.wait(3 * BEAT_S)
    assert BEAT in fourth.sock.recv(1 << 20)
    fourth.sock.close()
    stage.wait(BEAT_S)
    stage.beat(second)
    assert not stage.loop._planner.membership.is_living(3)


def test_silent_waiting_newcomer_is_dropped() -> None:
    """By a manager that was started again, in a cluster without a standby."""
    with contextlib.closing(Stage(again=True)) as stage:
        stage.loop._leadership = None
        stage.join()
        assert stage.loop._heartbeats is not None
        ((link, _),) = stage.loop._newcomers
        stage.loop._heartbeats._silences[link].heard_at -= 200
        stage.now += BEAT_S
        stage.loop.turn()
        assert link not in stage.loop._links


def test_newcomers_of_a_long_paused_manager_are_refused(stage: Stage) -> None:
    """They call again, as those do that the listener refuses."""
    first, second, third = stage.join(near=True), stage.join(), stage.join()
    stage.beat(first, second, third)
    stage.wait(LEASE_S + BEAT_S)
    before = set(stage.loop._links)
    stage.join()
    (link,) = set(stage.loop._links) - before
    stage.wait(JOIN_PATIENCE_S - 2 * BEAT_S)
    assert link in stage.loop._links
    stage.wait(4 * BEAT_S)
    assert link not in stage.loop._links
    assert not stage.loop._newcomers


def test_failing_newcomer_does_not_block_others(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage.join(near=True)
    second, third = stage.join(), stage.join()
    stage.beat(second, third)
    stage.wait(LEASE_S + BEAT_S)
    stage.join(), stage.join()

    def fail(*_: Any) -> None:
        raise LookupError("a mistake in the planner")

    with monkeypatch.context() as patch:
        patch.setattr(stage.loop._planner, "step", fail)
        with pytest.raises(LookupError):
            stage.beat(second)
    stage.beat(second)
    assert stage.loop._planner.membership.is_living(3)
    assert not stage.loop._newcomers


def test_restarted_manager_without_its_own_node_times_out() -> None:
    """It was started again, and does not know yet which term it is in."""
    with contextlib.closing(Stage(again=True)) as stage:
        stage.connect(near=True)
        stage.join()
        ((link, _),) = stage.loop._newcomers
        stage.wait(JOIN_WAIT_S - BEAT_S)
        assert link in stage.loop._links
        stage.wait(2 * BEAT_S)
        assert link not in stage.loop._links


def test_many_newcomers_are_admitted_at_once(stage: Stage) -> None:
    stage.join(near=True)
    second, third = stage.join(), stage.join()
    stage.beat(second, third)
    stage.wait(LEASE_S + BEAT_S)
    many = [stage.join() for _ in range(80)]
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(len(inspect.stack()) + 120)
    try:
        stage.beat(second)
    finally:
        sys.setrecursionlimit(limit)
    assert all(stage.loop._planner.membership.is_living(one.number) for one in many)


def test_manager_without_majority_steps_down_after_a_timeout(stage: Stage) -> None:
    stage.join(near=True)
    stage.join(), stage.join()
    assert not stage.wait(LEASE_S + OUT_S - 4 * BEAT_S)
    assert stage.wait(8 * BEAT_S)
    assert stage.loop.run() == GIVEN_UP


def test_manager_steps_down_for_a_later_term_only(stage: Stage) -> None:
    first, other = stage.join(near=True), stage.connect()
    other.say(t.Superseded(1))
    assert not stage.leadership.must_step_down(stage.now)
    other.say(t.Superseded(2))
    assert stage.loop.run() == GIVEN_UP
    assert not any(isinstance(one, m.ClusterEnded) for one in first.hear())


def test_late_ack_counts_from_its_heartbeat(stage: Stage) -> None:
    first, second, third = stage.join(near=True), stage.join(), stage.join()
    stage.beat(first, second, third)
    stage.now += BEAT_S
    stage.loop.turn()
    stage.now += LEASE_S
    second.hear(follow=True)
    stage.loop.turn()
    assert not stage.leadership.decides(stage.now)


@pytest.fixture
def standby() -> Iterator[Stage]:
    stage = Stage(Candidate(1, 9))
    yield stage
    stage.close()


def report(number: int) -> list[Any]:
    members = tuple(m.Member(node, 0, 70 + node, 1, stays=True) for node in range(3))
    returned = r.NodeReturned(number, 0, 3, members)
    return [returned, r.ReportComplete(number)]


def test_standby_with_a_majority_of_votes_leads(standby: Stage) -> None:
    """It begins nothing before, and does not wait for the node of the manager before it."""
    knowledge = t.Knowledge(1, 0, LISTS)
    one, two = standby.connect(), standby.connect()
    one.say(t.VoterState(1, knowledge))
    assert one.hear() == []
    two.say(t.VoterState(2, knowledge))
    (asked,) = one.hear()
    assert asked == t.VoteRequest(2, 9)
    one.say(t.VoteGranted(1, 2, knowledge), *report(1)[:1], asks(7, 1), *report(1)[1:])
    assert one.hear() == []
    two.say(t.VoteGranted(2, 2, knowledge), *report(2))
    standby.loop.turn()
    assert plans(one.hear()) == [7]
    assert standby.loop._planner.membership.nodes == (1, 2)


@pytest.mark.parametrize(
    ("role", "message"),
    [
        ("tool", m.NodeJoined(99, 0, 1)),
        ("tool", t.Superseded(5)),
        ("voter", m.NodeJoined(99, 0, 1)),
        ("voter", t.Promote()),
        ("node", t.Promote()),
    ],
)
def test_connection_role_allows_only_its_messages(stage: Stage, role: str, message: Any) -> None:
    stage.join(near=True)
    other = stage.connect(role=role)
    other.say(message)
    assert other.sock.recv(1) == b""
    assert not stage.leadership.superseded


def test_departed_nodes_do_not_count(standby: Stage) -> None:
    knowledge = t.Knowledge(1, 0, LISTS)
    one, two = standby.connect(), standby.connect()
    two.say(t.VoterState(2, knowledge))
    two.sock.close()
    standby.loop.turn()
    one.say(t.VoterState(1, knowledge))
    assert one.hear() == []


def promoted(stage: Stage, anyway: bool = False) -> list[Any]:
    human = stage.connect(role="tool")
    human.say(t.Promote(anyway))
    stage.loop.turn()
    return human.hear()


def test_vote_ends_with_its_connection(standby: Stage) -> None:
    """A node whose standby did not win begins to look for a manager again, over a new connection.
    The standby counted its former vote, asked nobody, and led a cluster without nodes."""
    knowledge = t.Knowledge(1, 0, LISTS)
    voted = t.Knowledge(2, 0, LISTS)
    one, two = standby.connect(), standby.connect()
    one.say(t.VoterState(1, knowledge))
    two.say(t.VoterState(2, knowledge))
    assert one.hear() == [t.VoteRequest(2, 9)]
    one.say(t.VoteGranted(1, 2, knowledge), *report(1))
    again = standby.connect()
    again.say(t.VoterState(1, voted))
    assert again.hear() == []
    one.sock.close()
    standby.loop.turn()
    (asked,) = again.hear()
    two.say(t.VoteGranted(2, asked.term, knowledge), *report(2))
    standby.loop.turn()
    assert not standby.leadership.leads
    again.say(t.VoteGranted(1, asked.term, voted), *report(1), asks(7, 1))
    standby.loop.turn()
    assert standby.leadership.leads
    assert plans(again.hear()) == [7]


def test_promotion_without_a_majority_needs_force_and_a_vote(standby: Stage) -> None:
    (answer,) = promoted(standby)
    assert "in contact with the manager" in answer.reason
    one = standby.connect()
    one.say(t.VoterState(1, t.Knowledge(1, 0, LISTS)))
    (answer,) = promoted(standby)
    assert not answer.leads
    assert "only 1 of 3 hosts are reachable" in answer.reason
    assert promoted(standby, anyway=True) == []  # until the vote is there
    (asked,) = one.hear()
    one.say(t.VoteGranted(1, asked.term, t.Knowledge(1, 0, LISTS)), *report(1))
    standby.loop.turn()
    assert standby.leadership.decides(standby.now + 100)
    (answer,) = promoted(standby)
    assert answer == t.PromoteResponse(True, "it is already the manager of the cluster")


def test_promotion_without_a_known_host_is_refused(standby: Stage) -> None:
    """The manager was gone within its first beat."""
    standby.connect().say(t.VoterState(1, t.Knowledge(1, 0, ())))
    (answer,) = promoted(standby, anyway=True)
    assert not answer.leads
    assert "restart it" in answer.reason


def test_promotion_ends_with_its_requester(standby: Stage) -> None:
    """Else the next one who misses the manager for a moment would make it lead alone."""
    one = standby.connect()
    knowledge = t.Knowledge(1, 0, LISTS)
    one.say(t.VoterState(1, knowledge))
    human = standby.connect(role="tool")
    human.say(t.Promote(True))
    standby.loop.turn()
    (asked,) = one.hear()
    human.sock.close()
    standby.loop.turn()
    one.say(t.VoteGranted(1, asked.term, knowledge))
    standby.loop.turn()
    assert not standby.leadership.decides(standby.now)
    assert not standby.leadership.leads


def test_promotion_fails_if_the_own_node_reaches_the_manager(standby: Stage) -> None:
    one = standby.connect()
    one.say(t.VoterState(1, t.Knowledge(1, 0, LISTS)))
    human = standby.connect(role="tool")
    human.say(t.Promote(True))
    standby.loop.turn()
    one.sock.close()
    standby.loop.turn()
    (answer,) = human.hear()
    assert not answer.leads
    assert "in contact with the manager" in answer.reason


def test_busy_hosts_with_heartbeats_are_awaited(stage: Stage) -> None:
    """Nothing is decided meanwhile. Who says nothing at all is not waited for."""
    nodes = [stage.join(near=True), stage.join(), stage.join()]
    stage.beat(*nodes)
    for _ in range(3):
        assert not stage.wait(OUT_S / 2)
        nodes[1].sock.sendall(BEAT)
    assert not stage.leadership.decides(stage.now)
    stage.beat(nodes[1])
    assert stage.leadership.decides(stage.now)
    assert stage.wait(LEASE_S + OUT_S + BEAT_S)


def test_voter_declared_dead_is_informed() -> None:
    """The manager of before had lost that node, as the standby's own knows, so the standby decides
    as soon as its own has reported, before the other's report is looked at."""
    stage = Stage(candidate=Candidate(2, 77))
    own, other = stage.connect(), stage.connect()
    own.number, other.number = 2, 1
    members = tuple(m.Member(node, 0, 70 + node, 1, stays=True) for node in range(3))
    known = t.Knowledge(1, 0, LISTS)
    for node in (own, other):
        node.say(t.VoterState(node.number, known))
    stage.loop.turn()
    asked = next(one for one in own.hear() if isinstance(one, t.VoteRequest))
    own.say(
        t.VoteGranted(2, asked.term, known),
        r.NodeReturned(2, 0, 3, (members[0], members[2])),
        r.ReportComplete(2),
    )
    other.say(
        t.VoteGranted(1, asked.term, known), r.NodeReturned(1, 0, 3, members), r.ReportComplete(1)
    )
    assert stage.loop._planner.restoring is None
    assert m.DeclaredDead(0.0) in other.hear()
    assert stage.loop._planner.membership.nodes == (2,)
    stage.close()


def test_node_returning_during_a_pause_is_a_member() -> None:
    """A manager that was started again stands still while the last nodes report: what they have
    said comes before the end of its patience, when it may decide again."""
    stage = Stage(again=True)
    hosts = (t.Hosts(1 << 32 | 1, (0, 1, 2, 3)),)
    members = tuple(m.Member(node, 0, 70 + node, 1, stays=True) for node in range(4))
    nodes = [stage.connect(near=node == 0) for node in range(4)]
    nodes[0].say(r.NodeReturned(0, 0, 4, members), t.VoterState(0, t.Knowledge(1, 0, hosts)))
    nodes[0].say(r.ReportComplete(0))
    nodes[1].say(r.NodeReturned(1, 0, 4, members), r.ReportComplete(1))
    stage.beat(nodes[1])
    assert stage.leadership.decides(stage.now)
    stage.now += max(LEASE_S, RESTORE_S) + BEAT_S
    for node in (2, 3):
        words = (r.NodeReturned(node, 0, 4, members), r.ReportComplete(node))
        nodes[node].sock.sendall(b"".join(map(encode, words)))
    stage.loop.turn()
    assert not stage.leadership.decides(stage.now)
    stage.beat(*nodes[1:])
    assert stage.loop._planner.restoring is None
    assert stage.loop._planner.membership.nodes == (0, 1, 2, 3)
    stage.close()
