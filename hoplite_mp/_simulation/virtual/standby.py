"""A standby on a simulated host, and its helpers.

With a standby there are two managers, of which at most one may decide at any time. Here the real
leadership code counts votes, over connections that are cut and hosts that stop. In production a
thread supersedes the former manager, and a tool sends an operator's `promote`; here events of the
timeline do both.
"""

from __future__ import annotations

import functools
import logging
from typing import TYPE_CHECKING, Any

from hoplite_mp._manager.leadership import Leadership
from hoplite_mp._manager.standby import TELL_PAUSE_S, TELL_WAIT_S
from hoplite_mp._node.peers.peers import PeerDialing
from hoplite_mp._planner.terms import Candidate, lease_s
from hoplite_mp._protocol.codec import encode
from hoplite_mp._protocol.greetings import Introduction
from hoplite_mp._protocol.terms import Promote, Superseded
from hoplite_mp._protocol.versions import software_versions
from hoplite_mp._simulation.virtual.connections import VirtualConnections
from hoplite_mp._simulation.virtual.environment import address_of
from hoplite_mp._simulation.virtual.loop import VirtualLoop
from hoplite_mp._transport.addresses import Address, endpoint_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from hoplite_mp._simulation.virtual.environment import RunEnvironment
    from hoplite_mp._transport.conversation import Admission

__all__ = ["Promotion", "Superseding", "candidate_leadership", "first_leadership"]

IDENTITIES = 1 << 48
PROMOTE_S = 5.0  # how long a tool tries to reach the standby
TOOL_HOST_ID = 1  # a tool does not belong to a host


def first_leadership(around: RunEnvironment, again: bool) -> Leadership[Any] | None:
    """The leadership of the manager that begins the cluster; None if there is no standby."""
    if not around.standby_at:
        return None
    heartbeat_timeout_s = around.config.heartbeat_timeout_s
    return Leadership(
        _named(around), own=0, lease_s=lease_s(heartbeat_timeout_s), write=_write, again=again
    )


def candidate_leadership(around: RunEnvironment, own: int) -> tuple[Candidate, Leadership[Any]]:
    """What the standby knows of votes, and its leadership; own: the number of its host's node."""
    candidate = Candidate(own, around.timeline.chance.randrange(IDENTITIES) + 1)
    seconds = lease_s(around.config.heartbeat_timeout_s)
    return candidate, Leadership(
        _named(around), own=own, lease_s=seconds, write=_write, candidate=candidate
    )


def _named(around: RunEnvironment) -> tuple[str, ...]:
    return tuple(str(Address(*at)) for at in around.standby_at)


def _write(link: Any, message: Any) -> None:
    link.write(encode(message))


def _turn(action: Callable[[], object]) -> None:
    action()


class _Calls:
    """Calls from one process to one address."""

    def __init__(
        self,
        around: RunEnvironment,
        loop: VirtualLoop,
        place: int,
        host_id: int,
        to: tuple[str, int],
    ) -> None:
        self.loop = loop
        self._connections = VirtualConnections(
            around.board, loop, place, host_id, address_of(place)
        )
        self._mine = Introduction(host_id, software_versions())
        self._to = [endpoint_of(Address(*to))]

    def call(self, role: str, seconds: float, done: Callable[[Admission | None], None]) -> None:
        make = functools.partial(
            self._connections.call, self._to, role=role, mine=self._mine, timeout_s=seconds
        )
        PeerDialing(self.loop, make, "a manager", done, logging.DEBUG).begin()


class Superseding(_Calls):
    """Repeatedly tells the former manager that it has been superseded; see _manager/standby.py."""

    def begin(self, term: int) -> None:
        """Begins after the standby has won that term."""

        def called(admission: Admission | None) -> None:
            if admission is not None:
                admission.stream.write(encode(Superseded(term)))
                admission.stream.flush()
                self.loop.call_later(TELL_WAIT_S, admission.stream.close)
            self.loop.call_later(TELL_PAUSE_S, again)

        def again() -> None:
            self.call("voter", TELL_WAIT_S, called)

        again()


class Promotion(_Calls):
    """`hoplite-mp promote --anyway`, by an operator who knows that the manager's host is gone."""

    def __init__(self, around: RunEnvironment, place: int, to: tuple[str, int]) -> None:
        loop = VirtualLoop(around.timeline, around.network, place, around.descriptors, _turn)
        super().__init__(around, loop, place, TOOL_HOST_ID, to)
        self._stream: Any = None

    def begin(self) -> None:
        """Asks once; the connection stays open, because otherwise the standby forgets the
        request."""

        def called(admission: Admission | None) -> None:
            if admission is not None:
                self._stream = admission.stream
                self._stream.write(encode(Promote(True)))
                self._stream.flush()

        self.call("tool", PROMOTE_S, called)
