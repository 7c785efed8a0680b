"""Several whole nodes in one process, with a planner as their manager.

The planner receives the messages of the nodes to their manager, and its messages about owners are
delivered. No engine moves bytes: a test delivers copies by `Side.bring`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from hoplite_mp import _serialize
from hoplite_mp._common import ids
from hoplite_mp._common.object_states import FIRST_SLOT, STATE
from hoplite_mp._common.ref import ObjectRef
from hoplite_mp._node.actors.actor_records import WantedActor
from hoplite_mp._planner.planner_core import Planner
from hoplite_mp._protocol.actors import ActorRestarts, BindActor
from hoplite_mp._protocol.membership import NodeReturned, ReportComplete
from hoplite_mp._protocol.messages import (
    Member,
    MembersChanged,
    NodeAdmitted,
    NodeJoined,
    NodeLost,
    OwnerReport,
    OwnersReassigned,
    PeerLost,
)
from hoplite_mp.errors import ObjectLostError
from tests.support.node_harness import HarnessNetwork, NodeHarness, member
from tests.support.shm_host import KIND_TASK

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from hoplite_mp import _shm
    from hoplite_mp._node.objects.remote_objects import RemoteObject

COMMON = 0  # the pool of every host's own workers
STATES = list(STATE)
BIG = np.arange(40_000, dtype=np.float64)


class Side(NodeHarness):
    """One host. The client of its one worker, `party`, also submits tasks."""

    network: Network

    def __init__(self, **about: Any) -> None:
        super().__init__(workers=1, **about)
        parts, cluster = self.parts, self.cluster
        self.results, self.sweeper = parts.results, parts.sweeper
        self.imports, self.exports = parts.imports, parts.exports
        self.remote_objects, self.questions = parts.remote_objects, parts.questions
        self.outbound_tasks, self.inbound_tasks = parts.outbound_tasks, parts.inbound_tasks
        self.recovery, self.replicas = cluster.recovery, cluster.replicas
        self.remote_objects.fetcher = self
        self.fetching: dict[int, RemoteObject] = {}
        self.pid = self.worker_started(FIRST_SLOT)
        self.worker = self.process(FIRST_SLOT)
        self.party, self.tasks = self.worker.client, self.worker.tasks
        self.submitted: dict[int, Any] = {}  # tasks of the party -> what it holds for them

    def reported(self, message: Any) -> None:
        super().reported(message)
        self.network.to_manager(message)

    # -- the fetcher ---------------------------------------------------------------------------

    def fetch(self, oid: int, remote: RemoteObject) -> None:
        self.fetching[oid] = remote

    def forget(self, oid: int, remote: RemoteObject) -> None:
        self.fetching.pop(oid, None)

    def bring(self) -> None:
        """Copies each requested object from its first living holder; without one it is lost."""
        for oid, remote in list(self.fetching.items()):
            sides = [self.network.nodes[holder] for holder in remote.holders]
            living = [side for side in sides if side.host_id not in self.network.dead]
            found = [got for side in living if not isinstance(got := side.copy_of(remote), int)]
            if not found:
                self.remote_objects.lost(oid, "refused")
                continue
            self.node.memory(remote.payload, remote.nbytes)[:] = memoryview(found[0])
            del self.fetching[oid], found
            self.remote_objects.arrived(oid)
            self.replicas.tell(remote.object, remote.nbytes)

    def copy_of(self, remote: RemoteObject) -> Any:
        """The bytes of the object here, or the state of its header as an int."""
        here = self.imports.by_object.get(remote.object)
        return self.node.view(self.imports.own(remote.object) if here is None else here.oid)

    def keep(self, object_id: bytes, source: Side) -> None:
        """Places a replica here, as a collective does."""
        mem = memoryview(source.node.view(source.imports.own(object_id)))  # type: ignore[arg-type]
        payload = self.store.lease(mem.nbytes, 0)
        assert payload is not None
        self.node.memory(payload, mem.nbytes)[:] = mem
        self.replicas.seal(object_id, payload, mem.nbytes)

    # -- the party -----------------------------------------------------------------------------

    def put(self, value: Any) -> tuple[bytes, Any]:
        """(public id, hold of the party)."""
        hold = self.worker.put(value)
        return ids.pack_id(self.host_id, hold.oid), hold

    def pending(self) -> tuple[bytes, Any]:
        """A running task of the party."""
        oid = self.party.new(KIND_TASK, STATE["CLAIMED"], self.party.slot, COMMON)
        return ids.pack_id(self.host_id, oid), self.party.hold(oid, False)

    def finish(self, object_id: bytes, value: Any) -> None:
        self.worker.finish(ids.unpack_id(object_id)[1], value)

    def submit(
        self, args: tuple[Any, ...] = (), *, holds: Any = (), retries: int = 3, **options: Any
    ) -> int:
        """Submits a task of the party. Its function is an ordinary object."""
        _, function = self.put("the function")
        call = _serialize.encode_call(args, {}).tobytes()
        hold = self.worker.submit(function=function.oid, args=call, retries=retries, **options)
        self.submitted[hold.oid] = [hold, function, holds]
        return int(hold.oid)

    def take_task(self) -> int:
        """The party claims a task; 0: there is none."""
        return self.worker.next()

    def complete(self, oid: int, value: Any) -> None:
        """Sets the result of that task, or discards it if the task was cancelled."""
        self.worker.finish(oid, value, settles=True)

    def hold(self, object_id: bytes) -> list[Any]:
        """Requests an object of another host. The list gets the party's hold when the owner has
        answered."""
        found: list[Any] = []

        def done(holds: list[Any]) -> None:
            found.extend(None if hold is None else self.party.hold(hold.oid) for hold in holds)

        self.imports.ask([object_id], done)
        return found

    def value(self, hold: Any) -> Any:
        """The value that the party reads, or the name of the header's state."""
        return self.worker.value(hold.oid)

    def read(self, hold: Any) -> Any:
        """The value, after it was fetched or computed again if necessary."""
        if self.node.state(hold.oid) == STATE["SPILLED"]:
            assert self.remote_objects.want(hold.oid, lambda: None)
            self.network.settle()
        value = self.value(hold)
        assert not isinstance(value, str) or value not in STATES, value
        return str(value) if isinstance(value, ObjectLostError) else value

    # -- actors --------------------------------------------------------------------------------

    def begin(self, setup: bytes, **wanted: Any) -> bytes:
        """Starts an actor on this host; returns its identity. `held` is the hold of its creator."""
        (hold,) = self.hold(setup)
        options: dict[str, Any] = {
            "class_name": "Counter", "name": "", "restarts": 2, "get_if_exists": False,
            "detached": False, "output_owner": 0, **wanted,
        }  # fmt: skip
        self.parts.actors.begin(self, WantedActor(hold.oid, b"about", **options))  # type: ignore[arg-type]
        return ids.pack_id(self.host_id, self.held.oid)

    def granted(self, hold: Any) -> None:
        self.held = self.party.hold(hold.oid)

    def bind(self, hold: Any, there: int, retries: int = 1) -> int:
        """The pool on this host for calls of the actor of that handle."""
        return int(self.answer(self.party.slot, BindActor(hold.oid, there, 2, retries, ())).value)

    def ask_restarts(self, hold: Any) -> None:
        """Requests the number of restarts; the answer is among the replies."""
        self.ask(self.party.slot, ActorRestarts(hold.oid))

    def actor(self, identity: bytes) -> Any:
        """The actor's record on this host; None: it runs on another host."""
        return self.parts.actors.by_identity.get(self.imports.own(identity))

    @property
    def started(self) -> list[int]:
        """Pools of the processes that were started for actors."""
        return [ask.pool for ask in self.processes.spawned if ask.pool != COMMON]


