"""A node that follows its manager, loses it, and votes: real code, the test's clock, no network."""

from __future__ import annotations

import contextlib
import socket
from typing import TYPE_CHECKING, Any, get_args
from unittest.mock import Mock

import pytest

from hoplite_mp._node.io.epoll_loop import EpollLoop
from hoplite_mp._node.manager_link.connection import (
    MANAGER_ABSENT_S,
    MANAGER_SILENCES,
    ManagerConnection,
)
from hoplite_mp._node.manager_link.failover import ALONE_S, CALL_S, PROMOTE_WAIT_S, Failover
from hoplite_mp._node.peers.peers import Suspects
from hoplite_mp._node.roster import NodeLifecycle
from hoplite_mp._protocol import terms as t
from hoplite_mp._protocol.codec import BEAT, encode, manager_decoder
from hoplite_mp._protocol.greetings import Introduction
from hoplite_mp._protocol.local import LanStart
from hoplite_mp._protocol.membership import NodeReturned
from hoplite_mp._protocol.messages import (
    DeclaredDead,
    ManagerToNode,
    Member,
    NodeJoined,
    NodeLeaving,
)
from hoplite_mp._protocol.secret import Secret
from hoplite_mp._transport.conversation import Admission
from hoplite_mp._transport.stream import TcpStream
from tests.support.shm_host import HostMemory

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

SILENCE_S, BEAT_S = 1.5, 0.2
LEASE_US = int(SILENCE_S * 1e6)
LISTS = (t.Hosts(1 << 32 | 1, (0, 1, 2)),)
LAN = LanStart(
    key=Secret(b"k"),
    host_id=5,
    host="h",
    peer_fd=-1,
    addresses=["10.0.0.5:1"],
    ports=(1, 2, 1),
    handshake_timeout_s=1.0,
    pending_handshakes_max=1,
    connect_timeout_s=1.0,
    heartbeat_interval_s=BEAT_S,
    heartbeat_timeout_s=SILENCE_S,
    tls=False,
)


class Other:
    """The manager or the standby, at its end of a connection."""

    def __init__(self) -> None:
        self.sock, self.nodes_end = socket.socketpair()
        self.sock.setblocking(False)
        self.decoder = manager_decoder()

    def say(self, *messages: Any) -> None:
        self.sock.sendall(b"".join(map(encode, messages)))

    def hear(self) -> list[Any]:
        """All that has come; the node's end may be closed."""
        with contextlib.suppress(BlockingIOError):
            return list(self.decoder.feed(self.sock.recv(1 << 20)))
        return []

    @property
    def is_left(self) -> bool:
        """Has the node closed the connection?"""
        try:
            return not self.sock.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return False
        except ConnectionResetError:
            return True


class StageAbove:
    """Components that have nothing to say."""

    def answer_standing(self) -> None:
        pass

    def joining(self, incarnation: int) -> Any:
        raise AssertionError("it has joined")

    def returning(self, incarnation: int) -> NodeReturned:
        return NodeReturned(1, incarnation, 3, (Member(1, 0, 5, 1),))

    def report(self) -> Iterator[Any]:
        return iter(())


def connection(*built_from: Any) -> ManagerConnection:
    """Other components take every message of the manager, and do nothing."""
    management = ManagerConnection(*built_from)
    own = management.manager_handlers
    others = {kind for kind in get_args(ManagerToNode | t.TermsToNode) if kind not in own}
    management.serve(own, dict.fromkeys(others, Mock()))
    return management


class StageMembership:
    """The members are those of LISTS."""

    start = LAN

    def __init__(self) -> None:
        self.members = {node: None for _, nodes in LISTS for node in nodes}

    def manager_is_at(self, at: Any) -> None: ...


