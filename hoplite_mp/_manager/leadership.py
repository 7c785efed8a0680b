"""Determines whether this process may decide for the cluster, by the rules in _planner/terms.py.

In a cluster with a standby, two processes can be the manager. Both run the same loop with their own
planner, and this module determines whether the loop may decide. Until it may decide, messages from
nodes are held.

    first manager   lease ──► decides ◄──► too few hosts answer ──► timeout, or superseded:
                                                                    steps down
    standby         candidate ──► has enough votes ──► lease, as above
"""

from __future__ import annotations

import logging
import time
from collections import deque
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from hoplite_mp._planner.terms import OUT_S, Candidate, ManagerLease
from hoplite_mp._protocol.messages import DeclaredDead
from hoplite_mp._protocol.terms import (
    LeaderHeartbeat,
    LeaderHeartbeatAck,
    NoLeader,
    Promote,
    PromoteResponse,
    StandbyAnnounced,
    Superseded,
    VoteGranted,
    VoterEnded,
    VoteRequest,
    VoterState,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable

    from hoplite_mp._protocol.messages import Member
    from hoplite_mp._protocol.terms import Knowledge

__all__ = ["Leadership", "lease_clock"]

# Maximum number of messages held until this manager may decide again; with more, it steps down.
# With a higher value, a manager of many busy nodes survives longer interruptions. A lower value
# saves memory.
HELD_MAX = 1 << 18
# How long joining nodes wait for a manager that may not decide. With a higher value, nodes are not
# refused during short disturbances. With a lower value, they try the other address sooner.
JOIN_PATIENCE_S = 3.0
US = 1_000_000
MANAGER_ALIVE = "the standby's node is, or was until just now, in contact with the manager"
AUTOMATIC = (
    "it takes over automatically once more than half of the hosts have lost the manager; check "
    "with `hoplite-mp status`"
)
NO_HOST_LIST = (
    "the manager was lost before any reachable host had received the list of the cluster's hosts, "
    "so the cluster cannot continue: restart it"
)
DECLARED_DEAD = (
    "the manager had declared this host dead before it was lost itself, so other hosts do not use "
    "this host's objects. To continue on this host nevertheless, add --anyway"
)

Connection = TypeVar("Connection", bound="Hashable")
# Leases must expire even while the machine is suspended, when CLOCK_MONOTONIC stops.
CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
_log = logging.getLogger("hoplite_mp")


def lease_clock() -> float:
    """The time of the lease clock in seconds."""
    return time.clock_gettime(CLOCK)


class Leadership(Generic[Connection]):
    """The leadership state of one process. Connection: any value that identifies a connection."""

    def __init__(
        self,
        standby: tuple[str, ...],
        *,
        own: int,
        lease_s: float,
        write: Callable[[Connection, Any], None],
        again: bool = False,
        candidate: Candidate | None = None,
    ) -> None:
        """standby: the standby's addresses. own: the number of this host's node. again: whether
        this manager replaces a dead one on the same host; this host's node then reports which lists
        of hosts are in force. candidate: only in the standby."""
        self._announcement = StandbyAnnounced(standby, int(lease_s * US))
        self.held: deque[Any] = deque()  # messages held until this process may decide
        # Called once with the term when the standby has won.
        self.on_won: Callable[[int], None] = lambda term: None
        # The term of another manager that has superseded this one; 0 if there is none.
        self.superseded = 0
        self._own = own
        self._lease_s = lease_s
        self._write = write
        self._lease = None if again or candidate is not None else ManagerLease(1, own, lease_s)
        self._candidate = candidate
        self._identity = 0 if candidate is None else candidate.identity
        # Connection -> (the node that offers its vote, the node's knowledge at that time).
        self._offers: dict[Connection, tuple[int, Knowledge]] = {}
        # Node -> the connection over which it has voted.
        self._voters: dict[int, Connection] = {}
        self._promoter: Connection | None = None  # the connection of a waiting `promote` command
        self._data_at: dict[int, float] = {}  # node -> time at which data last arrived from it
        # Time since which this manager may not decide; None while it may.
        self._idle_since: float | None = None
        self._sent_version = 0  # version of the last list sent to this host's node

    # -- state -----------------------------------------------------------------------------------

    @property
    def leads(self) -> bool:
        """Whether this process is the manager, even if it may not decide at present. False for a
        standby that has not won."""
        return self._candidate is None

    def decides(self, now: float) -> bool:
        """Whether this process may decide now."""
        return self._lease is not None and self._lease.decides(now)

    def must_step_down(self, now: float) -> bool:
        """Whether this process must step down. Must be called once in each turn of the loop."""
        if not self.leads or self.decides(now):
            if self._idle_since is not None and self.leads:
                _log.warning("the manager has contact with half of the hosts again: it continues")
            self._idle_since = None
            if self.superseded and self.leads:  # the standby was promoted by force
                self._log_superseded()
            return bool(self.superseded)
        if self._idle_since is None:
            self._idle_since = now
            if self._lease is not None and self._lease.lists:
                _log.warning("the manager has contact with less than half of the hosts: it pauses")
        if self._lease is None:
            return False  # this manager was restarted, and this host's node has not yet reported
        if self.superseded:
            self._log_superseded()
        elif len(self.held) > HELD_MAX:
            _log.error("more than %d messages are held: the manager steps down", HELD_MAX)
        elif now - self._idle_since > OUT_S and not self._half_is_alive(now):
            _log.error("no contact with half of the hosts for %g s: the manager steps down", OUT_S)
        else:
            return False
        return True

    def _log_superseded(self) -> None:
        _log.warning("another manager leads in term %d: this one steps down", self.superseded)

    def _half_is_alive(self, now: float) -> bool:
        """Whether at least half of the hosts have sent data recently. Hosts that are merely too
        busy to reply to `LeaderHeartbeat` do not follow another manager."""
        assert self._lease is not None
        return self._lease.suffice({n for n, at in self._data_at.items() if now < at + OUT_S})

    def data_received(self, node: int, now: float) -> None:
        """Records that data or a heartbeat has arrived from that node."""
        self._data_at[node] = now

    def hold(self, message: Any) -> None:
        """Holds a message until this manager may decide."""
        self.held.append(message)

    def set_members(self, members: Iterable[Member]) -> None:
        """Sets the cluster's members."""
        if self._lease is not None:
            self._lease.change(tuple(m.node for m in members if m.stays or m.node == self._own))

    @property
    def absent(self) -> set[int]:
        """Nodes on former managers' hosts. A standby that has just won does not wait for them."""
        return set() if self._candidate is None else self._candidate.absent()

    def admitted(self, link: Connection, node: int, now: float) -> None:
        """Records that a node is being admitted, and sends it the standby's addresses."""
        if self._lease is not None:
            self._lease.joined(node, now)
        self._write(link, self._announcement)

    def refuses_joins(self, now: float, waits: bool) -> bool:
        """Whether joining nodes must be refused at present. waits: whether this manager is waiting
        for the previous manager's nodes."""
        if not self.leads:
            return True
        idle_since = self._idle_since
        return not waits and idle_since is not None and now - idle_since > JOIN_PATIENCE_S

    # -- messages --------------------------------------------------------------------------------

    def lead_message(self, node: int, now: float) -> LeaderHeartbeat | None:
        """Returns the message to send to a node as a heartbeat. None: send a plain heartbeat."""
        lease = self._lease
        if lease is None:
            return None
        return LeaderHeartbeat(lease.term, lease.at, int(now * US), lease.words_for(node))

    def list_message(self, now: float) -> LeaderHeartbeat | None:
        """Returns the message with a new list of hosts for this host's node, which must receive
        each list before other nodes. None if there is no new list."""
        lease = self._lease
        if lease is None or not lease.lists or lease.lists[-1].version == self._sent_version:
            return None
        self._sent_version = lease.lists[-1].version
        return self.lead_message(self._own, now)

    def handle(self, link: Connection, message: Any, now: float) -> bool:
        """Handles a message about terms. Returns False if it is another message."""
        match message:
            case LeaderHeartbeatAck():
                if self._lease is not None:
                    sent, version = message.sent_us / US, message.version
                    self._lease.followed(message.node, message.term, sent, version)
            case VoterState():
                self._knows(link, message, now)
            case VoteGranted():
                self._voted(link, message)
            case VoterEnded():
                if self._lease is not None:
                    self._lease.ended(message.node)
            case NoLeader():
                self._not_led(link, message, now)
            case Superseded():
                if self._lease is not None and message.term > self._lease.term:
                    self.superseded = message.term
            case Promote():
                self._promote(link, message, now)
            case _:
                return False
        return True

    def _knows(self, link: Connection, message: VoterState, now: float) -> None:
        node, knowledge = message.node, message.knowledge
        if self._candidate is not None:
            self._offers[link] = node, knowledge
            self._candidate.offer(node, knowledge)
            self._request_votes(now)
        elif self._lease is None:
            if node == self._own:  # this node knows all lists of the previous manager
                lease = ManagerLease(max(1, knowledge.term), node, self._lease_s, knowledge.lists)
                latest = knowledge.latest
                version = 0 if latest is None else latest.version
                lease.followed(node, lease.term, now, version)
                self._lease = lease
        elif self._identity:  # this standby has already won: request a vote in the present term
            self._write(link, VoteRequest(self._lease.term, self._identity))

    def _not_led(self, link: Connection, message: NoLeader, now: float) -> None:
        """Handles a node that has voted for another manager, and will never follow this one again.
        If this manager may decide, the candidate has not won (unless an operator forced it). Then
        the cluster continues without the node. Otherwise the candidate may still win."""
        lease = self._lease
        if lease is not None and message.term > lease.term and lease.decides(now):
            self._write(link, DeclaredDead(0.0))

    def _request_votes(self, now: float) -> None:
        assert self._candidate is not None
        asked = self._candidate.ask(now)
        for link, (node, _) in self._offers.items():
            if node in asked:
                self._write(link, VoteRequest(self._candidate.term, self._identity))

    def _voted(self, link: Connection, message: VoteGranted) -> None:
        node, offer = message.node, self._offers.get(link)
        if self._candidate is None or offer is None or offer[0] != node:
            return
        if self._candidate.voted(node, message.term, message.knowledge):
            self._voters[node] = link

    def count_votes(self, now: float) -> bool:
        """Makes the standby the manager if it has won. Returns True in the call in which it wins.
        `absent` must be read before this call, because it is empty afterwards."""
        candidate = self._candidate
        if candidate is None:
            return False
        candidate.give_up_silent(now)
        if not candidate.has_won:
            return False
        self._lease = candidate.lease(self._lease_s)
        self._candidate = None
        term = self._lease.term
        _log.warning("the standby is now the manager of the cluster, in term %d", term)
        if self._promoter is not None:
            reason = f"it is now the manager of the cluster, in term {term}"
            self._write(self._promoter, PromoteResponse(True, reason))
        self.on_won(term)
        return True

    def connection_ended(self, link: Connection, now: float) -> None:
        """Handles the end of a connection."""
        offer, candidate = self._offers.pop(link, None), self._candidate
        if candidate is None:
            return
        if offer is not None:
            self._offer_ended(link, offer[0], candidate, now)
        if self._promoter == link:  # `hoplite-mp promote` has exited
            self._promoter = None
            candidate.force(False)
        elif self._promoter is not None and candidate.own not in candidate.offers:
            self._write(self._promoter, PromoteResponse(False, MANAGER_ALIVE, may_change=True))
            self._promoter = None
            candidate.force(False)

    def _offer_ended(self, link: Connection, node: int, candidate: Candidate, now: float) -> None:
        """Drops a vote over a connection that has ended, because otherwise the standby could win
        with the votes of nodes that it cannot reach. If the node has offered its vote again over a
        later connection, the vote is requested over that connection."""
        offers = reversed(self._offers.values())
        latest = next((knowledge for other, knowledge in offers if other == node), None)
        if latest is None or self._voters.get(node) == link:
            self._voters.pop(node, None)
            candidate.withdraw(node)
            if latest is not None:
                candidate.offer(node, latest)
                self._request_votes(now)

    # -- promotion by an operator ------------------------------------------------------------------

    def _promote(self, link: Connection, message: Promote, now: float) -> None:
        candidate = self._candidate
        if candidate is None:
            self._write(link, PromoteResponse(True, "it is already the manager of the cluster"))
            return
        hosts = candidate.latest(candidate.offers)
        if candidate.own not in candidate.offers:
            reason = MANAGER_ALIVE
        elif hosts is None:
            reason = NO_HOST_LIST
        elif candidate.may_win:
            reason = AUTOMATIC
        elif candidate.is_struck(candidate.offers) and not message.anyway:
            reason = DECLARED_DEAD
        elif len(hosts.nodes) > 2 and not message.anyway:
            here = len(candidate.offers.keys() & set(hosts.nodes))
            reason = (
                f"only {here} of {len(hosts.nodes)} hosts are reachable; the others may still be "
                "in contact with the manager. If they are permanently gone, add --anyway"
            )
        else:
            self._promoter = link
            candidate.force()
            self._request_votes(now)
            return
        may_change = reason in (MANAGER_ALIVE, AUTOMATIC)
        self._write(link, PromoteResponse(False, reason, may_change=may_change))
