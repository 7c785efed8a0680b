"""Workers on other hosts for a pool or a broadcast: asked for, answered, late, lost, closed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from hoplite_mp._node.questions import Questions
from hoplite_mp._node.roster import Roster
from hoplite_mp._node.tasks.outbound_tasks import Runner
from hoplite_mp._node.tasks.pools import RETIRE_ASKS, RETIRE_ENDS, Pool, WorkerInfo
from hoplite_mp._node.tasks.remote_workers import POLL_AGAIN_S, PoolRequests
from hoplite_mp._node.tasks.worker_broadcast import WorkerBroadcasts
from hoplite_mp._planner.resources import ResourceLedger
from hoplite_mp._protocol.local import EndWorkerBroadcast, OpenPool, OpenWorkerBroadcast, Request
from hoplite_mp._protocol.messages import Member
from hoplite_mp._protocol.peers import (
    CloseRemotePool,
    EndRemoteBroadcast,
    OpenRemoteBroadcast,
    OpenRemotePool,
    RemoteBroadcastEnded,
    RemoteBroadcastOpened,
    RemotePoolOpened,
)
from hoplite_mp.config import Config
from tests.support.lost_peers import gone
from tests.support.node_ports import ManualLoop

SLOT = 2  # of the process that asks
FIRST, SECOND = 11, 22  # host ids of nodes 1 and 2
OTHERS = {FIRST: 1, SECOND: 2}


class World:
    """One node with the components that are tested; it has two workers for everybody's tasks."""

    def __init__(self) -> None:
        self.loop = ManualLoop()
        self.roster = Roster()
        for host_id, number in OTHERS.items():
            self.roster.add(Member(number, 1, host_id, 4))
        self.sent: list[tuple[int, Any]] = []
        self.replies: list[Any] = []
        self.far: list[tuple[int, int, int, int, int]] = []
        self.runners = dict.fromkeys(OTHERS, SimpleNamespace(number=1))
        common = Pool(0, 2, 1, workers={slot: WorkerInfo(slot, 0) for slot in (5, 6)})
        self.pools = {0: common}
        self.unread: list[Any] = []
        self.queued = [1]  # tasks of the pool that is asked about
        self.busy_here = 0  # workers of the pool on this host that have a task
        self.others: dict[int, ResourceLedger] = {}
        self.failed: list[str] = []
        self.asked: dict[int, int] = {}  # host id -> the number of its question
        self.questions = Questions(self.loop, self.roster, self.send)
        line: Any = SimpleNamespace(
            loop=self.loop,
            roster=self.roster,
            client=SimpleNamespace(
                number=0,
                host_id=77,
                queued_in=lambda pool, waiting_too: self.queued,
                client_info=lambda slot: {"running": slot < self.busy_here},
            ),
            config=Config(resource_wait_s=3.0),
            clients={SLOT: "line"},
            imports=None,
            tasks=None,
            send_peer=self.send,
            questions=self.questions,
            reply=lambda slot, reply: self.replies.append(reply),
            replier=lambda slot: self.replies.append,
        )
        workers: Any = SimpleNamespace(
            pools=self.pools,
            open=self.open,
            open_bound=lambda owner, output_owner: (
                self.open(Pool(0, 0, owner)) and len(self.pools) - 1
            ),
            close=self.close,
            start_missing=self.start_missing,
            fail_queued=lambda pool: self.failed.append(pool.broken),
            why_none="no worker can be started",
            retire=lambda pool, count: None,  # the pools here have no stand-ins
            blocked=lambda pool: 0,
        )
        requests: Any = SimpleNamespace(
            given=[],
            is_latest=lambda slot, number: True,
            undo_unread=lambda *undo: self.unread.append(undo),
        )
        outbound_tasks: Any = SimpleNamespace(
            runners=self.runners, far={}, add_remote=self.add_remote
        )
        self.outbound_tasks = outbound_tasks
        self.ledger = ResourceLedger((("gpu", 10_000),))
        inbound_tasks: Any = SimpleNamespace(pools={}, withdraw=lambda pool: None)
        events: Any = SimpleNamespace(output_owner_of=lambda slot: 0)
        components = workers, outbound_tasks, inbound_tasks
        nobody: Any = None
        resources: Any = SimpleNamespace(
            ledger=self.ledger, others=self.others, has_room=self.ledger.fits
        )
        self.requests = PoolRequests(line, requests, nobody, *components, resources, events)
        self.worker_broadcasts = WorkerBroadcasts(line, *components, events)

    def send(self, host_id: int, message: Any) -> bool:
        if host_id in self.roster.by_host_id:
            self.sent.append((host_id, message))
        return host_id in self.roster.by_host_id

    def start_missing(self, pool: Pool) -> None:
        """As Workers': the slots of its workers count from 0."""
        pool.workers = {slot: WorkerInfo(slot, pool.number) for slot in range(pool.target)}

    def add_remote(self, pool: int, host_id: int, there: int, workers: int, ahead: int) -> None:
        """As Delegation's."""
        self.far.append((pool, host_id, there, workers, ahead))
        runner = Runner(host_id, OTHERS[host_id], workers, there, ahead)
        self.outbound_tasks.far.setdefault(pool, []).append(runner)

    def open(self, pool: Pool, descriptors: Any = None) -> bool:
        pool.number = len(self.pools)
        self.pools[pool.number] = pool
        self.start_missing(pool)
        return True

    def close(self, number: int, kill: bool) -> None:
        pool = self.pools.pop(number, None)
        if pool is not None:
            pool.closing = True
            self.worker_broadcasts.forget(number)

    def lose(self, host_id: int) -> None:
        """As runtime/cluster_node.py does."""
        self.roster.remove(OTHERS[host_id])
        del self.runners[host_id]
        self.questions.peer_lost(gone(host_id))

    def open_remote(self, *, exact: bool = False) -> None:
        """The two other nodes are asked for 3 and 4 workers."""
        ask = OpenPool(1, 0, 0, [(1, 3), (2, 4)], exact)
        self.requests.open(SLOT, Request(1, 0, ask))
        found = self.taken()
        assert [(host_id, ask.workers) for host_id, ask in found] == [(FIRST, 3), (SECOND, 4)]
        assert all(isinstance(ask, OpenRemotePool) for _, ask in found)
        self.asked = {host_id: ask.number for host_id, ask in found}

    def open_round(self, timeout_s: float | None = None) -> None:
        """Likewise of a broadcast, in which all workers take part."""
        self.worker_broadcasts.open(SLOT, Request(1, 0, OpenWorkerBroadcast([], timeout_s)))
        self.asked = {host_id: ask.number for host_id, ask in self.taken()}

    def pool_opened(self, host_id: int, *about: Any) -> None:
        """That node answers."""
        self.questions.answered(host_id, RemotePoolOpened(self.asked[host_id], *about))

    def round_opened(self, host_id: int, *about: Any) -> None:
        """Likewise of a broadcast."""
        self.worker_broadcasts.opened(host_id, RemoteBroadcastOpened(self.asked[host_id], *about))

    def taken(self) -> list[tuple[int, Any]]:
        """What has been sent since this was asked last."""
        found, self.sent = self.sent, []
        return found


