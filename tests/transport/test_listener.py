"""Listeners and callers over real sockets: who gets in, and how many may try."""

from __future__ import annotations

import errno
import itertools
import select
import socket
import ssl
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest

from hoplite_mp._transport.listener import LINE_FACTOR, SILENT_S
from hoplite_mp._transport.sockets import prepare
from tests.support.transport import (
    CLIENT,
    CLUSTER,
    SERVER,
    TLS,
    knock,
    make_caller,
    make_listener,
    meet,
    until,
)

if TYPE_CHECKING:
    from hoplite_mp._transport.addresses import Endpoint


@TLS
@pytest.mark.parametrize(
    ("role", "service"), [("node", "manager"), ("tool", "manager"), ("peer", "node")]
)
def test_both_get_a_stream_and_know_whose(
    tls: bool, role: str, service: str, opened: list[Any]
) -> None:
    listener = make_listener(tls, service=service)
    opened.append(listener)
    called, let_in = meet(listener, make_caller(listener.address, tls, role=role, cluster=CLUSTER))
    opened += [called.stream, let_in.stream]
    assert (let_in.role, let_in.peer, let_in.cluster) == (role, CLIENT, CLUSTER)
    assert (called.role, called.peer, called.cluster) == (role, SERVER, CLUSTER)
    assert called.address == str(listener.address)
    assert listener.strangers == 0
    assert listener.deadline is None
    let_in.stream.write(b"welcome")
    let_in.stream.flush()
    until(lambda: called.stream.read() == b"welcome", lambda: None)


@TLS
def test_data_connections_become_sockets_for_blocking_calls(tls: bool, opened: list[Any]) -> None:
    listener = make_listener(tls, service="node")
    opened.append(listener)
    called, let_in = meet(listener, make_caller(listener.address, tls, role="data"))
    ours, theirs = called.stream.detach(), let_in.stream.detach()
    opened += [ours, theirs]
    assert isinstance(ours, ssl.SSLSocket) == tls
    for end in (ours, theirs):
        end.setblocking(True)
    data = bytes(range(256)) * 20_000
    thread = threading.Thread(target=theirs.sendall, args=(data,))
    thread.start()
    into = memoryview(bytearray(len(data)))
    place = 0
    while place < len(data):
        place += ours.recv_into(into[place:])
    thread.join()
    assert into == data


@TLS
def test_what_follows_the_handshake_at_once_is_not_lost(tls: bool, opened: list[Any]) -> None:
    """The server's first application bytes ride in the same packet as its introduction."""
    listener = make_listener(tls)
    opened.append(listener)
    caller = make_caller(listener.address, tls)
    opened.append(caller)
    let_in = []
    called = []

    def turn() -> None:
        for admission in listener.turn(time.monotonic()):
            admission.stream.write(b"first words")
            admission.stream.flush()
            let_in.append(admission)
        if not let_in:  # then only when both have been sent
            assert caller.turn(time.monotonic()) is None

    until(lambda: let_in, turn)
    until(
        lambda: called,
        lambda: called.extend(filter(None, [caller.turn(time.monotonic())])),
    )
    opened += [called[0].stream, let_in[0].stream]
    until(lambda: called[0].stream.read() == b"first words", lambda: None)


@TLS
def test_many_at_once(tls: bool, opened: list[Any]) -> None:
    listener = make_listener(tls, pending_handshakes_max=32)
    opened.append(listener)
    callers = [make_caller(listener.address, tls) for _ in range(20)]
    called, let_in = [], []

    def turn() -> None:
        now = time.monotonic()
        let_in.extend(listener.turn(now))
        for caller in list(callers):
            admission = caller.turn(now)
            if admission is not None:
                called.append(admission)
                callers.remove(caller)

    until(lambda: len(called) == len(let_in) == 20, turn)
    opened += [admission.stream for admission in called + let_in]


def test_storm_of_tls_callers_loses_none(opened: list[Any]) -> None:
    """All from one host, four for each place."""
    listener = make_listener(True, pending_handshakes_max=16)
    opened.append(listener)
    callers = [make_caller(listener.address, True, timeout_s=60.0) for _ in range(64)]
    left, called, let_in = list(callers), [], []

    def turn() -> None:
        now = time.monotonic()
        let_in.extend(listener.turn(now))
        for caller in list(left):
            admission = caller.turn(now)
            if admission is not None:
                called.append(admission)
                left.remove(caller)

    until(lambda: len(called) == len(let_in) == 64, turn)
    assert {caller._rounds for caller in callers} == {0}  # no caller had to call twice
    assert listener.refused == 0
    opened += [admission.stream for admission in called + let_in]


