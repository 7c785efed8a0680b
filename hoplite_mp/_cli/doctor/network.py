"""Checks for clusters over several hosts: addresses, token, path to the manager.

The path is checked step by step (name, route, connection, handshake), so the first failing step
shows the cause. The handshake uses the role "tool": both sides prove that they have the token, and
compare their software versions. Then the connection is closed, and no node joins.
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

CONNECTS = 5  # number of connections; the round trip is their median time
# Timeout of one connection. The kernel resends a lost packet after one second, then after two more.
CONNECT_S_MAX = 4.0
# The timeout of the call exceeds that of the handshake, so that the handshake's error is reported.
MARGIN_S = 0.5
# Files with the limit of the kernel's neighbour table, which all network namespaces share, and
# with the table's rows.
NEIGHBOURS_MAX = Path("/proc/sys/net/ipv4/neigh/default/gc_thresh3")
NEIGHBOURS = Path("/proc/net/arp")
REMEDIES = {
    errno.ECONNREFUSED: (
        "the host is up, but no process listens on this port: is the port right, and does "
        "`hoplite-mp up` listen on this address?"
    ),
    errno.EHOSTUNREACH: "is the host up, and on this network? Or does a firewall reject packets?",
    errno.ENETUNREACH: "this host has no route to that network: check `ip route`",
    errno.ETIMEDOUT: (
        "is the address right, and the host up? A firewall may drop packets: open this port and "
        "those of --ports on that host"
    ),
}


def host_checks(token_file: Path | None, needed: bool) -> list[Check]:
    """The checks of this host. `needed`: whether a token is required."""

    def token() -> Iterator[Finding]:
        return _token(token_file, needed)

    return [_addresses, _neighbours, token]


def checks_of(address: str, token_file: Path | None, tls: bool) -> list[Check]:
    """The checks of the path to the cluster's manager. They are one check, because each step
    depends on the previous one."""

    def cluster() -> Iterator[Finding]:
        return _path(address, token_file, tls)

    return [cluster]


def _addresses() -> Iterator[Finding]:
    """The addresses that this host advertises to other hosts."""
    found = own_addresses()
    if found:
        yield ok("addresses", f"{', '.join(found)} (best first)")
    else:
        advice = "sufficient for one host; for other hosts, connect this host to their network"
        yield warning("addresses", "this host has only loopback addresses", advice)


def _neighbours() -> Iterator[Finding]:
    """Whether the kernel's neighbour table is large enough for all hosts on this host's
    networks."""
    try:
        limit = int(NEIGHBOURS_MAX.read_text())
        known = len(NEIGHBOURS.read_text().splitlines()) - 1  # without the heading
    except (OSError, ValueError):  # no /proc
        return
    hosts = max(map(_hosts_of, own_addresses()), default=0)
    observed = f"{known} known, at most {limit}; this host's network has {hosts} addresses"
    if hosts <= limit and 2 * known <= limit:
        yield ok("neighbours", observed)
        return
    advice = (
        'with more hosts on one network, connections fail ("No buffer space available") and joins '
        "are slow. For a cluster of that size, raise the limit on each host: "
        f"sysctl -w net.ipv4.neigh.default.gc_thresh3={max(4 * limit, 2 * known)}"
    )
    yield warning("neighbours", observed, advice)


def _hosts_of(address: str) -> int:
    """The maximum number of hosts in the network of one of this host's IPv4 addresses; 0 if it is
    unknown. Also 0 for IPv6, which has a separate table, and whose prefixes do not limit the number
    of hosts."""
    for entries in psutil.net_if_addrs().values():
        for entry in entries:
            if entry.address == address and entry.family == socket.AF_INET and entry.netmask:
                network = ipaddress.ip_network(f"{address}/{entry.netmask}", strict=False)
                return max(1, network.num_addresses - 2)
    return 0


def _token(token_file: Path | None, needed: bool) -> Iterator[Finding]:
    """The source of the token, and whether the token is usable."""
    path = token_path(token_file)
    if path is not None and not path.exists() and not needed and token_file is None:
        yield ok("token", f"none yet: `hoplite-mp up` creates {path}")
        return
    try:
        token = load_token(token_file)
    except AuthError as error:
        yield problem("token", str(error), "all hosts need the same file, for its owner only")
        return
    if token.file is None:
        yield ok("token", f"from {VARIABLE}")
        return
    status = token.file.stat()
    mode = f"mode {status.st_mode & 0o777:04o}, owner {_user(status.st_uid)}"
    yield ok("token", f"{token.file} ({mode})")


def _user(number: int) -> str:
    try:
        return pwd.getpwuid(number).pw_name
    except KeyError:  # for example in a container
        return f"user {number}"


def _path(address: str, token_file: Path | None, tls: bool) -> Iterator[Finding]:
    """Checks the steps in order, up to the first failure."""
    try:
        parsed = parse_address(address)
        endpoints = resolve(parsed)
    except (ManagerLostError, ValueError) as error:
        yield problem("name", str(error), "use HOST:PORT as printed by `hoplite-mp up`")
        return
    routed = [endpoint for endpoint in endpoints if routed_address(endpoint) is not None]
    if not routed:
        yield problem("route", f"no route to {address}", REMEDIES[errno.ENETUNREACH])
        return
    reached = None
    failures = []
    for endpoint in routed:
        try:
            seconds = _round_trip(endpoint)
        except OSError as error:
            number = errno.ETIMEDOUT if isinstance(error, TimeoutError) else error.errno
            text = "no answer" if number == errno.ETIMEDOUT else error.strerror
            advice = REMEDIES.get(number or 0, "check the network between the two hosts")
            failures.append(problem("connection", f"{endpoint}: {text}", advice))
        else:
            reached = endpoint
            observed = f"{endpoint} from {routed_address(endpoint)} in {shown(seconds)}"
            yield ok("connection", observed)
            break
    if reached is None:
        yield from failures
        return
    yield from _handshake(reached, token_file, tls)


def _round_trip(endpoint: Endpoint) -> float:
    """The median time in seconds to open a connection. Raises TimeoutError or OSError if a
    connection fails."""
    times = []
    for _ in range(CONNECTS):
        with socket.socket(endpoint.family, socket.SOCK_STREAM) as sock:
            sock.settimeout(CONNECT_S_MAX)
            began = time.perf_counter()
            sock.connect(endpoint.sockaddr)
            times.append(time.perf_counter() - began)
    return statistics.median(times)


def _handshake(endpoint: Endpoint, token_file: Path | None, tls: bool) -> Iterator[Finding]:
    """Makes a handshake with the manager, and reports the result."""
    try:
        token = load_token(token_file)
    except AuthError as error:
        yield problem("handshake", "not tried", str(error))
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
        timeout_s=timeout_s + MARGIN_S,
        handshake_timeout_s=timeout_s,
    )
    try:
        admission = caller.wait()
    except AuthError as error:
        yield problem("handshake", str(error))
        return
    except ProtocolError as error:
        yield problem("handshake", str(error))  # the text contains the advice
        return
    except (HopliteError, OSError) as error:
        advice = "the listening process is not hoplite_mp, or is too busy to answer"
        yield problem("handshake", str(error), advice)
        return
    seconds = time.monotonic() - began
    admission.stream.close()
    kind = "with TLS" if tls else "without TLS"
    yield ok("handshake", f"both sides have the token, {kind}, in {shown(seconds)}")
    theirs = admission.peer.versions
    differences = [f"{name} {theirs[name]} (here {mine[name]})" for name in mine
                   if name in theirs and theirs[name] != mine[name]]  # fmt: skip
    if differences:
        yield ok("versions", f"compatible; the cluster has {', '.join(differences)}")
    else:
        yield ok("versions", "the same on both sides")


def shown(seconds: float) -> str:
    """0.00123 -> "1.23 ms"."""
    return f"{seconds * 1e3:.2f} ms" if seconds < 0.1 else f"{seconds * 1e3:.0f} ms"