@pytest.fixture
def world() -> World:
    return World()


@pytest.mark.parametrize("exact", [False, True])
def test_a_pool_is_open_when_all_have_answered(world: World, exact: bool) -> None:
    world.open_remote(exact=exact)
    world.pool_opened(SECOND, 9)
    assert not world.replies
    world.pool_opened(FIRST, 8)
    assert [(reply.value, reply.error) for reply in world.replies] == [(1, "")]
    ahead = 0 if exact else 2
    assert sorted(world.far) == [(1, FIRST, 8, 3, ahead), (1, SECOND, 9, 4, ahead)]
    assert world.unread, "who does not read the reply has no use for the pool"


def test_one_cannot_open_it(world: World) -> None:
    world.open_remote()
    world.pool_opened(FIRST, 0, "h1 can start no more workers")
    world.pool_opened(SECOND, 9)
    assert [(r.value, r.error) for r in world.replies] == [(None, "h1 can start no more workers")]
    assert world.far == [(1, SECOND, 9, 4, 2)], "closing it closes that one"
    assert list(world.pools) == [0]


@pytest.mark.parametrize("answers", [False, True])
def test_one_is_lost_before_it_is_open(world: World, answers: bool) -> None:
    world.open_remote()
    if answers:
        world.pool_opened(SECOND, 9)
    world.lose(SECOND)
    world.pool_opened(FIRST, 8)
    (reply,) = world.replies
    assert (reply.value, reply.error) == ("a node was lost while its workers were started", "")
    assert list(world.pools) == [0]


