"""Actors whose host is lost, where hosts learn of it in different order."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from hoplite_mp._node.actors.actor_backup import ActorBackup
from hoplite_mp._node.objects import ownership_transfer
from hoplite_mp._protocol.fields import NAME_CHARS_MAX
from hoplite_mp._protocol.messages import ActorNameClaimed, ActorNameQuery, NodeLost
from hoplite_mp._protocol.peers import DropActorBackup
from hoplite_mp.errors import ActorLostError
from tests.support.node_hosts import BIG, Network, Side
from tests.support.shm_host import STATE

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hoplite_mp._protocol.messages import Member


class Played:
    """An actor of the second host, made from an object of the first one, with a caller there; the
    third one is its backup."""

    def __init__(
        self, network: Network, value: Any = "setup", retries: int = 1, **wanted: Any
    ) -> None:
        self.network = network
        self.maker, self.owner, self.backup, self.other = network.nodes
        setup, self.hold = self.maker.put(value)
        network.pump()
        found = self.owner.hold(setup)
        network.pump()
        assert found
        self.identity = self.owner.begin(setup, **wanted)
        self.there = self.owner.actor(self.identity).pool
        found = self.maker.hold(self.identity)
        network.pump()
        (self.handle,) = found
        self.pool = self.maker.bind(self.handle, self.there, retries)

    @property
    def calls(self) -> Any:
        """Where calls of the maker go."""
        return self.maker.cluster.remote_actors.bound.get(self.pool)

    def lose_owner(self, first: Side) -> None:
        """The manager's word of it comes to that host before it comes to any other."""
        self.network.held_back = []
        self.network.lose(self.owner)
        self.network.pump()
        self.held, self.network.held_back = self.network.held_back, None
        self.network.say([one for one in self.held if one[0] == first.number])
        self.network.pump()

    def say_rest(self, first: Side) -> None:
        """To all others."""
        self.network.say([one for one in self.held if one[0] != first.number])


def runners(side: Side, pool: int) -> list[tuple[int, int]]:
    return [(one.host_id, one.pool) for one in side.outbound_tasks.remote_runners.get(pool, ())]


def test_call_to_a_restarted_actor_waits_until_the_backup_is_informed(network: Network) -> None:
    played = Played(network)
    network.settle()
    played.lose_owner(played.maker)
    assert played.calls.ended is None
    played.say_rest(played.maker)
    network.settle()
    actor = played.backup.actor(played.identity)
    assert actor.restarts == 1
    assert played.backup.started == [actor.pool]
    assert played.calls.ended is None
    assert runners(played.maker, played.pool) == [(played.backup.host_id, actor.pool)]


@pytest.mark.parametrize("kill", [True, False])
def test_actor_ended_before_its_backup_is_informed_is_not_restarted(
    network: Network, kill: bool
) -> None:
    played = Played(network, detached=True)
    network.settle()
    played.lose_owner(played.maker)
    played.maker.cluster.remote_actors.end(played.handle.oid, kill, False)
    network.pump()
    played.say_rest(played.maker)
    network.settle()
    actor = played.backup.actor(played.identity)
    assert (actor.ended is not None) == kill
    assert played.backup.node_tasks.pool_state(actor.pool) == (4 if kill else 2)
    assert actor.hold is None


def test_restarts_query_is_answered_after_the_backup_is_informed(
    network: Network,
) -> None:
    played = Played(network)
    network.settle()
    played.lose_owner(played.maker)
    played.maker.ask_restarts(played.handle)
    network.pump()
    assert not played.maker.replies()
    played.say_rest(played.maker)
    network.settle()
    assert [reply.value for _, reply in played.maker.replies()] == [1]