class StageNetwork:
    """In place of calls over the network."""

    connect_timeout_s, heartbeat_interval_s, heartbeat_timeout_s = 1.0, BEAT_S, SILENCE_S

    def __init__(self, stage: Stage, membership: Any, peers: Any) -> None:
        self.stage, self.membership, self.peers = stage, membership, peers

    def connect(self) -> Any:
        raise AssertionError("it has joined")

    def call(self, done: Callable[[Any], None], timeout_s: float) -> None:
        self.stage.manager_calls.append(done)

    def failover(self, named: t.StandbyAnnounced) -> Failover:
        stage = self.stage
        none: Any = None
        to = stage.management, self, self.membership, stage.suspects, self.peers, none
        return Failover(stage.loop, stage.lifecycle, none, *to, named)


class Stage:
    """One node of three, on another host than its manager, and a standby that answers calls."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        self.loop = EpollLoop()
        self.loop.now = lambda: self.now
        monkeypatch.setattr(Failover, "_call", lambda failover: self.call_standby(failover))
        monkeypatch.setattr(Failover, "_ask_former", lambda failover: self.ask_former(failover))
        self.opened: list[Other] = []
        self.standby_answers = True
        self.standbys: list[Other] = []
        self.former_answers = False
        self.former: list[Other] = []  # ends at the manager that the node followed before it voted
        self.manager_calls: list[Callable[[Any], None]] = []
        self.lifecycle = NodeLifecycle(False)
        self.lifecycle.joined = True
        self.memory = HostMemory(host_id=5)
        self.memory.node.set_number(1)
        self.events = StageAbove()
        self.management = connection(self.loop, self.memory.node, self.lifecycle, None, self.events)
        peers: Any = None  # the standby is at none of this host's addresses
        membership: Any = StageMembership()
        self.suspects = Suspects(SILENCE_S, self.loop, Mock(), lambda: 1, Mock())
        self.management.network = StageNetwork(self, membership, peers)
        self.manager = self.open()
        self.management.other_host_id = 4
        self.management._speak(TcpStream(self.manager.nodes_end), [])
        self.manager.say(t.StandbyAnnounced(("10.0.0.2:7001",), LEASE_US))
        self.turn()
        self.lead(self.manager, 1, 0)

    def call_standby(self, failover: Failover) -> None:
        """In place of a connection over the network."""
        if self.standby_answers:
            self.standbys.append(self.open())
            failover._called(self.admission(self.standbys[-1], 6))

    def ask_former(self, failover: Failover) -> None:
        """As above."""
        failover._asking = True
        if not self.former_answers:
            failover._former_called(None)
            return
        self.former.append(self.open())
        failover._former_called(self.admission(self.former[-1], 4))

    def open(self) -> Other:
        self.opened.append(Other())
        return self.opened[-1]

    def admission(self, who: Other, host_id: int) -> Any:
        stream = TcpStream(who.nodes_end)
        return Admission(stream, "node", b"", Introduction(host_id, {}), "10.0.0.9")

    def close(self) -> None:
        if self.management.heartbeat_sender is not None:
            self.management.heartbeat_sender.stop()
        for other in self.opened:
            other.sock.close()
            other.nodes_end.close()
        self.memory.close()

    def turn(self) -> None:
        self.loop.serve(self.loop.wait(0))

    def wait(self, seconds: float, beats: Other | None = None, term: int = 0) -> None:
        """So long, with nobody, with a process that lives, or with the manager of that term."""
        until, beat_at = self.now + seconds, self.now
        while self.now < until:
            if beats is not None and beats.is_left:
                beats = None
            elif beats is not None and beat_at <= self.now:
                beats.sock.sendall(
                    encode(t.LeaderHeartbeat(term, 0, int(self.now * 1e6))) if term else BEAT
                )
                beat_at += BEAT_S
            due_at = min(
                until if self.loop.due is None else self.loop.due,
                until,
                beat_at if beats is not None else until,
            )
            self.now = max(self.now, due_at)
            self.turn()
            self.loop.call_due()
            self.turn()

    def lead(self, who: Other, term: int, at: int) -> None:
        """It says that it is the manager."""
        who.say(t.LeaderHeartbeat(term, at, int(self.now * 1e6), LISTS))
        self.turn()

    def ask(self, term: int) -> list[Any]:
        """The standby wants this node's vote; its words."""
        standby = self.standbys[-1]
        standby.say(t.VoteRequest(term, 7))
        self.turn()
        return standby.hear()


