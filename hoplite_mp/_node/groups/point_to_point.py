"""Messages from one member of a Group to another: kept until received, and forwarded.

`send` must not wait for the receiver, so this node holds what its members have sent. A message is
an object in the store, so it is spilled when memory is short and counted like any other. What is
received from a member is always a prefix of what it sent, in that order, even if its host dies.

    send ─► object held here ─► receiver here: its mailbox
                             └► receiver elsewhere: GroupSent ─► held there ─► its mailbox
"""

from __future__ import annotations

import functools
from collections import Counter
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from hoplite_mp import _serialize
from hoplite_mp._common import ids
from hoplite_mp._common.object_states import KIND_OPERATION, NODE_SLOT, STATE
from hoplite_mp._node.groups.mailbox import End, Mailbox, QueuedMessage
from hoplite_mp._protocol.local import Reply
from hoplite_mp._protocol.peer_hosts import Probe
from hoplite_mp._protocol.point_to_point import (
    MESSAGE_INLINE_BYTES_MAX,
    GroupSent,
    GroupSentTaken,
    GroupSourceEnded,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hoplite_mp._node.groups.group_state import Known
    from hoplite_mp._node.objects.context import HostContext
    from hoplite_mp._protocol.local import GroupInbox, GroupReceived, GroupSend, Request
    from hoplite_mp._protocol.messages import GroupMembers, Member
    from hoplite_mp._protocol.point_to_point import PointToPoint as Message

__all__ = ["PointToPoint"]

# How many groups are remembered whose messages arrive before the manager's announcement.
PENDING_GROUPS_MAX = 64


# How many bytes of messages to one host may be on their way inside packets; the bytes of further
# ones wait until the receiver fetches them. Connections between nodes have no flow control, and one
# on which too much waits is given up. Higher: fewer fetches. Lower: other packets wait for less.
INLINE_AHEAD_BYTES_MAX = 8 << 20
NO_MEMBER = "this member was given up"


class Sent(NamedTuple):
    """A message on its way to another host."""

    node: int  # of the receiver
    to: int  # the receiver's rank
    holds: list[Any]
    inline: int  # how many bytes went with it


class Between:
    """One Group, as far as messages between its members are concerned."""

    def __init__(self, members: GroupMembers, known: Known) -> None:
        self.members = members
        self.known = known
        self.mailboxes: dict[int, Mailbox] = {}  # rank of a member here -> its mailbox
        self.sent: dict[int, Sent] = {}  # by number
        self.inline: Counter[int] = Counter()  # bytes inside packets on their way, by node
        self.numbers = 0

    def arrived(self, number: int) -> None:
        """The receiver's node has the message, or nobody will receive it."""
        sent = self.sent.pop(number, None)
        if sent is not None:
            self.inline[sent.node] -= sent.inline


class PointToPoint:
    """The messages of all Groups with a member on this host."""

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
        self.groups: dict[int, Between] = {}  # by generation
        # By generation: (node that sent it, message) received before the manager's announcement.
        self.pending_messages: dict[int, list[tuple[int, Message]]] = {}

    # -- membership ----------------------------------------------------------------------------

    def changed(self, members: GroupMembers, known: Known) -> None:
        """The manager has announced a new version of the members."""
        group, heard = self.groups.get(members.generation), 0
        if group is None:
            group = self.groups[members.generation] = Between(members, known)
        else:
            heard = group.members.version
        before, group.members = group.members, members
        me = self.client.number
        for rank in [rank for rank in group.mailboxes if members.nodes[rank] != me]:
            group.mailboxes.pop(rank).close()
        for number in [n for n, one in group.sent.items() if members.nodes[one.to] != one.node]:
            group.arrived(number)
        for rank, node in enumerate(before.nodes):
            if before.formed and node is not None and members.nodes[rank] != node:
                self._over(group, rank, node, before.version + 1)
        for rank, node in enumerate(members.nodes):
            if node == me and rank not in known.left and rank not in group.mailboxes:
                announce = functools.partial(known.board.announce, rank)
                group.mailboxes[rank] = Mailbox(members.size, members.since_of(rank), announce)
        knowing = {*members.nodes, *members.former}
        if members.formed and heard + 1 < members.version:
            self._say_unheard(members)
            self._await_unheard(group, knowing)
        present = sum(1 << r for r, node in enumerate(members.nodes) if node is not None)
        for box in group.mailboxes.values():
            box.end_unheard(knowing)
            box.know(present, formed=members.formed)
        for node, message in self.pending_messages.pop(members.generation, ()):
            self.receive(node, message)

    def _say_unheard(self, members: GroupMembers) -> None:
        """Versions that this node has missed may have shown members here of ranks that are free."""
        for rank in [rank for rank, node in enumerate(members.nodes) if node is None]:
            end = GroupSourceEnded(members.generation, members.version, rank, True)
            for other in {*members.nodes, *members.former} - {None, self.client.number}:
                self._send(other, end)  # type: ignore[arg-type]

    def _await_unheard(self, group: Between, knowing: set[int | None]) -> None:
        """This node has missed some versions, so members may have sent messages and left of whom it
        has never heard. A node's answer comes after all that its members have sent before."""
        version = group.members.version
        mailboxes = [box for box in group.mailboxes.values() if box.born < version]
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

    def _over(self, group: Between, rank: int, node: int, version: int) -> None:
        """The member that held that rank on that node is gone."""
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

    def _end(self, group: Between, rank: int, node: int, version: int) -> None:
        for box in group.mailboxes.values():
            box.add(rank, node, End(rank, version))

    def left(self, known: Known, rank: int) -> None:
        """That member on this host is gone; the manager has yet to announce it."""
        group = self.groups.get(known.generation)
        box = None if group is None else group.mailboxes.pop(rank, None)
        if box is not None:
            box.close()

    def closed(self, generation: int) -> None:
        """The group has ended: all members have left or died."""
        self.pending_messages.pop(generation, None)
        group = self.groups.pop(generation, None)
        for box in () if group is None else group.mailboxes.values():
            box.close()

    def peer_lost(self, member: Member) -> None:
        """That host is gone: what its members sent and has not arrived is lost. The number of a
        Group that it alone has heard of may be given to another one."""
        for waiting in self.pending_messages.values():
            waiting[:] = [one for one in waiting if one[0] != member.node]
        for group in self.groups.values():
            for number in [n for n, one in group.sent.items() if one.node == member.node]:
                group.arrived(number)
            for box in group.mailboxes.values():
                box.lose_node(member.node)

    # -- members of this host ------------------------------------------------------------------

    def send(self, slot: int, request: Request) -> None:
        """Takes a member's message; the reply follows when the message is held for the receiver."""
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
                # The sender has died, so that this message, whose `send` has not returned, counts
                # as not sent; or the group has ended.
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
        """The ids of very many refs in a message, which its sender has pinned."""
        got = self.client.view(oid)
        if isinstance(got, int):
            raise ValueError("the message is not there any more")
        return _serialize.read_refs(memoryview(got))

    def _group_of(self, slot: int, generation: int, rank: int) -> Between | None:
        """The group; None if that client is no longer its member of that rank."""
        group = self.groups.get(generation)
        if group is None or group.known.here.get(rank, (-1,))[0] != slot:
            return None
        return group

    def _why_not(self, group: Between, to: int) -> str:
        if group.members.nodes[to] is not None and to not in group.known.left:
            return ""
        return f"rank {to} has left or died"

    def _accept(self, group: Between, ask: GroupSend, refs: list[bytes], holds: list[Any]) -> None:
        target = group.members.nodes[ask.to]
        assert target is not None
        if target == self.client.number:
            box = group.mailboxes.get(ask.to)
            if box is not None:
                letter = QueuedMessage(ask.rank, ask.tag, ask.oid, holds, ready=True)
                box.add(ask.rank, target, letter)
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
        message = GroupSent(
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
            # The receiver's host is gone, which the manager has yet to announce. This attempt may
            # have shown that, and then the message is forgotten already.
            group.arrived(number)

    def inbox(self, slot: int, request: Request) -> None:
        """Replies with the messages that have come for a member; None: it is no longer a member."""
        ask: GroupInbox = request.ask  # type: ignore[assignment]
        group = self._group_of(slot, ask.generation, ask.rank)
        if group is None:
            self.reply(slot, Reply(request.number, None))
            return
        box = group.mailboxes.get(ask.rank)
        found = ([], [0] * group.members.size, 0, False) if box is None else box.named(ask.seen)
        self.reply(slot, Reply(request.number, found))

    def received(self, slot: int, request: Request) -> None:
        """Releases a message whose value the member has."""
        ask: GroupReceived = request.ask  # type: ignore[assignment]
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
        if isinstance(message, GroupSentTaken):
            if group is not None:
                group.arrived(message.number)
            return
        if group is None or group.members.version < message.version:
            self._keep_pending(node, message)
        elif isinstance(message, GroupSourceEnded):
            if message.unheard:
                for box in group.mailboxes.values():
                    box.end_if_due(message.rank, node, message.version)
            else:
                self._end(group, message.rank, node, message.version)
        else:
            self._take(group, node, message)

    def _keep_pending(self, node: int, message: Message) -> None:
        """Keeps a message until the manager's announcement is here, without its bytes, which the
        sender still holds."""
        if isinstance(message, GroupSent):
            message = msgspec.structs.replace(message, payload=None)
        self.pending_messages.setdefault(message.generation, []).append((node, message))
        while len(self.pending_messages) > PENDING_GROUPS_MAX:
            del self.pending_messages[next(iter(self.pending_messages))]

    def _take(self, group: Between, node: int, message: GroupSent) -> None:
        """Takes a message for a member here, if that member still exists."""
        taken = GroupSentTaken(message.generation, message.number)
        box = group.mailboxes.get(message.to)
        # That member is gone, or the message was sent to the member that held its rank before.
        if box is None or message.version < box.born:
            self._send(node, taken)
            return
        letter = QueuedMessage(message.source, message.tag, 0, [])
        box.add(message.source, node, letter)
        stored = None if message.payload is None else self._stored(message.payload)
        wanted = list(message.refs) if stored is not None else [message.object, *message.refs]

        def held(holds: list[Any]) -> None:
            hold = stored if stored is not None else holds[0]
            letter.holds = [hold, *holds]
            self._send(node, taken)
            if hold is None:
                box.lose(message.source, node)
            else:
                letter.oid = hold.oid
                self._bring(box, node, letter)

        if wanted:
            self.imports.ask(wanted, held)
        else:
            held([])

    def _stored(self, payload: bytes) -> Any:
        """A hold on a small message, stored as an object of this host; None if there is no room."""
        oid = self.client.new(KIND_OPERATION, STATE["CLAIMED"], NODE_SLOT, 0)
        hold = self.client.hold(oid, False)
        encoded = _serialize.Encoded(payload, [], [], len(payload), [])
        self.results.store_value(oid, encoded, False)
        return None if self.client.state(oid) == STATE["FAILED"] else hold

    def _bring(self, box: Mailbox, node: int, letter: QueuedMessage) -> None:
        """Fetches a large message before a receive waits for it. If there is no room now, it stays
        at the sender and is fetched when it is read."""
        remote_objects, oid = self.remote_objects, letter.oid

        def here() -> None:
            if self.client.state(oid) == STATE["FAILED"]:
                box.lose(letter.source, node)
            else:
                box.ready(letter, node)

        if oid not in remote_objects or not remote_objects.want(oid, here):
            here()

    # -- for dumps ------------------------------------------------------------------------------

    def unread(self, generation: int) -> Iterator[tuple[int, int]]:
        """Yields (rank here, number of messages that it has not received)."""
        group = self.groups.get(generation)
        for rank, box in () if group is None else group.mailboxes.items():
            if box.arrived:
                yield rank, len(box.arrived)
