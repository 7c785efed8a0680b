"""What a host is started with, and what its supervisor and its node say to each other.

Why it exists: only the supervisor starts processes, and only the node knows which are wanted.
It must never know: how a process is started, why.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import msgspec

from hoplite_mp.protocol.birth import Birth, Environment

__all__ = [
    "GIVEN_UP",
    "NODE_DIED",
    "Exited",
    "FromSupervisor",
    "LanStart",
    "ManagerStarted",
    "NotSpawned",
    "Shutdown",
    "Spawn",
    "Spawned",
    "Start",
    "StartStandby",
    "ToSupervisor",
]


class LanStart(msgspec.Struct, frozen=True, kw_only=True):
    """What a host of a LAN is started with. Never in argv: `key` and `certificate` are secrets."""

    key: bytes
    home: int
    host: str
    peer_fd: int  # listening socket of the node
    addresses: list[str]  # where that is, as others reach it
    ports: tuple[int, int, int]  # (start, stop, step) of those that this host may listen at
    handshake_timeout_s: float
    unauthenticated_max: int
    connect_timeout_s: float
    beat_interval_s: float
    silence_s: float
    tls: bool
    # On the manager's host: its listening socket, the cluster's id and certificate.
    manager_fd: int = -1
    standby: list[str] = []  # where the standby is or will be: "ip:port", best first
    cluster: bytes = b""
    certificate: bytes = b""
    meets_drivers: bool = False  # whether drivers of this host may attach to the node
    # On others: where the manager may be, best first: (address family, socket address).
    manager: list[tuple[int, tuple[Any, ...]]] = []


class Start(msgspec.Struct, frozen=True, kw_only=True):
    """What the supervisor is started with: descriptors by number, and everything by value."""

    sys_path: list[str]
    control_fd: int
    store_fd: int
    event_fd: int
    supervisor_fd: int
    rpc_fd: int
    output_fd: int
    driver_pid: int
    workers: int
    cores: int
    memory_bytes: int
    config: dict[str, Any]
    home: int
    birth: Birth
    lan: LanStart | None = None
    # Of the first workers, by the supervisor for the node: (client slot, rpc, stdout, stderr).
    first_workers: list[tuple[int, int, int, int]] = []


class Spawn(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Node to supervisor, with descriptors (rpc, stdout, stderr): a worker for a client slot.
    `audience`: who hears what it prints, until a task says otherwise (protocol/output.py)."""

    slot: int
    pool: int
    max_tasks: int
    setup: int
    audience: int = 0
    env: Environment = ()
    assigned: dict[str, list[int]] = {}  # indices of resources that are its for life


class Shutdown(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Driver to supervisor: end the host."""


class StartStandby(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Node to supervisor, with the listening socket: a manager in waiting belongs to this host.
    `node`: the number of its node. `certificate` is a secret."""

    node: int
    addresses: list[str]
    cluster: bytes
    certificate: bytes


ToSupervisor: TypeAlias = Spawn | Shutdown | StartStandby


# Exit code of a node, and of its supervisor, when the others have lost this host and it lives:
# it may join again.
GIVEN_UP = 75
NODE_DIED = 76  # and of a host whose node was killed, or has failed


class Spawned(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The worker's process; an Exited follows when it is gone."""

    slot: int
    pid: int


class Exited(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """A worker's end, as os.waitstatus_to_exitcode says: -9 = SIGKILL."""

    slot: int
    pid: int
    code: int


class NotSpawned(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The worker that was asked for cannot be started now."""

    slot: int
    why: str


class ManagerStarted(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The manager has ended, and there is another one; with the connection to it."""


FromSupervisor: TypeAlias = Spawned | NotSpawned | Exited | ManagerStarted
