"""Which room of a node takes which message of another node.

Why it exists: one table to read instead of many registrations.
It must never know: what a message means, how it came.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hoplite_mp.protocol.looking import ClockAsked, DumpAsked, LookTold, TraceAsked, TraceRead
from hoplite_mp.protocol.peers import (
    Acquire,
    AddWorkers,
    CancelTask,
    CloseFarPool,
    CopiesAsked,
    CopiesTold,
    CountersAsked,
    CountersNow,
    Described,
    Drop,
    EndFarRound,
    Evacuated,
    FarPoolOpened,
    FarRoundEnded,
    FarRoundOpened,
    Kept,
    LastLinesAsked,
    LastLinesSent,
    Leaving,
    LetGo,
    Locate,
    Located,
    MakeAgain,
    OpenFarPool,
    OpenFarRound,
    Printed,
    PrintedTaken,
    Probe,
    Probed,
    RecallTasks,
    RelayAsked,
    RelayOpened,
    Release,
    RemoveNode,
    ResourcesFreed,
    RunTask,
    TaskEnded,
    WorkersNow,
)
from hoplite_mp.protocol.point_to_point import GroupSent, GroupSentTaken, GroupSourceEnded

if TYPE_CHECKING:
    from hoplite_mp.node.lan import Lan

__all__ = ["take"]


def take(lan: Lan, home: int, message: Any) -> None:
    """Hands it to the room that it is for."""
    node = lan.node
    match message:
        case Acquire():
            node.exports.acquire(home, message)
        case Release():
            if not node.guests.release(home, message):
                lan.recovering.released(home, message)
                lan.kept.released(home, message)
        case MakeAgain():
            node.exports.make_again(home, message)
        case Drop():
            node.exports.drop(message.object)
        case Kept():
            lan.kept.kept(home, message)
        case Locate():
            lan.locations.locate(home, message)
        case Located():
            lan.locations.located(message)
        case LetGo():
            lan.kept.let_go(message.object)
        case CopiesAsked() | CopiesTold():
            lan.recovering.heard(home, message)
        case Described():
            node.imports.described(message)
        case RunTask():
            node.guests.run(home, message)
        case TaskEnded():
            node.delegation.ended(home, message)
        case CancelTask():
            node.guests.cancel(message.task)
        case RecallTasks():
            node.guests.recall(home, message.tasks)
        case CountersAsked():
            node.counters.asked(home, message)
        case CountersNow() | LookTold():
            peer = lan.peers.by_home.get(home)
            if peer is not None:
                node.questions.told(home, peer.member.node, message)
        case Probe():
            lan.peers.send(home, Probed(message.number))
        case Probed():
            lan.probing.answered(home, message)
        case RelayAsked():
            lan.peers.relays.asked(home, message)
        case RelayOpened():
            lan.peers.relays.opened(home, message)
        case ClockAsked():
            node.tracing.clock(home, message)
        case TraceAsked():
            node.tracing.asked(home, message)
        case TraceRead():
            node.tracing.read(home, message)
        case DumpAsked():
            node.waits.asked(home, message)
        case AddWorkers():
            if not node.host.roster.leaves:
                lan.tell_workers(node.workers.grow(message.count))
        case ResourcesFreed():
            node.resources.freed_there(home)
        case WorkersNow():
            lan.have_workers(home, message.count)
        case OpenFarPool():
            lan.far_pools.asked(home, message)
        case FarPoolOpened():
            lan.far_pools.opened(home, message)
        case CloseFarPool():
            lan.far_pools.closed(home, message)
        case OpenFarRound() | FarRoundOpened() | EndFarRound() | FarRoundEnded():
            node.rounds.receive(home, message)
        case Printed():
            lan.far_output.printed(home, message)
        case PrintedTaken():
            lan.far_output.taken(home, message)
        case LastLinesAsked():
            lan.far_output.last_lines_asked(home, message)
        case LastLinesSent():
            lan.far_output.last_lines_sent(home, message)
            lan.drivers.look_at_leaving()
        case RemoveNode():
            lan.draining.begin()
        case Leaving():
            lan.have_workers(home, 0)
            node.delegation.drain(home)
            lan.far_actors.leaves(home)
            lan.draining.leaves(home)
        case Evacuated():
            lan.draining.evacuated(home)
        case _ if lan.far_actors.receive(home, message) or lan.spares.receive(home, message):
            pass
        case GroupSent() | GroupSentTaken() | GroupSourceEnded():
            peer = lan.peers.by_home.get(home)
            if peer is not None:
                node.messages.receive(peer.member.node, message)
        case _:  # a call of a group
            peer = lan.peers.by_home.get(home)
            if peer is not None:
                lan.group_calls.receive(peer.member.node, message)
