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
    p.ObjectReport(ID, 1, "ready", 64, b"x" * 64, (0, 2), LAYOUT),
    p.Reconstruct(ID, 2),
    p.Release(ID, 1),
    p.ReplicaStored(ID, 1 << 20, (1 << 63, 5)),
    p.DropReplica(ID),
    p.CopiesQuery((ID, ID[::-1]), 4),
    p.CopiesReport(4),
    p.LocateReplicas(ID, 3),
    p.ReplicaLocations(ID, 3, (0, 1)),
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
    p.WorkersReport(2),
    p.OpenRemotePool(1, 2, 0, ID, 7),
    p.OpenRemotePool(1, 2, 0, ID, 7, (("A", "1"), ("B", None)), (("gpu", 10_000),), True, ID, 5),
    p.OpenRemoteBroadcast(1),
    p.RemoteBroadcastOpened(1, 3, 2),
    p.EndRemoteBroadcast(1, 3),
    p.RemoteBroadcastEnded(1),
    p.StartRemoteActor(1, ID, b"about", "Server", "ps", 2, False, True, 7),
    p.StartRemoteActor(
        1, ID, b"about", "Server", "ps", 2, False, True, 7, (1, 2), (), (("gpu", 1),)
    ),
    p.StartRemoteActor(
        1, ID, b"about", "Server", "", 0, False, False, 7, (), (("A", "1"), ("B", None))
    ),
    p.StoreActorBackup(1, ID, ID, ID, b"about", "Server", "", "ps", 2, 1, True, False, 7, (1, 2)),
    p.ActorBackupStored(1),
    p.DropActorBackup(ID),
    p.DropActorBackup(ID, ended=True),
    p.ActorPoolQuery(ID),
    p.ActorPoolReport(ID, 3),
    p.ActorPoolReport(ID, 0, b"error"),
    p.RemoteActorStarted(1, ID, ""),
    p.RemoteActorStarted(1, ID, "node h1 is leaving the cluster", True),
    p.RemoteActorAck(1),
    p.EndRemoteActor(ID, True),
    p.EndRemoteActor(ID, True, True),
    p.RestartsQuery(1, ID),
    p.RestartsReport(1, 2),
    p.RemotePoolOpened(1, 3, "why not"),
    p.CloseRemotePool(3, True),
    p.RemoveNode(),
    p.PeerLeaving(),
    p.Evacuated(),
    p.CountersQuery(4),
    p.CountersReport(4, {"tasks_done": 5, "bytes_used": 1 << 40}),
    p.OutputLines(3, 1, [b"a line", b""], 1),
    p.OutputAck(100, 1),
    p.OutputFlushRequest(1),
    output.OutputFlushed((1, 2), 1),
    p.Probe(5),
    p.ProbeResponse(5),
    p.PathCongested(),
    p.RelayRequest(1, 1 << 63),
    p.RelayOpened(1, 7001),
    look.ClockQuery(1),
    look.TraceRequest(2, 5, "begin"),
    look.TraceReadRequest(4, 5, 1 << 40),
    look.DumpRequest(5, True),
    look.DiagnosticsResponse(6, 1 << 62, b"data", "why not"),
    g.GroupPart(3, 1, 9, (0, 1), "allreduce", "sum", 0, (PIECE, REMOTE_PIECE), "a mistake"),
    g.GroupAttempt(3, 9, 1, (REDUCE, DISTRIBUTE), (0, 1)),
    g.GroupDone(3, 9, 1, "gone", 1 << 27, 1 << 27, "lost"),
    g.GroupSlow(3, 9, 1, 1 << 24, 1 << 24, 1 << 20, 1 << 20),
    COMMIT,
    g.GroupStart(3, 2, 1, 10),
    g.GroupSkip(3, 10),
    g.GroupEngineFrame(3, 2, 10, 3, 641, b"parts"),
    g.GroupSync(3, 1, 9, COMMIT, ((1, 10),)),
    pp.PeerGroupMessage(3, 2, 5, 0, 1, 7, ID, b"x" * 64, (ID, ID[::-1])),
    pp.PeerGroupMessageAck(3, 5),
    pp.GroupSourceEnded(3, 3, 1),
)
