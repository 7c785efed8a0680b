"""A node that leaves while work runs, and what the others do before it goes.

Why it exists: `remove_node` must lose nothing that could be saved. The node that leaves takes no
more tasks, gives back those that have not begun and ends those that have; its actors finish the
calls made so far, and take no more; the others fetch what it alone holds of their objects. Then
the manager is told, and when no operation names it, it ends. Objects that were put on it go with
it: their home is gone.
It must never know: sockets, how bytes move, who asked for it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from hoplite_mp.headers import KIND_TASK, NODE_SLOT, PENDING, STATE
from hoplite_mp.protocol.messages import NodeLeaving
from hoplite_mp.protocol.peers import Evacuated, Leaving

if TYPE_CHECKING:
    from hoplite_mp.node.objects.context import HostContext
    from hoplite_mp.node.tasks.guests import Guests
    from hoplite_mp.node.tasks.workers import Workers

__all__ = ["Draining"]

# Until the next look at tasks that run and bytes that are on their way. Lower costs a look at all
# headers that often, for as long as it drains; higher is what a removal takes longer.
LOOK_S = 0.05


class Above(Protocol):
    """What rooms above this one know of actors, or must hear."""

    def leaves_now(self) -> None:
        """This node takes no more work."""

    def has_calls(self, home: int) -> bool:
        """Are there calls under way from here to actors of that host?"""


class Draining:
    """Both sides of it, on one node."""

    def __init__(self, host: HostContext, guests: Guests, workers: Workers, above: Above) -> None:
        self.loop = host.loop
        self.client = host.client
        self.tasks = host.tasks
        self.store = host.store
        self.remote_objects = host.remote_objects
        self.roster = host.roster
        self.send = host.send_peer
        self.send_manager = host.send_manager
        self.guests = guests
        self.workers = workers
        self.above = above
        self.since_ns = 0
        self.waiting: set[int] = set()  # homes of those who still need something of this node
        self.leaving: dict[int, bool] = {}  # others: home -> has it been told that it may go

    @property
    def numbers(self) -> list[int]:
        """Of the nodes that leave, as far as this one knows."""
        found = map(self.roster.number_of, self.leaving)
        own = [self.client.number] if self.roster.leaves else []
        return own + [number for number in found if number is not None]

    # -- the one that leaves -------------------------------------------------------------------

    def begin(self) -> None:
        """This node takes no more work."""
        if self.roster.leaves:
            return
        self.roster.leaves = True
        self.since_ns = self.loop.now_ns()
        self.above.leaves_now()
        for home in self.roster.homes:
            self.tell(home)
        self._look()

    def tell(self, home: int) -> None:
        """That node must know, now or since it has joined."""
        if self.roster.leaves:
            self.waiting.add(home)
            self.send(home, Leaving())
            self.guests.recall_all(home)

    def evacuated(self, home: int) -> None:
        """That node needs nothing more."""
        self.waiting.discard(home)

    def _look(self) -> None:
        if self.waiting or self.guests.by_task or self._works():
            self.loop.call_later(LOOK_S, self._look)
        else:
            self.send_manager(NodeLeaving(self.client.number, 0))

    def _works(self) -> bool:
        """Are there tasks of processes of this host that are not done?"""
        return any(
            self._counts(header)
            for header in self.client.scan()
            if header["kind"] == KIND_TASK and STATE[header["state"]] in PENDING
        )

    def _counts(self, header: dict[str, Any]) -> bool:
        """A driver of this host may go on sending for ever: what it has sent since this node began
        to leave goes with it."""
        owner = header["owner"]
        if owner == NODE_SLOT or owner in self.workers.all:
            return True
        return self.tasks.submitted_ns(header["id"]) <= self.since_ns

    # -- the others ----------------------------------------------------------------------------

    def leaves(self, home: int) -> None:
        """That node wants to go."""
        if home not in self.leaving:
            self.leaving[home] = False
            self.roster.leaving.add(home)
            self._evacuate()

    def lose_peer(self, home: int) -> None:
        """It is gone, drained or not."""
        self.leaving.pop(home, None)
        self.waiting.discard(home)

    def _evacuate(self) -> None:
        """Fetches what only those who leave hold; on until they are gone, as their last tasks may
        still leave results there."""
        if not self.leaving:
            return
        by_home = self.roster.by_home
        going = {by_home[home].node for home in self.leaving if home in by_home}
        needed: set[int] = set()
        for oid, remote in list(self.remote_objects.by_oid.items()):
            if not remote.holders or not going.issuperset(remote.holders):
                continue
            if self.store.impossible(remote.nbytes):
                why = f"the node that had it leaves, and {remote.nbytes} bytes never fit here"
                self.remote_objects.lost(oid, why)
                continue
            needed.update(remote.holders)
            if not remote.payload:
                self.remote_objects.want(oid, _nothing)  # no room now: at the next look
        for home, told in list(self.leaving.items()):
            if told or home not in by_home or by_home[home].node in needed:
                continue
            if not self.above.has_calls(home):
                self.leaving[home] = True
                self.send(home, Evacuated())
        self.loop.call_later(LOOK_S, self._evacuate)


def _nothing() -> None:
    """Who waits for the object is woken by its header."""