def test_its_owner_dies_before_it_is_open(world: World) -> None:
    world.open_remote()
    world.pool_opened(FIRST, 8)
    world.close(1, True)
    world.open(Pool(0, 1, SLOT + 1))  # another one has its number
    world.pool_opened(SECOND, 9)
    assert world.taken() == [(FIRST, CloseRemotePool(8, True)), (SECOND, CloseRemotePool(9, True))]
    assert not world.far
    assert 1 in world.pools


def test_on_a_node_that_is_gone_already(world: World) -> None:
    ask = OpenPool(1, 0, 0, [(1, 3), (7, 4)], False)
    world.requests.open(SLOT, Request(1, 0, ask))
    assert [reply.value for reply in world.replies] == ["node h7 is gone"]
    assert not world.sent
    assert list(world.pools) == [0]


def test_a_round_counts_the_workers_of_all(world: World) -> None:
    world.open_round()
    world.round_opened(FIRST, 8, 3)
    assert not world.replies
    world.lose(SECOND)
    assert [reply.value for reply in world.replies] == [(1, 2 + 3)]
    assert not world.taken()


def test_of_a_round_one_is_late(world: World) -> None:
    """Those that have answered need not wait for the caller, who has given it up."""
    world.open_round(0.5)
    world.round_opened(FIRST, 8, 3)
    world.loop.pass_to(world.loop.now() + 0.5)
    assert [reply.value for reply in world.replies] == [None]
    assert world.taken() == [(FIRST, CloseRemotePool(8, False))]
    assert list(world.pools) == [0]
    world.round_opened(SECOND, 9, 3)
    assert world.taken() == [(SECOND, CloseRemotePool(9, False))]
    assert len(world.replies) == 1


def test_the_caller_of_a_round_dies_while_it_is_opened(world: World) -> None:
    world.open_round()
    world.round_opened(FIRST, 8, 3)
    world.close(1, False)
    world.round_opened(SECOND, 0, 0)
    assert world.taken() == [(FIRST, CloseRemotePool(8, False))]
    assert not world.replies


@pytest.mark.parametrize("ends", ["answers", "lost", "silent"])
def test_a_round_has_ended_when_all_know(world: World, ends: str) -> None:
    world.open_round()
    world.round_opened(FIRST, 8, 3)
    world.round_opened(SECOND, 9, 3)
    world.replies.clear()
    world.worker_broadcasts.end(SLOT, Request(2, 0, EndWorkerBroadcast(1)))
    asked = {host_id: one for host_id, one in world.taken() if isinstance(one, EndRemoteBroadcast)}
    assert {host_id: one.pool for host_id, one in asked.items()} == {FIRST: 8, SECOND: 9}
    world.questions.answered(FIRST, RemoteBroadcastEnded(asked[FIRST].number))
    assert not world.replies
    if ends == "answers":
        world.questions.answered(SECOND, RemoteBroadcastEnded(asked[SECOND].number))
    elif ends == "lost":
        world.lose(SECOND)
    else:
        world.loop.pass_to(world.loop.now() + 1.0)
    assert len(world.replies) == 1
    world.worker_broadcasts.end(
        SLOT, Request(3, 0, EndWorkerBroadcast(1))
    )  # there is none any more
    assert len(world.replies) == 2
    assert OpenRemoteBroadcast not in map(type, world.taken())


