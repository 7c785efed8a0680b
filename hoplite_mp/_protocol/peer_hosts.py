"""Messages between nodes about their hosts: workers, pools, leaving, counters, paths."""

from __future__ import annotations

from hoplite_mp._common.ids import ID_BYTES
from hoplite_mp._protocol.fields import (
    NO_OBJECT,
    TEXT_CHARS_MAX,
    Message,
    amounts,
    between,
    counts,
    environment,
    flags,
    text,
)
from hoplite_mp._protocol.resources import Demand
from hoplite_mp._protocol.spawning import Environment

__all__ = [
    "AddPeerWorkers",
    "CloseRemotePool",
    "CountersQuery",
    "CountersReport",
    "EndRemoteBroadcast",
    "Evacuated",
    "OpenRemoteBroadcast",
    "OpenRemotePool",
    "PathCongested",
    "PeerLeaving",
    "Probe",
    "ProbeResponse",
    "RelayOpened",
    "RelayRequest",
    "RemoteBroadcastEnded",
    "RemoteBroadcastOpened",
    "RemotePoolOpened",
    "RemoveNode",
    "ResourcesFreed",
    "WorkersReport",
]

COUNTERS_MAX = 256
_U16_MAX = (1 << 16) - 1


class AddPeerWorkers(Message, frozen=True, tag="AddWorkers"):
    """Starts `count` more workers on the receiver's host."""

    count: int

    def __post_init__(self) -> None:
        between("count", self.count, 1, _U16_MAX)


class WorkersReport(Message, frozen=True, tag="WorkersNow"):
    """The sender's host has `count` workers in its common pool."""

    count: int

    def __post_init__(self) -> None:
        between("count", self.count, 0, _U16_MAX)


class ResourcesFreed(Message, frozen=True, tag="ResourcesFreed"):
    """Resources on the sender's host have become free since it refused a task from the receiver's
    host (TaskEnded "full")."""


class OpenRemotePool(Message, frozen=True, tag="OpenFarPool"):
    """Starts workers on the receiver's host that run only the sender's tasks. `setup`: the object
    with (initializer, initargs), or zeros. `output_owner`: the owner of their output before their
    first task, as in RunTask. `env`: changes to their environment. `demand`: resources of each
    worker for its lifetime. `at_once`: fail if these are not free now. `team`: the id of the `spmd`
    call if the workers run its peers, else NO_OBJECT. `team_size`: the number of its peers on all
    hosts. Answered by RemotePoolOpened."""

    number: int
    workers: int
    max_tasks: int
    setup: bytes
    output_owner: int = 0
    env: Environment = ()
    demand: Demand = ()
    at_once: bool = False
    team: bytes = NO_OBJECT
    team_size: int = 0

    def __post_init__(self) -> None:
        environment("env", self.env)
        flags(at_once=self.at_once)
        counts(number=self.number, max_tasks=self.max_tasks, output_owner=self.output_owner)
        between("workers", self.workers, 1, _U16_MAX)
        if len(self.setup) != ID_BYTES:
            raise ValueError(f"setup must be {ID_BYTES} bytes, not {self.setup!r}")
        if len(self.team) != ID_BYTES:
            raise ValueError(f"team must be {ID_BYTES} bytes, not {self.team!r}")
        between("team_size", self.team_size, 0, _U16_MAX)
        amounts("demand", self.demand)


class RemotePoolOpened(Message, frozen=True, tag="FarPoolOpened"):
    """The number of the pool on the sender's host; `error`: the reason for a failure."""

    number: int
    pool: int
    error: str = ""

    def __post_init__(self) -> None:
        counts(number=self.number)
        between("pool", self.pool, 0, _U16_MAX)
        text("error", self.error, TEXT_CHARS_MAX)


