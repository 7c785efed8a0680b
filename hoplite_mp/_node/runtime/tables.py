"""The tables of handlers for messages from clients, peers and the manager, by message type."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hoplite_mp._protocol import actors as actor_requests
from hoplite_mp._protocol import diagnostics, local, peers
from hoplite_mp._protocol.local import (
    BeginWorkerBroadcast,
    EndWorkerBroadcast,
    GetBroadcastTasks,
    OpenWorkerBroadcast,
)
from hoplite_mp._protocol.messages import (
    ActorNameReport,
    Credentials,
    Distribute,
    FetchRefused,
    Leave,
    MembersChanged,
    NodeAdmitted,
    OwnerReport,
    OwnersReassigned,
    PlansReported,
    Withdraw,
)
from hoplite_mp._protocol.output import MarkOutput
from hoplite_mp._protocol.resources import (
    AcquireResources,
    AssignedResources,
    ReleaseResources,
    ResourcePlaces,
    RetainResources,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from hoplite_mp._node.diagnostics.counters import Counters
    from hoplite_mp._node.diagnostics.tracing import Tracing
    from hoplite_mp._node.diagnostics.waits import WaitReports
    from hoplite_mp._node.dispatch import Handler, ManagerHandler, PeerHandler
    from hoplite_mp._node.lineage.recovery import Recovery
    from hoplite_mp._node.manager_link.membership import NodeMembership
    from hoplite_mp._node.objects.exports import Exports
    from hoplite_mp._node.objects.import_requests import Locations
    from hoplite_mp._node.objects.imports import Imports
    from hoplite_mp._node.objects.replicas import Replicas
    from hoplite_mp._node.output.remote_output import RemoteOutput
    from hoplite_mp._node.peers.relays import Relays
    from hoplite_mp._node.runtime.components import Components
    from hoplite_mp._node.tasks.inbound_tasks import InboundTasks
    from hoplite_mp._node.tasks.outbound_tasks import OutboundTasks
    from hoplite_mp._node.tasks.remote_workers import PoolRequests
    from hoplite_mp._node.tasks.resources import Resources
    from hoplite_mp._node.tasks.worker_broadcast import WorkerBroadcasts
    from hoplite_mp._node.tasks.workers import Workers

__all__ = [
    "ANSWERS",
    "client_table",
    "ignored_alone",
    "inspection_table",
    "manager_table",
    "object_table",
    "task_table",
]


# The types of answers. Each answer contains the number of its question (_node/questions.py).
ANSWERS = (
    diagnostics.DiagnosticsResponse,
    peers.RemoteActorStarted,
    peers.CopiesReport,
    peers.CountersReport,
    peers.RemotePoolOpened,
    peers.RemoteBroadcastEnded,
    peers.ReplicaLocations,
    peers.ProbeResponse,
    peers.RelayOpened,
    peers.RestartsReport,
)


def object_table(
    exports: Exports,
    imports: Imports,
    inbound_tasks: InboundTasks,
    replicas: Replicas,
    locations: Locations,
    recovery: Recovery,
) -> dict[type, PeerHandler]:
    """The handlers of messages about objects: holders, copies, reconstruction."""

    def releases(host_id: int, message: peers.Release) -> None:
        if not inbound_tasks.release(host_id, message):
            recovery.released(host_id, message)

    return {
        peers.Acquire: exports.acquire,
        peers.Release: releases,
        peers.Reconstruct: exports.make_again,
        peers.Drop: lambda host_id, message: exports.drop(message.object),
        peers.ObjectReport: lambda host_id, message: imports.described(message),
        peers.ReplicaStored: exports.kept,
        peers.DropReplica: lambda host_id, message: replicas.let_go(message.object),
        peers.LocateReplicas: locations.locate,
        peers.CopiesQuery: recovery.replica_query.asked,
    }


def task_table(
    inbound_tasks: InboundTasks,
    outbound_tasks: OutboundTasks,
    workers: Workers,
    pool_requests: PoolRequests,
    worker_broadcasts: WorkerBroadcasts,
    resources: Resources,
    membership: NodeMembership,
) -> dict[type, PeerHandler]:
    """The handlers of messages about tasks and workers."""
    return {
        peers.RunTask: inbound_tasks.run,
        peers.TaskEnded: outbound_tasks.ended,
        peers.CancelTask: lambda host_id, message: inbound_tasks.cancel(message.task),
        peers.RecallTasks: lambda host_id, message: inbound_tasks.recall(host_id, message.tasks),
        peers.OpenRemotePool: pool_requests.asked,
        peers.CloseRemotePool: lambda host_id, message: workers.close_lent(
            host_id, message.pool, message.kill
        ),
        peers.OpenRemoteBroadcast: worker_broadcasts.asked,
        peers.RemoteBroadcastOpened: worker_broadcasts.opened,
        peers.EndRemoteBroadcast: worker_broadcasts.end_here,
        peers.ResourcesFreed: lambda host_id, message: resources.freed_there(host_id),
        peers.AddPeerWorkers: membership.grow,
    }


def inspection_table(
    counters: Counters,
    tracing: Tracing,
    waits: WaitReports,
    remote_output: RemoteOutput,
    relays: Relays,
) -> dict[type, PeerHandler]:
    """The handlers of messages about statistics, traces, dumps, workers' output, and relays."""
    return {
        peers.CountersQuery: counters.asked,
        diagnostics.ClockQuery: tracing.clock,
        diagnostics.TraceRequest: tracing.asked,
        diagnostics.TraceReadRequest: tracing.read,
        diagnostics.DumpRequest: waits.asked,
        peers.OutputLines: remote_output.printed,
        peers.OutputAck: remote_output.taken,
        peers.RelayRequest: relays.asked,
    }


