"""Ways to nodes that this one cannot reach: over a third node, which lends a port.

    this node ── RelayAsked ──► a node that both reach        it looks whether it reaches that one
              ◄─ RelayOpened ── and opens a port that leads there (node/shell/forward.py)

Why it exists: a firewall or a missing route between two hosts must not split a cluster whose hosts
all reach the first one. Members are asked in order of joining, one after the other.
It must never know: what the connections are for.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Protocol

from hoplite_mp.errors import ConfigError
from hoplite_mp.protocol.peers import RelayAsked, RelayOpened
from hoplite_mp.transport.addresses import endpoint_of, parse_address

if TYPE_CHECKING:
    from collections.abc import Callable

    from hoplite_mp.node.objects.context import HostContext
    from hoplite_mp.node.ports import Connections, LentPort
    from hoplite_mp.node.questions import Answer
    from hoplite_mp.protocol.messages import Member
    from hoplite_mp.protocol.peers import PeerMessage
    from hoplite_mp.transport.addresses import Endpoint

__all__ = ["Relays", "endpoints_of"]

# How long a node may take to say whether it reaches another one. It tries each of its addresses,
# for 2 s each (ARRIVE_S in node/shell/forward.py).
ANSWER_S = 6.0
# Nodes that are asked for one way. Higher: a node that is really gone is given up later.
ASKED_MAX = 3
_log = logging.getLogger("hoplite_mp")


@dataclass(eq=False, slots=True)
class _Search:
    """For a way to one node. candidates: homes of those that are still to be asked."""

    candidates: list[int]
    waiting: list[Callable[[list[Endpoint]], None]]


class Above(Protocol):
    """The connections that these ways are for."""

    def send(self, home: int, message: PeerMessage) -> bool:
        """False: there is no such node."""

    def is_member(self, host: str) -> bool:
        """Is that address one of a living node's? Also asked in threads."""


class Relays:
    """The ways of this node over others, and the ports that it lends."""

    def __init__(self, host: HostContext, connections: Connections, above: Above) -> None:
        self.loop = host.loop
        self.roster = host.roster
        self.questions = host.questions
        self.connections = connections
        self.above = above
        self.ways: dict[int, tuple[int, list[Endpoint]]] = {}  # home -> home of who lends, where
        self.searches: dict[int, _Search] = {}
        self.forwards: dict[int, LentPort] = {}  # by the home of the node behind
        # Home -> homes that asked for a way to it, and the numbers of their questions.
        self.trying: dict[int, list[tuple[int, int]]] = {}

    # -- a way for this node -------------------------------------------------------------------

    def way(self, home: int) -> list[Endpoint]:
        """Where to call instead of that node; nothing if it is called directly."""
        return self.ways[home][1] if home in self.ways else []

    def find(self, member: Member, done: Callable[[list[Endpoint]], None]) -> None:
        """A way to a node that cannot be reached; nothing if nobody has one."""
        search = self.searches.get(member.home)
        if search is None:
            others = [home for home in self.roster.by_home if home != member.home]
            unreached = self.ways.keys() | self.searches.keys()
            candidates = [home for home in others if home not in unreached][:ASKED_MAX]
            search = self.searches[member.home] = _Search(candidates, [done])
            self._ask(member.home, search)
        else:
            search.waiting.append(done)

    def _ask(self, home: int, search: _Search) -> None:
        """The next of those who may know one."""
        if not search.candidates:
            self._end(home, [])
            return
        lender = search.candidates.pop(0)

        def answered(answer: Answer | None) -> None:
            if self.searches.get(home) is not search:
                return  # that node is gone
            if answer is None or not answer.message.port:
                self._ask(home, search)
            else:
                self._opened(home, lender, answer.message.port)

        self.questions.ask(lender, lambda number: RelayAsked(number, home), answered, ANSWER_S)

    def _opened(self, home: int, lender: int, port: int) -> None:
        """That port of another node leads there."""
        behind, peer = self.roster.by_home[home], self.roster.by_home[lender]
        way = [at._replace(port=port) for at in map(parse_address, peer.addresses)]
        found = endpoints_of(tuple(map(str, way)))
        self.ways[home] = lender, found
        words = "node h%d is reached over node h%d: no connection leads there from this host"
        _log.warning(words, behind.node, peer.node)
        self._end(home, found)

    def _end(self, home: int, found: list[Endpoint]) -> None:
        for done in self.searches.pop(home).waiting:
            done(found)

    # -- ways for others -----------------------------------------------------------------------

    def asked(self, asker: int, message: RelayAsked) -> None:
        """A node does not reach that one: does this one? Looked up in a thread."""
        home, number = message.host, message.number
        peer = self.roster.by_home.get(home)
        if peer is None or home in self.ways or home in self.searches:
            self.above.send(asker, RelayOpened(number, 0))
        elif home in self.forwards:
            self.above.send(asker, RelayOpened(number, self.forwards[home].port))
        elif home in self.trying:
            self.trying[home].append((asker, number))
        else:
            endpoints = endpoints_of(peer.addresses)
            look = partial(self.connections.is_reached, endpoints)
            self.loop.run_in_thread(look, partial(self._tried, home))
            self.trying[home] = [(asker, number)]  # what the thread finds comes in a later turn

    def _tried(self, home: int, reached: bool) -> None:
        port = self._lend(home) if reached else 0
        for asker, number in self.trying.pop(home, ()):
            self.above.send(asker, RelayOpened(number, port))

    def _lend(self, home: int) -> int:
        """A port that leads to that node; 0: there is none."""
        peer = self.roster.by_home.get(home)
        if peer is None:
            return 0
        try:
            endpoints = endpoints_of(peer.addresses)
            forward = self.connections.lend(endpoints, self.above.is_member)
        except (ConfigError, OSError, RuntimeError) as error:  # no port, descriptor, thread is left
            _log.error("no way can be lent to node h%d: %s", peer.node, error)
            return 0
        self.forwards[home] = forward
        return forward.port

    # -- ends ----------------------------------------------------------------------------------

    def lose_peer(self, home: int) -> None:
        """That node is gone, and so are the ways over it and to it."""
        self.ways = {
            behind: way for behind, way in self.ways.items() if home not in (behind, way[0])
        }
        forward = self.forwards.pop(home, None)
        if forward is not None:
            forward.close()
        if home in self.searches:
            self._end(home, [])


def endpoints_of(addresses: tuple[str, ...]) -> list[Endpoint]:
    """Addresses of numbers, as other nodes advertise them."""
    return [endpoint_of(parse_address(text)) for text in addresses]