@pytest.fixture
def stage(monkeypatch: pytest.MonkeyPatch) -> Iterator[Stage]:
    stage = Stage(monkeypatch)
    yield stage
    stage.close()


def kinds(messages: list[Any]) -> list[type]:
    return [type(one) for one in messages]


def test_node_with_a_manager_contacts_no_standby(stage: Stage) -> None:
    stage.wait(60, stage.manager, 1)
    assert t.LeaderHeartbeatAck in kinds(stage.manager.hear())
    assert not stage.standbys
    assert not stage.lifecycle.stopping


def test_vote_is_granted_after_the_lease_expires(stage: Stage) -> None:
    stage.manager.sock.close()
    stage.wait(BEAT_S + 0.01)
    (standby,) = stage.standbys
    assert not standby.hear()  # it is bound
    stage.wait(SILENCE_S * 1.1)
    assert kinds(standby.hear()) == [t.VoterState]
    assert t.VoteGranted in kinds(stage.ask(2))
    assert not stage.lifecycle.stopping


def test_node_that_has_voted_repeats_its_vote_on_request(stage: Stage) -> None:
    """The standby had not received the vote yet when an earlier connection of this node ended.
    Until it leads, this node does not take itself for cut off because it has lost many others."""
    assert not stage.management.waits_for_votes
    stage.manager.sock.close()
    stage.wait(2 * SILENCE_S)
    assert stage.management.waits_for_votes
    assert t.VoteGranted in kinds(stage.ask(2))
    assert t.VoteGranted not in kinds(stage.ask(2))
    assert stage.management.channel is not None
    assert stage.management.waits_for_votes
    stage.lead(stage.standbys[0], 2, 2)
    assert t.LeaderHeartbeatAck in kinds(stage.standbys[0].hear())
    assert not stage.management.waits_for_votes


@pytest.mark.parametrize("dies", [False, True])
def test_node_votes_again_if_the_elected_standby_does_not_lead(stage: Stage, dies: bool) -> None:
    """The node votes again, whether that one hangs or is gone, and is not missed by it."""
    stage.manager.sock.close()
    stage.wait(2 * SILENCE_S)
    assert t.VoteGranted in kinds(stage.ask(2))
    if dies:
        stage.standbys[0].sock.close()
    else:
        stage.wait(ALONE_S + 2 * BEAT_S, stage.standbys[0])
        assert t.VoteGranted not in kinds(stage.standbys[0].hear())
    stage.wait(MANAGER_SILENCES * SILENCE_S + ALONE_S)
    assert not stage.lifecycle.stopping
    assert len(stage.standbys) == 2
    assert stage.standbys[1].hear() == [t.VoterState(1, t.Knowledge(2, 0, LISTS))]
    assert t.VoteGranted in kinds(stage.ask(3))
    stage.lead(stage.standbys[1], 3, 2)
    stage.wait(60, stage.standbys[1], 3)
    assert not stage.lifecycle.stopping
    assert t.LeaderHeartbeatAck in kinds(stage.standbys[1].hear())


def vote_in_vain(stage: Stage) -> None:
    """The node has voted, and nobody leads."""
    stage.wait(2 * SILENCE_S)
    assert t.VoteGranted in kinds(stage.ask(2))
    stage.wait(ALONE_S - BEAT_S, stage.standbys[0])
    assert not stage.former
    stage.wait(4 * BEAT_S)