def test_actor_starts_on_its_backup_when_its_arguments_have_arrived(network: Network) -> None:
    """Who seeks it, closes it or calls it from the new host waits until it has begun."""
    played = Played(network, BIG)
    found = played.backup.hold(played.identity)
    network.pump()
    (near,) = found
    nearby = played.backup.bind(near, played.there)
    assert played.backup.fetching
    played.lose_owner(played.backup)
    played.say_rest(played.backup)
    network.pump()
    assert played.backup.actor(played.identity) is None
    assert played.calls.ended is None
    assert played.backup.cluster.remote_actors.bound[nearby].ended is None
    network.settle()
    actor = played.backup.actor(played.identity)
    assert actor.ended is None
    assert actor.pool == nearby
    assert played.calls.ended is None
    assert runners(played.maker, played.pool) == [(played.backup.host_id, nearby)]
    assert not played.backup.node_events.actor_failover.beginning


def test_actor_whose_arguments_are_lost_with_its_host_ends(network: Network) -> None:
    """The backup has not got it in time, and nobody else has it."""
    played = Played(network, BIG)
    assert played.backup.fetching
    played.hold = None
    network.lose(played.maker)
    played.network.lose(played.owner)
    (hold,) = played.backup.hold(played.identity)
    network.settle()
    actor = played.backup.actor(played.identity)
    assert actor is None or actor.ended is not None
    del hold


def test_name_of_an_actor_without_handles_is_free_after_its_host_is_lost(network: Network) -> None:
    """Its last handle has gone, and its host is lost before anybody hears that it has ended."""
    played = Played(network)
    actor = played.owner.actor(played.identity)
    actor.name = "far"
    network.to_manager(ActorNameClaimed(0, played.owner.number, "far", played.identity, True))
    played.owner.cluster.backups.keep(actor)
    network.settle()
    network.no_manager = True
    network.stopped.add((played.owner.host_id, played.backup.host_id))
    played.owner.held = played.handle = None
    network.settle()
    network.no_manager = False
    (kept,) = played.backup.cluster.backups.kept.values()
    assert kept.what.name == "far"
    network.lose(played.owner)
    network.settle()
    assert played.backup.started == []
    (told,) = network.planner.actor_names.ask(ActorNameQuery(1, 0, "far"))
    assert told[1].identity is None


def test_name_reported_by_a_backup_is_free_when_the_actor_ends(
    network: Network,
) -> None:
    """The report reaches a new manager after the actor's own node has had nothing to report."""
    played = Played(network)
    actor = played.owner.actor(played.identity)
    actor.name = "far"
    played.owner.cluster.backups.keep(actor)
    network.settle()
    network.stopped.add((played.owner.host_id, played.backup.host_id))
    network.no_manager = True
    played.owner.held = played.handle = None
    network.settle()
    network.no_manager = False
    (claim,) = played.backup.cluster.backups.report()
    network.to_manager(claim)
    network.stopped.clear()
    network.settle()
    assert not played.backup.cluster.backups.kept
    (told,) = network.planner.actor_names.ask(ActorNameQuery(1, 0, "far"))
    assert told[1].identity is None


def test_replaced_backup_is_informed_when_its_actor_ends(
    network: Network,
) -> None:
    """The former backup may have stated the name to a manager that nobody else told of it."""
    played = Played(network)
    actor = played.owner.actor(played.identity)
    actor.name = "far"
    backups = played.owner.cluster.backups
    backups.keep(actor)
    network.settle()
    former = played.backup.host_id
    backups.roster.leaving.add(former)  # another host becomes the backup
    network.stopped.update((played.owner.host_id, side.host_id) for side in network.nodes)
    backups.keep(actor)
    assert backups.at[actor.identity] != former
    told: list[tuple[int, Any]] = []
    backups.send = lambda host_id, message: told.append((host_id, message)) is None
    played.owner.held = played.handle = None
    network.settle()
    assert {one.ended for host_id, one in told if isinstance(one, DropActorBackup)} == {True}
    assert former in [host_id for host_id, one in told if isinstance(one, DropActorBackup)]


