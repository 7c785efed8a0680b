"""Determines which manager may decide for the cluster: terms, votes, and leases (Gray, Cheriton).

With a standby, two hosts may run a manager, and the network between them can be cut. There is one
class for each role. All times are arguments.

    ManagerLease  for the manager, which decides only if at least half of the hosts are bound to it
    Voter         for a node, which follows one manager, and may vote for another if it is free
    Candidate     for the standby, which leads once more than half of the hosts have voted for it

A node that answers the manager's `LeaderHeartbeat` is bound to this manager for `promise_s` after
the answer. The manager counts the node for `lease_s`. This time is shorter, and starts when the
`LeaderHeartbeat` is sent. Any half of the hosts and any majority of the hosts have a host in
common. Therefore, when a standby has won, the lease of the other manager has expired, however slow
messages were. The rates of clocks may differ by the factor PROMISE_LEASES.

Because hosts join and leave, there are *lists* of hosts, with increasing versions. A list is in
force for the manager until half of its hosts know a later list. A candidate uses the latest list
known to any of its voters. Therefore a list that is unknown to all hosts of a majority cannot be in
force.
"""

from __future__ import annotations

import math

from hoplite_mp._protocol.terms import Hosts, Knowledge

__all__ = [
    "OUT_S",
    "Candidate",
    "Hosts",
    "Knowledge",
    "ManagerLease",
    "Voter",
    "lease_s",
    "promise_s",
]

# The lease of a manager, as a multiple of the heartbeat timeout after which a host is declared
# dead. Higher: a manager that is cut off decides for longer, and a standby takes over later. Must
# not exceed 1. Otherwise a manager would declare silent hosts dead before it knows whether it still
# has its lease.
LEASE_SILENCES = 1.0
# How long a node is bound, as a multiple of the lease. The rates of clocks may differ by a tenth.
# Higher: worse clocks are tolerated, and a standby takes over later.
PROMISE_LEASES = 1.1
# How long a manager without a lease may receive nothing from half of the hosts before it steps
# down. Higher: if no standby can take over, the manager survives longer network cuts. Lower:
# programs on its side of a cut stop sooner.
OUT_S = 10.0
# How long a standby that a user promotes waits for an offered vote. The offer may be from a lost
# host whose connection has not ended yet. Higher: the user waits longer. Lower: a busy node is
# declared lost, and joins again.
ANSWER_S = 2.0
# The high bits of a list's version are the term, so lists of later terms have higher versions.
TERM_SHIFT = 32


def lease_s(heartbeat_timeout_s: float) -> float:
    """How long a manager counts a host after sending the message that the host has answered."""
    return LEASE_SILENCES * heartbeat_timeout_s


def promise_s(heartbeat_timeout_s: float) -> float:
    """How long after its answer a host does not vote for another manager."""
    return PROMISE_LEASES * lease_s(heartbeat_timeout_s)


