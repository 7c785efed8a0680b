"""Data connections to other nodes, and the engine that fills cells over them.

A cell is a range of memory. One engine moves all bulk data of this host. A connection to a node is
opened for the first pull from that node. The component that requested a cell is notified when the
cell is full or its pull has failed.
"""

from __future__ import annotations

import contextlib
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from hoplite_mp._engine import (
    CLOSED,
    COLL_TAKEN,
    FILLED,
    FOLD_FAILED,
    LINK_LOST,
    PULL_FAILED,
)
from hoplite_mp._node.io.tls_links import TlsLink
from hoplite_mp._node.peers.path_estimator import Flow

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from hoplite_mp._node.objects.context import HostContext
    from hoplite_mp._node.peers.peers import Peer, Peers
    from hoplite_mp._node.ports import EnginePort, Key
    from hoplite_mp._node.store.growing_block import EngineBuffer
    from hoplite_mp._protocol.messages import Member
    from hoplite_mp._transport.conversation import Admission

__all__ = ["Links", "Pulling", "Wanting"]

# The reason for a failure if no connection could be made, directly or over a relay. Callers compare
# the reason with this text, because another attempt would take just as long.
UNREACHABLE = "the node cannot be reached"
_log = logging.getLogger("hoplite_mp")


class Wanting(Protocol):
    """A component that has requested cells, and is notified of the outcome."""

    def filled(self, cell: int) -> None:
        """Called when all bytes of the cell have arrived."""

    def failed(self, cell: int, reason: str) -> None:
        """Called when the pull or the fold has failed. The cell stays open and may be pulled
        again."""

    def describe(self, cell: int) -> dict[str, Any]:
        """Describes the cell's bytes for traces. Possible keys: "object" (16 bytes), "operation",
        "bytes"."""


@dataclass(frozen=True, slots=True)
class Pulling:
    """A cell that is being pulled."""

    parent: int
    begin_ns: int
    wanting: Wanting


