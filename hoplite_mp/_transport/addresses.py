"""Addresses: the text form "host:port", and the addresses that a host advertises.

A host often cannot be reached by its name from other hosts (the name may resolve to 127.0.0.1), and
some of its addresses are useless to them (a bridge for containers has the same address on every
host). A host therefore advertises first the address of the interface on its route to the manager,
and then its other addresses, best first.
"""

from __future__ import annotations

import ipaddress
import re
import socket
from typing import Any, NamedTuple, TypeAlias

from hoplite_mp.errors import ConfigError, ManagerLostError

__all__ = [
    "Address",
    "Endpoint",
    "advertised_addresses",
    "endpoint_at",
    "endpoint_of",
    "own_addresses",
    "parse_address",
    "parse_ports",
    "resolve",
    "routed_address",
]

PORT_MAX = 65535
HOST_CHARS_MAX = 255
# Names of interfaces to containers and virtual machines on this host. Their addresses are ranked
# last, because other hosts often have the same addresses.
INWARD = re.compile(r"(docker|br-|veth|virbr|lxc|lxd|cni|podman|flannel|cali|kube|vmnet|vboxnet)")
# Addresses that are reserved for documentation (RFC 5737, RFC 3849). No host has these addresses,
# but the route to them uses the interface to the outside.
OUTSIDE = ("192.0.2.1", "2001:db8::1")
_DISCARD_PORT = 9

IpAddress: TypeAlias = ipaddress.IPv4Address | ipaddress.IPv6Address


class Address(NamedTuple):
    """A host, by name or number, and a port."""

    host: str
    port: int

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"


class Endpoint(NamedTuple):
    """A numeric address, in the form that a socket's `connect` expects."""

    family: socket.AddressFamily
    sockaddr: tuple[str, int] | tuple[str, int, int, int]

    def __str__(self) -> str:
        return str(Address(self.sockaddr[0], self.sockaddr[1]))


def parse_address(text: str, default_port: int | None = None) -> Address:
    """Parses "host:port", "1.2.3.4:port" or "[v6]:port". With a default port, ":port" is optional.

    Port 0 stands for any free port, and is only useful for listening. Raises ConfigError if the
    text has another form.
    """
    if not isinstance(text, str):
        raise ConfigError(f'address {text!r}: it must be text, such as "10.0.0.1:7000"')
    host, port = _split(text.strip())
    if port is None and default_port is not None:
        return _address(text, host, default_port)
    if port is None or not re.fullmatch(r"[0-9]{1,5}", port) or int(port) > PORT_MAX:
        raise ConfigError(
            f"address {text!r} is not understood; write host:port with a port up to {PORT_MAX}, "
            'such as "10.0.0.1:7000", "[fd00::1]:7000" or "node1:7000"'
        )
    return _address(text, host, int(port))


def _split(text: str) -> tuple[str, str | None]:
    """Splits the text into host and port. The port is None if it is missing."""
    if text.startswith("["):
        host, bracket, rest = text[1:].partition("]")
        if not bracket or ":" not in host or (rest and not rest.startswith(":")):
            return "", None
        return host, rest[1:] if rest else None
    if text.count(":") > 1:  # an IPv6 address without brackets, which has no separate port
        return text, None
    host, colon, port = text.partition(":")
    return host, port if colon else None


def _address(text: str, host: str, port: int) -> Address:
    good = 0 < len(host) <= HOST_CHARS_MAX and re.fullmatch(r"[A-Za-z0-9._:%-]+", host)
    if good and ":" in host:
        good = good if _ip(host) is not None else None
    if not good:
        raise ConfigError(f"address {text!r} is not understood: {host!r} is not a host")
    return Address(host, port)


def parse_ports(text: str) -> range:
    """Parses a range of ports such as "7000-7010" or "7000"."""
    match = re.fullmatch(r"\s*([0-9]{1,5})\s*(?:-\s*([0-9]{1,5})\s*)?", text)
    if match is not None:
        first = int(match[1])
        last = int(match[2] or first)
        if 1 <= first <= last <= PORT_MAX:
            return range(first, last + 1)
    raise ConfigError(
        f"ports {text!r} are not understood; write A-B with 1 <= A <= B <= {PORT_MAX}, such as "
        '"7000-7010"'
    )