def test_workers_are_called_to_a_round_of_another_node_until_they_have_come(world: World) -> None:
    """One that is to retire is still told so; one that is retiring already does not take part."""
    flags: dict[int, int] = {}
    queued = [71, 72]
    worker_broadcasts, workers = world.worker_broadcasts, world.pools[0].workers
    worker_broadcasts.client = SimpleNamespace(  # type: ignore[assignment]
        queued_in=lambda pool: queued, set_retire=flags.__setitem__
    )
    woken: list[int] = []
    worker_broadcasts.tasks = SimpleNamespace(  # type: ignore[assignment]
        wake=woken.append, wake_for_task=woken.append
    )
    worker_broadcasts.workers.all = workers
    worker_broadcasts.reply = lambda slot, reply: world.replies.append((slot, reply.value))
    workers[7] = WorkerInfo(7, 0, retiring=True)
    worker_broadcasts.asked(FIRST, OpenRemoteBroadcast(4))
    assert world.taken() == [(FIRST, RemoteBroadcastOpened(4, 1, 2))]
    workers[6].retiring = True
    worker_broadcasts.arrived(1)
    assert flags == {5: RETIRE_ASKS, 6: RETIRE_ASKS | RETIRE_ENDS}
    assert sorted(woken) == [5, 5, 6, 6]  # it may wait for an object, or for a task
    for slot, given in ((6, [71]), (5, [72]), (5, [])):
        worker_broadcasts.take(slot, Request(1, 0, None))  # type: ignore[arg-type]
        assert world.replies.pop() == (slot, given)
    assert flags == {5: 0, 6: RETIRE_ENDS}


GPU = (("gpu", 10_000),)


def peers(world: World, here: int, demand: Any = (), *, anywhere: bool = False) -> Pool:
    """A pool of peers: some here, 3 and 4 on the other nodes."""
    ask = OpenPool(here, 0, 0, [(1, 3), (2, 4)], True, (), demand, anywhere)
    world.requests.open(SLOT, Request(1, 0, ask))
    world.asked = {host_id: ask.number for host_id, ask in world.taken()}
    world.pool_opened(FIRST, 8)
    world.pool_opened(SECOND, 9)
    return world.pools[1]


def asked(world: World) -> list[tuple[int, int, bool]]:
    """(host id, workers, whether at once) of each request since this was asked last."""
    found = world.taken()
    world.asked = {host_id: ask.number for host_id, ask in found}
    return [(host_id, ask.workers, ask.at_once) for host_id, ask in found]


def lost(world: World, *queued: int) -> None:
    """The pool has lost workers, and so many of its tasks are queued, or wait for arguments."""
    world.queued = list(queued)
    world.requests.remote_workers.lost(1)
    world.loop.pass_time(0.0)


def busy(world: World) -> None:
    """Each worker on another host has a task."""
    for runners in world.outbound_tasks.far.values():
        for one in runners:
            one.running = dict.fromkeys(range(one.workers))


def test_peers_of_a_lost_host_go_where_fewest_are(world: World) -> None:
    pool = peers(world, 2)
    busy(world)
    world.busy_here = 2
    lost(world, 1, 2, 3)
    assert pool.target == 4
    assert asked(world) == [(FIRST, 1, True)]
    world.busy_here = 4
    world.queued = [1]
    world.pool_opened(FIRST, 11)
    assert world.far[-1] == (1, FIRST, 11, 1, 0)
    world.loop.pass_time(POLL_AGAIN_S)
    assert asked(world) == [], "it is free"


def test_a_worker_that_is_free_is_enough(world: World) -> None:
    peers(world, 0)
    lost(world, 1, 2)
    assert asked(world) == []


def test_another_host_is_asked_if_one_refuses_or_is_lost(world: World) -> None:
    peers(world, 0)
    busy(world)
    lost(world, 1)
    assert asked(world) == [(FIRST, 1, True)]
    world.pool_opened(FIRST, 0, "it leaves")
    world.loop.pass_time(0.0)
    assert asked(world) == [(SECOND, 1, True)]
    del world.outbound_tasks.far[1][1]
    world.lose(SECOND)
    world.loop.pass_time(0.0)
    assert asked(world) == []
    world.loop.pass_time(POLL_AGAIN_S)
    assert asked(world) == [(FIRST, 1, True)]


