"""A node that leaves while work runs, and what the others do before it goes.

Why it exists: `remove_node` must lose nothing that could be saved. The node that leaves takes no
more tasks, gives back those that have not begun and ends those that have; its actors finish the
calls made so far, and take no more; the others fetch what it alone holds of their objects. Then
the manager is told, and when no operation names it, it ends. Objects that were put on it go with
it: their home is gone.
It must never know: sockets, how bytes move, who asked for it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hoplite_mp.node.store import NODE_SLOT
from hoplite_mp.protocol.messages import NodeLeaving
from hoplite_mp.protocol.peers import Evacuated, Leaving

if TYPE_CHECKING:
    from hoplite_mp.node.lan import Lan
    from hoplite_mp.node.main import Node

__all__ = ["Draining"]

# Until the next look at tasks that run and bytes that are on their way. Lower costs a look at all
# headers that often, for as long as it drains; higher is what a removal takes longer.
LOOK_S = 0.05
PENDING = ("WAITING", "QUEUED", "CLAIMED")
TASK_KIND = 2


class Draining:
    """Both sides of it, on one node."""

    def __init__(self, node: Node, lan: Lan) -> None:
        self.node = node
        self.lan = lan
        self.going = False  # this node leaves
        self.since_ns = 0
        self.waiting: set[int] = set()  # homes of those who still need something of this node
        self.leaving: dict[int, bool] = {}  # others: home -> has it been told that it may go

    @property
    def numbers(self) -> list[int]:
        """Of the nodes that leave, as far as this one knows."""
        found = map(self.lan.peers.number_of, self.leaving)
        own = [self.node.number] if self.going else []
        return own + [number for number in found if number is not None]

    # -- the one that leaves -------------------------------------------------------------------

    def begin(self) -> None:
        """This node takes no more work."""
        if self.going:
            return
        self.going = True
        self.since_ns = self.node.loop.now_ns()
        self.lan.workers_now = 0
        self.node.actors.leave()
        for home in list(self.lan.peers.by_home):
            self.tell(home)
        self._look()

    def tell(self, home: int) -> None:
        """That node must know, now or since it has joined."""
        if self.going:
            self.waiting.add(home)
            self.lan.peers.send(home, Leaving())
            self.node.guests.recall_all(home)

    def evacuated(self, home: int) -> None:
        """That node needs nothing more."""
        self.waiting.discard(home)

    def _look(self) -> None:
        if self.waiting or self.node.guests.by_task or self._works():
            self.node.loop.call_later(LOOK_S, self._look)
        else:
            self.node.send_manager(NodeLeaving(self.node.number, 0))

    def _works(self) -> bool:
        """Are there tasks of processes of this host that are not done?"""
        return any(
            header["kind"] == TASK_KIND and header["state"] in PENDING and self._counts(header)
            for header in self.node.client.scan()
        )

    def _counts(self, header: dict[str, Any]) -> bool:
        """A driver of this host may go on sending for ever: what it has sent since this node began
        to leave goes with it."""
        owner = header["owner"]
        if owner == NODE_SLOT or owner in self.node.workers.all:
            return True
        return self.node.tasks.submitted_ns(header["id"]) <= self.since_ns

    # -- the others ----------------------------------------------------------------------------

    def leaves(self, home: int) -> None:
        """That node wants to go."""
        if home not in self.leaving:
            self.leaving[home] = False
            self.node.host.roster.leaving.add(home)
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
        by_home = self.lan.peers.by_home
        going = {by_home[home].member.node for home in self.leaving if home in by_home}
        needed: set[int] = set()
        for oid, place in list(self.node.places.places.items()):
            if not place.holders or not going.issuperset(place.holders):
                continue
            if self.node.store.impossible(place.nbytes):
                why = f"the node that had it leaves, and {place.nbytes} bytes never fit here"
                self.node.places.lost(oid, why)
                continue
            needed.update(place.holders)
            if not place.payload:
                self.node.places.want(oid, _nothing)  # no room now: at the next look
        for home, told in list(self.leaving.items()):
            if told or home not in by_home or by_home[home].member.node in needed:
                continue
            if not self.lan.far_actors.has_calls(home):
                self.leaving[home] = True
                self.lan.peers.send(home, Evacuated())
        self.node.loop.call_later(LOOK_S, self._evacuate)


def _nothing() -> None:
    """Who waits for the object is woken by its header."""
