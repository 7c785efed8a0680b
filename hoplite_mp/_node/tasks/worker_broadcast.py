"""Worker broadcasts: one task for each worker of the common pool.

`Cluster.run` must reach every worker once, but ordinary tasks are run by the first idle worker. The
tasks of a broadcast are therefore queued in a pool without workers. The node sets a bit in the slot
of each participating worker, which then requests its task from the node between two other tasks.
Other nodes do the same with their own pools, to which this node sends one task for each of their
workers. If a worker exits before its turn, one task of the broadcast fails.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from hoplite_mp._common.object_states import NODE_SLOT, STATE
from hoplite_mp._node.tasks.outbound_tasks import Runner
from hoplite_mp._protocol.local import Reply
from hoplite_mp._protocol.peers import (
    CloseRemotePool,
    EndRemoteBroadcast,
    OpenRemoteBroadcast,
    RemoteBroadcastEnded,
    RemoteBroadcastOpened,
)

if TYPE_CHECKING:
    from hoplite_mp._node.objects.context import HostContext
    from hoplite_mp._node.questions import Answer
    from hoplite_mp._node.tasks.inbound_tasks import InboundTasks
    from hoplite_mp._node.tasks.outbound_tasks import OutboundTasks
    from hoplite_mp._node.tasks.workers import Workers
    from hoplite_mp._protocol.local import Request

__all__ = ["WorkerBroadcasts"]


COMMON_POOL = 0
# Interval of checks for tasks that are not queued yet. Lower: the node wakes more often after a
# broadcast has lost a worker. Higher: the caller is informed of the loss later.
POLL_S = 0.05
# How long a caller that cancels a broadcast waits for other nodes. Higher: an unresponsive node
# delays the caller. Lower: a slow node may begin a task after the caller has returned.
END_PATIENCE_S = 1.0
ENDED = "its worker exited before its turn in this broadcast"


@dataclass(slots=True)
class WorkerBroadcast:
    """This node's share in one call to `Cluster.run`."""

    pool: int
    waiting: set[int]  # slots of workers that have not requested their task
    begun: bool = False  # all tasks for this host have been queued in the pool
    given: dict[int, int] = field(default_factory=dict)  # slot -> the worker's task
    # number of tasks that must fail, one for each worker that exited before its turn
    surplus: int = 0
    # Host id -> (number of the pool there, number of participating workers).
    remote: dict[int, tuple[int, int]] = field(default_factory=dict)
    # host id -> number of tasks still to be sent there
    unsent: dict[int, int] = field(default_factory=dict)


class WorkerBroadcastsEvents(Protocol):
    """Requests from this component to the components above it."""

    def output_owner_of(self, slot: int) -> int:
        """The driver that receives the output of the process in the slot."""


