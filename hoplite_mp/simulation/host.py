"""One life of a node: what the manager and other nodes say to it, and which room takes it.

Why it exists: it joins the rooms of a simulated node as node/core/lan.py joins the real ones:
members by the manager's word, the end of a peer, messages between nodes.
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
    GivenUp,
    Leave,
    MembersChanged,
    NodeAdmitted,
    NodeJoined,
    OperationFailed,
    PeerLost,
    ReduceRequested,
    Withdraw,
)
from hoplite_mp.simulation.asks import Asks
from hoplite_mp.simulation.copies import Copies
from hoplite_mp.simulation.network import Channel
from hoplite_mp.simulation.parts import Parts
from hoplite_mp.simulation.places import Places
from hoplite_mp.simulation.returning import Memo, report
from hoplite_mp.simulation.streams import Engine

if TYPE_CHECKING:
    from collections.abc import Callable

    from hoplite_mp.protocol.messages import Member, NodeToManager
    from hoplite_mp.simulation.streams import Cell, Key, Wanting
    from hoplite_mp.simulation.world import World

__all__ = ["Node"]

# How long the manager has to notice a death that a node has noticed, in silences
# (node/core/lan.py).
PEER_LOST_SILENCES = 2.0
# A message between nodes that is about one object.
PEER_MESSAGE_BYTES = 100
# So many of the last words are remembered, to be said again.
SAID_MAX = 8


class Node:
    """One life. `number` is -1 until it is admitted."""

    def __init__(self, world: World, host: int, home: int, incarnation: int) -> None:
        self.world = world
        self.host = host
        self.home = home
        self.incarnation = incarnation
        self.number = -1
        self.alive = True
        self.connections = 0  # to managers, one after the other
        self.given_up = False  # by the manager, whether it knows it or not
        self.members: dict[int, Node] = {}  # the others, by number
        self.missed: dict[int, Node] = {}  # lost by this node, and not yet by the manager's word
        self.said: list[tuple[float, NodeToManager]] = []  # lately, to the manager
        self.when_admitted: list[Callable[[], None]] = []
        self.engine = Engine(
            world.network, host, world.truth.contents, world.block_bytes, world.least
        )
        self.places = Places(self)
        self.copies = Copies(self)
        self.places.fetcher = self.copies
        self.parts = Parts(self)
        self.asks = Asks(self)
        self.memo = Memo()
        self.numbers_seen = 0  # so many were given, as far as this node knows
        self.connect()
        if not world.silent:
            self.send_manager(NodeJoined(home, incarnation, 2))

    def connect(self) -> None:
        """To the manager; over a connection that there was before nothing comes any more."""
        network, host, manager = self.world.network, self.host, self.world.manager.host
        self.connections += 1
        this = self.connections
        self.up = Channel(network, (host, manager), lambda word: self._reaches_manager(this, word))
        self.down = Channel(network, (manager, host), self.receive)

    def come_again(self) -> None:
        """The manager that there was is gone; there is another one."""
        if self.alive and not self.numbers_seen:  # it had not been let in
            self.world.end(self, "nobody has let it in")
        elif self.alive:
            self.connect()
            for message in list(report(self)):
                self.up.send(message, len(encode(message)))

    @property
    def now(self) -> float:
        """The time."""
        return self.world.timeline.now

    # ---- what it does

    def after(self, seconds: float, call: Callable[..., object], *arguments: Any) -> None:
        """In a turn of its loop, which stands still while the host does."""
        self.world.timeline.after(seconds, self._turn, call, arguments)

    def _turn(self, call: Callable[..., object], arguments: tuple[Any, ...]) -> None:
        if not self.alive:
            return
        if self.host in self.world.network.stopped:
            self.world.network.pass_on(self.host, self.host, self._turn, call, arguments)
        else:
            call(*arguments)

    def send_manager(self, message: NodeToManager) -> None:
        """Over its connection."""
        if self.alive:
            self.memo.said(message)
            self.said.append((self.now, message))
            del self.said[:-SAID_MAX]
            self.up.send(message, len(encode(message)))

    def say_again(self) -> None:
        """As after a connection that broke: what was not acknowledged yet, in its order, whether
        it had come or not. But a collective is asked for once: only another manager, who is told
        of its end too, hears of it again."""
        network = self.world.network
        round_trip_s = 2 * network.latency_s + network.jitter_s
        for at, message in list(self.said):
            once = isinstance(message, (NodeJoined, ReduceRequested))
            if self.now - at <= round_trip_s and not once:
                self.up.send(message, len(encode(message)))

    def _reaches_manager(self, connection: int, message: Any) -> None:
        if connection == self.connections:
            self.world.manager.take(self, message)

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
        if self.alive:
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
        self.memo.heard(message)
        match message:
            case NodeAdmitted() if self.numbers_seen:
                self._again(message)
            case NodeAdmitted():
                self.number = message.node
                for member in message.members:
                    self._came(member)
                waiting, self.when_admitted = self.when_admitted, []
                for call in waiting:
                    call()
            case MembersChanged():
                for number in message.went:
                    self.missed.pop(number, None)
                    self._went(number)
                for member in message.came:
                    self._came(member)
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
                self.asks.forgotten(message.operation)
            case GivenUp():
                self.world.end(self, "it was given up")
            case Leave():
                self.world.end(self, "it has left")
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

    def _came(self, member: Member) -> None:
        peer = self.world.lives[member.home, member.incarnation]
        self.numbers_seen = max(self.numbers_seen, member.node + 1)
        if peer is not self:
            self.members[member.node] = peer

    def _again(self, message: NodeAdmitted) -> None:
        """Another manager has taken over; it may know of others who came, or are lost."""
        found = {member.node: member for member in message.members}
        for number, peer in list(self.members.items()):
            if number not in found or found[number].incarnation != peer.incarnation:
                self._went(number)
        for number in list(self.missed):
            if number in found:  # this manager may not have heard of it
                self._complain_later(number)
            else:
                del self.missed[number]
        for number, member in found.items():
            if number not in self.members and number not in self.missed:
                self._came(member)

    def _went(self, number: int) -> None:
        peer = self.members.pop(number, None)
        if peer is None:
            return
        self.engine.lose(peer.engine, "the link ended")
        self.asks.lose_home(peer.home)
        self.places.lose_node(number)

    def lost(self, peer: Node) -> None:
        """This node has noticed by itself. If both live the manager must choose."""
        number = peer.number
        if self.alive and self.members.get(number) is peer:
            self._went(number)
            self.missed[number] = peer
            self._complain_later(number)

    def _complain_later(self, number: int) -> None:
        self.after(PEER_LOST_SILENCES * self.world.silence_s, self._complain, number)

    def _complain(self, number: int) -> None:
        if number in self.missed:
            self.send_manager(PeerLost(self.number, number))