def client_table(components: Components, driver_name: Callable[[int], int]) -> dict[type, Handler]:
    """The handlers of requests that every node serves. driver_name: returns the output owner (the
    name to which printed lines are addressed) of the driver in a slot."""
    actors, groups, messages = components.actors, components.groups, components.messages
    resources, worker_broadcasts = components.resources, components.worker_broadcasts
    counters, waits = components.counters, components.waits
    members_max = components.host.config.group_members_max

    def joins(slot: int, request: Any) -> None:
        groups.join(request.ask, slot, request.number, members_max)

    def admits(slot: int, request: Any) -> None:
        groups.admitted(request.ask.name, request.ask.generation, request.ask.rank)

    def calls(slot: int, request: Any) -> None:
        if groups.hosts is not None:
            groups.hosts.member_called(slot, request.ask)

    def is_refused(slot: int, request: Any) -> None:
        groups.reply(slot, local.Reply(request.number, groups.why(slot, request.ask)))

    def marks(slot: int, request: Any) -> None:
        components.output.mark_lines(request.ask.number, driver_name(slot))

    return {
        **components.leases.handlers,
        **components.pool_requests.handlers,
        **components.import_requests.handlers,
        **components.join_waiters.handlers,
        **components.plan_requests.handlers,
        **components.tracing.handlers,
        # Collectives on refs, and Groups.
        local.Collective: lambda slot, request: components.operations.asked(request.ask, slot),
        local.GroupCall: calls,
        local.GroupSend: messages.send,
        local.GroupInbox: messages.inbox,
        local.GroupMessageAck: messages.received,
        local.GroupJoin: joins,
        local.GroupLeave: lambda slot, request: groups.leave(request.ask, slot, request.number),
        local.GroupAdmit: admits,
        local.GroupBuffers: lambda slot, request: groups.give_buffers(
            request.ask, slot, request.number
        ),
        local.GroupRefusal: is_refused,
        # Actors, functions for every worker, resources.
        actor_requests.OpenActor: actors.open,
        actor_requests.FindActor: actors.find,
        actor_requests.EndActor: actors.end,
        actor_requests.ActorRestarts: actors.restarts,
        actor_requests.FailActorCalls: actors.fail_calls,
        actor_requests.ActorFailed: actors.constructor_raised,
        actor_requests.ActorBacklog: actors.backlog,
        actor_requests.ActorReady: actors.begins,
        actor_requests.ActorEndRequest: actors.may_end,
        actor_requests.LoadActorState: actors.state_asked,
        actor_requests.SaveActorState: actors.keep_state,
        actor_requests.BindActor: actors.bind,
        OpenWorkerBroadcast: worker_broadcasts.open,
        BeginWorkerBroadcast: worker_broadcasts.begin,
        EndWorkerBroadcast: worker_broadcasts.end,
        GetBroadcastTasks: worker_broadcasts.take,
        AcquireResources: resources.take,
        ReleaseResources: resources.give_back,
        RetainResources: resources.keep_for_stream,
        ResourcePlaces: resources.places,
        AssignedResources: resources.assigned,
        # Statistics, traces and dumps, for users.
        local.Stats: lambda slot, request: counters.ask(slot, request.number),
        local.Dump: waits.ask,
        local.DumpRead: waits.piece,
        MarkOutput: marks,
    }


def manager_table(components: Components) -> dict[type, ManagerHandler]:
    """The handlers of messages from the manager that every node receives."""
    return {
        **components.management.manager_handlers,
        **components.operations.manager_handlers,
        **components.groups.manager_handlers,
        ActorNameReport: components.actors.name_held,
        PlansReported: components.plan_requests.answer,
    }


def ignored_alone() -> dict[type, ManagerHandler]:
    """Handlers that ignore the manager's messages about other hosts, for a cluster of one host."""

    def ignore(_: Any) -> None:
        """Does nothing, because this node is the only one in its cluster."""

    about_hosts = (
        Credentials,
        Distribute,
        FetchRefused,
        Leave,
        MembersChanged,
        NodeAdmitted,
        OwnerReport,
        OwnersReassigned,
        Withdraw,
    )
    return dict.fromkeys(about_hosts, ignore)
