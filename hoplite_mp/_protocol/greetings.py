"""Handshake messages, and the versions of protocol and software.

    preamble | "HOPLITE" | protocol version u8 |                      each side, once, first
    frame    | body length u16, little-endian | body: MessagePack array [name, field, ...] |

Any process that can reach the port can send these messages. So their size is limited, their fields
have fixed or limited lengths, and the decoder creates only values of the declared types. The format
of the preamble never changes, so that different versions of the protocol recognize each other.
"""

from __future__ import annotations

import functools
import re
import struct
import sys
from typing import TYPE_CHECKING, TypeAlias

import msgspec

from hoplite_mp._protocol.fields import Message, between, one_of, text
from hoplite_mp._version import __version__
from hoplite_mp.errors import ProtocolError

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = [
    "PREAMBLE",
    "Challenge",
    "Greeting",
    "Hello",
    "Introduction",
    "Proof",
    "Refused",
    "Welcome",
    "compare_versions",
    "decode_body",
    "encode_frame",
    "printable",
    "refusal",
    "software_versions",
]


PROTOCOL_VERSION = 11
MAGIC = b"HOPLITE"
PREAMBLE = MAGIC + bytes((PROTOCOL_VERSION,))

# The longest greetings (an Introduction, or a refusal with a table) usually have less than a
# quarter of this size. Unauthenticated peers can make this process buffer this many bytes for each
# of `Config.pending_handshakes_max` connections.
GREETING_BYTES_MAX = 4 << 10
NONCE_BYTES = 32
MAC_BYTES = 32  # HMAC-SHA256
CLUSTER_BYTES = 16
REASON_CHARS_MAX = 1000
VERSIONS_MAX = 16
VERSION_CHARS_MAX = 64

# The role of a connection (its purpose), and the service that answers it. The proofs include the
# role, so a connection cannot be used for another purpose.
SERVICE_OF = {
    "node": "manager", "tool": "manager", "voter": "manager",
    "peer": "node", "data": "node", "driver": "node",
}  # fmt: skip
ROLES = tuple(SERVICE_OF)
SERVICES = ("manager", "node")
# Reasons for a refusal, with a remedy.
REFUSED_TEXTS = {
    "tls": (
        "it uses TLS, which is disabled on this side. Remove tls=False (--no-tls) here, or start "
        "the cluster with it"
    ),
    "plain": (
        "it does not use TLS. If it was started with tls=False (--no-tls) on purpose, use that "
        "here too"
    ),
    "role": "it does not serve this kind of connection: is the port right?",
    "cluster": "it belongs to another cluster",
    "token": (
        "the token is not the cluster's. Give all processes the same token: token=, "
        "HOPLITE_MP_TOKEN, HOPLITE_MP_TOKEN_FILE or --token-file"
    ),
    "software": "its software does not match",
    "standby": (
        "it does not lead the cluster: it is a standby, or a manager without contact to enough "
        "hosts. `hoplite-mp promote` makes a standby the manager"
    ),
}
REFUSALS = tuple(REFUSED_TEXTS)

LENGTH = struct.Struct("<H")
_U64_MAX = (1 << 64) - 1
_encoder = msgspec.msgpack.Encoder()


class Hello(Message, frozen=True, tag="Hello"):
    """The client's first message. cluster: the required cluster; empty: any."""

    role: str
    nonce: bytes
    cluster: bytes = b""

    def __post_init__(self) -> None:
        one_of("role", self.role, ROLES)
        _exactly("nonce", self.nonce, NONCE_BYTES)
        if self.cluster:
            _exactly("cluster", self.cluster, CLUSTER_BYTES)


class Challenge(Message, frozen=True, tag="Challenge"):
    """The server's answer: its nonce, service and cluster."""

    service: str
    nonce: bytes
    cluster: bytes

    def __post_init__(self) -> None:
        one_of("service", self.service, SERVICES)
        _exactly("nonce", self.nonce, NONCE_BYTES)
        _exactly("cluster", self.cluster, CLUSTER_BYTES)


class Proof(Message, frozen=True, tag="Proof"):
    """Proves that the client has the key: a MAC over the transcript (see handshake.py)."""

    mac: bytes

    def __post_init__(self) -> None:
        _exactly("mac", self.mac, MAC_BYTES)


class Welcome(Message, frozen=True, tag="Welcome"):
    """The server accepts the client's proof, and proves under another label that it also has the
    key."""

    mac: bytes

    def __post_init__(self) -> None:
        _exactly("mac", self.mac, MAC_BYTES)


class Refused(Message, frozen=True, tag="Refused"):
    """The server ends the handshake. A client ignores `reason` unless the server has proved that it
    has the key."""

    code: str
    reason: str = ""

    def __post_init__(self) -> None:
        one_of("code", self.code, REFUSALS)
        text("reason", self.reason, REASON_CHARS_MAX)


