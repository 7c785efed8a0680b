"""Doors and callers over real sockets: who gets in, who does not, and what each is told."""

from __future__ import annotations

import errno
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

from hoplite_mp.errors import AuthError, ManagerLostError, ProtocolError
from hoplite_mp.protocol import greetings as g
from hoplite_mp.transport.addresses import Endpoint
from hoplite_mp.transport.caller import Caller
from hoplite_mp.transport.door import Door
from hoplite_mp.transport.listen import listen
from hoplite_mp.transport.tls import TlsStream, client_context, server_context
from tests.transport.helpers import (
    CLIENT,
    CLUSTER,
    KEY,
    SERVER,
    certificate,
    endpoint,
    make_caller,
    make_door,
    meet,
    other_certificate,
    until,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

TLS = pytest.mark.parametrize("tls", [True, False], ids=["tls", "plain"])


@pytest.fixture
def opened() -> Iterator[list[Any]]:
    """Whatever a test puts in is closed behind it."""
    things: list[Any] = []
    yield things
    for thing in reversed(things):
        thing.close()


def knock(door: Door, data: bytes = b"") -> socket.socket:
    sock = socket.create_connection(door.address)
    sock.sendall(data)
    return sock


def answer(door: Door, sock: socket.socket, now: Callable[[], float] = time.monotonic) -> bytes:
    """Everything that the door says until it closes the connection."""
    sock.setblocking(False)
    said = bytearray()
    ended = False

    def turn() -> None:
        nonlocal ended
        assert door.turn(now()) == []
        try:
            data = sock.recv(1 << 16)
        except BlockingIOError:
            return
        except ConnectionResetError:
            data = b""
        said.extend(data)
        ended = not data

    until(lambda: ended, turn)
    sock.close()
    until(lambda: door.strangers == 0, lambda: door.turn(now()))
    return bytes(said)


# ---- who gets in


@TLS
@pytest.mark.parametrize(
    ("role", "service"), [("node", "manager"), ("tool", "manager"), ("peer", "node")]
)
def test_both_get_a_stream_and_know_whose(
    tls: bool, role: str, service: str, opened: list[Any]
) -> None:
    door = make_door(tls, service=service)
    opened.append(door)
    called, let_in = meet(door, make_caller(door.address, tls, role=role, cluster=CLUSTER))
    opened += [called.stream, let_in.stream]
    assert (let_in.role, let_in.peer, let_in.cluster) == (role, CLIENT, CLUSTER)
    assert (called.role, called.peer, called.cluster) == (role, SERVER, CLUSTER)
    assert called.address == str(door.address)
    assert door.strangers == 0
    assert door.deadline is None
    let_in.stream.write(b"welcome")
    let_in.stream.flush()
    until(lambda: called.stream.read() == b"welcome", lambda: None)


@TLS
def test_data_connections_become_sockets_for_blocking_calls(tls: bool, opened: list[Any]) -> None:
    door = make_door(tls, service="node")
    opened.append(door)
    called, let_in = meet(door, make_caller(door.address, tls, role="data"))
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
    door = make_door(tls)
    opened.append(door)
    caller = make_caller(door.address, tls)
    opened.append(caller)
    let_in = []
    called = []

    def turn() -> None:
        for admission in door.turn(time.monotonic()):
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
    door = make_door(tls, unauthenticated_max=32)
    opened.append(door)
    callers = [make_caller(door.address, tls) for _ in range(20)]
    called, let_in = [], []

    def turn() -> None:
        now = time.monotonic()
        let_in.extend(door.turn(now))
        for caller in list(callers):
            admission = caller.turn(now)
            if admission is not None:
                called.append(admission)
                callers.remove(caller)

    until(lambda: len(called) == len(let_in) == 20, turn)
    opened += [admission.stream for admission in called + let_in]


@TLS
def test_one_byte_at_a_time_within_the_deadline_is_let_in(tls: bool, opened: list[Any]) -> None:
    """Through a proxy that carries single bytes."""
    door = make_door(tls, handshake_timeout_s=60.0)
    opened.append(door)
    with socket.create_server(("127.0.0.1", 0)) as middle:
        caller = make_caller(middle.getsockname(), tls, handshake_timeout_s=60, timeout_s=60)
        assert caller.turn(time.monotonic()) is None
        near, _ = middle.accept()
        far = socket.create_connection(door.address)
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
        let_in.extend(door.turn(time.monotonic()))
        if not called:
            called.extend(filter(None, [caller.turn(time.monotonic())]))

    until(lambda: called and let_in, turn)
    opened += [called[0].stream, let_in[0].stream]


# ---- who does not


def refused(door: Door, caller: Caller, kind: type[Exception], words: str) -> None:
    with pytest.raises(kind, match=words):
        meet(door, caller)
    # What it may still have to read is in its socket; the door forgets it within LEAVE_S.
    until(lambda: door.strangers == 0, lambda: door.turn(time.monotonic()))
    assert door.refused == 1


@TLS
def test_a_wrong_token(tls: bool, opened: list[Any], caplog: pytest.LogCaptureFixture) -> None:
    door = make_door(tls)
    opened.append(door)
    began = time.monotonic()
    with caplog.at_level(logging.WARNING, "hoplite_mp"):
        refused(
            door, make_caller(door.address, tls, key=b"x" * 32), AuthError, "manager at 127.0.0.1:"
        )
    assert time.monotonic() - began < 5.0
    (record,) = caplog.records
    assert "manager refused 127.0.0.1:" in record.getMessage()
    assert "another token" in record.getMessage()


def test_warnings_do_not_fill_the_log(opened: list[Any], caplog: pytest.LogCaptureFixture) -> None:
    door = make_door(False)
    opened.append(door)
    with caplog.at_level(logging.WARNING, "hoplite_mp"):
        for _ in range(5):
            caller = make_caller(door.address, False, key=b"x" * 32)
            with pytest.raises(AuthError):
                until(
                    lambda: False,
                    lambda caller=caller: (door.turn(1000.0), caller.turn(time.monotonic())),
                )
        assert len(caplog.records) == 1
        caller = make_caller(door.address, False, key=b"x" * 32)
        with pytest.raises(AuthError):
            until(lambda: False, lambda: (door.turn(1001.5), caller.turn(time.monotonic())))
    assert "and 4 more" in caplog.records[-1].getMessage()


@TLS
def test_the_wrong_service_another_cluster_other_software(tls: bool, opened: list[Any]) -> None:
    for options, words in (
        ({"role": "peer"}, "does not serve this kind"),
        ({"cluster": b"d" * 16}, "another cluster"),
        ({"mine": g.Introduction(11, {"python": "3.12.1"})}, r"python +3\.12\.1 +3\.11\.7"),
    ):
        door = make_door(tls)
        opened.append(door)
        refused(door, make_caller(door.address, tls, **options), ProtocolError, words)


def test_a_plain_client_at_a_tls_door_and_the_other_way_round(opened: list[Any]) -> None:
    for tls, words in ((True, "it speaks TLS .* Leave out tls=False"), (False, "speaks no TLS")):
        door = make_door(tls)
        opened.append(door)
        refused(door, make_caller(door.address, not tls), ProtocolError, words)


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
    door = make_door(tls)
    opened.append(door)
    said = answer(door, knock(door, data))
    assert len(said) < 100  # a word of refusal, or an alert of TLS
    # The door is as good as before.
    called, let_in = meet(door, make_caller(door.address, tls))
    opened += [called.stream, let_in.stream]


@TLS
@pytest.mark.parametrize("opening", [b"", b"H", g.PREAMBLE, b"\x16\x03\x01"])
def test_a_silent_peer_is_gone_after_the_deadline(
    tls: bool, opening: bytes, opened: list[Any]
) -> None:
    door = make_door(tls)
    opened.append(door)
    sock = knock(door, opening)
    opened.append(sock)
    select.select([door], [], [], 5)
    assert door.turn(100.0) == []
    assert door.strangers == 1
    assert 100.0 < door.deadline <= 105.0
    door.turn(104.9)
    door.turn(105.0)
    door.turn(106.1)
    assert door.strangers == 0


@TLS
def test_one_byte_a_second_is_not_enough(tls: bool, opened: list[Any]) -> None:
    """Each byte is news, but the deadline is that of the whole handshake."""
    door = make_door(tls)
    opened.append(door)
    hello = g.PREAMBLE + g.encode_frame(g.Hello("node", bytes(32)))
    if tls:
        ours, record = ssl.MemoryBIO(), ssl.MemoryBIO()
        shaking = client_context().wrap_bio(ours, record)
        with pytest.raises(ssl.SSLWantReadError):
            shaking.do_handshake()
        hello = record.read()
    sock = knock(door)
    for second, byte in enumerate(hello[:20]):
        sock.send(bytes((byte,)))
        select.select([door], [], [], 0.01)
        door.turn(float(second))
        assert door.strangers == (second < 5)
        if second >= 5:
            break
    opened.append(sock)


@TLS
def test_a_replayed_recording(tls: bool, opened: list[Any]) -> None:
    """A proxy records what a good client said inside its connection, and says it again."""
    door = make_door(tls)
    opened.append(door)
    heard: list[bytes] = []
    called, let_in = meet(door, Recording(door, tls, heard))
    opened += [called.stream, let_in.stream]
    recording = b"".join(heard)
    assert recording.startswith(g.PREAMBLE)
    sock: socket.socket = socket.create_connection(door.address)
    if tls:
        until_shaken = threading.Thread(target=lambda: turned_until(door, 1))
        until_shaken.start()
        sock = client_context().wrap_socket(sock)
        until_shaken.join()
    sock.sendall(recording)
    until(lambda: door.refused == 1, lambda: door.turn(time.monotonic()))
    sock.close()


def turned_until(door: Door, strangers: int, seconds: float = 0.3) -> None:
    """Lets the door work beside a blocking client."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        assert door.turn(time.monotonic()) == []
    assert door.strangers == strangers


class Recording(Caller):
    """A caller that notes what its conversation writes."""

    def __init__(self, door: Door, tls: bool, heard: list[bytes]) -> None:
        super().__init__(
            [endpoint(door.address)],
            key=KEY,
            role="node",
            mine=CLIENT,
            tls=tls,
            now=time.monotonic(),
            timeout_s=10,
            handshake_timeout_s=5,
        )
        self._heard = heard

    def _arrive(self, sock: socket.socket, now: float) -> None:
        super()._arrive(sock, now)
        assert self._stream is not None
        write = self._stream.write

        def noted(data: bytes) -> None:
            self._heard.append(data)
            write(data)

        self._stream.write = noted  # type: ignore[method-assign]


class Relay:
    """Sits between with a certificate of its own, and passes on everything that is said inside."""

    def __init__(self, door: Door, near_tls: bool, far_tls: bool) -> None:
        self.listener = listen("127.0.0.1", [0])
        self.door = door
        self.near_tls, self.far_tls = near_tls, far_tls
        self.ends: list[Any] = []

    def close(self) -> None:
        self.listener.close()
        for end in self.ends:
            end.close()

    def turn(self) -> None:
        if not self.ends:
            try:
                near, _ = self.listener.accept()
            except BlockingIOError:
                return
            far = socket.create_connection(self.door.address)
            shown = other_certificate()
            self.ends = [
                TlsStream(near, server_context(shown), server_sha256=shown.sha256)
                if self.near_tls
                else _plain(near),
                TlsStream(far, client_context()) if self.far_tls else _plain(far),
            ]
        for source, target in (self.ends, self.ends[::-1]):
            source.flush()
            data = source.read()
            if data:
                target.write(data)
            target.flush()


def _plain(sock: socket.socket) -> Any:
    from hoplite_mp.transport.stream import TcpStream

    return TcpStream(sock)


@pytest.mark.parametrize(
    ("near_tls", "far_tls"), [(True, True), (False, True), (True, False)], ids=str
)
def test_a_relay_gets_neither_side_in(near_tls: bool, far_tls: bool, opened: list[Any]) -> None:
    """It shows its own certificate to a TLS client, or takes TLS away from one side."""
    door = make_door(far_tls)
    relay = Relay(door, near_tls, far_tls)
    opened += [door, relay]
    caller = make_caller(relay.listener.getsockname(), near_tls)

    def turn() -> None:
        relay.turn()
        assert door.turn(time.monotonic()) == []
        assert caller.turn(time.monotonic()) is None

    with pytest.raises(AuthError, match="token"):
        until(lambda: False, turn)
    assert door.refused == 1


def test_the_relay_of_this_test_does_pass_everything_on(opened: list[Any]) -> None:
    """Without TLS on either side nothing betrays it: what tls=False gives up."""
    door = make_door(False)
    relay = Relay(door, False, False)
    opened += [door, relay]
    caller = make_caller(relay.listener.getsockname(), False)
    called, let_in = [], []

    def turn() -> None:
        relay.turn()
        let_in.extend(door.turn(time.monotonic()))
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
    """Several at once; each has hung up by the time that the door looks, or while it does."""
    door = make_door(tls)
    try:
        for number, (prefix, noise) in enumerate(openings):
            knock(door, prefix + noise).close()
            assert door.turn(float(number)) == []
        until(lambda: door.strangers == 0, lambda: door.turn(4.0))
    finally:
        door.close()


def test_our_own_mistake_with_a_stranger_is_not_the_end_of_the_host(
    opened: list[Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    door = make_door(False)
    opened.append(door)
    opened.append(knock(door, g.PREAMBLE))
    monkeypatch.setattr(door, "_begin", None)
    until(lambda: caplog.records, lambda: door.turn(0.0))
    assert door.strangers == 0
    monkeypatch.undo()
    called, let_in = meet(door, make_caller(door.address, False))
    opened += [called.stream, let_in.stream]


# ---- limits


def test_the_flood_of_one_host_is_in_its_own_way(opened: list[Any]) -> None:
    door = make_door(False, unauthenticated_max=4)
    opened.append(door)
    other = socket.socket()
    other.bind(("127.0.0.2", 0))  # another host, as far as the door can see
    other.connect(door.address)
    opened.append(other)
    until(lambda: door.strangers == 1, lambda: door.turn(0.0))
    flood = [knock(door) for _ in range(20)]
    opened += flood
    until(lambda: door.strangers == 4, lambda: door.turn(0.0))
    for _ in range(30):
        door.turn(0.0)
    assert door.strangers == 4
    other.setblocking(False)
    with pytest.raises(BlockingIOError):
        other.recv(1)  # it is still connected, the flood's own oldest are not
    flood[0].settimeout(5)
    assert flood[0].recv(1) == b""


def test_without_descriptors_the_door_pauses(
    opened: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    door = make_door(False)
    opened.append(door)
    sock = knock(door)
    opened.append(sock)

    class Exhausted:
        def __getattr__(self, name: str) -> Any:
            return getattr(listener, name)

        def accept(self) -> None:
            raise OSError(errno.EMFILE, "Too many open files")

    listener = door._listener
    monkeypatch.setattr(door, "_listener", Exhausted())
    select.select([door], [], [], 5)
    door.turn(10.0)
    assert door.deadline == pytest.approx(10.1)
    assert select.select([door], [], [], 0)[0] == []  # it does not wake the loop for nothing
    monkeypatch.undo()
    door.turn(10.2)
    until(lambda: door.strangers == 1, lambda: door.turn(10.2))


# ---- callers


def test_nobody_there_is_a_lost_manager_after_the_timeout() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        where = server.getsockname()
    caller = make_caller(where, True, now=0.0, timeout_s=10.0)
    caller.turn(0.0)
    until(lambda: caller.deadline > 0.1, lambda: caller.turn(0.0))
    assert caller.deadline == pytest.approx(0.2)  # the next round
    until(lambda: caller.deadline > 5.0, lambda: caller.turn(5.0))
    with pytest.raises(ManagerLostError, match=r"did not answer within 10 s \(127.*refused\)"):
        caller.turn(10.0)
    caller.close()


def test_a_node_that_is_not_there_is_a_connection_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        where = server.getsockname()
    caller = make_caller(where, False, role="peer", timeout_s=0.0)
    with pytest.raises(ConnectionError, match="node at 127"):
        caller.wait()


def test_who_is_about_to_start_is_waited_for(opened: list[Any]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        where = server.getsockname()
    caller = make_caller(where, False, now=0.0)
    until(lambda: caller.deadline > 0.1, lambda: caller.turn(0.0))
    door = Door(
        listen("127.0.0.1", [where[1]]),
        key=KEY,
        service="manager",
        cluster=CLUSTER,
        mine=SERVER,
        certificate=None,
        handshake_timeout_s=5,
        unauthenticated_max=8,
    )
    opened.append(door)
    called = []

    def turn() -> None:
        opened.extend(one.stream for one in door.turn(0.3))
        if not called:
            called.extend(filter(None, [caller.turn(0.3)]))

    until(lambda: called, turn)
    opened.append(called[0].stream)


def test_a_silent_address_is_left_for_the_next(opened: list[Any]) -> None:
    """The first accepts and says nothing, the second is somebody else's, the third is right."""
    door = make_door(False)
    with_other_id = make_door(False, mine=g.Introduction(99, SERVER.versions))
    silent = socket.create_server(("127.0.0.1", 0))
    opened += [door, with_other_id, silent]
    places = [silent.getsockname(), with_other_id.address, door.address]
    caller = make_caller(
        (), False, endpoints=[endpoint(place) for place in places], now=0.0, host=SERVER.host
    )
    called, let_in = [], []
    clock = 0.0

    def turn() -> None:
        nonlocal clock
        clock = 5.5
        let_in.extend(door.turn(clock))
        opened.extend(one.stream for one in with_other_id.turn(clock))
        if not called:
            called.extend(filter(None, [caller.turn(clock)]))

    until(lambda: caller._conversation, lambda: caller.turn(0.0))
    assert caller.deadline == 5.0
    until(lambda: called and let_in, turn)
    assert called[0].peer.host == SERVER.host
    opened += [called[0].stream, let_in[0].stream]


def test_a_refusal_is_final_once_all_addresses_were_tried(opened: list[Any]) -> None:
    door = make_door(False)
    opened.append(door)
    with socket.create_server(("127.0.0.1", 0)) as server:
        nobody = server.getsockname()
    endpoints = [endpoint(door.address), endpoint(nobody)]
    caller = make_caller((), False, endpoints=endpoints, key=b"x" * 32)
    with pytest.raises(AuthError):
        meet(door, caller)


def test_wait_needs_no_loop(opened: list[Any]) -> None:
    door = make_door(True)
    opened.append(door)
    let_in = []
    stop = threading.Event()

    def serve() -> None:
        while not stop.is_set():
            select.select([door], [], [], 0.05)
            let_in.extend(door.turn(time.monotonic()))

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        opened.append(make_caller(door.address, True).wait().stream)
    finally:
        stop.set()
        thread.join()
    opened.extend(one.stream for one in let_in)


def test_an_unreachable_address_ends_with_the_deadline() -> None:
    """A port that takes no connections because its backlog is full."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen(0)
        where = server.getsockname()
        fill = [socket.socket() for _ in range(4)]
        for sock in fill:
            sock.setblocking(False)
            sock.connect_ex(where)
        caller = make_caller(where, False, now=0.0, timeout_s=3.0)
        assert caller.turn(0.0) is None
        assert caller.turn(2.0) is None
        with pytest.raises(ManagerLostError, match="no answer"):
            caller.turn(3.0)
        for sock in fill:
            sock.close()


def test_nothing_stays_open(opened: list[Any]) -> None:
    with pytest.raises(ValueError, match="nobody to call"):
        make_caller((), False, endpoints=[])
    caller = make_caller(("127.0.0.1", 1), False)
    caller.close()
    caller.close()
    door = make_door(True)
    opened.append(knock(door))
    until(lambda: door.strangers == 1, lambda: door.turn(0.0))
    door.close()
    opened[0].settimeout(5)
    assert opened[0].recv(1) == b""
    assert isinstance(endpoint(("127.0.0.1", 1)), Endpoint)
    assert certificate().sha256 != other_certificate().sha256