@pytest.mark.parametrize(("hosts", "calls"), [(24, 2), (4, 12)])
def test_storm_of_several_hosts_drops_no_caller(
    hosts: int, calls: int, opened: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each address is another host, as far as the listener can see."""
    listener = make_listener(True, pending_handshakes_max=16)
    opened.append(listener)
    numbers = itertools.count()

    def connect(to: Endpoint) -> socket.socket:
        sock = prepare(socket.socket())
        sock.bind((f"127.0.1.{1 + next(numbers) // calls}", 0))
        sock.connect_ex(to.sockaddr)
        return sock

    monkeypatch.setattr("hoplite_mp._transport.caller.begin_connect", connect)
    callers = [make_caller(listener.address, True, timeout_s=60.0) for _ in range(hosts * calls)]
    left, called, let_in = list(callers), [], []

    def turn() -> None:
        now = time.monotonic()
        let_in.extend(listener.turn(now))
        for caller in list(left):
            admission = caller.turn(now)
            if admission is not None:
                called.append(admission)
                left.remove(caller)

    until(lambda: len(called) == len(let_in) == len(callers), turn)
    assert {caller._rounds for caller in callers} == {0}
    assert listener.refused == 0
    opened += [admission.stream for admission in called + let_in]


@TLS
def test_one_byte_at_a_time_within_the_deadline_is_let_in(tls: bool, opened: list[Any]) -> None:
    """Through a proxy that carries single bytes."""
    listener = make_listener(tls, handshake_timeout_s=60.0)
    opened.append(listener)
    with socket.create_server(("127.0.0.1", 0)) as middle:
        caller = make_caller(middle.getsockname(), tls, handshake_timeout_s=60, timeout_s=60)
        assert caller.turn(time.monotonic()) is None
        near, _ = middle.accept()
        far = socket.create_connection(listener.address)
    opened += [near, far]
    for end in (near, far):
        end.setblocking(False)
    called, let_in = [], []

    def turn() -> None:
        for source, target in ((near, far), (far, near)):
            try:
                target.sendall(source.recv(1))
            except BlockingIOError:
                continue
        let_in.extend(listener.turn(time.monotonic()))
        if not called:
            called.extend(filter(None, [caller.turn(time.monotonic())]))

    until(lambda: called and let_in, turn)
    opened += [called[0].stream, let_in[0].stream]


def test_the_flood_of_one_host_is_in_its_own_way(opened: list[Any]) -> None:
    listener = make_listener(False, pending_handshakes_max=4)
    opened.append(listener)
    other = socket.socket()
    other.bind(("127.0.0.2", 0))  # another host, as far as the listener can see
    other.connect(listener.address)
    opened.append(other)
    until(lambda: listener.strangers == 1, lambda: listener.turn(0.0))
    flood = [knock(listener) for _ in range(4 + 4 * LINE_FACTOR)]
    opened += flood
    until(lambda: listener.strangers == 4, lambda: listener.turn(0.0))
    for _ in range(30):
        listener.turn(0.0)
    assert listener.strangers == 4
    other.setblocking(False)
    with pytest.raises(BlockingIOError):
        other.recv(1)  # it is still connected, the flood's own oldest are not
    flood[-1].settimeout(5)
    assert flood[-1].recv(1) == b""
    third = socket.socket()
    third.bind(("127.0.0.3", 0))
    third.connect(listener.address)
    opened.append(third)
    flood[0].setblocking(False)

    def ended() -> bool:
        try:
            return flood[0].recv(1) == b""
        except BlockingIOError:
            return False

    until(lambda: listener.deadline == SILENT_S, lambda: listener.turn(0.0))  # the third host waits
    until(ended, lambda: listener.turn(SILENT_S))  # its place is the third host's now
    assert listener.strangers == 4
    with pytest.raises(BlockingIOError):
        other.recv(1)


def test_callers_beyond_the_limit_wait_in_a_line_and_their_time_has_not_begun(
    opened: list[Any],
) -> None:
    listener = make_listener(False, pending_handshakes_max=4)
    opened.append(listener)
    callers = [knock(listener) for _ in range(12)]
    opened += callers
    until(lambda: len(listener._queue) == 8, lambda: listener.turn(0.0))
    assert listener.strangers == 4
    for caller in callers[:4]:
        caller.close()
    until(lambda: len(listener._queue) == 4, lambda: listener.turn(100.0))
    assert listener.strangers == 4
    assert listener.deadline is not None
    assert listener.deadline > 100.0
    for caller in callers[4:]:
        caller.setblocking(False)
        with pytest.raises(BlockingIOError):
            caller.recv(1)


def test_caller_that_comes_when_the_only_stranger_ends_joins_the_line(opened: list[Any]) -> None:
    listener = make_listener(False, pending_handshakes_max=1)
    opened.append(listener)
    first, second = knock(listener), knock(listener)
    opened.append(second)
    until(lambda: len(listener._queue) == 1, lambda: listener.turn(0.0))
    listener.turn(0.0)  # finds nothing, so that the end is announced before the next caller
    first.close()
    opened.append(knock(listener))
    listener.turn(0.0)
    assert listener.strangers == 1
    assert len(listener._queue) == 1
    second.close()
    until(lambda: not listener._queue, lambda: listener.turn(0.0))
    assert listener.strangers == 1


def test_without_descriptors_the_door_pauses(
    opened: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    listener = make_listener(False)
    opened.append(listener)
    sock = knock(listener)
    opened.append(sock)

    class Exhausted:
        def __getattr__(self, name: str) -> Any:
            return getattr(listening_socket, name)

        def accept(self) -> None:
            raise OSError(errno.EMFILE, "Too many open files")

    listening_socket = listener._listener
    monkeypatch.setattr(listener, "_listener", Exhausted())
    select.select([listener], [], [], 5)
    listener.turn(10.0)
    assert listener.deadline == pytest.approx(10.1)
    assert select.select([listener], [], [], 0)[0] == []  # it does not wake the loop for nothing
    monkeypatch.undo()
    listener.turn(10.2)
    until(lambda: listener.strangers == 1, lambda: listener.turn(10.2))