def test_node_whose_vote_failed_stops_when_its_manager_has_declared_it_dead(stage: Stage) -> None:
    """That manager stood still for so long that this node was free, and half of the hosts follow it
    again. The node never obeys it any more, so it ends, and its host joins again."""
    stage.former_answers = True
    vote_in_vain(stage)
    (former,) = stage.former
    assert former.hear() == [t.NoLeader(2)]
    assert not stage.lifecycle.stopping
    former.say(t.LeaderHeartbeat(1, 0, int(stage.now * 1e6), LISTS), DeclaredDead(0.0))
    stage.turn()
    assert stage.lifecycle.given_up
    assert stage.lifecycle.stopping
    assert t.LeaderHeartbeatAck not in kinds(former.hear())


def test_silent_former_manager_is_queried_again(stage: Stage) -> None:
    """It may be cut off for a while, or unable to decide; meanwhile a human may promote."""
    vote_in_vain(stage)
    stage.former_answers = True
    stage.wait(3 * CALL_S, stage.standbys[1])
    assert len(stage.former) > 2
    assert all(one.is_left or one.hear() for one in stage.former[:-1])
    assert not stage.lifecycle.stopping
    assert t.VoteGranted in kinds(stage.ask(3))
    stage.former[-1].say(DeclaredDead(0.0))  # it comes late: the node has voted again
    stage.lead(stage.standbys[1], 3, 2)
    asked = len(stage.former)
    stage.wait(60, stage.standbys[1], 3)
    assert len(stage.former) == asked
    assert not stage.lifecycle.stopping


def test_node_with_a_manager_queries_no_other_manager(stage: Stage) -> None:
    """Nor who has only lost it, and may return to it."""
    stage.former_answers = True
    stage.manager.sock.close()
    stage.wait(60)
    assert stage.manager_calls
    assert not stage.former
    assert t.VoteGranted in kinds(stage.ask(2))
    stage.lead(stage.standbys[0], 2, 2)
    stage.wait(60, stage.standbys[0], 2)
    assert not stage.former


def test_node_that_joined_at_the_second_attempt_can_leave(stage: Stage) -> None:
    stage.management._incarnation = 1
    stage.management.announce_leaving()
    stage.turn()
    number = stage.management.client.number
    assert NodeLeaving(number, 1) in stage.manager.hear()


def test_heartbeats_of_an_older_term_are_rejected(stage: Stage) -> None:
    """Nor is its silence the end of this node."""
    stage.lead(stage.manager, 3, 0)
    stage.manager.hear()
    stage.lead(stage.manager, 2, 0)
    assert stage.management.channel is None
    stage.wait(MANAGER_SILENCES * SILENCE_S + BEAT_S)
    assert not stage.lifecycle.stopping
    assert stage.manager_calls  # it may be there again, with the right term


def test_node_returns_to_its_manager_after_a_lost_connection(stage: Stage) -> None:
    stage.manager.sock.close()
    stage.wait(2 * SILENCE_S)
    again = stage.open()
    stage.manager_calls[0](stage.admission(again, 4))
    stage.lead(again, 1, 0)
    stage.wait(5, again, 1)
    assert stage.standbys[0].is_left or t.VoterState in kinds(stage.standbys[0].hear())
    assert t.LeaderHeartbeatAck in kinds(again.hear())
    assert not stage.lifecycle.stopping


def test_manager_that_closes_connections_is_called_once_per_heartbeat(
    stage: Stage,
) -> None:
    """It was stopped for long, and may not decide before it has heard enough nodes."""
    stage.manager.sock.close()
    stage.turn()
    answered, seconds = 0, 2.0
    for _ in range(round(seconds / BEAT_S * 4)):
        for called in stage.manager_calls[answered:]:
            again = stage.open()
            called(stage.admission(again, 4))
            again.sock.close()
        answered = len(stage.manager_calls)
        stage.wait(BEAT_S / 4)
    assert seconds / BEAT_S / 2 <= answered <= seconds / BEAT_S + 1
    assert not stage.lifecycle.stopping


