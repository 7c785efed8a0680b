"""One simulated node: what its process asks for, and what the manager sends it.

Thousands of real nodes, as in _simulation/virtual/, do not fit into one process. This one reports
sources as _node/collectives/operations.py does, and learns of objects of other nodes as
_node/objects/imports.py does. It makes one request in its life.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from hoplite_mp._protocol.fields import FOLDING
from hoplite_mp._protocol.membership import MembersChanged
from hoplite_mp._protocol.messages import (
    Commit,
    Distribute,
    ExecuteReduce,
    ReduceRequested,
    SourceReady,
    Withdraw,
)
from hoplite_mp._simulation.scale.executions import Executions
from hoplite_mp._simulation.scale.host import Wait
from hoplite_mp._simulation.scale.oracle import WrongCompletion

if TYPE_CHECKING:
    from typing import Any

    from hoplite_mp._simulation.scale.host import ScaleHost

__all__ = ["ScaleNode", "WantedCollective"]

# An operation's number has the number of the node that requests it in the bits from this one on; in
# the lower bits it has the node's life and a count.
OPERATION_BITS = 40
FIRST_OPERATION = 1 << 24 | 1


@dataclass(frozen=True, slots=True)
class WantedCollective:
    """A collective as its caller requests it."""

    kind: str
    sources: tuple[bytes, ...]
    num: int
    results: tuple[bytes, ...] = ()


class ScaleNode:
    """One simulated node."""

    def __init__(self, host: ScaleHost) -> None:
        self.host = host
        self.executions = Executions(host)
        self.operation = host.number << OPERATION_BITS | FIRST_OPERATION
        self._wanted: WantedCollective | None = None
        self._wait = Wait("")
        self._unknown: set[bytes] = set()  # sources whose owner has not answered yet
        # Holders of sources that were made elsewhere.
        self._holders: dict[bytes, tuple[int, ...]] = {}
        # Sources that are not ready yet -> their indices.
        self._pending: dict[bytes, list[int]] = {}

    # ---- what a process asks for

    def get(self, object_id: bytes) -> Wait:
        """A process here wants the value of an object that is ready."""
        wait = Wait(f"a get on host {self.host.number}")
        if object_id in self.host.holds:
            wait.ended_at = self.host.timeline.now
        else:
            self.host.reads[object_id] = wait
            self.host.ask(object_id, self.executions.fetch)
        return wait

    def begin(self, wanted: WantedCollective) -> Wait:
        """A process here calls a collective."""
        self._wanted = wanted
        self._wait = Wait(f"{wanted.kind} of host {self.host.number}")
        others = [one for one in dict.fromkeys(wanted.sources) if not self.host.is_own(one)]
        self._unknown.update(others)
        for object_id in others:
            self.host.ask(object_id, self._described)
        if not others:
            self._request(wanted)
        return self._wait

    def _described(self, object_id: bytes, holders: tuple[int, ...]) -> None:
        self._holders[object_id] = holders
        if object_id not in self._unknown:
            self.ready(object_id)
            return
        self._unknown.remove(object_id)
        if not self._unknown and self._wanted is not None:
            self._request(self._wanted)

    def ready(self, object_id: bytes) -> None:
        """Reports an object that has become ready, if it is a source."""
        for index in self._pending.pop(object_id, ()):
            nbytes, layout, (first, *others) = self._about(object_id)
            message = SourceReady(self.operation, index, first, nbytes, layout, tuple(others))
            self.host.send_manager(message)

    def _request(self, wanted: WantedCollective) -> None:
        ready: list[int] = []
        for index, object_id in enumerate(wanted.sources):
            if self._about(object_id)[2]:
                ready.append(index)
            else:
                self._pending.setdefault(object_id, []).append(index)
        told = [self._about(wanted.sources[index]) for index in ready]
        self.host.send_manager(
            ReduceRequested(
                self.operation,
                self.host.number,
                1,
                wanted.sources,
                "sum",
                wanted.num,
                results=wanted.results,
                kind=wanted.kind,
                ready=tuple(ready),
                ready_nbytes=tuple(nbytes for nbytes, _, _ in told),
                ready_layouts=tuple(layout for _, layout, _ in told),
                ready_holders=tuple(holders for _, _, holders in told),
            )
        )

    def _about(self, object_id: bytes) -> tuple[int, bytes, tuple[int, ...]]:
        nbytes = self.host.oracle.sizes[object_id]
        own = self.host.is_own(object_id)
        holders = self.host.holders(object_id) if own else self._holders[object_id]
        return nbytes, b"float32 %d" % nbytes, holders

    # ---- what the manager sends

    def receive(self, message: Any) -> None:
        """Handles a message from the manager."""
        match message:
            case Distribute():
                self.executions.distribute(message)
            case Withdraw():
                self.executions.withdraw(message.epoch)
            case ExecuteReduce():
                self.executions.execute(message)
            case Commit():
                self.host.oracle.check_commit(message)
                self.executions.commit(message)
                if message.operation == self.operation and self._wanted is not None:
                    self._end(self._wanted, message)
            case MembersChanged(went=()):
                pass  # an announcement of nodes that have joined
            case _:
                raise WrongCompletion(f"nothing has failed, and a node is sent {message!r}")

    def _end(self, wanted: WantedCollective, commit: Commit) -> None:
        if len(commit.contributors) != wanted.num:
            raise WrongCompletion(f"{commit}, and {wanted.num} contributors were wanted")
        for number in () if wanted.kind in FOLDING else commit.destinations:
            for index in commit.contributors:
                if wanted.sources[index] not in self.host.hosts[number].holds:
                    raise WrongCompletion(f"{commit}, and host {number} has not got source {index}")
        self._wait.ended_at = self.host.timeline.now
