"""What nodes say to each other of their hosts: workers, pools of workers, leaving, counters.

This module must never know how messages travel, nor what anybody does with them.
"""

from __future__ import annotations

from hoplite_mp.ids import ID_BYTES
from hoplite_mp.protocol.birth import Environment
from hoplite_mp.protocol.fields import (
    TEXT_CHARS_MAX,
    Message,
    amounts,
    between,
    counts,
    environment,
    flags,
    text,
)
from hoplite_mp.protocol.resources import Wanted

__all__ = [
    "AddWorkers",
    "CloseFarPool",
    "CountersAsked",
    "CountersNow",
    "EndFarRound",
    "Evacuated",
    "FarPoolOpened",
    "FarRoundEnded",
    "FarRoundOpened",
    "Leaving",
    "OpenFarPool",
    "OpenFarRound",
    "Probe",
    "Probed",
    "RelayAsked",
    "RelayOpened",
    "RemoveNode",
    "ResourcesFreed",
    "WorkersNow",
]

COUNTERS_MAX = 256
_U16_MAX = (1 << 16) - 1


class AddWorkers(Message, frozen=True):
    """The receiver's host shall have so many workers more."""

    count: int

    def __post_init__(self) -> None:
        between("count", self.count, 1, _U16_MAX)


class WorkersNow(Message, frozen=True):
    """The sender's host has so many workers for everybody's tasks."""

    count: int

    def __post_init__(self) -> None:
        between("count", self.count, 0, _U16_MAX)


class ResourcesFreed(Message, frozen=True):
    """Some of the resources that the sender's host has are free again, since it has refused a task
    of the receiver's (TaskEnded "full")."""


class OpenFarPool(Message, frozen=True):
    """Workers on the receiver's host for the sender's tasks alone. `setup`: the object with
    (initializer, initargs), or zeros. `audience`: of what they print before their first task, as
    in RunTask. `env`: changes of their environment. `demand`: resources that each worker keeps for
    life. Answered by FarPoolOpened."""

    number: int
    workers: int
    max_tasks: int
    setup: bytes
    audience: int = 0
    env: Environment = ()
    demand: Wanted = ()

    def __post_init__(self) -> None:
        environment("env", self.env)
        counts(number=self.number, max_tasks=self.max_tasks, audience=self.audience)
        between("workers", self.workers, 1, _U16_MAX)
        if len(self.setup) != ID_BYTES:
            raise ValueError(f"setup must be {ID_BYTES} bytes, not {self.setup!r}")
        amounts("demand", self.demand)


class FarPoolOpened(Message, frozen=True):
    """The number of the pool on the sender's host; `error`: there is none."""

    number: int
    pool: int
    error: str = ""

    def __post_init__(self) -> None:
        counts(number=self.number)
        between("pool", self.pool, 0, _U16_MAX)
        text("error", self.error, TEXT_CHARS_MAX)


class CloseFarPool(Message, frozen=True):
    """The sender's pool on the receiver's host: its workers end when idle; `kill`: at once."""

    pool: int
    kill: bool

    def __post_init__(self) -> None:
        between("pool", self.pool, 1, _U16_MAX)
        flags(kill=self.kill)


class OpenFarRound(Message, frozen=True):
    """The workers that the receiver's host has now in its common pool shall each run one task of
    the sender's (`Cluster.run`), between two others. Answered by FarRoundOpened; CloseFarPool ends
    it."""

    number: int

    def __post_init__(self) -> None:
        counts(number=self.number)


class FarRoundOpened(Message, frozen=True):
    """The number of the round's pool on the sender's host, and how many workers will each take one
    task of it; 0: nobody, and there is no pool."""

    number: int
    pool: int
    workers: int

    def __post_init__(self) -> None:
        counts(number=self.number)
        between("pool", self.pool, 0, _U16_MAX)
        between("workers", self.workers, 0, _U16_MAX)


class EndFarRound(Message, frozen=True):
    """No task of the round in that pool of the receiver's, which closes, is to begin any more.
    Answered by FarRoundEnded."""

    number: int
    pool: int

    def __post_init__(self) -> None:
        counts(number=self.number)
        between("pool", self.pool, 1, _U16_MAX)


class FarRoundEnded(Message, frozen=True):
    """So it is."""

    number: int

    def __post_init__(self) -> None:
        counts(number=self.number)


class RemoveNode(Message, frozen=True):
    """The receiver shall leave the cluster when its work is done."""


class Leaving(Message, frozen=True):
    """The sender takes no more tasks. The answer is Evacuated."""


class Evacuated(Message, frozen=True):
    """The sender needs nothing of the receiver that nobody else holds."""


class CountersAsked(Message, frozen=True):
    """What does the receiver count? Answered by CountersNow."""

    number: int

    def __post_init__(self) -> None:
        counts(number=self.number)


class CountersNow(Message, frozen=True):
    """The sender's counters, by name (node/inspect/counters.py)."""

    number: int
    counts: dict[str, int]

    def __post_init__(self) -> None:
        counts(number=self.number)
        between("number of counters", len(self.counts), 0, COUNTERS_MAX)


class Probe(Message, frozen=True):
    """To be answered at once: how long does a message take?"""

    number: int

    def __post_init__(self) -> None:
        counts(number=self.number)


class Probed(Message, frozen=True):
    """The answer to the probe of that number."""

    number: int

    def __post_init__(self) -> None:
        counts(number=self.number)


class RelayAsked(Message, frozen=True):
    """The sender cannot reach the node of the host with that home id: does the receiver? Answered
    by RelayOpened."""

    number: int
    host: int

    def __post_init__(self) -> None:
        counts(number=self.number, host=self.host)


class RelayOpened(Message, frozen=True):
    """A port of the sender's that leads to that node; 0: it does not reach it either."""

    number: int
    port: int

    def __post_init__(self) -> None:
        counts(number=self.number)
        between("port", self.port, 0, _U16_MAX)
