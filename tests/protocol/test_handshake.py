"""The handshake without any I/O: every cut of its bytes, and everybody who must not get in."""

from __future__ import annotations

import secrets
import struct
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hoplite_mp._protocol import greetings as g
from hoplite_mp._protocol.handshake import PLAIN, ClientHandshake, HandshakeOutcome, ServerHandshake
from hoplite_mp._protocol.secret import Secret
from hoplite_mp.errors import AuthError, HopliteError, ProtocolError

if TYPE_CHECKING:
    from collections.abc import Callable

KEY, CLUSTER = Secret(b"k" * 32), b"c" * 16
VERSIONS = {"python": "3.11.7", "numpy": "2.4.6"}
CERTIFICATE = b"S" * 32  # the hash of the server's own
CLIENT = g.Introduction(11, VERSIONS)
SERVER = g.Introduction(22, VERSIONS, 0)


def client(key: Secret = KEY, role: str = "node", **more: Any) -> ClientHandshake:
    more.setdefault("certificate_sha256", CERTIFICATE)
    return ClientHandshake(key, role, more.pop("mine", CLIENT), **more)


def server(key: Secret = KEY, service: str = "manager", **more: Any) -> ServerHandshake:
    more.setdefault("certificate_sha256", CERTIFICATE)
    mine = more.pop("mine", SERVER)
    return ServerHandshake(key, service, more.pop("cluster", CLUSTER), mine, **more)


@dataclass
class Run:
    """Both sides until neither has anything to say; what was said, and how it ended for each."""

    client: ClientHandshake
    server: ServerHandshake
    said: list[tuple[str, bytes]] = field(default_factory=list)
    errors: dict[str, HopliteError] = field(default_factory=dict)

    def __post_init__(self) -> None:
        sides = {"client": self.client, "server": self.server}
        moved = True
        while moved:
            moved = False
            for name, other in (("client", "server"), ("server", "client")):
                data = sides[name].outgoing()
                if data:
                    moved = True
                    self.said.append((name, data))
                    if other not in self.errors:
                        try:
                            assert sides[other].feed(data) == b""
                        except HopliteError as error:
                            self.errors[other] = error

    def by(self, name: str) -> bytes:
        return b"".join(data for who, data in self.said if who == name)


def test_handshake_completed_identifies_both_sides() -> None:
    run = Run(client(cluster=CLUSTER), server())
    assert run.errors == {}
    assert run.client.result == HandshakeOutcome("node", "manager", CLUSTER, SERVER)
    assert run.server.result == HandshakeOutcome("node", "manager", CLUSTER, CLIENT)
    assert run.client.wanted == run.server.wanted == 0


@pytest.mark.parametrize(
    ("role", "service"), [("tool", "manager"), ("peer", "node"), ("data", "node")]
)
def test_handshake_of_each_role_needs_its_service(role: str, service: str) -> None:
    assert Run(client(role=role), server(service=service)).errors == {}
    other = "node" if service == "manager" else "manager"
    run = Run(client(role=role), server(service=other))
    assert "does not serve this kind" in str(run.errors["client"])
    assert "server" in run.errors


def test_handshake_bytes_contain_no_secret_and_no_reuse() -> None:
    first, second = Run(client(), server()), Run(client(), server())
    for run in (first, second):
        assert KEY.reveal() not in run.by("client") + run.by("server")
    for who in ("client", "server"):
        assert first.by(who) != second.by(who)


# ---- cut anywhere


def recorded() -> tuple[bytes, bytes, Callable[[], ServerHandshake], Callable[[], ClientHandshake]]:
    """What both sides say in one good handshake, and twins of them with the same nonces."""
    nonces = secrets.token_bytes(32), secrets.token_bytes(32)
    make_client = lambda: client(nonce=nonces[0])  # noqa: E731
    make_server = lambda: server(nonce=nonces[1])  # noqa: E731
    run = Run(make_client(), make_server())
    return run.by("client"), run.by("server"), make_server, make_client


UP, DOWN, TWIN_SERVER, TWIN_CLIENT = recorded()


