"""One legal value of every message between nodes and the manager."""

from __future__ import annotations

from typing import get_args

from hoplite_mp._protocol import greetings as g
from hoplite_mp._protocol import membership as r
from hoplite_mp._protocol import messages as m
from hoplite_mp._protocol import terms as t
from hoplite_mp._protocol.groups import GroupEnd
from hoplite_mp._protocol.plans import PlanSummary

ID = bytes(range(16))
WHOLE = (m.Stripe(0, 0, m.SHARES),)

ADDRESSES = ("10.0.0.1:7001", "[fe80::1]:7001")
MEMBER = m.Member(0, 1, 1 << 63, 8, "h0", ADDRESSES, 1 << 40, False, (("gpu", 20_000),))

DISTRIBUTE = m.Distribute(1 << 63, ID, 3, 64 << 20, (0,), (1, 2), WHOLE, "stripes")
REDUCE = m.ExecuteReduce(
    7, 1, (0, 2), (2, 0), WHOLE, "any", "reduce", "sum", 0, (ID, ID), (0, 1), (0,), (ID,)
)
GROUP = m.GroupMembers("run-1", 2, 0, 64, (1 << 64) - 2, 1, True, 3, (0,) * 64, WHOLE)
PLAN = PlanSummary(
    "broadcast", "stripes", "done", 64 << 20, (0,), 1, (1, 2), 2, ((0, 3), (2, m.SHARES - 3)), 2,
    (("stripes", 2, 0.5), ("chain", 1, 0.75)), ((0, 1.25e8, 1.25e8, True),), 0.5, 2, 1, 0.625, "π",
)  # fmt: skip
RUNS = ((0, 3, 17, 0), (1, 4, 1, 2))
GROUP_END = GroupEnd("run-1", 2, (b"t" * 16,), (b"t" * 16, b"u" * 16), RUNS, True)

SAMPLES: tuple[m.AnyMessage | r.Report, ...] = (
    m.NodeJoined(1 << 63, 1, 8, "h0", ADDRESSES, 1 << 40, False, (("disk", 5), ("gpu", 20_000))),
    m.NodeLost(0, 1),
    m.NodeLeaving(0, 1),
    m.ClientLost(0, 3, 17),
    m.PeerLost(1, 0),
    m.LinkMeasured(0, 1, 0.0002, 1.25e8),
    m.HostMeasured(0, 1.25e8, None),
    m.FetchRequested(1, ID, 64 << 20, (0, 2)),
    m.FetchComplete(1, ID, 3),
    m.FetchFailed(1, ID, 3, 0, "connection reset"),
    m.CopyDropped(1, ID),
    m.ObjectDeleted(ID),
    m.OrphansReported(2, 0, (ID, ID[::-1]), (0, 7), (0, 1), (1, 5)),
    m.OwnerQuery(2, ID),
    m.ReduceRequested(
        7,
        0,
        3,
        (ID, ID),
        "sum",
        2,
        0.5,
        True,
        (ID,),
        "reduce",
        (1,),
        (0,),
        (8,),
        (b"<f4",),
        one_of=((1,), (0,)),
    ),
    m.SourceReady(7, 1, 0, 64, b"<f4 (16,) C"),
    m.SourceFailed(7, 1, "ZeroDivisionError: π"),
    m.StripesComplete(7, 1, 0),
    m.OperationSlow(7, 1, 2, 1 << 24, 1 << 24, 1 << 20, 1 << 20),
    m.ExecutionFailed(7, 1, 0, "gone", (0, 1), "lost"),
    m.OperationDropped(7),
    m.GroupJoinRequested(5, 0, 3, 17, "run-1", 4, None, 64),
    m.GroupAdmitted("run-1", 2, 3),
    m.GroupLeft("run-1", 2, 3, 0, 3, 17),
    m.GroupTasksEnded(0, (ID,)),
    m.ActorNameClaimed(5, 0, "ps", ID, True),
    m.ActorNameQuery(5, 0, "ps"),
    m.ActorNameReleased(0, "ps", ID),
    m.PlansRequested(5, 0, ID),
    m.Credentials(b"-----BEGIN CERTIFICATE-----"),
    m.NodeAdmitted(0, 1, (MEMBER,), 1),
    m.MembersChanged((MEMBER,), (0, 3)),
    m.DeclaredDead(1.75),
    m.ClusterEnded(),
    m.Leave(0, 1),
    DISTRIBUTE,
    m.Withdraw(1 << 63, ID, 3),
    m.FetchRefused(ID, "lost", "no living node holds it"),
    m.OwnersReassigned(0, (ID, ID[::-1]), (2, 1 << 16), ((2, 7, 3, 1), ()), ((3,), ())),
    m.OwnerReport(ID, 2),
    REDUCE,
    m.Commit(7, 1, (0, 2)),
    m.OperationFailed(7, "reduce", "2 of 3 failed", 1),
    m.Forget(7),
    GROUP,
    m.GroupJoined(5, "run-1", 2, 3, 4, 0, False, True),
    m.GroupRefused(5, "rank 3 is taken"),
    m.GroupClosed("run-1", 2, 0),
    m.GroupTasksQuery((ID, ID[::-1])),
    m.GroupMemberRemoved("run-1", 2, 0, 3, 3, 17, "nobody will come"),
    m.ActorNameReport(5, "ps", ID),
    m.PlansReported(5, (PLAN,)),
    r.NodeReturned(0, 1, 3, (MEMBER,), 7, 8, 9),
    r.ReportedCopy(1, ID, 64 << 20),
    r.ReportedDistribute(1, DISTRIBUTE, True),
    r.ReportedReduce(1, REDUCE, False),
    r.OperationEnded(1, m.Commit(7, 1, (0, 2))),
    r.ReportedGroup(0, GROUP, ((1, 3, 17),), (0,), (0,)),
    GROUP_END,
    r.ReportedOwners(0, (ID,), (2,)),
    r.ReportComplete(0),
)

MESSAGES = get_args(m.AnyMessage | r.Report)

LISTS = (t.Hosts(1 << 32 | 1, (0, 1, 2)), t.Hosts(1 << 32 | 2, (0, 2)))
KNOWLEDGE = t.Knowledge(1, 0, LISTS)
TERMS_TO_NODE = [
    t.StandbyAnnounced(("10.0.0.2:7001", "[fd00::2]:7001")),
    t.LeaderHeartbeat(1, 0, 1 << 50, LISTS),
    t.LeaderHeartbeat(1, 0, 1 << 50),
    t.VoteRequest(2, 1 << 55),
    t.PromoteResponse(False, "not now"),
]
TERMS_TO_MANAGER = [
    t.LeaderHeartbeatAck(2, 1, 1 << 50, 1 << 32 | 2),
    t.VoterState(2, KNOWLEDGE),
    t.VoterState(2, t.Knowledge(0, None, ())),
    t.VoteGranted(2, 3, KNOWLEDGE),
    t.VoterEnded(2),
    t.NoLeader(2),
    t.Superseded(2),
    t.Promote(anyway=True),
]

GREETINGS = [
    g.Hello("node", bytes(32), ID),
    g.Challenge("manager", bytes(range(32)), ID),
    g.Proof(b"k" * 32),
    g.Welcome(b"k" * 32),
    g.Refused("token", "why"),
    g.Introduction(1 << 63, {"python": "3.11.2", "byte order": "little"}, 3, 5, 7),
]
