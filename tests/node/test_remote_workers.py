"""Workers on other hosts for a pool or a broadcast: asked for, answered, late, lost, closed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest

from hoplite_mp._common.object_states import DRIVER_SLOT, FIRST_SLOT
from hoplite_mp._node.tasks.remote_workers import POLL_AGAIN_S
from hoplite_mp._node.tasks.worker_pools import RETIRE_ASKS, RETIRE_ENDS, Pool
from hoplite_mp._protocol.local import (
    EndWorkerBroadcast,
    GetBroadcastTasks,
    JoinStatus,
    OpenPool,
    OpenWorkerBroadcast,
)
from hoplite_mp._protocol.peers import (
    CloseRemotePool,
    EndRemoteBroadcast,
    OpenRemoteBroadcast,
    OpenRemotePool,
    RemoteBroadcastEnded,
    RemoteBroadcastOpened,
    RemotePoolOpened,
)
from tests.support.node_harness import NodeHarness, member

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from hoplite_mp._protocol.messages import Member

FIRST, SECOND = member(1).host_id, member(2).host_id
GPU = (("gpu", 10_000),)


class World(NodeHarness):
    """A node with two workers for everybody's tasks; two others have four each."""

    def __init__(self, first: Member | None = None, workers: int = 2, **config: Any) -> None:
        super().__init__([first or member(1), member(2)], workers=workers, **config)
        self.driver = self.process(DRIVER_SLOT)
        self.tasks: list[Any] = []  # holds on the driver's tasks
        self.asked: dict[int, int] = {}  # host id -> the number of its question

    @property
    def pools(self) -> dict[int, Pool]:
        """Those that are open."""
        return {n: one for n, one in self.parts.workers.pools.items() if not one.closing}

    @property
    def far(self) -> list[tuple[int, int, int, int, int]]:
        """Pool, host id, pool there, workers and tasks ahead of all workers on other hosts."""
        return [
            (pool, one.host_id, one.pool, one.workers, one.ahead)
            for pool, runners in self.parts.outbound_tasks.remote_runners.items()
            for one in runners
        ]

    def open_remote(self, here: int = 0, *about: Any, exact: bool = False) -> None:
        """The two other nodes are asked for 3 and 4 workers."""
        self.ask(DRIVER_SLOT, OpenPool(here, 0, 0, [(1, 3), (2, 4)], exact, (), *about))
        assert self.asked_for() == [(FIRST, 3, False), (SECOND, 4, False)]

    def asked_for(self) -> list[tuple[int, int, bool]]:
        """(host id, workers, whether at once) of each request since this was asked last."""
        found = [(one, ask) for one, ask in self.taken() if isinstance(ask, OpenRemotePool)]
        self.asked = {host_id: ask.number for host_id, ask in found}
        return [(host_id, ask.workers, ask.at_once) for host_id, ask in found]

    def open_round(self, timeout_s: float | None = None) -> None:
        """Likewise of a round, in which all workers take part."""
        self.ask(DRIVER_SLOT, OpenWorkerBroadcast([], timeout_s))
        self.asked = {host_id: ask.number for host_id, ask in self.taken()}

    def pool_opened(self, host_id: int, *about: Any) -> None:
        """That node answers."""
        self.receive(host_id, RemotePoolOpened(self.asked[host_id], *about))

    def round_opened(self, host_id: int, *about: Any) -> None:
        """Likewise of a round."""
        self.receive(host_id, RemoteBroadcastOpened(self.asked[host_id], *about))

    def peers(self, here: int, demand: Any = (), *, anywhere: bool = False) -> Pool:
        """A pool of peers: some here, 3 and 4 on the other nodes."""
        self.open_remote(here, demand, anywhere, exact=True)
        self.pool_opened(FIRST, 8)
        self.pool_opened(SECOND, 9)
        return self.pools[1]

    def submit(self, count: int = 1) -> None:
        self.tasks += [self.driver.submit(1) for _ in range(count)]

    def work_here(self) -> None:
        """Each worker of the pool on this host begins a task, if there is one."""
        for slot in self.pools[1].workers:
            process = self.process(slot)
            if not self.node_tasks.running(slot) and (task := process.next(1)):
                process.tasks.begin(task)

    def busy(self) -> None:
        """Each worker of the pool has a task."""
        self.submit(len(self.pools[1].workers) + sum(one[3] for one in self.far))
        self.poll()
        self.work_here()
        self.taken()

    def lost(self, queued: int) -> None:
        """The pool has lost workers, and so many of its tasks are queued, or wait for arguments."""
        self.submit(queued)
        self.parts.pool_requests.remote_workers.lost(1)
        self.loop.pass_time(0.0)


