"""Checks of the needs of a cluster over several hosts: addresses, token, path to the manager.

"it does not connect" has a dozen causes, each with its own remedy. So the path is checked step by
step (name, route, connection, handshake), and the first failing step shows the cause.

The handshake is made as a caller of role "tool". In it both sides prove that they have the token,
and compare their software; then the connection is closed, and no node joins.
"""

from __future__ import annotations

import errno
import ipaddress
import pwd
import socket
import statistics
import time
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from hoplite_mp._cli.doctor.findings import limits, ok, problem, warning
from hoplite_mp._common import ids
from hoplite_mp._protocol.greetings import Introduction, software_versions
from hoplite_mp._transport.addresses import own_addresses, parse_address, resolve, routed_address
from hoplite_mp._transport.caller import Dialer
from hoplite_mp._transport.tokens import VARIABLE, load_token, token_path
from hoplite_mp.errors import AuthError, HopliteError, ManagerLostError, ProtocolError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hoplite_mp._cli.doctor.findings import Check, Finding
    from hoplite_mp._transport.addresses import Endpoint

__all__ = ["checks_of", "host_checks", "shown"]

CONNECTS = 5  # their median is the round trip
# For one connection. The kernel repeats a lost packet after one second, and then after two more.
CONNECT_S_MAX = 4.0
# The whole call ends this much later than the handshake, whose error can then be reported.
LATER_S = 0.5
# The kernel's neighbour table: its limit, which all network namespaces share, and its rows.
NEIGHBOURS_MAX = Path("/proc/sys/net/ipv4/neigh/default/gc_thresh3")
NEIGHBOURS = Path("/proc/net/arp")
REMEDIES = {
    errno.ECONNREFUSED: (
        "that host is there, but nobody listens at this port: is the port right, and does "
        "`hoplite-mp up` run there, listening at this address?"
    ),
    errno.EHOSTUNREACH: "is that host on, and on this network? A firewall may answer so, too",
    errno.ENETUNREACH: "this host has no way to that network: look at `ip route`",
    errno.ETIMEDOUT: (
        "is the address right and that host on? A firewall that drops packets looks the same: "
        "open this port there, and those of --ports"
    ),
}


def host_checks(token_file: Path | None, needed: bool) -> list[Check]:
    """The checks of this host alone. needed: a cluster will be called, so a token is required."""

    def token() -> Iterator[Finding]:
        return _token(token_file, needed)

    return [_addresses, _neighbours, token]


def checks_of(address: str, token_file: Path | None, tls: bool) -> list[Check]:
    """The path from here to the cluster's manager, as one check, because each step needs the
    previous one."""

    def cluster() -> Iterator[Finding]:
        return _way(address, token_file, tls)

    return [cluster]


def _addresses() -> Iterator[Finding]:
    """The addresses that this host would send to other hosts."""
    found = own_addresses()
    if found:
        yield ok("addresses", f"{', '.join(found)} (best first)")
    else:
        advice = "enough for one host; to have others join, it must be on their network"
        yield warning("addresses", "this host has none but loopback", advice)


def _neighbours() -> Iterator[Finding]:
    """Whether the kernel can keep the Ethernet addresses of all hosts of this host's networks."""
    try:
        limit = int(NEIGHBOURS_MAX.read_text())
        known = len(NEIGHBOURS.read_text().splitlines()) - 1  # the first line is a heading
    except (OSError, ValueError):  # a system without /proc
        return
    hosts = max(map(_hosts_of, own_addresses()), default=0)
    seen = f"{known} known, at most {limit}; this host's network has {hosts} addresses"
    if hosts <= limit and 2 * known <= limit:
        yield ok("neighbours", seen)
        return
    advice = (
        'with more hosts than that on one network, connections fail ("No buffer space '
        'available") and joins are slow. If the cluster may become so large, allow more on each '
        f"host: sysctl -w net.ipv4.neigh.default.gc_thresh3={max(4 * limit, 2 * known)}"
    )
    yield warning("neighbours", seen, advice)


def _hosts_of(address: str) -> int:
    """How many hosts the network of this IPv4 address of this host can have; 0 if unknown. IPv6
    does not count: it has its own table, and its prefixes do not limit the number of hosts."""
    for entries in psutil.net_if_addrs().values():
        for entry in entries:
            if entry.address == address and entry.family == socket.AF_INET and entry.netmask:
                network = ipaddress.ip_network(f"{address}/{entry.netmask}", strict=False)
                return max(1, network.num_addresses - 2)
    return 0