def test_actor_does_not_start_from_a_checkpoint_of_an_earlier_incarnation(network: Network) -> None:
    """A host that was its backup before is so again, of another host, and not all has come yet."""
    played = Played(network)
    network.settle()
    backups = played.backup.cluster.backups
    (kept,) = backups.kept.values()
    assert kept.whole
    later = msgspec.structs.replace(kept.what, setup=played.other.put(BIG)[0])
    backups.peer_handlers[type(later)](played.other.host_id, later)
    assert backups.number_of(played.identity, played.other.host_id) == 0


def test_close_is_executed_after_earlier_calls_that_are_rerouted(network: Network) -> None:
    played = Played(network, retries=0)
    network.settle()
    calls = [played.maker.submit(pool=played.pool, retries=0) for _ in range(3)]
    network.settle()
    played.maker.cluster.remote_actors.end(played.handle.oid, False, False)
    network.lose(played.owner)
    network.settle()
    actor = played.backup.actor(played.identity)
    for at in (1, 2):
        assert played.backup.node_tasks.pool_state(actor.pool) == at  # open, closing
        played.backup.complete(played.backup.tasks.next(actor.pool, 0), at)
        network.settle()
    states = [played.maker.node.state(oid) for oid in calls]
    assert states == [STATE["FAILED"], STATE["SEALED"], STATE["SEALED"]]
    assert played.maker.cluster.remote_actors.closing == []


@pytest.mark.parametrize("end", ["closed here", "closed", "leaving"])
def test_backup_restarts_a_closed_actor_to_finish_its_calls(network: Network, end: str) -> None:
    """Without its name, which may be another actor's by then; that host closes it again. If its own
    host was lost, nobody would."""
    played = Played(network, detached=True)
    actor = played.owner.actor(played.identity)
    actor.name = "far"
    played.owner.cluster.backups.keep(actor)
    network.settle()
    assert [one.what.name for one in played.backup.cluster.backups.kept.values()] == ["far"]
    if end == "leaving":
        played.owner.parts.actors.leave()
    else:
        oid = played.owner.imports.own(played.identity)
        played.owner.parts.actors.end_here(oid, False, remote=end == "closed")
    network.settle()
    if end == "closed here":
        assert not played.backup.cluster.backups.kept
        played.owner.cluster.backups.keep(actor)  # its process dies, or keeps a state
        network.settle()
        assert not played.backup.cluster.backups.kept
        return
    (kept,) = played.backup.cluster.backups.kept.values()
    assert kept.what.name == ""
    assert kept.what.detached == (end == "leaving")


class GpuNetwork(Network):
    """Every second host has a GPU."""

    def member(self, number: int) -> Member:
        resources = (("gpu", 10_000),) if number % 2 else ()
        return msgspec.structs.replace(super().member(number), resources=resources)

    def make(self, number: int) -> Side:
        resources = "gpu=1" if number % 2 else None
        return Side(number=number, host_id=1000 + number, network=self, resources=resources)


@pytest.fixture
def gpu_network() -> Iterator[Network]:
    made = GpuNetwork(4)
    yield made
    made.close()


def test_actor_restarts_on_the_host_with_its_resources(gpu_network: Network) -> None:
    """With those, and with its environment."""
    network = gpu_network
    demand, env = (("gpu", 10_000),), (("WORD", "there"),)
    played = Played(network, demand=demand, env=env)
    network.settle()
    played.lose_owner(played.other)
    played.say_rest(played.other)
    network.settle()
    assert not played.backup.started
    (pool,) = played.other.started
    begun = played.other.parts.workers.pools[pool]
    assert (begun.demand, begun.env) == (demand, env)


