"""The messages about which manager may decide: terms, votes, and the standby's addresses.

    manager  ──  StandbyNamed  Leads, at each beat                     ─►  node
             ◄─  Follows, to each of those; Ends, when it leaves       ──
    standby  ◄─  Knows, by a node that has lost its manager            ──  node
             ──  VoteAsked                                             ─►
             ◄─  Voted, and then all that a new manager must know      ──
    standby  ──  Superseded, once it leads                             ─►  the manager before
    node     ──  NotLed, when nobody leads whom it has voted for       ─►  the manager before
    standby  ◄─  Promote  ── the command;  Promoted ─►

Without a standby none of these messages is sent. _planner/terms.py implements their rules.
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
    "Ends",
    "Follows",
    "Hosts",
    "Knowledge",
    "Knows",
    "Leads",
    "NotLed",
    "Promote",
    "Promoted",
    "StandbyNamed",
    "Superseded",
    "TermsToManager",
    "TermsToNode",
    "VoteAsked",
    "Voted",
]

CANDIDATE_MAX = (1 << 63) - 1
TERM_MAX = (1 << 31) - 1  # a list's version has the term above its low 32 bits
# Maximum number of lists in force; a list is dropped when half of its hosts know a later one.
LISTS_MAX = 1 << 10


class Hosts(NamedTuple):
    """A list of the hosts that count for leases and votes, by the numbers of their nodes."""

    version: int
    nodes: tuple[int, ...]

    def has_majority(self, nodes: set[int]) -> bool:
        """Whether more than half of the listed hosts are among these nodes."""
        return 2 * len(nodes.intersection(self.nodes)) > len(self.nodes)

    def has_half(self, nodes: set[int]) -> bool:
        """Whether at least half of the listed hosts are among these nodes."""
        return 2 * len(nodes.intersection(self.nodes)) >= len(self.nodes)


class Knowledge(NamedTuple):
    """A node's term, its manager's own node (None: it never had a manager), and the lists in force.
    `gone`: nodes of the latest list that the manager has declared dead, although this node does not
    know a later list yet."""

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


class StandbyNamed(Message, frozen=True, tag="StandbyNamed"):
    """The addresses of the standby, which may start later: "ip:port", best first. Sent before the
    answer to a join. `lease_us`: how long this manager counts a host after its answer. The host
    must not be free earlier, even if its own limits are shorter."""

    addresses: tuple[str, ...]
    lease_us: int = 0

    def __post_init__(self) -> None:
        counts(lease_us=self.lease_us)
        between("number of addresses", len(self.addresses), 1, ADDRESSES_MAX)
        for address in self.addresses:
            text("address", address, ADDRESS_CHARS_MAX, 1)


class Leads(Message, frozen=True, tag="Leads"):
    """The sender is the manager of this term, its own node is `at`, and its clock shows `sent_us`.
    `lists`: the lists in force; empty: the receiver knows them."""

    term: int
    at: int
    sent_us: int
    lists: tuple[Hosts, ...] = ()

    def __post_init__(self) -> None:
        _term(self.term)
        counts(sent_us=self.sent_us)
        between("at", self.at, 0, NODES_MAX - 1)
        _lists("lists", self.lists)


class VoteAsked(Message, frozen=True, tag="VoteAsked"):
    """The sender requests a vote in this term. candidate: a random number."""

    term: int
    candidate: int

    def __post_init__(self) -> None:
        _term(self.term)
        between("candidate", self.candidate, 1, CANDIDATE_MAX)


# ---- node -> manager


class Follows(Message, frozen=True, tag="Follows"):
    """The answer to Leads. This node knows lists up to `version`."""

    node: int
    term: int
    sent_us: int
    version: int

    def __post_init__(self) -> None:
        _term(self.term)
        counts(node=self.node, sent_us=self.sent_us, version=self.version)


class Knows(Message, frozen=True, tag="Knows"):
    """To a standby: the node has lost its manager, and offers its vote. In the report to a
    restarted manager: the lists that the previous manager had sent."""

    node: int
    knowledge: Knowledge

    def __post_init__(self) -> None:
        counts(node=self.node)
        _knowledge(self.knowledge)


class Voted(Message, frozen=True, tag="Voted"):
    """This node votes for the receiver, and ignores managers of older terms. `knowledge`: its
    knowledge before the vote."""

    node: int
    term: int
    knowledge: Knowledge

    def __post_init__(self) -> None:
        _term(self.term)
        counts(node=self.node)
        _knowledge(self.knowledge)


class Ends(Message, frozen=True, tag="Ends"):
    """This life of the node is over; it will not vote again."""

    node: int

    def __post_init__(self) -> None:
        counts(node=self.node)


class NotLed(Message, frozen=True, tag="NotLed"):
    """To the manager that this node followed before it voted: there is no manager in the term of
    its vote. If the former manager still decides, it answers with GivenUp."""

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
    """A human asks the standby to become the manager. anyway: even without most hosts."""

    anyway: bool = False

    def __post_init__(self) -> None:
        flags(anyway=self.anyway)


class Promoted(Message, frozen=True, tag="Promoted"):
    """The answer to Promote. leads: it is the manager now; words: an explanation; soon: this may
    change in a moment."""

    leads: bool
    words: str
    soon: bool = False

    def __post_init__(self) -> None:
        flags(leads=self.leads, soon=self.soon)
        text("words", self.words, TEXT_CHARS_MAX, 1)


TermsToNode: TypeAlias = StandbyNamed | Leads | VoteAsked
TermsToManager: TypeAlias = Follows | Knows | Voted | Ends | NotLed | Superseded | Promote