def test_each_host_is_asked_for_one_at_a_time(world: World) -> None:
    """One of two may have room for one, although it has none for both."""
    peers(world, 0, GPU)
    busy(world)
    lost(world, 1, 2)
    assert asked(world) == [(FIRST, 1, True), (FIRST, 1, True)]


def test_while_resources_are_in_use_all_are_asked_again(world: World) -> None:
    pool = peers(world, 5, GPU)
    busy(world)
    world.busy_here = 5
    assert world.ledger.take("another's", GPU) is not None
    for _ in range(2):
        if world.requests.remote_workers.short:
            world.loop.pass_time(POLL_AGAIN_S)
        else:
            lost(world, 1)
        for host_id in OTHERS:
            assert asked(world) == [(host_id, 1, True)]
            world.pool_opened(host_id, 0, "they are in use")
            world.loop.pass_time(0.0)
        assert asked(world) == []
    assert pool.target == 5
    world.ledger.give_back("another's")
    world.loop.pass_time(POLL_AGAIN_S)
    asked(world)
    for host_id in OTHERS:
        world.pool_opened(host_id, 0, "they are in use")
        world.loop.pass_time(0.0)
        asked(world)
    assert pool.target == 6


def test_they_are_asked_no_more_when_another_peer_has_ended(world: World) -> None:
    peers(world, 0, GPU)
    busy(world)
    lost(world, 1)
    for host_id in OTHERS:
        assert asked(world) == [(host_id, 1, True)]
        world.pool_opened(host_id, 0, "they are in use")
        world.loop.pass_time(0.0)
    world.queued = []
    world.loop.pass_time(5 * POLL_AGAIN_S)
    assert asked(world) == []
    world.queued = [1]  # a result is made again, or an argument has become ready
    world.loop.pass_time(POLL_AGAIN_S)
    assert asked(world) == [(FIRST, 1, True)]
    world.close(1, True)
    world.loop.pass_time(POLL_AGAIN_S)
    assert not world.requests.remote_workers.short
    assert not world.loop.timers


def test_peers_without_a_place_of_their_own_go_anywhere(world: World) -> None:
    pool = peers(world, 0, anywhere=True)
    world.outbound_tasks.far.clear()
    lost(world, 1, 2, 3, 4)
    assert pool.target == 1
    assert asked(world) == [(FIRST, 1, True), (SECOND, 1, True), (FIRST, 1, True)]


def test_a_host_without_workers_may_have_the_resources(world: World) -> None:
    peers(world, 0, GPU, anywhere=True)
    world.outbound_tasks.far.clear()
    world.pools[0].target = 0
    assert world.ledger.take("another's", GPU) is not None
    world.roster.remove(1)
    world.roster.add(Member(1, 1, FIRST, 0))
    world.others[FIRST] = ResourceLedger(GPU)
    lost(world, 1)
    assert asked(world) == [(FIRST, 1, True)], "the other one never has them"


def test_peers_fail_when_no_host_is_left(world: World) -> None:
    pool = peers(world, 0, anywhere=True)
    world.outbound_tasks.far.clear()
    world.pools[0].target = 0
    for number in OTHERS.values():
        world.roster.remove(number)
    lost(world, 1)
    world.loop.pass_time(2 * POLL_AGAIN_S)
    assert not world.failed
    world.loop.pass_time(2 * POLL_AGAIN_S)
    assert world.failed == ["no remaining host has the resources for it"]
    assert pool.target == 0


def test_peers_of_named_hosts_fail_when_the_last_one_leaves(world: World) -> None:
    """It finishes its own peer, and takes no other one."""
    peers(world, 0)
    busy(world)
    del world.outbound_tasks.far[1][0]
    world.outbound_tasks.far[1][0].workers = 0
    world.roster.leaving.add(SECOND)
    lost(world, 1)
    assert world.failed == ["no remaining host has the resources for it"]


def test_workers_of_an_executor_are_not_replaced(world: World) -> None:
    world.open_remote(exact=False)
    world.pool_opened(FIRST, 8)
    world.pool_opened(SECOND, 9)
    busy(world)
    lost(world, 1, 2)
    assert asked(world) == []
