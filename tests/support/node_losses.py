"""Hosts of one process as in node_hosts.py, with what nodes have against losses, and a planner."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from hoplite_mp import _tasks
from hoplite_mp._common.object_states import STATE as STATES
from hoplite_mp._common.ref import ObjectRef
from hoplite_mp._node.lineage.recovery import Recovery
from hoplite_mp._node.objects.replicas import Replicas
from hoplite_mp._node.questions import Questions
from hoplite_mp._planner.planner_core import Planner
from hoplite_mp._protocol.membership import NodeReturned, Reported
from hoplite_mp._protocol.messages import Member, NodeJoined, NodeLost, OwnersNamed, OwnerTold
from hoplite_mp._protocol.peers import (
    CopiesAsked,
    CopiesTold,
    DropReplica,
    Reconstruct,
    Release,
    ReplicaStored,
)
from hoplite_mp.errors import ObjectLostError
from tests.support.lost_peers import gone
from tests.support.node_hosts import COMMON, Network, Side, states_of
from tests.support.node_ports import deliver
from tests.support.shm_host import STATE

if TYPE_CHECKING:
    from hoplite_mp._node.objects.remote_objects import RemoteObject

# Of the context of a node, what the components here need.
FIELDS = (
    *(
        "results",
        "remote_objects",
        "config",
        "loop",
        "imports",
        "exports",
        "client",
        "send_manager",
    ),
    *("store", "tasks"),
)


class Others(Mapping[int, Any]):
    """The living but one, by the id of their hosts."""

    def __init__(self, network: LossNetwork, own: int) -> None:
        self.network, self.own = network, own

    def __getitem__(self, host_id: int) -> Any:
        if host_id == self.own:
            raise KeyError(host_id)
        return self.network.members[self.network.host_ids[host_id]]

    def __iter__(self) -> Iterator[int]:
        return iter([host_id for host_id in self.network.host_ids if host_id != self.own])

    def __len__(self) -> int:
        return len(list(iter(self)))


class LossRoster:
    """As hoplite_mp._node.roster.Roster, of one side."""

    def __init__(self, network: LossNetwork, own: int) -> None:
        self.by_host_id = Others(network, own)
        self.by_number = network.members
        self.leaving: set[int] = set()
        self.leaves = False

    @property
    def host_ids(self) -> list[int]:
        return list(self.by_host_id)

    def number_of(self, host_id: int) -> int | None:
        member = self.by_host_id.get(host_id)
        return None if member is None else int(member.node)


class LossSide(Side):
    """One host; `after` is called by `LossNetwork.pass_time`."""

    def __init__(self, network: LossNetwork, number: int) -> None:
        super().__init__(network, number)
        self.node.set_number(number)
        self.losses = network
        self.pools_gone: dict[int, str] = {}
        self.suspects: dict[int, Any] = {}  # lost to this host alone, so far
        self.ranked = _tasks.Ranked(self.node_tasks)
        self.posted_ranks: list[tuple[int, int]] = []  # of tasks that are run again
        self.replicas = Replicas(
            self.results, self.imports, self.exports, self.remote_objects, self.send, self.loop
        )
        node = SimpleNamespace(
            results=self.results,
            remote_objects=self.remote_objects,
            config=self.results.config,
            loop=self.loop,
            imports=self.imports,
            exports=self.exports,
            number=number,
            client=self.node,
            send_manager=lambda message: network.to_manager(message),
            workers=SimpleNamespace(queue_for=self.queue_for),
            store=self.store,
            tasks=self.node_tasks,
        )
        peers = SimpleNamespace(
            send=self.send, by_host_id=network.host_ids, number_of=network.host_ids.get
        )
        lan = SimpleNamespace(
            replicas=self.replicas,
            peers=peers,
            inbound_tasks=self.inbound_tasks,
            outbound_tasks=self.outbound_tasks,
            members=network.members,
            suspects=SimpleNamespace(members=self.suspects),
        )
        self.components: Any = node
        self.lan: Any = lan
        roster: Any = LossRoster(network, self.host_id)
        self.questions = Questions(self.loop, roster, self.send)
        self.host: Any = SimpleNamespace(
            **{name: getattr(node, name) for name in FIELDS},
            send_peer=self.send,
            roster=roster,
            questions=self.questions,
        )
        self.recovery = lan.recovery = Recovery(
            self.host,
            self.replicas,
            self.inbound_tasks,
            lan.suspects,
            SimpleNamespace(demand_of=lambda oid: (), wait=lambda oid, demand: None),  # type: ignore[arg-type]
            SimpleNamespace(
                queue_for=self.queue_for, post=self.post_run, may_run_again=lambda oid: True
            ),  # type: ignore[arg-type]
            self.node_events,
        )
        recovery, up = self.recovery, self.node_events
        up.make_room = recovery.lineage.make_room
        up.extra_holds = lambda oid: recovery.lineage.holds(oid) + (oid in self.inbound_tasks)  # type: ignore[method-assign]
        up.ask_for_owner, up.nobody_named = (
            recovery.owners.ask_for_owner,
            recovery.reconstruction.ask_again,
        )
        up.is_inbound = recovery.is_run_here
        up.result_held = self.replicas.watch_result
        self.node_events.ends_elsewhere = self.recovery.keep
        self.node_events.target_of = self.recovery.target_of
        self.exports.roster = self.host.roster
        self._imports_freed = self.imports.freed
        self.imports.freed = self._freed  # type: ignore[method-assign]

    def _freed(self, oid: int) -> None:
        one = self.imports.by_oid.get(oid)
        self._imports_freed(oid)
        if one is not None and oid not in self.imports.by_oid:
            self.recovery.freed(one)

    def queue_for(self, pool: int, here: bool) -> int | str:
        if pool in self.pools_gone:
            return self.pools_gone[pool]
        if self.again_queue is None:
            self.again_queue = self.node_tasks.open_queue(COMMON)
        return self.again_queue

    def post_run(self, oid: int, here: bool) -> bool:
        self.posted_ranks.append(self.ranked.ranks(oid))
        queue = self.queue_for(self.node_tasks.pool_of(oid), here)
        assert isinstance(queue, int)
        return self.node_tasks.post(oid, queue)

    def take(self, peer: int, message: Any) -> None:
        match message:
            case Release():
                if not self.inbound_tasks.release(peer, message):
                    self.recovery.released(peer, message)
            case Reconstruct():
                self.exports.make_again(peer, message)
            case ReplicaStored():
                self.exports.kept(peer, message)
            case DropReplica():
                self.replicas.let_go(message.object)
            case CopiesAsked():
                self.recovery.replica_query.asked(peer, message)
            case CopiesTold():
                self.questions.answered(peer, message)
            case _:
                super().take(peer, message)

    def lose_member(self, member: Any) -> None:
        self.recovery.peer_lost(member)
        self.outbound_tasks.lose_runner(member.host_id)
        self.inbound_tasks.peer_lost(gone(member.host_id))
        self.replicas.peer_lost(gone(member.host_id))
        self.questions.peer_lost(gone(member.host_id))
        self.exports.peer_lost(gone(member.host_id))
        self.remote_objects.peer_lost(gone(node=member.node))

    def gone(self, number: int) -> None:
        """The manager has said so."""
        self.recovery.report(number)

    def poll(self) -> None:
        super().poll()
        self.recovery.poll()

    def bring(self) -> None:
        """What is being fetched comes from the first holder that has it; without one it is lost."""
        for oid, remote in list(self.fetching.items()):
            sides = [self.network.sides[holder] for holder in remote.holders]
            living = [side for side in sides if side.host_id not in self.network.dead]
            found = [got for side in living if not isinstance(got := _has(side, remote), int)]
            if not found:
                self.remote_objects.lost(oid, "refused")
                continue
            self.node.memory(remote.payload, remote.nbytes)[:] = memoryview(found[0])
            del self.fetching[oid], found
            self.remote_objects.arrived(oid)
            self.replicas.tell(remote.object, remote.nbytes)

    def keep(self, object_id: bytes, source: Side) -> None:
        """A collective places a copy here."""
        at = source.imports.own(object_id)
        mem = memoryview(source.node.view(at))  # type: ignore[arg-type]
        payload = self.store.lease(mem.nbytes, 0)
        assert payload is not None
        self.node.memory(payload, mem.nbytes)[:] = mem
        self.replicas.seal(object_id, payload, mem.nbytes)

    def read(self, hold: Any) -> Any:
        """What a process of this host gets; waits for what is fetched or made again."""
        heard: list[int] = []
        if self.node.state(hold.oid) == STATE["SPILLED"]:
            assert self.remote_objects.want(hold.oid, lambda: heard.append(1))
            self.losses.settle()
        value = self.value(hold)
        assert not isinstance(value, str) or value not in STATES, value
        if isinstance(value, ObjectLostError):
            return str(value)
        return value


def _has(side: Side, remote: RemoteObject) -> Any:
    there = side.imports.by_object.get(remote.object)
    return side.node.view(side.imports.own(remote.object) if there is None else there.oid)


def _member(number: int, host_id: int) -> Any:
    return SimpleNamespace(host_id=host_id, node=number, workers=1, stays=True, resources=())


class LossNetwork(Network):
    """Hosts, a planner, and time that passes when it is told to."""

    side = LossSide

    def __init__(self, size: int) -> None:
        self.planner = Planner()
        self.members: dict[int, Any] = {}
        self.host_ids: dict[int, int] = {}  # of living hosts -> number
        for number in range(size):
            host_id = 1000 + number
            self.host_ids[host_id] = number
            self.members[number] = _member(number, host_id)
            self.planner.step(NodeJoined(host_id, 0, 2), 0.0)
        self.held_back: list[tuple[int, Any]] | None = None  # words of the manager
        self.no_manager = False  # what it is told is lost
        super().__init__(size)

    def to_manager(self, message: Any) -> None:
        if self.no_manager:
            return
        for number, answer in self.planner.step(message, 0.0).sends:
            if not isinstance(answer, (OwnersNamed, OwnerTold)):
                continue
            if self.held_back is not None:
                self.held_back.append((number, answer))
            elif number in self.members:
                deliver(self.sides[number].recovery.owners, answer)  # type: ignore[attr-defined]

    def say(self, held: list[tuple[int, Any]]) -> None:
        """Words of the manager come that were held back."""
        for number, answer in held:
            if number in self.members:
                deliver(self.sides[number].recovery.owners, answer)  # type: ignore[attr-defined]

    def restart_manager(
        self, meanwhile: Callable[[], object] = lambda: None, own: int | None = None
    ) -> None:
        """Another one, which knows what the nodes tell it. meanwhile: called when all have said
        what they know, before any of them is admitted. own: the node of its host; None: the first
        that lives."""
        self.no_manager = False
        own = self.living[0].number if own is None else own
        self.planner = Planner(again=True, own=own)
        numbers = len(self.sides)
        members = tuple(Member(one.node, 0, one.host_id, 2) for one in self.members.values())
        for side in self.living:
            self.to_manager(NodeReturned(side.number, 0, numbers, members))
            for message in list(side.recovery.owners.report_again()):
                self.to_manager(message)
        meanwhile()
        for side in self.living:
            self.to_manager(Reported(side.number))
        for number in sorted({*range(numbers)} - self.members.keys()):
            for side in self.living:  # whom it has just admitted, and told that this one is gone
                side.gone(number)

    @property
    def living(self) -> list[LossSide]:
        return [side for side in self.sides if side.host_id not in self.dead]  # type: ignore[misc]

    def lose(self, side: Side, report: bool = True) -> None:
        """That host dies; the others learn of it, then the manager, then all of that."""
        self.notice(side)
        self.to_manager(NodeLost(side.number, 0))
        if report:
            self.report(side)

    def notice(self, side: Side) -> None:
        """That host dies; the others learn of it, and not from the manager."""
        self.dead.add(side.host_id)
        del self.host_ids[side.host_id]
        member = self.members.pop(side.number)
        for other in self.living:
            other.lose_member(member)

    def report(self, side: Side) -> None:
        """The manager's word of that death has come to all."""
        for other in self.living:
            other.gone(side.number)

    def back(self, side: LossSide) -> None:
        """That host, which the others take for dead, has lived all the time and has the next
        manager; so it is a member again."""

        def returns() -> None:
            self.dead.remove(side.host_id)
            self.host_ids[side.host_id] = side.number
            self.members[side.number] = _member(side.number, side.host_id)
            members = tuple(Member(one.node, 0, one.host_id, 2) for one in self.members.values())
            self.to_manager(NodeReturned(side.number, 0, len(self.sides), members))

        self.held_back = []
        self.restart_manager(returns, side.number)
        held, self.held_back = self.held_back, None
        for other in self.living:
            if other is not side:  # the manager's list of members comes before its other words
                other.recovery.came(side.host_id)
        self.say(held)

    def pass_time(self) -> None:
        """Every timer that waits is called once."""
        for side in self.living:
            side.loop.call_all()

    def settle(self, rounds: int = 6) -> None:
        """Messages, timers and fetched bytes, until nothing new can be expected."""
        for _ in range(rounds):
            self.pump()
            for side in self.living:
                side.bring()
            self.pump()
            self.pass_time()
        self.pump()


