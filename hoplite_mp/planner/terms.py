"""Who may decide for the cluster: terms, votes, and the lease of a manager.

Why it exists: with a standby there are two places where a manager may be, and the network between
them can be cut. Three parts, one for each who takes part, each with the time passed in:

    Lease      the manager's: it decides only while at least half of the hosts are bound to it
    Voter      a node's: whom it follows, and whether it is free to vote for somebody else
    Candidate  the standby's: it leads once more than half of the hosts have voted for its term

A node that answers the manager's word is bound to it for `promise_s` from then on; the manager
counts it for `lease_s`, which is less, from when that word was sent. Half of the hosts and more
than half have one host in common, so when a standby has won the lease of the other has run out,
however long messages were on their way. Clocks may run at rates that differ by PROMISE_LEASES.

Hosts come and go, so there are *lists* of them, with versions that only rise. A list counts for the
manager until half of it knows a later one; a candidate counts by the latest list that any of its
voters knows. What nobody of a majority knows can therefore not be in force.

This module must never know connections nor planners. Whoever uses it sends what it says.
"""

from __future__ import annotations

from hoplite_mp.protocol.terms import Hosts, Knowledge

__all__ = ["OUT_S", "Candidate", "Hosts", "Knowledge", "Lease", "Voter", "lease_s", "promise_s"]

# The lease of a manager, in silences of a host. Higher: a manager whose hosts stand still decides
# on for longer, and a standby takes over later. Not above 1: what is silent would be given up
# before it is asked whether enough others are heard.
LEASE_SILENCES = 1.0
# How long a node is bound, in leases: clocks may differ in rate by a tenth. Higher: worse clocks
# are allowed for, and a standby takes over later.
PROMISE_LEASES = 1.1
# How long a manager without a lease may hear nothing of half of the hosts before it steps down.
# Higher: longer cuts of most hosts are bridged where no standby could take over; lower: programs on
# its side end sooner.
OUT_S = 10.0
TERM_SHIFT = 32  # of the term, in the version of a list: later managers' lists are later ones


def lease_s(silence_s: float) -> float:
    """How long a manager counts a host that has answered."""
    return LEASE_SILENCES * silence_s


def promise_s(silence_s: float) -> float:
    """How long a host that has answered votes for nobody else."""
    return PROMISE_LEASES * lease_s(silence_s)


class Lease:
    """What a manager knows of its right to decide. `at`: its own host's node, which never votes for
    another as long as its manager lives."""

    def __init__(self, term: int, at: int, lease_s: float, lists: tuple[Hosts, ...] = ()) -> None:
        """lists: those that are in force, of the manager before this one."""
        self.term = term
        self.at = at
        self.lists = sorted(lists)
        self._lease_s = lease_s
        self._bound: dict[int, float] = {}  # node -> when the word was sent that it has answered
        self._knows: dict[int, int] = {}  # node -> version of the latest list that it knows
        self._ended: set[int] = set()  # nodes that are over, by their own word: they never vote

    def decides(self, now: float) -> bool:
        """May this manager decide now?"""
        return self.suffice({n for n, sent in self._bound.items() if now < sent + self._lease_s})

    def suffice(self, nodes: set[int]) -> bool:
        """Are these, with those that cannot vote for another, half of each list?"""
        counted = nodes | self._ended | {self.at}
        return all(hosts.has_half(counted) for hosts in self.lists)

    def change(self, nodes: tuple[int, ...]) -> bool:
        """These are the hosts from now on; False if they were already."""
        latest = self.lists[-1] if self.lists else Hosts(self.term << TERM_SHIFT, ())
        if latest.nodes == nodes:
            return False
        version = max(latest.version, self.term << TERM_SHIFT) + 1
        self.lists.append(Hosts(version, nodes))
        self._forget_old()
        return True

    def words_for(self, node: int) -> tuple[Hosts, ...]:
        """What that node is to be told: nothing if it knows; others hear what this host's node
        knows, so that a manager that is started again can be told everything."""
        known = self._knows.get(self.at, 0)
        told = [one for one in self.lists if node == self.at or one.version <= known]
        if not told or told[-1].version <= self._knows.get(node, 0):
            return ()
        return tuple(told)

    def followed(self, node: int, term: int, sent: float, version: int) -> None:
        """The answer of a node to a word that was sent then; it knows that version."""
        if term != self.term:
            return
        self._bound[node] = max(sent, self._bound.get(node, sent))
        self._knows[node] = max(version, self._knows.get(node, 0))
        self._forget_old()

    def joined(self, node: int, now: float) -> None:
        """That node is let in. It has not heard of any standby yet, so it is bound like one that
        has just answered."""
        self.followed(node, self.term, now, 0)

    def ended(self, node: int) -> None:
        """That node says that its life is over."""
        self._ended.add(node)
        self._forget_old()

    def _forget_old(self) -> None:
        """A list counts until half of it knows a later one, or can vote no more."""
        if not self.lists:
            return
        kept = []
        for hosts in self.lists[:-1]:
            aware = {node for node, version in self._knows.items() if version > hosts.version}
            if not hosts.has_half(aware | self._ended):
                kept.append(hosts)
        self.lists = [*kept, self.lists[-1]]


