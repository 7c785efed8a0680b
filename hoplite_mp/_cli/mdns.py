"""Announcements of clusters on this network, from `hoplite-mp up` to `hoplite-mp join`.

They use multicast DNS (RFC 6762, RFC 6763) through the optional package zeroconf. An announcement
is only a hint: it contains no secret, any host on the network can send or read one, and joining
the cluster requires the token.
"""

from __future__ import annotations

import contextlib
import ipaddress
import socket
import threading
from typing import TYPE_CHECKING, NamedTuple

from hoplite_mp._common import locks
from hoplite_mp._transport.addresses import Address, parse_address, resolve
from hoplite_mp._version import __version__
from hoplite_mp.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator

SERVICE = "_hoplite-mp._tcp.local."
# How long `join` listens. Higher: it finds clusters on slow or busy networks. Lower: the list
# appears sooner.
LISTEN_S = 3.0
MISSING = "this needs the package zeroconf: pip install 'hoplite-mp[lan]'; or pass the address"


class AnnouncedCluster(NamedTuple):
    """A cluster that was announced on this network."""

    address: str
    host: str
    version: str
    tls: bool


@contextlib.contextmanager
def announced(address: str, tls: bool) -> Iterator[bool]:
    """A context manager that announces the cluster during its block. Yields False if zeroconf is
    not installed, the address is loopback, or this network has no multicast."""
    ip = _ip(address)
    try:
        import zeroconf
    except ImportError:
        ip = None
    if ip is None:
        yield False
        return
    host, port = socket.gethostname(), parse_address(address).port
    info = zeroconf.ServiceInfo(
        SERVICE,
        f"{host}-{port}.{SERVICE}",
        addresses=[ip.packed],
        port=port,
        properties={"host": host, "version": __version__, "tls": str(int(tls))},
        server=f"{host}-{port}.local.",
    )
    with contextlib.ExitStack() as stack:
        try:
            node = stack.enter_context(zeroconf.Zeroconf(interfaces=[str(ip)]))
            # The name contains the port, so an earlier announcer of this name has exited.
            node.register_service(info, cooperating_responders=True)
        except (OSError, zeroconf.Error):
            yield False
            return
        stack.callback(node.unregister_service, info)
        yield True


def _ip(address: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """The IP address at which other hosts can connect; None if only this host can reach it."""
    for endpoint in resolve(parse_address(address)):
        ip = ipaddress.ip_address(endpoint.sockaddr[0].partition("%")[0])
        if not ip.is_loopback and not ip.is_unspecified:
            return ip
    return None


def discover(seconds: float = LISTEN_S) -> list[AnnouncedCluster]:
    """Listens for the given number of seconds. Returns the announced clusters, sorted by
    address."""
    try:
        import zeroconf
    except ImportError:
        raise ConfigError(MISSING) from None
    lock = locks.lock("mdns.names")
    names: set[str] = set()

    class Listener(zeroconf.ServiceListener):
        def add_service(self, node: zeroconf.Zeroconf, kind: str, name: str) -> None:
            with lock:
                names.add(name)

        def update_service(self, node: zeroconf.Zeroconf, kind: str, name: str) -> None:
            self.add_service(node, kind, name)

        def remove_service(self, node: zeroconf.Zeroconf, kind: str, name: str) -> None:
            with lock:
                names.discard(name)

    found = []
    with zeroconf.Zeroconf() as node:
        browser = zeroconf.ServiceBrowser(node, SERVICE, Listener())
        threading.Event().wait(seconds)
        with lock:
            services = sorted(names)
        for name in services:
            info = node.get_service_info(SERVICE, name, timeout=1000)
            if info is not None and info.port and info.parsed_addresses():
                ip = info.parsed_addresses()[0]
                found.append(_sanitized(ip, info.port, info.decoded_properties))
        browser.cancel()
    return sorted(found)


def _sanitized(ip: str, port: int, properties: dict[str, str | None]) -> AnnouncedCluster:
    """The fields of an announcement from an untrusted source, limited to 64 characters each, with
    only letters, digits and ".-_"."""

    def text(key: str) -> str:
        return "".join(c for c in (properties.get(key) or "?")[:64] if c.isalnum() or c in ".-_")

    address, tls = str(Address(ip, port)), properties.get("tls") != "0"
    return AnnouncedCluster(address, text("host"), text("version"), tls)