@pytest.fixture
def make_world() -> Iterator[Callable[..., World]]:
    made: list[World] = []

    def make(*about: Any, **options: Any) -> World:
        made.append(World(*about, **options))
        return made[-1]

    yield make
    for world in made:
        world.close()


@pytest.fixture
def world(make_world: Callable[..., World]) -> World:
    return make_world()


@pytest.mark.parametrize("exact", [False, True])
def test_remote_pool_is_open_after_all_replies(world: World, exact: bool) -> None:
    world.open_remote(exact=exact)
    world.pool_opened(SECOND, 9)
    assert not world.replies()
    world.pool_opened(FIRST, 8)
    assert [(reply.value, reply.error) for _, reply in world.replies()] == [(1, "")]
    ahead = 0 if exact else 2
    assert sorted(world.far) == [(1, FIRST, 8, 3, ahead), (1, SECOND, 9, 4, ahead)]
    world.ask(DRIVER_SLOT, JoinStatus(), seen=0)
    assert not world.far, "who does not read the reply has no use for the pool"


def test_remote_pool_fails_if_one_host_refuses(world: World) -> None:
    world.open_remote()
    world.pool_opened(FIRST, 0, "h1 can start no more workers")
    world.pool_opened(SECOND, 9)
    ((_, reply),) = world.replies()
    assert (reply.value, reply.error) == (None, "h1 can start no more workers")
    assert world.taken() == [(SECOND, CloseRemotePool(9, True))]
    assert list(world.pools) == [0]


@pytest.mark.parametrize("answers", [False, True])
def test_remote_pool_fails_if_a_host_is_lost_before_it_is_open(world: World, answers: bool) -> None:
    world.open_remote()
    if answers:
        world.pool_opened(SECOND, 9)
    world.lose(2)
    world.pool_opened(FIRST, 8)
    ((_, reply),) = world.replies()
    assert (reply.value, reply.error) == ("a node was lost while its workers were started", "")
    assert list(world.pools) == [0]


def test_remote_pool_of_a_dead_owner_is_closed(world: World) -> None:
    world.open_remote()
    world.pool_opened(FIRST, 8)
    workers = world.parts.workers
    workers.close(1, True)
    workers._opened = 0
    assert workers.open(Pool(0, 1, DRIVER_SLOT + 1))  # another one has its number
    world.pool_opened(SECOND, 9)
    assert world.taken() == [(FIRST, CloseRemotePool(8, True)), (SECOND, CloseRemotePool(9, True))]
    assert not world.far
    assert 1 in world.pools


def test_remote_pool_on_a_lost_node_fails(world: World) -> None:
    assert world.answer(DRIVER_SLOT, OpenPool(0, 0, 0, [(1, 3), (7, 4)])).value == "node h7 is gone"
    assert not world.taken()
    assert list(world.pools) == [0]


def test_worker_broadcast_counts_the_workers_of_all_hosts(world: World) -> None:
    world.open_round()
    world.round_opened(FIRST, 8, 3)
    assert not world.replies()
    world.lose(2)
    assert [reply.value for _, reply in world.replies()] == [(1, 2 + 3)]
    assert not world.taken()


def test_worker_broadcast_timeout_releases_the_answered_hosts(world: World) -> None:
    """Those that have answered need not wait for the caller, who has given it up."""
    world.open_round(0.5)
    world.round_opened(FIRST, 8, 3)
    world.loop.pass_time(0.5)
    assert [reply.value for _, reply in world.replies()] == [None]
    assert world.taken() == [(FIRST, CloseRemotePool(8, False))]
    assert list(world.pools) == [0]
    world.round_opened(SECOND, 9, 3)
    assert world.taken() == [(SECOND, CloseRemotePool(9, False))]
    assert not world.replies()


def test_worker_broadcast_of_a_dead_caller_is_closed(world: World) -> None:
    world.open_round()
    world.round_opened(FIRST, 8, 3)
    world.parts.workers.close(1, False)
    world.round_opened(SECOND, 0, 0)
    assert world.taken() == [(FIRST, CloseRemotePool(8, False))]
    assert not world.replies()