class ManagerLease:
    """A manager's right to decide. `at`: the node on the manager's host, which never votes for
    another manager as long as this manager is running."""

    def __init__(self, term: int, at: int, lease_s: float, lists: tuple[Hosts, ...] = ()) -> None:
        """lists: the lists of the previous manager that are still in force."""
        self.term = term
        self.at = at
        self.lists = sorted(lists)
        self._lease_s = lease_s
        # Node -> time at which the latest message that it answered was sent.
        self._bound: dict[int, float] = {}
        self._knows: dict[int, int] = {}  # node -> version of the latest list that it knows
        self._ended: set[int] = set()  # nodes that have reported their shutdown: they never vote
        # The computed end of the lease. Answers only prolong it, so it is computed again only after
        # that time, or for a new list.
        self._until, self._has_news = -math.inf, True

    def decides(self, now: float) -> bool:
        """Whether this manager may decide now."""
        if now >= self._until and self._has_news:
            self._until, self._has_news = self._ends(), False
        return now < self._until

    def _ends(self) -> float:
        """The time at which fewer than half of the hosts of some list will count if no more answers
        arrive."""
        until = math.inf
        always = self._ended | {self.at}
        for hosts in self.lists:
            sent = [self._bound.get(n, -math.inf) for n in hosts.nodes if n not in always]
            needed = (len(hosts.nodes) + 1) // 2 - (len(hosts.nodes) - len(sent))
            if needed > 0:
                until = min(until, sorted(sent, reverse=True)[needed - 1] + self._lease_s)
        return until

    def suffice(self, nodes: set[int]) -> bool:
        """Whether these nodes, together with the nodes that cannot vote for another manager, make
        up at least half of each list."""
        counted = nodes | self._ended | {self.at}
        return all(hosts.has_half(counted) for hosts in self.lists)

    def change(self, nodes: tuple[int, ...]) -> bool:
        """Makes these nodes the hosts of a new list; returns False if nothing changes."""
        latest = self.lists[-1] if self.lists else Hosts(self.term << TERM_SHIFT, ())
        if latest.nodes == nodes:
            return False
        version = max(latest.version, self.term << TERM_SHIFT) + 1
        self.lists.append(Hosts(version, nodes))
        self._until = -math.inf
        self._forget_old()
        return True

    def words_for(self, node: int) -> tuple[Hosts, ...]:
        """The lists to send to that node. Empty if it knows the latest list. Nodes on other hosts
        only receive lists that the node on this host knows, so that the latter can report all of
        them to a manager that is restarted on this host."""
        known = self._knows.get(self.at, 0)
        lists = [one for one in self.lists if node == self.at or one.version <= known]
        if not lists or lists[-1].version <= self._knows.get(node, 0):
            return ()
        return tuple(lists)

    def followed(self, node: int, term: int, sent: float, version: int) -> None:
        """Records a node's answer to a message that was sent at `sent`. `version`: the latest list
        that the node knows."""
        if term != self.term:
            return
        self._bound[node] = max(sent, self._bound.get(node, sent))
        self._knows[node] = max(version, self._knows.get(node, 0))
        self._forget_old()

    def joined(self, node: int, now: float) -> None:
        """Records the admission of a node. The node does not know a standby yet, so it counts as if
        it had just answered."""
        self.followed(node, self.term, now, 0)

    def ended(self, node: int) -> None:
        """Records that a node has reported its shutdown."""
        self._ended.add(node)
        self._forget_old()

    def _forget_old(self) -> None:
        """Drops each list, except for the latest, if half of its hosts know a later list or have
        shut down."""
        self._has_news = True
        if not self.lists:
            return
        kept = []
        for hosts in self.lists[:-1]:
            aware = {node for node, version in self._knows.items() if version > hosts.version}
            if not hosts.has_half(aware | self._ended):
                kept.append(hosts)
        self.lists = [*kept, self.lists[-1]]


class Voter:
    """The manager that a node follows, and the candidate for which it votes."""

    def __init__(self, promise_s: float, now: float) -> None:
        self.term = 0
        self.at: int | None = None  # the node on the manager's host
        self.lists: tuple[Hosts, ...] = ()
        self.heard_at = now  # time of the latest message from the manager, or of a vote
        self.voted_for = 0  # the candidate for which this node last voted; 0: no vote yet
        self._promise_s = promise_s

    def bind(self, lease_s: float) -> None:
        """Binds this node to a manager, which counts the node for `lease_s`."""
        self._promise_s = max(self._promise_s, PROMISE_LEASES * lease_s)

    @property
    def version(self) -> int:
        """The version of the latest list that this node knows; 0 if it knows none."""
        return self.lists[-1].version if self.lists else 0

    @property
    def knowledge(self) -> Knowledge:
        return Knowledge(self.term, self.at, self.lists)

    def hear(self, term: int, at: int, lists: tuple[Hosts, ...], now: float) -> bool:
        """Handles a manager's message. Returns False, so that this node does not answer, if the
        message's term is out of date."""
        if term < self.term:
            return False
        if lists and max(lists).version >= self.version:
            self.lists = tuple(sorted(lists))
        self.term, self.at = term, at
        self.heard_at = now
        return True

    def is_free(self, now: float) -> bool:
        """Whether this node is no longer bound to its manager."""
        return now >= self.free_at

    @property
    def free_at(self) -> float:
        return self.heard_at + self._promise_s

    def vote(self, term: int, candidate: int, now: float) -> bool:
        """Votes for that candidate in that term if this node may, and returns whether it has. The
        node then ignores managers of older terms. candidate: a unique positive number."""
        again = (term, candidate) == (self.term, self.voted_for)
        if not again and (term <= self.term or not self.is_free(now)):
            return False
        self.term, self.voted_for = term, candidate
        self.heard_at = now
        return True


