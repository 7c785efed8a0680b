"""The living nodes and their incarnations, their dead clients, and the announcement of joins.

A node joins with the id of its host, and is assigned a number here, in order of joining. A host
that joins again keeps its number. Numbers are never reused for other hosts, so a late message about
a dead node is never attributed to another host.

Late messages about nodes and clients are ignored. They are recognized by the incarnation of the
node or the generation of the client slot, which only increase.

The memory used is bounded by the hosts and client slots in the cluster: three numbers per node that
ever joined, and one number per slot in which a process was ever lost.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hoplite_mp._protocol.fields import NODES_MAX
from hoplite_mp._protocol.messages import DeclaredDead, Member, MembersChanged, NodeAdmitted

if TYPE_CHECKING:
    from collections.abc import Iterable

    from hoplite_mp._planner.step_result import Send
    from hoplite_mp._protocol.messages import NodeJoined

__all__ = ["ANNOUNCE_S", "AT_ONCE_MAX", "Announcements"]


class ClusterMembership:
    """The living nodes, and the data by which late messages about dead nodes are recognized."""

    def __init__(self) -> None:
        self._living: dict[int, Member] = {}  # by node, in order of joining
        self._numbers: dict[int, int] = {}  # host id -> node, for all nodes that ever joined
        self.given = 0  # how many numbers have been assigned
        self._ended: dict[int, int] = {}  # node -> highest incarnation that has ended
        # Node -> client slot -> highest generation that has ended.
        self._gone: dict[int, dict[int, int]] = {}
        self.leaving: set[int] = set()  # living nodes that have asked to leave
        self._sent_leave: set[int] = set()  # the leaving nodes to which Leave was sent

    @property
    def nodes(self) -> tuple[int, ...]:
        """The living nodes in order of joining."""
        return tuple(self._living)

    @property
    def members(self) -> tuple[Member, ...]:
        """The living nodes in order of joining, in the form that is sent to nodes."""
        return tuple(self._living.values())

    def number_of(self, host_id: int) -> int | None:
        """The host's number, or the number that it would be assigned. None if no number is left."""
        number = self._numbers.get(host_id, self.given)
        return number if number < NODES_MAX else None

    def given_to(self, host_id: int) -> int | None:
        """The host's number. None if the host has not joined since the start of this manager, and
        no node has named it as a member."""
        return self._numbers.get(host_id)

    def node_of(self, host_id: int) -> int | None:
        """The living node of that host, or None."""
        node = self._numbers.get(host_id)
        return node if node in self._living else None

    def is_joining(self, node: int, incarnation: int) -> bool:
        """Whether a join with these numbers begins a new incarnation. Otherwise it is a duplicate
        or a late message."""
        living = self._living.get(node)
        known = -1 if living is None else living.incarnation
        return incarnation > max(known, self._ended.get(node, -1))

    def is_living(self, node: int, incarnation: int | None = None) -> bool:
        """Whether the node is alive. If an incarnation is given, it must be the present one."""
        living = self._living.get(node)
        return living is not None and incarnation in (None, living.incarnation)

    def living(self, nodes: Iterable[int]) -> list[int]:
        """The living nodes among these."""
        living = self._living
        return [node for node in nodes if node in living]

    def join(self, message: NodeJoined) -> Member:
        """Begins a new incarnation of a node. `lose` must have ended the previous incarnation."""
        node = self.number_of(message.host_id)
        assert node is not None
        assert self.is_joining(node, message.incarnation)
        assert node not in self._living
        self._numbers[message.host_id] = node
        self.given = max(self.given, node + 1)
        self._living[node] = member = Member(
            node,
            message.incarnation,
            message.host_id,
            message.workers,
            message.host,
            message.addresses,
            message.memory_total,
            message.stays,
            message.resources,
        )
        return member

    def restore(self, members: Iterable[Member], numbers: int) -> None:
        """Records the nodes of the previous manager. `numbers`: how many numbers this manager had
        assigned."""
        for member in members:
            self._numbers[member.host_id] = member.node
            self._living[member.node] = member
        self.given = max(numbers, *(node + 1 for node in self._living))

    def lose(self, node: int) -> None:
        """Ends the node's present incarnation, and its clients."""
        self._ended[node] = self._living.pop(node).incarnation
        self._gone.pop(node, None)
        self.leaving.discard(node)
        self._sent_leave.discard(node)

    def incarnation(self, node: int) -> int:
        """The incarnation of a living node."""
        return self._living[node].incarnation

    def say_leave(self, node: int) -> bool:
        """Returns True once for each incarnation of a leaving node, so that Leave is sent once."""
        first = node not in self._sent_leave
        self._sent_leave.add(node)
        return first

    def is_client_gone(self, node: int, client: int, generation: int) -> bool:
        """Whether this use of the client slot, or a later one, has ended. Uses of a slot end in
        order."""
        return generation <= self._gone.get(node, {}).get(client, -1)

    def lose_client(self, node: int, client: int, generation: int) -> None:
        """Ends this use of the client slot, and all earlier uses."""
        gone = self._gone.setdefault(node, {})
        gone[client] = max(generation, gone.get(client, -1))


