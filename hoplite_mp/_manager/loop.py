"""The manager's event loop around the planner: read, decode, step, encode, send.

One thread with one selector serves one connection per node. Only the packing of trees runs in other
threads. The end of a connection is reported to the planner as NodeLost. The manager exits when its
last connection ends. Only `select` blocks; it returns at the next deadline of the planner, the
listener, the heartbeats or the leadership.

A node that does not read is declared dead when more than `outgoing_bytes_max` bytes are queued for
it. If the manager stopped reading from the node instead, both sides could deadlock.

In a cluster with a standby, a Leadership determines whether this process may decide. While it may
not decide, messages for the planner are held. A standby runs the same loop, and may decide once it
has won the vote.
"""

from __future__ import annotations

import functools
import logging
import os
import selectors
import signal
import threading
from typing import TYPE_CHECKING, Any

from hoplite_mp._common import clock, locks
from hoplite_mp._planner.packing import pack
from hoplite_mp._protocol.codec import BEAT, encode, manager_decoder
from hoplite_mp._protocol.local import GIVEN_UP
from hoplite_mp._protocol.membership import NodeReturned
from hoplite_mp._protocol.messages import (
    ClusterEnded,
    Credentials,
    DeclaredDead,
    NodeAdmitted,
    NodeJoined,
    NodeLost,
)
from hoplite_mp._protocol.terms import Promote
from hoplite_mp._transport.stream import TcpStream
from hoplite_mp.errors import ProtocolError

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Sequence

    from hoplite_mp._manager.heartbeats import Heartbeats
    from hoplite_mp._manager.leadership import Leadership
    from hoplite_mp._planner.packing import PackingWanted, TreesPacked
    from hoplite_mp._planner.planner_core import Planner
    from hoplite_mp._planner.step_result import StepResult
    from hoplite_mp._protocol.membership import Report
    from hoplite_mp._protocol.messages import NodeToManager
    from hoplite_mp._protocol.terms import TermsToManager
    from hoplite_mp._transport.listener import Listener
    from hoplite_mp._transport.stream import ByteStream

READ_BYTES = 256 << 10  # maximum number of bytes read from a connection in one turn
OUTGOING_BYTES_MAX = 64 << 20  # size limit of the queue for one node: four of the longest frames
SELECT_S_MAX = 3600.0  # maximum timeout, because epoll counts milliseconds in 32 bits
# The interval at which a manager with a Leadership checks whether it may decide. A lower value
# causes more turns of the loop.
LEADERSHIP_POLL_S = 0.1
# How long a node may wait to join. Must exceed the permitted delay of this host's node (OWN_S in
# _planner/manager_recovery.py). With a lower value, a waiting node reconnects sooner if this host's
# node is stopped.
JOIN_WAIT_S = 40.0

_log = logging.getLogger("hoplite_mp")


class Link:
    """A connection to a node."""

    def __init__(self, stream: ByteStream, unsent: dict[Link, None]) -> None:
        """unsent: the set of links that the loop's next flush must visit."""
        self.stream = stream
        self._unsent = unsent
        self.decoder = manager_decoder()
        self.joined = False
        self.waits_until = 0.0  # deadline of a node that is waiting to join
        self.admitted: NodeAdmitted | None = None
        self.is_local = True  # whether the node is on this host, and needs no heartbeats
        self.role = "node"  # the role that the other side proved in the handshake
        self.broken = False  # see `break_off`
        self.waits_for = selectors.EVENT_READ  # the events for which it is registered

    def read(self) -> Sequence[NodeToManager | Report | TermsToManager] | None:
        """Returns the complete messages that have arrived. None at the end of the connection."""
        data = self.stream.read(READ_BYTES)
        if data is None:
            return None
        return self.decoder.feed(data) if data else []

    def write(self, data: bytes) -> None:
        """Queues data. If the queue is full, the link is broken, and its node is declared dead."""
        self._unsent[self] = None
        try:
            self.stream.write(data)
        except ConnectionError:
            self.broken = True

    def break_off(self) -> None:
        """Marks the link as broken. The next flush closes it."""
        self._unsent[self] = None
        self.broken = True