def test_node_without_any_manager_gives_up(stage: Stage) -> None:
    stage.standby_answers = False
    stage.manager.sock.close()
    stage.wait(ALONE_S - BEAT_S)
    assert not stage.lifecycle.stopping
    stage.wait(3 * BEAT_S)
    assert stage.lifecycle.given_up


def test_node_without_standbys_does_not_wait_for_a_promotion(stage: Stage) -> None:
    assert isinstance(stage.management.failover, Failover)
    stage.management.failover.voter.lists = ()
    stage.manager.sock.close()
    stage.wait(ALONE_S - BEAT_S)
    assert not stage.lifecycle.stopping
    stage.wait(3 * BEAT_S)
    assert stage.lifecycle.given_up


def test_node_waits_for_a_promotion_before_it_gives_up(stage: Stage) -> None:
    stage.manager.sock.close()
    stage.wait(PROMOTE_WAIT_S - ALONE_S)
    assert not stage.lifecycle.stopping
    stage.wait(ALONE_S + 2 * BEAT_S)
    assert stage.lifecycle.given_up


def test_isolated_host_does_not_vote(stage: Stage) -> None:
    """It ends, and may join again."""
    stage.management.cut_off("no host can be reached")
    stage.wait(2 * BEAT_S)
    assert stage.lifecycle.given_up
    assert stage.lifecycle.stopping
    assert not stage.standbys


@pytest.mark.parametrize("comes_at", [None, MANAGER_ABSENT_S / 2])
def test_node_waits_for_the_manager_of_its_own_host(stage: Stage, comes_at: float | None) -> None:
    """Each time for as long."""
    client = stage.memory.node
    lifecycle = NodeLifecycle(False)
    lifecycle.joined = True
    first = stage.open()
    management = connection(stage.loop, client, lifecycle, TcpStream(first.nodes_end), stage.events)
    management._speak(TcpStream(first.nodes_end), [])
    begun = stage.now
    first.sock.close()
    stage.turn()
    if comes_at is not None:
        stage.wait(comes_at)
        second = stage.open()
        management.again(TcpStream(second.nodes_end))
        second.sock.close()
        stage.turn()
        stage.wait(begun + MANAGER_ABSENT_S + BEAT_S - stage.now)
    assert not lifecycle.stopping
    stage.wait(MANAGER_ABSENT_S + BEAT_S)
    assert lifecycle.stopping


def test_rejected_node_retries_until_its_timeout(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However long it has heard beats: a manager that cannot let it in ends its wait."""
    client = stage.memory.node
    lifecycle, network = NodeLifecycle(False), stage.management.network
    first, second = stage.open(), stage.open()
    monkeypatch.setattr(stage.events, "joining", lambda lives: NodeJoined(5, lives, 1))
    monkeypatch.setattr(network, "connect", lambda: stage.admission(first, 4))
    management = connection(stage.loop, client, lifecycle, None, stage.events)
    management.network = network
    management.join()
    first.sock.close()
    stage.turn()
    (called,) = stage.manager_calls
    called(stage.admission(second, 4))
    assert second.hear() == [NodeJoined(5, 1, 1)]
    stage.wait(20 * SILENCE_S, second)
    assert not lifecycle.stopping
    second.sock.shutdown(socket.SHUT_WR)  # close() resets it if a heartbeat is unread
    stage.turn()
    why = "the manager has not admitted this node: the other side closed the connection"
    assert management.join_error == ("ManagerLostError", why)
    assert lifecycle.stopping


def test_time_in_which_the_node_was_suspended_is_not_a_missed_heartbeat(stage: Stage) -> None:
    """What its manager has sent meanwhile is not read yet."""
    stage.wait(5, stage.manager, 1)
    stage.now += 3 * SILENCE_S
    stage.loop.call_due()
    assert not stage.standbys
    stage.wait(5, stage.manager, 1)
    assert not stage.standbys
    stage.wait(2 * SILENCE_S)
    assert stage.standbys
