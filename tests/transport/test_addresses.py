"""Addresses as people write them, ports, and what this host tells others about itself."""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import select
import socket
from typing import Any

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hoplite_mp._transport import addresses
from hoplite_mp._transport.addresses import (
    Address,
    Endpoint,
    advertised_addresses,
    own_addresses,
    parse_address,
    parse_ports,
    resolve,
    routed_address,
)
from hoplite_mp._transport.sockets import begin_connect, bound_address, connect_error, listen
from hoplite_mp.errors import ConfigError, ManagerLostError
from tests.support.transport import InterfaceAddress, InterfaceState

PORTS = st.integers(0, 65535)
LABEL = st.from_regex(r"[a-z0-9]([a-z0-9-]{0,20}[a-z0-9])?", fullmatch=True)
NAMES = st.lists(LABEL, min_size=1, max_size=4).map(".".join)
HOSTS = NAMES | st.ip_addresses(v=4).map(str) | st.ip_addresses(v=6).map(str)


@given(HOSTS, PORTS)
def test_what_is_written_is_read_again(host: str, port: int) -> None:
    address = Address(host, port)
    assert parse_address(str(address)) == address
    assert parse_address(f"  {address}\n") == address


@given(HOSTS, PORTS)
def test_a_bare_host_takes_the_default_port(host: str, port: int) -> None:
    assert parse_address(host, port) == Address(host, port)
    if ":" in host:
        assert parse_address(f"[{host}]", port) == Address(host, port)
    with pytest.raises(ConfigError, match="write host:port"):
        parse_address(host)


@given(st.text(max_size=30))
def test_anything_else_is_one_clear_error(text: str) -> None:
    try:
        address = parse_address(text)
    except ConfigError:
        return
    assert 0 <= address.port <= 65535
    assert parse_address(str(address)) == address


@pytest.mark.parametrize(
    "text",
    [
        "", ":", ":7000", "a:", "a:70000", "a:-1", "a: 7", "a:7x", "a:٣", "[::1]", "[::1]7000",
        "[::1", "::1:7000:", "[a]:7000", "[1.2.3.4]:1", "a b:7", "a/b:7", "user@a:7", "1:2:3",
        "é:7", "a\0:7",
    ],
)  # fmt: skip
def test_bad_addresses(text: str) -> None:
    with pytest.raises(ConfigError, match="is not understood"):
        parse_address(text)


@pytest.mark.parametrize(
    ("text", "ports"),
    [("7000-7010", range(7000, 7011)), ("7000", range(7000, 7001)), (" 1 - 2 ", range(1, 3))],
)
def test_ports(text: str, ports: range) -> None:
    assert parse_ports(text) == ports


@pytest.mark.parametrize("text", ["", "7010-7000", "0-5", "a-b", "7000-", "1-65536", "-5", "1-2-3"])
def test_bad_ports(text: str) -> None:
    with pytest.raises(ConfigError, match="write A-B with 1 <= A <= B <= 65535"):
        parse_ports(text)


def test_resolving() -> None:
    assert resolve(Address("127.0.0.1", 7)) == [Endpoint(socket.AF_INET, ("127.0.0.1", 7))]
    assert [str(one) for one in resolve(Address("::1", 7))] == ["[::1]:7"]
    with pytest.raises(ConfigError, match="port 0 is only for listening"):
        resolve(Address("127.0.0.1", 0))


def test_no_such_host(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any, **__: Any) -> None:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", fails)
    with pytest.raises(ManagerLostError, match=r"there is no host nowhere: .*not known"):
        resolve(Address("nowhere", 7))
    with pytest.raises(ConfigError, match="cannot listen at nowhere"):
        listen("nowhere", [0])


# ---- listening and connecting


def test_the_first_free_port_of_a_range() -> None:
    with listen("127.0.0.1", [0]) as first:
        taken = bound_address(first).port
        with listen("127.0.0.1", [taken, 0]) as second:
            assert bound_address(second).port != taken
        with pytest.raises(
            ConfigError, match=rf"^port {taken} is not free at 127\.0\.0\.1: in use"
        ):
            listen("127.0.0.1", [taken])
        with pytest.raises(ConfigError, match=f"none of the ports {taken}, {taken} is free"):
            listen("127.0.0.1", [taken, taken])
    with listen("127.0.0.1", [taken]) as again:  # at once: no waiting for the last life
        assert bound_address(again) == Address("127.0.0.1", taken)


def test_a_range_without_a_free_port_is_named() -> None:
    with contextlib.ExitStack() as stack:
        while True:  # until two neighbours are ours
            first = bound_address(stack.enter_context(listen("127.0.0.1", [0]))).port
            try:
                stack.enter_context(listen("127.0.0.1", [first + 1]))
                break
            except ConfigError:
                continue
        with pytest.raises(ConfigError, match=f"none of the ports {first}-{first + 1} is free at"):
            listen("127.0.0.1", range(first, first + 2))


def test_an_address_of_another_host() -> None:
    with pytest.raises(ConfigError, match=r"cannot listen at 203\.0\.113\.77: .* addresses are"):
        listen("203.0.113.77", [0])


def test_both_families_at_the_unspecified_address() -> None:
    try:
        listener = listen("::", [0])
    except ConfigError as error:
        pytest.skip(f"no IPv6 here: {error}")
    with listener:
        port = bound_address(listener).port
        for host in ("127.0.0.1", "::1"):
            socket.create_connection((host, port), timeout=5).close()


