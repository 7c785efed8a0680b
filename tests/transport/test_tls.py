"""TLS: any cut of the record stream, changes of keys, ends, and who does not speak it."""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import socket
import ssl
import subprocess
import threading
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hoplite_mp._transport.stream import NOT_TLS
from hoplite_mp._transport.tls import OPENERS, TlsStream, client_context, server_context
from tests.support.transport import certificate, tcp_pair, tls_pair, until

if TYPE_CHECKING:
    from collections.abc import Iterator


def shaken() -> tuple[TlsStream, TlsStream]:
    client, server = tls_pair(tcp_pair())

    def turn() -> None:
        client.flush()
        server.flush()

    until(lambda: client.certificate_sha256 and server.certificate_sha256, turn)
    return client, server


def test_both_sides_see_the_same_certificate() -> None:
    client, server = shaken()
    assert client.certificate_sha256 == server.certificate_sha256 == certificate().sha256
    assert client._tls.version() == "TLSv1.3"
    assert not client.wants_write
    client.close()
    server.close()


class Wire:
    """Two TLS ends whose bytes a test carries from one to the other, in pieces of its choice."""

    def __init__(self) -> None:
        client_end, self.client_far = socket.socketpair()
        server_end, self.server_far = socket.socketpair()
        self.client, self.server = tls_pair((client_end, server_end))
        self.client_far.setblocking(False)
        self.server_far.setblocking(False)

    def carry(self, sizes: Iterator[int]) -> int:
        """One piece each way; how many bytes moved."""
        moved = 0
        for source, target in (
            (self.client_far, self.server_far),
            (self.server_far, self.client_far),
        ):
            with contextlib.suppress(BlockingIOError):
                data = source.recv(next(sizes))
                target.sendall(data)
                moved += len(data)
        return moved

    def close(self) -> None:
        for end in (self.client, self.server, self.client_far, self.server_far):
            end.close()


@given(st.lists(st.integers(1, 700), min_size=1, max_size=8), st.binary(max_size=5000))
@settings(deadline=None, max_examples=30)
def test_records_arrive_in_any_pieces(sizes: list[int], data: bytes) -> None:
    wire = Wire()
    wire.client.write(data)
    wire.server.write(data[::-1])
    up, down = bytearray(), bytearray()

    def endless() -> Iterator[int]:
        while True:
            yield from sizes

    pieces = endless()

    def turn() -> None:
        wire.client.flush()
        wire.server.flush()
        wire.carry(pieces)
        up.extend(wire.server.read() or b"")
        down.extend(wire.client.read() or b"")

    try:
        until(lambda: len(up) == len(down) == len(data), turn)
        assert (up, down) == (data, data[::-1])
    finally:
        wire.close()


@pytest.mark.parametrize("cut", [0, 1, 5, 100, 400, 700, 900])
def test_a_cut_during_the_handshake_is_an_end_with_a_reason(cut: int) -> None:
    wire = Wire()
    wire.client.flush()
    passed = 0
    while passed < cut:
        step = wire.carry(iter(lambda: 1, 0))
        if not step:
            break
        passed += step
        wire.server.flush()
        wire.client.flush()
    wire.client_far.close()
    wire.server_far.close()
    for end in (wire.client, wire.server):
        got = []
        until(lambda got=got: got[-1:] == [None], lambda got=got, end=end: got.append(end.read()))
        assert end.failure
        assert not end.wants_write
        assert end.certificate_sha256 is None or cut > 800
    wire.close()


def test_the_end_that_anybody_can_forge_is_not_an_orderly_one() -> None:
    client, server = shaken()
    client.write(b"a whole frame")
    client.flush()
    until(lambda: server.read() == b"a whole frame", lambda: None)
    socket.socket.shutdown(client._tls, socket.SHUT_WR)  # FIN of TCP, no close_notify
    got = []
    until(lambda: got[-1:] == [None], lambda: got.append(server.read()))
    assert server.failure == "the connection was cut"
    client.close()
    server.close()


@pytest.mark.parametrize("data", [b"SSH-2.0-x\r\n", b"HTTP/1.1 400\r\n\r\n", b"HOPLITE\x01"])
def test_who_does_not_speak_tls_is_named_so(data: bytes) -> None:
    ours, theirs = tcp_pair()
    client = TlsStream(ours, client_context())
    client.flush()
    theirs.sendall(data)
    until(lambda: client.failure, client.read)
    assert client.failure == NOT_TLS
    client.close()
    theirs.close()


