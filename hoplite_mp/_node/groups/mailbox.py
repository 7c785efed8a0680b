"""Messages from one member of a Group to another: mailboxes, and how messages reach them.

A mailbox releases the messages from one sender in order, each when it is complete. An end marker
follows the last message of a sender that has left or died. The mailbox must restore this order,
because a large message may arrive after smaller ones that were sent later, or after the news that
its sender has left. If a message is lost with its host, all later messages from that sender are
dropped, so the received messages are always a prefix of the sent ones.
"""

from __future__ import annotations

import functools
from collections import Counter, deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from hoplite_mp import _serialize
from hoplite_mp._common import ids
from hoplite_mp._common.object_states import KIND_OPERATION, NODE_SLOT, STATE
from hoplite_mp._node.groups.group_state import PendingMessages
from hoplite_mp._protocol.local import INBOX_MAX, Reply
from hoplite_mp._protocol.local_groups import (
    MESSAGE_INLINE_BYTES_MAX,
    GroupSourceEnded,
    PeerGroupMessage,
    PeerGroupMessageAck,
)
from hoplite_mp._protocol.peer_hosts import Probe

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator

    from hoplite_mp._node.groups.group_state import Known
    from hoplite_mp._node.objects.context import HostContext
    from hoplite_mp._protocol.local import GroupInbox, GroupMessageAck, GroupSend, Request
    from hoplite_mp._protocol.local_groups import PointToPoint as Message
    from hoplite_mp._protocol.messages import GroupMembers, Member

__all__ = ["End", "Mailbox", "PointToPoint", "QueuedMessage"]


@dataclass(slots=True, eq=False)
class QueuedMessage:
    """One message. `holds`: holds on its object and on the objects to which it refers."""

    source: int
    tag: int
    oid: int
    holds: list[Any]
    ready: bool = False


@dataclass(slots=True, eq=False)
class End:
    """An end marker, which follows the last message from a member that has left or died. `rank`:
    the member's rank; `version`: a version of the Group's members that no longer includes it."""

    rank: int
    version: int


