"""Messages between node and manager, which are also the planner's input and output.

Therefore the recorded messages of a connection can be replayed to test the planner. Each message is
frozen, and checks itself when it is created, by this process or by the decoder. So an illegal
message cannot exist.

    node    ──  NodeJoined NodeLost NodeLeaving ClientLost PeerLost                     ─►  manager
            ──  LinkMeasured HostMeasured                                               ─►
            ──  FetchRequested FetchComplete FetchFailed CopyDropped ObjectDeleted      ─►
            ──  OrphansReported OwnerQuery                                              ─►
            ──  ReduceRequested SourceReady SourceFailed StripesComplete
                OperationSlow ExecutionFailed OperationDropped                          ─►
            ──  GroupJoinRequested GroupAdmitted GroupLeft GroupTasksEnded              ─►
            ──  ActorNameClaimed ActorNameQuery ActorNameReleased                       ─►
            ──  PlansRequested                                                          ─►
            ◄─  Credentials NodeAdmitted MembersChanged Leave DeclaredDead ClusterEnded ──
            ◄─  Distribute Withdraw FetchRefused OwnersReassigned OwnerReport           ──
            ◄─  ExecuteReduce Commit OperationFailed Forget                             ──
            ◄─  GroupMembers GroupJoined GroupRefused GroupClosed                       ──
            ◄─  GroupTasksQuery GroupMemberRemoved                                      ──
            ◄─  ActorNameReport PlansReported                                           ──

Terms: an *operation* id is chosen by the requesting node and unique in the cluster; an *epoch*
counts the plans of an operation, from 1 (for copies: all plans in the cluster); the *generation* of
a client slot counts its uses, and the generation of a group counts the groups in the cluster; in a
*rank mask*, bit r stands for rank r.
"""

from __future__ import annotations

from typing import TypeAlias

from hoplite_mp._protocol.actors import (
    ActorNameClaimed,
    ActorNameQuery,
    ActorNameReleased,
    ActorNameReport,
)
from hoplite_mp._protocol.copies import (
    CopyDropped,
    Distribute,
    FetchComplete,
    FetchFailed,
    FetchRefused,
    FetchRequested,
    ObjectDeleted,
    OrphansReported,
    OwnerQuery,
    OwnerReport,
    OwnersReassigned,
    Withdraw,
)
from hoplite_mp._protocol.fields import SHARES, Message, Stripe, counts, shorten
from hoplite_mp._protocol.groups import (
    GroupAdmitted,
    GroupClosed,
    GroupJoined,
    GroupJoinRequested,
    GroupLeft,
    GroupMemberRemoved,
    GroupMembers,
    GroupRefused,
    GroupTasksEnded,
    GroupTasksQuery,
)
from hoplite_mp._protocol.membership import (
    ClusterEnded,
    Credentials,
    DeclaredDead,
    HostMeasured,
    Leave,
    LinkMeasured,
    Member,
    MembersChanged,
    NodeAdmitted,
    NodeJoined,
    NodeLeaving,
    NodeLost,
    PeerLost,
)
from hoplite_mp._protocol.operations import (
    Commit,
    ExecuteReduce,
    ExecutionFailed,
    Forget,
    OperationDropped,
    OperationFailed,
    OperationSlow,
    ReduceRequested,
    SourceFailed,
    SourceReady,
    StripesComplete,
)
from hoplite_mp._protocol.plans import PlansReported, PlansRequested

__all__ = [
    "SHARES",
    "ActorNameClaimed",
    "ActorNameQuery",
    "ActorNameReleased",
    "ActorNameReport",
    "AnyMessage",
    "ClientLost",
    "ClusterEnded",
    "Commit",
    "CopyDropped",
    "Credentials",
    "DeclaredDead",
    "Distribute",
    "ExecuteReduce",
    "ExecutionFailed",
    "FetchComplete",
    "FetchFailed",
    "FetchRefused",
    "FetchRequested",
    "Forget",
    "GroupAdmitted",
    "GroupClosed",
    "GroupJoinRequested",
    "GroupJoined",
    "GroupLeft",
    "GroupMemberRemoved",
    "GroupMembers",
    "GroupRefused",
    "GroupTasksEnded",
    "GroupTasksQuery",
    "HostMeasured",
    "Leave",
    "LinkMeasured",
    "ManagerToNode",
    "Member",
    "MembersChanged",
    "NodeAdmitted",
    "NodeJoined",
    "NodeLeaving",
    "NodeLost",
    "NodeToManager",
    "ObjectDeleted",
    "OperationDropped",
    "OperationFailed",
    "OperationSlow",
    "OrphansReported",
    "OwnerQuery",
    "OwnerReport",
    "OwnersReassigned",
    "PeerLost",
    "PlansReported",
    "PlansRequested",
    "ReduceRequested",
    "SourceFailed",
    "SourceReady",
    "Stripe",
    "StripesComplete",
    "Withdraw",
    "shorten",
]


class ClientLost(Message, frozen=True, tag="ClientLost"):
    """A process has died or left; `generation`: the generation of its client slot."""

    node: int
    client: int
    generation: int

    def __post_init__(self) -> None:
        counts(node=self.node, client=self.client, generation=self.generation)


# ---- the messages that each side may send; decoders reject all others

NodeToManager: TypeAlias = (
    NodeJoined
    | NodeLost
    | NodeLeaving
    | ClientLost
    | PeerLost
    | LinkMeasured
    | HostMeasured
    | FetchRequested
    | FetchComplete
    | FetchFailed
    | CopyDropped
    | ObjectDeleted
    | OrphansReported
    | OwnerQuery
    | ReduceRequested
    | SourceReady
    | SourceFailed
    | StripesComplete
    | OperationSlow
    | ExecutionFailed
    | OperationDropped
    | GroupJoinRequested
    | GroupAdmitted
    | GroupLeft
    | GroupTasksEnded
    | ActorNameClaimed
    | ActorNameQuery
    | ActorNameReleased
    | PlansRequested
)
ManagerToNode: TypeAlias = (
    Credentials
    | NodeAdmitted
    | MembersChanged
    | DeclaredDead
    | ClusterEnded
    | Leave
    | Distribute
    | Withdraw
    | FetchRefused
    | OwnersReassigned
    | OwnerReport
    | ExecuteReduce
    | Commit
    | OperationFailed
    | Forget
    | GroupMembers
    | GroupJoined
    | GroupRefused
    | GroupClosed
    | GroupTasksQuery
    | GroupMemberRemoved
    | ActorNameReport
    | PlansReported
)
AnyMessage: TypeAlias = NodeToManager | ManagerToNode