def test_connecting_does_not_wait() -> None:
    with listen("127.0.0.1", [0]) as listener:
        where = bound_address(listener)
        (endpoint,) = resolve(where)
        with begin_connect(endpoint) as sock:
            sock.settimeout(5)
            assert connect_error(sock) is None
            assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
    with begin_connect(endpoint) as sock:  # nobody listens any more
        poll = select.poll()
        poll.register(sock)
        assert poll.poll(5000)
        assert "refused" in str(connect_error(sock))
        assert connect_error(sock) == "the connection has ended"


def test_a_connection_to_oneself_is_none() -> None:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        sock.connect(sock.getsockname())
        assert "no process listens there" in str(connect_error(sock))


# ---- what others are told


def test_the_route_names_the_interface() -> None:
    assert routed_address(Endpoint(socket.AF_INET, ("127.0.0.1", 9))) == "127.0.0.1"


def test_no_route_is_no_address(monkeypatch: pytest.MonkeyPatch) -> None:
    class Unreachable(socket.socket):
        def connect(self, _: Any) -> None:
            raise OSError(errno.ENETUNREACH, "Network is unreachable")

    monkeypatch.setattr(socket, "socket", Unreachable)
    assert routed_address(Endpoint(socket.AF_INET, ("192.0.2.1", 9))) is None


def test_own_addresses_without_a_descriptor(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interfaces cannot be listed then; what the routes said is better than an error."""

    def refuse() -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(psutil, "net_if_stats", refuse)
    routed = {socket.AF_INET: "10.0.0.7"}
    monkeypatch.setattr(addresses, "routed_address", lambda to: routed.get(to.family))
    assert own_addresses() == ["10.0.0.7"]


def test_own_addresses_can_be_reached_by_others() -> None:
    found = own_addresses()
    assert len(set(found)) == len(found)
    for one in found:
        ip = ipaddress.ip_address(one)
        assert not (ip.is_loopback)
        assert not (ip.is_link_local)
        assert not (ip.is_unspecified)


INTERFACES = {
    "docker0": ["172.17.0.1"],
    "wlan0": ["192.168.7.5", "fe80::5%wlan0", "2001:db8::5"],
    "eth0": ["10.0.0.5", "fd00::5"],
    "eth1": ["10.9.0.5"],
    "lo": ["127.0.0.1", "::1"],
    "tun0": ["10.8.0.1"],
}


@pytest.fixture
def interfaces(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host with many; the way out is wlan0, tun0 is down."""

    def entry(address: str) -> InterfaceAddress:
        return InterfaceAddress(socket.AF_INET6 if ":" in address else socket.AF_INET, address)

    tables = {
        name: [entry(one) for one in found]
        + [InterfaceAddress(psutil.AF_LINK, "00:00:00:00:00:01")]
        for name, found in INTERFACES.items()
    }
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: tables)
    monkeypatch.setattr(
        psutil,
        "net_if_stats",
        lambda: {name: InterfaceState(name != "tun0") for name in INTERFACES},
    )

    def route(endpoint: Endpoint) -> str | None:
        out = {"192.0.2.1": "192.168.7.5", "2001:db8::1": "2001:db8::5", "10.9.0.1": "10.9.0.5"}
        return out.get(endpoint.sockaddr[0])

    monkeypatch.setattr(addresses, "routed_address", route)


def test_the_order_of_preference(interfaces: None) -> None:
    assert own_addresses() == [
        "192.168.7.5", "2001:db8::5", "10.0.0.5", "10.9.0.5", "fd00::5", "172.17.0.1",
    ]  # fmt: skip


MANAGER = Endpoint(socket.AF_INET, ("10.9.0.1", 7000))
SAME_HOST = Endpoint(socket.AF_INET, ("127.0.0.1", 7000))


def test_what_is_advertised(interfaces: None) -> None:
    every = own_addresses()
    v4 = [one for one in every if ":" not in one]
    assert advertised_addresses("10.0.0.5", MANAGER) == ["10.0.0.5"]
    assert advertised_addresses("0.0.0.0", None) == v4
    assert advertised_addresses("0.0.0.0", SAME_HOST) == v4
    found = advertised_addresses("0.0.0.0", MANAGER)
    assert found[0] == "10.9.0.5"
    assert sorted(found) == sorted(v4)
    assert advertised_addresses("::", MANAGER)[0] == "10.9.0.5"
    assert sorted(advertised_addresses("::", MANAGER)) == sorted(every)
    assert advertised_addresses("127.0.0.1", SAME_HOST) == ["127.0.0.1"]
    assert advertised_addresses("127.0.0.1", None) == ["127.0.0.1"]


def test_loopback_is_never_told_to_another_host(interfaces: None) -> None:
    with pytest.raises(ConfigError, match=r"which 10\.9\.0\.1:7000 cannot reach"):
        advertised_addresses("127.0.0.1", MANAGER)
    with pytest.raises(ConfigError, match="not an IP address"):
        advertised_addresses("localhost", MANAGER)


def test_a_host_without_a_network(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(addresses, "own_addresses", list)
    assert advertised_addresses("0.0.0.0", None) == ["127.0.0.1"]
    assert advertised_addresses("::", SAME_HOST) == ["::1"]
