"""Draining: a node leaves the cluster while work is running.

The leaving node accepts no more tasks, returns tasks that have not begun, and finishes the rest.
Its actors finish their pending calls and accept no more. If only the leaving node holds an object,
the other nodes that use the object fetch it. Then the leaving node announces its departure to the
manager, and exits when no operation involves it. Objects that no other host uses are lost.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from hoplite_mp._common.object_states import KIND_TASK, NODE_SLOT, PENDING, STATE
from hoplite_mp._protocol.peers import Evacuated, PeerLeaving

if TYPE_CHECKING:
    from hoplite_mp._node.objects.context import HostContext
    from hoplite_mp._node.tasks.inbound_tasks import InboundTasks
    from hoplite_mp._node.tasks.workers import Workers
    from hoplite_mp._protocol.messages import Member

__all__ = ["Draining"]

# Interval of checks for running tasks and transfers while a node drains. Lower: more scans of all
# headers. Higher: a removal takes up to this much longer.
POLL_S = 0.05


class DrainingEvents(Protocol):
    """Reports and requests from this component to the components above it."""

    def leaves_now(self) -> None:
        """Stops this node from accepting work."""

    def drained(self) -> bool:
        """Lets this node leave, because the cluster no longer needs this host. Returns False if the
        node cannot leave yet because no manager has admitted it."""

    def has_calls(self, host_id: int) -> bool:
        """Whether calls from here to actors on the host are pending."""


class Draining:
    """Both sides of draining on one node: leaving, and helping other nodes to leave."""

    def __init__(
        self,
        host: HostContext,
        inbound_tasks: InboundTasks,
        workers: Workers,
        events: DrainingEvents,
    ) -> None:
        self.loop = host.loop
        self.client = host.client
        self.tasks = host.tasks
        self.store = host.store
        self.remote_objects = host.remote_objects
        self.imports = host.imports
        self.roster = host.roster
        self.send = host.send_peer
        self.inbound_tasks = inbound_tasks
        self.workers = workers
        self.events = events
        self.since_ns = 0
        self.waiting: set[int] = set()  # ids of hosts that may still need objects from this node
        # Id of another host that is leaving -> whether this node has sent Evacuated to it.
        self.leaving: dict[int, bool] = {}
        self._evacuating = False  # a timer will call `_evacuate` again

    @property
    def numbers(self) -> list[int]:
        """The numbers of the nodes that are leaving, as far as this node knows."""
        found = map(self.roster.number_of, self.leaving)
        own = [self.client.number] if self.roster.leaves else []
        return own + [number for number in found if number is not None]

    # -- this node is leaving ------------------------------------------------------------------

    def begin(self) -> None:
        """Begins to drain this node."""
        if self.roster.leaves:
            return
        self.roster.leaves = True
        self.since_ns = self.loop.now_ns()
        self.events.leaves_now()
        for host_id in self.roster.host_ids:
            self.tell(host_id)
        self._poll()

    def tell(self, host_id: int) -> None:
        """Announces this node's departure to another node, if this node is leaving."""
        if self.roster.leaves:
            self.waiting.add(host_id)
            self.send(host_id, PeerLeaving())
            self.inbound_tasks.recall_all(host_id)

    def evacuated(self, host_id: int) -> None:
        """Records that another node needs no more objects from this node."""
        self.waiting.discard(host_id)

    def _poll(self) -> None:
        waits = self.waiting or self.inbound_tasks.by_task or self._has_pending_tasks()
        if waits or not self.events.drained():
            self.loop.call_later(POLL_S, self._poll)

    def _has_pending_tasks(self) -> bool:
        """Whether tasks submitted by this host's processes are still running or queued."""
        return any(
            self._must_finish(header)
            for header in self.client.scan()
            if header["kind"] == KIND_TASK
            and STATE[header["state"]] in PENDING
            and not self._is_elsewhere(header["id"])
        )

    def _is_elsewhere(self, oid: int) -> bool:
        """Whether the task is an inbound task that has been returned to its host. Its header
        remains for processes on this host that hold its result."""
        return oid in self.imports.by_oid and oid not in self.inbound_tasks

    def _must_finish(self, header: dict[str, Any]) -> bool:
        """Whether the node must wait for the task before it leaves. Tasks that drivers on this host
        submitted after draining began do not count, because there might be no end to them."""
        owner = header["owner"]
        if owner == NODE_SLOT or owner in self.workers.all:
            return True
        return self.tasks.submitted_ns(header["id"]) <= self.since_ns

    # -- another node is leaving ---------------------------------------------------------------

    def leaves(self, host_id: int) -> None:
        """Handles another node's announcement of its departure."""
        if host_id not in self.leaving:
            self.leaving[host_id] = False
            self.roster.leaving.add(host_id)
            if not self._evacuating:
                self._evacuate()

    def peer_lost(self, member: Member) -> None:
        """Forgets a lost host, whether or not it was drained."""
        self.leaving.pop(member.host_id, None)
        self.waiting.discard(member.host_id)

    def _evacuate(self) -> None:
        """Fetches the objects that only leaving nodes hold. Repeats this until those nodes are
        gone, because their last tasks may still produce results."""
        self._evacuating = bool(self.leaving)
        if not self._evacuating:
            return
        by_host_id = self.roster.by_host_id
        leaving_nodes = {
            by_host_id[host_id].node for host_id in self.leaving if host_id in by_host_id
        }
        needed: set[int] = set()
        for oid, remote in list(self.remote_objects.by_oid.items()):
            if not remote.holders or not leaving_nodes.issuperset(remote.holders):
                continue
            if self.store.impossible(remote.nbytes):
                why = (
                    f"its node is leaving, and its {remote.nbytes} bytes can never fit on this host"
                )
                self.remote_objects.lost(oid, why)
                continue
            needed.update(remote.holders)
            if not remote.payload:
                self.remote_objects.want(oid, _nothing)  # retried if it does not fit
        for host_id, sent in list(self.leaving.items()):
            if sent or host_id not in by_host_id or by_host_id[host_id].node in needed:
                continue
            if not self.events.has_calls(host_id):
                self.leaving[host_id] = True
                self.send(host_id, Evacuated())
        self.loop.call_later(POLL_S, self._evacuate)


def _nothing() -> None:
    """Does nothing, because waiting readers are woken through the object's header."""