# The announcement of joins to the other nodes.
#
# Each join is announced to all other nodes. If many nodes joined at the same time, separate
# announcements would require a message for each pair of nodes. A join is therefore announced
# immediately only if few messages were sent just before. Further joins are announced together, at
# most ANNOUNCE_S later.
#
# All joins are announced to a node before any other message is sent to it (see `before`), so no
# message names a node that its receiver does not know.


# The longest delay of an announcement. Higher: fewer messages while many nodes join. Lower: nodes
# are informed of each other sooner.
ANNOUNCE_S = 0.25
# Maximum number of messages that are sent without delay within ANNOUNCE_S. With 64, the first
# eleven nodes of a new cluster are announced immediately. Higher: more joins are announced without
# delay. Lower: fewer messages.
AT_ONCE_MAX = 64


class Announcements:
    """The joins that have not been announced yet."""

    def __init__(self) -> None:
        self._joined: list[Member] = []  # in order of joining
        # Node -> how many of these joins were sent to it. A missing entry means 0.
        self._known: dict[int, int] = {}
        self._began = float("-inf")  # start of the interval in which messages are counted
        self._sent = 0  # number of messages sent in this interval

    @property
    def wake_at(self) -> float | None:
        """The time at which the pending announcements are due, or None."""
        return self._began + ANNOUNCE_S if self._joined else None

    def join(self, member: Member, others: Iterable[int], now: float) -> list[Send]:
        """Records that a node has joined. The node itself knows all members. Returns the
        announcements to send immediately."""
        others = list(others)
        self._joined.append(member)
        self._known[member.node] = len(self._joined)
        if now - self._began >= ANNOUNCE_S:
            self._began, self._sent = now, 0
        if self._sent and self._sent + len(others) > AT_ONCE_MAX:
            return []
        return self._announce(others)

    def tick(self, nodes: Iterable[int], now: float) -> list[Send]:
        """The messages that are due now."""
        if not self._joined or now < self._began + ANNOUNCE_S:
            return []
        self._began, self._sent = now, 0
        return self._announce(nodes)

    def before(self, sends: list[Send]) -> list[Send]:
        """Returns the same messages, each preceded by the joins that its receiver does not know.
        Two messages need no announcements: NodeAdmitted contains all members, and DeclaredDead ends
        the node's membership."""
        if not self._joined:
            return sends
        found: list[Send] = []
        for node, message in sends:
            if isinstance(message, NodeAdmitted):
                self.knows_all(node)
            elif not isinstance(message, DeclaredDead):
                found += self._missing(node)
            found.append((node, message))
        return found

    def knows_all(self, node: int) -> None:
        """Records that the node has been informed of all members."""
        if self._joined:
            self._known[node] = len(self._joined)

    def lose(self, node: int) -> None:
        """Removes a lost node. If its host joins again, it receives all members."""
        self._known.pop(node, None)

    def _announce(self, nodes: Iterable[int]) -> list[Send]:
        sends: list[Send] = []
        encoded_once: dict[int, MembersChanged] = {}
        for node in nodes:
            sends += self._missing(node, encoded_once)
        self._joined.clear()
        self._known.clear()
        self._sent += len(sends)
        return sends

    def _missing(self, node: int, made: dict[int, MembersChanged] | None = None) -> list[Send]:
        known = self._known.get(node, 0)
        if known == len(self._joined):
            return []
        message = None if made is None else made.get(known)
        if message is None:
            message = MembersChanged(tuple(self._joined[known:]), ())
            if made is not None:
                made[known] = message
        self._known[node] = len(self._joined)
        return [(node, message)]
