"""Relays: connections to unreachable nodes, through a port of a third node.

    this node ── RelayRequest ──► a third node, which tries to reach the unreachable node,
              ◄─ RelayOpened ── and opens a port that forwards to it (_node/io/forward.py)

A firewall or a missing route between two hosts must not split a cluster whose hosts can all reach
the manager's host. Members are asked one after another, in the order in which they joined.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Protocol

from hoplite_mp._protocol.peers import RelayOpened, RelayRequest
from hoplite_mp._transport.addresses import endpoint_of, parse_address
from hoplite_mp.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

    from hoplite_mp._node.objects.context import HostContext
    from hoplite_mp._node.ports import Connections, LentPort
    from hoplite_mp._node.questions import Answer
    from hoplite_mp._protocol.messages import Member
    from hoplite_mp._protocol.peers import PeerMessage
    from hoplite_mp._transport.addresses import Endpoint

__all__ = ["Relays", "endpoints_of"]

# Timeout for an answer. The asked node tries each address of the unreachable node for 2 s (ARRIVE_S
# in _node/io/forward.py).
ANSWER_S = 6.0
# The number of nodes that are asked to relay to one node. Higher: the loss of a node is detected
# later.
ASKED_MAX = 3
_log = logging.getLogger("hoplite_mp")


@dataclass(eq=False, slots=True)
class _Search:
    """The search for a relay to one node. `candidates`: the ids of the hosts still to be asked."""

    candidates: list[int]
    waiting: list[Callable[[list[Endpoint]], None]]


class RelaysEvents(Protocol):
    """Requests from this component to Peers (_node/peers/peers.py)."""

    def send(self, host_id: int, message: PeerMessage) -> bool:
        """Sends a message to the node of the host. Returns False if there is no such node."""

    def is_member(self, host: str) -> bool:
        """Whether a living node has the address. May be called in any thread."""


class Relays:
    """The relays that this node uses, and the ports that it lends to other nodes."""

    def __init__(self, host: HostContext, connections: Connections, events: RelaysEvents) -> None:
        self.loop = host.loop
        self.roster = host.roster
        self.questions = host.questions
        self.connections = connections
        self.events = events
        # Host id -> (id of the host that relays to it, endpoints of the lent port).
        self.routes: dict[int, tuple[int, list[Endpoint]]] = {}
        self.searches: dict[int, _Search] = {}  # by id of the host that cannot be reached
        self.forwards: dict[int, LentPort] = {}  # by id of the host to which the port forwards
        # Host id -> requests for a relay to that host, as (id of the asking host, number of its
        # question).
        self.trying: dict[int, list[tuple[int, int]]] = {}

    # -- relays that this node uses ------------------------------------------------------------

    def route(self, host_id: int) -> list[Endpoint]:
        """The endpoints to call instead of the host's own. Empty if the host is called directly."""
        return self.routes[host_id][1] if host_id in self.routes else []

    def find(self, member: Member, done: Callable[[list[Endpoint]], None]) -> None:
        """Searches for a relay to an unreachable node. Calls `done` with the relay's endpoints, or
        with an empty list if there is no relay."""
        search = self.searches.get(member.host_id)
        if search is None:
            others = [host_id for host_id in self.roster.by_host_id if host_id != member.host_id]
            unreached = self.routes.keys() | self.searches.keys()
            candidates = [host_id for host_id in others if host_id not in unreached][:ASKED_MAX]
            search = self.searches[member.host_id] = _Search(candidates, [done])
            self._ask(member.host_id, search)
        else:
            search.waiting.append(done)

    def _ask(self, host_id: int, search: _Search) -> None:
        """Asks the next candidate."""
        if not search.candidates:
            self._end(host_id, [])
            return
        lender = search.candidates.pop(0)

        def answered(answer: Answer | None) -> None:
            if self.searches.get(host_id) is not search:
                return  # the unreachable node is gone
            if answer is None or not answer.message.port:
                self._ask(host_id, search)
            else:
                self._opened(host_id, lender, answer.message.port)

        self.questions.ask(lender, lambda number: RelayRequest(number, host_id), answered, ANSWER_S)

    def _opened(self, host_id: int, lender: int, port: int) -> None:
        """Uses a port on the host `lender` that forwards to the host `host_id`."""
        behind, peer = self.roster.by_host_id[host_id], self.roster.by_host_id[lender]
        route = [at._replace(port=port) for at in map(parse_address, peer.addresses)]
        found = endpoints_of(tuple(map(str, route)))
        self.routes[host_id] = lender, found
        words = "node h%d is reached through node h%d, because it cannot be reached directly"
        _log.warning(words, behind.node, peer.node)
        self._end(host_id, found)

    def _end(self, host_id: int, found: list[Endpoint]) -> None:
        for done in self.searches.pop(host_id).waiting:
            done(found)

    # -- relays for other nodes ----------------------------------------------------------------

    def asked(self, asker: int, message: RelayRequest) -> None:
        """Handles a request from the host `asker`, which cannot reach another host. A thread tries
        to reach that host from here."""
        host_id, number = message.host_id, message.number
        peer = self.roster.by_host_id.get(host_id)
        if peer is None or host_id in self.routes or host_id in self.searches:
            self.events.send(asker, RelayOpened(number, 0))
        elif host_id in self.forwards:
            self.events.send(asker, RelayOpened(number, self.forwards[host_id].port))
        elif host_id in self.trying:
            self.trying[host_id].append((asker, number))
        else:
            endpoints = endpoints_of(peer.addresses)
            reach = partial(self.connections.is_reached, endpoints)
            self.loop.run_in_thread(reach, partial(self._tried, host_id))
            self.trying[host_id] = [(asker, number)]  # the thread reports in a later turn

    def _tried(self, host_id: int, reached: bool) -> None:
        port = self._lend(host_id) if reached else 0
        for asker, number in self.trying.pop(host_id, ()):
            self.events.send(asker, RelayOpened(number, port))

    def _lend(self, host_id: int) -> int:
        """Opens a port that forwards to the host. Returns its number, or 0 if the host is gone or
        no port can be opened."""
        peer = self.roster.by_host_id.get(host_id)
        if peer is None:
            return 0
        try:
            endpoints = endpoints_of(peer.addresses)
            forward = self.connections.lend(endpoints, self.events.is_member)
        except (ConfigError, OSError, RuntimeError) as error:  # no port, descriptor or thread left
            _log.error("cannot relay to node h%d: %s", peer.node, error)
            return 0
        self.forwards[host_id] = forward
        return forward.port

    # -- lost hosts ----------------------------------------------------------------------------

    def lose_peer(self, host_id: int) -> None:
        """Removes the relays through a lost host and to that host."""
        self.routes = {
            behind: route
            for behind, route in self.routes.items()
            if host_id not in (behind, route[0])
        }
        forward = self.forwards.pop(host_id, None)
        if forward is not None:
            forward.close()
        if host_id in self.searches:
            self._end(host_id, [])


def endpoints_of(addresses: tuple[str, ...]) -> list[Endpoint]:
    """The endpoints for the addresses that another node advertises."""
    return [endpoint_of(parse_address(text)) for text in addresses]