class Mailbox:
    """The mailbox of one member. joined_in: the version of the Group's members in which that member
    joined. announce: called when there are new messages or end markers."""

    def __init__(self, size: int, joined_in: int, announce: Callable[[], None]) -> None:
        self.joined_in = joined_in
        self.announce = announce
        # Number -> a complete message that the member has not received yet.
        self.arrived: dict[int, QueuedMessage] = {}
        self.last = 0  # number of the latest released message
        # For each rank, the number of its former members whose messages are all released.
        self.ended = [0] * size
        self.gone = 0  # bits of the ranks from which no further message will arrive
        # (rank, node) of a sender -> its first incomplete message, and its later messages.
        self._incoming: dict[tuple[int, int], deque[QueuedMessage | End]] = {}
        # Rank -> (node, version) of a member that left in that version and whose End is still due.
        self._due: dict[int, tuple[int, int]] = {}
        self._end_seen = [0] * size  # for each rank, the version of its latest released End
        # Nodes from which no further message is accepted.
        self._lost: set[int] = set()
        self._present, self._formed = 0, False
        self._holds = 0  # while above 0, no further rank counts as gone

    # -- arrivals ------------------------------------------------------------------------------

    def add(self, rank: int, node: int, one: QueuedMessage | End) -> None:
        """Adds the next message from a member, or the member's End."""
        if isinstance(one, QueuedMessage) and node in self._lost:
            return
        # Ignore the End of a sender that left before this mailbox's member joined.
        if isinstance(one, End) and one.version <= self.joined_in:
            return
        self._incoming.setdefault((rank, node), deque()).append(one)
        self._advance(rank, node)

    def ready(self, queued: QueuedMessage, node: int) -> None:
        """Marks a message as complete, because its value is here or can be fetched."""
        queued.ready = True
        self._advance(queued.source, node)

    def lose(self, rank: int, node: int) -> None:
        """Drops a sender's first incomplete message and all later ones, but not its End. No further
        messages from that node are accepted."""
        self._lost.add(node)
        incoming = self._incoming.get((rank, node), deque())
        whole = 0
        while (
            whole < len(incoming)
            and isinstance(one := incoming[whole], QueuedMessage)
            and one.ready
        ):
            whole += 1
        kept = [one for at, one in enumerate(incoming) if at < whole or isinstance(one, End)]
        self._incoming[rank, node] = deque(kept)
        self._advance(rank, node)

    def lose_node(self, node: int) -> None:
        """Handles the loss of a host: drops incomplete messages from its members, and adds the end
        markers that are due."""
        self._lost.add(node)
        for rank, at in list(self._incoming):
            if at == node:
                self.lose(rank, node)
        for rank, (at, version) in list(self._due.items()):
            if at == node:
                self.add(rank, node, End(rank, version))

    def _advance(self, rank: int, node: int) -> None:
        incoming = self._incoming.get((rank, node))
        news = False
        while incoming:
            one = incoming[0]
            if isinstance(one, QueuedMessage):
                if not one.ready:
                    break
                self.last += 1
                self.arrived[self.last] = one
            else:
                self.ended[one.rank] += 1
                self._end_seen[one.rank] = max(self._end_seen[one.rank], one.version)
                due = self._due.get(one.rank)
                if due is not None and due[1] <= one.version:
                    del self._due[one.rank]
                self._update_gone()
            incoming.popleft()
            news = True
        if incoming is not None and not incoming:
            del self._incoming[rank, node]
            self._update_gone()
        if news:
            self.announce()

    # -- senders -------------------------------------------------------------------------------

    def expect_end(self, rank: int, node: int, version: int) -> None:
        """Records that the member of this rank left in that version. Its End is now due, unless it
        has already arrived."""
        if self._end_seen[rank] < version:
            self._due[rank] = node, version

    def end_if_due(self, rank: int, node: int, version: int) -> None:
        """Handles a node's report that it has no member of this rank in that version. If an End for
        this rank is due from the node, adds it."""
        at, since = self._due.get(rank, (-1, 0))
        if at == node and since <= version:
            self.add(rank, node, End(rank, version))

    def end_unheard(self, knowing: Collection[int | None]) -> None:
        """Adds the end markers that are due from nodes not in `knowing`. Those nodes are gone, or
        do not know that they had the member, because the manager died before announcing it."""
        for rank, (node, version) in list(self._due.items()):
            if node not in knowing:
                self.add(rank, node, End(rank, version))

    def set_present(self, present: int, *, formed: bool) -> None:
        """Sets the ranks that currently have a member, as bits."""
        self._present, self._formed = present, formed
        before = self.gone
        self._update_gone()
        if self.gone != before:
            self.announce()

    def hold(self) -> None:
        """Prevents further ranks from counting as gone until `release`, because messages may still
        arrive from members that were never announced to this node."""
        self._holds += 1

    def release(self) -> None:
        """Ends a `hold`, because all messages from those members have been added."""
        self._holds -= 1
        before = self.gone
        self._update_gone()
        if self.gone != before:
            self.announce()

    def _update_gone(self) -> None:
        due = 0
        for rank in (*self._due, *(rank for rank, _ in self._incoming)):
            due |= 1 << rank
        everybody = (1 << len(self.ended)) - 1
        gone = everybody & ~self._present & ~due if self._formed else 0
        self.gone = gone & self.gone if self._holds else gone

    # -- the reply -----------------------------------------------------------------------------

    def messages_after(
        self, seen: int
    ) -> tuple[list[tuple[int, int, int, int]], list[int], int, bool]:
        """The released messages after number `seen`, in the form of the reply to GroupInbox."""
        upto = min(self.last, seen + INBOX_MAX)
        found = []
        for number in range(seen + 1, upto + 1):
            queued = self.arrived.get(number)
            if queued is not None:
                found.append((number, queued.source, queued.tag, queued.oid))
        return found, self.ended, self.gone, upto < self.last

    def close(self) -> None:
        """Drops all messages, because the member is gone."""
        self.arrived.clear()
        for incoming in self._incoming.values():
            for one in incoming:
                if isinstance(one, QueuedMessage):
                    one.holds = []
        self._incoming.clear()


# Messages from one member of a Group to another: kept until received, and forwarded.
#
# `send` must not wait for the receiver, so this node holds the messages from its members. A message
# is an object in the store, so it is spilled and counted like other objects.
#
#   send ─► object held here ─► receiver here: its mailbox
#                            └► receiver elsewhere: PeerGroupMessage ─► held there ─► its mailbox


# Maximum number of message bytes sent to one host inside packets and not yet acknowledged. The
# receiver fetches further messages. Connections between nodes have no flow control, and a
# connection with too large a backlog is closed. Higher: fewer fetches. Lower: shorter delays for
# other packets.
INLINE_AHEAD_BYTES_MAX = 8 << 20
NO_MEMBER = "this process is no longer a member of the group"


