"""What this node does about values that a host has taken along: the rooms for it, joined.

Why it exists: four rooms work on it. `lineage` keeps what results of this host's tasks were made
from, `reconstruction` makes them again when they are asked for, `copy_census` finds out before
whether anybody has them, `owners` who has what the home of which is dead. The rest of the node
knows this file alone.
It must never know: how bytes move, what tasks do.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hoplite_mp import ids
from hoplite_mp.node.recovery.copy_census import CopyCensus
from hoplite_mp.node.recovery.lineage import Lineage
from hoplite_mp.node.recovery.owners import Above, Owners
from hoplite_mp.node.recovery.reconstruction import Reconstruction
from hoplite_mp.protocol.messages import HomesNamed, HomeTold

if TYPE_CHECKING:
    from collections.abc import Callable

    from hoplite_mp.node.membership.missing import Missing
    from hoplite_mp.node.objects.context import HostContext
    from hoplite_mp.node.objects.imports import Import
    from hoplite_mp.node.objects.replicas import Replicas
    from hoplite_mp.node.tasks.guests import Guests
    from hoplite_mp.node.tasks.resources import Resources
    from hoplite_mp.protocol.messages import Member
    from hoplite_mp.protocol.peers import Release

__all__ = ["Recovering"]


class Recovering:
    """Lost values, as far as this node can do something about them."""

    def __init__(
        self,
        host: HostContext,
        replicas: Replicas,
        guests: Guests,
        missing: Missing,
        resources: Resources,
        queue: Callable[[int, bool], int | str],
        above: Above,
    ) -> None:
        """queue: as of Reconstruction."""
        self.client = host.client
        self.tasks = host.tasks
        self.remote_objects = host.remote_objects
        self.imports = host.imports
        self.roster = host.roster
        self.guests = guests
        self.lineage = Lineage(
            host.results,
            host.remote_objects,
            host.config.lineage_bytes_max,
            host.loop,
            resources.demand_of,
        )
        self.owners = Owners(
            host.imports,
            host.exports,
            host.remote_objects,
            replicas,
            lambda: host.client.number,
            host.send_manager,
            host.send_peer,
            self._home_at,
            self._number_of,
            above,
        )
        self.copy_census = CopyCensus(
            host.imports,
            host.remote_objects,
            replicas,
            host.questions,
            host.send_peer,
            lambda: host.roster.homes,
            lambda: bool(missing.members),
        )
        self.reconstruction = Reconstruction(
            host.results,
            host.imports,
            host.remote_objects,
            self.lineage,
            self.copy_census,
            host.send_peer,
            host.loop,
            queue,
            self.owners,
            host.roster,
            host.exports.copies_of,
            resources.wait,
        )
        host.remote_objects.maker = self.reconstruction
        host.exports.own = self.owners.own

    def _home_at(self, number: int) -> int | None:
        if number == self.client.number:
            return self.client.home
        member = self.roster.by_number.get(number)
        return None if member is None else member.home

    def _number_of(self, home: int) -> int | None:
        if home == self.client.home:
            return self.client.number
        return self.roster.number_of(home)

    # -- what results were made from -----------------------------------------------------------

    def keep(self, oid: int) -> None:
        """Not of tasks that are others' to make again, or that are just being made again."""
        if oid not in self.guests and oid not in self.reconstruction.by_run:
            self.lineage.keep(oid)

    def leases(self, slot: int) -> None:
        """That process is about to get a block, for the big result of a task perhaps."""
        running = self.tasks.running(slot)
        if running and self.roster.by_home:
            self.keep(running)

    def target_of(self, oid: int) -> bytes:
        """The lost result that this task of the node's own tables makes again; b"": none."""
        guest, run = self.guests.by_oid.get(oid), self.reconstruction.by_run.get(oid)
        if guest is not None:
            return guest.target
        return b"" if run is None else ids.pack_id(self.client.home, run.target)

    def is_run_here(self, oid: int) -> bool:
        """Is this task of the node's own tables one that somebody waits for?"""
        return oid in self.guests or oid in self.reconstruction.by_run

    def look(self) -> None:
        """Once a turn."""
        self.reconstruction.look()

    # -- deaths --------------------------------------------------------------------------------

    def begin(self, member: Member) -> None:
        """That host is gone, before anything of it is let go."""
        self.owners.begin(member.home, member.node)

    def report(self, number: int) -> None:
        """The manager has heard of it, too."""
        self.owners.report(number)

    def receive(self, message: Any) -> bool:
        """The manager's word about objects whose home is gone; False: it is about others."""
        if not isinstance(message, (HomesNamed, HomeTold)):
            return False
        self.owners.receive(message)
        return True

    def released(self, peer: int, message: Release) -> None:
        """Another host lets go of an object of this one, and of its copy."""
        self.owners.released(peer, message)
        number = self._number_of(peer)
        if number is not None:
            self.remote_objects.lose_copy(self.imports.own(message.object), number)

    def freed(self, one: Import) -> None:
        """A header of an object of another host has gone."""
        self.owners.freed(one)