class Network(HarnessNetwork):
    """Hosts with a planner. `set_runners` lets a host send tasks to others."""

    node_class = Side
    nodes: list[Side]

    def __init__(self, size: int) -> None:
        self.planner = Planner()
        self.members: dict[int, Member] = {}  # the living ones
        self.held_back: list[tuple[int, Any]] | None = None  # messages of the manager
        self.no_manager = True  # messages to the manager are lost
        for number in range(size):
            self.members[number] = self.member(number)
            self.planner.step(NodeJoined(1000 + number, 0, 2), 0.0)
        super().__init__(size)
        self.no_manager = False

    def member(self, number: int) -> Member:
        return member(number, 0, stays=True)

    def set_runners(self, sender: Side, *runners: Side, workers: int = 1) -> None:
        """Lets the host send tasks to these."""
        for side in runners:
            if side is not sender:
                sender.outbound_tasks.set_runner(side.host_id, side.number, workers)

    def to_manager(self, message: Any) -> None:
        if self.no_manager or isinstance(message, PeerLost):
            return
        for number, answer in self.planner.step(message, 0.0).sends:
            if not isinstance(answer, (OwnersReassigned, OwnerReport)):
                continue
            if self.held_back is not None:
                self.held_back.append((number, answer))
            else:
                self.say([(number, answer)])

    def say(self, held: list[tuple[int, Any]]) -> None:
        """Delivers messages of the manager."""
        for number, answer in held:
            if number in self.members:
                self.nodes[number].from_manager(answer)

    def restart_manager(
        self, meanwhile: Callable[[], object] = lambda: None, own: int | None = None
    ) -> None:
        """Starts a new manager, which knows only the reports of the nodes. meanwhile: called when
        all nodes have reported, before any is admitted. own: the node of the manager's host; None:
        the first living one."""
        self.no_manager = False
        own = self.living[0].number if own is None else own
        self.planner = Planner(again=True, own=own)
        for side in self.living:
            self.returns(side)
            for message in list(side.recovery.owners.report_again()):
                self.to_manager(message)
        meanwhile()
        for side in self.living:
            self.to_manager(ReportComplete(side.number))
        self.admit()

    def admit(self) -> None:
        """The new manager admits all living nodes."""
        for side in self.living:
            members = tuple(self.members.values())
            side.from_manager(NodeAdmitted(side.number, 0, members, len(self.nodes)))

    def returns(self, side: Side) -> None:
        members = tuple(Member(one.node, 0, one.host_id, 2) for one in self.members.values())
        self.to_manager(NodeReturned(side.number, 0, len(self.nodes), members))

    def lose(self, side: Side, report: bool = True) -> None:
        """The host dies. The others notice, then the manager, which reports it to them."""
        self.notice(side)
        self.to_manager(NodeLost(side.number, 0))
        if report:
            self.report(side)

    def notice(self, side: Side) -> None:
        """The host dies. The others notice before the manager does."""
        self.dead.add(side.host_id)
        gone = self.members.pop(side.number)
        for other in self.living:
            other.cluster.lost(gone)

    def report(self, side: Side) -> None:
        """The manager reports the death to all others."""
        for other in self.living:
            other.from_manager(MembersChanged((), (side.number,)))

    def back(self, side: Side) -> None:
        """A host that was declared dead is alive and runs the next manager, so it is a member
        again."""

        def lives() -> None:
            self.dead.remove(side.host_id)
            self.members[side.number] = self.member(side.number)
            self.returns(side)

        self.held_back = []
        self.restart_manager(lives, side.number)
        held, self.held_back = self.held_back, None
        self.say(held)

    def pass_time(self) -> None:
        """Calls each pending timer once."""
        for side in self.living:
            side.loop.call_all()

    def settle(self, rounds: int = 6) -> None:
        """Delivers messages, timers and copies until nothing is under way."""
        for _ in range(rounds):
            self.pump()
            for side in self.living:
                side.bring()
            self.pump()
            self.pass_time()
        self.pump()


