"""How a process enters a cluster: with a host of its own, or through the node that its host has.

Why it exists: a process may start a cluster of one host, start one that others join, join one with
a node of its own, or attach to the node that its host has in one already. All four ways lead to the
same thing: a runtime that puts, gets and submits.
It must never know: the public API above it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hoplite_mp import errors
from hoplite_mp.client.launch import Host
from hoplite_mp.errors import ConfigError, HopliteError
from hoplite_mp.protocol.local import Standing

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from hoplite_mp.client.network import Network
    from hoplite_mp.config import Config

__all__ = ["NoNodeHere", "enter"]


class NoNodeHere(HopliteError):
    """This host has no node of that cluster, and this process must not start one."""


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
) -> tuple[Host, Network | None]:
    """Returns the host, and its network if there is one; arguments as of `Cluster`.

    attaches: use this host's node of the cluster, if there is one. joins: if there is none, start
    one; without `joins`, raise NoNodeHere. stays: this process runs for the sake of its node, so
    drivers of this host may attach to it. standby: with listen=, where the standby is to be; with
    address=, further addresses at which the manager may be. If the cluster could not be joined,
    raises the reason.
    """
    if address is None and listen is None:
        if (ports, token, tls) != (None, None, None):
            raise ConfigError("ports=, token= and tls= need listen= or address=")
        return Host(workers, config.memory_bytes, config), None
    from hoplite_mp.client.network import Network

    network = Network(
        config,
        listen_at=listen,
        address=address,
        ports=ports,
        token=token,
        tls=tls,
        stays=stays,
        standby=standby,
    )
    if address is not None:
        workers = workers or 0
        if not workers and attaches:
            from hoplite_mp.client.attached import attach

            attached = attach(network, config)
            if attached is not None:
                return attached, network
        if not joins:
            raise NoNodeHere(f"this host has no node of the cluster at {address}")
        network.open()
    try:
        host = Host(workers, config.memory_bytes, config, network)
    except BaseException:
        network.close()  # so that a second attempt finds the port free
        raise
    _await_standing(host)
    return host, network


def _await_standing(host: Host) -> None:
    """Waits until the node has joined. If it could not, raises the reason."""
    try:
        standing = host.runtime.channel.call(Standing()).value
        if isinstance(standing[0], str):
            raise getattr(errors, standing[0], HopliteError)(standing[1])
        host.standby, host.holds_standby = tuple(standing[2]), standing[3]
    except BaseException:
        host.end()
        raise