@pytest.mark.parametrize("first", [3, 127, 200])
def test_an_answer_that_arrives_just_after_the_look_at_its_first_byte(first: int) -> None:
    """OpenSSL takes the beginning of the server's answer in the call that sends the client's first
    message. What waits then looks like anything but the beginning of TLS."""
    ours, near = tcp_pair()
    far, theirs = tcp_pair()
    shown = certificate()
    client = TlsStream(ours, client_context())
    server = TlsStream(theirs, server_context(shown), server_sha256=shown.sha256)

    def carry(source: socket.socket, target: socket.socket) -> None:
        source.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            target.sendall(source.recv(1 << 16))

    with pytest.raises(ssl.SSLWantReadError):
        client._tls.do_handshake()
    until(lambda: not server._opener_missing, lambda: (carry(near, far), server.flush()))
    until(lambda: select.select([far], [], [], 0)[0], server.flush)
    answer = far.recv(1 << 16)
    near.sendall(answer[:first])
    until(lambda: select.select([client._tls], [], [], 0)[0], lambda: None)
    with pytest.raises(ssl.SSLWantReadError):
        client._tls.do_handshake()
    client._may_send = True  # as after a first call that did all this
    near.sendall(answer[first:])
    until(lambda: select.select([client._tls], [], [], 0)[0], lambda: None)
    assert client.opener() not in OPENERS

    def turn() -> None:
        client.flush()
        carry(near, far)
        server.flush()
        carry(far, near)

    until(lambda: client.certificate_sha256 and server.certificate_sha256, turn)
    assert client.failure is server.failure is None
    for end in (client, server, near, far):
        end.close()


def test_a_server_looks_at_the_first_byte_before_openssl_takes_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Not even where the client's first message arrives between the look and the handshake."""
    ours, theirs = tcp_pair()
    client, server = tls_pair((ours, theirs))
    client.flush()
    until(lambda: select.select([server._tls], [], [], 0)[0], lambda: None)
    with monkeypatch.context() as patch:
        patch.setattr(server, "opener", lambda: None)
        server.flush()
    assert server.opener() in OPENERS
    until(lambda: client.certificate_sha256, lambda: (server.flush(), client.flush()))
    client.close()
    server.close()


def test_older_versions_are_refused() -> None:
    ours, theirs = tcp_pair()
    shown = certificate()
    server = TlsStream(theirs, server_context(shown), server_sha256=shown.sha256)
    old = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    old.check_hostname = False
    old.verify_mode = ssl.CERT_NONE
    old.maximum_version = ssl.TLSVersion.TLSv1_2
    client = TlsStream(ours, old)

    def turn() -> None:
        client.flush()
        server.flush()
        client.read()

    until(lambda: client.failure and server.failure, turn)
    assert server.failure is not None
    assert server.failure.startswith("TLS failed: ")
    client.close()
    server.close()


def test_a_connection_that_is_gone_before_it_begins() -> None:
    ours, theirs = tcp_pair()
    theirs.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")  # reset at close
    theirs.close()
    with contextlib.suppress(OSError):  # either is allowed, a hang or an open socket is not
        client = TlsStream(ours, client_context())
        until(lambda: client.read() is None, client.flush)
        assert client.failure
        client.close()
    assert ours.fileno() == -1


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs the openssl program")
def test_a_change_of_keys_in_the_middle() -> None:
    """`openssl s_client` asks for one, of both directions, when it reads a line "K"."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        process = subprocess.Popen(
            ["openssl", "s_client", "-tls1_3", "-connect", f"127.0.0.1:{port}"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            bufsize=0,
        )
        with process:
            try:
                _change_keys(listener.accept()[0], process)
            finally:
                process.kill()


def _change_keys(accepted: socket.socket, process: subprocess.Popen[bytes]) -> None:
    shown = certificate()
    server = TlsStream(accepted, server_context(shown), server_sha256=shown.sha256)
    with contextlib.closing(server):
        _keys_change(server, process)


def _keys_change(server: TlsStream, process: subprocess.Popen[bytes]) -> None:
    assert process.stdin is not None
    assert process.stdout is not None
    got, said = bytearray(), bytearray()

    def turn() -> None:
        server.flush()
        got.extend(server.read() or b"")
        assert server.failure is None

    until(lambda: server.certificate_sha256, turn)
    process.stdin.write(b"before\n")
    until(lambda: got == b"before\n", turn)
    process.stdin.write(b"K\n")
    while b"KEYUPDATE" not in said:
        said += process.stdout.read(1 << 16)
    process.stdin.write(b"after\n")
    until(lambda: got == b"before\nafter\n", turn)
    server.write(b"answered\n")
    until(lambda: not server.wants_write, turn)
    while b"answered" not in said:
        said += process.stdout.read(1 << 16)


def test_a_thread_uses_the_detached_socket_with_blocking_calls() -> None:
    client, server = shaken()
    size = 4 << 20
    sending, receiving = client.detach(), server.detach()
    assert isinstance(sending, ssl.SSLSocket)
    sending.setblocking(True)
    receiving.setblocking(True)
    data = os.urandom(size)
    thread = threading.Thread(target=sending.sendall, args=(data,))
    thread.start()
    into = memoryview(bytearray(size))
    place = 0
    while place < size:
        place += receiving.recv_into(into[place:])
    thread.join()
    assert into == data
    for end in (sending, receiving, client, server):
        end.close()


def test_read_of_a_short_record_leaves_the_next_one_to_the_loop() -> None:
    client, server = shaken()
    for data in (b"first", b"second"):
        client.write(data)
        assert client.flush()
    select.select([server], [], [], 5)
    assert server.read() == b"first"
    assert not server.buffered
    assert select.select([server], [], [], 5)[0] == [server]  # the loop announces the second one
    assert server.read() == b"second"
    client.close()
    server.close()
