"""Restarts actors on this host after the loss of their host, and delays requests until then.

When an actor's host is lost, the manager chooses a host that can restart the actor, and makes it
the new owner of the actor's identity (_planner/owners.py). That host starts a process from its
backup (_node/actors/actor_backup.py), and then receives the calls from all hosts. Other hosts may
receive the manager's message earlier and send requests about the actor too soon. Such a request
waits until this host has the message and all data for the restart.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hoplite_mp import errors
from hoplite_mp._common.object_states import NODE_SLOT
from hoplite_mp._node.actors.actor_records import ActorRecord, WantedActor
from hoplite_mp._protocol.fields import NO_OBJECT
from hoplite_mp._protocol.messages import ActorNameClaimed
from hoplite_mp._protocol.peers import ActorPoolReport

if TYPE_CHECKING:
    from collections.abc import Callable

    from hoplite_mp._node.actors.actor_backup import ActorBackup, ActorBackups
    from hoplite_mp._node.actors.actors import LocalActors
    from hoplite_mp._node.actors.remote_actors import RemoteActors
    from hoplite_mp._node.objects.context import HostContext
    from hoplite_mp._node.objects.imports import ImportRecord
    from hoplite_mp._node.objects.ownership_transfer import OwnershipTransfer
    from hoplite_mp._node.tasks.inbound_tasks import InboundTasks
    from hoplite_mp._node.tasks.outbound_tasks import OutboundTasks
    from hoplite_mp._node.tasks.workers import Workers

__all__ = ["ActorFailover"]


class ActorFailover:
    """Actors whose identities this host has taken over, or may soon take over."""

    def __init__(
        self,
        host: HostContext,
        actors: LocalActors,
        remote_actors: RemoteActors,
        backups: ActorBackups,
        workers: Workers,
        outbound_tasks: OutboundTasks,
        inbound_tasks: InboundTasks,
        owners: OwnershipTransfer,
    ) -> None:
        self.client = host.client
        self.imports = host.imports
        self.exports = host.exports
        self.send = host.send_peer
        self.send_manager = host.send_manager
        self.actors = actors
        self.remote_actors = remote_actors
        self.backups = backups
        self.workers = workers
        self.outbound_tasks = outbound_tasks
        self.inbound_tasks = inbound_tasks
        self.owners = owners
        self.beginning: set[bytes] = set()  # identities of actors whose state is being fetched
        # Identity -> actions to run as soon as it is known whether the actor is here.
        self.waiting: dict[bytes, list[Callable[[], None]]] = {}

    # -- requests about actors that may be here ------------------------------------------------

    def when_known(self, identity: bytes, action: Callable[[], None]) -> None:
        """Calls `action` once it is known whether the actor is here (usually immediately)."""
        if self._is_open(identity):
            self.waiting.setdefault(identity, []).append(action)
        else:
            action()

    def _is_open(self, identity: bytes) -> bool:
        """Whether the actor's host was lost and the new host is unknown, or the actor is being
        restarted here."""
        if identity in self.beginning:
            return True
        record = self.imports.by_object.get(identity)
        return record is not None and self.owners.is_open(record.owner)

    def run_ready(self) -> None:
        """Runs actions that no longer need to wait, after the manager has named new owners or an
        actor has restarted."""
        for identity in [identity for identity in self.waiting if not self._is_open(identity)]:
            for action in self.waiting.pop(identity):
                action()

    def sought(self, host_id: int, identity: bytes) -> None:
        """Answers another host, which asks where to send calls to the actor."""
        self.when_known(identity, lambda: self._found(host_id, identity))

    def _found(self, host_id: int, identity: bytes) -> None:
        actor = self.actors.by_identity.get(self.imports.own(identity))
        self.send(host_id, ActorPoolReport(identity, 0 if actor is None else actor.pool))

    # -- restarting ----------------------------------------------------------------------------

    def moved(self, record: ImportRecord) -> None:
        """Handles the new owner of an object, which may be an actor's identity."""
        backup = self.backups.take_over(record.object, record.owner)
        if backup is not None and (backup.what.detached or self._is_held(record.oid)):
            self._begin(record, backup)
        elif backup is not None:
            self.backups.release_name(backup)
        self.remote_actors.moved(record)

    def ownerless(self, record: ImportRecord) -> None:
        """Handles an object without a new owner, which may be an actor's identity. The actor is not
        restarted, even if this host could restart it."""
        backup = self.backups.kept.get(record.object)
        if backup is not None and backup.host_id == record.owner:
            del self.backups.kept[record.object]
            self.backups.release_name(backup)
        self.remote_actors.ownerless(record)

    def _is_held(self, identity: int) -> bool:
        """Whether any process, here or elsewhere, holds the identity."""
        export = self.exports.exports.get(identity)
        if export is not None and export.importers:
            return True
        return bool({*self.client.inspect(identity)["refs"]} - {NODE_SLOT})

    def _begin(self, record: ImportRecord, backup: ActorBackup) -> None:
        """Restarts the actor from the newest state that is complete here. If there is none, first
        fetches as much of a state as possible."""
        what = backup.what
        named = [each for each in (what.setup, what.state) if each != NO_OBJECT]
        full = all(self.backups.with_payload(each) for each in named)
        if full or backup.before is not None:
            self._begin_again(record, backup if full else backup.before or backup)
            return
        hold = self.client.hold(record.oid)
        self.beginning.add(record.object)

        def here() -> None:
            nonlocal hold
            self.beginning.discard(record.object)
            self._begin_again(record, backup)
            self.run_ready()
            hold = None

        self.backups.bring(backup.holds, here).bring(named)

    def _begin_again(self, record: ImportRecord, backup: ActorBackup) -> None:
        """Makes this host the actor's host, and starts the actor's process."""
        what, actors, workers = backup.what, self.actors, self.workers
        setup = self.backups.with_payload(what.setup)
        state = self.backups.with_payload(what.state) if what.state != NO_OBJECT else 0
        wanted = WantedActor(
            setup,
            what.about,
            what.class_name,
            what.name,
            what.restarts_left,
            False,
            what.detached,
            self.inbound_tasks.output_owner_here(backup.host_id, what.output_owner),
            what.places,
            what.env,
            what.demand,
        )
        pool = self.remote_actors.give_up(record.oid) or workers.open_bound(NODE_SLOT, 0)
        if pool is None:
            self.backups.release_name(backup)
            return  # `_found` reports to callers that the actor is gone
        self.outbound_tasks.forget_pool(pool)
        actor = ActorRecord(
            record.oid,
            pool,
            what.name,
            what.class_name,
            max(0, what.restarts_left - 1),
            wanted,
            label=what.label,
            restarts=what.restarts,
        )
        actors.by_pool[pool] = actors.by_identity[record.oid] = actor
        if what.detached:
            actor.hold = self.client.hold(record.oid)
        if what.name:
            claim = ActorNameClaimed(0, self.client.number, what.name, record.object, True)
            self.send_manager(claim)
        else:
            self.backups.release_name(backup)
        lost = f"node h{backup.number}, on which it ran, was lost"
        why = "" if setup else ", and its constructor's arguments are gone"
        if state == 0 and what.state != NO_OBJECT:
            why = ", and its checkpoint is gone"
        if not what.restarts_left:
            why = f". Its restarts are used up (options(restarts={what.restarts}))"
        if why:
            error = errors.ActorLostError(f"{actor.title} has lost its state: {lost}{why}")
            actors.end_with(actor, error)
            return
        actor.restarts += 1
        actor.state = self.client.hold(state) if state else None
        local = workers.pools[pool]
        local.actor, local.target, local.setup, local.output_owner = (
            True,
            1,
            setup,
            wanted.output_owner,
        )
        local.env, local.demand = wanted.env, wanted.demand
        local.setup_hold = self.client.hold(setup)
        workers.start_missing(local)
        self.backups.keep(actor)
