"""Opens a cluster in a process: with a new host, or through the existing node on its host.

A process may start a cluster with one host, start a cluster that other hosts join, join a cluster
with a new node, or attach to its host's existing node. The result is always a runtime that puts,
gets and submits.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
from typing import TYPE_CHECKING, Any

from hoplite_mp import errors
from hoplite_mp._client.launch import HostProcesses
from hoplite_mp._protocol.local import JoinStatus
from hoplite_mp.errors import ConfigError, HopliteError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from hoplite_mp._client.network import HostNetwork
    from hoplite_mp.config import Config

__all__ = ["NoNodeHere", "enter"]

# Delay before a connecting process logs the address that it is waiting for. With a lower value, the
# message also appears for clusters that are about to start.
SILENT_S = 1.0
_log = logging.getLogger("hoplite_mp")


class NoNodeHere(HopliteError):
    """This host has no node in that cluster, and this process must not start one."""


def enter(
    workers: int | None,
    config: Config,
    *,
    listen: str | None,
    address: str | None,
    ports: Any,
    token: str | Path | None,
    tls: bool | None,
    attaches: bool,
    joins: bool,
    stays: bool,
    standby: Sequence[str] = (),
) -> tuple[HostProcesses, HostNetwork | None]:
    """Returns the host, and its network if there is one. The arguments are as for `Cluster`.

    attaches: whether to use this host's node in the cluster if there is one. joins: whether to
    start a node if there is none; otherwise raises NoNodeHere. stays: whether this process exists
    only for its node, so that drivers on this host may attach to the node. standby: with listen=,
    the address of the standby; with address=, further addresses of the manager. If joining fails,
    raises an error with the reason.
    """
    if address is None and listen is None:
        if (ports, token, tls) != (None, None, None):
            raise ConfigError("ports=, token= and tls= need listen= or address=")
        return HostProcesses(workers, config.memory_bytes, config), None
    from hoplite_mp._client.network import HostNetwork

    with _warns_if_silent(address, config.connect_timeout_s):
        return _enter_network(
            HostNetwork(
                config,
                listen_at=listen,
                address=address,
                ports=ports,
                token=token,
                tls=tls,
                stays=stays,
                standby=standby,
            ),
            workers,
            config,
            address,
            attaches=attaches,
            joins=joins,
        )


def _enter_network(
    network: HostNetwork,
    workers: int | None,
    config: Config,
    address: str | None,
    *,
    attaches: bool,
    joins: bool,
) -> tuple[HostProcesses, HostNetwork]:
    """Like `enter`, for a cluster with a network."""
    if address is not None:
        workers = workers or 0
        if not workers and attaches:
            from hoplite_mp._client.attached import attach

            attached = attach(network, config)
            if attached is not None:
                return attached, network
        if not joins:
            raise NoNodeHere(f"this host has no node in the cluster at {address}")
        network.open()
    try:
        host = HostProcesses(workers, config.memory_bytes, config, network)
    except BaseException:
        network.close()  # a second attempt needs the port
        raise
    _await_standing(host)
    return host, network


@contextlib.contextmanager
def _warns_if_silent(address: str | None, timeout_s: float) -> Iterator[None]:
    """Logs a warning if the body takes longer than SILENT_S and the address does not respond. Does
    nothing if `timeout_s` is at most SILENT_S, because an error will follow."""
    if address is None or timeout_s <= SILENT_S:
        yield
        return
    over = threading.Event()

    def warn() -> None:
        if over.wait(SILENT_S):
            return
        reason = _why_silent(address)
        if reason and not over.is_set():
            _log.warning("waiting for %s ... (%s)", address, reason)

    with contextlib.suppress(RuntimeError):  # if no thread can be started, there is no warning
        threading.Thread(target=warn, name="hoplite_mp waiting", daemon=True).start()
    try:
        yield
    finally:
        over.set()


def _why_silent(address: str) -> str:
    """The reason why no connection to that address can be made; "" if one can."""
    from hoplite_mp._transport.addresses import parse_address

    where = parse_address(address)
    try:
        socket.create_connection((where.host, where.port), SILENT_S).close()
    except OSError as error:
        return error.strerror or str(error) or type(error).__name__
    return ""


def _await_standing(host: HostProcesses) -> None:
    """Waits until the node has joined. If the node could not join, raises an error with the
    reason."""
    try:
        standing = host.runtime.channel.call(JoinStatus()).value
        if isinstance(standing[0], str):
            raise getattr(errors, standing[0], HopliteError)(standing[1])
        host.standby, host.holds_standby = tuple(standing[2]), standing[3]
    except BaseException:
        host.end()
        raise