def states_of(client: _shm.Client) -> list[str]:
    """The states of all headers in use."""
    return [header["state"] for header in client.scan()]


def remote_hold(network: Network, side: Side, object_id: bytes) -> list[Any]:
    found = side.hold(object_id)
    network.pump()
    assert len(found) == 1
    return found


def run_one(network: Network, value: Any) -> Side | None:
    """Runs the one task that a host has received; returns the host, or None without a task."""
    network.pump()
    for side in network.living:
        task = side.take_task()
        if task:
            side.complete(task, value)
            network.pump()
            return side
    return None


def submit_and_run(network: Network, value: Any, *args: Any, **options: Any) -> tuple[int, Side]:
    """Runs a task of host 0 on another host; returns its id and that host."""
    sender = network.living[0]
    oid = sender.submit(args, holds=[arg for arg in args if isinstance(arg, ObjectRef)], **options)
    runner = run_one(network, value)
    assert runner is not None
    assert runner is not sender
    assert sender.tasks.done(oid)
    drop_arguments(sender, oid)
    return oid, runner


def drop_arguments(side: Side, oid: int) -> None:
    """Releases the arguments of a task that is done, as its submitter does."""
    side.submitted[oid] = side.submitted[oid][:1]
    side.party.collect()


def is_absent(side: Side, oid: int) -> bool:
    return side.remote_objects.absent(oid)


def assert_nothing_kept(network: Network) -> None:
    """Once nobody holds anything, no lineage, bytes or headers are kept."""
    for side in network.living:
        side.submitted.clear()
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
        assert not any(side.exports._watched.values())
        assert not side.imports.by_object
        assert not side.imports.by_oid
        assert states_of(side.node) == []
        assert not side.store.leases


@pytest.fixture
def network() -> Iterator[Network]:
    """Host 0 sends; hosts 1 to 3 have a worker each."""
    made = Network(4)
    made.set_runners(*made.nodes)
    yield made
    made.close()


@pytest.fixture
def sender(network: Network) -> Side:
    return network.living[0]
