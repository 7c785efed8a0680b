"""`hoplite-mp up` and `hoplite-mp join`: run a node of a cluster in the foreground.

The host is a member of the cluster as long as this process runs. Each problem is reported in one
line.
"""

from __future__ import annotations

import dataclasses
import os
import shlex
import signal
import socket
import sys
import threading
from typing import TYPE_CHECKING, Any

from hoplite_mp._api.cluster import Cluster
from hoplite_mp._api.nodes import WORKERS_MAX, node_id
from hoplite_mp._cli.mdns import LISTEN_S, announced, discover
from hoplite_mp._common import clock
from hoplite_mp._common.machine_limits import cpu_count
from hoplite_mp._common.signals import StopRequest
from hoplite_mp._transport.addresses import parse_address, resolve
from hoplite_mp._transport.tokens import VARIABLE, default_path, load_token, token_path
from hoplite_mp.config import Config
from hoplite_mp.errors import AuthError, HopliteError, ManagerLostError

if TYPE_CHECKING:
    import argparse
    from pathlib import Path

__all__ = ["join", "up"]

# With this --token-file, the token is the first line of stdin, and the node stops at the end of
# stdin.
FROM_STDIN = "-"
# How long a host that was declared lost tries to rejoin. Higher: it survives longer network
# failures.
REJOIN_S = 30.0
# How long `join` retries without --wait. Higher: hosts may be started in any order. Lower: a wrong
# address is reported sooner.
WAIT_S = 30.0
# Maximum number of consecutive rejoins of a host that is lost within LIVED_S each time.
REJOINS_MAX = 5
LIVED_S = 120.0
POLL_S = 0.2  # between two attempts or checks; also the connection timeout in `_refuses`


class HostCluster(Cluster):
    """The Cluster of a process that runs a host's node, to which drivers may attach."""

    _attaches = False
    _stays = True

    def __init__(self, *, standby: tuple[str, ...] = (), **options: Any) -> None:
        """`standby`: with listen=, the address of the standby; with address=, other addresses at
        which the manager may be. `options`: as for Cluster."""
        self._standby = standby
        super().__init__(**options)


def up(arguments: argparse.Namespace) -> int:
    """Runs a cluster that other hosts can join, until a signal arrives. Returns the exit code."""
    ending = _on_signals()
    standby = () if arguments.standby is None else (arguments.standby,)
    try:
        cluster = HostCluster(listen=arguments.listen, standby=standby, **_common(arguments))
    except HopliteError as error:
        return _print_error(error)
    host = cluster._host
    with cluster:
        address = str(cluster.address)  # for other hosts
        _announce(cluster, address, arguments.no_tls)
        with announced(address, not arguments.no_tls):
            _await_end(cluster, ending)
    if ending.is_set() or host is None:
        return 0
    if not standby or not (host.given_up or host.node_died):
        return int(host.node_died)
    # This host's manager has stepped down, or was lost. The other hosts may continue with the
    # standby, so this host tries to rejoin.
    common = _common(arguments)
    return _run_member(address, standby, common, ending, again=True)


def _announce(cluster: Cluster, address: str, no_tls: bool) -> None:
    """Prints the command for other hosts to stdout, and an explanation to stderr."""
    file = cluster.token_file
    # The path of the token file on the joining host; omitted if it is the default.
    named = file is not None and file != default_path()
    option = f" --token-file {shlex.quote(str(file))}" if named else ""
    if file is None:
        before = f"with the same {VARIABLE}"
    else:
        before = f"after copying {file} to it (mode 0600)"
    print(
        f"hoplite-mp: the cluster is up, with {_workers(cluster)} on this host, until SIGTERM or "
        "Ctrl-C. To add another host, run the command that is printed to stdout on that host, "
        f"{before}" + ("; --token-file is the path of the copy." if named else "."),
        file=sys.stderr,
        flush=True,
    )
    print(f"hoplite-mp join {address}{option}{' --no-tls' * no_tls}", flush=True)


def _workers(cluster: Cluster) -> str:
    count = 0 if cluster._host is None else cluster._host.workers
    return f"{count} worker{'' if count == 1 else 's'}"


def join(arguments: argparse.Namespace) -> int:
    """Runs a node of a running cluster until the cluster shuts down. Returns the exit code."""
    if arguments.address is None:
        return _list_clusters()
    ending = _on_signals()
    wait = WAIT_S if arguments.wait is None else arguments.wait
    deadline = clock.monotonic() + wait
    common = _common(arguments)
    if str(arguments.token_file) == FROM_STDIN:
        common["token"] = sys.stdin.readline().strip()
        threading.Thread(target=_end_with_stdin, daemon=True).start()
    else:
        # A missing token file is an immediate error, unless the user has given --wait.
        try:
            path = token_path(arguments.token_file)
            if arguments.wait is not None and path is not None:
                _await_token(path, deadline, ending)
            if ending.is_set():
                return 0
            load_token(arguments.token_file)
        except AuthError as error:
            return _print_error(error)
    left = max(0.1, deadline - clock.monotonic())
    return _run_member(arguments.address, (), common, ending, left=left)


def _list_clusters() -> int:
    """Prints the commands with which to join the clusters that are announced on this network."""
    try:
        found = discover()
    except HopliteError as error:
        return _print_error(error)
    if not found:
        print(
            f"hoplite-mp: no cluster was announced on this network within {LISTEN_S:g} s. `up` "
            "announces it if zeroconf is installed; otherwise give the address: "
            "hoplite-mp join HOST:PORT",
            file=sys.stderr,
        )
        return 1
    for cluster in found:
        flag = "" if cluster.tls else " --no-tls"
        comment = f"# on host {cluster.host}, version {cluster.version}"
        print(f"hoplite-mp join {cluster.address}{flag}  {comment}")
    return 0