def resolve(address: Address) -> list[Endpoint]:
    """Looks up all addresses for the name, in the system's order of preference. May block on the
    name service. Raises ManagerLostError if the host does not exist, and ConfigError if the port is
    0."""
    if address.port == 0:
        raise ConfigError(f"address {address} cannot be called: port 0 is only for listening")
    try:
        found = socket.getaddrinfo(*address, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise ManagerLostError(f"there is no host {address.host}: {error}") from error
    usable = (socket.AF_INET, socket.AF_INET6)
    endpoints = [Endpoint(family, where) for family, _, _, _, where in found if family in usable]  # type: ignore[arg-type]
    return list(dict.fromkeys(endpoints))


def endpoint_of(address: Address) -> Endpoint:
    """Converts a numeric address, as advertised by nodes, into an Endpoint, without a lookup."""
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    return Endpoint(family, (address.host, address.port))


def endpoint_at(family: int, sockaddr: tuple[Any, ...]) -> Endpoint:
    """Converts the fields of a message into an Endpoint."""
    return Endpoint(socket.AddressFamily(family), tuple(sockaddr))


def routed_address(endpoint: Endpoint) -> str | None:
    """This host's own address on the route to `endpoint`; None if there is no route."""
    try:
        with socket.socket(endpoint.family, socket.SOCK_DGRAM) as sock:
            sock.connect(endpoint.sockaddr)  # sends no packet, because this is a datagram socket
            host: str = sock.getsockname()[0]
    except OSError:
        return None
    return host


def own_addresses() -> list[str]:
    """Addresses at which other hosts may reach this host, best first. Loopback and link-local
    addresses are excluded. The order is: addresses on routes to the outside, other addresses,
    addresses of interfaces to containers. In each group, IPv4 addresses precede IPv6 addresses.
    """
    out = [
        routed_address(Endpoint(family, (host, _DISCARD_PORT)))
        for family, host in zip((socket.AF_INET, socket.AF_INET6), OUTSIDE, strict=True)
    ]
    try:
        import psutil  # imported only here, because a listener on a UNIX socket needs no addresses

        statistics, found = psutil.net_if_stats(), psutil.net_if_addrs()
    except (ImportError, OSError):  # OSError: no free descriptor
        return [address for address in out if address is not None]
    ranked: list[tuple[tuple[bool, bool, bool, str], str]] = []
    for name, entries in found.items():
        if name in statistics and not statistics[name].isup:
            continue
        for entry in entries:
            if entry.family not in (socket.AF_INET, socket.AF_INET6):
                continue
            ip = _ip(entry.address)
            if ip is None or not _reachable(ip):
                continue
            inward = INWARD.match(name) is not None
            rank = (inward, entry.address not in out, ip.version == 6, name)
            ranked.append((rank, entry.address))
    return [address for _, address in sorted(ranked)]


def advertised_addresses(listening: str, manager: Endpoint | None) -> list[str]:
    """The addresses that a process listening at `listening` advertises, best first. Never empty.

    manager: the address at which this process reaches the manager; None on the manager's own host
    before any node has joined. A loopback address is advertised only if the process has no other
    address, and only to a cluster on this host. Raises ConfigError if the process listens only on
    loopback, but the manager is on another host.
    """
    ip = _ip(listening)
    if ip is None:
        raise ConfigError(f"cannot listen at {listening!r}, which is not an IP address")
    remote = manager is not None and not _is_loopback(manager.sockaddr[0])
    if not ip.is_unspecified:
        if remote and ip.is_loopback:
            raise ConfigError(
                f"this process listens at {listening}, which {manager} cannot reach; listen at an "
                "address in the network"
            )
        return [listening]
    routed = routed_address(manager) if manager is not None and remote else None
    found = [*([routed] if routed else []), *own_addresses()]
    if ip.version == 4:
        found = [address for address in found if ":" not in address]
    usable = [address for address in dict.fromkeys(found) if not _is_loopback(address)]
    # Without a network, the cluster can only consist of this host.
    return usable or ["::1" if ip.version == 6 else "127.0.0.1"]


def _reachable(ip: IpAddress) -> bool:
    return not (ip.is_loopback or ip.is_link_local or ip.is_unspecified or ip.is_multicast)


def _is_loopback(host: str) -> bool:
    ip = _ip(host)
    return ip is not None and ip.is_loopback


def _ip(host: str) -> IpAddress | None:
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None
