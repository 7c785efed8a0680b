"""Messages about leadership: terms, votes, and the standby's addresses.

    manager  ──  StandbyAnnounced  LeaderHeartbeat, at each heartbeat        ─►  node
             ◄─  LeaderHeartbeatAck, to each; VoterEnded, when it leaves     ──
    standby  ◄─  VoterState, after the loss of its manager                   ──  node
             ──  VoteRequest                                                 ─►
             ◄─  VoteGranted, then its report to a new manager               ──
    standby  ──  Superseded, once it leads                                   ─►  former manager
    node     ──  NoLeader, if its candidate does not lead                    ─►  former manager
    standby  ◄─  Promote  ── the command;  PromoteResponse ─►

These messages are only sent in clusters with a standby. _planner/terms.py implements the rules. A
*list* names the hosts that count for leases and votes. It is in force until half of its hosts know
a later list.
"""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

from hoplite_mp._protocol.fields import (
    ADDRESS_CHARS_MAX,
    ADDRESSES_MAX,
    NODES_MAX,
    TEXT_CHARS_MAX,
    Message,
    between,
    counts,
    flags,
    numbers,
    text,
)

__all__ = [
    "Hosts",
    "Knowledge",
    "LeaderHeartbeat",
    "LeaderHeartbeatAck",
    "NoLeader",
    "Promote",
    "PromoteResponse",
    "StandbyAnnounced",
    "Superseded",
    "TermsToManager",
    "TermsToNode",
    "VoteGranted",
    "VoteRequest",
    "VoterEnded",
    "VoterState",
]

CANDIDATE_MAX = (1 << 63) - 1
TERM_MAX = (1 << 31) - 1  # a list's version has the term above its low 32 bits
# Maximum number of lists in force.
LISTS_MAX = 1 << 10


class Hosts(NamedTuple):
    """A list of hosts, by the numbers of their nodes."""

    version: int
    nodes: tuple[int, ...]

    def has_majority(self, nodes: set[int]) -> bool:
        """Whether more than half of the listed hosts are among these nodes."""
        return 2 * len(nodes.intersection(self.nodes)) > len(self.nodes)

    def has_half(self, nodes: set[int]) -> bool:
        """Whether at least half of the listed hosts are among these nodes."""
        return 2 * len(nodes.intersection(self.nodes)) >= len(self.nodes)


class Knowledge(NamedTuple):
    """A node's term, the node on its manager's host (None: it never had a manager), and the lists
    in force. `gone`: the nodes in the latest list that have since been removed from the cluster,
    although no later list has arrived yet."""

    term: int
    at: int | None
    lists: tuple[Hosts, ...]
    gone: tuple[int, ...] = ()

    @property
    def latest(self) -> Hosts | None:
        """The latest list."""
        return max(self.lists, default=None)


def _lists(name: str, value: tuple[Hosts, ...]) -> None:
    between(f"number of {name}", len(value), 0, LISTS_MAX)
    for hosts in value:
        counts(version=hosts.version)
        numbers(name, hosts.nodes, NODES_MAX - 1)


def _term(value: int) -> None:
    between("term", value, 0, TERM_MAX)


def _knowledge(value: Knowledge) -> None:
    _term(value.term)
    if value.at is not None:
        between("at", value.at, 0, NODES_MAX - 1)
    _lists("lists", value.lists)
    numbers("gone", value.gone, NODES_MAX - 1)


# ---- manager -> node


class StandbyAnnounced(Message, frozen=True, tag="StandbyNamed"):
    """The addresses of the standby, which may start later: "ip:port", best first. Sent before the
    answer to a join. `lease_us`: how long this manager counts a host after the host's answer. The
    host must not vote before then, even if its own limits are shorter."""

    addresses: tuple[str, ...]
    lease_us: int = 0

    def __post_init__(self) -> None:
        counts(lease_us=self.lease_us)
        between("number of addresses", len(self.addresses), 1, ADDRESSES_MAX)
        for address in self.addresses:
            text("address", address, ADDRESS_CHARS_MAX, 1)


class LeaderHeartbeat(Message, frozen=True, tag="Leads"):
    """The sender is the manager of this term. `at`: the node on its host; `sent_us`: the time of
    sending, by its clock; `lists`: the lists in force, empty if the receiver knows them."""

    term: int
    at: int
    sent_us: int
    lists: tuple[Hosts, ...] = ()

    def __post_init__(self) -> None:
        _term(self.term)
        counts(sent_us=self.sent_us)
        between("at", self.at, 0, NODES_MAX - 1)
        _lists("lists", self.lists)


class VoteRequest(Message, frozen=True, tag="VoteAsked"):
    """The sender requests a vote in this term. candidate: a random number."""

    term: int
    candidate: int

    def __post_init__(self) -> None:
        _term(self.term)
        between("candidate", self.candidate, 1, CANDIDATE_MAX)


# ---- node -> manager


class LeaderHeartbeatAck(Message, frozen=True, tag="Follows"):
    """The answer to LeaderHeartbeat. `version`: the latest list known to this node."""

    node: int
    term: int
    sent_us: int
    version: int

    def __post_init__(self) -> None:
        _term(self.term)
        counts(node=self.node, sent_us=self.sent_us, version=self.version)


class VoterState(Message, frozen=True, tag="Knows"):
    """To a standby: the node has lost its manager, and offers its vote. In the report to a
    restarted manager: the lists from the previous manager."""

    node: int
    knowledge: Knowledge

    def __post_init__(self) -> None:
        counts(node=self.node)
        _knowledge(self.knowledge)


class VoteGranted(Message, frozen=True, tag="Voted"):
    """This node votes for the receiver, and ignores managers of older terms. `knowledge`: its state
    before the vote."""

    node: int
    term: int
    knowledge: Knowledge

    def __post_init__(self) -> None:
        _term(self.term)
        counts(node=self.node)
        _knowledge(self.knowledge)


class VoterEnded(Message, frozen=True, tag="Ends"):
    """This incarnation of the node has ended; it will not vote again."""

    node: int

    def __post_init__(self) -> None:
        counts(node=self.node)


class NoLeader(Message, frozen=True, tag="NotLed"):
    """To the manager that this node followed before its vote: no manager leads in the term of the
    vote. A manager that may still decide answers with DeclaredDead."""

    term: int

    def __post_init__(self) -> None:
        _term(self.term)


# ---- other senders -> manager, and the answer


class Superseded(Message, frozen=True, tag="Superseded"):
    """Another manager leads in this term."""

    term: int

    def __post_init__(self) -> None:
        _term(self.term)


class Promote(Message, frozen=True, tag="Promote"):
    """An operator's request that the standby become the manager. anyway: even without a majority
    of the hosts."""

    anyway: bool = False

    def __post_init__(self) -> None:
        flags(anyway=self.anyway)


class PromoteResponse(Message, frozen=True, tag="Promoted"):
    """The answer to Promote. leads: the standby is now the manager; reason: an explanation;
    may_change: the answer may change soon."""

    leads: bool
    reason: str
    may_change: bool = False

    def __post_init__(self) -> None:
        flags(leads=self.leads, may_change=self.may_change)
        text("reason", self.reason, TEXT_CHARS_MAX, 1)


TermsToNode: TypeAlias = StandbyAnnounced | LeaderHeartbeat | VoteRequest
TermsToManager: TypeAlias = (
    LeaderHeartbeatAck | VoterState | VoteGranted | VoterEnded | NoLeader | Superseded | Promote
)
