"""Listeners and callers over real sockets: who does not get in, and what each is told."""

from __future__ import annotations

import logging
import select
import socket
import ssl
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hoplite_mp._protocol import greetings as g
from hoplite_mp._protocol.secret import Secret
from hoplite_mp._transport.caller import Dialer
from hoplite_mp._transport.sockets import listen
from hoplite_mp._transport.tls import TlsStream, client_context, server_context
from hoplite_mp.errors import AuthError, ProtocolError
from tests.support.transport import (
    CLIENT,
    KEY,
    TLS,
    answer,
    endpoint,
    knock,
    make_caller,
    make_listener,
    meet,
    other_certificate,
    until,
)

if TYPE_CHECKING:
    from hoplite_mp._transport.listener import Listener


def refused(listener: Listener, caller: Dialer, kind: type[Exception], words: str) -> None:
    with pytest.raises(kind, match=words):
        meet(listener, caller)
    # What it may still have to read is in its socket; the listener forgets it within LEAVE_S.
    until(lambda: listener.strangers == 0, lambda: listener.turn(time.monotonic()))
    assert listener.refused == 1


@TLS
def test_a_wrong_token(tls: bool, opened: list[Any], caplog: pytest.LogCaptureFixture) -> None:
    listener = make_listener(tls)
    opened.append(listener)
    with caplog.at_level(logging.WARNING, "hoplite_mp"):
        refused(
            listener,
            make_caller(listener.address, tls, key=Secret(b"x" * 32)),
            AuthError,
            "manager at 127.0.0.1:",
        )
    (record,) = caplog.records
    assert "manager refused 127.0.0.1:" in record.getMessage()
    assert "another token" in record.getMessage()


def test_warnings_do_not_fill_the_log(opened: list[Any], caplog: pytest.LogCaptureFixture) -> None:
    listener = make_listener(False)
    opened.append(listener)
    with caplog.at_level(logging.WARNING, "hoplite_mp"):
        for _ in range(5):
            caller = make_caller(listener.address, False, key=Secret(b"x" * 32))
            with pytest.raises(AuthError):
                until(
                    lambda: False,
                    lambda caller=caller: (listener.turn(1000.0), caller.turn(time.monotonic())),
                )
        assert len(caplog.records) == 1
        caller = make_caller(listener.address, False, key=Secret(b"x" * 32))
        with pytest.raises(AuthError):
            until(lambda: False, lambda: (listener.turn(1001.5), caller.turn(time.monotonic())))
    assert "and 4 more" in caplog.records[-1].getMessage()


@TLS
def test_the_wrong_service_another_cluster_other_software(tls: bool, opened: list[Any]) -> None:
    for options, words in (
        ({"role": "peer"}, "does not serve this kind"),
        ({"cluster": b"d" * 16}, "another cluster"),
        ({"mine": g.Introduction(11, {"python": "3.12.1"})}, r"python +3\.12\.1 +3\.11\.7"),
    ):
        listener = make_listener(tls)
        opened.append(listener)
        refused(listener, make_caller(listener.address, tls, **options), ProtocolError, words)


def test_a_plain_client_at_a_tls_door_and_the_other_way_round(opened: list[Any]) -> None:
    for tls, words in ((True, "it uses TLS.* Remove tls=False"), (False, "does not use TLS")):
        listener = make_listener(tls)
        opened.append(listener)
        refused(listener, make_caller(listener.address, not tls), ProtocolError, words)


@TLS
@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        b"\x16\x03\x01\x00\x05hello and more of what is no TLS",
        b"\x80\x04\x95" + bytes(100),
        g.PREAMBLE + b"\xff\xff" + bytes(5000),
        g.PREAMBLE + g.encode_frame(g.Welcome(bytes(32))),
        bytes(300_000),
    ],
    ids=["http", "tls", "pickle", "long", "turn", "zeros"],
)
def test_garbage_ends_at_the_door(tls: bool, data: bytes, opened: list[Any]) -> None:
    listener = make_listener(tls)
    opened.append(listener)
    said = answer(listener, knock(listener, data))
    assert len(said) < 100  # a word of refusal, or an alert of TLS
    # The listener is as good as before.
    called, let_in = meet(listener, make_caller(listener.address, tls))
    opened += [called.stream, let_in.stream]


@TLS
@pytest.mark.parametrize("opening", [b"", b"H", g.PREAMBLE, b"\x16\x03\x01"])
def test_a_silent_peer_is_gone_after_the_deadline(
    tls: bool, opening: bytes, opened: list[Any]
) -> None:
    listener = make_listener(tls)
    opened.append(listener)
    sock = knock(listener, opening)
    opened.append(sock)
    select.select([listener], [], [], 5)
    assert listener.turn(100.0) == []
    assert listener.strangers == 1
    assert 100.0 < listener.deadline <= 105.0
    listener.turn(104.9)
    listener.turn(105.0)
    listener.turn(106.1)
    assert listener.strangers == 0


@TLS
def test_one_byte_a_second_is_not_enough(tls: bool, opened: list[Any]) -> None:
    """Each byte is news, but the deadline is that of the whole handshake."""
    listener = make_listener(tls)
    opened.append(listener)
    hello = g.PREAMBLE + g.encode_frame(g.Hello("node", bytes(32)))
    if tls:
        ours, record = ssl.MemoryBIO(), ssl.MemoryBIO()
        shaking = client_context().wrap_bio(ours, record)
        with pytest.raises(ssl.SSLWantReadError):
            shaking.do_handshake()
        hello = record.read()
    sock = knock(listener)
    for second, byte in enumerate(hello[:20]):
        sock.send(bytes((byte,)))
        select.select([listener], [], [], 0.01)
        listener.turn(float(second))
        assert listener.strangers == (second < 5)
        if second >= 5:
            break
    opened.append(sock)


