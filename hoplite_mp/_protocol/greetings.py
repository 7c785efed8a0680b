"""The messages that two processes exchange before they trust each other, and their versions.

    preamble | "HOPLITE" | protocol version u8 |                      each side, once, first
    frame    | body length u16, little-endian | body: MessagePack array [name, field, ...] |

These few messages are read from every process that can reach the port. So they have a small limit,
fields of fixed or limited length, and a decoder that builds only what the type allows. The format
of the preamble never changes, so that two versions of this protocol can recognize each other.
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


PROTOCOL_VERSION = 9
MAGIC = b"HOPLITE"
PREAMBLE = MAGIC + bytes((PROTOCOL_VERSION,))

# The longest greetings are an Introduction and a refusal with its table, usually well below a
# quarter of this. A stranger can make this process hold this many bytes for each of
# `Config.pending_handshakes_max` connections.
GREETING_BYTES_MAX = 4 << 10
NONCE_BYTES = 32
MAC_BYTES = 32  # HMAC-SHA256
CLUSTER_BYTES = 16
REASON_CHARS_MAX = 1000
VERSIONS_MAX = 16
VERSION_CHARS_MAX = 64

# The role of a connection (its purpose), and the service that answers it. The proofs cover the
# role, so a connection cannot be used for another purpose.
SERVICE_OF = {
    "node": "manager", "tool": "manager", "voter": "manager",
    "peer": "node", "data": "node", "driver": "node",
}  # fmt: skip
ROLES = tuple(SERVICE_OF)
SERVICES = ("manager", "node")
# Why a caller is refused, and how its user can solve the problem.
REFUSED_TEXTS = {
    "tls": (
        "it speaks TLS and this side was told not to. Leave out tls=False (--no-tls), or start "
        "the cluster with it"
    ),
    "plain": (
        "it speaks no TLS. If it was started with tls=False (--no-tls) on purpose, say so here too"
    ),
    "role": "it does not serve this kind of connection: is that the right port?",
    "cluster": "it is another cluster than the one that was looked for",
    "token": (
        "the token is not the cluster's. Give every process the same one: token=, "
        "HOPLITE_MP_TOKEN, HOPLITE_MP_TOKEN_FILE or --token-file"
    ),
    "software": "its software does not match",
    "standby": (
        "it does not lead the cluster: it is a standby, or a manager that hears too few of the "
        "hosts. `hoplite-mp promote` makes a standby lead"
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
    """The server answers with its own nonce, its service and its cluster."""

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
    """The server accepts the client's proof, and proves under another label that it has the key,
    too."""

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
    """The sender's identity, after both proofs. host_id: its host; node: its number, None if it has
    none. link, answers: for a data connection under TLS, the number of the calling node's own link
    that will send over it, and of the called node's link that it answers (0: none)."""

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
    """The frame of one message. ValueError if it is too long for the other side."""
    body = _encoder.encode(message)
    if len(body) > GREETING_BYTES_MAX:
        raise ValueError(f"a greeting of {len(body)} bytes; {GREETING_BYTES_MAX} are allowed")
    return LENGTH.pack(len(body)) + body


def frame_length(head: bytes | bytearray) -> int:
    """The length of the body that follows. ProtocolError if the length is not allowed, before
    memory is allocated."""
    (length,) = LENGTH.unpack(head)
    if not 0 < length <= GREETING_BYTES_MAX:
        raise ProtocolError(
            f"a greeting of {length} bytes was announced; 1 to {GREETING_BYTES_MAX} are allowed"
        )
    return int(length)


def decode_body(body: bytes | bytearray) -> Greeting:
    """The message in a frame's body; ProtocolError for everything else."""
    try:
        return _decoder.decode(body)
    except (msgspec.MsgspecError, ValueError, TypeError, RecursionError) as error:
        # The stranger's bytes are not repeated: the text may end in a log or on a terminal.
        raise ProtocolError(f"{len(body)} bytes that are no greeting") from error


def refusal(code: str) -> bytes:
    """The complete answer of a server that refuses a caller before the handshake."""
    return PREAMBLE + encode_frame(Refused(code))


def printable(reason: str) -> str:
    """A text of the other side, without characters that could move a terminal's cursor."""
    return "".join(c if c.isprintable() or c == "\n" else "?" for c in reason)


def _exactly(name: str, value: bytes, nbytes: int) -> None:
    if not isinstance(value, bytes) or len(value) != nbytes:
        raise ValueError(f"{name} must be {nbytes} bytes")


# The software versions at both ends of a connection, and their compatibility.
#
# Functions travel as byte code and arrays as pickles. Between different minor versions that may
# fail late, or give wrong results without an error. So the handshake fails instead, with a table.


# Must match, like Python and this library: arrays are pickled by numpy, code by cloudpickle.
PACKAGES = ("cloudpickle", "numpy")
ABSENT = "-"

_MAJOR_MINOR = re.compile(r"(\d+)\.(\d+)")


def software_versions() -> dict[str, str]:
    """The versions of this process's software, by name, for the other side to compare.

    Versions are read from imported modules, and for other modules from the installation, so that no
    module is imported.
    """
    found = {"python": ".".join(map(str, sys.version_info[:3])), "hoplite_mp": __version__}
    for name in PACKAGES:
        version = getattr(sys.modules.get(name), "__version__", None)
        found[name] = version if isinstance(version, str) else _installed(name)
    return found | {"byte order": sys.byteorder}


def compare_versions(mine: Mapping[str, str], theirs: Mapping[str, str]) -> str | None:
    """None if the two are compatible; otherwise a table of the differences, for a message.

    Major and minor version must match; a value that is no version number must be the same; a name
    that is missing on one side is a difference.
    """
    names = [*mine, *(name for name in theirs if name not in mine)]
    rows = [
        (name, mine.get(name, ABSENT), theirs.get(name, ABSENT))
        for name in names
        if _essence(mine.get(name)) != _essence(theirs.get(name))
    ]
    if not rows:
        return None
    table = [("", "here", "there"), *rows]
    widths = [max(len(row[column]) for row in table) for column in range(2)]
    lines = [f"  {a:{widths[0]}}  {b:{widths[1]}}  {c}" for a, b, c in table]
    return "\n".join(lines)


def _essence(version: str | None) -> object:
    """The part of a version that must match."""
    match = _MAJOR_MINOR.match(version or "")
    return version if match is None else (int(match[1]), int(match[2]))


@functools.cache
def _installed(name: str) -> str:
    # Imported here because it takes some ms, and numpy and cloudpickle are nearly always loaded
    # already.
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(name)
    except PackageNotFoundError:
        return ABSENT