@given(st.lists(st.integers(0, len(UP)), max_size=12), st.binary(max_size=20))
def test_handshake_cut_anywhere_at_the_server_returns_the_rest(
    cuts: list[int], more: bytes
) -> None:
    twin = TWIN_SERVER()
    said = b""
    rest = b""
    places = sorted([0, *cuts, len(UP)])
    for begin, end in pairwise(places):
        rest += twin.feed(UP[begin:end] + (more if end == len(UP) and not rest else b""))
        said += twin.outgoing()
    assert said == DOWN
    assert twin.result is not None
    assert rest[: len(more)] == more


@given(st.lists(st.integers(0, len(DOWN)), max_size=12))
def test_handshake_cut_anywhere_at_the_client_completes(cuts: list[int]) -> None:
    twin = TWIN_CLIENT()
    said = twin.outgoing()
    for begin, end in pairwise(sorted([0, *cuts, len(DOWN)])):
        assert twin.feed(DOWN[begin:end]) == b""
        said += twin.outgoing()
    assert said == UP
    assert twin.result is not None


def test_handshake_wanted_bytes_end_at_completion() -> None:
    twin, place = TWIN_SERVER(), 0
    while twin.wanted:
        wanted = twin.wanted
        assert place + wanted <= len(UP)
        twin.feed(UP[place : place + wanted])
        place += wanted
    assert place == len(UP)
    assert twin.feed(b"what follows") == b"what follows"


@given(st.integers(0, len(UP) - 1), st.integers(1, 255))
def test_handshake_with_a_changed_byte_fails(place: int, change: int) -> None:
    """But for the last message: it is the introduction of one who is known by then."""
    proved = UP.rindex(b"Introduction")
    forged = bytearray(UP)
    forged[place] ^= change
    twin = TWIN_SERVER()
    try:
        twin.feed(bytes(forged))
    except HopliteError:
        assert twin.result is None
        with pytest.raises(HopliteError):
            twin.feed(UP)
        return
    # A length that became longer leaves it waiting; nothing else may go on.
    assert twin.result is None or place >= proved


@given(st.binary(max_size=300))
def test_handshake_with_noise_fails(noise: bytes) -> None:
    for twin in (server(), client()):
        for prefix in (b"", g.PREAMBLE):
            try:
                twin.feed(prefix + noise)
            except HopliteError:
                break
        assert twin.result is None
        assert len(twin._buffer) <= g.GREETING_BYTES_MAX + 2


# ---- who must not get in


def refused(run: Run, code_text: str, kind: type[HopliteError]) -> None:
    assert run.server.result is None
    assert run.client.result is None
    assert isinstance(run.errors["server"], kind)
    assert isinstance(run.errors["client"], kind)
    assert code_text in str(run.errors["client"])


def test_handshake_with_a_wrong_token_is_refused() -> None:
    refused(Run(client(key=Secret(b"x" * 32)), server()), "token is not the cluster's", AuthError)


def test_server_without_the_token_is_rejected_by_the_client() -> None:
    """One that accepts whatever the client proves still cannot prove itself."""
    impostor = server(key=Secret(b"x" * 32))
    victim = client()
    impostor.feed(victim.outgoing())
    victim.feed(impostor.outgoing())
    assert victim.outgoing()
    with pytest.raises(AuthError, match="does not have the token"):
        victim.feed(g.encode_frame(g.Welcome(secrets.token_bytes(32))))
    assert victim.result is None
    assert victim.outgoing() == b""  # not even its name


def test_role_currently_refused_gets_a_reason() -> None:
    """Only who has the token hears so; other roles are let in."""
    now = {"not_now": frozenset({"node"})}
    refused(Run(client(), server(**now)), "does not lead the cluster", ProtocolError)
    refused(Run(client(Secret(b"x" * 32)), server(**now)), "token", AuthError)
    assert not Run(client(role="voter"), server(**now)).errors