class CloseRemotePool(Message, frozen=True, tag="CloseFarPool"):
    """Closes the sender's pool on the receiver's host. Its workers stop when they become idle or,
    if `kill`, immediately."""

    pool: int
    kill: bool

    def __post_init__(self) -> None:
        between("pool", self.pool, 1, _U16_MAX)
        flags(kill=self.kill)


class OpenRemoteBroadcast(Message, frozen=True, tag="OpenFarRound"):
    """Requests that each worker now in the common pool of the receiver's host run one task from
    the sender (`Cluster.run`), between two other tasks. Answered by RemoteBroadcastOpened;
    ended by CloseRemotePool."""

    number: int

    def __post_init__(self) -> None:
        counts(number=self.number)


class RemoteBroadcastOpened(Message, frozen=True, tag="FarRoundOpened"):
    """The broadcast's pool on the sender's host, and the number of workers that will each run one
    task; 0: none, and there is no pool."""

    number: int
    pool: int
    workers: int

    def __post_init__(self) -> None:
        counts(number=self.number)
        between("pool", self.pool, 0, _U16_MAX)
        between("workers", self.workers, 0, _U16_MAX)


class EndRemoteBroadcast(Message, frozen=True, tag="EndFarRound"):
    """Ends the broadcast in that pool on the receiver's host: no further task begins. Answered by
    RemoteBroadcastEnded."""

    number: int
    pool: int

    def __post_init__(self) -> None:
        counts(number=self.number)
        between("pool", self.pool, 1, _U16_MAX)


class RemoteBroadcastEnded(Message, frozen=True, tag="FarRoundEnded"):
    """The answer to EndRemoteBroadcast: no further task of that broadcast begins."""

    number: int

    def __post_init__(self) -> None:
        counts(number=self.number)


class RemoveNode(Message, frozen=True, tag="RemoveNode"):
    """Makes the receiver leave the cluster when its work is done."""


class PeerLeaving(Message, frozen=True, tag="Leaving"):
    """The sender accepts no more tasks. Answered by Evacuated."""


class Evacuated(Message, frozen=True, tag="Evacuated"):
    """The sender no longer needs any object of which the receiver has the only copy."""


class CountersQuery(Message, frozen=True, tag="CountersAsked"):
    """Requests the receiver's counters. Answered by CountersReport."""

    number: int

    def __post_init__(self) -> None:
        counts(number=self.number)


class CountersReport(Message, frozen=True, tag="CountersNow"):
    """The sender's counters, by name (_node/diagnostics/counters.py)."""

    number: int
    counts: dict[str, int]

    def __post_init__(self) -> None:
        counts(number=self.number)
        between("number of counters", len(self.counts), 0, COUNTERS_MAX)


class Probe(Message, frozen=True, tag="Probe"):
    """Measures the round trip of a message. The receiver immediately answers with ProbeResponse."""

    number: int

    def __post_init__(self) -> None:
        counts(number=self.number)


class ProbeResponse(Message, frozen=True, tag="Probed"):
    """The answer to the probe with that number."""

    number: int

    def __post_init__(self) -> None:
        counts(number=self.number)


class PathCongested(Message, frozen=True, tag="HeldUp"):
    """Bytes for the receiver are waiting in the sender's sockets, but the sender's link is not
    saturated. The receiver, which knows its own link, can determine whether the path between them
    is slow (_node/peers/path_estimator.py)."""


class RelayRequest(Message, frozen=True, tag="RelayAsked"):
    """Requests a relay to the node of the host with that id, which the sender cannot reach.
    Answered by RelayOpened."""

    number: int
    host_id: int

    def __post_init__(self) -> None:
        counts(number=self.number, host_id=self.host_id)


class RelayOpened(Message, frozen=True, tag="RelayOpened"):
    """A port on the sender's host that is relayed to the other node; 0: the sender cannot reach
    that node either."""

    number: int
    port: int

    def __post_init__(self) -> None:
        counts(number=self.number)
        between("port", self.port, 0, _U16_MAX)