class Links:
    """The engine of this node, and a link to each node from which it has pulled."""

    def __init__(self, host: HostContext, peers: Peers, engine: EnginePort) -> None:
        self.loop = host.loop
        self.client = host.client
        self.peers = peers
        self.tls = peers.start.tls
        self.engine = engine
        self.driven: dict[int, TlsLink] = {}
        self.links: dict[int, int] = {}  # number of a node -> link
        self.counted: dict[int, tuple[int, int]] = {}  # link -> bytes (sent, received)
        self.near: set[int] = set()  # links to other nodes on this host
        # Bytes (sent, received) over ended links, with separate totals for links in `near`.
        self._ended, self._ended_near = (0, 0), (0, 0)
        self.ends: dict[int, int] = {}  # link -> number of the node at its other end
        self.calling: set[int] = set()  # numbers of nodes to which a connection is being made
        # Cell that is waiting for such a connection -> the node and the key of the pull. A later
        # pull of the same cell replaces an earlier one.
        self.awaiting: dict[int, tuple[int, Key]] = {}
        self.wanting: dict[int, Wanting] = {}  # cell -> the component to notify
        self.pulling: dict[int, Pulling] = {}  # cell -> the pull that is filling it
        self.trace_events = host.trace_events
        self._takes_coll: Callable[[tuple[Any, ...]], None] | None = None
        # closed cell to which the engine may still write -> its memory
        self.closing: dict[int, EngineBuffer] = {}
        host.loop.watch(engine.fileno(), self.on_ready)

    # -- connections ---------------------------------------------------------------------------

    def admitted(self, peer: Peer, admission: Admission) -> None:
        """Takes over a data connection that another node has opened."""
        if self.tls:
            self._admitted_driven(peer.member, admission)
        else:
            self._connect(peer.member.node, admission)

    def _connect(self, number: int, admission: Admission) -> str:
        """Passes the connection to the engine. Returns the reason if that fails, else ""."""
        try:
            with admission.stream.detach() as sock:
                link = self.engine.connect(sock.fileno(), number)
        except OSError as error:  # no free descriptor
            why = error.strerror or str(error)
            _log.warning("no data connection with node h%d: %s", number, why)
            return why
        self._count(link, number)
        self.links.setdefault(number, link)
        return ""

    def _admitted_driven(self, member: Member, admission: Admission) -> None:
        """With TLS, a link consists of two halves: each side makes the connection over which it
        sends. Either side may close its half and begin a new one before connections for older
        halves have arrived. Each connection therefore has the id of its half, and the id of the
        other side's half that it answers. **Invariant**: half A receives from half B only if A
        answers B, B answers A, or both were begun simultaneously. Otherwise two nodes could replace
        each other's halves indefinitely."""
        begun, answered = admission.peer.link, admission.peer.answers
        known = self.driven.get(member.node)
        if answered:
            if known is not None and known.link == answered and not known.receiving:
                known.receive_over(admission.stream.detach())
                return
            # The answered half has ended or belongs to another peer.
            admission.stream.close()
            if known is not None and known.link == answered:
                self.lose_node(member.node)
            return
        if known is not None and (known.receiving or known.answers not in (0, begun)):
            self.lose_node(member.node)  # the other side has closed its half and begun a new one
        self._driven(member, begun).receive_over(admission.stream.detach())

    def _driven(self, member: Member, answers: int = 0) -> TlsLink:
        """Returns this side's half of the TLS link to a node, and creates it if necessary. answers:
        the other side's half if that was created first, else 0."""
        known = self.driven.get(member.node)
        if known is not None:
            return known
        link = self.driven[member.node] = TlsLink(self.engine, member.node, answers)
        self.links[member.node] = link.link
        self._count(link.link, member.node)

        def called(admission: Admission | None) -> None:
            if admission is None:
                link.close()
            else:
                link.send_over(admission.stream.detach())

        self.peers.call(member, "data", called, (link.link, answers))
        return link

    def _count(self, link: int, number: int) -> None:
        self.counted[link] = 0, 0
        self.ends[link] = number
        if self.peers.is_near(number):
            self.near.add(link)

    def peer_lost(self, member: Member) -> None:
        """See `lose_node`."""
        self.lose_node(member.node)

    def lose_node(self, number: int) -> None:
        """Ends the link to a node that is gone."""
        link = self.links.pop(number, None)
        driven = self.driven.pop(number, None)
        if driven is not None:
            driven.close()
        elif link is not None:
            with contextlib.suppress(KeyError):
                self.engine.disconnect(link)

    def when_coll(self, take: Callable[[tuple[Any, ...]], None]) -> None:
        """Registers the receiver of the engine's events about Group calls."""
        self._takes_coll = take

    # -- cells ---------------------------------------------------------------------------------

    def pull(self, cell: int, parent: int, key: Key, wanting: Wanting) -> None:
        """Fills the cell from the node `parent`, and notifies `wanting` of the outcome."""
        self.wanting[cell] = wanting
        begun = self.pulling.get(cell)  # not None if this is another attempt
        at = self.loop.now_ns() if begun is None else begun.begin_ns
        self.pulling[cell] = Pulling(parent, at, wanting)
        if self.tls and parent in self.peers.by_number:
            self._driven(self.peers.by_number[parent].member)
        link = self.links.get(parent)
        if link is not None:
            self.awaiting.pop(cell, None)
            self.engine.pull(cell, link, key)
            return
        peer = self.peers.by_number.get(parent)
        if peer is None and parent not in self.calling:
            self.awaiting.pop(cell, None)
            wanting.failed(cell, "the node is gone")
            return
        self.awaiting[cell] = parent, key
        if peer is not None:
            self._call(peer.member)

    def prepare(self, nodes: Collection[int]) -> None:
        """Creates the missing links to these nodes, in a cluster without TLS. Of two nodes, the one
        with the lower number connects."""
        for node in nodes:
            peer = self.peers.by_number.get(node)
            if peer is not None and node > self.client.number and node not in self.links:
                self._call(peer.member)

    def _call(self, member: Member) -> None:
        if member.node not in self.calling:
            self.calling.add(member.node)
            self.peers.call(member, "data", lambda admission: self._called(member, admission))

    def _called(self, member: Member, admission: Admission | None) -> None:
        self.calling.discard(member.node)
        why_not = UNREACHABLE if admission is None else self._connect(member.node, admission)
        for cell, asked in list(self.awaiting.items()):
            if asked[0] != member.node or self.awaiting.get(cell) is not asked:
                continue  # the cell waits for another node, or `failed` below has replaced its pull
            del self.awaiting[cell]
            if why_not:
                self.wanting[cell].failed(cell, why_not)
            else:
                self.engine.pull(cell, self.links[member.node], asked[1])

    def close(self, cell: int, engine_buffer: EngineBuffer) -> None:
        """Closes a cell. engine_buffer: the memory of the cell."""
        self.wanting.pop(cell, None)
        self.awaiting.pop(cell, None)
        self._note(cell, "given up")
        self.closing[cell] = engine_buffer
        engine_buffer.closing += 1
        self.engine.close(cell)

    def _closed(self, cell: int) -> None:
        engine_buffer = self.closing.pop(cell, None)
        if engine_buffer is not None:
            engine_buffer.let_go()

    def on_ready(self) -> None:
        """Handles the engine's events. Lost links come first, because the engine has already
        forgotten them, and a component that is notified of a cell may immediately pull from the
        same node."""
        events = self.engine.events()
        for event in events:
            if event[0] == LINK_LOST:
                _, link, number, reason = event
                self._lost(link, number, reason)
        for event in events:
            kind = event[0]
            if kind == FILLED:
                wanting = self.wanting.pop(event[1], None)
                self.awaiting.pop(event[1], None)
                self._note(event[1], "whole")
                if wanting is not None:
                    wanting.filled(event[1])
            elif kind in (PULL_FAILED, FOLD_FAILED):
                wanting = self.wanting.get(event[1])
                if wanting is not None:
                    wanting.failed(event[1], event[2])
            elif kind == CLOSED:
                self._closed(event[1])
            elif kind >= COLL_TAKEN and self._takes_coll is not None:
                self._takes_coll(event)

    def _lost(self, link: int, number: int, reason: str) -> None:
        self.ends.pop(link, None)
        if self.links.get(number) == link:
            del self.links[number]
            driven = self.driven.pop(number, None)
            if driven is not None:
                driven.close()
        _log.info("the data connection to node h%d ended: %s", number, reason)

    def _note(self, cell: int, outcome: str) -> None:
        """Records the end of a pull for a trace."""
        pulling = self.pulling.pop(cell, None)
        if pulling is not None and self.trace_events.on:
            fields = pulling.wanting.describe(cell)
            fields["bytes"] = self.engine.watermark(cell)
            fields["from"] = pulling.parent
            name = "object" if "object" in fields else str(fields.get("kind", "part"))
            self.trace_events.add("transfer", name, pulling.begin_ns, **fields, outcome=outcome)

    def moved(self, *, near: bool = True) -> tuple[int, int]:
        """The bytes (sent, received) over all links, with the last known counts of ended links.
        near: whether to include links between nodes on this host."""
        for link, (sent, received) in list(self.counted.items()):
            try:
                self.counted[link] = self.engine.counters(link)[:2]
            except KeyError:  # the link has ended
                if link in self.near:
                    before = self._ended_near
                    self._ended_near = before[0] + sent, before[1] + received
                else:
                    self._ended = self._ended[0] + sent, self._ended[1] + received
                del self.counted[link]
                self.near.discard(link)
        found = [moved for link, moved in self.counted.items() if near or link not in self.near]
        found += [self._ended, self._ended_near] if near else [self._ended]
        return sum(sent for sent, _ in found), sum(received for _, received in found)

    def flows(self) -> dict[int, Flow]:
        """The traffic over open links between this host and each other node, by node number."""
        found: dict[int, Flow] = {}
        for link, number in list(self.ends.items()):
            if link in self.near:
                continue
            try:
                sent, received, _, backlogged_ns = self.engine.counters(link)
            except KeyError:
                del self.ends[link]
                continue
            driven = self.driven.get(number)
            if driven is not None:
                backlogged_ns = driven.backlogged_ns
            other = found.get(number, Flow(0, 0, 0))  # not 0 if both nodes have opened a connection
            found[number] = Flow(
                other.sent + sent, other.received + received, other.backlogged_ns + backlogged_ns
            )
        return found

    def stop(self) -> None:
        """Closes all links when this node stops."""
        for driven in list(self.driven.values()):
            driven.close()
        self.engine.stop()
