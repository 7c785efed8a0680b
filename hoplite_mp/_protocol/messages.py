"""Messages between node and manager, which are also the planner's input and output.

So a recorded connection is a planner test. Each message is frozen and checks itself when it is
created, by this process or by the decoder: an illegal message cannot exist.

    node    ──  NodeJoined NodeLost NodeLeaving ClientLost PeerLost                   ─►  manager
            ──  LinkMeasured HostMeasured                                             ─►
            ──  FetchRequested FetchComplete FetchFailed CopyDropped ObjectGone       ─►
            ──  HoldingsReported OwnerAsked                                           ─►
            ──  ReduceRequested SourceReady SourceFailed StripesComplete
                OperationSlow ExecutionFailed OperationDropped                        ─►
            ──  GroupJoinRequested GroupAdmitted GroupLeft GroupTasksOver             ─►
            ──  ActorNameClaimed ActorNameAsked ActorNameReleased                     ─►
            ──  PlansRequested                                                            ─►
            ◄─  Credentials NodeAdmitted MembersChanged Leave GivenUp ClusterEnded    ──
            ◄─  Distribute Withdraw FetchRefused OwnersNamed OwnerTold                ──
            ◄─  ExecuteReduce Commit OperationFailed Forget                           ──
            ◄─  GroupMembers GroupJoined GroupRefused GroupClosed                     ──
            ◄─  GroupTasksAsked GroupGivenUp                                          ──
            ◄─  ActorNameHeld PlansReported                                               ──

Terms: an *operation* id is chosen by the requesting node and unique in the cluster; an *epoch*
counts the plans of an operation, from 1 (for copies: of the cluster); the *generation* of a client
slot counts its uses, that of a group counts the groups of the cluster; a *rank mask* has bit r for
rank r.
"""

from __future__ import annotations

from typing import TypeAlias

from hoplite_mp._protocol.actors import (
    ActorNameAsked,
    ActorNameClaimed,
    ActorNameHeld,
    ActorNameReleased,
)
from hoplite_mp._protocol.copies import (
    CopyDropped,
    Distribute,
    FetchComplete,
    FetchFailed,
    FetchRefused,
    FetchRequested,
    HoldingsReported,
    ObjectGone,
    OwnerAsked,
    OwnersNamed,
    OwnerTold,
    Withdraw,
)
from hoplite_mp._protocol.fields import SHARES, Message, Stripe, counts, shorten
from hoplite_mp._protocol.groups import (
    GroupAdmitted,
    GroupClosed,
    GroupGivenUp,
    GroupJoined,
    GroupJoinRequested,
    GroupLeft,
    GroupMembers,
    GroupRefused,
    GroupTasksAsked,
    GroupTasksOver,
)
from hoplite_mp._protocol.membership import (
    ClusterEnded,
    Credentials,
    GivenUp,
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
    "ActorNameAsked",
    "ActorNameClaimed",
    "ActorNameHeld",
    "ActorNameReleased",
    "AnyMessage",
    "ClientLost",
    "ClusterEnded",
    "Commit",
    "CopyDropped",
    "Credentials",
    "Distribute",
    "ExecuteReduce",
    "ExecutionFailed",
    "FetchComplete",
    "FetchFailed",
    "FetchRefused",
    "FetchRequested",
    "Forget",
    "GivenUp",
    "GroupAdmitted",
    "GroupClosed",
    "GroupGivenUp",
    "GroupJoinRequested",
    "GroupJoined",
    "GroupLeft",
    "GroupMembers",
    "GroupRefused",
    "GroupTasksAsked",
    "GroupTasksOver",
    "HoldingsReported",
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
    "ObjectGone",
    "OperationDropped",
    "OperationFailed",
    "OperationSlow",
    "OwnerAsked",
    "OwnerTold",
    "OwnersNamed",
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
    """A process has died or left; `generation` is that of its client slot."""

    node: int
    client: int
    generation: int

    def __post_init__(self) -> None:
        counts(node=self.node, client=self.client, generation=self.generation)


# ---- the messages that each side may send; a decoder accepts nothing else

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
    | ObjectGone
    | HoldingsReported
    | OwnerAsked
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
    | GroupTasksOver
    | ActorNameClaimed
    | ActorNameAsked
    | ActorNameReleased
    | PlansRequested
)
ManagerToNode: TypeAlias = (
    Credentials
    | NodeAdmitted
    | MembersChanged
    | GivenUp
    | ClusterEnded
    | Leave
    | Distribute
    | Withdraw
    | FetchRefused
    | OwnersNamed
    | OwnerTold
    | ExecuteReduce
    | Commit
    | OperationFailed
    | Forget
    | GroupMembers
    | GroupJoined
    | GroupRefused
    | GroupClosed
    | GroupTasksAsked
    | GroupGivenUp
    | ActorNameHeld
    | PlansReported
)
AnyMessage: TypeAlias = NodeToManager | ManagerToNode
