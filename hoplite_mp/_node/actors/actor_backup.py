"""Backups: a second host keeps the data to restart an actor after the loss of its host.

An actor with restarts left must survive the loss of its host. Its node sends the constructor data
and the process's latest checkpoint to one other host, the *backup*. The backup holds these objects
and all objects that they name (primary-backup replication). When the actor's host is lost, the
manager makes the backup the owner of the actor's identity (_node/objects/ownership_transfer.py),
and the backup restarts the actor (_node/actors/actor_failover.py).

Invariant: an actor's host that has lost contact with the backup replaces it only after the manager
has declared the backup gone. Otherwise a partitioned host could continue with states unknown to its
former backup, while the former backup has also restarted the actor (split brain).

The backup does not hold the identity while the actor's host is alive, so the backup does not keep
the actor alive.
"""

from __future__ import annotations

import functools
import logging
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from hoplite_mp import _serialize
from hoplite_mp._common.object_states import STATE, VALUED
from hoplite_mp._node.objects.remote_objects import MEMORY_POLL_S
from hoplite_mp._planner.resources import ResourceLedger
from hoplite_mp._protocol.fields import NO_OBJECT, NODES_MAX
from hoplite_mp._protocol.messages import ActorNameClaimed, ActorNameReleased
from hoplite_mp._protocol.peers import (
    ActorBackupStored,
    ActorPoolQuery,
    DropActorBackup,
    StoreActorBackup,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator

    from hoplite_mp._node.actors.actor_records import ActorRecord
    from hoplite_mp._node.actors.actors import LocalActors
    from hoplite_mp._node.dispatch import PeerHandler
    from hoplite_mp._node.objects.context import HostContext
    from hoplite_mp._node.objects.ownership_transfer import OwnershipTransfer
    from hoplite_mp._protocol.messages import Member, NodeToManager

__all__ = ["ActorBackup", "ActorBackups", "BackupFetch"]

_log = logging.getLogger("hoplite_mp")


@dataclass(slots=True)
class ActorBackup:
    """An actor on another host that this host can restart."""

    host_id: int  # id of the actor's host
    number: int  # number of the actor's node
    what: StoreActorBackup
    holds: list[Any] = field(default_factory=list)
    before: ActorBackup | None = None  # the last complete backup, kept until this one is complete
    whole: bool = False  # all objects that `what` names are here


class ActorBackupsEvents(Protocol):
    """Reports from this component to the components above it."""

    def sought(self, host_id: int, identity: bytes) -> None:
        """Answers a host's query for an actor whose host is lost."""


class ActorBackups:
    """The backups that other hosts keep of this host's actors, and the backups kept here."""

    def __init__(
        self,
        host: HostContext,
        actors: LocalActors,
        owners: OwnershipTransfer,
        events: ActorBackupsEvents,
    ) -> None:
        self.loop = host.loop
        self.client = host.client
        self.store = host.store
        self.remote_objects = host.remote_objects
        self.imports = host.imports
        self.roster = host.roster
        self.send = host.send_peer
        self.send_manager = host.send_manager
        self.bring = functools.partial(BackupFetch, host)
        self.actors = actors
        self.owners = owners
        self.events = events
        self.at: dict[int, int] = {}  # identity of an actor on this host -> host id of its backup
        # Identity -> (number of the latest StoreActorBackup, actions that are waiting for its
        # answer).
        self.asked: dict[int, tuple[int, list[Callable[[], None]]]] = {}
        # Identity -> node number of a backup with which this node has lost contact, until the
        # manager has declared the backup gone.
        self.unsure: dict[int, int] = {}
        # Identities of actors without a backup, because their data does not fit in a message.
        self.unkept: set[int] = set()
        self.kept: dict[bytes, ActorBackup] = {}  # by identity
        self._last = 0

    # -- actors on this host -------------------------------------------------------------------

    def keep(self, actor: ActorRecord, done: Callable[[], None] | None = None) -> None:
        """Sends the data for a restart to the actor's backup after the actor has started or
        changed. Calls `done` when the backup has all available data, or if there can be no
        backup."""
        _, waiting = self.asked.pop(actor.identity, (0, []))
        if done is not None:
            waiting.append(done)
        if actor.identity in self.unsure and actor.ended is None:
            self.asked[actor.identity] = (0, waiting)
            return
        before = self.at.get(actor.identity)
        host_id = self._backup_of(actor)
        if host_id is None:
            _call(waiting)
            return
        message = self._message(actor)
        if message is None:
            # The old backup must not restart the actor, because its data is outdated.
            if before is not None:
                self._drop(before, actor)
            _call(waiting)
            return
        # When the new backup is complete, drop the old one.
        if before is not None and before != host_id:
            waiting.append(lambda: self._drop(before, actor))
        self.at[actor.identity] = host_id
        self.asked[actor.identity] = (message.number, waiting)
        self.send(host_id, message)

    def _message(self, actor: ActorRecord) -> StoreActorBackup | None:
        """The message to the actor's backup, with a new number. None if a field is too large for a
        message, so that the actor can have no backup. This is logged once."""
        if actor.identity in self.unkept:
            return None
        self._last += 1
        wanted, state = actor.wanted, actor.state
        try:
            return StoreActorBackup(
                self._last,
                self.actors.public(actor.identity),
                self.actors.public(wanted.setup),
                NO_OBJECT if state is None else self.actors.public(state.oid),
                wanted.about,
                actor.class_name,
                actor.name,
                actor.label,
                actor.restarts_left,
                actor.restarts,
                wanted.detached and actor.hold is not None,  # detached and not closed
                actor.begun,
                wanted.output_owner,
                wanted.places,
                wanted.env,
                wanted.demand,
            )
        except ValueError as error:
            self.unkept.add(actor.identity)
            _log.warning(
                "%.200s cannot be restarted on another host, because no message can carry what "
                "that host needs: %.200s",
                actor.title,
                error,
            )
            return None

    def _backup_of(self, actor: ActorRecord) -> int | None:
        """The host id of the actor's backup: the present backup, or else the next node by number on
        which the actor may run. None if there is no such node."""
        wanted = actor.wanted
        if not wanted.restarts or actor.ended is not None or actor.closed:
            return None
        now = self.at.pop(actor.identity, None)
        if now in self.roster.by_host_id and now not in self.roster.leaving:
            return now
        able = [
            member
            for member in self.roster.by_host_id.values()
            if (member.workers or member.stays)
            and member.host_id not in self.roster.leaving
            and (not wanted.places or member.node in wanted.places)
            and ResourceLedger(member.resources).could_ever(wanted.demand)
        ]
        here = self.client.number
        able.sort(key=lambda member: (member.node - here) % NODES_MAX)
        return able[0].host_id if able else None

    def ended(self, actor: ActorRecord) -> None:
        """Drops the backup of an actor that will not be restarted."""
        self.unsure.pop(actor.identity, None)
        self.unkept.discard(actor.identity)
        host_id = self.at.pop(actor.identity, None)
        _, waiting = self.asked.pop(actor.identity, (0, []))
        if host_id is not None:
            self._drop(host_id, actor)
        _call(waiting)

    def _drop(self, host_id: int, actor: ActorRecord) -> None:
        """Notifies a host that it is no longer the actor's backup."""
        lives = actor.identity in self.actors.by_identity and actor.ended is None
        self.send(host_id, DropActorBackup(self.actors.public(actor.identity), ended=not lives))

    def peer_joined(self) -> None:
        """Finds backups for actors without one, after a node has joined."""
        for actor in list(self.actors.by_identity.values()):
            if actor.identity not in self.at and actor.identity not in self.unsure:
                self.keep(actor)

    # -- actors on other hosts -----------------------------------------------------------------

    @property
    def peer_handlers(self) -> dict[type, PeerHandler]:
        """Handlers of messages from other hosts about backups."""
        return {
            StoreActorBackup: self._take,
            ActorBackupStored: self._kept_there,
            DropActorBackup: self._dropped_there,
            ActorPoolQuery: lambda host_id, message: self.events.sought(host_id, message.identity),
        }

    def _kept_there(self, host_id: int, message: ActorBackupStored) -> None:
        for identity, (number, waiting) in list(self.asked.items()):
            if number == message.number:
                del self.asked[identity]
                _call(waiting)

    def _dropped_there(self, host_id: int, message: DropActorBackup) -> None:
        backup = self.kept.get(message.identity)
        if backup is not None and backup.host_id == host_id:
            del self.kept[message.identity]
            if message.ended and backup.what.name:
                # This host may have claimed the name for the actor with a new manager that has no
                # report from the actor's own node.
                self.release_name(backup)

    def _take(self, host_id: int, message: StoreActorBackup) -> None:
        before = self.kept.get(message.identity)
        number = self.roster.number_of(host_id)
        if before is not None and before.host_id != host_id:
            before = None  # the actor has moved since then, so the state is outdated
        if before is not None and not before.whole:
            before = before.before
        backup = ActorBackup(host_id, -1 if number is None else number, message, before=before)
        self.kept[message.identity] = backup

        named = [
            object_id for object_id in (message.setup, message.state) if object_id != NO_OBJECT
        ]

        def done() -> None:
            # Objects are missing if fetches have failed, for example after the loss of the actor's
            # host.
            if all(self.with_payload(object_id) for object_id in named):
                backup.before, backup.whole = None, True
            self.send(host_id, ActorBackupStored(message.number))

        self.bring(backup.holds, done).bring(named)

    def number_of(self, identity: bytes, host_id: int) -> int | None:
        """The number of the newest complete StoreActorBackup for an actor on the host, or 0 if none
        is complete. None if this node is not the actor's backup."""
        backup = self.kept.get(identity)
        if backup is None or backup.host_id != host_id:
            return None
        if not backup.whole:
            backup = backup.before
        return 0 if backup is None else backup.what.number

    def report(self) -> Iterator[NodeToManager]:
        """Yields, for a new manager, the names of actors whose host may have been lost together
        with the former manager. Whether these actors move here is decided later."""
        for identity, backup in self.kept.items():
            there = self.roster.number_of(backup.host_id) is not None
            if backup.what.name and (there or self.owners.is_open(backup.host_id)):
                name = backup.what.name
                yield ActorNameClaimed(0, backup.number, name, identity, True, by_backup=True)

    def release_name(self, backup: ActorBackup) -> None:
        """Releases the name of an actor that will not be restarted or has lost its name. The lost
        host may have reported that to this backup but not to the manager, which had just been
        replaced."""
        what = backup.what
        self.send_manager(ActorNameReleased(self.client.number, what.name, what.identity))

    # -- deaths --------------------------------------------------------------------------------

    def peer_lost(self, member: Member) -> None:
        """Creates headers for the identities of a lost host's actors that this node can restart.
        Called before this node reports its objects whose owner is dead, because that report must
        include these identities."""
        imports = self.imports
        for identity, backup in self.kept.items():
            if backup.host_id != member.host_id:
                continue
            payload = _serialize.encode((0, backup.what.about, identity)).tobytes()
            record = imports.by_object.get(identity)
            if record is None:
                backup.holds.append(imports.keep(identity))
                record = imports.by_object[identity]
                record.owner = backup.host_id
            else:
                backup.holds.append(self.client.hold(record.oid))
            if self.client.state(record.oid) == STATE["CLAIMED"]:
                imports.store(record, payload, False)
                imports.answer(record)

    def backup_peer_lost(self, member: Member) -> None:
        """Records which actors have a backup on a host with which this node has lost contact."""
        for identity in [identity for identity, at in self.at.items() if at == member.host_id]:
            del self.at[identity]
            self.unsure[identity] = member.node

    def are_gone(self, numbers: Collection[int]) -> None:
        """Replaces the backups on nodes that the manager has declared gone."""
        for identity in [identity for identity, number in self.unsure.items() if number in numbers]:
            del self.unsure[identity]
            actor = self.actors.by_identity.get(identity)
            if actor is not None:
                self.keep(actor)

    def take_over(self, object_id: bytes, owner: int) -> ActorBackup | None:
        """Handles the new owner of an object, which may be an actor's identity. If the owner is
        this host, removes and returns the actor's backup, if there is one."""
        backup = self.kept.get(object_id)
        if backup is None or (owner != self.client.host_id and backup.host_id == owner):
            return None
        del self.kept[object_id]
        return backup if owner == self.client.host_id else None

    def with_payload(self, object_id: bytes) -> int:
        """The local id of an object whose value is here. 0 if the value is not here or has
        failed."""
        oid = self.imports.local(object_id)
        if not oid or oid in self.remote_objects or self.client.hold(oid) is None:
            return 0
        return oid if self.client.state(oid) in VALUED else 0


class BackupFetch:
    """A fetch of objects from any host, and of all objects to which they refer directly or
    indirectly. `done`: called when all available objects are here; `holds`: the list of holds on
    them."""

    def __init__(self, host: HostContext, holds: list[Any], done: Callable[[], None]) -> None:
        self.loop = host.loop
        self.client = host.client
        self.store = host.store
        self.remote_objects = host.remote_objects
        self.imports = host.imports
        self.holds = holds
        self.done = done
        self.seen: set[bytes] = set()
        self.left = 0

    def bring(self, objects: list[bytes]) -> None:
        new = [object_id for object_id in objects if object_id not in self.seen]
        self.seen.update(new)
        self.left += 1
        self.imports.ask(new, self._held)

    def _held(self, holds: list[Any]) -> None:
        for hold in holds:
            if hold is not None:
                self.holds.append(hold)
                self._fetch_bytes(hold.oid)
        self._finish_one()

    def _fetch_bytes(self, oid: int) -> None:
        remote_objects = self.remote_objects
        if oid not in remote_objects:
            self._fetch_named(oid)
            return

        def here() -> None:
            self._fetch_named(oid)
            self._finish_one()

        self.left += 1
        if remote_objects.want(oid, here):
            return
        if self.store.impossible(remote_objects.by_oid[oid].nbytes):
            self._finish_one()  # the object can never fit here, so it is omitted
            return

        def again() -> None:
            self._fetch_bytes(oid)
            self._finish_one()

        self.loop.call_later(MEMORY_POLL_S, again)  # the store is full now

    def _fetch_named(self, oid: int) -> None:
        """Fetches the objects that an object names. Skips a pending object, because the objects
        that it will name are not known yet. Its readers fetch them later."""
        client = self.client
        got = client.view(oid)
        if isinstance(got, int) and oid not in self.remote_objects and self.store.restore(oid):
            got = client.view(oid)
        if not isinstance(got, int):
            self.bring([*_serialize.read_refs(memoryview(got))])

    def _finish_one(self) -> None:
        self.left -= 1
        if not self.left:
            self.done()


def _call(waiting: list[Callable[[], None]]) -> None:
    for done in waiting:
        done()