@pytest.fixture
def network() -> Iterator[LossNetwork]:
    """Host 0 sends; hosts 1 to 3 have a worker each."""
    made = LossNetwork(4)
    for side in made.sides[1:]:
        made.sides[0].outbound_tasks.set_runner(side.host_id, side.number, 1)
    yield made
    made.close()


@pytest.fixture
def sender(network: LossNetwork) -> LossSide:
    return network.living[0]


def run_one(network: LossNetwork, value: Any) -> LossSide | None:
    """The one task that has been sent somewhere is run there; None: none has."""
    network.pump()
    for side in network.living:
        task = side.take_task()
        if task:
            side.answer(task, value)
            network.pump()
            return side
    return None


def submit_and_run(
    network: LossNetwork, value: Any, *args: Any, **options: Any
) -> tuple[int, LossSide]:
    """A task of host 0 that another host runs: its id, and that host."""
    sender = network.living[0]
    oid = sender.submit(args, holds=[arg for arg in args if isinstance(arg, ObjectRef)], **options)
    runner = run_one(network, value)
    assert runner is not None
    assert runner is not sender
    assert sender.tasks.done(oid)
    drop_arguments(sender, oid)
    return oid, runner


def drop_arguments(side: LossSide, oid: int) -> None:
    """What a submitter does when its task is done."""
    side.sent[oid] = side.sent[oid][:1]
    side.party.collect()


def is_absent(side: LossSide, oid: int) -> bool:
    return side.remote_objects.absent(oid)


def assert_no_lineage_kept(network: LossNetwork) -> None:
    """When nobody holds anything, nothing is kept: no lineage, no bytes, no header."""
    for side in network.living:
        side.sent.clear()
        side.party.collect()
    for _ in range(4):
        network.settle(2)
        for side in network.living:
            side.party.collect()
            side.store.take_returns()
    for side in network.living:
        assert not side.recovery.lineage.entries
        assert not side.recovery.lineage.held
        assert side.recovery.lineage.nbytes == 0
        assert not side.recovery.reconstruction.runs
        assert not side.recovery.reconstruction.by_run
        assert not side.remote_objects.by_oid
        assert not side.exports.exports
        assert not side.imports.by_oid
        assert states_of(side.node) == []
        assert not side.store.leases
