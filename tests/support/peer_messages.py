"""One legal value of every message between nodes, beside those of the samples for a manager."""

from __future__ import annotations

from hoplite_mp._protocol import diagnostics as look
from hoplite_mp._protocol import group_calls as g
from hoplite_mp._protocol import local_groups as pp
from hoplite_mp._protocol import output
from hoplite_mp._protocol import peers as p
from tests.support.messages import DISTRIBUTE, ID, REDUCE

LAYOUT = b"shape (16,) and dtype <f4"
PIECE = g.Piece(0, -1, 64, b"p" * 64)
REMOTE_PIECE = g.Piece(1, 2, 1 << 20, None, ID, LAYOUT)
COMMIT = g.GroupCommit(3, 9, (0, 1), "allreduce", "sum", 0, (PIECE, REMOTE_PIECE), 1)

PEER_SAMPLES: tuple[p.PeerMessage, ...] = (
    p.Acquire(ID, 1),
    p.Described(ID, 1, "ready", 64, b"x" * 64, (0, 2), LAYOUT),
    p.Reconstruct(ID, 2),
    p.Release(ID, 1),
    p.ReplicaStored(ID, 1 << 20, (1 << 63, 5)),
    p.DropReplica(ID),
    p.CopiesAsked((ID, ID[::-1]), 4),
    p.CopiesTold(4),
    p.LocateReplicas(ID, 3),
    p.Located(ID, 3, (0, 1)),
    p.Drop(ID),
    p.RunTask(ID, ID, b"arguments", ID, 3, 10**9, 1, b"train", 2, 1 << 63, 1),
    p.RunTask(
        ID, ID, b"a", ID, 3, 0, 1, b"f", 0, 0, 0, -7, -(1 << 31), (("disk", 5), ("gpu", 10_000)), ID
    ),
    p.TaskEnded(ID, "full"),
    p.ResourcesFreed(),
    p.TaskEnded(ID, "ready", 64, True, b"x" * 64, LAYOUT),
    p.CancelTask(ID),
    p.RecallTasks([ID, ID[::-1]]),
    p.AddPeerWorkers(2),
    p.WorkersNow(2),
    p.OpenRemotePool(1, 2, 0, ID, 7),
    p.OpenRemotePool(1, 2, 0, ID, 7, (("A", "1"), ("B", None)), (("gpu", 10_000),), True, ID, 5),
    p.OpenRemoteBroadcast(1),
    p.RemoteBroadcastOpened(1, 3, 2),
    p.EndRemoteBroadcast(1, 3),
    p.RemoteBroadcastEnded(1),
    p.BeginActor(1, ID, b"about", "Server", "ps", 2, False, True, 7),
    p.BeginActor(1, ID, b"about", "Server", "ps", 2, False, True, 7, (1, 2), (), (("gpu", 1),)),
    p.BeginActor(1, ID, b"about", "Server", "", 0, False, False, 7, (), (("A", "1"), ("B", None))),
    p.KeepActor(1, ID, ID, ID, b"about", "Server", "", "ps", 2, 1, True, False, 7, (1, 2)),
    p.ActorKept(1),
    p.DropActor(ID),
    p.DropActor(ID, ended=True),
    p.ActorSought(ID),
    p.ActorFound(ID, 3),
    p.ActorFound(ID, 0, b"error"),
    p.ActorBegun(1, ID, ""),
    p.ActorBegun(1, ID, "node h1 is leaving the cluster", True),
    p.ActorHeld(1),
    p.EndActorThere(ID, True),
    p.EndActorThere(ID, True, True),
    p.RestartsAsked(1, ID),
    p.RestartsTold(1, 2),
    p.RemotePoolOpened(1, 3, "why not"),
    p.CloseRemotePool(3, True),
    p.RemoveNode(),
    p.Leaving(),
    p.Evacuated(),
    p.CountersAsked(4),
    p.CountersNow(4, {"tasks_done": 5, "bytes_used": 1 << 40}),
    p.Printed(3, 1, [b"a line", b""], 1),
    p.PrintedTaken(100, 1),
    p.LastLinesAsked(1),
    output.LastLinesSent((1, 2), 1),
    p.Probe(5),
    p.Probed(5),
    p.PathCongested(),
    p.RelayAsked(1, 1 << 63),
    p.RelayOpened(1, 7001),
    look.ClockAsked(1),
    look.TraceAsked(2, 5, "begin"),
    look.TraceRead(4, 5, 1 << 40),
    look.DumpAsked(5, True),
    look.LookTold(6, 1 << 62, b"data", "why not"),
    g.GroupPart(3, 1, 9, (0, 1), "allreduce", "sum", 0, (PIECE, REMOTE_PIECE), "a mistake"),
    g.GroupAttempt(3, 9, 1, (REDUCE, DISTRIBUTE), (0, 1)),
    g.GroupDone(3, 9, 1, "gone", 1 << 27, 1 << 27, "lost"),
    g.GroupSlow(3, 9, 1, 1 << 24, 1 << 24, 1 << 20, 1 << 20),
    COMMIT,
    g.GroupStart(3, 2, 1, 10),
    g.GroupSkip(3, 10),
    g.GroupEngineFrame(3, 2, 10, 3, 641, b"parts"),
    g.GroupSync(3, 1, 9, COMMIT, ((1, 10),)),
    pp.GroupSent(3, 2, 5, 0, 1, 7, ID, b"x" * 64, (ID, ID[::-1])),
    pp.GroupSentTaken(3, 5),
    pp.GroupSourceEnded(3, 3, 1),
)
