"""This node and its manager: joining, what is said to it, and finding it again when it has died.

Why it exists: the process of a manager may end while the cluster lives; its supervisor starts
another one, at the same address. Until that one is found nothing stands still but what needs a new
plan. Then this node says what it holds and waits for, as the new one begins with nothing else.
It must never know: what the messages of the rooms are about.

    joined ──► lost without farewell ──► called again ──► reported ──► as before
                      │                       └─ nobody is there: the end, or to be joined anew
                      └─ the manager's host is this one: its supervisor brings the connection
"""

from __future__ import annotations

import logging
from collections import deque
from typing import TYPE_CHECKING, Any, Protocol

from hoplite_mp.errors import HopliteError
from hoplite_mp.node.core.pulse import Pulse
from hoplite_mp.node.shell.wires import Wire
from hoplite_mp.protocol.codec import encode, node_decoder
from hoplite_mp.protocol.messages import (
    ClientLost,
    ClusterEnded,
    Commit,
    ExecutionFailed,
    FetchFailed,
    Forget,
    GivenUp,
    HostMeasured,
    LinkMeasured,
    NodeJoined,
    NodeLeaving,
    OperationFailed,
)
from hoplite_mp.protocol.reports import OperationEnded, Reported
from hoplite_mp.protocol.terms import Leads, StandbyNamed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from hoplite_mp import _shm
    from hoplite_mp.node.life import Life
    from hoplite_mp.node.ports import Loop
    from hoplite_mp.protocol.messages import Member
    from hoplite_mp.protocol.reports import NodeReturned
    from hoplite_mp.protocol.terms import Ends, Knows, Voted
    from hoplite_mp.transport.conversation import Admission
    from hoplite_mp.transport.stream import Stream

__all__ = ["Management"]

# How long the manager may be silent, in silences of a node: its end is that of all.
MANAGER_SILENCES = 5.0
# How long a manager may be away. Higher: slower restarts are waited for; lower: who is cut off from
# it joins anew sooner.
MANAGER_ABSENT_S = 10.0
# Messages that nothing else would say again, and ends that others may not have been told: so many
# are kept to be said to the next manager. Both are small; more than a manager can have left unread.
SENT_MAX = 1024
ENDED_MAX = 1024
ONCE = (
    FetchFailed,
    ExecutionFailed,
    ClientLost,
    NodeLeaving,
)
ENDS = frozenset((Commit, OperationFailed, Forget))
TERMS = frozenset((StandbyNamed, Leads))

_log = logging.getLogger("hoplite_mp")


class Above(Protocol):
    """What rooms above this one say to a manager, and hear of it."""

    def receive(self, message: Any) -> None:
        """The manager has sent this."""

    def answer_standing(self) -> None:
        """It is known now whether this node is in a cluster, and as which."""

    def joining(self, incarnation: int) -> NodeJoined:
        """What this node says of itself when it joins for the nth time."""

    def returning(self, incarnation: int) -> NodeReturned:
        """What it says of itself to a manager that begins with nothing."""

    def report(self) -> Iterator[Any]:
        """What such a manager must know of this node's rooms."""


class Network(Protocol):
    """The way to a manager of another host."""

    connect_timeout_s: float
    beat_interval_s: float
    silence_s: float

    def connect(self) -> Admission:
        """The first connection. Blocks, and raises what `Caller` raises."""

    def call(self, done: Callable[[Admission | None], None], timeout_s: float) -> None:
        """`done` gets a connection to the manager that leads now, or None: there is none."""

    def failover(self, named: StandbyNamed) -> Failover:
        """The manager has named a standby."""


class Failover(Protocol):
    """What this node does about terms, in a cluster that has a standby."""

    addresses: tuple[str, ...]
    holds: str

    @property
    def keeper(self) -> Member | None:
        """Of the host that has one of the standby's addresses, if it is there."""

    def receive(self, message: Any) -> None:
        """The manager has sent this."""

    def hold(self) -> None:
        """If the standby belongs to this host, it is started."""

    def lost(self) -> None:
        """The connection to the manager is over."""

    def ends(self) -> Ends:
        """The last message to a manager."""

    def knows(self) -> Knows:
        """For a manager that has been started again."""


