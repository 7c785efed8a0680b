"""Workers' output between hosts: lines from this host for drivers on other hosts, and the reverse.

Lines for a driver on another host are sent to that host's node, with a limit on unread bytes. On
the same connection they precede the message that their task has ended, so they arrive before the
task's result. A leaving driver requests its outstanding lines from all nodes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hoplite_mp._node.output.output import Subscriber
from hoplite_mp._protocol.output import (
    REMOTE_BYTES_MAX,
    OutputAck,
    OutputFlushed,
    OutputFlushRequest,
    OutputLines,
    bytes_of,
    same_host,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from hoplite_mp._node.output.output import Output
    from hoplite_mp._protocol.messages import Member
    from hoplite_mp._protocol.peers import PeerMessage

__all__ = ["RemoteOutput"]

# Bytes that a driver has read are acknowledged in steps of this size, because an acknowledgement of
# every line would double the number of messages.
TOLD_BYTES_MIN = REMOTE_BYTES_MAX // 4


class Speaker:
    """Another node whose workers have lines for a driver on this host."""

    def __init__(
        self, host_id: int, number: int, output_owner: int, tell: Callable[[int, PeerMessage], bool]
    ) -> None:
        self.host_id = host_id
        self.number = number
        self.output_owner = output_owner
        self.tell = tell
        self.unacknowledged = 0

    def taken(self, nbytes: int) -> None:
        """Acknowledges, in steps, the bytes of the node's lines that the driver here has read."""
        self.unacknowledged += nbytes
        if self.unacknowledged >= TOLD_BYTES_MIN:
            self.tell(self.host_id, OutputAck(self.unacknowledged, self.output_owner))
            self.unacknowledged = 0