def _token(token_file: Path | None, needed: bool) -> Iterator[Finding]:
    """The source of the token, and whether it may be used."""
    path = token_path(token_file)
    if path is not None and not path.exists() and not needed and token_file is None:
        yield ok("token", f"none yet: `hoplite-mp up` makes {path}")
        return
    try:
        token = load_token(token_file)
    except AuthError as error:
        yield problem("token", str(error), "every host needs the same file, for its owner alone")
        return
    if token.file is None:
        yield ok("token", f"from {VARIABLE}")
        return
    status = token.file.stat()
    mode = f"mode {status.st_mode & 0o777:04o}, of {_user(status.st_uid)}"
    yield ok("token", f"{token.file} ({mode})")


def _user(number: int) -> str:
    try:
        return pwd.getpwuid(number).pw_name
    except KeyError:  # in a container there may be no name
        return f"user {number}"


def _way(address: str, token_file: Path | None, tls: bool) -> Iterator[Finding]:
    """Takes the steps in order, up to the first failing step."""
    try:
        where = parse_address(address)
        endpoints = resolve(where)
    except (ManagerLostError, ValueError) as error:
        yield problem("name", str(error), "write HOST:PORT as `hoplite-mp up` has printed it")
        return
    routed = [one for one in endpoints if routed_address(one) is not None]
    if not routed:
        yield problem("route", f"no way leads to {address}", REMEDIES[errno.ENETUNREACH])
        return
    reached = None
    complaints = []
    for endpoint in routed:
        try:
            seconds = _round_trip(endpoint)
        except OSError as error:
            number = errno.ETIMEDOUT if isinstance(error, TimeoutError) else error.errno
            words = "no answer" if number == errno.ETIMEDOUT else error.strerror
            advice = REMEDIES.get(number or 0, "look at the network between the two hosts")
            complaints.append(problem("connection", f"{endpoint}: {words}", advice))
        else:
            reached = endpoint
            seen = f"{endpoint} from {routed_address(endpoint)} in {shown(seconds)}"
            yield ok("connection", seen)
            break
    if reached is None:
        yield from complaints
        return
    yield from _handshake(reached, token_file, tls)


def _round_trip(endpoint: Endpoint) -> float:
    """The seconds for a connection: the median of several. TimeoutError, OSError."""
    times = []
    for _ in range(CONNECTS):
        with socket.socket(endpoint.family, socket.SOCK_STREAM) as sock:
            sock.settimeout(CONNECT_S_MAX)
            began = time.perf_counter()
            sock.connect(endpoint.sockaddr)
            times.append(time.perf_counter() - began)
    return statistics.median(times)


def _handshake(endpoint: Endpoint, token_file: Path | None, tls: bool) -> Iterator[Finding]:
    """Makes the same handshake as a node, and reports the manager's answer."""
    try:
        token = load_token(token_file)
    except AuthError as error:
        yield problem("handshake", "it was not tried", str(error))
        return
    timeout_s = limits().handshake_timeout_s
    mine = software_versions()
    began = time.monotonic()
    caller = Dialer(
        [endpoint],
        key=token.key,
        role="tool",
        mine=Introduction(ids.random_host_id(), mine),
        tls=tls,
        now=began,
        timeout_s=timeout_s + LATER_S,
        handshake_timeout_s=timeout_s,
    )
    try:
        admission = caller.wait()
    except AuthError as error:
        yield problem("handshake", str(error))
        return
    except ProtocolError as error:
        yield problem("handshake", str(error))  # its text already contains the advice
        return
    except (HopliteError, OSError) as error:
        advice = "something listens there that is no hoplite_mp, or is too busy to answer"
        yield problem("handshake", str(error), advice)
        return
    seconds = time.monotonic() - began
    admission.stream.close()
    kind = "with TLS" if tls else "without TLS"
    yield ok("handshake", f"both sides have the token, {kind}, in {shown(seconds)}")
    theirs = admission.peer.versions
    other = [f"{name} {theirs[name]} (here {mine[name]})" for name in mine
             if name in theirs and theirs[name] != mine[name]]  # fmt: skip
    if other:
        yield ok("versions", f"they fit; the cluster has {', '.join(other)}")
    else:
        yield ok("versions", "the same on both sides")


def shown(seconds: float) -> str:
    """0.00123 -> "1.23 ms"."""
    return f"{seconds * 1e3:.2f} ms" if seconds < 0.1 else f"{seconds * 1e3:.0f} ms"
