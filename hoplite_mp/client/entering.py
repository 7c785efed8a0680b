"""How a process comes into a cluster: with a host of its own, or through the node that is there.

Why it exists: a cluster of one host, one that others join, one that is joined, and one that this
host is part of already are four ways to the same thing: a runtime that puts, gets and submits.
It must never know: the face above it.
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
    """This host has no node of that cluster, and this process is not to bring one."""


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
    """The host, and what is known of its network if there is one; arguments as of `Cluster`.

    attaches: to the node of this host, if it has one of the cluster. joins: with a node of its own
    if not; else NoNodeHere. stays: this process is there
    for its node, so drivers of this host may rely on that. standby: with listen=, where it is to
    be; with address=, where the manager may be, too. Raises why the cluster could not be joined.
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
    host = Host(workers, config.memory_bytes, config, network)
    _await_standing(host)
    return host, network


def _await_standing(host: Host) -> None:
    """Raises why the cluster could not be joined."""
    try:
        standing = host.runtime.channel.call(Standing()).value
        if isinstance(standing[0], str):
            raise getattr(errors, standing[0], HopliteError)(standing[1])
        host.standby, host.holds_standby = tuple(standing[2]), standing[3]
    except BaseException:
        host.end()
        raise