class Sent(NamedTuple):
    """A message on its way to another host."""

    node: int  # the receiver's node
    to: int  # the receiver's rank
    holds: list[Any]
    inline: int  # number of bytes inside the packet


class GroupMailboxes:
    """The messages in one Group."""

    def __init__(self, members: GroupMembers, known: Known) -> None:
        self.members = members
        self.known = known
        self.mailboxes: dict[int, Mailbox] = {}  # rank of a member here -> its mailbox
        self.sent: dict[int, Sent] = {}  # by number
        self.inline: Counter[int] = Counter()  # node -> unacknowledged bytes inside packets to it
        self.numbers = 0

    def arrived(self, number: int) -> None:
        """Releases a message that has arrived at the receiver's node or will never be received."""
        sent = self.sent.pop(number, None)
        if sent is not None:
            self.inline[sent.node] -= sent.inline


class PointToPoint:
    """The messages in all Groups with a member on this host."""

    def __init__(self, host: HostContext) -> None:
        self.client = host.client
        self.clients = host.clients
        self.results = host.results
        self.imports = host.imports
        self.remote_objects = host.remote_objects
        self.roster = host.roster
        self.questions = host.questions
        self.reply = host.reply
        self.replier = host.replier
        self.send_peer = host.send_peer
        self.groups: dict[int, GroupMailboxes] = {}  # by generation
        self.pending_messages = PendingMessages()

    # -- membership ----------------------------------------------------------------------------

    def changed(self, members: GroupMembers, known: Known) -> None:
        """Handles the manager's announcement of a new version of the members."""
        group, last_version = self.groups.get(members.generation), 0
        if group is None:
            group = self.groups[members.generation] = GroupMailboxes(members, known)
        else:
            last_version = group.members.version
        before, group.members = group.members, members
        me = self.client.number
        for rank in [rank for rank in group.mailboxes if members.nodes[rank] != me]:
            group.mailboxes.pop(rank).close()
        for number in [n for n, one in group.sent.items() if members.nodes[one.to] != one.node]:
            group.arrived(number)
        for rank, node in enumerate(before.nodes):
            if before.formed and node is not None and members.nodes[rank] != node:
                self._member_gone(group, rank, node, before.version + 1)
        for rank, node in enumerate(members.nodes):
            if node == me and rank not in known.left and rank not in group.mailboxes:
                announce = functools.partial(known.board.announce, rank)
                group.mailboxes[rank] = Mailbox(members.size, members.since_of(rank), announce)
        knowing = {*members.nodes, *members.former}
        if members.formed and last_version + 1 < members.version:
            self._report_free_ranks(members)
            self._await_unknown_members(group, knowing)
        present = sum(1 << r for r, node in enumerate(members.nodes) if node is not None)
        for box in group.mailboxes.values():
            box.end_unheard(knowing)
            box.set_present(present, formed=members.formed)
        for node, message in self.pending_messages.take(members.generation):
            self.receive(node, message)

    def _report_free_ranks(self, members: GroupMembers) -> None:
        """Reports to other nodes that this node has no members of the free ranks. It has missed
        versions of the members in which it may have had some, whose End other nodes expect."""
        for rank in [rank for rank, node in enumerate(members.nodes) if node is None]:
            end = GroupSourceEnded(members.generation, members.version, rank, True)
            for other in {*members.nodes, *members.former} - {None, self.client.number}:
                self._send(other, end)  # type: ignore[arg-type]

    def _await_unknown_members(self, group: GroupMailboxes, knowing: set[int | None]) -> None:
        """Waits for messages from members that were never announced to this node: it has missed
        versions of the members, so such members may have sent messages and left. A node's answer to
        the probe arrives after all messages that its members sent earlier."""
        version = group.members.version
        mailboxes = [box for box in group.mailboxes.values() if box.joined_in < version]
        members = [self.roster.by_number.get(n) for n in knowing - {None, self.client.number}]  # type: ignore[arg-type]
        if not mailboxes:
            return
        for box in mailboxes:
            box.hold()

        def answered(_: object) -> None:
            for box in mailboxes:
                box.release()

        hosts = [member.host_id for member in members if member is not None]
        self.questions.ask_all(hosts, Probe, answered)

    def _member_gone(self, group: GroupMailboxes, rank: int, node: int, version: int) -> None:
        """Handles the end of the member of this rank on that node."""
        members, me = group.members, self.client.number
        for box in group.mailboxes.values():
            box.expect_end(rank, node, version)
        if node == me:
            self._end(group, rank, node, members.version)
            for other in {*members.nodes, *members.former} - {None, me}:
                end = GroupSourceEnded(members.generation, members.version, rank)
                self._send(other, end)  # type: ignore[arg-type]
        elif node not in self.roster.by_number:
            self._end(group, rank, node, members.version)

    def _end(self, group: GroupMailboxes, rank: int, node: int, version: int) -> None:
        for box in group.mailboxes.values():
            box.add(rank, node, End(rank, version))

    def left(self, known: Known, rank: int) -> None:
        """Handles the end of a member on this host before the manager announces it."""
        group = self.groups.get(known.generation)
        box = None if group is None else group.mailboxes.pop(rank, None)
        if box is not None:
            box.close()

    def closed(self, generation: int) -> None:
        """Removes a Group whose members have all left or died."""
        self.pending_messages.take(generation)
        group = self.groups.pop(generation, None)
        for box in () if group is None else group.mailboxes.values():
            box.close()

    def peer_lost(self, member: Member) -> None:
        """Handles the loss of a host. Messages from its members that have not arrived are lost."""
        self.pending_messages.lose_node(member.node)
        for group in self.groups.values():
            for number in [n for n, one in group.sent.items() if one.node == member.node]:
                group.arrived(number)
            for box in group.mailboxes.values():
                box.lose_node(member.node)

    # -- members on this host ------------------------------------------------------------------

    def send(self, slot: int, request: Request) -> None:
        """Accepts a member's message. Replies when this node holds the message."""
        ask: GroupSend = request.ask  # type: ignore[assignment]
        group = self._group_of(slot, ask.generation, ask.rank)
        reply = self.replier(slot)
        line = self.clients.get(slot)
        why = NO_MEMBER if group is None else self._why_not(group, ask.to)
        if group is None or why:
            reply(Reply(request.number, why))
            return
        hold = self.client.hold(ask.oid)
        refs = self._refs_in(ask.oid) if ask.refs is None else ask.refs

        def held(holds: list[Any]) -> None:
            if self.clients.get(slot) is not line or self.groups.get(ask.generation) is None:
                # The Group has ended, or the sender has died before `send` returned. The message
                # then counts as not sent.
                return
            lost = self._why_not(group, ask.to)
            if not lost:
                self._accept(group, ask, refs, [hold, *holds])
            reply(Reply(request.number, lost))

        if refs:
            self.imports.ask(list(refs), held)
        else:
            held([])

    def _refs_in(self, oid: int) -> list[bytes]:
        """The ids of the refs in a message with more refs than the request can contain."""
        got = self.client.view(oid)
        if isinstance(got, int):
            raise ValueError("the message no longer exists")
        return _serialize.read_refs(memoryview(got))

    def _group_of(self, slot: int, generation: int, rank: int) -> GroupMailboxes | None:
        """The Group, or None if the client in the slot is no longer its member of that rank."""
        group = self.groups.get(generation)
        if group is None or group.known.here.get(rank, (-1,))[0] != slot:
            return None
        return group

    def _why_not(self, group: GroupMailboxes, to: int) -> str:
        if group.members.nodes[to] is not None and to not in group.known.left:
            return ""
        return f"rank {to} has left or died"

    def _accept(
        self, group: GroupMailboxes, ask: GroupSend, refs: list[bytes], holds: list[Any]
    ) -> None:
        target = group.members.nodes[ask.to]
        assert target is not None
        if target == self.client.number:
            box = group.mailboxes.get(ask.to)
            if box is not None:
                queued = QueuedMessage(ask.rank, ask.tag, ask.oid, holds, ready=True)
                box.add(ask.rank, target, queued)
            return
        group.numbers += 1
        number = group.numbers
        ahead = sum(one.inline[target] for one in self.groups.values())
        payload = None
        if ask.nbytes <= min(MESSAGE_INLINE_BYTES_MAX, INLINE_AHEAD_BYTES_MAX - ahead):
            got = self.client.view(ask.oid)
            payload = None if isinstance(got, int) else bytes(memoryview(got))
        inline = 0 if payload is None else len(payload)
        group.sent[number] = Sent(target, ask.to, holds, inline)
        group.inline[target] += inline
        object_id = ids.pack_id(self.client.host_id, ask.oid)
        message = PeerGroupMessage(
            ask.generation,
            group.members.version,
            number,
            ask.rank,
            ask.to,
            ask.tag,
            object_id,
            payload,
            tuple(refs),
        )
        if not self._send(target, message):
            # The receiver's host is gone, but the manager has not announced that yet. If this
            # attempt detected the loss, the message has already been dropped.
            group.arrived(number)

    def inbox(self, slot: int, request: Request) -> None:
        """Replies with a member's new messages, or with None if the process is no longer a
        member."""
        ask: GroupInbox = request.ask  # type: ignore[assignment]
        group = self._group_of(slot, ask.generation, ask.rank)
        if group is None:
            self.reply(slot, Reply(request.number, None))
            return
        box = group.mailboxes.get(ask.rank)
        found = (
            ([], [0] * group.members.size, 0, False)
            if box is None
            else box.messages_after(ask.seen)
        )
        self.reply(slot, Reply(request.number, found))

    def received(self, slot: int, request: Request) -> None:
        """Releases a message whose value the member has received."""
        ask: GroupMessageAck = request.ask  # type: ignore[assignment]
        group = self.groups.get(ask.generation)
        if group is not None and group.known.here.get(ask.rank, (-1,))[0] == slot:
            box = group.mailboxes.get(ask.rank)
            if box is not None:
                box.arrived.pop(ask.number, None)

    # -- other nodes ---------------------------------------------------------------------------

    def _send(self, node: int, message: Message) -> bool:
        member = self.roster.by_number.get(node)
        return member is not None and self.send_peer(member.host_id, message)

    def receive(self, node: int, message: Message) -> None:
        """Handles a message from another node."""
        group = self.groups.get(message.generation)
        if isinstance(message, PeerGroupMessageAck):
            if group is not None:
                group.arrived(message.number)
            return
        if group is None or group.members.version < message.version:
            self._keep_pending(node, message)
        elif isinstance(message, GroupSourceEnded):
            if message.missed_versions:
                for box in group.mailboxes.values():
                    box.end_if_due(message.rank, node, message.version)
            else:
                self._end(group, message.rank, node, message.version)
        else:
            self._take(group, node, message)

    def _keep_pending(self, node: int, message: Message) -> None:
        """Keeps a message until the manager announces the version of the members for which it was
        sent. Drops its bytes, which the sender still holds."""
        if isinstance(message, PeerGroupMessage):
            message = msgspec.structs.replace(message, payload=None)
        self.pending_messages.add(node, message)

    def _take(self, group: GroupMailboxes, node: int, message: PeerGroupMessage) -> None:
        """Accepts a message for a member here if that member still exists."""
        taken = PeerGroupMessageAck(message.generation, message.number)
        box = group.mailboxes.get(message.to)
        # The member is gone, or the message is for an earlier member of the rank.
        if box is None or message.version < box.joined_in:
            self._send(node, taken)
            return
        queued = QueuedMessage(message.source, message.tag, 0, [])
        box.add(message.source, node, queued)
        stored = None if message.payload is None else self._stored(message.payload)
        wanted = list(message.refs) if stored is not None else [message.object, *message.refs]

        def held(holds: list[Any]) -> None:
            hold = stored if stored is not None else holds[0]
            queued.holds = [hold, *holds]
            self._send(node, taken)
            if hold is None:
                box.lose(message.source, node)
            else:
                queued.oid = hold.oid
                self._fetch(box, node, queued)

        if wanted:
            self.imports.ask(wanted, held)
        else:
            held([])

    def _stored(self, payload: bytes) -> Any:
        """Stores a small message as an object on this host. Returns a hold on the object, or None
        if there is no space."""
        oid = self.client.new(KIND_OPERATION, STATE["CLAIMED"], NODE_SLOT, 0)
        hold = self.client.hold(oid, False)
        encoded = _serialize.Encoded(payload, [], [], len(payload), [])
        self.results.store_value(oid, encoded, False)
        return None if self.client.state(oid) == STATE["FAILED"] else hold

    def _fetch(self, box: Mailbox, node: int, queued: QueuedMessage) -> None:
        """Fetches a large message before the member requests it. If there is no space, the message
        stays on the sender's host, and is fetched when it is read."""
        remote_objects, oid = self.remote_objects, queued.oid

        def here() -> None:
            if self.client.state(oid) == STATE["FAILED"]:
                box.lose(queued.source, node)
            else:
                box.ready(queued, node)

        if oid not in remote_objects or not remote_objects.want(oid, here):
            here()

    # -- for dumps ------------------------------------------------------------------------------

    def unread(self, generation: int) -> Iterator[tuple[int, int]]:
        """Yields (rank, number of unread messages) for each member here that has any."""
        group = self.groups.get(generation)
        for rank, box in () if group is None else group.mailboxes.items():
            if box.arrived:
                yield rank, len(box.arrived)
