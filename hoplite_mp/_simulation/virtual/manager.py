"""The manager's process on a simulated host: the shipped loop, which waits on the timeline.

_manager/loop.py runs unchanged, because it determines which messages reach the planner, in which
order, and when a silent node is declared lost.
"""

from __future__ import annotations

import functools
import logging
import selectors
from typing import TYPE_CHECKING, Any

from hoplite_mp._manager.heartbeats import Heartbeats
from hoplite_mp._manager.leadership import Leadership
from hoplite_mp._manager.loop import ManagerLoop
from hoplite_mp._manager.standby import NOTIFY_PAUSE_S, NOTIFY_TIMEOUT_S
from hoplite_mp._node.peers.peers import PeerDialing
from hoplite_mp._planner.planner_core import Planner
from hoplite_mp._planner.terms import Candidate, lease_s
from hoplite_mp._protocol.codec import encode
from hoplite_mp._protocol.greetings import Introduction, software_versions
from hoplite_mp._protocol.terms import Promote, Superseded
from hoplite_mp._simulation.virtual.connections import VirtualConnections, VirtualListener, connect
from hoplite_mp._simulation.virtual.environment import address_of
from hoplite_mp._simulation.virtual.loop import VirtualLoop
from hoplite_mp._transport.addresses import Address, endpoint_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from hoplite_mp._simulation.virtual.connections import Switchboard, VirtualStream
    from hoplite_mp._simulation.virtual.environment import RunEnvironment
    from hoplite_mp._transport.conversation import Admission

__all__ = ["Promotion", "Superseding", "VirtualManager", "candidate_leadership", "first_leadership"]


PACKING_S = 0.05  # duration of the thread that packs broadcast trees


