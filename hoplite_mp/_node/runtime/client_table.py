"""The table of handlers for requests from processes of this host.

One place shows which component handles which request. Components with many kinds of requests have a
table of their own (`handlers`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hoplite_mp._protocol import actors as actor_requests
from hoplite_mp._protocol import local
from hoplite_mp._protocol.output import MarkLines
from hoplite_mp._protocol.resources import (
    AssignedAsked,
    GiveBack,
    KeepForStream,
    ResourcePlaces,
    TakeResources,
)
from hoplite_mp._protocol.worker_broadcast import BeginRound, EndRound, OpenRound, TakeRound

if TYPE_CHECKING:
    from collections.abc import Callable

    from hoplite_mp._node.requests import Handler
    from hoplite_mp._node.runtime.components import Components

__all__ = ["client_table"]


def client_table(components: Components, driver_name: Callable[[int], int]) -> dict[type, Handler]:
    """The handlers of components that have no table of their own. driver_name: the name under which
    printed lines are sent to the driver in that slot."""
    actors, groups, messages = components.actors, components.groups, components.messages
    resources, rounds = components.resources, components.rounds
    counters, tracing, waits = components.counters, components.tracing, components.waits
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
        # Operations on objects, and Groups.
        local.Collective: lambda slot, request: components.operations.asked(request.ask, slot),
        local.GroupCall: calls,
        local.GroupSend: messages.send,
        local.GroupInbox: messages.inbox,
        local.GroupReceived: messages.received,
        local.GroupJoin: joins,
        local.GroupLeave: lambda slot, ask: groups.leave(ask.ask, slot, ask.number),
        local.GroupAdmit: admits,
        local.GroupBuffers: lambda slot, ask: groups.give_buffers(ask.ask, slot, ask.number),
        local.GroupRefusal: is_refused,
        # Actors, functions for every worker, resources.
        actor_requests.OpenActor: actors.open,
        actor_requests.FindActor: actors.find,
        actor_requests.EndActor: actors.end,
        actor_requests.ActorRestarts: actors.restarts,
        actor_requests.FailActorCalls: actors.fail_calls,
        actor_requests.ActorFailed: actors.constructor_raised,
        actor_requests.ActorBacklog: actors.backlog,
        actor_requests.ActorBegins: actors.begins,
        actor_requests.ActorMayEnd: actors.may_end,
        actor_requests.ActorStateAsked: actors.state_asked,
        actor_requests.KeepActorState: actors.keep_state,
        actor_requests.BindActor: actors.bind,
        OpenRound: rounds.open,
        BeginRound: rounds.begin,
        EndRound: rounds.end,
        TakeRound: rounds.take,
        TakeResources: resources.take,
        GiveBack: resources.give_back,
        KeepForStream: resources.keep_for_stream,
        ResourcePlaces: resources.places,
        AssignedAsked: resources.assigned,
        # Statistics, traces and dumps, for users.
        local.Stats: lambda slot, request: counters.ask(slot, request.number),
        local.TraceBegin: tracing.begin,
        local.TraceEnd: tracing.end,
        local.TracePiece: tracing.piece,
        local.TraceDrop: tracing.drop,
        local.Dump: waits.ask,
        local.DumpRead: waits.piece,
        MarkLines: marks,
    }