class Introduction(Message, frozen=True, tag="Introduction"):
    """The sender's identity, after both proofs. host_id: its host; node: its number, or None. link,
    answers: for a data connection with TLS. A pair of nodes uses one such connection in each
    direction. link is the number of the caller's half. answers is the number of the other half to
    which it belongs; 0 if the other half does not exist yet."""

    host_id: int
    versions: dict[str, str]
    node: int | None = None
    link: int = 0
    answers: int = 0

    def __post_init__(self) -> None:
        between("host_id", self.host_id, 1, _U64_MAX)
        if self.node is not None:
            between("node", self.node, 0, (1 << 31) - 1)
        between("link", self.link, 0, _U64_MAX)
        between("answers", self.answers, 0, _U64_MAX)
        between("number of versions", len(self.versions), 0, VERSIONS_MAX)
        for name, version in self.versions.items():
            text("name of a version", name, VERSION_CHARS_MAX, 1)
            text(f"version of {name}", version, VERSION_CHARS_MAX, 1)


Greeting: TypeAlias = Hello | Challenge | Proof | Welcome | Refused | Introduction

_decoder = msgspec.msgpack.Decoder(Greeting)


def encode_frame(message: Greeting) -> bytes:
    """The frame of one message. Raises ValueError if the message is too long."""
    body = _encoder.encode(message)
    if len(body) > GREETING_BYTES_MAX:
        raise ValueError(f"greeting of {len(body)} bytes; at most {GREETING_BYTES_MAX} are allowed")
    return LENGTH.pack(len(body)) + body


def frame_length(head: bytes | bytearray) -> int:
    """The length of the body after this head. Raises ProtocolError for an illegal length, before
    memory is allocated."""
    (length,) = LENGTH.unpack(head)
    if not 0 < length <= GREETING_BYTES_MAX:
        raise ProtocolError(f"greeting of {length} bytes; 1 to {GREETING_BYTES_MAX} are allowed")
    return int(length)


def decode_body(body: bytes | bytearray) -> Greeting:
    """The message in a frame's body. Raises ProtocolError for any other body."""
    try:
        return _decoder.decode(body)
    except (msgspec.MsgspecError, ValueError, TypeError, RecursionError) as error:
        # The text omits the untrusted bytes, because it may appear in a log or on a terminal.
        raise ProtocolError(f"invalid greeting of {len(body)} bytes") from error


def refusal(code: str) -> bytes:
    """The answer of a server that refuses a caller before the handshake."""
    return PREAMBLE + encode_frame(Refused(code))


def printable(reason: str) -> str:
    """The peer's text, with control characters replaced by "?"."""
    return "".join(c if c.isprintable() or c == "\n" else "?" for c in reason)


def _exactly(name: str, value: bytes, nbytes: int) -> None:
    if not isinstance(value, bytes) or len(value) != nbytes:
        raise ValueError(f"{name} must be {nbytes} bytes")


# Compatibility of the software at both ends of a connection.
#
# Functions are sent as byte code, and arrays as pickles. If the minor versions differ, a program
# may fail late, or compute wrong results without an error. So the handshake fails, and its error
# shows a table of the differences.


# Packages whose versions must match, in addition to Python and this library: numpy pickles arrays,
# and cloudpickle pickles code.
PACKAGES = ("cloudpickle", "numpy")
ABSENT = "-"

_MAJOR_MINOR = re.compile(r"(\d+)\.(\d+)")


def software_versions() -> dict[str, str]:
    """The versions of this process's software, by name.

    They are read from modules that are already imported, or else from the installed metadata; no
    package is imported.
    """
    found = {"python": ".".join(map(str, sys.version_info[:3])), "hoplite_mp": __version__}
    for name in PACKAGES:
        version = getattr(sys.modules.get(name), "__version__", None)
        found[name] = version if isinstance(version, str) else _installed(name)
    return found | {"byte order": sys.byteorder}


def compare_versions(own: Mapping[str, str], other: Mapping[str, str]) -> str | None:
    """A table of the differences, for an error message; None if the two are compatible.

    Major and minor versions must match; values that are not version numbers must be equal. A name
    that is missing on one side is a difference.
    """
    names = [*own, *(name for name in other if name not in own)]
    rows = [
        (name, own.get(name, ABSENT), other.get(name, ABSENT))
        for name in names
        if _comparable(own.get(name)) != _comparable(other.get(name))
    ]
    if not rows:
        return None
    table = [("", "here", "there"), *rows]
    widths = [max(len(row[column]) for row in table) for column in range(2)]
    lines = [f"  {a:{widths[0]}}  {b:{widths[1]}}  {c}" for a, b, c in table]
    return "\n".join(lines)


def _comparable(version: str | None) -> object:
    """The part of a version that must match."""
    match = _MAJOR_MINOR.match(version or "")
    return version if match is None else (int(match[1]), int(match[2]))


@functools.cache
def _installed(name: str) -> str:
    # Imported here because it takes some ms, and numpy and cloudpickle are nearly always loaded.
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(name)
    except PackageNotFoundError:
        return ABSENT