class VirtualSelector(selectors.BaseSelector):
    """Returns the events of the simulated loop. Instead of blocking, `select` schedules a turn."""

    def __init__(self, loop: VirtualLoop, wait: Callable[[float | None], None]) -> None:
        self._loop = loop
        self._wait = wait
        self._keys: dict[int, selectors.SelectorKey] = {}
        self.ready: dict[int, None] = {}

    def register(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        key = self._keys[fileobj] = selectors.SelectorKey(fileobj, fileobj, events, data)
        self._loop.watch(fileobj, lambda: self.ready.setdefault(fileobj))
        return key

    def modify(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        key = self._keys[fileobj] = selectors.SelectorKey(fileobj, fileobj, events, data)
        return key

    def unregister(self, fileobj: Any) -> selectors.SelectorKey:
        self._loop.unwatch(fileobj)
        self.ready.pop(fileobj, None)
        return self._keys.pop(fileobj)

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready, self.ready = self.ready, {}
        self._wait(timeout)
        return [(self._keys[fd], selectors.EVENT_READ) for fd in ready if fd in self._keys]

    def get_map(self) -> Mapping[Any, selectors.SelectorKey]:
        return self._keys

    def close(self) -> None:
        self._keys.clear()


class VirtualManagerListener:
    """Implements the interface of _transport/listener.py."""

    deadline: float | None = None
    not_now: frozenset[str] = frozenset()

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self.waiting: list[Admission] = []

    def fileno(self) -> int:
        return self._fd

    def turn(self, now: float) -> list[Admission]:
        waiting, self.waiting = self.waiting, []
        return waiting


class VirtualManager:
    """One manager process. `planner`: read by the checks of a run."""

    def __init__(
        self,
        board: Switchboard,
        host: int,
        at: tuple[str, int],
        *,
        host_id: int,
        cluster: bytes,
        introduction: Introduction,
        beat_s: float,
        heartbeat_timeout_s: float,
        again: bool = False,
        own: int = 0,
        leadership: Leadership[Any] | None = None,
        turned: Callable[[], None] = lambda: None,
    ) -> None:
        """at: the manager's address. again: whether it replaces a dead manager. own: the number of
        its host's node. leadership: controls whether it may decide; None: it always may. turned:
        called after each turn."""
        network, descriptors = board.network, board.descriptors
        self.board = board
        self.host = host
        self.planner = Planner(again=again, own=own)
        self.leadership = leadership
        self._turned = turned
        self.loop = VirtualLoop(network.timeline, network, host, descriptors, self._turn)
        self.selector = VirtualSelector(self.loop, self._wait)
        self._wake_at = float("inf")
        self._manager = ManagerLoop(
            self.planner,
            self.loop.now,
            selector=self.selector,
            in_thread=lambda work: network.timeline.after(PACKING_S, self.loop.run, work),
        )
        listener: Any = VirtualManagerListener(descriptors.add(self))
        self._manager.open(listener, b"", Heartbeats(beat_s, heartbeat_timeout_s))
        if leadership is not None:
            self._manager.set_leadership(leadership)

        def admit(admission: Admission) -> None:
            listener.waiting.append(admission)

        board.listeners[at] = VirtualListener(
            host,
            self.loop,
            host_id,
            cluster,
            introduction,
            admit,
            refuses=lambda role: role in listener.not_now,
        )
        self.loop.run_soon(lambda: None)  # its first turn

    @property
    def leads(self) -> bool:
        """Whether it is the manager, even if it may not decide now. False: a waiting standby."""
        return self.leadership is None or self.leadership.leads

    @property
    def decides(self) -> bool:
        """Whether it may decide now."""
        return self.leadership is None or self.leadership.decides(self.loop.now())

    @property
    def is_out(self) -> bool:
        """Whether it must step down. Called once per turn."""
        return self.leadership is not None and self.leadership.must_step_down(self.loop.now())

    # Implements Descriptor for the listener. Never ready, because connections are admitted in a
    # turn.
    is_ready = False

    def connect_locally(self, loop: VirtualLoop) -> VirtualStream:
        """Creates a connection to the node of its own host. Returns the node's end."""
        board = self.board
        ours, theirs = connect(
            board.network, board.descriptors, (loop, self.host), (self.loop, self.host)
        )
        board.streams[ours] = None
        self._manager.serve(theirs)
        return ours

    def _turn(self, action: Callable[[], object]) -> None:
        action()
        self._wake_at = float("inf")
        self._manager.turn()
        while self.selector.ready:
            self._manager.turn()
        self._turned()

    def _wait(self, seconds: float | None) -> None:
        """Schedules a turn at the time at which the loop would wake."""
        if seconds is None:
            return
        at = self.loop.timeline.now + seconds
        if at < self._wake_at:
            self._wake_at = at
            self.loop.timeline.at(at, self._due, at)

    def _due(self, at: float) -> None:
        if at == self._wake_at:
            self.loop.run(lambda: None)


# A standby on a simulated host, and its helpers.
#
# With a standby there are two managers, of which at most one may decide at any time. The shipped
# leadership code counts votes, even when connections are cut and hosts stop. In production, a
# thread notifies the former manager that it has been superseded, and a tool sends an operator's
# `promote`; here both are events of the timeline.


IDENTITIES = 1 << 48
PROMOTE_S = 5.0  # how long a tool tries to reach the standby
TOOL_HOST_ID = 1  # a tool does not belong to a host


def first_leadership(environment: RunEnvironment, again: bool) -> Leadership[Any] | None:
    """Returns the leadership of the cluster's first manager; None if there is no standby."""
    if not environment.standby_at:
        return None
    heartbeat_timeout_s = environment.config.heartbeat_timeout_s
    return Leadership(
        _standby_addresses(environment),
        own=0,
        lease_s=lease_s(heartbeat_timeout_s),
        write=_write,
        again=again,
    )


def candidate_leadership(
    environment: RunEnvironment, own: int
) -> tuple[Candidate, Leadership[Any]]:
    """Returns the standby's vote count and leadership. own: the number of its host's node."""
    candidate = Candidate(own, environment.timeline.rng.randrange(IDENTITIES) + 1)
    seconds = lease_s(environment.config.heartbeat_timeout_s)
    return candidate, Leadership(
        _standby_addresses(environment), own=own, lease_s=seconds, write=_write, candidate=candidate
    )


def _standby_addresses(environment: RunEnvironment) -> tuple[str, ...]:
    return tuple(str(Address(*at)) for at in environment.standby_at)


def _write(link: Any, message: Any) -> None:
    link.write(encode(message))


def _turn(action: Callable[[], object]) -> None:
    action()


class _Caller:
    """Connection attempts from one process to one address."""

    def __init__(
        self,
        environment: RunEnvironment,
        loop: VirtualLoop,
        place: int,
        host_id: int,
        to: tuple[str, int],
    ) -> None:
        self.loop = loop
        self._connections = VirtualConnections(
            environment.board, loop, place, host_id, address_of(place)
        )
        self._mine = Introduction(host_id, software_versions())
        self._to = [endpoint_of(Address(*to))]

    def call(self, role: str, seconds: float, done: Callable[[Admission | None], None]) -> None:
        make = functools.partial(
            self._connections.call, self._to, role=role, mine=self._mine, timeout_s=seconds
        )
        PeerDialing(self.loop, make, "a manager", done, logging.DEBUG).begin()


class Superseding(_Caller):
    """Repeatedly notifies the former manager that it has been superseded; see
    _manager/standby.py."""

    def begin(self, term: int) -> None:
        """Begins after the standby has won the term."""

        def called(admission: Admission | None) -> None:
            if admission is not None:
                admission.stream.write(encode(Superseded(term)))
                admission.stream.flush()
                self.loop.call_later(NOTIFY_TIMEOUT_S, admission.stream.close)
            self.loop.call_later(NOTIFY_PAUSE_S, again)

        def again() -> None:
            self.call("voter", NOTIFY_TIMEOUT_S, called)

        again()


class Promotion(_Caller):
    """`hoplite-mp promote --anyway`, by an operator who knows that the manager's host is lost."""

    def __init__(self, environment: RunEnvironment, place: int, to: tuple[str, int]) -> None:
        loop = VirtualLoop(
            environment.timeline, environment.network, place, environment.descriptors, _turn
        )
        super().__init__(environment, loop, place, TOOL_HOST_ID, to)
        self._stream: Any = None

    def begin(self) -> None:
        """Sends the request once. The connection stays open, because otherwise the standby discards
        the request."""

        def called(admission: Admission | None) -> None:
            if admission is not None:
                self._stream = admission.stream
                self._stream.write(encode(Promote(True)))
                self._stream.flush()

        self.call("tool", PROMOTE_S, called)
