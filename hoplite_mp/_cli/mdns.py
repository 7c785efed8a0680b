"""The clusters on this network: announced by `hoplite-mp up`, listed by `hoplite-mp join`.

An address is easy to mistype. The announcement is multicast DNS (RFC 6762, RFC 6763) by the package
zeroconf, which is an extra; without it nothing is announced. An announcement is only a hint: it
contains no secret, any host on the network can make or read one, and joining the announced cluster
still requires the token.
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
# How long `join` listens. Higher: announcements on slow or busy networks arrive in time. Lower: the
# list appears sooner.
LISTEN_S = 3.0
MISSING = "this needs the package zeroconf: pip install 'hoplite-mp[lan]'; or name the address"


class Heard(NamedTuple):
    """A cluster that was announced."""

    address: str
    host: str
    version: str
    tls: bool


@contextlib.contextmanager
def announced(address: str, tls: bool) -> Iterator[bool]:
    """Announces the cluster as long as the block runs. Yields False if it cannot, because zeroconf
    is not installed, the address is loopback, or this network has no multicast."""
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
            # The name contains the port, so an earlier process that announced it has ended.
            node.register_service(info, cooperating_responders=True)
        except (OSError, zeroconf.Error):
            yield False
            return
        stack.callback(node.unregister_service, info)
        yield True


def _ip(address: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """The IP address at which other hosts reach it, or None if only this host does."""
    for endpoint in resolve(parse_address(address)):
        ip = ipaddress.ip_address(endpoint.sockaddr[0].partition("%")[0])
        if not ip.is_loopback and not ip.is_unspecified:
            return ip
    return None


def heard(seconds: float = LISTEN_S) -> list[Heard]:
    """Listens for the given time; returns the announced clusters, sorted by address."""
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
            there = sorted(names)
        for name in there:
            info = node.get_service_info(SERVICE, name, timeout=1000)
            if info is not None and info.port and info.parsed_addresses():
                found.append(_heard(info.parsed_addresses()[0], info.port, info.decoded_properties))
        browser.cancel()
    return sorted(found)


def _heard(ip: str, port: int, said: dict[str, str | None]) -> Heard:
    """An announcement from an untrusted source. At most 64 characters of each field are read, and
    only letters, digits and ".-_" are used."""

    def text(key: str) -> str:
        return "".join(c for c in (said.get(key) or "?")[:64] if c.isalnum() or c in ".-_")

    return Heard(str(Address(ip, port)), text("host"), text("version"), said.get("tls") != "0")