class Candidate:
    """The votes, and offered votes, for a standby. `own`: the node on the standby's host, without
    which the standby cannot become the manager."""

    def __init__(self, own: int, identity: int) -> None:
        self.own = own
        self.identity = identity
        self.term = 0  # the term for which it requests votes
        self.offers: dict[int, Knowledge] = {}  # from nodes that are free
        self.votes: dict[int, Knowledge] = {}  # in this term
        self._asked: set[int] = set()  # nodes asked in this term and since their last offer
        self._since: dict[int, float] = {}  # node -> time of the first request in this term
        self._forced = False  # a user has promoted the standby

    def offer(self, node: int, knowledge: Knowledge) -> None:
        """Records that a node has lost its manager, and offers its vote. If the node had been asked
        before, it has not voted."""
        self.offers[node] = knowledge
        self._asked.discard(node)

    def withdraw(self, node: int) -> None:
        """Removes the offer and the vote of a node that is lost or has withdrawn its offer."""
        self.offers.pop(node, None)
        self.votes.pop(node, None)
        self._asked.discard(node)

    def ask(self, now: float) -> list[int]:
        """Returns the nodes to ask for a vote in `term` now: all that have offered their votes and
        were not asked yet, as soon as the offers suffice to win."""
        if not self._forced and not self._suffice(self.offers):
            return []
        highest = max(
            (one.term for node, one in self.offers.items() if node not in self.votes), default=0
        )
        if self.term <= highest:
            self.term = highest + 1
            for collection in (self.votes, self._asked, self._since):
                collection.clear()
        asked = [node for node in self.offers if node not in self._asked | self.votes.keys()]
        self._asked.update(asked)
        for node in asked:
            self._since.setdefault(node, now)
        return asked

    def voted(self, node: int, term: int, knowledge: Knowledge) -> bool:
        """Records a vote, and returns whether it counts. `knowledge`: the lists that the node knew
        at the time of its vote."""
        counts = term == self.term and node in self._since
        if counts:
            self.votes[node] = knowledge
        return counts

    @property
    def has_won(self) -> bool:
        """Whether this standby may become the manager."""
        if self._forced:
            return self.own in self.votes and self.votes.keys() >= self.offers.keys()
        return self._suffice(self.votes)

    def give_up_silent(self, now: float) -> None:
        """Stops waiting for offered votes after ANSWER_S, if a user has promoted this standby."""
        if not self._forced:
            return
        awaited = self.offers.keys() - self.votes.keys() - {self.own}
        for node in awaited:
            if self._since.get(node, now) + ANSWER_S <= now:
                self.withdraw(node)

    def force(self, forced: bool = True) -> None:
        """Makes the votes of the reachable nodes suffice, because a user has confirmed that the
        other hosts are lost."""
        self._forced = forced

    def lease(self, lease_s: float) -> ManagerLease:
        """The lease of the manager that this standby becomes. Only valid after it has won."""
        assert self.has_won
        lists = self.latest(self.votes)
        if self._forced or lists is None:
            lists = Hosts((self.term << TERM_SHIFT) + 1, tuple(sorted(self.votes)))
        lease = ManagerLease(self.term, self.own, lease_s, (lists,))
        for node, knowledge in self.votes.items():
            known = knowledge.latest
            version = 0 if known is None else known.version
            lease.followed(node, self.term, self._since[node], version)
        return lease

    def absent(self) -> set[int]:
        """The nodes on earlier managers' hosts, except this host. They will not reconnect."""
        return {one.at for one in self.votes.values() if one.at is not None} - {self.own}

    @staticmethod
    def latest(known: dict[int, Knowledge]) -> Hosts | None:
        """The latest list known to any of these nodes."""
        lists = [one.latest for one in known.values()]
        return max((one for one in lists if one is not None), default=None)

    def _suffice(self, known: dict[int, Knowledge]) -> bool:
        hosts = self.latest(known)
        if self.own not in known or hosts is None or self.is_struck(known):
            return False
        return hosts.has_majority(set(known))

    def is_struck(self, known: dict[int, Knowledge]) -> bool:
        """Whether the manager had declared this standby's host dead without this host's knowledge.
        The other hosts have then continued without this host's objects and tasks, so this standby
        must not become their manager. `gone` is also checked, because a voter may know about the
        loss before it knows a later list."""
        if any(self.own in one.gone for one in known.values()):
            return True
        hosts, own = self.latest(known), known.get(self.own)
        own_hosts = None if own is None else own.latest
        return (
            hosts is not None
            and own_hosts is not None
            and self.own in own_hosts.nodes
            and self.own not in hosts.nodes
        )

    @property
    def may_win(self) -> bool:
        """Whether the offered votes would suffice without a user's confirmation."""
        return self._suffice(self.offers)