class Management:
    """What connects this node with its manager."""

    def __init__(
        self,
        loop: Loop,
        client: _shm.NodeClient,
        life: Life,
        manager: Stream | None,
        above: Above,
    ) -> None:
        """manager: the connection to one of this host; None: it is on another one."""
        self.loop = loop
        self.client = client
        self.life = life
        self.above = above
        self.network: Network | None = None  # there are other hosts
        self.is_near = manager is not None
        self._near = manager
        self.wire: Wire | None = None
        self.pulse: Pulse | None = None
        self.failover: Failover | None = None  # there is a standby
        self.host: int | None = None  # home of the manager's host; None: it is this one
        self.join_error: tuple[str, str] | None = None
        self._losses = 0
        self._incarnation = 0  # one more for each attempt to join
        self._join_until = 0.0
        self.ended = False  # the manager has said that the cluster ends
        self._sent: deque[Any] = deque(maxlen=SENT_MAX)
        self._measured: dict[int, Any] = {}  # the latest, by peer; -1: of all together
        self._ends: deque[Commit | OperationFailed | Forget] = deque(maxlen=ENDED_MAX)

    # -- words ---------------------------------------------------------------------------------

    def send(self, message: Any) -> None:
        """To the manager. If there is none now, the next one is told what it needs to know."""
        if isinstance(message, ONCE):
            self._sent.append(message)
        elif isinstance(message, HostMeasured):
            self._measured[-1] = message
        elif isinstance(message, LinkMeasured):
            self._measured[message.peer] = message
        if self.wire is not None:
            self.wire.send(encode(message))

    def _take(self, message: Any) -> None:
        kind = type(message)
        if kind in ENDS:
            self._ends.append(message)
        elif kind in TERMS:
            self._succeed(message)
            return
        if kind is ClusterEnded:
            self.ended = True
        elif kind is GivenUp:
            why = f"was silent for {message.silent_s:.1f} s"
            _log.warning("this host %s: given up", why if message.silent_s else "lost another")
            self.life.given_up = not self.life.stopping  # else it was leaving
        else:
            self.above.receive(message)

    def _succeed(self, message: Any) -> None:
        """About terms, in a cluster that has a standby."""
        if self.failover is not None:
            self.failover.receive(message)
        elif isinstance(message, StandbyNamed) and self.network is not None:
            self.failover = self.network.failover(message)

    # -- the beginning -------------------------------------------------------------------------

    def join(self) -> None:
        """Begins to speak with the manager; with one on another host this takes its time."""
        stream = self._near
        if stream is None:
            assert self.network is not None
            self._join_until = self.loop.now() + self.network.connect_timeout_s
            try:
                admission = self.network.connect()
            except HopliteError as error:
                self.join_error = type(error).__name__, str(error)
                self.above.answer_standing()
                return
            self.host, stream = admission.peer.host, admission.stream
        self._speak(stream, [self.above.joining(self._incarnation)])

    def _join_again(self, reason: str) -> bool:
        """The manager has died while it let this node in: the next one is asked. False: it is too
        late for that."""
        left, network = self._join_until - self.loop.now(), self.network
        if network is None or self.is_near or self.ended or self.life.given_up or left <= 0:
            return False
        _log.info("the manager has not let this node in: %s", reason)
        self._incarnation += 1

        def called(admission: Admission | None) -> None:
            if admission is None:
                self._not_let_in(reason)
            else:
                self.host = admission.peer.host
                self._speak(admission.stream, [self.above.joining(self._incarnation)])

        network.call(called, left)
        return True

    def _not_let_in(self, reason: str) -> None:
        self.join_error = "ManagerLostError", f"the manager has not let this node in: {reason}"
        self.above.answer_standing()
        self.life.leave()

    def admitted(self) -> None:
        """This node has its number."""
        if self.failover is not None and not self.is_near:
            self.failover.hold()

    @property
    def home(self) -> int:
        """Of the host on which the manager is."""
        return self.client.home if self.host is None else self.host

    @property
    def standby(self) -> tuple[tuple[str, ...], str, int, bool]:
        """Where the standby is, if there is to be one; where, if this host has it; whose host has
        such an address; and whether that one has the manager."""
        failover = self.failover
        if failover is None:
            return (), "", -1, False
        member = failover.keeper
        at, leads = (-1, False) if member is None else (member.node, member.home == self.home)
        return failover.addresses, failover.holds, at, leads

    def _speak(self, stream: Stream, words: list[Any]) -> None:
        wire = Wire(
            self.loop,
            stream,
            node_decoder(),
            self._take,
            self._lost,
            shared=not self.is_near,
        )
        self._use(wire, words)

    def _use(self, wire: Wire, words: list[Any]) -> None:
        self.wire = wire
        if not self.is_near:
            assert self.network is not None
            self.pulse = Pulse(
                wire.beat,
                self.loop,
                self._silent,
                interval_s=self.network.beat_interval_s,
                patience_s=MANAGER_SILENCES * self.network.silence_s,
            )
            wire.received = self.pulse.received
        for word in words:
            wire.send(encode(word))
        if wire.open:  # what came with the handshake's last bytes is announced by no loop
            wire.ready()

    # -- the end, or not -----------------------------------------------------------------------

    def _lost(self, reason: str) -> None:
        """The connection is over. Without farewell there will be another manager."""
        life, wire = self.life, self.wire
        self.wire = None
        if self.pulse is not None:
            self.pulse.stop()
        if not life.standing and self._join_again(reason):
            return
        if not life.standing and not self.ended:
            self._not_let_in(reason)
        elif self.ended or life.stopping or not life.standing or life.given_up:
            life.leave()
        elif self.is_near:
            _log.info("the manager is gone: %s", reason)
            self._losses += 1
            losses = self._losses
            self.loop.call_later(MANAGER_ABSENT_S, lambda: self._still_alone(losses))
        elif self.failover is not None:
            _log.info("the connection to the manager ended: %s", reason)
            self.failover.lost()
        else:
            _log.info("the connection to the manager ended: %s", reason)
            assert self.network is not None
            broken = wire is None or wire.stream.failure is not None
            self.network.call(lambda found: self._called(found, broken), MANAGER_ABSENT_S)

    def _still_alone(self, losses: int) -> None:
        if self.wire is None and self._losses == losses:
            _log.error("nobody has started the manager again")
            self.life.leave()

    def _called(self, admission: Admission | None, broken: bool) -> None:
        if admission is None:
            # Cut, perhaps: then nobody has said that it is the end.
            self.life.given_up = broken
            self.life.leave()
        else:
            self.found(admission)

    def found(self, admission: Admission) -> None:
        """A manager that was started again."""
        self.host = admission.peer.host
        self._return(admission.stream)

    def follow(self, wire: Wire, vote: Voted, host: int) -> None:
        """From now on the manager is at the other end of this wire, on the host with that home."""
        self.host = host
        self.drop("another one leads")
        wire.hand_over(self._take, self._lost)
        self._use(wire, [vote, *self._report()])

    @property
    def is_here(self) -> bool:
        """Is the manager on this host?"""
        return self.home == self.client.home

    @property
    def waits_for_votes(self) -> bool:
        """Is there no manager, and may another host have one? Then that is who says who is out."""
        return self.wire is None and self.failover is not None

    def drop(self, why: str) -> None:
        """That manager is not obeyed any more; who is found next is this node's."""
        wire, self.wire = self.wire, None
        if self.pulse is not None:  # nobody is to be missed who is not listened to
            self.pulse.stop()
        if wire is not None:
            wire.hand_over(lambda message: None, lambda reason: None)
            wire.close(why)

    def farewell(self) -> None:
        """This node ends, and nobody need wait to hear of it."""
        if self.failover is not None:
            self.send(self.failover.ends())

    def again(self, stream: Stream) -> None:
        """The supervisor has started another manager for this host."""
        if self.wire is not None:  # what the one before has said last is read first
            self.wire.drain()
        self._return(stream)

    def _silent(self, seconds: float) -> None:
        """Nothing has been heard of the manager for so long: this host is cut off, or that one."""
        if self.failover is not None and self.wire is not None:  # it looks for another one
            self.wire.close(f"it has been silent for {seconds:.1f} s")
            return
        self.cut_off(f"it has been silent for {seconds:.1f} s")

    def cut_off(self, why: str) -> None:
        """This life of the node is over; the host may join again."""
        self.life.given_up = True
        if self.wire is not None:
            self.wire.close(why)
        else:  # and it has no manager either
            self.life.leave()

    # -- another one ---------------------------------------------------------------------------

    def _return(self, stream: Stream) -> None:
        begun = self.loop.now()
        words = list(self._report())
        self._speak(stream, words)
        _log.info("told another manager what is here, in %.3f s", self.loop.now() - begun)

    def _report(self) -> Iterator[Any]:
        number = self.client.number
        yield self.above.returning(self._incarnation)
        yield from self.above.report()
        for end in self._ends:
            yield OperationEnded(number, end)
        yield from self._measured.values()
        yield from self._sent
        if self.failover is not None:
            yield self.failover.knows()
        yield Reported(number)
