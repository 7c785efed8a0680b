"""One imitated node: what the manager and other nodes send it, and which room takes it.

Why it exists: thousands of real nodes do not fit into one process; those of simulation/cluster/ are
real ones. It joins the rooms of an imitated node as node/core/lan.py joins the real ones.
It must never know: what plans look like inside.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hoplite_mp.ids import unpack_id
from hoplite_mp.protocol.codec import encode
from hoplite_mp.protocol.messages import (
    Commit,
    Distribute,
    ExecuteReduce,
    FetchRefused,
    Forget,
    OperationFailed,
    Withdraw,
)
from hoplite_mp.simulation.asks import Asks
from hoplite_mp.simulation.copies import Copies
from hoplite_mp.simulation.network import Channel
from hoplite_mp.simulation.parts import Parts
from hoplite_mp.simulation.places import Places
from hoplite_mp.simulation.streams import Engine

if TYPE_CHECKING:
    from collections.abc import Callable

    from hoplite_mp.protocol.messages import NodeToManager
    from hoplite_mp.simulation.imitated import ImitatedWorld
    from hoplite_mp.simulation.streams import Cell, Key, Wanting

__all__ = ["Node"]

# A message between nodes that is about one object.
PEER_MESSAGE_BYTES = 100


class Node:
    """One node, which counts as joined."""

    def __init__(self, world: ImitatedWorld, host: int, home: int, incarnation: int) -> None:
        self.world = world
        self.host = host
        self.home = home
        self.incarnation = incarnation
        self.number = -1
        self.members: dict[int, Node] = {}  # the others, by number
        self.engine = Engine(
            world.network, host, world.truth.contents, world.block_bytes, world.least
        )
        self.places = Places(self)
        self.copies = Copies(self)
        self.places.fetcher = self.copies
        self.parts = Parts(self)
        self.asks = Asks(self)
        network, manager = world.network, world.manager.host
        self.up = Channel(network, (host, manager), lambda word: world.manager.take(self, word))
        self.down = Channel(network, (manager, host), self.receive)

    @property
    def now(self) -> float:
        """The time."""
        return self.world.timeline.now

    # ---- what it does

    def after(self, seconds: float, call: Callable[..., object], *arguments: Any) -> None:
        """In a turn of its loop."""
        self.world.timeline.after(seconds, call, *arguments)

    def send_manager(self, message: NodeToManager) -> None:
        """Over its connection."""
        self.up.send(message, len(encode(message)))

    def pull(self, cell: Cell, parent: int, key: Key, wanting: Wanting) -> None:
        """Fills a cell from another node; `wanting` hears how it goes."""
        cell.filled_by = wanting
        peer = self.members.get(parent)
        if peer is None:
            wanting.failed(cell, "the node is gone")
        else:
            self.engine.pull(cell, peer.engine, key)

    def tell(self, peer: Node, what: str, *arguments: Any) -> None:
        """A message to another node."""
        self.world.wire(self, peer).send((what, arguments), PEER_MESSAGE_BYTES)

    def tell_home(self, object_id: bytes, what: str, *arguments: Any) -> bool:
        """To the node of the object's home; False: there is none."""
        home, _ = unpack_id(object_id)
        for peer in self.members.values():
            if peer.home == home:
                self.tell(peer, what, object_id, *arguments)
                return True
        return False

    # ---- what it hears

    def receive(self, message: Any) -> None:
        """A message of the manager."""
        match message:
            case Distribute():
                self.copies.distribute(message)
            case Withdraw():
                self.copies.withdraw(message)
            case FetchRefused():
                self.copies.refused(message)
            case ExecuteReduce():
                self.parts.execute(message)
            case Commit():
                self.asks.committed(message, self.parts.commit(message))
            case OperationFailed():
                self.parts.drop(message.operation)
                self.asks.failed(message)
            case Forget():
                self.parts.drop(message.operation)
            case _:
                raise AssertionError(f"a node hears {message!r}")

    def hear(self, peer: Node, message: tuple[str, tuple[Any, ...]]) -> None:
        """A message of another node."""
        what, arguments = message
        if what == "acquire":
            self.asks.asked(peer, *arguments)
        elif what == "described":
            self.asks.described(*arguments)
        else:
            object_id, nodes = arguments
            kept = self.places.kept_at.setdefault(object_id, set())
            kept.update(number for number in nodes if number in self.members)

    # ---- who is there