@TLS
def test_a_replayed_recording(tls: bool, opened: list[Any]) -> None:
    """A proxy records what a good client said inside its connection, and says it again."""
    listener = make_listener(tls)
    opened.append(listener)
    heard: list[bytes] = []
    called, let_in = meet(listener, Recording(listener, tls, heard))
    opened += [called.stream, let_in.stream]
    recording = b"".join(heard)
    assert recording.startswith(g.PREAMBLE)
    sock: socket.socket = socket.create_connection(listener.address)
    if tls:
        shaken = threading.Event()
        turning = threading.Thread(target=turned_until, args=(listener, shaken))
        turning.start()
        sock = client_context().wrap_socket(sock)
        shaken.set()
        turning.join()
        assert listener.strangers == 1
    sock.sendall(recording)
    until(lambda: listener.refused == 1, lambda: listener.turn(time.monotonic()))
    sock.close()


def turned_until(listener: Listener, over: threading.Event) -> None:
    """Lets the listener work beside a blocking client."""
    while not over.is_set():
        assert listener.turn(time.monotonic()) == []


class Recording(Dialer):
    """A caller that notes what its conversation writes."""

    def __init__(self, listener: Listener, tls: bool, heard: list[bytes]) -> None:
        super().__init__(
            [endpoint(listener.address)],
            key=KEY,
            role="node",
            mine=CLIENT,
            tls=tls,
            now=time.monotonic(),
            timeout_s=60,
            handshake_timeout_s=60,
        )
        self._heard = heard

    def _connected(self, sock: socket.socket, now: float) -> None:
        super()._connected(sock, now)
        assert self._stream is not None
        write = self._stream.write

        def noted(data: bytes) -> None:
            self._heard.append(data)
            write(data)

        self._stream.write = noted  # type: ignore[method-assign]


class Relay:
    """Sits between with a certificate of its own, and passes on everything that is said inside."""

    def __init__(self, listener: Listener, near_tls: bool, remote_tls: bool) -> None:
        self.listening_socket = listen("127.0.0.1", [0])
        self.listener = listener
        self.near_tls, self.remote_tls = near_tls, remote_tls
        self.ends: list[Any] = []

    def close(self) -> None:
        self.listening_socket.close()
        for end in self.ends:
            end.close()

    def turn(self) -> None:
        if not self.ends:
            try:
                near, _ = self.listening_socket.accept()
            except BlockingIOError:
                return
            far = socket.create_connection(self.listener.address)
            shown = other_certificate()
            self.ends = [
                TlsStream(near, server_context(shown), server_sha256=shown.sha256)
                if self.near_tls
                else _plain(near),
                TlsStream(far, client_context()) if self.remote_tls else _plain(far),
            ]
        for source, target in (self.ends, self.ends[::-1]):
            source.flush()
            data = source.read()
            if data:
                target.write(data)
            target.flush()


def _plain(sock: socket.socket) -> Any:
    from hoplite_mp._transport.stream import TcpStream

    return TcpStream(sock)


@pytest.mark.parametrize(
    ("near_tls", "remote_tls"), [(True, True), (False, True), (True, False)], ids=str
)
def test_a_relay_gets_neither_side_in(near_tls: bool, remote_tls: bool, opened: list[Any]) -> None:
    """It shows its own certificate to a TLS client, or takes TLS away from one side."""
    listener = make_listener(remote_tls)
    relay = Relay(listener, near_tls, remote_tls)
    opened += [listener, relay]
    caller = make_caller(relay.listening_socket.getsockname(), near_tls)

    def turn() -> None:
        relay.turn()
        assert listener.turn(time.monotonic()) == []
        assert caller.turn(time.monotonic()) is None

    with pytest.raises(AuthError, match="token"):
        until(lambda: False, turn)
    assert listener.refused == 1


def test_the_relay_of_this_test_does_pass_everything_on(opened: list[Any]) -> None:
    """Without TLS on either side nothing betrays it: what tls=False gives up."""
    listener = make_listener(False)
    relay = Relay(listener, False, False)
    opened += [listener, relay]
    caller = make_caller(relay.listening_socket.getsockname(), False)
    called, let_in = [], []

    def turn() -> None:
        relay.turn()
        let_in.extend(listener.turn(time.monotonic()))
        if not called:
            called.extend(filter(None, [caller.turn(time.monotonic())]))

    until(lambda: called and let_in, turn)
    opened += [called[0].stream, let_in[0].stream]


@TLS
@given(
    openings=st.lists(
        st.tuples(st.sampled_from([b"", g.PREAMBLE, b"\x16\x03\x01"]), st.binary(max_size=200)),
        min_size=1,
        max_size=8,
    )
)
@settings(deadline=None, max_examples=25)
def test_noise_at_the_port(tls: bool, openings: list[tuple[bytes, bytes]]) -> None:
    """Several at once; each has hung up by the time that the listener looks, or while it does."""
    listener = make_listener(tls)
    try:
        for number, (prefix, noise) in enumerate(openings):
            knock(listener, prefix + noise).close()
            assert listener.turn(float(number)) == []
        until(lambda: listener.strangers == 0, lambda: listener.turn(4.0))
    finally:
        listener.close()


def test_our_own_mistake_with_a_stranger_is_not_the_end_of_the_host(
    opened: list[Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    listener = make_listener(False)
    opened.append(listener)
    opened.append(knock(listener, g.PREAMBLE))
    monkeypatch.setattr(listener, "_begin", None)
    until(lambda: caplog.records, lambda: listener.turn(0.0))
    assert listener.strangers == 0
    monkeypatch.undo()
    called, let_in = meet(listener, make_caller(listener.address, False))
    opened += [called.stream, let_in.stream]