def _await_token(path: Path, deadline: float, ending: StopRequest) -> None:
    """Waits until the file exists, the deadline has passed, or this process must exit. Prints a
    line if it has to wait."""
    printed = False
    while _is_missing(path) and clock.monotonic() < deadline and not ending.is_set():
        if not printed:
            print(
                f"hoplite-mp: {path} does not exist yet: waiting up to "
                f"{deadline - clock.monotonic():.3g} s. Copy the token from the host where "
                "`hoplite-mp up` runs (mode 0600)",
                file=sys.stderr,
                flush=True,
            )
            printed = True
        ending.wait(POLL_S)


def _is_missing(path: Path) -> bool:
    """Whether the file does not exist. False after other errors, which waiting does not fix."""
    try:
        os.stat(path)
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return False


def _run_member(
    address: str,
    standby: tuple[str, ...],
    common: dict[str, Any],
    ending: StopRequest,
    *,
    left: float = REJOIN_S,
    again: bool = False,
) -> int:
    """Joins the cluster, and rejoins after each loss of this host, until the cluster shuts down.
    `again`: whether the first join is already a rejoin. Returns the exit code."""
    tries = REJOINS_MAX
    if common["workers"] is None:
        common["workers"] = min(cpu_count(), WORKERS_MAX)
    while True:
        if again:
            print("hoplite-mp: this host rejoins the cluster", file=sys.stderr, flush=True)
        begun = clock.monotonic()
        cluster = _join(address, standby, common, ending, left, again)
        if isinstance(cluster, HopliteError):
            if ending.is_set():
                return 0
            over = again and all(map(_refuses, (address, *standby)))
            if over and isinstance(cluster, ManagerLostError):
                print("hoplite-mp: the cluster has ended", file=sys.stderr)
                return 0
            return _print_error(cluster)
        host = cluster._host
        with cluster:
            name = node_id(cluster._runtime.tasks.node_number)
            held = host.holds_standby if host is not None else ""
            also = f", with its standby at {held}" if held else ""
            print(f"node {name} of the cluster at {address}{also}", flush=True)
            _await_end(cluster, ending)
        if ending.is_set():
            return 0
        if host is None or not (host.given_up or host.node_died):
            reason = "the cluster has ended, or this host has left it"
            if host is not None and host.removed:
                reason = f"node {name} was removed from the cluster (remove_node)"
            print(f"hoplite-mp: {reason}", file=sys.stderr)
            return 0
        standby = host.standby or standby
        if not standby and _refuses(address):
            print("hoplite-mp: the cluster has ended", file=sys.stderr)
            return 0
        if clock.monotonic() - begun > LIVED_S:
            tries = REJOINS_MAX
        if not tries:
            print(
                f"hoplite-mp: this host was lost {REJOINS_MAX + 1} times, each time within "
                f"{LIVED_S:g} s. Fix the cause (for example its link or memory), then run `join` "
                "again",
                file=sys.stderr,
            )
            return 1
        again, left, tries = True, REJOIN_S, tries - 1


def _join(
    address: str,
    standby: tuple[str, ...],
    common: dict[str, Any],
    ending: StopRequest,
    left: float,
    again: bool,
) -> HostCluster | HopliteError:
    """Joins the cluster once. Returns the Cluster, or the error if it fails. A rejoin to a cluster
    with a standby, which may still be taking over, is retried for `left` seconds."""
    deadline = clock.monotonic() + left
    while True:
        left = max(POLL_S, deadline - clock.monotonic())
        try:
            config = dataclasses.replace(Config.from_environment(), connect_timeout_s=left)
            with ending.breaks():
                return HostCluster(address=address, standby=standby, config=config, **common)
        except KeyboardInterrupt:
            return ManagerLostError("interrupted")
        except HopliteError as error:
            final = isinstance(error, AuthError) or not (again and standby)
            if final or clock.monotonic() >= deadline or ending.wait(POLL_S):
                return error


def _refuses(address: str) -> bool:
    """Whether the host refuses connections, which shows that its cluster has shut down."""
    try:
        endpoints = resolve(parse_address(address))
    except OSError:  # the name cannot be resolved
        return False
    for endpoint in endpoints:
        try:
            with socket.socket(endpoint.family) as sock:
                sock.settimeout(POLL_S)
                sock.connect(endpoint.sockaddr)
        except ConnectionRefusedError:
            continue
        except OSError:  # the host cannot be reached
            return False
        return False
    return True


def _common(arguments: argparse.Namespace) -> dict[str, Any]:
    return {
        "workers": arguments.workers,
        "memory": arguments.memory,
        "ports": arguments.ports,
        "token": arguments.token_file,
        "tls": False if arguments.no_tls else None,
        "resources": arguments.resources,
    }


def _end_with_stdin() -> None:
    while sys.stdin.read(4096):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


def _on_signals() -> StopRequest:
    """Returns a request that is set by SIGTERM and SIGINT."""
    ending = StopRequest()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, ending.signalled)
    return ending


def _await_end(cluster: Cluster, ending: StopRequest) -> int:
    """Waits until a signal arrives or the cluster shuts down."""
    host = cluster._host
    while host is not None and not ending.wait(POLL_S) and not host.ended.is_set():
        pass
    return 0


def _print_error(error: HopliteError) -> int:
    print(f"hoplite-mp: {error}", file=sys.stderr)
    return 1