@pytest.mark.parametrize("ends", ["answers", "lost", "silent"])
def test_worker_broadcast_ends_after_all_hosts_are_informed(world: World, ends: str) -> None:
    world.open_round()
    world.round_opened(FIRST, 8, 3)
    world.round_opened(SECOND, 9, 3)
    world.replies()
    world.ask(DRIVER_SLOT, EndWorkerBroadcast(1))
    asked = {host_id: one for host_id, one in world.taken() if isinstance(one, EndRemoteBroadcast)}
    assert {host_id: one.pool for host_id, one in asked.items()} == {FIRST: 8, SECOND: 9}
    world.receive(FIRST, RemoteBroadcastEnded(asked[FIRST].number))
    assert not world.replies()
    if ends == "answers":
        world.receive(SECOND, RemoteBroadcastEnded(asked[SECOND].number))
    elif ends == "lost":
        world.lose(2)
    else:
        world.loop.pass_time(1.0)
    assert len(world.replies()) == 1
    world.answer(DRIVER_SLOT, EndWorkerBroadcast(1))  # there is none any more
    assert OpenRemoteBroadcast not in map(type, world.taken())


def test_workers_are_called_to_a_remote_worker_broadcast_until_they_arrive(
    make_world: Callable[..., World],
) -> None:
    """One that is to retire is still told so; one that is retiring already does not take part."""
    world = make_world(workers=3)
    rounds, workers = world.parts.worker_broadcasts, world.parts.workers.all
    client = rounds.client = mock.Mock(wraps=world.node)
    tasks = rounds.tasks = mock.Mock(wraps=world.node_tasks)
    first, second = FIRST_SLOT, FIRST_SLOT + 1
    for slot in (first, second):
        world.connect(slot)
    workers[FIRST_SLOT + 2].retiring = True
    world.receive(FIRST, OpenRemoteBroadcast(4))
    assert world.taken() == [(FIRST, RemoteBroadcastOpened(4, 1, 2))]
    workers[second].retiring = True
    queued = [world.run_task(FIRST, number, pool=1) for number in (1, 2)]
    flags = [one.args for one in client.set_retire.call_args_list]
    assert dict(flags) == {first: RETIRE_ASKS, second: RETIRE_ASKS | RETIRE_ENDS}
    for wake in (tasks.wake, tasks.wake_for_task):  # it may wait for an object, or for a task
        assert {one.args for one in wake.call_args_list} == {(first,), (second,)}
    for slot, given in ((second, queued[:1]), (first, queued[1:]), (first, [])):
        assert world.answer(slot, GetBroadcastTasks()).value == given
    flags = [one.args for one in client.set_retire.call_args_list]
    assert dict(flags) == {first: 0, second: RETIRE_ENDS}


def test_peers_of_a_lost_host_move_to_the_emptiest_host(world: World) -> None:
    pool = world.peers(2)
    world.busy()
    world.lost(3)
    assert pool.target == 4
    assert world.asked_for() == [(FIRST, 1, True)]
    world.work_here()
    world.pool_opened(FIRST, 11)
    assert world.far[-1] == (1, FIRST, 11, 1, 0)
    world.loop.pass_time(POLL_AGAIN_S)
    assert world.asked_for() == [], "each task has a worker"


def test_idle_worker_replaces_a_lost_peer(world: World) -> None:
    world.peers(0)
    world.lost(2)
    assert world.asked_for() == []


def test_next_host_is_requested_after_a_refusal_or_loss(world: World) -> None:
    world.peers(0)
    world.busy()
    world.lost(1)
    assert world.asked_for() == [(FIRST, 1, True)]
    world.pool_opened(FIRST, 0, "it leaves")
    world.loop.pass_time(0.0)
    assert world.asked_for() == [(SECOND, 1, True)]
    world.lose(2)
    world.loop.pass_time(0.0)
    assert world.asked_for() == []
    world.loop.pass_time(POLL_AGAIN_S)
    assert world.asked_for() == [(FIRST, 1, True)]


def test_each_host_is_requested_for_one_worker_at_a_time(world: World) -> None:
    """One of two may have room for one, although it has none for both."""
    world.peers(0, GPU)
    world.busy()
    world.lost(2)
    assert world.asked_for() == [(FIRST, 1, True), (FIRST, 1, True)]


