"""Everything of one run together, and what can happen to a host.

Why it exists: hosts, the lives of their nodes, the manager and the network know each other through
this. A host that dies resets its connections; one that is stopped, or cut off from the manager, is
given up after the silence that is allowed, and ends when it learns of that.
It must never know: what is asked for, which faults come when.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hoplite_mp.ids import pack_id, pack_local
from hoplite_mp.protocol.messages import NodeLeaving
from hoplite_mp.simulation.checks import Truth
from hoplite_mp.simulation.host import Node
from hoplite_mp.simulation.keeping import Ranges
from hoplite_mp.simulation.manager import Manager
from hoplite_mp.simulation.memory import Memory
from hoplite_mp.simulation.network import Channel, Network
from hoplite_mp.simulation.waits import Waits

if TYPE_CHECKING:
    from hoplite_mp.simulation.keeping import Keeping
    from hoplite_mp.simulation.timeline import Timeline

__all__ = ["World"]

# When the kernel ends a connection over which nothing was acknowledged (transport/listen.py).
UNACKNOWLEDGED_S = 40.0
# When it is over that nodes come back to a manager (planner/restoring.py, and a little).
RESTORED_S = 2.5
# A node allows its manager so many times the silence that it allows a node (node/core/main.py).
MANAGER_SILENCES = 5.0
# Homes are random numbers in a cluster; here they are counted from this on.
HOME_BASE = 1000


class World:
    """One cluster. Host 0 has the manager, and never dies."""

    def __init__(
        self,
        timeline: Timeline,
        *,
        latency_s: float = 100e-6,
        jitter_s: float = 0.0,
        block_bytes: int = 256 << 10,
        least: int = 0,
        tracked: bool = True,
        silence_s: float = 1.5,
        beat_s: float = 0.2,
        keeping: Keeping | None = None,
    ) -> None:
        self.timeline = timeline
        self.network = Network(timeline, latency_s, jitter_s)
        self.block_bytes = block_bytes
        self.least = least
        self.tracked = tracked
        self.silence_s = silence_s
        self.beat_s = beat_s
        self.keeping: Keeping = keeping or Ranges()
        self.truth = Truth(tracked)
        self.waits = Waits(timeline)
        self.manager = Manager(timeline)
        self.lives: dict[tuple[int, int], Node] = {}
        self.hosts: list[Node] = []  # the latest life on each
        self.silent = False  # nodes that begin say nothing
        self._homes = 0
        self._objects = 0
        self._wires: dict[tuple[Node, Node], Channel] = {}

    # ---- hosts and lives

    def add_host(self, up: float, down: float) -> Node:
        """One more, whose node joins."""
        host = self.network.add(up, down)
        self.hosts.append(self._begin(host, None))
        return self.hosts[-1]

    def add_silent_host(self, up: float, down: float, members: dict[int, Node]) -> Node:
        """One whose node is taken for joined: `members` are what it knows from now on."""
        self.silent = True
        node = self.add_host(up, down)
        self.silent = False
        node.number, node.members = node.host, members
        return node

    def _begin(self, host: int, before: Node | None) -> Node:
        home, incarnation = HOME_BASE + self._homes, 1
        if before is not None:
            home, incarnation = before.home, before.incarnation + 1
        else:
            self._homes += 1
        node = Node(self, host, home, incarnation)
        self.lives[home, incarnation] = node
        return node

    def rejoin(self, host: int, same_home: bool) -> None:
        """A new life there: as another home, or the next life of the same."""
        old = self.hosts[host]
        if not old.alive:
            self.timeline.note(f"host {host} joins again")
            self.network.go_on(host)
            self.hosts[host] = self._begin(host, old if same_home else None)

    def end(self, node: Node, why: str) -> None:
        """That life is over, and so are its connections: those who have some see it."""
        if not node.alive:
            return
        self.timeline.note(f"node {node.number} on host {node.host} ends: {why}")
        node.alive = False
        node.engine.dead = True
        for channel in (node.up, node.down):
            channel.close()
        network, timeline = self.network, self.timeline
        self.truth.died(node)
        here, manager = node.host, self.manager.host
        delay = network.delay(here, manager)
        timeline.after(delay, network.pass_on, here, manager, self.manager.lose, node)
        for (one, other), wire in self._wires.items():
            if node in (one, other):
                wire.close()
                if node is one and other.alive:
                    delay = network.delay(here, other.host)
                    timeline.after(delay, network.pass_on, here, other.host, other.lost, node)
        for peer in self.lives.values():
            if peer.alive:
                delay = network.delay(here, peer.host)
                reason = "the link was reset"
                lose = peer.engine.lose
                timeline.after(delay, network.pass_on, here, peer.host, lose, node.engine, reason)

    def wire(self, one: Node, other: Node) -> Channel:
        """For messages between two nodes, one way."""
        found = self._wires.get((one, other))
        if found is None:
            ends = (one.host, other.host)
            found = Channel(self.network, ends, lambda message: other.hear(one, message))
            self._wires[one, other] = found
            self._wires.setdefault(
                (other, one),
                Channel(
                    self.network, (other.host, one.host), lambda message: one.hear(other, message)
                ),
            )
        return found

    # ---- what can happen to a host

    def die(self, host: int) -> None:
        """Its processes are killed."""
        self.end(self.hosts[host], "it was killed")

    def stop(self, host: int) -> None:
        """It stands still, and says nothing."""
        self.network.stop(host)
        self._silent(self.hosts[host])

    def go_on(self, host: int) -> None:
        """It runs again."""
        self.network.go_on(host)

    def crawl(self, host: int, factor: float) -> None:
        """Its links are slower by that factor from now on."""
        port = self.network.ports[host]
        port.up *= factor
        port.down *= factor

    def cut(self, some: set[int], others: set[int]) -> None:
        """Nothing passes between these hosts."""
        self.truth.cuts += 1
        self.network.separate(some, others)
        manager = self.manager.host
        away = others if manager in some else some if manager in others else set()
        for host in sorted(away):
            self._silent(self.hosts[host])
            patience = MANAGER_SILENCES * self.silence_s
            self.timeline.after(patience, self._manager_silent, self.hosts[host])
        self.timeline.after(UNACKNOWLEDGED_S, self._unacknowledged, some, others)

    def heal(self, some: set[int], others: set[int]) -> None:
        """It does again."""
        self.network.join(some, others)

    def leave(self, host: int) -> None:
        """It asks to; it goes when the manager has answered."""
        node = self.hosts[host]
        node.send_manager(NodeLeaving(node.number, node.incarnation))

    def reset(self, one: int, other: int) -> None:
        """The data connection between two that live ends."""
        self.truth.resets += 1
        self.hosts[one].engine.lose(self.hosts[other].engine, "the link was reset")

    def lose_manager(self, away_s: float) -> None:
        """Its process dies, and is started again after so long."""
        if not self.manager.is_there:
            return
        self.truth.managers += 1
        self.manager.die()
        for node in self.lives.values():
            node.up.close()
            node.down.close()
        self.timeline.after(away_s, self._manager_again)

    def _manager_again(self) -> None:
        self.manager.begin_again()
        manager = self.manager.host
        for node in list(self.lives.values()):
            if node.alive:
                delay = self.network.delay(manager, node.host) + self.network.delay(
                    node.host, manager
                )
                self.timeline.after(delay, self._call_again, node)
        self.timeline.after(RESTORED_S, self._restored)

    def _call_again(self, node: Node) -> None:
        self.network.pass_on(self.manager.host, node.host, node.come_again)

    def _restored(self) -> None:
        """Who has not come back by now is not waited for."""
        for node in self.hosts:
            if node.alive and node.number >= 0 and self.manager.routes.get(node.number) is not node:
                node.given_up = True
                self.truth.died(node)

    def _silent(self, node: Node) -> None:
        beats = self.beat_s * self.timeline.chance.random()
        self.timeline.after(self.silence_s + beats, self._still_silent, node)

    def _still_silent(self, node: Node) -> None:
        host, manager = node.host, self.manager.host
        network = self.network
        if node.alive and (host in network.stopped or network.is_blocked(host, manager)):
            node.given_up = True
            self.truth.died(node)
            self.manager.give_up(node, self.silence_s)

    def _manager_silent(self, node: Node) -> None:
        if node.alive and self.network.is_blocked(self.manager.host, node.host):
            self.end(node, "the manager is silent")

    def _unacknowledged(self, some: set[int], others: set[int]) -> None:
        for one in sorted(some):
            for other in sorted(others):
                here, there = self.hosts[one], self.hosts[other]
                if (one, other) in self.network.cut and here.alive and there.alive:
                    for near, far in ((here, there), (there, here)):
                        near.engine.lose(far.engine, "nothing was acknowledged")
                        near.lost(far)

    # ---- objects

    def put(self, node: Node, nbytes: int, ready_in: float = 0.0) -> bytes:
        """An object of that node; pending until then. Its id."""
        self._objects += 1
        object_id = pack_id(node.home, pack_local(1, self._objects >> 16, self._objects & 0xFFFF))
        self.truth.sizes[object_id] = nbytes
        self.truth.pending[object_id] = node
        if ready_in:
            node.after(ready_in, self._ready, node, object_id, nbytes)
        else:
            self._ready(node, object_id, nbytes)
        return object_id

    def _ready(self, node: Node, object_id: bytes, nbytes: int) -> None:
        self.truth.settle((object_id,))
        leaf = self.truth.contents.leaf(object_id)
        node.places.put(object_id, Memory(nbytes, leaf))
        node.asks.sealed(object_id)

    def result(self, node: Node, nbytes: int) -> bytes:
        """An id for the result of a collective that this node asks for."""
        self._objects += 1
        object_id = pack_id(node.home, pack_local(2, self._objects >> 16, self._objects & 0xFFFF))
        self.truth.sizes[object_id] = nbytes
        self.truth.results.add(object_id)
        self.truth.pending[object_id] = node
        return object_id