class RemoteOutput:
    """The lines that this node sends to other nodes and receives from them."""

    def __init__(
        self,
        output: Output,
        send: Callable[[int, PeerMessage], bool],
        number_of: Callable[[int], int | None],
        host_id_of: Callable[[int], int | None],
        busy: Callable[[int], bool],
        note_printed: Callable[[], None],
    ) -> None:
        """number_of: returns the number of a host's node, or None if it is gone. host_id_of:
        returns the host of the driver with the given name, or None if it is gone. busy: returns
        whether the worker in the slot is running a task. note_printed: called after lines from
        another host were queued for a driver."""
        self.output = output
        self.send = send
        self.number_of = number_of
        self.host_id_of = host_id_of
        self.busy = busy
        self.note_printed = note_printed
        self.subscribers: dict[int, Subscriber] = {}  # by the driver's name
        # (host id, name of the driver here) -> the node that has lines for the driver.
        self.speakers: dict[tuple[int, int], Speaker] = {}
        # Name of a driver -> other hosts that may have lines for it, because this node sent them
        # tasks with that output owner.
        self.others: dict[int, set[int]] = {}
        # Names of drivers on other hosts that have requested their last lines.
        self.asked: set[int] = set()
        # (Name of a driver here, host that was asked and has not sent its last lines yet).
        self.asking: set[tuple[int, int]] = set()
        # Like `asking`, but with all hosts that were asked, so that no host is asked twice.
        self.received: set[tuple[int, int]] = set()

    # -- lines from this host ------------------------------------------------------------------

    def subscriber(self, name: int) -> Subscriber | None:
        """A driver on another host as a subscriber, or None if that host is gone."""
        host_id = self.host_id_of(name)
        if host_id is None:
            return None
        known = self.subscribers.get(name)
        if known is None:
            attached = 0 if name == host_id else name

            def deliver(slot: int, stream: int, lines: list[bytes]) -> None:
                self.send(host_id, OutputLines(slot, stream, lines, attached))

            known = Subscriber(deliver, REMOTE_BYTES_MAX, self.output.patience_s)
            self.subscribers[name] = known
        return known

    def sent_on(self, output_owner: int, host_id: int) -> None:
        """Records that a task with the output owner was sent from here to another host."""
        if self.host_id_of(output_owner) is not None:
            self.others.setdefault(output_owner, set()).add(host_id)

    def taken(self, host_id: int, message: OutputAck) -> None:
        """Handles another host's acknowledgement that its driver has read these bytes."""
        subscriber = self.subscribers.get(message.output_owner or host_id)
        if subscriber is not None:
            self.output.taken(subscriber, message.nbytes)

    def last_lines_asked(self, host_id: int, message: OutputFlushRequest) -> None:
        """Handles a request for the last lines from a leaving driver on another host."""
        self.asked.add(message.output_owner or host_id)
        self.poll()

    def poll(self) -> None:
        """Answers drivers that have requested their last lines, once all lines have been sent."""
        for name in list(self.asked):
            self.output.last_lines(name)
            if not self.output.waits_for(name):
                self.asked.discard(name)
                if name in self.subscribers:
                    self.subscribers[name].report_dropped()
                host_id = self.host_id_of(name)
                others = tuple(self.others.pop(name, ()))
                if host_id is not None:
                    self.send(host_id, OutputFlushed(others, 0 if name == host_id else name))
                if name != host_id:  # only an attached driver leaves, not its host
                    self.subscribers.pop(name, None)

    # -- lines for this host's driver ----------------------------------------------------------

    def printed(self, host_id: int, message: OutputLines) -> None:
        """Sends lines from another node's workers to a driver on this host."""
        name = message.output_owner
        if name not in self.output.drivers:  # the driver has left
            self.send(host_id, OutputAck(bytes_of(message.lines), name))
            return
        speaker = self.speakers.get((host_id, name))
        if speaker is None:
            number = self.number_of(host_id)
            if number is None:
                return
            speaker = self.speakers[host_id, name] = Speaker(host_id, number, name, self.send)
        self.output.to_driver(
            message.slot, speaker.number, message.stream, message.lines, speaker.taken, name
        )
        self.note_printed()

    def ask_last_lines(self, host_ids: Iterable[int], name: int = 0) -> None:
        """Requests the last lines for a leaving driver on this host from these hosts. name: the
        name of an attached driver; 0: the driver that started this host."""
        for host_id in host_ids:
            if (name, host_id) not in self.received:
                self.received.add((name, host_id))
                self.asking.add((name, host_id))
                if not self.send(host_id, OutputFlushRequest(name)):
                    self.asking.discard((name, host_id))

    def is_asking(self, name: int) -> bool:
        """Whether any host has not yet sent its last lines for the attached driver."""
        return any(driver == name for driver, _ in self.asking)

    def forget(self, name: int) -> None:
        """Forgets an attached driver that has left."""
        self.asking = {key for key in self.asking if key[0] != name}
        self.received = {key for key in self.received if key[0] != name}
        for key in [key for key in self.speakers if key[1] == name]:
            del self.speakers[key]

    def last_lines_sent(self, host_id: int, message: OutputFlushed) -> None:
        """Called when all lines from a node have arrived. The message names other hosts that may
        have more lines."""
        others = [other for other in message.others if other != self.output.host_id]
        if (message.output_owner, host_id) in self.asking:
            self.ask_last_lines(others, message.output_owner)
            self.asking.discard((message.output_owner, host_id))

    # ------------------------------------------------------------------------------------------

    def peer_lost(self, member: Member) -> None:
        """Forgets a lost host, its drivers and its workers."""
        gone = {name for name in self.subscribers if same_host(name, member.host_id)} | {
            member.host_id
        }
        for name in gone:
            self.subscribers.pop(name, None)
        for key in [key for key in self.speakers if key[0] == member.host_id]:
            del self.speakers[key]
        self.asked -= gone
        self.asking = {key for key in self.asking if key[1] != member.host_id}
        for name in [name for name in self.others if same_host(name, member.host_id)]:
            del self.others[name]
        for name in gone:
            self.output.lose(name, self.busy)

    @property
    def quiet(self) -> bool:
        """Whether all hosts that were asked have sent their last lines."""
        return not self.asking