def test_all_hosts_are_requested_again_while_resources_are_in_use(
    make_world: Callable[..., World],
) -> None:
    world = make_world(resources="gpu=6")
    pool, ledger = world.peers(5, GPU), world.parts.resources.ledger
    world.busy()
    assert ledger.take("another's", GPU) is not None
    for refusals in range(2):
        if refusals:
            world.loop.pass_time(POLL_AGAIN_S)
        else:
            world.lost(1)
        for host_id in (FIRST, SECOND):
            assert world.asked_for() == [(host_id, 1, True)]
            world.pool_opened(host_id, 0, "they are in use")
            world.loop.pass_time(0.0)
        assert world.asked_for() == []
    assert pool.target == 5
    ledger.give_back("another's")
    world.loop.pass_time(POLL_AGAIN_S)
    for host_id in (FIRST, SECOND):
        assert world.asked_for() == [(host_id, 1, True)]
        world.pool_opened(host_id, 0, "they are in use")
        world.loop.pass_time(0.0)
    assert pool.target == 6


def test_requests_stop_when_another_peer_has_ended(world: World) -> None:
    world.peers(0, GPU)
    world.busy()
    world.lost(1)
    for host_id in (FIRST, SECOND):
        assert world.asked_for() == [(host_id, 1, True)]
        world.pool_opened(host_id, 0, "they are in use")
        world.loop.pass_time(0.0)
    world.driver.tasks.cancel(world.tasks[-1].oid)
    world.loop.pass_time(5 * POLL_AGAIN_S)
    assert world.asked_for() == []
    world.submit()  # a result is made again, or an argument has become ready
    world.loop.pass_time(POLL_AGAIN_S)
    assert world.asked_for() == [(FIRST, 1, True)]
    world.parts.workers.close(1, True)
    world.loop.pass_time(POLL_AGAIN_S)
    assert not world.parts.pool_requests.remote_workers.short
    soon = world.loop.now() + POLL_AGAIN_S
    assert not [due for due, *_ in world.loop.timers if due <= soon]


def test_unbound_peers_may_move_to_any_host(world: World) -> None:
    pool = world.peers(0, anywhere=True)
    world.parts.outbound_tasks.forget_pool(1)
    world.lost(4)
    assert pool.target == 1
    assert world.asked_for() == [(FIRST, 1, True), (SECOND, 1, True), (FIRST, 1, True)]


def test_host_without_workers_can_provide_the_resources(make_world: Callable[..., World]) -> None:
    world = make_world(member(1, 0, resources=GPU), workers=0, resources="gpu=1")
    world.peers(0, GPU, anywhere=True)
    world.parts.outbound_tasks.forget_pool(1)
    assert world.parts.resources.ledger.take("another's", GPU) is not None
    world.lost(1)
    assert world.asked_for() == [(FIRST, 1, True)], "the other one never has them"


def test_peers_fail_when_no_host_is_left(make_world: Callable[..., World]) -> None:
    world = make_world(workers=0, resource_wait_s=3.0)
    pool = world.peers(0, anywhere=True)
    world.lose(1, 2)
    world.lost(1)
    world.loop.pass_time(2 * POLL_AGAIN_S)
    assert world.driver.value(world.tasks[0].oid) == "QUEUED"
    world.loop.pass_time(2 * POLL_AGAIN_S)
    why = str(world.driver.value(world.tasks[0].oid))
    assert "no remaining host has the resources for it" in why
    assert pool.target == 0


def test_peers_of_named_hosts_fail_when_the_last_one_leaves(world: World) -> None:
    """It finishes its own peer, and takes no other one."""
    world.peers(0)
    world.busy()
    world.lose(1)
    (runner,) = world.parts.outbound_tasks.remote_runners[1]
    runner.workers = 0
    world.cluster.host.roster.leaving.add(SECOND)
    world.lost(1)
    why = str(world.driver.value(world.tasks[-1].oid))
    assert "no remaining host has the resources for it" in why


def test_executor_workers_are_not_replaced(world: World) -> None:
    world.open_remote(exact=False)
    world.pool_opened(FIRST, 8)
    world.pool_opened(SECOND, 9)
    world.busy()
    world.lost(2)
    assert world.asked_for() == []
