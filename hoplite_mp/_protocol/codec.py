"""Encoding of messages: frames with a length and a body, and an incremental decoder.

    frame   | head, 12 bytes | body: MessagePack array [name, field, ...] |
    head    | body length u32 | CRC-32 of the body u32 | CRC-32 of these 8 bytes u32 |
    beat    | a head with length 0 |           a heartbeat

Sans-io: bytes in, messages out. A length is checked against its checksum and the limit before
memory is allocated. The decoder accepts only the messages that the peer may send. Any other
message, and any malformed message, raises ProtocolError. After an error the decoder is unusable,
because it cannot find the next frame.

The checksums are for connections without TLS: small values are sent inside messages, and TCP's
16-bit checksum misses about one in ten thousand damaged packets. The length has a separate
checksum: with a damaged length, a reader could wait for bytes that never arrive, despite
heartbeats.
"""

from __future__ import annotations

import struct
import zlib
from typing import Generic, TypeVar, cast

import msgspec

from hoplite_mp._protocol.membership import Report
from hoplite_mp._protocol.messages import AnyMessage, ManagerToNode, NodeToManager
from hoplite_mp._protocol.terms import PromoteResponse, TermsToManager, TermsToNode
from hoplite_mp.errors import ProtocolError

# A request with SOURCES_MAX sources is 4.7 MB long. Higher: one peer can make this process
# allocate more memory.
FRAME_BYTES_MAX = 16 << 20

_HEAD = struct.Struct("<III")
_encoder = msgspec.msgpack.Encoder()

T = TypeVar("T")


def _head(body: bytes) -> bytes:
    sums = struct.pack("<II", len(body), zlib.crc32(body))
    return sums + struct.pack("<I", zlib.crc32(sums))


BEAT = _head(b"")


def encode(message: AnyMessage | Report | TermsToManager | TermsToNode | PromoteResponse) -> bytes:
    """The frame of one message. Raises ValueError if the frame is longer than peers accept."""
    body = _encoder.encode(message)
    if len(body) > FRAME_BYTES_MAX:
        name = type(message).__name__
        raise ValueError(f"{name} of {len(body)} bytes; a frame has at most {FRAME_BYTES_MAX}")
    return _head(body) + body


class Decoder(Generic[T]):
    """Turns the bytes from one peer into messages of the accepted types."""

    def __init__(self, accepted: object, frame_bytes_max: int = FRAME_BYTES_MAX) -> None:
        self._decoder = msgspec.msgpack.Decoder(cast("type[T]", accepted))
        self._frame_bytes_max = frame_bytes_max
        self._buffer = bytearray()
        self._failure: ProtocolError | None = None

    def feed(self, data: bytes | bytearray | memoryview) -> list[T]:
        """The messages completed by `data`, in order.

        Raises ProtocolError at the first illegal frame and at every later call; earlier messages in
        the same `data` are lost.
        """
        if self._failure is not None:
            raise ProtocolError(*self._failure.args)
        if data == BEAT and not self._buffer:  # fast path for an idle connection
            return []
        self._buffer += data
        try:
            return self._take()
        except ProtocolError as failure:
            self._failure = failure
            self._buffer.clear()
            raise

    @property
    def buffered(self) -> int:
        """Number of bytes of an incomplete frame; not 0 at the end of a truncated stream."""
        return len(self._buffer)

    def _take(self) -> list[T]:
        messages: list[T] = []
        begin, filled = 0, len(self._buffer)
        with memoryview(self._buffer) as view:
            while filled - begin >= _HEAD.size:
                body = begin + _HEAD.size
                length, body_sum, head_sum = _HEAD.unpack_from(view, begin)
                self._check(length, head_sum == zlib.crc32(view[begin : body - 4]))
                if filled - body < length:
                    break
                begin = body + length
                if length:
                    messages.append(self._decode(view[body:begin], body_sum))
        del self._buffer[:begin]
        return messages

    def _check(self, length: int, whole: bool) -> None:
        if not whole:
            raise ProtocolError("the head of a frame does not match its checksum")
        if length > self._frame_bytes_max:
            raise ProtocolError(
                f"frame of {length} bytes; at most {self._frame_bytes_max} are allowed"
            )

    def _decode(self, body: memoryview, body_sum: int) -> T:
        with body:
            if zlib.crc32(body) != body_sum:
                raise ProtocolError(f"a frame of {len(body)} bytes does not match its checksum")
            try:
                return self._decoder.decode(body)
            except (msgspec.MsgspecError, ValueError, TypeError, RecursionError) as error:
                raise ProtocolError(
                    f"invalid message in a frame of {len(body)} bytes: {error}"
                ) from error


def manager_decoder() -> Decoder[NodeToManager | Report | TermsToManager]:
    """A decoder of the messages that a node sends to its manager."""
    return Decoder(NodeToManager | Report | TermsToManager)


def node_decoder() -> Decoder[ManagerToNode | TermsToNode]:
    """A decoder of the messages that a manager sends to a node."""
    return Decoder(ManagerToNode | TermsToNode)


def promotion_decoder() -> Decoder[PromoteResponse | TermsToNode]:
    """A decoder of a standby's messages to `hoplite-mp promote`."""
    return Decoder(PromoteResponse | TermsToNode)
