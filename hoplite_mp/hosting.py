"""`hoplite-mp up` and `hoplite-mp join`: hosts of a cluster in the foreground of a terminal.

Why it exists: a host takes part as long as this process runs, and says in one line what is wrong.
It must never know: anything that `Cluster` does not tell.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import socket
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

from hoplite_mp.cluster import Cluster
from hoplite_mp.config import Config
from hoplite_mp.errors import AuthError, HopliteError, ManagerLostError
from hoplite_mp.nodes import node_id
from hoplite_mp.store.limits import cpu_count
from hoplite_mp.transport.addresses import parse_address, resolve
from hoplite_mp.transport.tokens import token_path

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator

__all__ = ["join", "up"]

FROM_STDIN = "-"  # as --token-file: the token is the first line; the end of input ends the node
# How long a host that was given up looks for its cluster. Higher: longer cuts are bridged.
REJOIN_S = 30.0
# How often in succession, if each life was shorter than LIVED_S.
REJOINS_MAX = 5
LIVED_S = 120.0
LOOK_S = 0.2  # for a token file that is not there yet


class HostCluster(Cluster):
    """The cluster as the process that keeps a host's node going: drivers may attach to that."""

    _attaches = False
    _stays = True

    def __init__(self, *, standby: tuple[str, ...] = (), **options: Any) -> None:
        """standby: with listen=, where it is to be; with address=, where the manager is if not
        there. Others as of Cluster."""
        self._standby = standby
        super().__init__(**options)


class Ending(threading.Event):
    """The end of this process, which a signal asks for: in order, not by an exception, but for
    what may be given up half way."""

    def __init__(self) -> None:
        super().__init__()
        self._breaks = False

    def signalled(self, *_: object) -> None:
        """The handler of the signals."""
        self.set()
        if self._breaks:
            self._breaks = False
            raise KeyboardInterrupt

    @contextlib.contextmanager
    def breaks(self) -> Iterator[None]:
        """What is done in here is not waited for."""
        self._breaks = not self.is_set()
        try:
            yield
        finally:
            self._breaks = False


def up(arguments: argparse.Namespace) -> int:
    """A cluster that others can join, until a signal ends it. Returns the exit code."""
    ending = _on_signals()
    standby = () if arguments.standby is None else (arguments.standby,)
    try:
        cluster = HostCluster(listen=arguments.listen, standby=standby, **_common(arguments))
    except HopliteError as error:
        return _say(error)
    host = cluster._host
    with cluster:
        file = f" --token-file {cluster.token_file}" if cluster.token_file else ""
        tls = " --no-tls" if arguments.no_tls else ""
        address = str(cluster.address)  # as others reach it, whatever it listens at
        print(f"hoplite-mp join {address}{file}{tls}", flush=True)
        _stay(cluster, ending)
    if ending.is_set() or host is None:
        return 0
    if not standby or not (host.given_up or host.node_died):
        return int(host.node_died)
    # Its manager has stepped down, or the others have lost it: they may go on with the standby.
    common = _common(arguments)
    return _take_part(address, standby, common, ending, again=True)


def join(arguments: argparse.Namespace) -> int:
    """A node of a running cluster, until that ends. Returns the exit code."""
    ending = _on_signals()
    deadline = time.monotonic() + arguments.wait
    common = _common(arguments)
    if str(arguments.token_file) == FROM_STDIN:
        common["token"] = sys.stdin.readline().strip()
        threading.Thread(target=_until_the_end_of_input, daemon=True).start()
        path = None
    else:
        path = token_path(arguments.token_file)
    while path is not None and not path.exists() and time.monotonic() < deadline:
        if ending.wait(LOOK_S):
            return 0
    left = max(0.1, deadline - time.monotonic())
    return _take_part(arguments.address, (), common, ending, left=left)


def _take_part(
    address: str,
    standby: tuple[str, ...],
    common: dict[str, Any],
    ending: Ending,
    *,
    left: float = REJOIN_S,
    again: bool = False,
) -> int:
    """One life of this host's node after the other, until the cluster ends. again: this is not the
    first one. Returns the exit code."""
    tries = REJOINS_MAX
    if common["workers"] is None:
        common["workers"] = cpu_count()
    while True:
        if again:
            print("hoplite-mp: this host joins the cluster again", file=sys.stderr, flush=True)
        begun = time.monotonic()
        cluster = _join(address, standby, common, ending, left, again)
        if isinstance(cluster, HopliteError):
            if ending.is_set():
                return 0
            over = again and all(map(_refuses, (address, *standby)))
            if over and isinstance(cluster, ManagerLostError):
                print("hoplite-mp: the cluster has ended", file=sys.stderr)
                return 0
            return _say(cluster)
        host = cluster._host
        with cluster:
            name = node_id(cluster._runtime.tasks.node_number)
            held = host.holds_standby if host is not None else ""
            also = f", with its standby at {held}" if held else ""
            print(f"node {name} of the cluster at {address}{also}", flush=True)
            _stay(cluster, ending)
        if ending.is_set() or host is None or not (host.given_up or host.node_died):
            return 0
        standby = host.standby or standby
        if not standby and _refuses(address):
            return 0
        if time.monotonic() - begun > LIVED_S:
            tries = REJOINS_MAX
        if not tries:
            print(
                f"hoplite-mp: this host was lost {REJOINS_MAX + 1} times, each within {LIVED_S:g} s"
                ": when what it is lost by is mended (its link, its memory), join again",
                file=sys.stderr,
            )
            return 1
        again, left, tries = True, REJOIN_S, tries - 1


def _join(
    address: str,
    standby: tuple[str, ...],
    common: dict[str, Any],
    ending: Ending,
    left: float,
    again: bool,
) -> HostCluster | HopliteError:
    """The next life, or why there is none. Where another manager may take over, who does not lead
    now is asked again."""
    deadline = time.monotonic() + left
    while True:
        left = max(LOOK_S, deadline - time.monotonic())
        config = dataclasses.replace(Config.from_environment(), connect_timeout_s=left)
        try:
            with ending.breaks():
                return HostCluster(address=address, standby=standby, config=config, **common)
        except KeyboardInterrupt:
            return ManagerLostError("interrupted")
        except HopliteError as error:
            final = isinstance(error, AuthError) or not (again and standby)
            if final or time.monotonic() >= deadline or ending.wait(LOOK_S):
                return error


def _refuses(address: str) -> bool:
    """Does that host live, and nobody listens there? Then the cluster has ended."""
    try:
        endpoints = resolve(parse_address(address))
    except OSError:  # a name that nobody knows now
        return False
    for endpoint in endpoints:
        try:
            with socket.socket(endpoint.family) as sock:
                sock.settimeout(LOOK_S)
                sock.connect(endpoint.sockaddr)
        except ConnectionRefusedError:
            continue
        except OSError:  # cut off
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
    }


def _until_the_end_of_input() -> None:
    while sys.stdin.read(4096):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


def _on_signals() -> Ending:
    """Set by SIGTERM and SIGINT."""
    ending = Ending()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, ending.signalled)
    return ending


def _stay(cluster: Cluster, ending: Ending) -> int:
    """Until a signal comes or the cluster ends by itself."""
    host = cluster._host
    while host is not None and not ending.wait(LOOK_S) and not host.ended.is_set():
        pass
    return 0


def _say(error: HopliteError) -> int:
    print(f"hoplite-mp: {error}", file=sys.stderr)
    return 1