class ManagerLoop:
    """Connects the planner to the nodes and to a clock."""

    def __init__(
        self,
        planner: Planner,
        clock: Callable[[], float] = clock.monotonic,
        outgoing_bytes_max: int = OUTGOING_BYTES_MAX,
        *,
        selector: selectors.BaseSelector | None = None,
        in_thread: Callable[[Callable[[], None]], None] | None = None,
    ) -> None:
        """in_thread: runs a long computation in a thread. The simulation replaces this function and
        the selector."""
        self._planner = planner
        self._clock = clock
        self._outgoing_bytes_max = outgoing_bytes_max
        self._selector = selector or selectors.DefaultSelector()
        self._in_thread = in_thread or _in_thread
        self._links: dict[Link, None] = {}  # ordered, so that a run is reproducible
        # The links that the next flush visits: those with data to send, and broken links.
        self._unsent: dict[Link, None] = {}
        self._routes: dict[int, Link] = {}  # node -> its connection
        self._wake_at: float | None = None
        self._ending = False
        self._listener: Listener | None = None
        self._credentials = b""
        self._heartbeats: Heartbeats[Link] | None = None
        self._own: Link | None = None  # link to this host's node, if this process serves it
        # Nodes that are waiting to join; see `_must_wait`.
        self._newcomers: list[tuple[Link, NodeJoined]] = []
        self._admitting = False  # `_admit_newcomers` is running
        self._packed: list[TreesPacked] = []  # results of packing threads
        self._packed_lock = locks.lock("manager.packed")
        # None if the cluster has no standby.
        self._leadership: Leadership[Link] | None = None
        self._leadership_polled_at = 0.0

    def add(self, sock: socket.socket) -> None:
        """Serves this connected stream socket until the connection ends."""
        self.serve(TcpStream(sock, self._outgoing_bytes_max))

    def open(
        self, listener: Listener, credentials: bytes = b"", beats: Heartbeats[Link] | None = None
    ) -> None:
        """Starts to serve connections that the listener admits. `credentials` are sent to each node
        first. With `beats`, silent nodes are declared dead."""
        self._listener = listener
        self._heartbeats = beats
        self._credentials = credentials
        self._selector.register(listener.fileno(), selectors.EVENT_READ, listener)

    def set_leadership(self, leadership: Leadership[Link]) -> None:
        """Called in a cluster with a standby, both in the standby and in the first manager."""
        self._leadership = leadership

    def serve(self, stream: ByteStream, *, is_local: bool = True) -> Link:
        """Serves this stream until it ends. is_local: whether its node is on this host."""
        link = Link(stream, self._unsent)
        link.is_local = is_local
        if is_local and self._own is None:
            self._own = link
        self._links[link] = None
        self._selector.register(stream.fileno(), selectors.EVENT_READ, link)
        return link

    def _admit(self, now: float) -> None:
        assert self._listener is not None
        for admission in self._listener.turn(now):
            if admission.role != "node" and self._leadership is None:
                admission.stream.close()
                continue
            link = self.serve(admission.stream, is_local=False)
            link.role = admission.role
            if self._credentials and admission.role == "node":
                link.write(encode(Credentials(self._credentials)))
            # Read now, because the selector does not report data that arrived together with the end
            # of the handshake.
            self._unsent[link] = None
            self._serve(link)

    def end_on_signal(self, number: int) -> None:
        """Makes that signal end the cluster. ClusterEnded is then sent to the nodes."""
        read, write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)

        def end(_number: int, _frame: object) -> None:
            self._ending = True

        signal.signal(number, end)
        signal.set_wakeup_fd(write, warn_on_full_buffer=False)
        self._selector.register(read, selectors.EVENT_READ, None)

    def run(self) -> int:
        """Serves until the last connection or the cluster ends. Returns the exit code. It is
        GIVEN_UP if this process must step down, because the cluster may have another manager."""
        leadership = self._leadership
        while not self._ending and (
            self._links or (leadership is not None and not leadership.leads)
        ):
            self.turn()
            if leadership is not None and leadership.must_step_down(self._clock()):
                return GIVEN_UP
        if leadership is None or leadership.leads:
            for link in self._links:
                link.write(encode(ClusterEnded()))
                link.stream.flush()
        self._selector.close()
        return 0

    def turn(self) -> None:
        """Waits once, then handles received data and due tasks."""
        for key, events in self._selector.select(self._timeout()):
            if key.data not in self._links:  # closed earlier in this turn
                continue
            if events & selectors.EVENT_READ:
                self._serve(key.data)
            # TLS may have data to send after a read.
            if events & selectors.EVENT_WRITE or key.data.stream.wants_write:
                self._unsent[key.data] = None
        now = self._clock()
        if self._listener is not None:
            self._admit(now)
        if self._may_decide(now) and not self._has_held_messages:  # these must be handled first
            if self._wake_at is not None and self._wake_at <= now:
                self._execute(self._planner.tick(now))
            self._take_packed(now)
        self._refuse_newcomers(sum(link.waits_until <= now for link, _ in self._newcomers))
        if self._heartbeats is not None:
            self._check_heartbeats(self._heartbeats, now)
        if self._leadership is not None:
            self._poll_leadership(self._leadership, now)
        self._flush()

    @property
    def _has_held_messages(self) -> bool:
        return self._leadership is not None and bool(self._leadership.held)

    def _may_decide(self, now: float) -> bool:
        return self._leadership is None or self._leadership.decides(now)

    def _poll_leadership(self, leadership: Leadership[Link], now: float) -> None:
        """Checks whether this process may decide. If so, handles the held messages, and admits or
        refuses joining nodes."""
        self._leadership_polled_at = now
        absent = leadership.absent
        if leadership.count_votes(now) and self._planner.restoring is not None:
            self._planner.restoring.leave_out(absent)
        # Each step takes time, so the right to decide is checked again before the next step.
        while leadership.held and self._may_decide(at := self._clock()):
            held = leadership.held.popleft()
            if isinstance(held, NodeReturned) and self._planner.restoring is None:
                self._refuse_late_report(held)
            else:
                self._execute(self._planner.step(held, at))
        self._admit_newcomers()
        if self._planner.restoring is None:
            leadership.set_members(self._planner.membership.members)
        local = next((link for link in self._links if link.is_local), None)
        message = None if local is None else leadership.list_message(now)
        if local is not None and message is not None:
            local.write(encode(message))
        refused = leadership.refuses_joins(now, waits=self._planner.restoring is not None)
        if self._listener is not None:
            self._listener.not_now = frozenset({"node"}) if refused else frozenset()
        self._refuse_newcomers(len(self._newcomers) if refused else 0)

    def _check_heartbeats(self, beats: Heartbeats[Link], now: float) -> None:
        due, silent = beats.poll(now)
        if self._leadership is not None:
            self._send_heartbeats(self._leadership, due, now)
            if self._leadership.leads and not self._leadership.decides(now):
                return  # silent nodes may be alive, because this host may be cut off
        else:
            for link in due:
                link.write(BEAT)
        for link, seconds in silent.items():
            if link.admitted is None:  # the node was waiting to join
                self._end(link)
                continue
            _log.warning(
                "node h%d was silent for %.1f s: it is declared dead", link.admitted.node, seconds
            )
            if self._may_decide(now):
                link.write(encode(DeclaredDead(seconds)))  # in case the node resumes
                link.stream.flush()
            self._end(link)

    def _send_heartbeats(self, leadership: Leadership[Link], due: list[Link], now: float) -> None:
        for link in due:
            node = None if link.admitted is None else link.admitted.node
            message = None if node is None else leadership.lead_message(node, now)
            link.write(BEAT if message is None else encode(message))

    def _pack(self, wanted: PackingWanted) -> None:
        """Packs trees in a separate thread, because packing may take seconds."""
        packed = pack(wanted)
        with self._packed_lock:
            self._packed.append(packed)

    def _take_packed(self, now: float) -> None:
        """Passes newly packed trees to the planner, for later plans."""
        with self._packed_lock:
            packed, self._packed = self._packed, []
        for trees in packed:
            self._execute(self._planner.step(trees, now))

    def _timeout(self) -> float | None:
        times = [
            self._wake_at if self._may_decide(self._clock()) else None,
            None if self._leadership is None else self._leadership_polled_at + LEADERSHIP_POLL_S,
            None if self._listener is None else self._listener.deadline,
            None if self._heartbeats is None else self._heartbeats.wake_at,
            self._newcomers[0][0].waits_until if self._newcomers else None,
        ]
        known = [at for at in times if at is not None]
        if not known:
            return None
        return min(max(0.0, min(known) - self._clock()), SELECT_S_MAX)

    def _serve(self, link: Link) -> None:
        try:
            messages = link.read()
            if messages is None:
                self._end(link)
                return
            if self._heartbeats is not None:
                self._heartbeats.data_received(link, self._clock())
            if self._leadership is not None and link.admitted is not None:
                self._leadership.data_received(link.admitted.node, self._clock())
            for message in messages:
                if link.broken:
                    break  # the node is lost
                self._take(link, message)
        except ProtocolError as error:
            _log.error("the manager closes a connection: %s", error)
            self._end(link)

    def _take(self, link: Link, message: NodeToManager | Report | TermsToManager) -> None:
        now = self._clock()
        if self._leadership is not None:
            _check_role(link.role, message)
            if self._leadership.handle(link, message, now):
                return
        if isinstance(message, NodeReturned):
            self._returned(link, message, now)
            return
        if isinstance(message, NodeJoined):
            link.joined = True
            if self._must_wait(link, now):
                link.waits_until = now + JOIN_WAIT_S
                self._newcomers.append((link, message))
                if self._heartbeats is not None and not link.is_local:
                    # Without heartbeats, the joining node would consider this manager dead.
                    self._heartbeats.add(link, now)
                return
            result = self._planner.step(message, now)
            for node, answer in result.sends:
                if isinstance(answer, NodeAdmitted) and answer.incarnation == message.incarnation:
                    link.admitted = answer
                    self._routes[node] = link
                    if self._heartbeats is not None and not link.is_local:
                        self._heartbeats.add(link, now)
                    if self._leadership is not None:
                        self._leadership.admitted(link, node, now)
            self._execute(result)
            return
        if not link.joined:
            raise ProtocolError(f"{type(message).__name__} before NodeJoined")
        # Ignore messages that arrive over the connection of an earlier incarnation.
        if link.admitted is not None and self._routes.get(link.admitted.node) is link:
            self._step(message, now)

    def _must_wait(self, link: Link, now: float) -> bool:
        """Whether that node must wait for its admission until the previous manager's nodes have
        reported, this process may decide, and this host's node has joined. The latter must be the
        first to join, because the lease identifies it by the number 0."""
        early = not link.is_local and self._own is not None and self._own.admitted is None
        return early or self._planner.restoring is not None or not self._may_decide(now)

    def _refuse_late_report(self, message: NodeReturned) -> None:
        """Informs a node that it was declared dead. Its report was held, and the cluster has
        continued without it, because no other report named it. Otherwise the node would follow a
        manager that does not count it as a member."""
        link = self._routes.get(message.node)
        admitted = None if link is None else link.admitted
        if link is not None and admitted and admitted.incarnation == message.incarnation:
            link.write(encode(DeclaredDead(0.0)))
            link.break_off()

    def _step(self, message: Any, now: float) -> None:
        """Passes a message to the planner, or holds it until this process may decide."""
        if self._leadership is not None and (
            self._leadership.held or not self._leadership.decides(now)
        ):
            self._leadership.hold(message)
        else:
            self._execute(self._planner.step(message, now))

    def _returned(self, link: Link, message: NodeReturned, now: float) -> None:
        """Handles the return of a node that the previous manager had admitted."""
        if self._planner.restoring is None:  # the cluster has continued without the node
            # A manager that may not decide cannot declare the node dead; the node reconnects.
            if self._leadership is None or self._leadership.decides(now):
                link.write(encode(DeclaredDead(0.0)))
            link.break_off()
            return
        link.joined = True
        link.admitted = NodeAdmitted(
            message.node, message.incarnation, message.members, message.numbers
        )
        self._routes[message.node] = link
        if self._heartbeats is not None and not link.is_local:
            self._heartbeats.add(link, now)
        self._step(message, now)

    def _execute(self, result: StepResult) -> None:
        encoded: tuple[object, bytes] = (None, b"")
        for node, message in result.sends:
            link = self._routes.get(node)
            if link is None:
                continue
            # A plan for many nodes is encoded once.
            if encoded[0] is not message:
                encoded = (message, encode(message))
            link.write(encoded[1])
            if isinstance(message, DeclaredDead):  # the last message to this node
                link.break_off()
        for note in result.notes:
            _log.info("%s", note)
        for wanted in result.packing:
            self._in_thread(functools.partial(self._pack, wanted))
        self._wake_at = result.wake_at
        self._admit_newcomers()

    def _admit_newcomers(self) -> None:
        """Admits the waiting nodes that need not wait any longer."""
        if self._admitting:  # this is a recursive call by `_take`
            return
        self._admitting = True
        try:
            while (
                self._newcomers
                and not self._must_wait(self._newcomers[0][0], self._clock())
                and not self._has_held_messages  # these must be handled first
            ):
                newcomer, joined = self._newcomers.pop(0)
                if newcomer in self._links:
                    self._take(newcomer, joined)
        finally:
            self._admitting = False

    def _refuse_newcomers(self, count: int) -> None:
        """Closes the connections of the first `count` waiting nodes. They may reconnect."""
        waiting, self._newcomers = self._newcomers[:count], self._newcomers[count:]
        for newcomer, _ in waiting:
            self._end(newcomer)

    def _flush(self) -> None:
        """Sends queued data, and closes broken links. Repeats this until nothing is left, because
        the end of a connection can cause messages to other nodes."""
        while self._unsent:
            links = list(self._unsent)
            self._unsent.clear()
            for link in links:
                if link not in self._links:
                    continue
                if not link.stream.flush() or link.broken:
                    self._drain(link)
                    self._end(link)
                    continue
                wants = selectors.EVENT_WRITE if link.stream.wants_write else 0
                if link.waits_for != selectors.EVENT_READ | wants:
                    link.waits_for = selectors.EVENT_READ | wants
                    self._selector.modify(link.stream.fileno(), link.waits_for, link)

    def _drain(self, link: Link) -> None:
        """Handles the messages that arrived before the connection broke."""
        while link in self._links and not link.broken and link.stream.wants_read:
            before = link.stream.bytes_received
            self._serve(link)
            if link.stream.bytes_received == before:
                return

    def _end(self, link: Link) -> None:
        """Closes a connection, and reports the loss of its node."""
        if link not in self._links:
            return
        self._selector.unregister(link.stream.fileno())
        link.stream.close()
        self._links.pop(link, None)
        if self._heartbeats is not None:
            self._heartbeats.drop(link)
        if self._leadership is not None:
            self._leadership.connection_ended(link, self._clock())
        admitted = link.admitted
        # A later connection of the node may have replaced this link.
        if admitted is not None and self._routes.get(admitted.node) is link:
            del self._routes[admitted.node]
            lost = NodeLost(admitted.node, admitted.incarnation)
            self._step(lost, self._clock())


def _in_thread(work: Callable[[], None]) -> None:
    threading.Thread(target=work, name="hoplite_mp pack", daemon=True).start()


def _check_role(role: str, message: object) -> None:
    """Raises ProtocolError if that role may not send this message. Tools may send only Promote,
    which no other role may send. Voters may not send NodeJoined."""
    wrong = isinstance(message, NodeJoined) if role == "voter" else False
    if wrong or (role == "tool") != isinstance(message, Promote):
        raise ProtocolError(f"a {role} must not send {type(message).__name__}")