def test_client_without_a_token_is_refused() -> None:
    """Straight to the introduction, or a proof of nothing."""
    for message in (CLIENT, g.Proof(bytes(32))):
        twin = server()
        twin.feed(g.PREAMBLE + g.encode_frame(g.Hello("node", bytes(32))))
        with pytest.raises(HopliteError):
            twin.feed(g.encode_frame(message))
        assert twin.result is None


def test_recorded_handshake_replayed_is_refused() -> None:
    twin = server()
    with pytest.raises(AuthError):
        twin.feed(UP)
    assert twin.result is None
    later = client()
    with pytest.raises(AuthError):
        later.feed(DOWN)
    assert later.result is None


def test_relay_with_another_certificate_is_refused() -> None:
    """Somebody between two TLS connections passes everything on, unchanged."""
    run = Run(client(certificate_sha256=b"M" * 32), server())
    refused(run, "token is not the cluster's", AuthError)


@pytest.mark.parametrize("plain_side", ["client", "server"])
def test_relay_stripping_tls_from_one_side_is_refused(plain_side: str) -> None:
    sees = {"client": CERTIFICATE, "server": CERTIFICATE} | {plain_side: PLAIN}
    run = Run(client(certificate_sha256=sees["client"]), server(certificate_sha256=sees["server"]))
    refused(run, "token is not the cluster's", AuthError)


def test_proof_reflected_to_its_sender_is_refused() -> None:
    """The client's own proof as the server's, and the server's challenge thrown back at it."""
    victim = client()
    hello = g.decode_body(victim.outgoing()[len(g.PREAMBLE) + 2 :])
    assert isinstance(hello, g.Hello)
    challenge = g.Challenge("manager", hello.nonce, CLUSTER)
    victim.feed(g.PREAMBLE + g.encode_frame(challenge))
    proof = g.decode_body(victim.outgoing()[2:])
    assert isinstance(proof, g.Proof)
    with pytest.raises(AuthError):
        victim.feed(g.encode_frame(g.Welcome(proof.mac)))


def test_welcome_replayed_as_proof_is_refused() -> None:
    """A server's proof, won by a true client, is no proof for a second connection."""
    run = Run(TWIN_CLIENT(), TWIN_SERVER())
    down, frames = run.by("server")[len(g.PREAMBLE) :], []
    while down:
        length = g.frame_length(down[:2])
        frames.append(g.decode_body(down[2 : 2 + length]))
        down = down[2 + length :]
    welcome = frames[1]
    assert isinstance(welcome, g.Welcome)
    twin = TWIN_SERVER()  # even with the very same nonce
    up = client(nonce=TWIN_CLIENT()._hello.nonce).outgoing()
    twin.feed(up)
    with pytest.raises(AuthError):
        twin.feed(g.encode_frame(g.Proof(welcome.mac)))


@pytest.mark.parametrize(
    "change",
    [
        {"role": "tool"},
        {"nonce": b"n" * 32},
    ],
)
def test_hello_modified_in_transit_is_refused(change: dict[str, Any]) -> None:
    victim, twin = client(), server()
    hello = g.decode_body(victim.outgoing()[len(g.PREAMBLE) + 2 :])
    twin.feed(g.PREAMBLE + g.encode_frame(msgspec.structs.replace(hello, **change)))
    victim.feed(twin.outgoing())
    with pytest.raises(AuthError):
        twin.feed(victim.outgoing())


@pytest.mark.parametrize("change", [{"cluster": b"d" * 16}, {"nonce": b"n" * 32}])
def test_challenge_modified_in_transit_is_refused(change: dict[str, Any]) -> None:
    victim, twin = client(), server()
    twin.feed(victim.outgoing())
    challenge = g.decode_body(twin.outgoing()[len(g.PREAMBLE) + 2 :])
    victim.feed(g.PREAMBLE + g.encode_frame(msgspec.structs.replace(challenge, **change)))
    with pytest.raises(AuthError):
        twin.feed(victim.outgoing())


def test_client_of_another_cluster_is_refused() -> None:
    run = Run(client(cluster=b"d" * 16), server())
    refused(run, "another cluster", ProtocolError)
    victim = client(cluster=b"d" * 16)  # a server that does not care
    challenge = g.Challenge("manager", bytes(32), CLUSTER)
    with pytest.raises(ProtocolError, match="another cluster"):
        victim.feed(g.PREAMBLE + g.encode_frame(challenge))