class WorkerBroadcasts:
    """All broadcasts on one node, for its own callers and for other nodes."""

    def __init__(
        self,
        host: HostContext,
        workers: Workers,
        outbound_tasks: OutboundTasks,
        inbound_tasks: InboundTasks,
        events: WorkerBroadcastsEvents,
    ) -> None:
        self.loop = host.loop
        self.client = host.client
        self.tasks = host.tasks
        self.roster = host.roster
        self.send_peer = host.send_peer
        self.reply = host.reply
        self.replier = host.replier
        self.workers = workers
        self.outbound_tasks = outbound_tasks
        self.inbound_tasks = inbound_tasks
        self.questions = host.questions
        self.events = events
        self.by_pool: dict[int, WorkerBroadcast] = {}

    def __contains__(self, pool: int) -> bool:
        return pool in self.by_pool

    # -- on the caller's node --------------------------------------------------------------------

    def open(self, slot: int, request: Request) -> None:
        """Opens a broadcast. Each node determines which of its workers participate."""
        ask: Any = request.ask
        workers = self.workers
        reply = self.replier(slot)
        number = workers.open_bound(slot, self.events.output_owner_of(slot))
        if number is None:
            reply(Reply(request.number, None, workers.why_none))
            return
        here = not ask.nodes or self.client.number in ask.nodes
        broadcast = self.by_pool[number] = WorkerBroadcast(
            number, self._roster() if here else set()
        )
        others = [
            member.host_id
            for member in self.roster.by_host_id.values()
            if member.workers and (not ask.nodes or member.node in ask.nodes)
        ]
        patience = ask.timeout_s
        deadline = math.inf if patience is None else self.loop.now() + patience

        def opened(found: dict[int, Answer]) -> None:
            there = {host_id: answer.message for host_id, answer in found.items()}
            broadcast.remote = {
                host_id: (one.pool, one.workers) for host_id, one in there.items() if one.pool
            }
            if self.by_pool.get(number) is not broadcast:  # the caller has died
                self._close_there(broadcast)
            elif len(found) < len(others) and self.loop.now() >= deadline:
                self.workers.close(number, False)
                reply(Reply(request.number))
            else:
                count = len(broadcast.waiting) + sum(
                    workers for _, workers in broadcast.remote.values()
                )
                reply(Reply(request.number, (number, count)))

        self.questions.ask_all(others, OpenRemoteBroadcast, opened, patience)

    def opened(self, host_id: int, message: RemoteBroadcastOpened) -> None:
        """Handles another node's reply that it has opened its pool."""
        if not self.questions.answered(host_id, message) and message.pool:  # the answer is late
            self.send_peer(host_id, CloseRemotePool(message.pool, False))

    def begin(self, slot: int, request: Request) -> None:
        """Distributes the tasks to the nodes, after the caller has submitted all of them."""
        broadcast = self.by_pool.get(request.ask.pool)  # type: ignore[union-attr]
        if broadcast is not None:
            broadcast.unsent = {
                host_id: workers for host_id, (_, workers) in broadcast.remote.items()
            }
            self._distribute(broadcast)

    def _distribute(self, broadcast: WorkerBroadcast) -> None:
        """Sends other nodes their tasks. The remaining tasks are for this host's workers."""
        if self.by_pool.get(broadcast.pool) is not broadcast:
            return
        while broadcast.unsent:
            host_id = next(iter(broadcast.unsent))
            runner = self.outbound_tasks.runners.get(host_id)
            if runner is None:  # the host was lost, so no worker runs its tasks
                broadcast.surplus += broadcast.unsent.pop(host_id)
                continue
            oid = self.tasks.take_queued(broadcast.pool)
            if not oid:  # the hint ring was full, so the remaining tasks are posted later
                self.loop.call_later(POLL_S, functools.partial(self._distribute, broadcast))
                return
            there, workers = broadcast.remote[host_id]
            self.outbound_tasks.delegate(oid, Runner(host_id, runner.number, workers, there, 0))
            broadcast.unsent[host_id] -= 1
            if not broadcast.unsent[host_id]:
                del broadcast.unsent[host_id]
        broadcast.begun = True
        self._call(broadcast)
        self._fail_surplus(broadcast)

    def end(self, slot: int, request: Request) -> None:
        """Ends a broadcast on all nodes, because its caller has cancelled it."""
        reply = self.replier(slot)
        broadcast = self.by_pool.get(request.ask.pool)  # type: ignore[union-attr]
        remote = {} if broadcast is None else broadcast.remote
        ends = {
            host_id: functools.partial(EndRemoteBroadcast, pool=pool)
            for host_id, (pool, _) in remote.items()
        }
        if broadcast is not None:
            self.workers.close(broadcast.pool, False)
        self.questions.ask_each(ends, lambda _: reply(Reply(request.number)), END_PATIENCE_S)

    # -- on the workers' nodes -------------------------------------------------------------------

    def asked(self, host_id: int, message: OpenRemoteBroadcast) -> None:
        """Opens another node's broadcast for the workers on this host."""
        number, roster = None, self._roster()
        if roster:
            number = self.workers.open_bound(NODE_SLOT, 0)
        if number is not None:
            self.by_pool[number] = WorkerBroadcast(number, roster, begun=True)
            self.inbound_tasks.pools[number] = host_id
        workers = len(roster) if number is not None else 0
        self.send_peer(host_id, RemoteBroadcastOpened(message.number, number or 0, workers))

    def end_here(self, host_id: int, message: EndRemoteBroadcast) -> None:
        """Ends a broadcast whose caller on the other node has cancelled it."""
        self.workers.close_lent(host_id, message.pool, False)
        self.send_peer(host_id, RemoteBroadcastEnded(message.number))

    def arrived(self, pool: int) -> None:
        """Signals to a broadcast's workers that a task from another node is queued in its pool."""
        broadcast = self.by_pool.get(pool)
        if broadcast is not None:
            self._call(broadcast)

    def counts_on(self, slot: int) -> bool:
        """Whether a running broadcast includes the worker in the slot."""
        return any(
            slot in broadcast.waiting or slot in broadcast.given
            for broadcast in self.by_pool.values()
        )

    def _roster(self) -> set[int]:
        """The slots of the workers now in the common pool. Surplus workers are retired first, so
        that they need not participate."""
        if self.roster.leaves:
            return set()
        pool = self.workers.pools[COMMON_POOL]
        self.workers.retire(pool, pool.living - self.workers.blocked(pool) - pool.target)
        workers = pool.workers
        return {
            slot for slot, one in workers.items() if not one.retiring and one.verdict != "closing"
        }

    def _free(self, broadcast: WorkerBroadcast) -> list[int]:
        """The broadcast's queued tasks on this host that are not assigned to a worker yet."""
        given = set(broadcast.given.values())
        return [oid for oid in self.client.queued_in(broadcast.pool) if oid not in given]

    def _call(self, broadcast: WorkerBroadcast) -> None:
        """Signals the workers that have not had their turn. They request their task between two
        other tasks, or while they are waiting for a broadcast that they have started."""
        if not (broadcast.begun and broadcast.waiting and self._free(broadcast)):
            return
        for slot in broadcast.waiting:
            worker = self.workers.all[slot]
            worker.called = True
            self.client.set_retire(slot, worker.retire_bits)
            self.tasks.wake(slot)
            self.tasks.wake_for_task(slot)

    def take(self, slot: int, request: Request) -> None:
        """Handles a worker's request for its tasks."""
        found: list[int] = []
        worker = self.workers.all.get(slot)
        if worker is not None:  # the bit is cleared first, so that a later task can set it again
            worker.called = False
            self.client.set_retire(slot, worker.retire_bits)
        for broadcast in self.by_pool.values():
            if broadcast.begun and slot in broadcast.waiting and (free := self._free(broadcast)):
                broadcast.waiting.discard(slot)
                broadcast.given[slot] = free[0]
                found.append(free[0])
        self.reply(slot, Reply(request.number, found))

    # -- ends ------------------------------------------------------------------------------------

    def exited(self, slot: int) -> None:
        """Fails the task of a worker that exited before beginning it."""
        for broadcast in list(self.by_pool.values()):
            if slot in broadcast.waiting:
                broadcast.waiting.discard(slot)
                broadcast.surplus += 1
                self._fail_surplus(broadcast)
            oid = broadcast.given.pop(slot, 0)
            if oid and self.client.state(oid) == STATE["QUEUED"]:
                self.workers.fail(oid, ENDED)

    def _fail_surplus(self, broadcast: WorkerBroadcast) -> None:
        """Fails one task for each worker that exited before its turn."""
        if not broadcast.surplus or self.by_pool.get(broadcast.pool) is not broadcast:
            return
        if broadcast.begun:
            for oid in self._free(broadcast)[: broadcast.surplus]:
                self.workers.fail(oid, ENDED)
                broadcast.surplus -= 1
        if broadcast.surplus:  # some of these tasks are not queued here yet
            self.loop.call_later(POLL_S, functools.partial(self._fail_surplus, broadcast))

    def forget(self, pool: int) -> None:
        """Forgets a broadcast whose pool was closed, because its caller has finished or died."""
        broadcast = self.by_pool.pop(pool, None)
        if broadcast is None:
            return
        self.inbound_tasks.withdraw(pool)
        self._close_there(broadcast)

    def _close_there(self, broadcast: WorkerBroadcast) -> None:
        for host_id, (pool, _) in broadcast.remote.items():
            self.send_peer(host_id, CloseRemotePool(pool, False))