@pytest.mark.parametrize("owner", [0, 2, 3])
def test_backup_is_dropped_only_when_its_actor_has_another_owner(
    network: Network, owner: int
) -> None:
    """Of an actor of the first host, or of the third one, which the second one can begin again."""
    mine = network.nodes[1]
    identity, what = bytes(16), None
    for now in network.nodes:
        backup = ActorBackup(network.nodes[owner].host_id, owner, what)  # type: ignore[arg-type]
        mine.cluster.backups.kept[identity] = backup
        found = mine.cluster.backups.take_over(identity, now.host_id)
        assert found is (backup if now is mine else None)
        assert (identity in mine.cluster.backups.kept) == (now is network.nodes[owner])
    mine.cluster.backups.kept.clear()


@pytest.mark.parametrize("kill", [True, False])
def test_end_request_lost_with_a_host_is_repeated_to_the_next_host(
    network: Network, kill: bool
) -> None:
    played = Played(network, detached=True)
    network.settle()
    played.maker.cluster.remote_actors.end(played.handle.oid, kill, False)
    played.lose_owner(played.maker)
    played.say_rest(played.maker)
    network.settle()
    actor = played.backup.actor(played.identity)
    assert (actor.ended is not None) == kill
    assert played.backup.node_tasks.pool_state(actor.pool) == (4 if kill else 2)


def test_calls_fail_if_no_host_is_named_for_the_actor(
    network: Network, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seed 1206283: callers waited for ever, although no host would begin it again. It is the same
    for who asks for its restarts, and for who calls it for the first time later."""
    played = Played(network, retries=0)
    maker, backup, other = played.maker, played.backup, played.other
    found = other.hold(played.identity)
    network.settle()
    (late,) = found
    calls = [maker.submit(pool=played.pool, retries=0) for _ in range(3)]
    network.settle()
    network.notice(played.owner)
    maker.ask_restarts(played.handle)
    network.settle()
    assert [maker.node.state(oid) for oid in calls] == [STATE["FAILED"], *[STATE["QUEUED"]] * 2]
    assert not maker.replies()
    assert backup.cluster.backups.kept
    monkeypatch.setattr(
        ownership_transfer, "HOLDINGS_MAX", 0
    )  # no host has room for it in its report
    network.to_manager(NodeLost(played.owner.number, 0))
    network.report(played.owner)
    network.settle()
    assert [maker.node.state(oid) for oid in calls] == [STATE["FAILED"]] * 3
    assert isinstance(maker.value(maker.party.hold(calls[-1])), ActorLostError)
    assert [reply.value for _, reply in maker.replies()] == [0]
    assert not backup.started
    assert not backup.cluster.backups.kept
    pool = other.bind(late, played.there, 0)
    assert other.cluster.remote_actors.bound[pool].ended is not None


def test_actor_too_large_for_a_message_has_no_backup(
    network: Network, caplog: pytest.LogCaptureFixture
) -> None:
    played = Played(network, class_name="K" * (NAME_CHARS_MAX + 1))
    owner = played.owner
    actor, told = owner.actor(played.identity), []
    owner.parts.actors.keep(actor, lambda: told.append(True))  # as for ActorReady
    owner.cluster.backups.peer_joined()
    network.pump()
    assert told
    assert actor.identity not in owner.cluster.backups.at
    assert [one.getMessage() for one in caplog.records if "another host" in one.getMessage()] == [
        f"actor {'K' * 194} cannot be restarted on another host, because no message can carry what "
        "that host needs: class_name must be a string of 0 to 1024 characters: 1025 characters"
    ]


def test_backup_is_dropped_when_later_state_is_too_large_for_a_message(network: Network) -> None:
    played = Played(network)
    network.pump()
    owner = played.owner
    actor = owner.actor(played.identity)
    assert played.identity in played.backup.cluster.backups.kept
    actor.class_name = "K" * (NAME_CHARS_MAX + 1)
    owner.parts.actors.keep(actor)
    network.pump()
    assert played.identity not in played.backup.cluster.backups.kept
    owner.cluster.backups.ended(actor)
    assert not owner.cluster.backups.unkept
