"""Start parameters of a host, and messages between its supervisor and its node.

Only the supervisor starts processes, and the node decides which processes are needed.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import msgspec

from hoplite_mp._protocol.secret import Secret

__all__ = [
    "GIVEN_UP",
    "NODE_DIED",
    "Environment",
    "Exited",
    "FromSupervisor",
    "InheritedContext",
    "LanStart",
    "ManagerStarted",
    "Shutdown",
    "Spawn",
    "SpawnFailed",
    "Spawned",
    "Start",
    "StartStandby",
    "ToSupervisor",
]


class LanStart(msgspec.Struct, frozen=True, kw_only=True):
    """Start parameters of a host on a LAN. They are never in argv, because `key` and `certificate`
    are secrets."""

    key: Secret
    host_id: int
    host: str
    peer_fd: int  # listening socket of the node
    addresses: list[str]  # addresses of that socket for other hosts
    ports: tuple[int, int, int]  # (start, stop, step) of the ports on which this host may listen
    handshake_timeout_s: float
    pending_handshakes_max: int
    connect_timeout_s: float
    heartbeat_interval_s: float
    heartbeat_timeout_s: float
    tls: bool
    # On the manager's host: the manager's listening socket, the cluster's id and certificate.
    manager_fd: int = -1
    standby: list[str] = []  # addresses of the present or future standby: "ip:port", best first
    cluster: bytes = b""
    certificate: bytes = b""
    accepts_drivers: bool = False  # whether drivers on this host may attach to the node
    # On other hosts: addresses of the manager, best first: (address family, socket address).
    manager: list[tuple[int, tuple[Any, ...]]] = []


class Start(msgspec.Struct, frozen=True, kw_only=True):
    """Start parameters of the supervisor. Fields whose names end with `_fd` are numbers of
    descriptors."""

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
    host_id: int
    inherited_settings: InheritedContext
    lan: LanStart | None = None
    # Set by the supervisor for the node: (client slot, rpc, stdout, stderr) of the first workers.
    first_workers: list[tuple[int, int, int, int]] = []


class Spawn(msgspec.Struct, frozen=True, tag="Spawn", array_like=True):
    """Node to supervisor, with descriptors (rpc, stdout, stderr): start a worker for a client slot.
    `output_owner`: the owner of its output before its first task (_protocol/output.py)."""

    slot: int
    pool: int
    max_tasks: int
    setup: int
    output_owner: int = 0
    env: Environment = ()
    assigned: dict[str, list[int]] = {}  # indices of its resources, for its lifetime
    # Number of processes of the worker's pool on this host, which share the cores
    # (_supervisor/environment.py); 0: each uses one thread.
    processes: int = 0


class Shutdown(msgspec.Struct, frozen=True, tag="Shutdown", array_like=True):
    """Driver to supervisor: shut the host down."""


class StartStandby(msgspec.Struct, frozen=True, tag="StartStandby", array_like=True):
    """Node to supervisor, with the listening socket: start the standby on this host. `node`: the
    number of the host's node. `certificate` is a secret."""

    node: int
    addresses: list[str]
    cluster: bytes
    certificate: bytes


ToSupervisor: TypeAlias = Spawn | Shutdown | StartStandby


# Exit code of a node and its supervisor when this host was declared dead while it was running. The
# host may rejoin.
GIVEN_UP = 75
NODE_DIED = 76  # exit code of the supervisor when its node was killed or has failed


class Spawned(msgspec.Struct, frozen=True, tag="Spawned", array_like=True):
    """The worker's process has been started; Exited follows."""

    slot: int
    pid: int


class Exited(msgspec.Struct, frozen=True, tag="Exited", array_like=True):
    """A worker has exited. `code`: from os.waitstatus_to_exitcode; -9 is SIGKILL."""

    slot: int
    pid: int
    code: int


class SpawnFailed(msgspec.Struct, frozen=True, tag="NotSpawned", array_like=True):
    """The requested worker cannot be started now."""

    slot: int
    reason: str


class ManagerStarted(msgspec.Struct, frozen=True, tag="ManagerStarted", array_like=True):
    """A new manager was started after the end of the previous one; sent with the connection to
    it."""


FromSupervisor: TypeAlias = Spawned | SpawnFailed | Exited | ManagerStarted


# Settings that workers inherit from the program that started their host, as the processes that
# multiprocessing spawns do.
#
# Functions may read `sys.argv`, use `multiprocessing.Manager()` proxies, which need the program's
# authkey, and call `multiprocessing.parent_process()`. An InheritedContext is part of the start
# message, in a memfd; the authkey is a secret, and is never sent to other hosts.


# Changes to the environment of an actor's or a pool's processes (`options(env=)`): name and value,
# or None to remove a variable.
Environment: TypeAlias = tuple[tuple[str, str | None], ...]


class InheritedContext(msgspec.Struct, frozen=True, kw_only=True):
    """`start_method`: the start method of multiprocessing if the program has set one; else ""."""

    pid: int
    authkey: bytes
    argv: list[bytes]
    faulthandler: bool
    start_method: str
