"""Hosts as in node_losses.py, with actors: real components, and no worker processes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from hoplite_mp._common import ids
from hoplite_mp._node.actors.actor_backup import ActorBackups
from hoplite_mp._node.actors.actor_failover import ActorFailover
from hoplite_mp._node.actors.actor_records import WantedActor
from hoplite_mp._node.actors.actors import LocalActors
from hoplite_mp._node.actors.remote_actors import RemoteActors
from hoplite_mp._node.tasks.pools import Pool
from hoplite_mp._protocol.actors import ActorRestarts, BindActor
from hoplite_mp._protocol.local import Request
from hoplite_mp._protocol.peers import ActorBegun, RestartsTold
from tests.support.node_losses import LossNetwork, LossSide

POOLS = 9  # the number of the first one
PROCESS = 2  # the slot of the one that asks


class ActorSide(LossSide):
    """One host. Its actors' processes are those that `started` names, by pool."""

    network: ActorNetwork

    def __init__(self, network: ActorNetwork, number: int) -> None:
        super().__init__(network, number)
        self.started: list[int] = []
        self.replies: list[Any] = []
        self.pools: dict[int, Pool] = {}
        node, lan = self.components, self.lan
        host = self.host
        host.reply = node.reply = lambda slot, reply: self.replies.append(reply)
        host.replier = lambda slot: self.replies.append
        node.workers = SimpleNamespace(
            queue_for=self.queue_for,
            open=self.open_actors,
            open_bound=lambda owner, output_owner: self.open_pool(Pool(0, 0, owner)),
            start_missing=lambda pool: self.started.append(pool.number),
            close=lambda pool, kill: self.started.remove(pool) if pool in self.started else None,
            pools=self.pools,
            tasks_failed=0,
        )
        host.clients = {PROCESS: self.party}
        node.lan = lan
        node.outbound_tasks, node.inbound_tasks = self.outbound_tasks, self.inbound_tasks
        self.node_events.pool_deserted = lambda pool, why: lan.remote_actors.lost(pool, why)
        nobody: Any = None  # no resources here
        up, components = self.node_events, (node.workers, self.outbound_tasks, self.inbound_tasks)
        node.actors = LocalActors(host, node.workers, self.inbound_tasks, nobody, up)
        self.node_events.is_actor = node.actors.by_pool.__contains__
        owners = self.recovery.owners
        lan.remote_actors = RemoteActors(host, node.actors, *components, owners, up)
        lan.backups = ActorBackups(host, node.actors, owners, up)
        lan.actor_failover = ActorFailover(
            host, node.actors, lan.remote_actors, lan.backups, *components, owners
        )
        up.when_known, up.sought = lan.actor_failover.when_known, lan.actor_failover.sought
        up.keep_backup, up.has_ended = lan.backups.keep, lan.backups.ended
        up.remote_freed, up.remote_fail_calls = (
            lan.remote_actors.freed,
            lan.remote_actors.fail_calls,
        )
        up.remote_begin, up.remote_end = lan.remote_actors.begin, lan.remote_actors.end
        up.remote_restarts, up.remote_bind = lan.remote_actors.ask_restarts, lan.remote_actors.bind
        up.moved, up.all_heard = lan.actor_failover.moved, lan.actor_failover.run_ready
        up.ownerless = lan.actor_failover.ownerless
        up.backup_number = lan.backups.number_of

    # -- pools ---------------------------------------------------------------------------------

    def open_pool(self, pool: Pool) -> int:
        pool.number = POOLS + len(self.pools)
        self.pools[pool.number] = pool
        self.node.open_pool(pool.number, 1)
        return pool.number

    def open_actors(self, pool: Pool) -> bool:
        self.started.append(self.open_pool(pool))
        return True

    # -- what hosts tell each other ------------------------------------------------------------

    def take(self, peer: int, message: Any) -> None:
        if isinstance(message, (ActorBegun, RestartsTold)):
            self.questions.answered(peer, message)
        elif handler := self._about_actors().get(type(message)):
            handler(peer, message)
        else:
            super().take(peer, message)

    def _about_actors(self) -> dict[type, Any]:
        return {**self.lan.remote_actors.peer_handlers, **self.lan.backups.peer_handlers}

    def lose_member(self, member: Any) -> None:
        self.lan.backups.peer_lost(member)
        super().lose_member(member)
        self.lan.remote_actors.peer_lost(member)
        self.lan.backups.backup_peer_lost(member)

    def gone(self, number: int) -> None:
        super().gone(number)
        self.lan.backups.are_gone([number])

    def poll(self) -> None:
        super().poll()
        self.lan.remote_actors.poll()

    def _freed(self, oid: int) -> None:
        self.components.actors.freed(oid)
        super()._freed(oid)

    # -- processes of this host ----------------------------------------------------------------

    def begin(self, setup: bytes, **wanted: Any) -> bytes:
        """An actor on this host; its identity. `held` is the hold of the process that made it."""
        (hold,) = self.hold(setup)
        options: dict[str, Any] = {
            "class_name": "Counter", "name": "", "restarts": 2, "get_if_exists": False,
            "detached": False, "output_owner": 0, **wanted,
        }  # fmt: skip
        self.components.actors.begin(self, WantedActor(hold.oid, b"about", **options))
        return ids.pack_id(self.host_id, self.held.oid)

    def granted(self, hold: Any) -> None:
        self.held = self.party.hold(hold.oid)

    def bind(self, hold: Any, there: int, retries: int = 1) -> int:
        """The pool on this host for calls of the actor of that handle."""
        self.lan.remote_actors.bind(PROCESS, 1, BindActor(hold.oid, there, 2, retries, ()))
        return int(self.replies.pop().value)

    def ask_restarts(self, hold: Any) -> None:
        """The answer is among `replies`."""
        asker = self.components.actors.asker(PROCESS, Request(2, 0, ActorRestarts(hold.oid)))
        self.lan.remote_actors.ask_restarts(asker, hold.oid)

    def actor(self, identity: bytes) -> Any:
        """As this host has it; None: it is another's."""
        return self.components.actors.by_identity.get(self.imports.own(identity))


class ActorNetwork(LossNetwork):
    """Hosts with actors."""

    side = ActorSide
    sides: list[ActorSide]  # type: ignore[assignment]

    def __init__(self, size: int) -> None:
        super().__init__(size)
        for side in self.sides:
            for other in self.sides:
                if other is not side:
                    side.outbound_tasks.set_runner(other.host_id, other.number, 1)
