"""The handshake over the memory twin: every cut, every delay, and the same attackers again."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hoplite_mp._protocol.greetings import refusal
from hoplite_mp._protocol.handshake import PLAIN, ClientHandshake, HandshakeOutcome, ServerHandshake
from hoplite_mp._protocol.secret import Secret
from hoplite_mp._transport.conversation import Conversation
from hoplite_mp._transport.memory import MemoryStream, pair
from hoplite_mp.errors import AuthError, HopliteError, ProtocolError
from tests.support.transport import CLIENT, CLUSTER, KEY, SERVER

CERTIFICATE = b"S" * 32


def client_on(stream: MemoryStream, key: Secret = KEY, **more: Any) -> Conversation:
    return Conversation(
        stream,
        lambda sees: ClientHandshake(key, "node", CLIENT, certificate_sha256=sees, **more),
    )


def server_on(stream: MemoryStream, key: Secret = KEY, **more: Any) -> Conversation:
    make = partial(ServerHandshake, key, "manager", CLUSTER, SERVER, **more)
    return Conversation(stream, lambda sees: make(certificate_sha256=sees))


class Talk:
    """Both sides; what becomes of each."""

    def __init__(self, client: Conversation, server: Conversation) -> None:
        self.sides = {"client": client, "server": server}
        self.ends: dict[str, HandshakeOutcome | Exception] = {}

    def turn(self, nbytes: int | None = None) -> bool:
        """One step of each; whether anything moved."""
        moved = 0
        for name, side in self.sides.items():
            if name in self.ends:
                continue
            try:
                outcome = side.advance()
            except OSError as error:
                self.ends[name] = error
                side.stream.close()
            else:
                if outcome is not None:
                    self.ends[name] = outcome
            moved += name in self.ends
        for side in self.sides.values():
            assert isinstance(side.stream, MemoryStream)
            moved += side.stream.incoming.pump(nbytes)
        return bool(moved)

    def run(self, steps: list[int] | None = None) -> None:
        for step in steps or []:
            self.turn(step)
        while self.turn():
            pass


def good(client_sees: bytes = CERTIFICATE, **keys: bytes) -> Talk:
    a, b = pair(client_sees, CERTIFICATE)
    return Talk(client_on(a, keys.get("client", KEY)), server_on(b, keys.get("server", KEY)))


def length_of_each_way() -> tuple[int, int]:
    talk = good()
    talk.run()
    assert all(isinstance(end, HandshakeOutcome) for end in talk.ends.values())
    return tuple(side.stream.bytes_sent for side in talk.sides.values())  # type: ignore[return-value]


UP, DOWN = length_of_each_way()


@given(st.lists(st.integers(0, 40), max_size=60))
def test_any_delays(steps: list[int]) -> None:
    talk = good()
    talk.run(steps)
    assert all(isinstance(end, HandshakeOutcome) for end in talk.ends.values())


@given(st.sampled_from(["client", "server"]), st.integers(0, max(UP, DOWN)))
def test_a_cut_anywhere_lets_nobody_in_who_was_not_in(side: str, cut: int) -> None:
    talk = good()
    stream = talk.sides[side].stream
    assert isinstance(stream, MemoryStream)
    stream.outgoing.cut_after(cut)
    talk.run()
    length = UP if side == "client" else DOWN
    other = "server" if side == "client" else "client"
    if cut < length:
        assert isinstance(talk.ends[other], ConnectionError)
        assert not isinstance(talk.ends[other], HopliteError)
        if side == "client":  # the server has not heard the introduction: neither is done
            assert isinstance(talk.ends["client"], ConnectionError)
    else:
        assert isinstance(talk.ends[other], HandshakeOutcome)


@pytest.mark.parametrize(
    ("talk", "error"),
    [
        (good(client=Secret(b"x" * 32)), AuthError),
        (good(server=Secret(b"x" * 32)), AuthError),
        (good(client_sees=b"M" * 32), AuthError),
        (good(client_sees=PLAIN), AuthError),
    ],
    ids=["client's token", "server's token", "relay", "relay without TLS"],
)
def test_who_must_not_get_in(talk: Talk, error: type[Exception]) -> None:
    talk.run([1] * 20)
    assert {type(end) for end in talk.ends.values()} == {error}


def test_a_recording() -> None:
    """What a good client said, into a new connection; and a good server's words to a new client."""
    talk = good()
    heard: dict[str, bytearray] = {}
    for name, side in talk.sides.items():
        heard[name] = bytearray()
        write = side.stream.write

        def note(data: bytes, name: str = name, write: Any = write) -> None:
            heard[name] += data
            write(data)

        side.stream.write = note  # type: ignore[method-assign]
    talk.run()
    a, b = pair(CERTIFICATE, CERTIFICATE)
    server = server_on(b)
    a.write(bytes(heard["client"]))
    a.flush()
    a.outgoing.pump()
    with pytest.raises(AuthError):
        server.advance()
    a, b = pair(CERTIFICATE, CERTIFICATE)
    client = client_on(a)
    b.write(bytes(heard["server"]))
    b.flush()
    b.outgoing.pump()
    with pytest.raises(AuthError):
        client.advance()


def test_the_clients_own_words_sent_back() -> None:
    a, b = pair(CERTIFICATE, CERTIFICATE)
    client = client_on(a)
    assert client.advance() is None
    b.incoming.pump()
    b.write(b.read() or b"")
    b.flush()
    a.incoming.pump()
    with pytest.raises(ProtocolError, match="unexpected Hello"):
        client.advance()


@given(st.binary(min_size=1, max_size=200))
def test_garbage(garbage: bytes) -> None:
    for make in (client_on, server_on):
        a, b = pair()
        side = make(a)
        b.write(garbage)
        b.flush()
        a.incoming.pump()
        try:
            assert side.advance() is None  # it might still become a preamble
        except HopliteError:
            assert make is client_on or a.bytes_sent == 0 or garbage.startswith(b"HOPLITE")


def test_silence_is_nobodys_end_but_the_clocks() -> None:
    a, _ = pair()
    side = server_on(a, deadline=5.0)
    assert side.advance() is None
    assert side._handshake is not None
    assert side._handshake.deadline == 5.0


def test_what_follows_is_left_in_the_stream() -> None:
    talk = good()
    server = talk.sides["server"].stream
    while "server" not in talk.ends:
        talk.turn()
    server.write(b"first words")
    server.flush()
    talk.run()
    assert talk.sides["client"].stream.read() == b"first words"


def test_a_refusal_is_read_even_if_writing_has_failed() -> None:
    a, b = pair()
    client = client_on(a)
    client.advance()
    b.write(refusal("tls"))
    b.flush()
    a.incoming.pump()
    a.outgoing.cut_after(0)
    with pytest.raises(ProtocolError, match="it uses TLS"):
        client.advance()
