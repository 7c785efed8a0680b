"""What is said about who may decide: terms, votes, and where the standby is.

    manager  ──  StandbyNamed  Leads, at each beat                     ─►  node
             ◄─  Follows, to each of those; Ends, when it leaves       ──
    standby  ◄─  Knows, by who has lost its manager                    ──  node
             ──  VoteAsked                                             ─►
             ◄─  Voted, and then all that a new manager must know      ──
    standby  ──  Superseded, once it leads                             ─►  the manager of before
    standby  ◄─  Promote  ── the command;  Promoted ─►

A cluster without a standby says none of them. planner/terms.py decides what they mean.

This module must never know who speaks over which connection.
"""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

from hoplite_mp.protocol.fields import (
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
TERM_MAX = (1 << 31) - 1  # versions of lists have it above their 32 bits
LISTS_MAX = 1 << 10  # in force at one time: a list goes as soon as half of it knows a later one


class Hosts(NamedTuple):
    """The numbers of the nodes that count, from some moment on."""

    version: int
    nodes: tuple[int, ...]

    def has_majority(self, nodes: set[int]) -> bool:
        """Are more than half of the list among them?"""
        return 2 * len(nodes.intersection(self.nodes)) > len(self.nodes)

    def has_half(self, nodes: set[int]) -> bool:
        """Are at least half of the list among them?"""
        return 2 * len(nodes.intersection(self.nodes)) >= len(self.nodes)


class Knowledge(NamedTuple):
    """What a node knows: its term, the manager's own node (None: of none), the lists in force."""

    term: int
    at: int | None
    lists: tuple[Hosts, ...]

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


# ---- manager -> node


class StandbyNamed(Message, frozen=True):
    """Where the standby is, or will be: "ip:port", best first. Before the answer to a join.
    `lease_us`: so long this manager counts a host that has answered; hosts may have been told
    other limits, and must not be free before."""

    addresses: tuple[str, ...]
    lease_us: int = 0

    def __post_init__(self) -> None:
        counts(lease_us=self.lease_us)
        between("number of addresses", len(self.addresses), 1, ADDRESSES_MAX)
        for address in self.addresses:
            text("address", address, ADDRESS_CHARS_MAX, 1)


class Leads(Message, frozen=True):
    """I am the manager of this term, my own node is `at`, and my clock shows `sent_us`. `lists`:
    those that are in force; empty: as this node knows them."""

    term: int
    at: int
    sent_us: int
    lists: tuple[Hosts, ...] = ()

    def __post_init__(self) -> None:
        _term(self.term)
        counts(sent_us=self.sent_us)
        between("at", self.at, 0, NODES_MAX - 1)
        _lists("lists", self.lists)


class VoteAsked(Message, frozen=True):
    """Vote for me in this term. candidate: a random number."""

    term: int
    candidate: int

    def __post_init__(self) -> None:
        _term(self.term)
        between("candidate", self.candidate, 1, CANDIDATE_MAX)


# ---- node -> manager


class Follows(Message, frozen=True):
    """The answer to Leads; this node knows lists up to `version`."""

    node: int
    term: int
    sent_us: int
    version: int

    def __post_init__(self) -> None:
        _term(self.term)
        counts(node=self.node, sent_us=self.sent_us, version=self.version)


class Knows(Message, frozen=True):
    """To a standby: I have lost my manager. In the report to a manager that was started again: what
    the one before it had said."""

    node: int
    knowledge: Knowledge

    def __post_init__(self) -> None:
        counts(node=self.node)
        _knowledge(self.knowledge)


class Voted(Message, frozen=True):
    """This node obeys nobody of an older term any more; `knowledge`: what it knew before."""

    node: int
    term: int
    knowledge: Knowledge

    def __post_init__(self) -> None:
        _term(self.term)
        counts(node=self.node)
        _knowledge(self.knowledge)


class Ends(Message, frozen=True):
    """This life of the node is over: it votes for nobody any more."""

    node: int

    def __post_init__(self) -> None:
        counts(node=self.node)


# ---- of others to a manager, and back


class Superseded(Message, frozen=True):
    """There is a manager of this term."""

    term: int

    def __post_init__(self) -> None:
        _term(self.term)


class Promote(Message, frozen=True):
    """A human says: lead. anyway: although most hosts are not there."""

    anyway: bool = False

    def __post_init__(self) -> None:
        flags(anyway=self.anyway)


class Promoted(Message, frozen=True):
    """The answer: does it lead now, and what there is to say. soon: that may change in a moment."""

    leads: bool
    words: str
    soon: bool = False

    def __post_init__(self) -> None:
        flags(leads=self.leads, soon=self.soon)
        text("words", self.words, TEXT_CHARS_MAX, 1)


TermsToNode: TypeAlias = StandbyNamed | Leads | VoteAsked | Promoted
TermsToManager: TypeAlias = Follows | Knows | Voted | Ends | Superseded | Promote
