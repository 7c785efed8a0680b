"""The state that the parts of a simulated node share: its objects, its engine, its messages.

All plans of a host fill cells of one engine and leave objects on that host, whichever node has
requested them. Hosts are identified by number, which is also that of their node.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hoplite_mp._common.ids import unpack_id
from hoplite_mp._protocol.codec import encode

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from hoplite_mp._protocol.messages import NodeToManager
    from hoplite_mp._simulation.scale.oracle import ScaleOracle
    from hoplite_mp._simulation.scale.streams import ScaleEngine

__all__ = ["HOST_ID_BASE", "MANAGER_HOST", "ScaleHost", "Wait"]

MANAGER_HOST = 0
# In a cluster host ids are random; here they are consecutive from this number on.
HOST_ID_BASE = 1000
# Size of a message between nodes about one object.
PEER_MESSAGE_BYTES = 100


@dataclass(slots=True, eq=False)
class Wait:
    """A process's wait for something; `ended_at` is None until the wait has ended."""

    what: str
    ended_at: float | None = None


class ScaleHost:
    """One simulated host."""

    def __init__(
        self,
        engine: ScaleEngine,
        oracle: ScaleOracle,
        hosts: Sequence[ScaleHost],
        manager: Callable[[NodeToManager], None],
    ) -> None:
        """hosts: all hosts by number, including this one; manager: called with each message to the
        manager."""
        self.engine = engine
        self.number = engine.host
        self.oracle = oracle
        self.hosts = hosts
        self.timeline = engine.network.timeline
        self.holds: set[bytes] = set()
        self.reads: dict[bytes, Wait] = {}  # objects that a process waits for here
        self._manager = manager
        self._copies_at: dict[bytes, set[int]] = {}  # objects made here -> hosts with a copy
        # Objects made here that are not ready -> the hosts to answer when they are.
        self._askers: dict[bytes, list[tuple[ScaleHost, Callable[..., None]]]] = {}

    # ---- messages

    def send(self, to: int, nbytes: int, call: Callable[..., None], *message: Any) -> None:
        """Sends a message to another host, which calls `call` when it arrives."""
        network = self.engine.network
        left_at = network.leaves_at(self.number, to, nbytes)
        self.timeline.at(left_at + network.delay(self.number, to), call, *message)

    def send_manager(self, message: NodeToManager) -> None:
        """Sends a message to the manager."""
        self.send(MANAGER_HOST, len(encode(message)), self._manager, message)

    # ---- objects

    def put(self, object_id: bytes) -> None:
        """The object is complete on this host from now on, and others may read it."""
        self.holds.add(object_id)
        for asker, answer in self._askers.pop(object_id, ()):
            self._answer(object_id, asker, answer)
        if object_id in self.reads:
            self.reads.pop(object_id).ended_at = self.timeline.now
        if not self.is_own(object_id):
            owner = self._owner(object_id)
            self.send(owner.number, PEER_MESSAGE_BYTES, owner._copied, object_id, self.number)

    def is_own(self, object_id: bytes) -> bool:
        """Was the object made here?"""
        return self._owner(object_id) is self

    def holders(self, object_id: bytes) -> tuple[int, ...]:
        """The hosts that hold an object that was made here; empty if it is not ready."""
        here = (self.number,) if object_id in self.holds else ()
        return (*here, *sorted(self._copies_at.get(object_id, ())))

    def ask(self, object_id: bytes, answer: Callable[[bytes, tuple[int, ...]], None]) -> None:
        """Asks the object's owner which hosts hold it. The owner answers at once and, if the object
        is pending, again when it is ready."""
        owner = self._owner(object_id)
        self.send(owner.number, PEER_MESSAGE_BYTES, owner._asked, object_id, self, answer)

    def _asked(self, object_id: bytes, asker: ScaleHost, answer: Callable[..., None]) -> None:
        if object_id not in self.holds:
            self._askers.setdefault(object_id, []).append((asker, answer))
        self._answer(object_id, asker, answer)

    def _answer(self, object_id: bytes, asker: ScaleHost, answer: Callable[..., None]) -> None:
        holders = self.holders(object_id)
        self.send(asker.number, PEER_MESSAGE_BYTES, answer, object_id, holders)

    def _copied(self, object_id: bytes, number: int) -> None:
        self._copies_at.setdefault(object_id, set()).add(number)

    def _owner(self, object_id: bytes) -> ScaleHost:
        return self.hosts[unpack_id(object_id)[0] - HOST_ID_BASE]
