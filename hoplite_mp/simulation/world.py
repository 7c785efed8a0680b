"""Everything of one run of very many nodes together.

Why it exists: thousands of nodes, the manager and the network know each other through this. Nothing
goes wrong here: what faults do is played with real nodes, in simulation/cluster/.
It must never know: what is asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hoplite_mp.ids import pack_id, pack_local
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

# Homes are random numbers in a cluster; here they are counted from this on.
HOME_BASE = 1000


class World:
    """One cluster. Host 0 has the manager."""

    def __init__(
        self,
        timeline: Timeline,
        *,
        latency_s: float = 100e-6,
        block_bytes: int = 256 << 10,
        least: int = 0,
        tracked: bool = True,
    ) -> None:
        self.timeline = timeline
        self.network = Network(timeline, latency_s, 0.0)
        self.block_bytes = block_bytes
        self.least = least
        self.tracked = tracked
        self.keeping: Keeping = Ranges()
        self.truth = Truth(tracked)
        self.waits = Waits(timeline)
        self.manager = Manager(timeline)
        self.hosts: list[Node] = []
        self._objects = 0
        self._wires: dict[tuple[Node, Node], Channel] = {}

    # ---- hosts

    def add_host(self, up: float, down: float, members: dict[int, Node]) -> Node:
        """One more, whose node is taken for joined: `members` are what it knows from now on."""
        host = self.network.add(up, down)
        node = Node(self, host, HOME_BASE + host, 1)
        node.number, node.members = host, members
        self.hosts.append(node)
        return node

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