def test_other_protocol_version_is_reported_on_both_sides() -> None:
    number = g.PROTOCOL_VERSION + 1
    other = g.MAGIC + bytes((number,))
    for twin in (client(), server()):
        twin.outgoing()
        text = f"version {number} of the protocol, and this side version"
        with pytest.raises(ProtocolError, match=text):
            twin.feed(other)
    assert twin.outgoing() == g.PREAMBLE  # so the other side learns ours


def test_other_software_versions_are_listed_on_both_sides() -> None:
    mine = g.Introduction(11, {"python": "3.12.1", "numpy": "2.4.0"})
    run = Run(client(mine=mine), server())
    refused(run, "software does not match", ProtocolError)
    assert str(run.errors["client"]).split()[-3:] == ["python", "3.12.1", "3.11.7"]
    assert str(run.errors["server"]).split()[-3:] == ["python", "3.11.7", "3.12.1"]


def test_refusal_text_of_an_unproved_server_is_not_shown() -> None:
    victim = client()
    with pytest.raises(ProtocolError) as caught:
        victim.feed(g.PREAMBLE + g.encode_frame(g.Refused("software", "\x1b[2J run rm -rf /")))
    assert "rm -rf" not in str(caught.value)


@pytest.mark.parametrize("code", g.REFUSALS)
def test_refusal_codes_have_texts(code: str) -> None:
    with pytest.raises(AuthError if code == "token" else ProtocolError) as caught:
        client().feed(g.refusal(code))
    assert len(str(caught.value)) > 20


@pytest.mark.parametrize(
    "opening", [b"GET / HTTP/1.1\r\n", b"\x16\x03\x01\x02\x00", b"\0", b"HOPE"]
)
def test_garbage_at_the_server_gets_no_reply(opening: bytes) -> None:
    twin = server()
    with pytest.raises(ProtocolError, match="does not use the protocol"):
        twin.feed(opening)
    assert twin.outgoing() == b""


def test_greeting_with_excessive_length_is_refused_immediately() -> None:
    twin = server()
    with pytest.raises(ProtocolError, match="greeting of 65535 bytes"):
        twin.feed(g.PREAMBLE + struct.pack("<H", 65535))
    assert twin.wanted == 0


@pytest.mark.parametrize(
    "body",
    [
        ["Hello", "node", b"short", b""],
        ["Hello", "king", bytes(32), b""],
        ["Hello", "node", bytes(32), b"xx"],
        ["Hello", "node", "0" * 32, b""],
        ["Hello", "node", bytes(32), b"", 1],
        ["Welcome", bytes(32)],
        ["Nobody"],
        {"type": "Hello"},
        7,
    ],
)
def test_malformed_hello_is_refused(body: Any) -> None:
    data = msgspec.msgpack.encode(body)
    with pytest.raises(ProtocolError):
        server().feed(g.PREAMBLE + struct.pack("<H", len(data)) + data)


@pytest.mark.parametrize(
    "fields",
    [
        (0, VERSIONS),
        (1 << 64, VERSIONS),
        (1, dict.fromkeys(map(str, range(17)), "1")),
        (1, {"": "1"}),
        (1, {"x": "1" * 65}),
        (1, VERSIONS, -1),
    ],
)
def test_malformed_introduction_is_refused(fields: tuple[Any, ...]) -> None:
    with pytest.raises(ValueError, match=r"host|version|node"):
        g.Introduction(*fields)


def test_largest_greetings_fit_into_the_limit() -> None:
    """ASCII as long as the checks allow; nobody reads more than GREETING_BYTES_MAX."""
    many = {f"{n:064}": "9" * 64 for n in range(16)}
    assert len(g.encode_frame(g.Introduction(1, many))) <= g.GREETING_BYTES_MAX
    assert len(g.encode_frame(g.Refused("software", "é" * 1000))) <= g.GREETING_BYTES_MAX