class Voter:
    """What a node knows of managers."""

    def __init__(self, promise_s: float, now: float) -> None:
        self.term = 0
        self.at: int | None = None  # the manager's own node
        self.lists: tuple[Hosts, ...] = ()
        self.heard_at = now
        self.voted_for = 0  # the candidate of this term, if there was a vote
        self._promise_s = promise_s

    def bind(self, lease_s: float) -> None:
        """A manager counts this node for so long: it is not free before, whatever it is told."""
        self._promise_s = max(self._promise_s, PROMISE_LEASES * lease_s)

    @property
    def version(self) -> int:
        """Of the latest list that this node knows."""
        return self.lists[-1].version if self.lists else 0

    @property
    def knowledge(self) -> Knowledge:
        return Knowledge(self.term, self.at, self.lists)

    def hear(self, term: int, at: int, lists: tuple[Hosts, ...], now: float) -> bool:
        """A manager's word. False: it is an older one's, and this node does not answer."""
        if term < self.term:
            return False
        if lists and max(lists).version >= self.version:
            self.lists = tuple(sorted(lists))
        self.term, self.at = term, at
        self.heard_at = now
        return True

    def is_free(self, now: float) -> bool:
        """Has the manager's lease run out, as far as it was this node's?"""
        return now >= self.free_at

    @property
    def free_at(self) -> float:
        return self.heard_at + self._promise_s

    def vote(self, term: int, candidate: int, now: float) -> bool:
        """Vote for that candidate in that term, if this may be: then nobody of an older term is
        obeyed any more. candidate: a number that no other has, above 0."""
        again = (term, candidate) == (self.term, self.voted_for)
        if not again and (term <= self.term or not self.is_free(now)):
            return False
        self.term, self.voted_for = term, candidate
        self.heard_at = now
        return True


class Candidate:
    """What a standby knows of its prospects. `own`: the node of its own host, without which it does
    not lead."""

    def __init__(self, own: int, identity: int) -> None:
        self.own = own
        self.identity = identity
        self.term = 0  # for which it asks
        self.offers: dict[int, Knowledge] = {}  # of nodes that are free
        self.votes: dict[int, Knowledge] = {}  # in this term
        self._asked: set[int] = set()  # in this term, since their last offer
        self._since: dict[int, float] = {}  # node -> when it was first asked in this term
        self._forced = False

    def offer(self, node: int, knowledge: Knowledge) -> None:
        """That node has lost its manager, and would vote; if it was asked, it has not voted."""
        self.offers[node] = knowledge
        self._asked.discard(node)

    def withdraw(self, node: int) -> None:
        """It would not, or is gone; a vote of before is not counted."""
        self.offers.pop(node, None)
        self.votes.pop(node, None)
        self._asked.discard(node)

    def ask(self, now: float) -> list[int]:
        """Who is to be asked for a vote in `term` now: all who would vote, once they suffice."""
        if not self._forced and not self._suffice(self.offers):
            return []
        highest = max(
            (one.term for node, one in self.offers.items() if node not in self.votes), default=0
        )
        if self.term <= highest:
            self.term = highest + 1
            for ended in (self.votes, self._asked, self._since):
                ended.clear()
        asked = [node for node in self.offers if node not in self._asked | self.votes.keys()]
        self._asked.update(asked)
        for node in asked:
            self._since.setdefault(node, now)
        return asked

    def voted(self, node: int, term: int, knowledge: Knowledge) -> None:
        """A node has voted; `knowledge` is what it knew then."""
        if term == self.term and node in self._since:
            self.votes[node] = knowledge

    @property
    def has_won(self) -> bool:
        """May it lead?"""
        if self._forced:
            return self.own in self.votes and self.votes.keys() >= self.offers.keys()
        return self._suffice(self.votes)

    def force(self, forced: bool = True) -> None:
        """A human says that the others are gone: those who are here suffice."""
        self._forced = forced

    def lease(self, lease_s: float) -> Lease:
        """After it has won."""
        assert self.has_won
        lists = self.latest(self.votes)
        if self._forced or lists is None:
            lists = Hosts((self.term << TERM_SHIFT) + 1, tuple(sorted(self.votes)))
        lease = Lease(self.term, self.own, lease_s, (lists,))
        for node, knowledge in self.votes.items():
            known = knowledge.latest
            version = 0 if known is None else known.version
            lease.followed(node, self.term, self._since[node], version)
        return lease

    def absent(self) -> set[int]:
        """Nodes that will not come: those of managers' hosts, but for this one."""
        return {one.at for one in self.votes.values() if one.at is not None} - {self.own}

    @staticmethod
    def latest(known: dict[int, Knowledge]) -> Hosts | None:
        """The latest list that any of them knows."""
        lists = [one.latest for one in known.values()]
        return max((one for one in lists if one is not None), default=None)

    def _suffice(self, known: dict[int, Knowledge]) -> bool:
        hosts = self.latest(known)
        if self.own not in known or hosts is None or self.is_struck(known):
            return False
        return hosts.has_majority(set(known))

    def is_struck(self, known: dict[int, Knowledge]) -> bool:
        """Had the manager given up this standby's host, which has not heard of it? Then others have
        gone on without what is there, and it is no member to lead them."""
        hosts, own = self.latest(known), known.get(self.own)
        mine = None if own is None else own.latest
        return (
            hosts is not None
            and mine is not None
            and self.own in mine.nodes
            and self.own not in hosts.nodes
        )

    @property
    def may_win(self) -> bool:
        """Would the votes of those who offer them suffice, without a human's word?"""
        return self._suffice(self.offers)
