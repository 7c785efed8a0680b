"""One legal value of every message: what the tests of the vocabulary go through."""

from __future__ import annotations

from typing import get_args

from hoplite_mp.protocol import messages as m

ID = bytes(range(16))
WHOLE = (m.Stripe(0, 0, m.SHARES),)

SAMPLES: tuple[m.AnyMessage, ...] = (
    m.NodeJoined(0, 1, 8),
    m.NodeLost(0, 1),
    m.ClientLost(0, 3, 17),
    m.ReduceRequested(7, 0, 3, (ID, ID), "sum", 2, 0.5, True, 1, "reduce", (1,)),
    m.SourceReady(7, 1, 0),
    m.SourceFailed(7, 1, "ZeroDivisionError: π"),
    m.StripesComplete(7, 1, 0),
    m.ExecutionFailed(7, 1, 0, "gone", (0, 1), "lost"),
    m.OperationDropped(7),
    m.GroupJoinRequested(5, 0, 3, 17, "run-1", 4, None, 64),
    m.GroupAdmitted("run-1", 2, 3),
    m.GroupLeft("run-1", 2, 3, 0, 3, 17),
    m.ExecuteReduce(7, 1, (0, 2), (2, 0), WHOLE, "any"),
    m.Commit(7, 1, (0, 2)),
    m.OperationFailed(7, "reduce", "2 of 3 failed", 1),
    m.Forget(7),
    m.GroupMembers("run-1", 2, 0, 64, (1 << 64) - 2, 1, True),
    m.GroupJoined(5, "run-1", 2, 3, 4, 0, False, True),
    m.GroupRefused(5, "rank 3 is taken"),
    m.GroupClosed("run-1", 2, 0),
)

MESSAGES = get_args(m.AnyMessage)
